"""Plan of a server: what a GPU holds, how long and how many sequences its cache takes, and the line that starts it.

blocks           = bytes of the cache / bytes of a block
longest          = largest length whose blocks, with the empty one of the engine, are there
sequences        = (blocks - shared) / (blocks of the longest - shared), for sequences of that length
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from ..specs.errors import DoesNotFitError, Fault, UsageError
from ..specs.hardware import gpu_catalog
from ..specs.units import gigabytes
from .engines import TITLES, EngineName, scheme_findings
from .kv_cache import CachedLayer, KeyValueCache, cached_layers, key_value_cache
from .line import serving_line
from .memory import RUNTIME_BYTES, largest, weight_bytes, workspace_bytes
from .request import ServedModel, ServingRequest

_CONCURRENT_STEPS = 2
"""Steps whose tokens are not settled yet: vLLM 0.32.0 schedules the next one while one runs, but on a CPU."""
_NO_LENGTH = 2048
"""Length where a model states none, as vLLM 0.32.0 takes it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingPlan:
    """A server of one checkpoint; bytes are those of one GPU."""

    engine: EngineName
    """Which engine runs it."""
    model: str
    """What is served."""
    hardware: str
    """Where, in the words of `--hardware`."""
    tensor_parallel_size: int
    """GPUs that share the model."""
    memory: dict[str, int]
    """Bytes by what they hold: weights, draft weights, workspace, runtime, cache."""
    token_bytes: int
    """Cache of one token in all layers."""
    kv_cache_dtype: str
    """Numbers of the cache: `bf16` or `fp8`."""
    block_tokens: int
    """Tokens of one block in most layers."""
    block_bytes: int
    """Bytes of one block of the pool."""
    blocks: int
    """Blocks of the pool, one of which the engine keeps empty."""
    max_model_len: int
    """Longest sequence that is served, in tokens."""
    blocks_per_sequence: int
    """Blocks of a sequence of that length."""
    longest_that_fits: int
    """Longest sequence that the cache would take, where the model had the positions."""
    sequences: float
    """Sequences of `max_model_len` that the cache holds together, less what they share."""
    max_num_seqs: int
    """Sequences that the engine runs together at most; shorter ones fit in larger numbers."""
    max_num_batched_tokens: int
    """Tokens of one step at most."""
    draft: str | None
    """Model that proposes tokens; `None` without."""
    line: tuple[str, ...]
    """Command that starts the server."""
    notes: tuple[str, ...]
    """Remarks on the choices."""

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as `--format json` prints it."""
        return {"schema_version": 1} | asdict(self) | {"line": list(self.line), "notes": list(self.notes)}


def plan_serving(model: ServedModel, request: ServingRequest, *, draft: ServedModel | None = None) -> ServingPlan:
    """Return the server of a checkpoint.

    Args:
        model: What is served.
        request: How.
        draft: Student that proposes tokens which the model then confirms.

    Raises:
        UsageError: the engine cannot serve the scheme on this device, or a setting cannot be met; all faults together.
        DoesNotFitError: weights or one sequence do not fit.
    """
    capability = gpu_catalog().get(request.hardware.gpu, {}).get("compute_capability")
    how: dict[str, Any] = {"engine": request.engine, "gpu": request.hardware.gpu, "capability": capability}
    faults, notes = scheme_findings(model.quantization, quantized_experts=model.quantized_experts, **how)
    faults += _setting_faults(model, request, draft)
    if draft is not None:
        faults += scheme_findings(draft.quantization, **how)[0]
    if faults:
        raise UsageError(faults)
    sizes = [request.tensor_parallel_size] if request.tensor_parallel_size else _legal_sizes(model, request)
    fitting: list[_Fit] = []
    for size in sizes:
        fit = _Fit.of(model, request, draft, size)
        fitting.append(fit)
        if fit.longest >= fit.wanted:
            break
    best = next((fit for fit in fitting if fit.longest >= fit.wanted), fitting[-1])
    best.check(request)
    return best.planned(model, request, draft, notes)


def _legal_sizes(model: ServedModel, request: ServingRequest) -> list[int]:
    gpus = 1 if request.engine == "transformers" or request.on_cpu else request.hardware.gpus_per_node
    return [size for size in range(1, gpus + 1) if not _division_fault(model, size)]


def _division_fault(model: ServedModel, size: int) -> Fault | None:
    heads = model.spec.dimensions.num_attention_heads
    if heads % size == 0:
        return None
    legal = ", ".join(str(number) for number in range(1, min(heads, 64) + 1) if heads % number == 0)
    return Fault(where="tensor_parallel_size", value=size, rule=f"must divide {heads} heads", fix=f"one of {legal}")


def _setting_faults(model: ServedModel, request: ServingRequest, draft: ServedModel | None) -> list[Fault]:
    faults = []
    size, positions = request.tensor_parallel_size, model.positions
    if size is not None:
        gpus = request.hardware.gpus_per_node
        found = _division_fault(model, size)
        faults += [found] if found else []
        if size > gpus:
            rule = f"is more than the {gpus} GPUs of a node"
            faults.append(Fault(where="tensor_parallel_size", value=size, rule=rule))
        if size > 1 and request.engine == "transformers":
            rule = "needs an engine that divides layers"
            faults.append(Fault(where="tensor_parallel_size", value=size, rule=rule, fix="--engine vllm"))
    length = request.max_model_len
    if request.kv_cache_dtype == "fp8" and request.engine == "transformers":
        rule = "is for engines that round their cache"
        faults.append(Fault(where="kv_cache_dtype", value="fp8", rule=rule, fix="--engine vllm"))
    if length is not None and positions is not None and length > positions:
        rule = f"is beyond the model's {positions:,} positions"
        faults.append(Fault(where="max_model_len", value=length, rule=rule))
    if draft is not None:
        own, other = model.spec.dimensions.vocab_size, draft.spec.dimensions.vocab_size
        if own != other:
            rule, fix = f"has {other:,} tokens, the model {own:,}", "a draft needs the model's own vocabulary"
            faults.append(Fault(where="draft", value=draft.spec.name, rule=rule, fix=fix))
        if request.engine == "transformers":
            rule = "is for engines with speculative decoding"
            faults.append(Fault(where="draft", value=draft.spec.name, rule=rule, fix="--engine vllm"))
    return faults


@dataclass(frozen=True, kw_only=True, slots=True)
class _Fit:
    """Share of a model and of its cache on each of a number of GPUs."""

    size: int
    memory: dict[str, int]
    number_bytes: int
    block_tokens: int
    cache: KeyValueCache
    blocks: int
    wanted: int
    """Length that was asked for, or what the model is made for."""
    longest: int
    """Length that fits, for as many sequences as were asked for."""
    unbounded: int
    """Length of one sequence that would fit."""
    in_flight: int

    @classmethod
    def of(cls, model: ServedModel, request: ServingRequest, draft: ServedModel | None, size: int) -> _Fit:
        models = [model] if draft is None else [model, draft]
        layers = [layer for each in models for layer in _layers(each, request, size)]
        number_bytes = _number_bytes(model, request)
        tokens = request.block_tokens or _block_tokens(request, latent=any(each.latent for each in models))
        cache = key_value_cache(tuple(layers), number_bytes=number_bytes, block_tokens=tokens)
        memory = _memory(models, request, size)
        left = request.kv_cache_bytes
        if left is None:
            left = int(request.device_bytes * request.memory_share) - sum(memory.values())
        blocks = cache.blocks(left)
        in_flight = request.batched_tokens() * (
            _CONCURRENT_STEPS if request.engine == "vllm" and not request.on_cpu else 1
        )
        wanted = request.max_model_len or min(each.positions or _NO_LENGTH for each in models)
        usable = (blocks - 1) // (request.max_num_seqs or 1)
        limits = {"tokens_in_flight": in_flight}
        return cls(
            size=size,
            memory=memory | {"cache": max(0, left)},
            number_bytes=number_bytes,
            block_tokens=tokens,
            cache=cache,
            blocks=blocks,
            wanted=wanted,
            longest=cache.longest_sequence(usable, limit=wanted, **limits),
            unbounded=cache.longest_sequence(blocks - 1, limit=2**31, **limits),
            in_flight=in_flight,
        )

    def check(self, request: ServingRequest) -> None:
        """Raise where not one sequence fits, or not the one that was asked for."""
        count = request.max_num_seqs or 1
        if self.longest > 0 and (request.max_model_len is None or self.longest >= self.wanted):
            return
        held = ", ".join(f"{name} {gigabytes(number)}" for name, number in self.memory.items() if name != "cache")
        needed = count * self.cache.sequence_blocks(self.wanted, tokens_in_flight=self.in_flight) + 1
        short = (
            f"{count} sequence(s) of {self.wanted:,} tokens need {gigabytes(needed * self.cache.block_bytes)} GB of "
            f"cache on each GPU, and {gigabytes(self.memory['cache'])} GB are left of "
            f"{gigabytes(request.device_bytes)} ({held} GB; {self.size} GPU(s))"
        )
        fits = f"--max-model-len {self.longest} fits" if self.longest else "not one token fits"
        ways = "more GPUs (--hardware), a quantized checkpoint or --kv-cache-dtype fp8 need less"
        raise DoesNotFitError(f"{short}: {fits}; {ways}")

    def planned(
        self, model: ServedModel, request: ServingRequest, draft: ServedModel | None, notes: list[str]
    ) -> ServingPlan:
        """Return the plan of this number of GPUs."""
        length = min(self.wanted, self.longest)
        per_sequence = self.cache.sequence_blocks(length, tokens_in_flight=self.in_flight)
        shared = min(self.cache.prefix_blocks(min(request.shared_prefix_tokens, length)), per_sequence - 1)
        remarks = [*notes, *self._remarks(model, request, length)]
        chosen = replace(
            request,
            tensor_parallel_size=self.size,
            max_model_len=length,
            max_num_seqs=request.sequences(),
            max_num_batched_tokens=request.batched_tokens(),
        )
        numbers = "fp8" if self.number_bytes == 1 else "bf16"
        draft_name = None if draft is None else draft.spec.name
        return ServingPlan(
            engine=request.engine,
            model=model.spec.name,
            hardware=request.hardware.name,
            tensor_parallel_size=self.size,
            memory=self.memory,
            token_bytes=self.cache.token_bytes,
            kv_cache_dtype=numbers,
            block_tokens=self.block_tokens,
            block_bytes=self.cache.block_bytes,
            blocks=self.blocks,
            max_model_len=length,
            blocks_per_sequence=per_sequence,
            longest_that_fits=self.unbounded,
            sequences=round((self.blocks - shared) / (per_sequence - shared), 2),
            max_num_seqs=request.sequences(),
            max_num_batched_tokens=request.batched_tokens(),
            draft=draft_name,
            line=serving_line(
                model.spec.name, chosen, draft=draft_name, blocks=self.blocks, revision=model.spec.revision
            ),
            notes=tuple(remarks),
        )

    def _remarks(self, model: ServedModel, request: ServingRequest, length: int) -> list[str]:
        found = []
        if length < self.wanted:
            found.append(f"sequences are cut to {length:,} of the model's {self.wanted:,} tokens: no more cache fits")
        if not model.weights:
            found.append("there are no weights to read: their bytes are those of the structure in 16 bits")
        copies = request.hardware.gpus_per_node // self.size
        if request.engine == "vllm" and copies > 1 and not request.on_cpu:
            found.append(f"{self.size} GPU(s) are enough: add --data-parallel-size {copies} to run {copies} copies")
        if request.engine == "vllm" and request.on_cpu and self.number_bytes == 1:
            # Seen in 0.32.0: `float_to_fp8e4m3_scalar` of csrc/cpu/cpu_attn_fp8.hpp shifts the last bits out.
            found.append("vLLM's CPU engine cuts FP8 keys and values off instead of rounding them: twice the error")
        if request.engine != "vllm":
            found.append(f"the blocks are counted as vLLM does; {TITLES[request.engine]} may differ")
        return found


def _layers(model: ServedModel, request: ServingRequest, size: int) -> tuple[CachedLayer, ...]:
    return cached_layers(
        model.config, model.spec.dimensions, tensor_parallel_size=size, latent=request.engine != "transformers"
    )


def _block_tokens(request: ServingRequest, *, latent: bool) -> int:
    """Return the engine's own block: vLLM 0.32.0 `platforms/cpu.py`, `config/cache.py`, `backends/mla/flashmla.py`."""
    match request.engine:
        case "sglang":
            return 1
        case "transformers":
            return 256
    if request.on_cpu:
        return 16 if latent else 128
    return 64 if latent else 16


def _number_bytes(model: ServedModel, request: ServingRequest) -> int:
    stored = (model.quantization.get("kv_cache_scheme") or {}).get("num_bits") == 8
    asked = request.kv_cache_dtype
    return 1 if asked == "fp8" or (asked == "auto" and stored and request.engine != "transformers") else 2


def _memory(models: list[ServedModel], request: ServingRequest, size: int) -> dict[str, int]:
    """Return the bytes of one GPU without the cache."""
    found = {}
    for name, model in zip(("weights", "draft_weights"), models, strict=False):
        dense = not model.quantization
        decompressed = request.engine == "transformers" and model.quantization
        if not model.weights or decompressed:
            found[name] = 2 * model.spec.parameter_count // size
        else:
            heads = model.spec.dimensions.num_key_value_heads
            found[name] = weight_bytes(
                model.weights, tensor_parallel_size=size, num_key_value_heads=heads, halve_fp32=dense
            )
    steps = {"batched_tokens": request.batched_tokens(), "sequences": request.sequences()}
    parts = [workspace_bytes(model.spec.dimensions, tensor_parallel_size=size, **steps) for model in models]
    return found | {"workspace": largest(parts), "runtime": 0 if request.on_cpu else RUNTIME_BYTES}
