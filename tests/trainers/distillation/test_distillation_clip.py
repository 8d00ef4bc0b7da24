"""Dual encoders: losses against fp64 formulas, gradients over ranks, training and reloading."""

from __future__ import annotations

import math
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from distilling import training_arguments
from shardwright.ds_configs.specs.errors import ShardwrightError, UsageError
from shardwright.trainers.distillation.clip_trainer import (
    ClipDistillationConfig,
    CLIPDistillationTrainer,
    feature_loss,
    interactive_loss,
    task_loss,
)

pytestmark = pytest.mark.slow

ROWS = 7


def embeddings(width: int, seed: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    made = (torch.randn(ROWS, width, generator=draw) for _ in range(2))
    return tuple(torch.nn.functional.normalize(one, dim=-1).to(dtype).requires_grad_() for one in made)  # type: ignore


def cross_entropy(similarities: torch.Tensor) -> torch.Tensor:
    """Both directions, from probabilities in fp64."""
    there, back = torch.softmax(similarities, 1).diagonal(), torch.softmax(similarities, 0).diagonal()
    return -(there.log().mean() + back.log().mean()) / 2


def check(loss: torch.Tensor, leaves: Any, expected: torch.Tensor, exact_leaves: Any, rel: float = 1e-5) -> None:
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=rel)
    found, wanted = torch.autograd.grad(loss, leaves), torch.autograd.grad(expected, exact_leaves)
    for one, other in zip(found, wanted, strict=True):
        assert float((one.double() - other).norm()) < 1e-4 * float(other.norm()) + 1e-9


def test_losses_match_fp64_formulas() -> None:
    images, texts = embeddings(16, 1)
    taught_images, taught_texts = (value.detach() for value in embeddings(16, 2))
    scale = torch.tensor(1.5, requires_grad=True)
    i, t, ti, tt = (value.detach().double() for value in (images, texts, taught_images, taught_texts))
    i, t, s = (value.requires_grad_() for value in (i, t, torch.tensor(1.5, dtype=torch.float64)))
    leaves, exact = (images, texts, scale), (i, t, s)
    check(task_loss(images, texts, scale), leaves, cross_entropy(s.exp() * i @ t.T), exact)
    found = interactive_loss(images, texts, taught_images, taught_texts, scale)
    one, other = (torch.softmax(s.exp() * a @ b.T, 1).diagonal().log().mean() for a, b in ((i, tt), (t, ti)))
    check(found, leaves, -(one + other) / 2, exact)
    check(feature_loss(images, taught_images), (images,), ((i - ti) ** 2).sum() / ROWS, (i,))


def test_bf16_embeddings_are_computed_in_fp32() -> None:
    images, texts = embeddings(16, 1, torch.bfloat16)
    expected = float(cross_entropy(math.exp(2.0) * images.double() @ texts.double().T).detach())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert float(task_loss(images, texts, torch.tensor(2.0)).detach()) == pytest.approx(expected, rel=1e-5)


def tiny_clip(width: int, seed: int) -> Any:
    from transformers import CLIPConfig, CLIPModel, set_seed

    set_seed(seed)
    shape = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = shape | {"vocab_size": 40, "max_position_embeddings": 8, "bos_token_id": 1, "eos_token_id": 2}
    vision = shape | {"image_size": 16, "patch_size": 8}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=width))


def pairs(count: int) -> list[dict[str, torch.Tensor]]:
    """Return images of one colour with captions that name the colour."""
    draw = torch.Generator().manual_seed(0)
    made = []
    for _ in range(count):
        colour = torch.randint(0, 30, (3,), generator=draw)
        image = (colour / 30.0)[:, None, None].expand(3, 16, 16) + 0.02 * torch.randn(3, 16, 16, generator=draw)
        made.append({"pixel_values": image, "input_ids": torch.tensor([1, *(3 + colour).tolist(), 2])})
    return made


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    return batch | {"attention_mask": torch.ones_like(batch["input_ids"])}


