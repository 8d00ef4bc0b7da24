"""Perplexity of students right after cutting: `python benchmarks/student_starting_points.py [--steps 400] [--strict]`.

A small teacher learns most of Python's help, byte by byte; students are cut out of it in every way and read the rest.
With `--strict`, choosing channels and heads by activations must beat chance.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from shardwright.plugins.safetensors.reading import read_checkpoint
from shardwright.plugins.transformers.training_arguments import byte_tokenizer
from shardwright.trainers.data.sources import pack, read_documents
from shardwright.trainers.distillation.student.maker import make_student, plan_student, student_scores
from shardwright.trainers.distillation.student.request import StudentRequest
from shardwright.trainers.distillation.student.width import Scores
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, set_seed

VOCAB_SIZE, SEQ_LEN, MICRO_BATCH_SIZE, HELD_OUT_SAMPLES = 257, 128, 16, 128
CONFIG = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": SEQ_LEN,
    "bos_token_id": None,
    "eos_token_id": 256,
}
RANDOM_SEEDS = (0, 1, 2)


def train_teacher(directory: Path, documents: list[str], steps: int) -> None:
    """Train the teacher and save it with its tokenizer."""
    set_seed(0)
    tokenizer = byte_tokenizer(VOCAB_SIZE)
    rows_NT = torch.stack([sample["input_ids"] for sample in pack(documents, tokenizer, SEQ_LEN)])
    model = LlamaForCausalLM(LlamaConfig(**CONFIG))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps, pct_start=0.1)
    draw = torch.Generator().manual_seed(0)
    for _ in range(steps):
        rows_BT = rows_NT[torch.randint(len(rows_NT), (MICRO_BATCH_SIZE,), generator=draw)]
        model(input_ids=rows_BT, labels=rows_BT).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


@torch.no_grad()
def perplexity(directory: Path, documents: list[str]) -> tuple[float, int]:
    """Return perplexity per byte of held-out text, and the model's parameters."""
    model = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=False).eval()
    samples = pack(documents, byte_tokenizer(VOCAB_SIZE), SEQ_LEN)
    rows_NT = torch.stack([sample["input_ids"] for sample in samples[:HELD_OUT_SAMPLES]])
    losses = [float(model(input_ids=rows_BT, labels=rows_BT).loss) for rows_BT in rows_NT.split(16)]
    return math.exp(mean(losses)), model.num_parameters()


def random_like(scores: Scores, seed: int) -> Scores:
    """Return scores that say nothing, with the same statistics before the norms."""
    draw = torch.Generator().manual_seed(seed)

    def shuffled(old: torch.Tensor) -> torch.Tensor:
        return torch.rand(old.shape, generator=draw, dtype=old.dtype)

    return replace(
        scores,
        hidden_H=shuffled(scores.hidden_H),
        intermediate={layer: shuffled(old) for layer, old in scores.intermediate.items()},
        heads={layer: shuffled(old) for layer, old in scores.heads.items()},
    )


def without_gains(scores: Scores) -> Scores:
    """Return scores whose energies are alike everywhere, so that no gain is corrected."""
    return replace(scores, energies={}, residual_energy_H=torch.ones_like(scores.residual_energy_H))


class Cutter:
    """Makes students of one teacher and measures them."""

    def __init__(self, teacher: Path, calibration: Path, held_out: list[str], work: Path) -> None:
        self.teacher, self.calibration, self.held_out, self.work = teacher, calibration, held_out, work
        self.count = 0

    def scores(self, **request: Any) -> Scores:
        """Return the importance that a request asks for."""
        return student_scores(
            plan_student(str(self.teacher), StudentRequest(**request)), self.teacher, read_checkpoint(self.teacher)
        )

    def measure(self, scores: Scores | None = None, **request: Any) -> tuple[float, int]:
        """Return perplexity and parameters of one student."""
        self.count += 1
        target = self.work / str(self.count)
        plan = plan_student(str(self.teacher), StudentRequest(**request))
        make_student(plan, str(self.teacher), target, scores=scores)
        return perplexity(target, self.held_out)


