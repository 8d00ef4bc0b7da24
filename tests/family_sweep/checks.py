"""Checks of a family: each returns its result, rejects the family with a reason, or fails."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from engine_settings import engine_settings
from equivalence.records import Record, logged
from family_sweep.tiny_configs import VOCAB_SIZE, tiny_model
from shardwright.ds_configs.specs.errors import ShardwrightError

LOSS_TOLERANCE = 1e-5
STEPS = 2
State = Literal["passes", "refused", "broken"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    state: State
    said: str = ""
    """The difference, the reason or the error, in a line."""


def samples() -> list[dict[str, Any]]:
    import torch

    draw = torch.Generator().manual_seed(3)
    rows = [torch.randint(2, VOCAB_SIZE - 4, (16,), generator=draw).tolist() for _ in range(4 * STEPS)]
    return [{"input_ids": ids, "labels": [-100, -100, *ids[2:]], "attention_mask": [1] * 16} for ids in rows]


def arguments_in(directory: str, **changes: Any) -> Any:
    from transformers import TrainingArguments

    settings: dict[str, Any] = {"max_steps": STEPS, "optim": "sgd", "learning_rate": 0.05, "use_cpu": True, "seed": 5}
    return TrainingArguments(directory, **engine_settings("single", 4) | settings | changes)


def distillation(class_name: str, directory: str) -> Finding:
    """Compare the loss in the place of the head with the one from whole logits."""
    from shardwright.trainers.distillation import DistillationConfig, DistillationTrainer

    found = {}
    for implementation in ("auto", "plain"):
        trainer = DistillationTrainer(
            model=tiny_model(class_name, seed=1),
            args=arguments_in(directory),
            teacher=tiny_model(class_name, seed=2),
            distillation=DistillationConfig(alpha=0.5, temperature=2.0, implementation=implementation),  # type: ignore[arg-type]
            train_dataset=samples(),
        )
        trainer.train()
        found[implementation] = logged(trainer)
        if implementation == "auto":
            fused = trainer._checked_head
    difference = max(abs(own - other) for own, other in zip(found["auto"], found["plain"], strict=True))
    assert difference <= LOSS_TOLERANCE, f"fused and plain differ by {difference:.1e}"
    return Finding(state="passes", said=f"{'fused' if fused else 'whole logits'}, {difference:.1e}")


def rounded_training(class_name: str, directory: str) -> Finding:
    """Train with rounding, export, and prove the export."""
    from shardwright.ds_configs.quantization.scheme import changed, scheme_named
    from shardwright.trainers.qat.callback import QATCallback
    from transformers import Trainer

    callback = QATCallback(changed(scheme_named("W4A16"), group_size=16))
    model = tiny_model(class_name)
    trainer = Trainer(model, arguments_in(directory, max_steps=1), train_dataset=samples(), callbacks=[callback])
    trainer.train()
    result = callback.export(trainer, Path(directory) / "export", verify=True)
    assert result.verification is None or result.verification.passed, result.verification.reason
    return Finding(state="passes", said=f"{len(callback.attachment.layers)} matrices")  # type: ignore[union-attr]


def quantized(class_name: str, directory: str) -> Finding:
    """Round to nearest after training; what was written is loaded and compared."""
    from shardwright.plugins.transformers.training_arguments import byte_tokenizer
    from shardwright.trainers.quantization import quantize

    source = Path(directory) / "source"
    tiny_model(class_name).save_pretrained(source)
    byte_tokenizer(VOCAB_SIZE).save_pretrained(source)
    settings = {"scheme": "W4A16", "method": "rtn", "group_size": 16}
    outcome = quantize(str(source), Path(directory) / "quantized", evaluate=False, **settings)
    assert outcome.verification.passed, outcome.verification.reason
    return Finding(state="passes", said=f"{len(outcome.prepared.layers)} matrices")


CHECKS: dict[str, Callable[[str, str], Finding]] = {
    "distillation": distillation,
    "QAT export": rounded_training,
    "quantize": quantized,
}


def finding(check: str, class_name: str) -> Finding:
    with tempfile.TemporaryDirectory(prefix="family-") as directory:
        try:
            return CHECKS[check](class_name, directory)
        except ShardwrightError as error:
            return Finding(state="refused", said=str(error).splitlines()[0])
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            return Finding(state="broken", said=f"{type(error).__name__}: {lines[-1]}")


def compared(own: Record, reference: Record) -> Finding:
    """Return what a training came to, beside one process."""
    if "refused" in own:
        return Finding(state="refused", said=own["refused"].splitlines()[0])
    if "error" in own or "losses" not in reference:
        text = own.get("error") or reference.get("error") or str(reference)
        lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
        named = [line for line in lines if "Error" in line.split(":")[0] or "Exception" in line.split(":")[0]]
        return Finding(state="broken", said=(named or lines)[-1][:300])
    difference = max(abs(one - other) for one, other in zip(own["losses"], reference["losses"], strict=True))
    return Finding(state="passes" if difference <= LOSS_TOLERANCE else "broken", said=f"{difference:.1e}")
