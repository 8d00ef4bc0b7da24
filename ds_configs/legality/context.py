"""Legality of torch context parallelism with FSDP2: plain numbers and names in, faults out.

After accelerate 1.15.0 (parallelism_config.py, big_modeling.py), transformers 5.17.0 (trainer.py,
`_prepare_context_parallel_inputs`) and torch 2.13.0 (ring attention with head-tail load balancing, which gives each
rank one part from the front and one from the back: 2 * cp parts).
"""

from __future__ import annotations

from collections.abc import Iterable

from ..specs.errors import Fault
from .candidate import divides
from .sequence import FULL_ATTENTION, RECURRENT_MODELS, instead_of_context_parallelism, rotation_faults

OTHER_ATTENTION = frozenset(
    [
        *("bloom", "codegen", "ctrl", "dbrx", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox"),
        *("gpt_neox_japanese", "gptj", "jetmoe", "mpt", "openai-gpt"),
    ]
)
"""Families whose attention is not called `self_attn`: from modules of that name alone accelerate 1.15.0 takes
the mask, which is of a part of the sequence. GPT-2 ended in gloo, with sizes that did not match."""


def context_parallel_faults(
    *,
    context_parallel_size: int,
    engine: str,
    world_size: int,
    seq_len_tokens: int | None = None,
    attention: str = "sdpa",
    model_type: str = "",
    layer_types: Iterable[str] = (),
    attention_window_tokens: int | None = None,
    has_equal_head_widths: bool = True,
    mask_dimensions: int = 2,
    packed: bool = False,
    left_padded: bool = False,
    sequence_parallel_size: int = 1,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    rope_type: str = "",
    dp_replicate: int = 1,
    dp_shard: int | None = None,
    names_self_attention: bool | None = None,
) -> list[Fault]:
    """Return everything that forbids ring attention over `context_parallel_size` ranks.

    Args:
        context_parallel_size: Ranks that share a sequence.
        engine: What trains: `deepspeed`, `fsdp2`, `ddp` or `single`.
        world_size: All ranks.
        seq_len_tokens: Length of every batch; `None` where it is not known yet.
        attention: The model's attention implementation.
        model_type: As in `config.json`.
        layer_types: As in `config.json`; empty where every layer is of the model's one type.
        attention_window_tokens: Tokens that a layer looks back; `None` for all.
        has_equal_head_widths: Whether keys are as wide as values (they are not in multi-head latent attention).
        mask_dimensions: Dimensions of the attention mask in a batch.
        packed: Whether documents share a row.
        left_padded: Whether padding stands before tokens.
        sequence_parallel_size: Ranks of Ulysses sequence parallelism.
        tensor_parallel_size: Ranks of tensor parallelism.
        pipeline_parallel_size: Pipeline stages.
        rope_type: How rotary angles are scaled, as in `config.json`.
        dp_replicate: Replicas of the sharded model.
        dp_shard: Ranks that FSDP2 shards over beside cp; `None` for what is left.
        names_self_attention: Whether modules are called `self_attn`; `None` for what is known of the family.
    """
    size = context_parallel_size
    if size == 1:
        return []
    if size < 1:
        return [Fault(where="cp", value=size, rule="must be a positive number of ranks", fix="use 1 to switch it off")]
    faults = [fault for fault in (divides("cp", size, world_size, "the ranks"), _length(size, seq_len_tokens)) if fault]
    if engine != "fsdp2":
        fix = "train with FSDP2 (--strategy fsdp2), or use sp with DeepSpeed"
        faults.append(Fault(where="cp", value=size, rule=f"runs on FSDP2 and not on {engine}", fix=fix))
    if dp_replicate > 1 and dp_shard == 1:
        rule = "with replicas needs parameters that are sharded besides (dp_shard > 1)"
        fix = "use dp_replicate = 1 (--strategy fsdp2) or dp_shard > 1 (a smaller --context-parallel-size)"
        faults.append(Fault(where="cp", value=size, rule=rule, fix=fix))
    instead = instead_of_context_parallelism(
        model_type, layer_types, attention_window_tokens, has_equal_head_widths=has_equal_head_widths
    )
    faults += _attention(size, attention, model_type, layer_types, attention_window_tokens, instead)
    if not has_equal_head_widths:
        # SDPA takes its plain kernel then, whose mask no rank's part of the sequence is added to: torch fails.
        rule = "passes keys and values of one width around, and latent attention has keys wider than values"
        faults.append(Fault(where="cp", value=size, rule=rule, fix="use cp = 1"))
    if names_self_attention is False or (names_self_attention is None and model_type in OTHER_ATTENTION):
        rule = f"finds no attention to run in {model_type or 'the model'}: accelerate looks for modules named self_attn"
        faults.append(Fault(where="cp", value=size, rule=rule, fix=instead))
    faults += rotation_faults(rope_type)
    faults += _mask(mask_dimensions, packed=packed, left_padded=left_padded)
    others = {"sp": sequence_parallel_size, "tp": tensor_parallel_size, "pp": pipeline_parallel_size}
    found = [f"{name} = {other}" for name, other in others.items() if other > 1]
    if found:
        rule = f"context parallelism does not combine with {', '.join(found)}"
        faults.append(Fault(where="cp", value=size, rule=rule, fix="set one of them to 1"))
    return faults


def _length(size: int, seq_len: int | None) -> Fault | None:
    if seq_len is None or seq_len % (2 * size) == 0:
        return None
    below = seq_len // (2 * size) * 2 * size
    near = f"{below} or {below + 2 * size}" if below else str(2 * size)
    rule = f"must be a multiple of 2 * cp ({seq_len} % {2 * size} = {seq_len % (2 * size)})"
    return Fault(where="seq_len", value=seq_len, rule=rule, fix=f"nearest legal values: {near}")


def _attention(
    size: int, attention: str, model_type: str, layer_types: Iterable[str], window: int | None, instead: str
) -> list[Fault]:
    faults = []
    if attention != "sdpa":
        fix = "load the model with attn_implementation='sdpa'"
        rule = "context parallelism replaces torch's scaled_dot_product_attention alone"
        faults.append(Fault(where="attn_implementation", value=attention, rule=rule, fix=fix))
    other = sorted(set(layer_types) - FULL_ATTENTION)
    if other or model_type in RECURRENT_MODELS:
        kinds = ", ".join(other) or f"layers of {model_type}"
        rule = f"expresses full causal attention alone, and the model has {kinds}"
        faults.append(Fault(where="cp", value=size, rule=rule, fix=instead))
    elif not set(layer_types) and window is not None:
        rule = f"needs full attention, and the model looks back {window} tokens"
        faults.append(Fault(where="cp", value=size, rule=rule, fix=instead))
    return faults


def _mask(dimensions: int, *, packed: bool, left_padded: bool) -> list[Fault]:
    faults = []
    if dimensions > 2:
        rule = "masks of more than 2 dimensions cannot be sharded with the sequence"
        fix = "give a mask [batch, sequence] of right padding, or none"
        faults.append(Fault(where="attention_mask", value=f"{dimensions}-D", rule=rule, fix=fix))
    if left_padded:
        rule = "is dropped, so that tokens would attend to padding on their left"
        faults.append(Fault(where="attention_mask", value="left padding", rule=rule, fix="pad on the right"))
    if packed:
        rule = "documents that share a row would attend to those before them"
        faults.append(Fault(where="position_ids", value="packed", rule=rule, fix="give every document its own row"))
    return faults
