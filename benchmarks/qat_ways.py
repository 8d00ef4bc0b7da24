"""What quantization-aware training gains over fine-tuning and quantizing afterwards, at equal cost and on one's model.

Every way starts from the same weights and takes the same steps over the same samples in the same order:

    ft            fine-tuned in full precision: what nothing quantized should beat
    ft-rtn        that model rounded: what is lost by rounding
    ft-gptq       that model quantized by GPTQ, calibrated on the training text: the fair rival
    qat           fine-tuned with rounded numbers
    qat-learned   likewise with scales that are trained (LSQ)
    qad           distilled with rounded numbers from the model before training
    qad-ft        likewise from the fine-tuned one, which was trained for as many steps before

A way's share of the gap is ``(L_rtn - L_way) / (L_rtn - L_ft)``, L the mean cross-entropy of held-out text in nats.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from itertools import chain
from typing import TYPE_CHECKING, Any

from qat_ways_result import WAYS, Comparison, Way
from qat_ways_runs import Job, OnProgress, Sample, run_all
from shardwright.ds_configs.specs.errors import ConfigError, UsageError
from shardwright.trainers.qat.callback import step_errors
from shardwright.trainers.qat.rounding.attach import attach
from shardwright.trainers.qat.rounding.config import QATConfig

if TYPE_CHECKING:
    from shardwright.ds_configs.quantization.scheme import QuantizationScheme
    from shardwright.trainers.distillation.config import DistillationConfig

__all__ = ["WAYS", "Comparison", "Way", "compare_qat"]


def compare_qat(
    model: Any,
    scheme: str | QuantizationScheme = "W4A16",
    *,
    train_samples: Sequence[Sample],
    evaluation_samples: Sequence[Sample],
    steps: int,
    learning_rate: float,
    seeds: Sequence[int] = (0, 1, 2),
    batch_size: int = 4,
    ways: Sequence[Way] = WAYS,
    calibration_samples: int = 64,
    training: Mapping[str, Any] | None = None,
    qat: Mapping[str, Any] | None = None,
    distillation: DistillationConfig | None = None,
    export: bool = True,
    on_progress: OnProgress = lambda _: None,
) -> Comparison:
    """Train a model in every way with equal steps, data and hyperparameters, and judge all on the same text.

    >>> found = compare_qat(model, "W2A16", train_samples=rows, evaluation_samples=held_out,
    ...                     steps=500, learning_rate=1e-3)  # doctest: +SKIP
    >>> found.recovered("qat").value > found.recovered("ft-gptq").value  # doctest: +SKIP
    True

    Args:
        model: Causal LM of Transformers with its full weights; it stays as it is, copies are trained.
        scheme: Name of a scheme with integer weights, as for `shardwright quantize`, or a scheme.
        train_samples: `input_ids`, and `labels` if they are others; also what GPTQ calibrates on.
        evaluation_samples: Likewise, held out; the errors are over them.
        steps: Optimizer steps of every way.
        learning_rate: Of every way.
        seeds: One run of every way for each.
        batch_size: Samples of a step on each device.
        ways: What to measure; the two ends of the gap always are.
        calibration_samples: The first so many training samples go to GPTQ and to stored ranges of activations.
        training: More fields of `TrainingArguments`, for every way.
        qat: Fields of `QATConfig`, such as `stored_dtype`.
        distillation: For `qad` and `qad-ft`; default: the teacher alone (α = 1).
        export: Write the checkpoint of every trained way, load it, and judge it too.
        on_progress: Receives one line for each thing done.

    Raises:
        UsageError: the runs cannot be compared; lists all errors.
    """
    job = Job(
        model=model,
        scheme=scheme,
        train_samples=train_samples,
        evaluation_samples=evaluation_samples,
        steps=steps,
        learning_rate=learning_rate,
        seeds=tuple(seeds),
        batch_size=batch_size,
        ways=tuple(ways),
        calibration_samples=calibration_samples,
        training=dict(training or {}),
        qat=dict(qat or {}),
        distillation=distillation,
        export=export,
        on_progress=on_progress,
    )
    errors = _errors(job)
    if errors:
        raise UsageError(errors)
    return run_all(job)


def _errors(job: Job) -> list[ConfigError]:
    errors = []

    def check(where: str, value: object, holds: bool, rule: str, fix: str = "") -> None:
        if not holds:
            errors.append(ConfigError(where=where, value=value, rule=rule, fix=fix))

    check("steps", job.steps, job.steps >= 1, "must be at least 1")
    check("learning_rate", job.learning_rate, job.learning_rate > 0, "must be above 0")
    check("batch_size", job.batch_size, job.batch_size >= 1, "must be at least 1")
    check("calibration_samples", job.calibration_samples, job.calibration_samples >= 1, "must be at least 1")
    distinct = len(set(job.seeds)) == len(job.seeds)
    check("seeds", job.seeds, bool(job.seeds) and distinct, "must name at least one seed, and none twice")
    for name in ("train_samples", "evaluation_samples"):
        check(name, "none", len(getattr(job, name)) > 0, "must hold samples with input_ids")
    unknown = [way for way in job.ways if way not in WAYS]
    check("ways", ", ".join(unknown), not unknown, f"must be of {', '.join(WAYS)}")
    trainable = any(parameter.requires_grad for parameter in job.model.parameters())
    check("model", type(job.model).__name__, trainable, "has nothing to train", "model.requires_grad_(True)")
    taken = sorted({"seed", "data_seed", "max_steps", "learning_rate", "output_dir"} & set(job.training))
    check("training", ", ".join(taken), not taken, "is the same for every way, and given beside it")
    return errors + _rounding_errors(job)


def _rounding_errors(job: Job) -> list[ConfigError]:
    """Return what would stop a way after others were trained."""
    known = [each.name for each in fields(QATConfig) if each.name != "scheme"]
    unknown = [_unknown_option(name, known) for name in job.qat if name not in known]
    if unknown:
        return unknown
    found: list[ConfigError] = []
    for way in ("qat", "qat-learned") if "qat-learned" in job.ways else ("qat",):
        try:
            attachment = attach(_without_data(job.model), job.config(way))
        except UsageError as error:
            errors = list(error.errors)
        else:
            errors = step_errors(attachment, job.steps) if job.steps >= 1 else []
        found += [config_error for config_error in errors if config_error not in found]
    return found


def _unknown_option(name: str, known: Collection[str]) -> ConfigError:
    if name == "scheme":
        return ConfigError(where="qat", value=name, rule="is the same for every way, and given beside it")
    near = get_close_matches(name, known, n=3, cutoff=0.5)
    fix = f"did you mean {' or '.join(near)}?" if near else f"fields are {', '.join(known)}"
    return ConfigError(where="qat", value=name, rule="is no field of QATConfig", fix=fix)


def _without_data(model: Any) -> Any:
    """Return a copy of a model whose tensors are on the meta device, and cost no memory."""
    import torch

    def meta(tensor: Any) -> Any:
        empty = tensor.detach().to("meta")
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        return torch.nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty

    return copy.deepcopy(model, {id(each): meta(each) for each in chain(model.parameters(), model.buffers())})