def trainer_of(directory: Path, student: Any, teacher: Any, **changes: Any) -> CLIPDistillationTrainer:
    settings = {"per_device_train_batch_size": 8, "max_steps": 16, "learning_rate": 2e-3, "optim": "adamw_torch"}
    return CLIPDistillationTrainer(
        model=student,
        teacher=teacher,
        distillation=ClipDistillationConfig(),
        args=training_arguments(directory, **(settings | changes)),
        train_dataset=pairs(32),
        eval_dataset=pairs(16),
        data_collator=collate,
    )


def test_student_approaches_teacher_and_reloads(tmp_path: Path) -> None:
    from transformers import CLIPModel

    trainer = trainer_of(tmp_path, tiny_clip(16, 1), tiny_clip(24, 2))
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    for name in ("task_loss", "interactive_loss", "features_loss"):
        assert logs[-1][name] < logs[0][name]
    weights = asdict(ClipDistillationConfig())
    total = sum(weights[name] * logs[0][f"{name}_loss"] for name in ("task", "interactive", "features"))
    assert logs[0]["loss"] == pytest.approx(total, rel=1e-5)
    trainer.save_model(str(tmp_path / "saved"))
    _, report = CLIPModel.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]


def test_resumed_run_matches_uninterrupted_run(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    ends = []
    for checkpoint in (None, str(tmp_path / "checkpoint-2")):
        trainer = trainer_of(tmp_path, tiny_clip(16, 1), tiny_clip(24, 2), **saving)
        trainer.train(resume_from_checkpoint=checkpoint)
        ends.append(trainer.model.state_dict())
    assert "distillation_alignment.image.weight" in ends[0]
    for name, value in ends[0].items():
        assert torch.equal(value, ends[1][name]), name


def test_bad_input(tmp_path: Path) -> None:
    from distilling import tiny

    with pytest.raises(UsageError, match=r"teacher = 'LlamaForCausalLM': must be a dual encoder"):
        trainer_of(tmp_path, tiny_clip(16, 1), tiny("llama"))
    with pytest.raises(UsageError) as caught:
        ClipDistillationConfig(task=-1.0, interactive=float("inf"))
    assert [error.where for error in caught.value.errors] == ["task", "interactive"]
    with pytest.raises(UsageError) as caught:
        CLIPDistillationTrainer(model=tiny_clip(16, 1), compute_loss_func=lambda *_: None)
    assert [error.where for error in caught.value.errors] == ["compute_loss_func", "teacher"]
    teacher = tiny_clip(16, 2)
    teacher.visual_projection.weight.data[0, 0] = float("nan")
    with pytest.raises(ShardwrightError, match="is NaN or infinite"):
        trainer_of(tmp_path, tiny_clip(16, 1), teacher).train()


def one_step(directory: Path, ranks: int, **changes: Any) -> CLIPDistillationTrainer:
    """Return a trainer whose only step has all sixteen pairs, on any number of ranks."""
    return CLIPDistillationTrainer(
        model=tiny_clip(16, 1),
        teacher=tiny_clip(24, 2),
        args=training_arguments(
            directory, per_device_train_batch_size=16 // ranks, **({"learning_rate": 1024.0} | changes)
        ),
        train_dataset=pairs(16),
        data_collator=collate,
    )


@pytest.mark.distributed
def test_two_ranks_give_the_gradient_of_the_full_batch(tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from warm_ranks import run_ranks

    run_ranks([__file__, tmp_path])
    two = load_file(tmp_path / "weights.safetensors")
    trainer = one_step(tmp_path, ranks=1)
    start = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.train()
    one = trainer.model.state_dict()
    assert {"logit_scale", "distillation_alignment.log_scale", "distillation_alignment.image.weight"} <= two.keys()
    largest = max(float((one[name] - start[name]).abs().max()) for name in start)
    for name in two:
        assert float((one[name] - two[name]).abs().max()) < 1e-6 * largest, name


if __name__ == "__main__":
    from safetensors.torch import save_file
    from shardwright.plugins.accelerate import configure_cpu_ranks

    on_rank = one_step(Path(sys.argv[1]), int(os.environ["WORLD_SIZE"]), **configure_cpu_ranks("ddp"))
    on_rank.train()
    if on_rank.args.process_index == 0:
        save_file(on_rank.model.state_dict(), Path(sys.argv[1]) / "weights.safetensors")
