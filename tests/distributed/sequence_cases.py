"""The training runs under sequence parallelism that must equal one process, and how either of them is run.

Ranks run this file.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from cases import deepspeed_configuration
from engine_settings import engine_settings
from fresh_process import forget_last_run
from shardwright.plugins.accelerate.cpu_ranks import configure_cpu_ranks
from shardwright.trainers.data.samples import collate
from small_models import llama

VOCAB = 128
IGNORED = -100
STEPS = 3
SAMPLES = 36
LONGEST = 21
EVALUATED = {2: 7, 4: 8}
"""Samples of an evaluation by ranks. One sequence at a time allows a smaller last batch."""


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    zero_stage: int = 2
    ranks: int = 2
    sequence_parallel_size: int = 2
    accumulation: int = 1
    micro_step_samples: int = 4
    """Samples of a micro-step over all ranks."""
    optimizer: str = "sgd"
    kv_heads: int = 2
    tied: bool = False
    label_smoothing: float = 0.0
    loss: str = "model"
    """`model`; `mean` or `sum` of a compute_loss that shifts; `aligned` of one that gets shifted labels."""
    checkpointing: bool = False
    tiled_mlp: int = 0
    tiled_loss: int = 0
    offloaded_checkpoints: int = 0
    lora: bool = False
    evaluates: bool = False
    """Evaluated while it trains, with a metric of logits."""
    evaluated: int = 0
    """Samples of its evaluation, as `EVALUATED` has it where this is 0."""
    interrupted: bool = False
    """Saved after two steps and resumed in another Trainer."""
    family: str = "llama"
    """`gpt_neox` has no number of key/value heads in its configuration, and `mixtral` null for the size of a head."""
    steps: int = STEPS
    samples: int = SAMPLES
    """With 34, the last micro-batch of an epoch is smaller."""
    streams: bool = False
    """Reads an iterable data set."""
    workers: int = 0
    """Processes that read."""
    context: bool = False
    """Context parallelism under FSDP2 in the place of sequence parallelism."""
    parallel: bool = True

    @property
    def engine(self) -> str:
        return "fsdp2" if self.context else "deepspeed"

    @property
    def alone(self) -> Case:
        plain = {"checkpointing": False, "tiled_mlp": 0, "tiled_loss": 0, "interrupted": False, "context": False}
        plain |= {"offloaded_checkpoints": 0}
        return replace(self, name=f"{self.name}-alone", parallel=False, **plain)


TWO_RANKS = [
    # First, because data loader workers are forks, which hang where many threads of earlier runs hold locks.
    Case(name="second-epoch", accumulation=3, samples=34, steps=5, workers=1),
    Case(name="label-smoothing", optimizer="adamw_torch", label_smoothing=0.1, evaluates=True),
    Case(name="loss-function-experts-zero0", zero_stage=0, accumulation=3, loss="mean", family="mixtral"),
    Case(name="summed-loss-one-kv-head", zero_stage=3, accumulation=3, loss="sum", kv_heads=1),
    Case(name="aligned-labels-zero1", zero_stage=1, accumulation=3, loss="aligned", evaluates=True),
    Case(
        name="tiled-zero3",
        zero_stage=3,
        accumulation=3,
        checkpointing=True,
        tiled_mlp=3,
        tiled_loss=4,
        offloaded_checkpoints=2,
    ),
    Case(name="tiled-tied", accumulation=3, tied=True, tiled_mlp=3, tiled_loss=4, evaluates=True),
    Case(name="tiled-lora", lora=True, tiled_mlp=2, accumulation=3),
    Case(name="stream-without-kv-heads", accumulation=3, streams=True, family="gpt_neox"),
    Case(name="context", context=True, accumulation=3),
    Case(name="context-stream", context=True, accumulation=3, streams=True),
    Case(name="resumed", optimizer="adamw_torch", accumulation=3, interrupted=True),
]
FOUR_RANKS = [
    Case(name="beside-data-parallelism", zero_stage=3, ranks=4, accumulation=3, evaluates=True),
    Case(name="partial-evaluation", ranks=4, evaluates=True, evaluated=6),
]


def model(case: Case) -> Any:
    from shardwright.plugins.peft import add_lora
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, MixtralConfig, MixtralForCausalLM, set_seed

    set_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    if case.family == "gpt_neox":
        return GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=VOCAB, initializer_range=0.2, **sizes))
    if case.family == "mixtral":
        experts = {"num_local_experts": 4, "num_key_value_heads": 2, "head_dim": None}
        return MixtralForCausalLM(MixtralConfig(vocab_size=VOCAB, initializer_range=0.2, **sizes, **experts))
    heads = {"num_key_value_heads": case.kv_heads, "tie_word_embeddings": case.tied}
    made = llama(seed=1, vocab_size=VOCAB, hidden_size=32, initializer_range=0.2, **heads)
    if not case.lora:
        return made
    # On MLPs alone: nothing before the first of them needs a gradient.
    return add_lora(made, rank=4, targets="gate_proj,down_proj", fp32_adapters=True)


def samples(count: int, seed: int) -> list[dict[str, list[int]]]:
    """Return samples of ragged lengths with prompts that are not learned; one has no label at all."""
    draw, chosen = random.Random(seed), []
    for index in range(count):
        ids = [draw.randrange(1, VOCAB) for _ in range(draw.randrange(4, LONGEST + 1))]
        masked = len(ids) if index == 5 else index % 4
        chosen.append({"input_ids": ids, "labels": [IGNORED] * masked + ids[masked:]})
    return chosen


class Stream(torch.utils.data.IterableDataset[dict[str, list[int]]]):
    """The same samples, without a length."""

    def __init__(self, count: int) -> None:
        self.samples = samples(count, 3)

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        return iter(self.samples)


def shifting_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None, *, reduction: str = "mean") -> Any:
    """Return a loss that shifts labels itself, is no cross-entropy, and is 0 on average where nothing is labelled."""
    logits, labels = outputs.logits[:, :-1], labels[:, 1:]
    chosen = labels != IGNORED
    probabilities = logits.float().softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    losses = ((1 - probabilities) ** 2 - probabilities.clamp(min=1e-9).log())[chosen]
    if num_items_in_batch is not None:
        return losses.sum() / num_items_in_batch
    return losses.sum() if reduction == "sum" else losses.sum() / torch.count_nonzero(chosen)


def trainer_class(case: Case) -> type:
    from transformers import Trainer

    class Summing(Trainer):
        # What a class says of its loss of one micro-batch; the callback divides by the tokens of the step.
        loss_is_scaled_for_ga = not case.parallel

        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            inputs = dict(inputs)
            labels = inputs.pop("labels")
            outputs = model(**{name: value for name, value in inputs.items() if name != "shift_labels"})
            loss = shifting_loss(outputs, labels, num_items_in_batch, reduction="sum" if case.parallel else "mean")
            return (loss, outputs) if return_outputs else loss

    class Aligned(Trainer):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            inputs = dict(inputs)
            labels = inputs.pop("labels")
            outputs = model(**{name: value for name, value in inputs.items() if name != "shift_labels"})
            if not case.parallel:
                labels = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
            summed = torch.nn.functional.cross_entropy(outputs.logits.transpose(1, 2), labels, reduction="sum")
            count = (labels != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
            return (summed / count, outputs) if return_outputs else summed / count

    return {"sum": Summing, "aligned": Aligned}.get(case.loss, Trainer)


def arguments(case: Case, directory: Path, overrides: dict[str, Any]) -> Any:
    from transformers import TrainingArguments

    data_ranks = case.ranks // case.sequence_parallel_size if case.parallel else 1
    settings = engine_settings(
        case.engine if case.parallel else "single",
        case.micro_step_samples // data_ranks,
        deepspeed_configuration(case.zero_stage),
        per_device_eval_batch_size=case.micro_step_samples // data_ranks,
        gradient_accumulation_steps=case.accumulation,
        max_steps=case.steps,
        dataloader_num_workers=case.workers if case.parallel else 0,
        save_strategy="steps" if case.interrupted else "no",
        save_steps=2,
        eval_strategy="steps" if case.evaluates else "no",
        eval_steps=2,
        optim=case.optimizer,
        # Above the rounding of gradients near zero, of which Adam with a smaller one makes whole steps.
        adam_epsilon=1e-6,
        learning_rate=0.5 if case.optimizer == "sgd" else 1e-3,
        weight_decay=0.1,
        max_grad_norm=0.5,
        label_smoothing_factor=case.label_smoothing,
        gradient_checkpointing=case.checkpointing,
    )
    return TrainingArguments(str(directory / case.name), **settings, **overrides)


def accuracy(prediction: Any) -> dict[str, float]:
    """Return a metric of the logits of every position that a label belongs to."""
    import numpy as np

    logits, labels = prediction.predictions[:, :-1], prediction.label_ids[:, 1:]
    chosen = labels != IGNORED
    best = logits.max(-1) - logits.min(-1)
    return {"spread": float(best[chosen].mean()), "right": float(np.mean(logits.argmax(-1)[chosen] == labels[chosen]))}


def make_trainer(case: Case, directory: Path, overrides: dict[str, Any]) -> Any:
    from shardwright.trainers.counting.counts import count_as_one_process
    from shardwright.trainers.parallel.context.callback import ContextParallelCollator, prepare_context_parallel
    from shardwright.trainers.parallel.sequence.callback import SequenceParallelCallback

    built, made = arguments(case, directory, overrides), model(case)
    callback = SequenceParallelCallback(
        case.sequence_parallel_size,
        tiled_mlp=case.tiled_mlp or False,
        tiled_loss=case.tiled_loss or False,
        offloaded_checkpoints=case.offloaded_checkpoints,
        loss_reduction="sum" if case.loss == "sum" else "mean",
        loss_shifts_labels=case.loss != "aligned",
    )
    collator: Any = collate
    if case.context:
        prepare_context_parallel(built, made, 2)
        collator = ContextParallelCollator(collate, 2)
    elif case.parallel:
        callback.prepare(built, made)
    trainer = trainer_class(case)(
        model=made,
        args=built,
        train_dataset=Stream(case.samples) if case.streams else samples(case.samples, 3),
        eval_dataset=samples(case.evaluated or EVALUATED[case.ranks], 4),
        data_collator=collator,
        compute_loss_func=shifting_loss if case.loss == "mean" else None,
        compute_metrics=accuracy if case.evaluates else None,
    )
    if case.parallel and not case.context:
        callback.attach(trainer)
        _check_that_shards_reach_the_device(trainer, tokens=-(-LONGEST // case.sequence_parallel_size))
    elif not case.parallel:
        count_as_one_process(trainer)
    return trainer


def _check_that_shards_reach_the_device(trainer: Any, *, tokens: int) -> None:
    prepare = trainer._prepare_inputs

    def prepare_inputs(inputs: Any) -> Any:
        assert not trainer.model.training or inputs["input_ids"].shape[1] <= tokens
        return prepare(inputs)

    trainer._prepare_inputs = prepare_inputs


def run(case: Case, directory: Path, overrides: dict[str, Any]) -> tuple[Any, list[dict[str, float]]]:
    trainer = make_trainer(case, directory, overrides)
    trainer.train()
    return trainer, [dict(entry) for entry in trainer.state.log_history]


def train(case: Case, output: Path) -> None:
    from safetensors.torch import save_file

    trainer, logs = run(case, output, configure_cpu_ranks(case.engine))
    if case.interrupted:
        forget_last_run()
        trainer = make_trainer(case, output, configure_cpu_ranks("deepspeed"))
        trainer.train(resume_from_checkpoint=str(output / case.name / "checkpoint-2"))
        logs = trainer.state.log_history
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    if trainer.args.process_index == 0:
        weights = {name: value.float().clone().contiguous() for name, value in state.items()}
        save_file(weights, output / f"{case.name}.safetensors")
        (output / f"{case.name}.json").write_text(json.dumps(logs))


def stock(case: Case, output: Path) -> dict[str, str]:
    """Return how the Trainer's own sequence parallelism fails on these ranks, and what it leaves behind."""
    import torch
    from deepspeed.runtime.sequence_parallel import parallel_state_sp
    from shardwright.trainers.parallel.sequence.callback import parallelism_config
    from transformers import Trainer
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def of_twelve(rows: Any) -> dict[str, Any]:
        batch = collate([{name: (values * 12)[:12] for name, values in row.items()} for row in rows])
        positions = torch.arange(12).expand(len(rows), -1).contiguous()
        return {"input_ids": batch["input_ids"], "labels": batch["labels"], "position_ids": positions}

    built = arguments(case, output, configure_cpu_ranks("deepspeed"))
    built.parallelism_config = parallelism_config(2, built.world_size, attention="sdpa")
    found = {"failure": "", "second run": ""}
    try:
        Trainer(model=model(case), args=built, train_dataset=samples(36, 3), data_collator=of_twelve).train()
    except Exception as error:
        found["failure"] = f"{type(error).__name__}: {error}"
    found["attention"] = ALL_ATTENTION_FUNCTIONS["sdpa"].__module__
    try:
        parallel_state_sp.initialize_sequence_parallel(2)
    except AssertionError as error:
        found["second run"] = str(error)
    forget_last_run()
    found["attention afterwards"] = ALL_ATTENTION_FUNCTIONS["sdpa"].__module__
    return found


def main(output: Path, name: str) -> None:
    ranks = int(os.environ["WORLD_SIZE"])
    if name != "stock":
        train(next(case for case in (TWO_RANKS if ranks == 2 else FOUR_RANKS) if case.name == name), output)
        return
    found = stock(Case(name="stock", ranks=ranks, micro_step_samples=2), output)
    (output / f"stock-{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
