"""Layouts, models and data of the runs that must equal one process; `settings.py` has what a run may have besides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine_settings import engine_settings, fsdp2_settings
from shardwright.ds_configs.legality.combinations import columns_of
from shardwright.ds_configs.specs.layout import Layout

STEPS = 3
MICRO_STEP_SAMPLES = 4
"""Sequences of one micro-step over all ranks; an optimizer step has as many for each accumulated micro-batch."""
EVALUATED = 7
"""Samples of an evaluation: no multiple of the ranks' batches, so that the last batch is incomplete."""
ADAM_EPSILON = 1e-6
"""Above the rounding of gradients that are near zero, of which Adam with a smaller one makes whole steps."""
MAX_GRAD_NORM = 0.5
"""Below every gradient norm of these runs, so that each step is clipped."""
LOSS_TOLERANCE = 1e-5
"""Largest difference of a step's loss from the single process's, in nats for each token."""
WEIGHT_TOLERANCE = 1e-4
"""Largest difference of a tensor's elements from the single process's, over the tensor's largest absolute element."""
VOCAB_SIZE = 128
SHORTEST, LONGEST = 5, 24
"""Tokens of a sample: micro-batches differ in length, and half of what they hold is padding."""
IGNORED = -100


def _deepspeed(zero_stage: int, data: int = 1, **axes: Any) -> Layout:
    data_axis = {"dp_shard": data} if zero_stage else {"dp_replicate": data}
    return Layout(engine="deepspeed", zero_stage=zero_stage, **data_axis, **axes)


LAYOUTS: dict[str, Layout] = {
    "single": Layout(engine="single"),
    "ddp": Layout(engine="ddp", dp_replicate=2),
    **{f"zero{stage}": _deepspeed(stage, 2) for stage in range(4)},
    "fsdp2": Layout(engine="fsdp2", dp_shard=2),
    **{f"zero{stage}-offload": _deepspeed(stage, 2, offload_optimizer="cpu") for stage in (1, 2, 3)},
    "zero3-offload-param": _deepspeed(3, 2, offload_optimizer="cpu", offload_param="cpu"),
    "fsdp2-offload": Layout(engine="fsdp2", dp_shard=2, offload_optimizer="cpu", offload_param="cpu"),
    **{f"sp2-zero{stage}": _deepspeed(stage, sp=2) for stage in range(4)},
    "sp2-dp2-zero2": _deepspeed(2, 2, sp=2),
    "sp2-dp2-zero3": _deepspeed(3, 2, sp=2),
    "cp2-fsdp2": Layout(engine="fsdp2", cp=2),
    **{f"tp2-zero{stage}": _deepspeed(stage, tp=2) for stage in range(3)},
    "tp2-zero2-offload": _deepspeed(2, tp=2, offload_optimizer="cpu"),
    "tp2-dp2-zero0": _deepspeed(0, 2, tp=2),
    "tp2-dp2-zero1": _deepspeed(1, 2, tp=2),
    "pp2-zero0": _deepspeed(0, pp=2),
    "pp2-zero1": _deepspeed(1, pp=2),
    "pp4-zero1": _deepspeed(1, pp=4),
    "pp2-dp2-zero0": _deepspeed(0, 2, pp=2),
    "pp2-dp2-zero1": _deepspeed(1, 2, pp=2),
    "tp2-pp2-zero0": _deepspeed(0, tp=2, pp=2),
    "tp2-pp2-zero1": _deepspeed(1, tp=2, pp=2),
    **{f"ep2-zero{stage}": _deepspeed(stage, 2, ep=2) for stage in range(4)},
    "ep2-dp2-zero2": _deepspeed(2, 4, ep=2),
    "ep2-dp2-zero3": _deepspeed(3, 4, ep=2),
}
"""Every layout by name. ZeRO adds the gradients of a shared sequence in its first stages and averages them in the
third: there is one of each."""

_LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
_DEEPSEEK = {
    **_LATENT,
    **{"num_key_value_heads": 4, "n_routed_experts": 8, "n_shared_experts": 1, "moe_intermediate_size": 24},
    **{"first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "n_group": 4, "topk_group": 1},
    "head_dim": None,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 24, "norm_topk_prob": True},
    "deepseek_v2": {**_DEEPSEEK, "topk_method": "greedy"},
    "deepseek_v3": {**_DEEPSEEK, "norm_topk_prob": True},
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    **{name: {} for name in ("gpt_neox", "gemma", "gemma2", "gemma3_text", "granite", "mistral")},
    **{name: {} for name in ("olmo2", "phi3", "qwen2", "qwen3")},
    "starcoder2": {"residual_dropout": 0.0, "embedding_dropout": 0.0},
}
"""Model types and the sizes that they have besides the common ones."""
_LAYERS = {"gpt2": "GPT2Block", "gpt_neox": "GPTNeoXLayer", "gemma3_text": "Gemma3DecoderLayer"}
"""Classes of layers, which FSDP2 wraps, where the name of the family does not say it."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run: a layout, what the run has besides, and the model that is trained."""

    layout: str
    """A key of `LAYOUTS`."""
    settings: tuple[str, ...] = ()
    """Keys of `SETTINGS`."""
    accumulation: int = 1
    model: str = ""
    """A key of `FAMILIES`; empty for a mixture where experts are needed, and for a Llama elsewhere."""

    @property
    def name(self) -> str:
        return "-".join(filter(None, (self.layout, self.model, *self.settings, f"x{self.accumulation}")))

    @property
    def full_layout(self) -> Layout:
        """The layout; however many ranks see different samples, a micro-step has the same ones."""
        layout = LAYOUTS[self.layout]
        micro = MICRO_STEP_SAMPLES // layout.data_parallel_size
        return replace(layout, micro_batch_size=micro, gradient_accumulation_steps=self.accumulation)

    @property
    def family(self) -> str:
        needs_experts = self.full_layout.ep > 1 or "balance_loss" in self.settings
        return self.model or ("mixtral" if needs_experts else "llama")

    @property
    def columns(self) -> tuple[str, ...]:
        return columns_of(self.full_layout)

    def arguments(self, directory: Path) -> dict[str, Any]:
        """Return keys of `TrainingArguments` without settings."""
        layout = self.full_layout
        arguments = engine_settings(
            layout.engine,
            layout.micro_batch_size,
            deepspeed_config(layout),
            output_dir=str(directory),
            gradient_accumulation_steps=self.accumulation,
            per_device_eval_batch_size=2,
            optim="adamw_torch",
            adam_epsilon=ADAM_EPSILON,
            learning_rate=1e-3,
            weight_decay=0.1,
            max_grad_norm=MAX_GRAD_NORM,
            max_steps=STEPS,
            include_num_input_tokens_seen="all",
        )
        if layout.engine == "fsdp2":
            offload = {"offload_params": True} if layout.offload_param == "cpu" else {}
            layer = _LAYERS.get(self.family, f"{self.family.title().replace('_', '')}DecoderLayer")
            arguments |= fsdp2_settings(layer, **offload)
        return arguments


def deepspeed_config(layout: Layout) -> dict[str, Any]:
    """Return a small DeepSpeed configuration; buckets hold several tensors but not the whole model."""
    elements = 20_000 if layout.ep > 1 else 12_000
    sizes: dict[str, Any] = {"reduce_bucket_size": elements, "allgather_bucket_size": elements}
    if layout.zero_stage == 3:
        sizes = {"reduce_bucket_size": elements, "stage3_param_persistence_threshold": 100}
    for part in ("optimizer", "param"):
        if getattr(layout, f"offload_{part}") == "cpu":
            sizes[f"offload_{part}"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": layout.zero_stage or 0, **sizes},
        "bf16": {"enabled": "auto"},
    }


def samples() -> list[dict[str, Any]]:
    """Return ragged samples of few distinct tokens, which a step can learn, enough for the steps of every case.

    Prompts of different lengths have no labels, and one sample has none at all.
    """
    import torch

    draw = torch.Generator().manual_seed(3)
    weights = 0.5 ** torch.arange(10)
    found = []
    for index in range(60):
        length = int(torch.randint(SHORTEST, LONGEST + 1, (1,), generator=draw))
        tokens_T = 7 + 11 * torch.multinomial(weights, length, replacement=True, generator=draw)
        labels_T = tokens_T.clone()
        labels_T[: length if index == 5 else index % 4] = IGNORED
        found.append({"input_ids": tokens_T, "labels": labels_T})
    return found


def padded(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    import torch

    longest = max(len(row["input_ids"]) for row in rows)
    shape = (len(rows), longest)
    batch = {
        "input_ids": torch.zeros(shape, dtype=torch.long),
        "attention_mask": torch.zeros(shape, dtype=torch.long),
        "labels": torch.full(shape, IGNORED),
    }
    for index, row in enumerate(rows):
        length = len(row["input_ids"])
        batch["input_ids"][index, :length] = torch.as_tensor(row["input_ids"])
        batch["attention_mask"][index, :length] = 1
        batch["labels"][index, :length] = torch.as_tensor(row["labels"])
    return batch


def probe_batch() -> dict[str, Any]:
    """Return two whole sequences on which live engines and reloaded checkpoints are compared."""
    import torch

    draw = torch.Generator().manual_seed(5)
    return {"input_ids": torch.randint(1, VOCAB_SIZE, (2, 16), generator=draw)}


def make_model(family: str, sizes: Mapping[str, Any], *, seed: int = 0, layers: int = 2) -> Any:
    """Return an fp32 model, its norms and biases away from their neutral values."""
    import torch
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, set_seed

    common = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "initializer_range": 0.1,
        "num_experts_per_tok": 2,
        "output_router_logits": False,
        "tie_word_embeddings": False,
        "use_cache": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    chosen = {name: value for name, value in (common | FAMILIES[family] | dict(sizes)).items() if value is not None}
    set_seed(seed)
    config = AutoConfig.for_model(family, **chosen)
    # `AutoModelForCausalLM.from_config` would partition it under ZeRO-3.
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).float()
    draw = torch.Generator().manual_seed(3)
    biases = [each for name, each in model.named_buffers() if name.endswith("e_score_correction_bias")]
    with torch.no_grad():
        for tensor in [each for each in model.parameters() if each.dim() == 1] + biases:
            tensor.add_(torch.randn(tensor.shape, generator=draw) * 0.05)
    return model
