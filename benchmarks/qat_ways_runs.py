"""Trains, quantizes, exports and judges the models of a comparison."""

from __future__ import annotations

import copy
import gc
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from qat_ways_result import ENDS, WAYS, Comparison, Measurement, Way
from shardwright.ds_configs.quantization.scheme import QuantizationScheme, scheme_named
from shardwright.plugins.llm_compressor.engine import EngineRequest, quantize_with_llm_compressor
from shardwright.plugins.metering import AcceleratorMeter, ByteMeter, start_meter
from shardwright.trainers.data.samples import collate
from shardwright.trainers.distillation.config import DistillationConfig
from shardwright.trainers.evaluation.loading import load_eval_model, read_eval_model
from shardwright.trainers.evaluation.measures import Batches, ModelReader, measure_tokens
from shardwright.trainers.qat.callback import QATCallback
from shardwright.trainers.qat.rounding.config import QATConfig
from transformers import Trainer, TrainerCallback, TrainingArguments

if TYPE_CHECKING:
    from torch import Tensor

Sample = Mapping[str, Sequence[int]]
OnProgress = Callable[[str], None]

_METERED = range(2, 4)
"""Steps whose bytes are counted, after the optimizer state exists. Their times are not counted."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What `compare_qat` was asked for."""

    model: Any
    """Stays as it is."""
    scheme: str | QuantizationScheme
    """Numbers of all ways but one."""
    train_samples: Sequence[Sample]
    """With `input_ids`."""
    evaluation_samples: Sequence[Sample]
    """With `input_ids`."""
    steps: int
    """Optimizer steps."""
    learning_rate: float
    """Largest."""
    seeds: tuple[int, ...]
    """Runs."""
    batch_size: int
    """Samples of a step on each device."""
    ways: tuple[Way, ...]
    """Asked for, without the two ends."""
    calibration_samples: int
    """From the start of the training samples."""
    training: Mapping[str, Any]
    """Fields of `TrainingArguments`."""
    qat: Mapping[str, Any]
    """Fields of `QATConfig`."""
    distillation: DistillationConfig | None
    """For `qad`."""
    export: bool
    """Whether checkpoints are written and judged."""
    on_progress: OnProgress
    """Receives lines."""

    @property
    def full_scheme(self) -> QuantizationScheme:
        """The scheme itself."""
        return scheme_named(self.scheme) if isinstance(self.scheme, str) else self.scheme

    @property
    def calibration(self) -> list[dict[str, list[int]]]:
        """Samples that GPTQ and stored ranges are made from."""
        return [{"input_ids": list(each["input_ids"])} for each in self.train_samples[: self.calibration_samples]]

    def config(self, way: Way) -> QATConfig:
        """Return what a way that trains with rounded numbers rounds to."""
        learned = {"weight_rule": "learned"} if way == "qat-learned" else {}
        return QATConfig(scheme=self.full_scheme, **(dict(self.qat) | learned))

    def arguments(self, directory: str, seed: int) -> TrainingArguments:
        """Return what all ways train with."""
        common: dict[str, Any] = {
            "per_device_train_batch_size": self.batch_size,
            "max_steps": self.steps,
            "learning_rate": self.learning_rate,
            "warmup_steps": min(20, self.steps // 10),
            "report_to": "none",
            "save_strategy": "no",
            "logging_strategy": "no",
            "disable_tqdm": True,
            "dataloader_pin_memory": torch.cuda.is_available(),
        }
        return TrainingArguments(directory, **(common | dict(self.training)), seed=seed, data_seed=seed)


def run_all(job: Job) -> Comparison:
    """Measure every way with every seed; what stands in the way is for `compare_qat` to find before."""
    judge = _Judge(job)
    untrained = judge.loss_sums(job.model)
    measured = []
    for seed in job.seeds:
        for found in _measured(job, judge, seed):
            job.on_progress(f"seed {seed}, {found.way}: {sum(found.loss_sums) / sum(judge.counts):.4f} nats per token")
            measured.append(found)
    return Comparison(
        scheme=job.full_scheme.name,
        steps=job.steps,
        learning_rate=job.learning_rate,
        seeds=job.seeds,
        token_counts=judge.counts,
        untrained_loss_sums=untrained,
        measurements=tuple(measured),
    )


def _measured(job: Job, judge: _Judge, seed: int) -> Iterator[Measurement]:
    wanted = [way for way in WAYS if way in (*ENDS, *job.ways)]
    dense = _train(job, "ft", seed)
    yield _measurement(judge, dense, "ft", seed)
    for way, method in (("ft-rtn", "rtn"), ("ft-gptq", "gptq")):
        if way in wanted:
            start = time.perf_counter()
            model = _quantized(job, dense.model, method)
            yield _measurement(judge, dense, way, seed, model=model, more_seconds=time.perf_counter() - start)
            del model
    for way in wanted:
        if way.startswith("qa"):
            gc.collect()
            yield _trained_and_exported(job, judge, way, seed, dense)


def _trained_and_exported(job: Job, judge: _Judge, way: Way, seed: int, dense: _Trained) -> Measurement:
    teachers = {"qad": job.model, "qad-ft": dense.model}
    trained, written = _train(job, way, seed, teachers.get(way)), None
    seconds = dense.seconds if way == "qad-ft" else 0.0
    if job.export:
        with tempfile.TemporaryDirectory() as directory:
            start, place = time.perf_counter(), Path(directory) / "exported"
            trained.callback.export(trained.trainer, place, verify=False)
            seconds += time.perf_counter() - start
            written = judge.loss_sums(_reloaded(place, trained.model))
    return _measurement(judge, trained, way, seed, more_seconds=seconds, written=written)


@dataclass(frozen=True, kw_only=True)
class _Trained:
    model: Any
    trainer: Any
    callback: Any
    seconds: float
    seconds_per_step: float
    peak_bytes: int


def _train(job: Job, way: Way, seed: int, taught_by: Any = None) -> _Trained:
    """Train a copy of the model; `ft` with the stock Trainer alone."""
    model = copy.deepcopy(job.model).train()
    teacher = None if taught_by is None else copy.deepcopy(taught_by).eval().requires_grad_(False)
    meter = _StepMeter(job.steps, [] if teacher is None else teacher.parameters())
    callback = None if way == "ft" else _qat_callback(job, way)
    with tempfile.TemporaryDirectory() as directory:
        shared: dict[str, Any] = {
            "model": model,
            "args": job.arguments(directory, seed),
            "train_dataset": _labelled(job.train_samples),
            "data_collator": collate,
            "callbacks": [each for each in (callback, meter) if each is not None],
        }
        start = time.perf_counter()
        trainer = _trainer(job, teacher, shared)
        # The Trainer prints its last log on stdout.
        trainer.log = lambda *_, **__: None
        trainer.train()
        seconds = time.perf_counter() - start
    model.eval()
    return _Trained(
        model=model,
        trainer=trainer,
        callback=callback,
        seconds=seconds,
        seconds_per_step=meter.seconds_per_step,
        peak_bytes=meter.peak_bytes,
    )


def _trainer(job: Job, teacher: Any, shared: dict[str, Any]) -> Any:
    if teacher is None:
        return Trainer(**shared)
    from shardwright.trainers.distillation.trainer import DistillationTrainer

    distillation = job.distillation or DistillationConfig(alpha=1.0, telemetry=False)
    return DistillationTrainer(**shared, teacher=teacher, distillation=distillation)


def _qat_callback(job: Job, way: Way) -> QATCallback:
    config, calibration = job.config(way), None
    if config.stores_ranges and not config.observes:
        calibration = [collate(_labelled([row])) for row in job.calibration]
    options = {each.name: getattr(config, each.name) for each in fields(config) if each.name != "scheme"}
    return QATCallback(config.scheme, calibration=calibration, **options)


def _quantized(job: Job, dense: Any, method: Any) -> Any:
    """Return a copy of the fine-tuned model whose forward pass rounds as its checkpoint will."""
    calibration = job.calibration
    alike = len({len(row["input_ids"]) for row in calibration}) == 1
    request = EngineRequest(
        model=copy.deepcopy(dense).requires_grad_(False),
        tokenizer=None,
        scheme=job.full_scheme,
        method=method,
        calibration=calibration,
        batch_size=8 if alike else 1,
    )
    return quantize_with_llm_compressor(request, lambda _: None).model


def _reloaded(directory: Path, like: Any) -> Any:
    """Load a checkpoint in its own type, and compute in the type of the model that was trained, as all others do."""
    subject = read_eval_model(str(directory), "model", revision=None)
    loaded = load_eval_model(subject, directory, dtype="auto", device=str(like.device))
    # Loading decompresses under inference mode, and such tensors can only be used there.
    with torch.inference_mode():
        return loaded.to(like.dtype)


class _Judge:
    def __init__(self, job: Job) -> None:
        windows = _labelled(job.evaluation_samples)
        self._batches = Batches(windows=windows, size=8)
        self.counts: tuple[int, ...] = ()

    def loss_sums(self, model: Any) -> tuple[float, ...]:
        """Return the cross-entropy of each held-out window in nats, summed over its tokens."""
        was_training = model.training
        reader = ModelReader(model.eval(), self._batches, name="the model")
        measures = measure_tokens(reader, None, self._batches)
        model.train(was_training)
        self.counts = measures.counts
        return measures.window_sums(measures.loss_N)


def _measurement(
    judge: _Judge,
    trained: _Trained,
    way: Any,
    seed: int,
    *,
    model: Any = None,
    more_seconds: float = 0.0,
    written: tuple[float, ...] | None = None,
) -> Measurement:
    return Measurement(
        way=way,
        seed=seed,
        loss_sums=judge.loss_sums(trained.model if model is None else model),
        exported_loss_sums=written,
        seconds=trained.seconds + more_seconds,
        seconds_per_step=trained.seconds_per_step,
        peak_bytes=trained.peak_bytes,
    )


class _StepMeter(TrainerCallback):
    """Times every step, and counts the bytes of a few."""

    def __init__(self, steps: int, others: Iterable[Tensor]) -> None:
        self._metered = [step for step in _METERED if step < steps] or [steps - 1]
        self._others = list(others)
        self._seconds: list[float] = []
        self._all_seconds: list[float] = []
        self.peak_bytes = 0
        self._meter: ByteMeter | AcceleratorMeter | None = None

    @property
    def seconds_per_step(self) -> float:
        """Median; without the first step and those that were counted, unless there are no others."""
        return median(self._seconds or self._all_seconds)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock, and the meter in some steps."""
        if state.global_step in self._metered:
            self._meter = start_meter()
            self._meter.__enter__()
            self._meter.enter("forward")
            self._meter.label([*kwargs["model"].parameters(), *self._others], "weights")
            states = getattr(kwargs.get("optimizer"), "state", {}).values()
            self._meter.label([part for each in states for part in _tensors(each)], "optimizer")
        self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop both."""
        seconds = time.perf_counter() - self._began
        self._all_seconds.append(seconds)
        if self._meter is not None:
            self._meter.__exit__(None, None, None)
            self.peak_bytes = max(self.peak_bytes, self._meter.reading().peak_bytes)
            self._meter = None
        elif state.global_step > 1:
            self._seconds.append(seconds)


def _tensors(state: Mapping[str, Any]) -> list[Any]:
    return [part for part in state.values() if isinstance(part, torch.Tensor)]


def _labelled(samples: Sequence[Sample]) -> list[dict[str, list[int]]]:
    return [
        {"input_ids": list(each["input_ids"]), "labels": list(each.get("labels", each["input_ids"]))}
        for each in samples
    ]
