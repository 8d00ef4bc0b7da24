"""Distill a small CLIP from a larger one, on pictures with known captions.

    python examples/distill_clip.py

Every picture shows one shape in one colour in one corner, in noise. Its caption names the three. Accuracy is the share
of new pictures for which a model selects the right one of all 144 captions. It runs offline on a CPU in half a minute.
"""

from __future__ import annotations

import tempfile
from itertools import product
from typing import Any

import torch
from shardwright.trainers.distillation import ClipDistillationConfig, CLIPDistillationTrainer
from transformers import CLIPConfig, CLIPModel, Trainer, TrainingArguments, set_seed

SIDE, BEGIN, END = 16, 1, 2
COLOURS = torch.tensor([*product((0.2, 0.9), repeat=3), (0.9, 0.5, 0.2)])
SHAPES = ("square", "cross", "ring", "bar")
CAPTIONS = list(product(range(len(COLOURS)), range(len(SHAPES)), range(4)))


def picture(colour: int, shape: int, corner: int, draw: torch.Generator) -> torch.Tensor:
    """Return one noisy picture, [3, SIDE, SIDE]."""
    size = SIDE // 2 - 1
    rows, columns = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    middle = size // 2
    inner = (rows - middle).abs().maximum((columns - middle).abs()) < middle
    masks = (rows >= 0, (rows == middle) | (columns == middle), ~inner, (rows - middle).abs() <= 1)
    top, left = (SIDE // 2 * half + int(torch.randint(0, 2, (1,), generator=draw)) for half in divmod(corner, 2))
    canvas = 0.4 * torch.rand(3, SIDE, SIDE, generator=draw)
    region = canvas[:, top : top + size, left : left + size]
    region[:, masks[shape]] = COLOURS[colour][:, None]
    return canvas


def words(colour: int, shape: int, corner: int) -> torch.Tensor:
    """Return a caption's tokens."""
    return torch.tensor([BEGIN, 3 + corner, 7 + colour, 7 + len(COLOURS) + shape, END])


def pairs(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Return pictures with their captions."""
    draw = torch.Generator().manual_seed(seed)
    chosen = [CAPTIONS[int(torch.randint(len(CAPTIONS), (1,), generator=draw))] for _ in range(count)]
    return [{"pixel_values": picture(*caption, draw), "input_ids": words(*caption)} for caption in chosen]


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Stack; all captions have one length."""
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    return batch | {"attention_mask": torch.ones_like(batch["input_ids"]), "return_loss": True}


def model(width: int, layers: int) -> Any:
    """Return a CLIP with random weights."""
    set_seed(0)
    shape = {
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
    }
    text = shape | {"vocab_size": 32, "max_position_embeddings": 8, "bos_token_id": BEGIN, "eos_token_id": END}
    vision = shape | {"image_size": SIDE, "patch_size": 4}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=width))


def train(kind: Any, student: Any, rows: Any, steps: int, **more: Any) -> Any:
    """Train and return the student."""
    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            directory,
            per_device_train_batch_size=32,
            learning_rate=2e-3,
            max_steps=steps,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
            remove_unused_columns=False,
        )
        trainer = kind(model=student, args=arguments, train_dataset=rows, data_collator=collate, **more)
        trainer.log = lambda *_, **__: None
        trainer.train()
    return student.eval()


def accuracy(clip: Any, rows: list[dict[str, torch.Tensor]]) -> float:
    """Return how often the most similar caption is the right one."""
    captions = torch.stack([words(*caption) for caption in CAPTIONS])
    images = torch.stack([row["pixel_values"] for row in rows])
    with torch.no_grad():
        found = clip(pixel_values=images, input_ids=captions, attention_mask=torch.ones_like(captions))
    chosen = captions[found.logits_per_image.argmax(-1)]
    return float((chosen == torch.stack([row["input_ids"] for row in rows])).all(-1).float().mean())


def main() -> None:
    """Print the zero-shot accuracy of teacher and students."""
    many, few, held_out = pairs(2048, seed=1), pairs(320, seed=2), pairs(400, seed=3)
    teacher = train(Trainer, model(width=64, layers=2), many, steps=700)
    alone = train(Trainer, model(width=32, layers=2), few, steps=150)
    config = ClipDistillationConfig(task=1.0, similarity=1.0, interactive=1.0, features=2.0)
    taught = train(
        CLIPDistillationTrainer, model(width=32, layers=2), few, steps=150, teacher=teacher, distillation=config
    )
    print(f"one of {len(CAPTIONS)} captions, by chance         {1 / len(CAPTIONS):.1%}")
    print(f"teacher, 2048 pairs                   {accuracy(teacher, held_out):.1%}")
    print(f"student, 320 pairs alone              {accuracy(alone, held_out):.1%}")
    print(f"student, the same and its teacher     {accuracy(taught, held_out):.1%}")


if __name__ == "__main__":
    main()
