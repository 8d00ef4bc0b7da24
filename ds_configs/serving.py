"""Plan of a vLLM server: the request, its arguments, and the memory of weights and key/value cache."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from math import ceil
from typing import Any, Literal

from .specs.errors import ConfigError, DoesNotFitError, UsageError
from .specs.hardware import HardwareSpec
from .specs.model import Dimensions, ModelSpec
from .specs.units import gigabytes

RUNTIME_BYTES = 1_500_000_000
"""Assumed memory of context, libraries, communicators and captured graphs of one process on a GPU."""
_EVERYWHERE = re.compile(r"(kv_a_proj\w*|q_a_proj|kv_a_layernorm|mlp\.gate|router|block_sparse_moe\.gate)(\.|$)")
"""Matrices that vLLM 0.32.0 replicates on every GPU (`ReplicatedLinear`)."""
_KEYS_AND_VALUES = re.compile(r"\.(k_proj|v_proj)\.")


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredWeight:
    """One tensor of a checkpoint."""

    stored_bytes: int
    is_matrix: bool
    """Whether it has at least two dimensions."""
    is_fp32: bool
    """Whether it is stored in fp32; the engine converts matrices and norms of a dense checkpoint to 16 bits."""


def weight_bytes(
    tensors: Mapping[str, StoredWeight], *, tensor_parallel_size: int, num_key_value_heads: int, halve_fp32: bool
) -> int:
    """Return the bytes of a checkpoint's weights on one GPU."""
    total = 0
    for name, tensor in tensors.items():
        size = tensor.stored_bytes // 2 if halve_fp32 and tensor.is_fp32 else tensor.stored_bytes
        shares = 1
        if tensor.is_matrix and not _EVERYWHERE.search(name):
            shares = tensor_parallel_size
            if _KEYS_AND_VALUES.search(name):
                shares = min(shares, num_key_value_heads)
        total += -(-size // shares)
    return total


def workspace_bytes(
    dimensions: Dimensions, *, tensor_parallel_size: int, batched_tokens: int, sequences: int
) -> dict[str, int]:
    """Return the bytes of the largest tensors of a step and of sampling, which are never allocated together.

    A step has three tensors of the residual stream (itself, its norm, the layer's output) and the widest product of a
    layer, in 16 bits. Sampling has the logits in 16 bits and twice in fp32 (log-probabilities, and sorted).
    """
    streams = 3 * batched_tokens * dimensions.hidden_size
    attention = batched_tokens * (2 * dimensions.query_size + 2 * dimensions.key_value_size)
    dense = 3 * batched_tokens * dimensions.intermediate_size
    experts = 3 * batched_tokens * dimensions.experts_per_token * dimensions.expert_intermediate_size
    routed = batched_tokens * dimensions.experts_per_token * dimensions.hidden_size if experts else 0
    widest = max(attention, dense, experts) // tensor_parallel_size + routed
    return {"step": 2 * (streams + widest), "sampling": sequences * dimensions.vocab_size * (2 + 4 + 4)}


def largest(parts: Iterable[Mapping[str, int]]) -> int:
    """Return the sum of each model's larger workspace: a draft keeps its own while the model runs."""
    return sum(max(part.values()) for part in parts)


_WINDOWED, _FULL = ("sliding_attention",), ("full_attention",)
_FULL_EVERY = {"gemma2": 2, "gemma3_text": 6}
"""Distance of layers with full attention, if `config.json` has no layer types."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CachedLayer:
    """One attention layer in the cache of one GPU."""

    heads: int
    """Key/value heads on this GPU; 1 for latent attention, which is replicated."""
    numbers_per_head: int
    """Cached numbers per token and head: key and value, or the latent vector and its rotary part."""
    window: int | None = None
    """Attention window in tokens; `None` for full attention."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockGroup:
    """Layers that share a block table."""

    block_tokens: int
    window: int | None
    """Attention window of its layers in tokens; `None` for full attention."""

    def sequence_blocks(self, length: int, *, tokens_in_flight: int) -> int:
        """Return the most blocks that a sequence needs.

        Between steps, the engine frees blocks outside the window. Tokens of running steps remain, and a window can
        start inside a block.
        """
        if self.window is None:
            return ceil(length / self.block_tokens)
        return ceil(min(self.window - 1 + tokens_in_flight, length) / self.block_tokens) + 1


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyValueCache:
    """Blocks of a model's cache on one GPU."""

    token_bytes: int
    """Bytes of one token if all layers cache it."""
    block_bytes: int
    groups: tuple[BlockGroup, ...]
    """Block tables of each sequence."""

    def blocks(self, capacity_bytes: int) -> int:
        return max(0, capacity_bytes) // self.block_bytes

    def sequence_blocks(self, length: int, *, tokens_in_flight: int) -> int:
        return sum(group.sequence_blocks(length, tokens_in_flight=tokens_in_flight) for group in self.groups)

    def longest_sequence(self, blocks: int, *, limit: int, tokens_in_flight: int) -> int:
        """Return the longest sequence that fits in this many blocks; 0 if not even one token fits."""
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            fits = self.sequence_blocks(middle, tokens_in_flight=tokens_in_flight) <= blocks
            low, high = (middle, high) if fits else (low, middle - 1)
        return low


def cached_layers(
    config: Mapping[str, Any], dimensions: Dimensions, *, tensor_parallel_size: int = 1
) -> tuple[CachedLayer, ...]:
    """Return the cached layers on one GPU.

    With fewer heads than GPUs, each head is on several. Latent attention caches one vector for all heads.
    Raises `UsageError` for a layer with another state, such as that of a recurrence.
    """
    text = config.get("text_config") or config
    windows = _windows(text, dimensions.num_layers)
    if text.get("kv_lora_rank"):
        if text.get("index_topk"):
            rule = "is not supported: its attention caches an index of its tokens"
            fix = "start the engine directly, and read the number of blocks from its log"
            raise UsageError(ConfigError(where="model", rule=rule, fix=fix))
        width = int(text["kv_lora_rank"]) + int(text.get("qk_rope_head_dim") or 0)
        return tuple(CachedLayer(heads=1, numbers_per_head=width, window=window) for window in windows)
    numbers = dimensions.head_dim + int(text.get("v_head_dim") or dimensions.head_dim)
    heads = max(1, dimensions.num_key_value_heads // tensor_parallel_size)
    return tuple(CachedLayer(heads=heads, numbers_per_head=numbers, window=window) for window in windows)


def _windows(text: Mapping[str, Any], layers: int) -> list[int | None]:
    window = text.get("sliding_window")
    window = window if isinstance(window, int) and window > 0 and text.get("use_sliding_window") is not False else None
    kinds = text.get("layer_types")
    if not isinstance(kinds, list):
        every = _FULL_EVERY.get(str(text.get("model_type")))
        pattern = text.get("sliding_window_pattern")
        every = pattern if every and isinstance(pattern, int) else every
        if window is None or every is None:
            return [window] * layers
        return [None if (index + 1) % every == 0 else window for index in range(layers)]
    unknown = sorted({str(kind) for kind in kinds} - {*_WINDOWED, *_FULL})
    if unknown:
        rule = f"is not supported: its layers {', '.join(unknown)} have a state other than that of attention"
        fix = "start the engine directly, and read the number of blocks from its log"
        raise UsageError(ConfigError(where="model", value=text.get("model_type"), rule=rule, fix=fix))
    return [window if kind in _WINDOWED else None for kind in kinds[:layers]]


def key_value_cache(layers: tuple[CachedLayer, ...], *, number_bytes: int, block_tokens: int) -> KeyValueCache:
    """Return the cache of the layers of a model and of its draft model, with 2 bytes per number, or 1 for FP8."""
    sizes = [layer.heads * layer.numbers_per_head * number_bytes for layer in layers]
    token_bytes = sum(sizes)
    windows = {layer.window for layer in layers}
    if len(windows) == 1:
        group = BlockGroup(block_tokens=block_tokens, window=windows.pop())
        return KeyValueCache(token_bytes=token_bytes, block_bytes=token_bytes * block_tokens, groups=(group,))
    largest = max(sizes)
    # Smaller layers have more tokens in a block of the same size; if that is not an integer, they waste memory.
    ratios = [largest // size if largest % size == 0 else 1 for size in sizes]
    kinds = Counter(
        (layer.window, layer.heads, layer.numbers_per_head, ratio) for layer, ratio in zip(layers, ratios, strict=True)
    )
    fewest, most = min(kinds.values()), max(kinds.values())
    together = most if most < 1.5 * fewest else fewest
    groups = tuple(
        BlockGroup(block_tokens=block_tokens * ratio, window=window)
        for (window, _, _, ratio), count in kinds.items()
        for _ in range(ceil(count / together))
    )
    return KeyValueCache(token_bytes=token_bytes, block_bytes=together * largest * block_tokens, groups=groups)


CacheType = Literal["auto", "bf16", "fp8"]
DEFAULT_SHARE = 0.92
"""Share of a GPU's memory that vLLM 0.32.0 uses by default (`config/cache.py`)."""
_HUGE, _LARGE = 160 * 2**30, 70 * 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    """A checkpoint, described by its configuration and headers."""

    spec: ModelSpec
    config: Mapping[str, Any]
    weights: Mapping[str, StoredWeight]
    """All tensors by name; empty without a checkpoint."""
    notes: tuple[str, ...] = ()
    """Warnings about the source of its configuration."""

    @property
    def quantization(self) -> Mapping[str, Any]:
        """`quantization_config`; empty for a dense checkpoint."""
        return self.config.get("quantization_config") or {}

    @property
    def latent(self) -> bool:
        """Whether attention caches one latent vector for all heads (DeepSeek-V2 and its successors)."""
        return bool((self.config.get("text_config") or self.config).get("kv_lora_rank"))

    @property
    def positions(self) -> int | None:
        text = self.config.get("text_config") or self.config
        positions = text.get("max_position_embeddings") or text.get("n_positions") or self.spec.learned_positions
        return positions if isinstance(positions, int) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingRequest:
    """Settings of a server; `None` values are computed."""

    hardware: HardwareSpec
    """GPUs of one node, or `CPU`."""
    amx: bool = False
    """Whether the CPU has AMX tiles, which select vLLM's kernel of latent attention and so its block size."""
    tensor_parallel_size: int | None = None
    max_model_len: int | None = None
    """Longest sequence (prompt and completion) in tokens."""
    max_num_seqs: int | None = None
    """Concurrent sequences; the cache must have space for this many of the longest ones."""
    max_num_batched_tokens: int | None = None
    kv_cache_dtype: CacheType = "auto"
    """Data type of the cache; `auto` for that of the checkpoint."""
    kv_cache_bytes: int | None = None
    """Bytes of the cache on each GPU, instead of the remaining memory."""
    block_tokens: int | None = None
    memory_share: float = DEFAULT_SHARE
    """Share of each GPU's memory that the engine uses."""
    draft_tokens: int = 4
    """Tokens that a draft model proposes in each step."""
    host: str = "127.0.0.1"
    port: int = 8000

    @property
    def on_cpu(self) -> bool:
        return self.hardware.gpu == "CPU"

    @property
    def device_bytes(self) -> int:
        """Memory of one GPU, or of the host."""
        return self.hardware.host_bytes_per_node if self.on_cpu else self.hardware.gpu_bytes

    def batched_tokens(self) -> int:
        """Return the maximum tokens per step: as requested, or the default of a vLLM 0.32.0 server.

        `engine/arg_utils.py`, `get_batch_defaults`: 16,384 from 160 GiB, 8,192 from 70 GiB (not A100), else 2,048.
        """
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        if self.on_cpu or self.hardware.gpu_bytes < _LARGE or self.hardware.gpu.startswith("A100"):
            return 2048
        return 16384 if self.hardware.gpu_bytes >= _HUGE else 8192

    def sequences(self) -> int:
        """Return the maximum sequences per step: as requested, or the default of a vLLM 0.32.0 server."""
        if self.max_num_seqs is not None:
            return self.max_num_seqs
        if self.on_cpu:
            return 128
        return 1024 if self.batched_tokens() > 2048 and self.max_num_batched_tokens is None else 256


def serving_line(
    model: str, chosen: ServingRequest, *, draft: str | None, revision: str | None = None
) -> tuple[str, ...]:
    """Return the command that serves a model, from a request with all values set."""
    words: list[object] = ["vllm", "serve", model, "--host", chosen.host, "--port", chosen.port]
    words += ["--revision", revision] if revision else []
    words += ["--tensor-parallel-size", chosen.tensor_parallel_size, "--max-model-len", chosen.max_model_len]
    words += ["--max-num-seqs", chosen.max_num_seqs, "--max-num-batched-tokens", chosen.max_num_batched_tokens]
    words += ["--enable-prefix-caching"]
    words += ["--block-size", chosen.block_tokens] if chosen.block_tokens else []
    words += ["--kv-cache-dtype", "fp8"] if chosen.kv_cache_dtype == "fp8" else []
    words += ["--kv-cache-dtype", "bfloat16"] if chosen.kv_cache_dtype == "bf16" else []
    if chosen.kv_cache_bytes is not None:
        words += ["--kv-cache-memory-bytes", chosen.kv_cache_bytes]
    else:
        words += ["--gpu-memory-utilization", chosen.memory_share]
    # Compiling for a CPU takes minutes, without a benefit for a small model.
    words += ["--enforce-eager"] if chosen.on_cpu else []
    if draft is not None:
        speculation = {"method": "draft_model", "model": draft, "num_speculative_tokens": chosen.draft_tokens}
        words += ["--speculative-config", json.dumps(speculation)]
    return tuple(str(word) for word in words)


_CONCURRENT_STEPS = 2
"""Steps in flight: except on a CPU, vLLM 0.32.0 schedules the next step while one runs."""
_NO_LENGTH = 2048
"""Default length of a model without one, as in vLLM 0.32.0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingPlan:
    """A server of one checkpoint; bytes are per GPU."""

    model: str
    hardware: str
    tensor_parallel_size: int
    memory: dict[str, int]
    """Bytes by term: weights, draft weights, workspace, runtime, cache."""
    token_bytes: int
    kv_cache_dtype: str
    block_tokens: int
    block_bytes: int
    blocks: int
    """Blocks of the pool; the engine keeps one of them empty."""
    max_model_len: int
    blocks_per_sequence: int
    longest_that_fits: int
    """Longest sequence of the model that fits in the cache."""
    sequences: float
    """Concurrent sequences of `max_model_len` that fit in the cache."""
    max_num_seqs: int
    max_num_batched_tokens: int
    draft: str | None
    line: tuple[str, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as `--format json` prints it."""
        return {"schema_version": 1} | asdict(self) | {"line": list(self.line), "notes": list(self.notes)}


def plan_serving(model: ServedModel, request: ServingRequest, *, draft: ServedModel | None = None) -> ServingPlan:
    """Return the server of a checkpoint, for which a `draft` model may propose tokens.

    Raises:
        UsageError: vLLM does not support the format, or a setting is invalid; all errors together.
        DoesNotFitError: The weights or one sequence do not fit.
    """
    errors = _setting_errors(model, request, draft)
    if errors:
        raise UsageError(errors)
    models = [model] if draft is None else [model, draft]
    positions = min(served.positions or _NO_LENGTH for served in models)
    wanted = request.max_model_len or positions
    stored = (model.quantization.get("kv_cache_scheme") or {}).get("num_bits") == 8
    is_fp8 = request.kv_cache_dtype == "fp8" or (request.kv_cache_dtype == "auto" and stored)
    # vLLM: `platforms/cpu.py`, `config/cache.py`, `backends/mla/flashmla.py`.
    is_latent = any(served.latent for served in models)
    on_cpu, on_gpu = 16 if is_latent and not request.amx else 128, 64 if is_latent else 16
    block_tokens = request.block_tokens or (on_cpu if request.on_cpu else on_gpu)
    in_flight = request.batched_tokens() * (1 if request.on_cpu else _CONCURRENT_STEPS)
    gpus = 1 if request.on_cpu else request.hardware.gpus_per_node
    legal = [size for size in range(1, gpus + 1) if not _division_error(model, size)]
    # The fewest GPUs that hold the requested sequences, else the largest legal number.
    for size in [request.tensor_parallel_size] if request.tensor_parallel_size else legal:
        layers = [
            layer
            for served in models
            for layer in cached_layers(served.config, served.spec.dimensions, tensor_parallel_size=size)
        ]
        cache = key_value_cache(tuple(layers), number_bytes=1 if is_fp8 else 2, block_tokens=block_tokens)
        # Bytes per GPU without the cache, by term.
        memory: dict[str, int] = {}
        for name, served in zip(("weights", "draft_weights"), models, strict=False):
            memory[name] = 2 * served.spec.parameter_count // size
            if served.weights:
                heads, dense = served.spec.dimensions.num_key_value_heads, not served.quantization
                memory[name] = weight_bytes(
                    served.weights, tensor_parallel_size=size, num_key_value_heads=heads, halve_fp32=dense
                )
        steps = {"batched_tokens": request.batched_tokens(), "sequences": request.sequences()}
        parts = [workspace_bytes(each.spec.dimensions, tensor_parallel_size=size, **steps) for each in models]
        memory |= {"workspace": largest(parts), "runtime": 0 if request.on_cpu else RUNTIME_BYTES}
        free = int(request.device_bytes * request.memory_share) - sum(memory.values())
        left = free if request.kv_cache_bytes is None else request.kv_cache_bytes
        blocks = cache.blocks(left)
        usable = (blocks - 1) // (request.max_num_seqs or 1)
        longest = cache.longest_sequence(usable, limit=wanted, tokens_in_flight=in_flight)
        if longest >= wanted:
            break
    if not longest or (request.max_model_len is not None and longest < wanted):
        count = request.max_num_seqs or 1
        held = ", ".join(f"{name} {gigabytes(number)}" for name, number in memory.items())
        needed = (count * cache.sequence_blocks(wanted, tokens_in_flight=in_flight) + 1) * cache.block_bytes
        fits = f"--max-model-len {longest} fits" if longest else "not even one token fits"
        raise DoesNotFitError(
            f"{count} sequence(s) of {wanted:,} tokens need {gigabytes(needed)} GB of cache on each GPU, but "
            f"{gigabytes(max(0, left))} GB are left of {gigabytes(request.device_bytes)} ({held} GB; {size} GPU(s)): "
            f"{fits}; use more GPUs (--hardware), a quantized checkpoint or --kv-cache-dtype fp8"
        )
    length = min(wanted, longest)
    per_sequence = cache.sequence_blocks(length, tokens_in_flight=in_flight)
    notes = [note for served in models for note in served.notes]
    if length < wanted:
        notes.append(f"sequences are limited to {length:,} of {wanted:,} tokens: a larger cache does not fit")
    if not model.weights:
        notes.append("there is no checkpoint: weights are counted in 16 bits from the structure")
    copies = request.hardware.gpus_per_node // size
    if copies > 1 and not request.on_cpu:
        notes.append(f"{size} GPU(s) are sufficient: --data-parallel-size {copies} runs {copies} replicas")
    if request.on_cpu and is_fp8:
        # Version 0.32.0: `float_to_fp8e4m3_scalar` in csrc/cpu/cpu_attn_fp8.hpp truncates the last bits.
        notes.append(
            "vLLM's CPU engine truncates FP8 keys and values instead of rounding them, which doubles the error"
        )
    chosen = replace(
        request,
        tensor_parallel_size=size,
        max_model_len=length,
        max_num_seqs=request.sequences(),
        max_num_batched_tokens=request.batched_tokens(),
    )
    draft_name = None if draft is None else draft.spec.name
    unbounded = cache.longest_sequence(blocks - 1, limit=2**31, tokens_in_flight=in_flight)
    return ServingPlan(
        model=model.spec.name,
        hardware=request.hardware.name,
        tensor_parallel_size=size,
        memory=memory | {"cache": max(0, left)},
        token_bytes=cache.token_bytes,
        kv_cache_dtype="fp8" if is_fp8 else "bf16",
        block_tokens=block_tokens,
        block_bytes=cache.block_bytes,
        blocks=blocks,
        max_model_len=length,
        blocks_per_sequence=per_sequence,
        longest_that_fits=min(unbounded, positions),
        sequences=round(blocks / per_sequence, 2),
        max_num_seqs=request.sequences(),
        max_num_batched_tokens=request.batched_tokens(),
        draft=draft_name,
        line=serving_line(model.spec.name, chosen, draft=draft_name, revision=model.spec.revision),
        notes=tuple(notes),
    )


def _division_error(model: ServedModel, size: int) -> ConfigError | None:
    heads = model.spec.dimensions.num_attention_heads
    if heads % size == 0:
        return None
    legal = ", ".join(str(number) for number in range(1, min(heads, 64) + 1) if heads % number == 0)
    rule, fix = f"must divide the {heads} attention heads", f"use one of {legal}"
    return ConfigError(where="tensor_parallel_size", value=size, rule=rule, fix=fix)


def _setting_errors(model: ServedModel, request: ServingRequest, draft: ServedModel | None) -> list[ConfigError]:
    errors = []
    for served in (model, draft):
        section = {} if served is None else served.quantization
        if section.get("quant_method") == "shardwright_small":
            fix = "serve its parent directory, which has the same weights in dense format"
            rule = "is not supported by vLLM"
            errors.append(ConfigError(where="quant_method", value="shardwright_small", rule=rule, fix=fix))
        cache = section.get("kv_cache_scheme")
        if cache and (cache.get("type"), cache.get("num_bits")) != ("float", 8):
            value = f"{cache.get('type')} {cache.get('num_bits')}"
            rule, fix = "is not supported by vLLM, which requires an FP8 cache", "quantize again with an FP8 cache"
            errors.append(ConfigError(where="kv_cache_scheme", value=value, rule=rule, fix=fix))
    size, positions = request.tensor_parallel_size, model.positions
    if size is not None:
        gpus = request.hardware.gpus_per_node
        division = _division_error(model, size)
        errors += [division] if division else []
        if size > gpus:
            rule, fix = f"must be at most {gpus}, the GPUs of a node", "use a smaller size or more GPUs per node"
            errors.append(ConfigError(where="tensor_parallel_size", value=size, rule=rule, fix=fix))
    length = request.max_model_len
    if length is not None and positions is not None and length > positions:
        rule = f"must be at most {positions:,}, the positions of the model"
        errors.append(ConfigError(where="max_model_len", value=length, rule=rule, fix="omit it to use the maximum"))
    if draft is not None:
        own, other = model.spec.dimensions.vocab_size, draft.spec.dimensions.vocab_size
        if own != other:
            rule = f"must have the vocabulary of the model: it has {other:,} tokens, and the model {own:,}"
            fix = "use a draft model with the same tokenizer"
            errors.append(ConfigError(where="draft", value=draft.spec.name, rule=rule, fix=fix))
    return errors
