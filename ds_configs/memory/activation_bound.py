"""Upper bound of activation bytes from the shapes of a model's parameters, for families without traced coefficients.

A layer is the sum of its matrices, norms, experts and attention scores, whatever kinds of layers a model mixes: every
matrix keeps its input and what follows from its output, as often as the least economical stored family does.
`tests/ds_configs/memory/test_activation_bound.py` holds it against all of them. Linear attention and state-space layers
are counted with their fused kernels installed (flash-linear-attention, mamba-ssm): the fallback of transformers, which
keeps a state for each token, is not.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from math import ceil

from ..specs.errors import Fault, UsageError
from ..specs.job import TrainingJob
from ..specs.model import ModelSpec, ParameterShape
from .activations import ActivationEstimate, Mode

BOUND_SOURCE = "upper bound from the model's structure"
"""How a plan says that its activations are bounded rather than traced."""

_ELEMENT_BYTES: dict[Mode, int] = {"bf16": 2, "bf16_autocast": 4, "fp32": 4}
_AROUND_ATTENTION = 1.5
"""Copies of each side of a projection in attention: queries before and after head norms and rotation."""
_INSIDE_MLP = 2.5
"""Copies of the inner side of each MLP matrix: GPT-2's GELU in single operators keeps six of its inner width."""
_NORM_ELEMENT_BYTES = 16
"""Bytes that a norm keeps for each element: input, normalised and scaled copies in fp32, and the output."""
_SCORE_BYTES = 10
"""Bytes of a score in eager attention: fp32 softmax 4, its copy in the compute type 2 or 4, a dropout mask 1."""
_SCORE_TRANSIENT_BYTES = 14
_LOGIT_BYTES = {"forward": 12, "kept": 8, "backward": 16}
"""Bytes of a logit in the loss, capped ones (Gemma-2) included: an fp32 copy, log-probabilities, gradients."""
_EVERY_EXPERT = frozenset({"llama4", "llama4_text"})
"""Mixtures whose tokens pass through all experts, times zero where not chosen (transformers 5.17, `Llama4TextMoe`)."""
_MERGED_PATCHES = 4
"""Patches that a vision tower without a position table merges to one token of the text (Qwen2-VL's 2 x 2)."""
_HEAD_WIDTH = 64
"""Narrowest common head of a vision or audio tower, whose heads the model specification does not count."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stack:
    """Layers with one name pattern."""

    name: str
    layers: int
    tokens: int
    """Tokens or patches of one sequence that pass through it."""
    parameters: tuple[ParameterShape, ...]


def bounded_activations(model: ModelSpec, job: TrainingJob, *, micro_batch_size: int, mode: Mode) -> ActivationEstimate:
    """Return activation bytes of one micro-batch that a training step of the model does not exceed.

    `saved = sum over layers of tokens * (copies * matrix sides + norms + routed experts) + scores`. Scores count where
    attention is eager: `heads * tokens^2` for each sequence.

    Raises:
        UsageError: the model convolves images or sound, or says nowhere how many patches it sees.
    """
    stacks = _stacks(model, job)
    element = _ELEMENT_BYTES[mode]
    layers = model.dimensions.num_layers
    covered = sum(stack.layers for stack in stacks)
    # Layers that share their parameters (ALBERT) run more often than there are tensors.
    repeats = max(1, ceil(layers / covered)) if covered else 1
    # SDPA turns a mask of truth values into one of numbers in every layer.
    mask = element * job.seq_len_tokens if _has_mask(model, job) else 0
    sizes = [
        micro_batch_size * (_stack_bytes(stack, model, element) + stack.layers * stack.tokens * mask)
        for stack in stacks
    ]
    scores = [micro_batch_size * stack.layers * _scores(stack, model) for stack in stacks]
    inputs = [micro_batch_size * stack.tokens * _width(stack, model) * element * stack.layers for stack in stacks]
    saved = repeats * (sum(sizes) + _SCORE_BYTES * sum(scores))
    checkpointed = repeats * sum(inputs)
    largest = max((size // stack.layers for size, stack in zip(sizes, stacks, strict=True)), default=0)
    largest_scores = max((count // stack.layers for count, stack in zip(scores, stacks, strict=True)), default=0)
    tokens = micro_batch_size * max([job.seq_len_tokens, *(stack.tokens for stack in stacks)])
    outside = tokens * _outside_token_bytes(model, element)
    if _has_mask(model, job):
        # Eager attention has a mask of numbers for each kind of layer (Gemma-2: two, in fp32).
        outside += (8 if model.attention == "eager" else 6) * tokens * job.seq_len_tokens
    if not layers:
        outside, saved, checkpointed = outside + saved, 0, 0
    # A model without a vocabulary takes the mean of its last hidden states.
    logits = (
        micro_batch_size * job.seq_len_tokens * model.dimensions.vocab_size or tokens * model.dimensions.hidden_size
    )
    # With a small vocabulary the last norm's own backward pass, which is in fp32, is the largest.
    beside_logits = tokens * (64 + max(4 * element, _NORM_ELEMENT_BYTES) * model.dimensions.hidden_size)
    return ActivationEstimate(
        saved_bytes_per_layer=-(-saved // max(1, layers)),
        checkpointed_bytes_per_layer=-(-checkpointed // max(1, layers)),
        outside_layer_bytes=outside,
        backward_transient_bytes=largest // 2 + _SCORE_TRANSIENT_BYTES * largest_scores,
        recompute_backward_transient_bytes=largest
        + largest // 2
        + (_SCORE_BYTES + _SCORE_TRANSIENT_BYTES) * largest_scores,
        forward_transient_bytes=largest + _SCORE_TRANSIENT_BYTES * largest_scores,
        loss_forward_peak_bytes=_LOGIT_BYTES["forward"] * logits + beside_logits,
        loss_kept_bytes=_LOGIT_BYTES["kept"] * logits + beside_logits,
        loss_backward_peak_bytes=_LOGIT_BYTES["backward"] * logits + beside_logits,
        autocast_weight_copy_bytes_per_parameter=2 if mode == "bf16_autocast" else 0,
        source=f"{BOUND_SOURCE}, {model.model_type}, {mode}",
    )


def _stacks(model: ModelSpec, job: TrainingJob) -> list[_Stack]:
    grouped: dict[str, list[ParameterShape]] = defaultdict(list)
    for parameter in model.parameters:
        if parameter.in_layer:
            grouped[parameter.name.split(".*.")[0]].append(parameter)
    found = []
    for name, parameters in grouped.items():
        if any(_convolves(parameter) for parameter in parameters):
            raise UsageError(_unbounded(model, f"{name} convolves, and its feature maps are in no parameter's shape"))
        layers = max(parameter.count for parameter in parameters)
        tokens = _tokens(name, model, job)
        found.append(_Stack(name=name, layers=layers, tokens=tokens, parameters=tuple(parameters)))
    if not found:
        raise UsageError(_unbounded(model, "it has no repeated layers"))
    if model.task != "seq2seq":
        return found
    # A decoder's cross attention reads all tokens of the encoder.
    most = max(stack.tokens for stack in found)
    return [_Stack(name=stack.name, layers=stack.layers, tokens=most, parameters=stack.parameters) for stack in found]


def _unbounded(model: ModelSpec, why: str) -> Fault:
    return Fault(
        where="model",
        value=model.architecture,
        rule=f"has no stored activations, and its structure gives no upper bound: {why}",
        fix="trace it with --trace-activations",
    )


def _convolves(parameter: ParameterShape) -> bool:
    """Whether a matrix slides over positions; a depthwise one over tokens (Mamba) keeps no more than its output."""
    if parameter.kind == "experts":
        return False
    return len(parameter.shape) >= 4 or (len(parameter.shape) == 3 and parameter.name.endswith("conv.weight"))


def _tokens(stack: str, model: ModelSpec, job: TrainingJob) -> int:
    """Return what passes through a stack: tokens of text, or patches and frames where a table of its own counts them.

    The table is the one whose name has most in common with the stack's; a stack with a vocabulary reads text.
    """
    text, table, common = 0, 0, 0
    for parameter in model.parameters:
        if parameter.in_layer or len(parameter.shape) < 2:
            continue
        shared = _shared_parts(stack, parameter.name)
        if parameter.shape[0] == model.dimensions.vocab_size:
            text = max(text, shared)
        elif "position" in parameter.name and shared >= common:
            table, common = max(parameter.shape[:-1]), shared
    is_text = text > common or (text == common and text > 0) or not table
    modality = any(word in stack for word in ("vision", "visual", "image", "audio", "speech"))
    if modality or not model.dimensions.vocab_size:
        if table and (not model.dimensions.vocab_size or common >= text):
            return table
        if not model.dimensions.vocab_size:
            raise UsageError(_unbounded(model, "no position table says how many patches or frames it sees"))
        return _MERGED_PATCHES * job.seq_len_tokens
    return job.seq_len_tokens if is_text else max(job.seq_len_tokens, table)


def _shared_parts(left: str, right: str) -> int:
    count = 0
    for one, other in zip(left.split("."), right.split("."), strict=False):
        if one != other:
            break
        count += 1
    return count


def _stack_bytes(stack: _Stack, model: ModelSpec, element: int) -> int:
    """Bytes that all layers of a stack keep of one sequence, without scores."""
    size = model.dimensions
    width = _width(stack, model)
    total: float = stack.layers * (4 * size.num_attention_heads + 16)
    for parameter in stack.parameters:
        shape = parameter.shape
        if parameter.kind == "norm":
            # Head norms hold one head's width and run over all heads.
            elements = size.query_size if shape[-1] == size.head_dim and shape[-1] < width else shape[-1]
            total += parameter.count * _NORM_ELEMENT_BYTES * elements
        elif parameter.kind == "experts" and len(shape) == 3:
            routed = size.num_experts if model.model_type in _EVERY_EXPERT else max(1, size.experts_per_token)
            inner = shape[1] if shape[2] == width else shape[2]
            total += parameter.count * routed * (element * (_INSIDE_MLP * inner + 2 * width) + 8)
        elif len(shape) == 2 and parameter.kind in ("linear", "router", "other"):
            total += parameter.count * element * _copies(parameter, width, size.num_experts, size.experts_per_token)
    return ceil(stack.tokens * total)


def _copies(parameter: ParameterShape, width: int, experts: int, experts_per_token: int) -> float:
    """Elements that a matrix and what follows it keep for each token."""
    rows, columns = parameter.shape
    if parameter.group != "mlp":
        return _AROUND_ATTENTION * (rows + columns)
    inner = rows if columns == width else columns if rows == width else max(rows, columns)
    elements = _INSIDE_MLP * inner + width
    if ".experts." in parameter.name and experts:
        # Each expert is a module of its own, and a token passes through few of them.
        return elements * max(1, experts_per_token) / experts
    return elements


def _width(stack: _Stack, model: ModelSpec) -> int:
    """Width of the residual stream: that of the norms of a tower with its own."""
    widths = [parameter.shape[-1] for parameter in stack.parameters if parameter.kind == "norm"]
    hidden = model.dimensions.hidden_size
    return hidden if not widths or hidden in widths else max(widths)


def _scores(stack: _Stack, model: ModelSpec) -> int:
    """Scores of one layer and sequence where attention is eager; disentangled and cross attention have more."""
    if model.attention != "eager" or model.dimensions.num_attention_heads < 1:
        return 0
    heads = max(model.dimensions.num_attention_heads, _width(stack, model) // _HEAD_WIDTH)
    attentions = 2 if model.task == "seq2seq" and "decoder" in stack.name else 1
    relative = any("rel_embeddings" in parameter.name for parameter in model.parameters)
    return heads * stack.tokens**2 * (3 if relative else attentions)


def _has_mask(model: ModelSpec, job: TrainingJob) -> bool:
    window = model.sliding_window
    return model.attention == "eager" or bool(window and job.seq_len_tokens > window)


def _outside_token_bytes(model: ModelSpec, element: int) -> int:
    """Bytes that surround the layers for each token: embeddings, final norm, projections between towers, rotation."""
    size = model.dimensions
    total = 4 * (element + 4) * size.hidden_size + 8 * size.head_dim + 16
    for parameter in model.parameters:
        if not parameter.in_layer and parameter.group not in ("embedding", "head", "norm") and len(parameter.shape) > 1:
            total += 2 * element * (parameter.shape[0] + parameter.shape[-1])
    return total
