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

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .comparison_result import WAYS, Comparison, Way
from .comparison_runs import Job, OnProgress, Sample, run_all

if TYPE_CHECKING:
    from ...ds_configs.quantization.scheme import QuantizationScheme
    from ..distillation.config import DistillationConfig

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
        UsageError: what cannot be compared; all faults at once.
    """
    return run_all(
        Job(
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
    )