def layer_rows(cutter: Cutter) -> Iterator[tuple[str, float, int]]:
    """Measure which layers to keep."""
    for count in (6, 4):
        yield f"{count} of 8 layers, evenly spread", *cutter.measure(layers=count)
        yield f"{count} of 8 layers, the first", *cutter.measure(keep_layers=tuple(range(count)))


def width_rows(cutter: Cutter) -> Iterator[tuple[str, float, int]]:
    """Measure how to choose channels and heads."""
    widths: dict[str, dict[str, int]] = {
        "384 of 512 MLP channels": {"intermediate_size": 384},
        "256 of 512 MLP channels": {"intermediate_size": 256},
        "4 of 6 heads": {"heads": 4},
        "144 of 192 hidden channels": {"hidden_size": 144},
    }
    for name, sizes in widths.items():
        scores = cutter.scores(**sizes, importance="activation", text=(cutter.calibration,))
        yield f"{name}, by activations", *cutter.measure(scores, **sizes)
        yield f"{name}, by magnitude", *cutter.measure(**sizes)
        chance = [cutter.measure(random_like(scores, seed), **sizes) for seed in RANDOM_SEEDS]
        geometric = math.exp(mean(math.log(value) for value, _ in chance))
        yield f"{name}, at random (of {len(RANDOM_SEEDS)})", geometric, chance[0][1]
        if "hidden_size" in sizes:
            yield f"{name}, by activations, gains as they were", *cutter.measure(without_gains(scores), **sizes)


def thinned_rows(cutter: Cutter) -> Iterator[tuple[str, float, int]]:
    """Measure low rank and zeros, which leave the number of stored parameters as it is."""
    for energy in (0.95, 0.9, 0.8):
        yield f"low rank, {energy:.0%} of the energy", *cutter.measure(low_rank_energy=energy)
    for share in (0.25, 0.5):
        for prune in ("magnitude", "l1"):
            yield f"{share:.0%} zeros, {prune}", *cutter.measure(sparsity=share, prune=prune)
    yield "25% of the rows zero, l1", *cutter.measure(sparsity=0.25, prune="l1", granularity="row")


def main() -> int:
    """Print the table; with `--strict`, return 1 where chance wins."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps of the teacher")
    parser.add_argument("--strict", action="store_true", help="exit with 1 when a choice is no better than chance")
    flags = parser.parse_args()
    topics = read_documents(None)
    learned, held_out = [t for i, t in enumerate(topics) if i % 8], topics[::8]
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        began = time.perf_counter()
        train_teacher(work / "teacher", learned, flags.steps)
        print(f"teacher trained for {flags.steps} steps in {time.perf_counter() - began:.0f} s\n")
        (work / "text").write_text("\n".join(learned), encoding="utf-8")
        cutter = Cutter(work / "teacher", work / "text", held_out, work)
        print("| student | parameters | perplexity per byte |\n|---|---:|---:|")
        teacher = ("the teacher itself", *perplexity(work / "teacher", held_out))
        for name, value, parameters in (teacher, *layer_rows(cutter), *width_rows(cutter), *thinned_rows(cutter)):
            found[name] = value
            print(f"| {name} | {parameters / 1e6:.2f} M | {value:,.2f} |", flush=True)
    pairs = []
    for name in (name for name in found if name.endswith("by activations")):
        chance = next(found[n] for n in found if n.startswith(name.removesuffix("by activations")) and "random" in n)
        pairs.append((found[name], chance))
    worse = sum(chosen >= plain for chosen, plain in pairs)
    print(f"\n{len(pairs) - worse} of {len(pairs)} choices by activations are better than chance")
    return int(flags.strict and worse > 0)


if __name__ == "__main__":
    raise SystemExit(main())
