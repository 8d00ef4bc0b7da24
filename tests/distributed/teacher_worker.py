"""Rank script: train a student with or without a placed teacher, and write losses and observations."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distillation_cases import Layout, collate, models, samples
from shardwright.plugins.accelerate.cpu_ranks import configure_cpu_ranks

STEPS = 2
PROBE_ROWS, PROBE_TOKENS = 2, 12


@dataclass(frozen=True, kw_only=True)
class TeacherCase:
    """Engine of the student and placement of the teacher; `None` trains without a teacher."""

    engine: str
    zero_stage: int = 0
    placement: str | None = None

    @property
    def name(self) -> str:
        engine = f"zero{self.zero_stage}" if self.engine == "deepspeed" else self.engine
        return f"{engine}-{self.placement or 'alone'}"

    @property
    def alone(self) -> TeacherCase:
        return TeacherCase(engine=self.engine, zero_stage=self.zero_stage)


CASES = [
    TeacherCase(engine="ddp", placement="replica"),
    TeacherCase(engine="ddp", placement="sharded"),
    TeacherCase(engine="deepspeed", zero_stage=2, placement="sharded"),
    TeacherCase(engine="deepspeed", zero_stage=3, placement="replica"),
    TeacherCase(engine="deepspeed", zero_stage=3, placement="sharded"),
    TeacherCase(engine="deepspeed", zero_stage=3, placement="offloaded"),
    TeacherCase(engine="ddp", placement="offloaded"),
    TeacherCase(engine="fsdp2", placement="sharded"),
    TeacherCase(engine="fsdp2", placement="offloaded"),
]


def probe(rank: int) -> Any:
    import torch

    return torch.randint(0, 512, (PROBE_ROWS, PROBE_TOKENS), generator=torch.Generator().manual_seed(rank))


def local_bytes(model: Any) -> int:
    """Return the bytes of parameters that this rank stores, on its device or, for those on meta, in a state dict."""
    total = 0
    for parameter in model.parameters():
        stored = parameter.detach()
        if hasattr(parameter, "ds_tensor"):
            stored = parameter.ds_tensor
        elif hasattr(parameter, "to_local"):
            stored = parameter.detach().to_local()
        total += stored.numel() * stored.element_size()
    return total


def observe(teacher: Any, expected: Any, rank: int) -> dict[str, Any]:
    logits = teacher(input_ids=probe(rank)).logits
    with teacher.gathered_head() as head:
        head_difference = float((head.weight_VH.detach() - expected["head"]).abs().max())
    return {
        "difference": float((logits - expected["logits"]).abs().max()),
        "head_difference": head_difference,
        "training": any(module.training for module in teacher.model.modules()),
        "gradients": sum(parameter.grad is not None for parameter in teacher.model.parameters()),
        "requires_grad": bool(logits.requires_grad),
        "local_bytes": local_bytes(teacher.model),
    }


def train(case: TeacherCase, directory: Path, output: Path, expected: Any) -> dict[str, Any]:
    import torch
    from shardwright.plugins.transformers.teacher_placement import load_teacher, place_teacher
    from shardwright.trainers.distillation.teacher import frozen_copy
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    overrides: dict[str, Any] = configure_cpu_ranks(case.engine)  # type: ignore[arg-type]
    settings = Layout(engine=case.engine, zero_stage=case.zero_stage).arguments(2)
    settings |= {"max_steps": STEPS, "learning_rate": 0.5, "per_device_train_batch_size": 2}
    arguments = TrainingArguments(str(output / case.name), **settings, **overrides)
    student_path, teacher_path = models(directory)
    student = AutoModelForCausalLM.from_pretrained(student_path)
    copied = frozen_copy(student).state_dict()
    copy_difference = max(float((copied[name] - value).abs().max()) for name, value in expected["student"].items())
    teacher, observed = None, []
    if case.placement is not None:
        placement: Any = case.placement
        engine: Any = case.engine
        teacher = load_teacher(str(teacher_path), placement=placement, dtype=torch.float32, engine=engine)

    class BesideTeacher(Trainer):
        def compute_loss(self, model: Any, *given: Any, **more: Any) -> Any:
            if placed is not None:
                model.train()
                observed.append(observe(placed, expected, arguments.process_index))
            return super().compute_loss(model, *given, **more)

    trainer = BesideTeacher(model=student, args=arguments, train_dataset=samples(), data_collator=collate)
    placed = None
    if teacher is not None:
        placed = place_teacher(teacher, placement, accelerator=trainer.accelerator, micro_batch_size=2)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    patched = torch.nn.functional.linear is not torch._C._nn.linear
    found = {"losses": losses, "observed": observed, "patched_linear": patched, "copy_difference": copy_difference}
    return found | {"is_partitioned": any(hasattr(parameter, "ds_id") for parameter in student.parameters())}


def main(directory: Path, output: Path, name: str) -> None:
    import os

    import torch
    from transformers import AutoModelForCausalLM

    rank = int(os.environ["RANK"])
    whole = AutoModelForCausalLM.from_pretrained(models(directory)[1], dtype=torch.float32)
    student = AutoModelForCausalLM.from_pretrained(models(directory)[0]).state_dict()
    with torch.no_grad():
        expected = {
            "student": student,
            "logits": whole(input_ids=probe(rank)).logits,
            "head": whole.lm_head.weight.detach().clone(),
        }
    chosen = next(case for case in (*CASES, *(case.alone for case in CASES)) if case.name == name)
    record = train(chosen, directory, output, expected)
    (output / f"{name}-{rank}.json").write_text(json.dumps(record))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
