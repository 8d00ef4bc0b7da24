"""What a run may have besides its layout: optimizers, losses, data, callbacks and changes of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from equivalence.cases import (
    EVALUATED,
    IGNORED,
    LOSS_TOLERANCE,
    MICRO_STEP_SAMPLES,
    VOCAB_SIZE,
    Case,
    make_model,
    padded,
    samples,
)

Z_WEIGHT = 0.01
LEARNING_RATES: Mapping[str, float] = {"sgd": 0.5, "adagrad": 1e-2, "adafactor": 1e-2}


@dataclass
class Run:
    """What a setting may change before the trainer is made."""

    case: Case
    arguments: dict[str, Any]
    """Keys of `TrainingArguments`."""
    sizes: dict[str, Any] = field(default_factory=dict)
    """Keys of the model's configuration."""
    callbacks: list[Callable[[], Any]] = field(default_factory=list)
    """What makes callbacks."""
    change_model: list[Callable[[Any], Any]] = field(default_factory=list)
    """Applied to the loaded model, in order."""
    change_arguments: list[Callable[[Any], None]] = field(default_factory=list)
    """Applied to the finished `TrainingArguments`."""
    given: list[Callable[[Any], dict[str, Any]]] = field(default_factory=list)
    """What makes further arguments of the trainer from the model."""
    change_trainer: list[Callable[[Any], None]] = field(default_factory=list)
    """Applied to the trainer before it trains."""
    parallelism: dict[str, Any] = field(default_factory=dict)
    """Keywords of the callback of the layout's axis."""
    distillation: dict[str, Any] | None = None
    """Fields of `DistillationConfig`; `None` without a teacher."""
    teacher: str = "replica"
    """Placement of the teacher."""
    data: Any = field(default_factory=samples)
    held_out: Any = field(default_factory=lambda: samples()[-EVALUATED:])
    collator: Callable[[Any], dict[str, Any]] = padded
    measures: bool = True
    """Whether a metric reads logits of tokens."""
    evaluations: bool = False
    """Whether the trained model is evaluated on further sets, and with every option of an evaluation."""
    streams: bool = False
    """Whether the data set is iterable."""
    scheme: Any = None
    """How weights and inputs are rounded."""
    exports: bool = False
    """Whether the trained model is exported with its codes."""
    source: Path | None = None
    """Directory of the model that an export reads its files from."""
    seen: list[int] = field(default_factory=list)
    """Samples that this rank reads, as far as a setting notes them."""
    stock: bool = False
    """Whether a script makes the Trainer itself, as it is."""
    resumes: bool = False
    """Whether the run is repeated from its first checkpoint."""
    starts_from_directory: bool = False
    """Whether the engine's ranks load the model from a directory, each its shard."""


Change = Callable[[Run], None]


def _set(**fields: Any) -> Change:
    """Replace fields of a run; add to those that are collections."""

    def change(run: Run) -> None:
        for name, value in fields.items():
            known = getattr(run, name)
            if isinstance(known, dict):
                value = known | value
            setattr(run, name, [*known, value] if isinstance(known, list) and name != "data" else value)

    return change


def _arguments(**changes: Any) -> Change:
    return _set(arguments=changes)


def _sizes(**changes: Any) -> Change:
    return _set(sizes=changes)


def _both(*changes: Change) -> Change:
    def change(run: Run) -> None:
        for each in changes:
            each(run)

    return change


def _optimizer(name: str) -> Change:
    return _arguments(optim=name, learning_rate=LEARNING_RATES.get(name, 1e-3))


def _muon(run: Run) -> None:
    # DeepSpeed clips the orthogonalized updates, so that plans do not clip.
    # The decay would show if norms had it, too.
    run.arguments |= {"optim": "muon", "learning_rate": 1e-3, "max_grad_norm": 0.0, "weight_decay": 10.0}
    if "deepspeed" in run.arguments:
        from shardwright.ds_configs.plan.rendering import muon_parameters
        from shardwright.ds_configs.specs.job import TrainingJob

        run.arguments["deepspeed"] |= {"optimizer": {"type": "Muon", "params": muon_parameters(TrainingJob())}}
        if run.arguments["deepspeed"]["zero_optimization"]["stage"] == 3:
            run.arguments["deepspeed"]["zero_optimization"]["reduce_scatter"] = False


# Optimizers and schedulers that a script passes


def _groups(model: Any) -> list[dict[str, Any]]:
    matrices = [each for each in model.parameters() if each.dim() > 1]
    vectors = [each for each in model.parameters() if each.dim() <= 1]
    return [{"params": matrices, "lr": 2e-3, "weight_decay": 0.1}, {"params": vectors, "lr": 5e-3, "weight_decay": 0.0}]


def _own_adamw(model: Any) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(_groups(model), betas=(0.8, 0.95), eps=1e-6)
    rates = [lambda step: 1.0 / (1 + step), lambda step: 0.5**step]
    return {"optimizers": (optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, rates))}


def _own_sgd(model: Any) -> dict[str, Any]:
    optimizer = torch.optim.SGD(_groups(model), momentum=0.9, nesterov=True)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.05, 0.1], total_steps=8)
    return {"optimizers": (optimizer, cycle)}


def _own_nadam(model: Any) -> dict[str, Any]:
    # The Trainer makes the scheduler.
    return {"optimizers": (torch.optim.NAdam(_groups(model), eps=1e-6), None)}


def _optimizer_class(kind: type, **options: Any) -> Callable[[Any], dict[str, Any]]:
    return lambda model: {"optimizer_cls_and_kwargs": (kind, {"lr": 2e-3, "eps": 1e-6, **options})}


def _own_adamw_8bit(model: Any) -> dict[str, Any]:
    import bitsandbytes

    return {"optimizers": (bitsandbytes.optim.AdamW8bit(model.parameters()), None)}


_ADAFACTOR: dict[str, Any] = {"lr": 1e-3, "relative_step": False}


def _adafactor() -> Any:
    from transformers.optimization import Adafactor

    return Adafactor


def _model_init(model: Any) -> dict[str, Any]:
    # The Trainer makes the model again when training starts.
    state = {name: value.clone() for name, value in model.state_dict().items()}

    def init() -> Any:
        made = type(model)(model.config)
        made.load_state_dict(state)
        return made

    return {"model": None, "model_init": init}


# Losses that a script computes


def cubed_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    """Return a loss that no model has: cubes of cross-entropies over the number of labelled tokens."""
    logits = outputs.logits[:, :-1].float().flatten(0, 1)
    targets = labels[:, 1:].flatten()
    losses = torch.nn.functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none")
    items = (targets != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
    return 0.1 * (losses**3).sum() / items


def _own_class(reduction: str, *, aligned: bool = False) -> Change:
    """Train with a subclass whose loss is the `mean` over a rank's tokens, or their `sum` over those of all ranks.

    An aligned loss gets labels that belong to the logits; the ranks of a sequence shift them.
    """

    def change(run: Run) -> None:
        from transformers import Trainer

        shares = run.case.full_layout.sp > 1

        class OwnLoss(Trainer):  # type: ignore[misc]
            # What a class says of its loss of one micro-batch; sequence parallelism divides by the tokens of the step.
            loss_is_scaled_for_ga = not (shares and reduction == "sum")

            def compute_loss(
                self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
            ) -> Any:
                labels = inputs["labels"]
                words = ("input_ids", "attention_mask", "position_ids")
                outputs = model(**{name: inputs[name] for name in words if name in inputs})
                logits = outputs.logits
                if not (aligned and shares):
                    logits, labels = logits[:, :-1], labels[:, 1:]
                losses = torch.nn.functional.cross_entropy(
                    logits.transpose(1, 2), labels, ignore_index=IGNORED, reduction="none"
                )
                loss = (losses + losses**2).sum()
                if num_items_in_batch is not None and reduction != "mean":
                    loss = loss / num_items_in_batch
                elif not (shares and reduction == "sum"):
                    loss = loss / (labels != IGNORED).sum()
                return (loss, outputs) if return_outputs else loss

        run.given.append(lambda model: {"trainer_class": OwnLoss})
        if shares:
            run.parallelism |= {"loss_shifts_labels": not aligned}
            OwnLoss.own_loss = "sum" if reduction == "sum" else "mean"

    return change


def _own_mean(kind: str) -> Change:
    """Train on a mean over labels or samples that ignores the number of the step's labels, or adds one to the loss."""

    def mean_of(outputs: Any, labels: Any) -> Any:
        logits, targets = outputs.logits[:, :-1].transpose(1, 2), labels[:, 1:]
        losses = torch.nn.functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none")
        counted = targets != IGNORED
        if kind == "mean_of_samples":
            return (losses.sum(1) / counted.sum(1).clamp(min=1)).mean()
        losses = losses[counted]
        return ((1 - (-losses).exp()) ** 2 * losses).mean()

    def change(run: Run) -> None:
        from transformers import Trainer

        class OwnMean(Trainer):  # type: ignore[misc]
            def compute_loss(
                self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
            ) -> Any:
                labels = inputs["labels"]
                if kind == "added":
                    loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
                    loss = loss + 0.3 * mean_of(outputs, labels)
                else:
                    outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
                    loss = mean_of(outputs, labels)
                return (loss, outputs) if return_outputs else loss

        run.given.append(lambda model: {"trainer_class": OwnMean})

    return change


def _scaled_class(*, of_groups: bool = False) -> Any:
    """Return a class whose loss is multiplied by the number of ranks, or of groups that read the same samples."""
    from transformers import Trainer

    class Scaled(Trainer):  # type: ignore[misc]
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
            logits, labels = outputs.logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten()
            loss = torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
            count = (labels != IGNORED).sum()
            if num_items_in_batch is not None:
                ranks = self.accelerator.num_processes
                count = num_items_in_batch / (ranks // self.get_tp_size() if of_groups else ranks)
            return (loss / count, outputs) if return_outputs else loss / count

    return Scaled


# What is trained


def _lora(targets: str | None = None, **options: Any) -> Callable[[Any], Any]:
    def change(model: Any) -> Any:
        from shardwright.plugins.peft import add_lora
        from transformers import set_seed

        set_seed(4)
        adapted = add_lora(model, rank=4, targets=targets, fp32_adapters=True, **options)
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                # Their product is not zero, so that both matrices have a gradient.
                parameter.data.normal_(std=0.1)
        return adapted

    return change


def _frozen(pattern: str) -> Callable[[Any], Any]:
    def change(model: Any) -> Any:
        import re

        for name, parameter in model.named_parameters():
            parameter.requires_grad_(re.search(pattern, name) is not None)
        return model

    return change


def _quantized(scheme: str, *, symmetric: bool = False, group: int = 16, **options: Any) -> Change:
    def change(run: Run) -> None:
        from shardwright.ds_configs.quantization.scheme import changed, scheme_named
        from shardwright.trainers.qat.callback import QATCallback

        means = run.case.family == "mixtral" and scheme == "W4A16" and not (options or symmetric)
        found = scheme_named("W2A16" if means else scheme)
        # Symmetric ranges put the extreme of every group on the edge of two codes, where the last bit decides.
        # Means of groups do not, and mixtures cannot have zero points.
        if found.weights.group_size:
            found = changed(found, group_size=group, symmetric=means or symmetric)
        given = options | ({"weight_rule": "ternary"} if means else {})
        run.scheme = found
        run.callbacks.append(lambda: QATCallback(found, **given))

    return change


def _probe(run: Run) -> None:
    """Make one step of plain SGD, so that the weights show the gradient, and export.

    One process sees the micro-batches of both ranks one after the other: forward passes are then equal bit for bit, so
    that no code is rounded to the other side.
    """
    layout, first = run.case.full_layout, int("w8a8_static" in run.case.settings)
    together = layout.data_parallel_size == 1
    run.arguments |= {
        "optim": "sgd",
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant_with_warmup",
        # The first step shows ranges alone, and its learning rate is 0.
        "warmup_steps": first,
        "max_steps": 1 + first,
        "weight_decay": 0.0,
        "max_grad_norm": 0.0,
        "train_sampling_strategy": "sequential",
        "per_device_train_batch_size": MICRO_STEP_SAMPLES // 2,
        "gradient_accumulation_steps": 2 if together else 1,
    }
    run.sizes["vocab_size"] = 320
    run.exports = True


def _off_borders(trainer: Any) -> None:
    """Round weights that are a few millionths smaller: -7.5 steps, on the border of two codes, become -7.49997."""
    from shardwright.trainers.qat import rounding

    levels = rounding.weight_levels
    rounding.weight_levels = lambda weight, *scales: levels(weight * (1 - 4e-6), *scales)


def _between_codes(trainer: Any) -> None:
    """Move learned zero points close below halves: in bf16 they are halves."""
    callback = next(each for each in trainer.callback_handler.callbacks if hasattr(each, "attachment"))
    for parameter in callback.attachment.parameters:
        if parameter.detach().min() < 0:
            parameter.data += 0.4999


def _pruned(share: float = 0.5, **options: Any) -> Change:
    def make() -> Any:
        from shardwright.trainers.sparsity import MagnitudePruningCallback

        return MagnitudePruningCallback(share, **({"start_step": 0, "end_step": 1, "every": 1} | options))

    return _set(callbacks=make)


def _distilled(**options: Any) -> Change:
    """Distill with the options of `DistillationConfig`; terms are made from the keywords of their classes."""

    def change(run: Run) -> None:
        from shardwright.trainers import distillation

        kinds = {"hidden_states": "HiddenStateTerm", "attention": "AttentionTerm"}
        made = {
            name: getattr(distillation, kinds[name])(**value) if name in kinds else value
            for name, value in options.items()
        }
        run.distillation = {"alpha": 0.5, **made}

    return change


def _own_term(run: Run) -> None:
    """Distill with a subclass that adds the mean squared log-normalizer of each labelled token."""
    from shardwright.trainers.distillation.trainer import DistillationTrainer

    class WithZTerm(DistillationTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):  # type: ignore[no-untyped-def]
            loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
            shifted = "shift_labels" in inputs
            is_labelled = (inputs["shift_labels"] if shifted else inputs["labels"][:, 1:]) != IGNORED
            logits = outputs.logits if shifted else outputs.logits[:, :-1]
            squares = (torch.logsumexp(logits.float(), -1)[is_labelled] ** 2).sum()
            loss = loss + self.mean_over_step(Z_WEIGHT * squares, is_labelled.sum(), num_items_in_batch)
            return (loss, outputs) if return_outputs else loss

    _distilled(temperature=2.0)(run)
    run.given.append(lambda model: {"trainer_class": WithZTerm})


# Data


def _packed(run: Run) -> None:
    rows, joined = run.data, []
    for first in range(0, len(rows) - 1, 2):
        pair = rows[first : first + 2]
        labels = [one["labels"].clone() for one in pair]
        for each in labels:
            each[0] = IGNORED
        joined.append(
            {
                "input_ids": torch.cat([one["input_ids"] for one in pair]),
                "labels": torch.cat(labels),
                "position_ids": torch.cat([torch.arange(len(one["input_ids"])) for one in pair]),
            }
        )
    run.data, run.collator = joined, collated


def collated(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Collate as `padded` does; packed samples keep their positions."""
    batch = padded(rows)
    if "position_ids" not in rows[0]:
        return batch
    positions = torch.zeros_like(batch["input_ids"])
    for index, row in enumerate(rows):
        length = len(row["position_ids"])
        positions[index, :length] = row["position_ids"]
        positions[index, length:] = torch.arange(positions.shape[1] - length)
    del batch["attention_mask"]
    return batch | {"position_ids": positions}


def drawing(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Replace the first tokens by random ones of three generators."""
    import random

    import numpy

    batch = padded(rows)
    tokens = [random.randrange(1, VOCAB_SIZE), int(numpy.random.randint(1, VOCAB_SIZE)), int(torch.randint(128, ()))]
    batch["input_ids"][:, :3] = torch.tensor(tokens)
    return batch


def _last_batch(run: Run) -> None:
    # Full micro-steps, and a third of one sample.
    run.data = run.data[: 2 * MICRO_STEP_SAMPLES + 1]


def _length_groups(run: Run) -> None:
    run.data = run.data[:20]
    # A checkpoint is inside the second epoch of five steps: its order is not the one that the seed begins with.
    run.arguments |= {"train_sampling_strategy": "group_by_length", "max_steps": 8, "save_steps": 7}


def _noted(run: Run) -> None:
    """Train two epochs, and note which samples this rank reads."""
    places = {id(row["input_ids"]): index for index, row in enumerate(run.data)}
    run.arguments |= {"max_steps": 2 * len(run.data) // MICRO_STEP_SAMPLES}

    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        run.seen.extend(places.get(id(row["input_ids"]), -1) for row in rows)
        return padded(rows)

    run.collator = collate


def _epochs(run: Run) -> None:
    # The last step of an epoch has fewer micro-batches.
    run.data = run.data[: (run.case.accumulation + 1) * MICRO_STEP_SAMPLES]
    run.arguments |= {"max_steps": -1, "num_train_epochs": 2}


def _without_labels(run: Run) -> None:
    """No label on one half of the first step's samples, which are those of one of two ranks, and in the second step."""
    half = MICRO_STEP_SAMPLES // 2
    run.data = [
        row | {"labels": row["labels"] * 0 + IGNORED} if half <= index < 2 * MICRO_STEP_SAMPLES else row
        for index, row in enumerate(run.data)
    ]
    run.arguments |= {"train_sampling_strategy": "sequential", "weight_decay": 0.0}


def _heads(kind: str) -> Change:
    """Train a head that is not over the vocabulary, whose loss is a mean over the labels of a batch.

    A class, a number or several classes of a sequence, or a class of each token. One of two ranks has no label of
    classes in the first micro-batch.
    """

    def label(index: int, row: dict[str, Any]) -> Any:
        if kind == "tags":
            return torch.where(row["labels"] == IGNORED, IGNORED, row["input_ids"] % 3)
        if kind == "several":
            return torch.tensor([index % 2, index % 3 > 0, 1], dtype=torch.float32)
        return torch.tensor(index / 8 if kind == "numbers" else index % 3)

    def model(made: Any) -> Any:
        from transformers import LlamaForSequenceClassification, LlamaForTokenClassification, set_seed

        config = made.config
        config.num_labels, config.classifier_dropout = (1 if kind == "numbers" else 3), 0.0
        set_seed(0)
        return (LlamaForTokenClassification if kind == "tags" else LlamaForSequenceClassification)(config)

    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        if kind == "tags":
            return padded(rows)
        batch = padded([{**row, "labels": row["input_ids"]} for row in rows])
        return batch | {"labels": torch.stack([row["labels"] for row in rows])}

    def change(run: Run) -> None:
        for name in ("data", "held_out"):
            rows = [{**row, "labels": label(index, row)} for index, row in enumerate(getattr(run, name))]
            setattr(run, name, rows)
        for row in run.data[MICRO_STEP_SAMPLES // 2 : MICRO_STEP_SAMPLES]:
            if kind in ("classes", "tags"):
                row["labels"] = row["labels"] * 0 + IGNORED
        run.collator, run.measures = collate, False
        run.change_model.append(model)

    return change


def _images(family: str, *trained: str) -> Change:
    """Train a model of images on rows with none, one, and several of different sizes.

    In every second micro-batch the rows of one of two ranks have images, and those of the other rank have none.
    """

    def rows() -> list[dict[str, Any]]:
        from image_models import COLOURS, chat_sample, processor

        made, draw = processor(family), torch.Generator().manual_seed(4)
        found = []
        for index in range(36):
            pair = torch.randint(0, len(COLOURS), (2,), generator=draw).tolist()
            count = index % 3 if index // 4 % 2 else (index // 2 % 2) * (1 + index % 2)
            found.append(chat_sample(made, [list(COLOURS)[each] for each in pair[:count]], answer=f"{index}"))
        return found

    def model(made: Any) -> Any:
        from image_models import FAMILIES
        from shardwright.ds_configs.specs.images import IMAGE_PARTS
        from shardwright.trainers.runs.ranks import freeze

        found = FAMILIES[family]()
        freeze(found, {part for part in IMAGE_PARTS if part not in trained})
        return found

    def change(run: Run) -> None:
        from functools import partial

        from image_models import processor
        from shardwright.trainers.data.samples import collate

        run.data, run.measures = rows(), False
        run.held_out = run.data[-EVALUATED:]
        run.collator = partial(collate, pad_token_id=256, processor=processor(family))
        run.change_model.append(model)
        # Engines also decay the last layer of LLaVA's tower, which no output reads: its gradient is zero.
        run.arguments |= {"weight_decay": 0.0, "train_sampling_strategy": "sequential", "remove_unused_columns": False}
        if family == "qwen2_5_vl" and "fsdp_config" in run.arguments:
            run.arguments["fsdp_config"]["transformer_layer_cls_to_wrap"] = ["Qwen2_5_VLDecoderLayer"]

    return change


def _streams_that_differ(rows_of_rank: Callable[[Any, int], Any]) -> Change:
    def change(run: Run) -> None:
        import os

        run.streams = True
        run.data = rows_of_rank(run.data[: 2 * MICRO_STEP_SAMPLES + 1], int(os.environ.get("RANK", "0")))

    return change


def _stopped_early(run: Run) -> None:
    """Train until the evaluation loss rises, and load the best model."""
    from transformers import EarlyStoppingCallback

    run.arguments |= {"max_steps": 8, "learning_rate": 0.3, "load_best_model_at_end": True, "eval_steps": 1}
    run.arguments |= {"eval_strategy": "steps", "save_strategy": "steps", "save_steps": 1}
    run.callbacks.append(lambda: EarlyStoppingCallback(1))


def _stages(run: Run) -> None:
    """For several calls of `train()`, evaluations and predictions by one Trainer."""
    run.data, run.held_out, run.measures = run.data[:24], run.data[-8:], False
    # DeepSpeed's schedulers warm up for at least two steps.
    run.arguments |= {"lr_scheduler_type": "linear", "warmup_steps": 2}
    run.arguments["per_device_eval_batch_size"] = 8 // run.case.full_layout.data_parallel_size


def _schedule_of_deepspeed(run: Run) -> None:
    run.arguments["weight_decay"] = 0.0
    if "deepspeed" in run.arguments:
        rates = {"warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_type": "linear"}
        lengths = {"total_num_steps": "auto", "warmup_num_steps": "auto"}
        betas = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": run.arguments["adam_epsilon"], "weight_decay": 0.0}
        run.arguments["deepspeed"] |= {
            "optimizer": {"type": "AdamW", "params": betas | {"torch_adam": True}},
            "scheduler": {"type": "WarmupDecayLR", "params": rates | lengths},
        }


def _tiled(run: Run) -> None:
    # Batches of the ranks have different lengths, so that the ranks compute different numbers of tiles.
    def attach(trainer: Any) -> None:
        from shardwright.trainers import LongSequenceCallback

        loss = 3 if run.distillation is None else False
        LongSequenceCallback(tiled_mlp=True, tiled_loss=loss, offloaded_checkpoints=2).attach(trainer)

    run.arguments |= {"gradient_checkpointing": True}
    if run.case.full_layout.engine != "single":
        run.change_trainer.append(attach)


SETTINGS: dict[str, Change] = {
    # Methods
    "qat": _quantized("W4A16"),
    "qat_inputs": _quantized("W8A8"),
    "qat_ranges": _quantized("W8A8_STATIC"),
    "w4": _quantized("W4A16", symmetric=True),
    "w4_off_borders": _both(_quantized("W4A16", symmetric=True, group=8), _set(change_trainer=_off_borders)),
    "w2_learned": _quantized("W2A16", symmetric=True, weight_rule="learned"),
    "w8a8_static": _quantized("W8A8_STATIC", start_step=1),
    "w4_zero_points": _both(
        _quantized("W4A16", weight_rule="learned"),
        _arguments(bf16=True),
        _set(change_trainer=_between_codes),
    ),
    "probe": _probe,
    "probe_adam": _both(_probe, _arguments(optim="adamw_torch", learning_rate=1e-3)),
    "exported": _both(_sizes(vocab_size=320), _set(exports=True)),
    "verified": lambda run: None,
    "learned_scales": _quantized("W4A16", weight_rule="learned"),
    "pruning": _pruned(),
    "pattern_pruning": _pruned(pattern="2:4", ignore=["lm_head", "re:.*down_proj"]),
    "lora": _set(change_model=_lora()),
    "lora_experts": _set(change_model=_lora("experts")),
    **{name: _set(change_model=_lora(variant=name)) for name in ("dora", "rslora", "pissa")},
    "lora_plus": _set(change_model=_lora(plus_ratio=8.0)),
    "lora_attention_experts": _set(change_model=_lora("q_proj,v_proj,experts")),
    "frozen": _set(change_model=_frozen(r"layers\.1|lm_head|norm\.weight$")),
    "mlp_alone": _set(change_model=_frozen("mlp")),
    "head_alone": _set(change_model=_frozen("lm_head")),
    "norms_frozen": _set(change_model=_frozen("proj|lm_head|layernorm")),
    "distillation": _distilled(temperature=2.0),
    "distilled_features": _distilled(hidden_states={"weight": 0.5}),
    "distilled_attention": _distilled(attention={"weight": 0.5}),
    "plain_distillation": _distilled(temperature=2.0, implementation="plain"),
    "reverse_distillation": _distilled(temperature=2.0, divergence="reverse_kl"),
    "own_term": _own_term,
    "teacher_sharded": _set(teacher="sharded"),
    "teacher_offloaded": _set(teacher="offloaded"),
    # Optimizers
    **{name: _optimizer(name) for name in ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")},
    "adafactor": _optimizer("adafactor"),
    "muon": _muon,
    # Switches
    "balance_loss": _sizes(output_router_logits=True, router_aux_loss_coef=0.5),
    "gradient_checkpointing": _arguments(gradient_checkpointing=True),
    "label_smoothing": _arguments(label_smoothing_factor=0.1),
    "packing": _packed,
    "streams": _set(streams=True),
    "compile": _arguments(torch_compile=True, torch_compile_backend="eager"),
    "bf16": _arguments(bf16=True),
    "dropout": _sizes(attention_dropout=0.1),
    "split_batches": _arguments(
        accelerator_config={"split_batches": True}, per_device_train_batch_size=MICRO_STEP_SAMPLES
    ),
    "last_batch": _last_batch,
    # Further ones, which the table of combinations does not have
    "own_adamw": _set(given=_own_adamw),
    "own_sgd": _set(given=_own_sgd),
    "own_nadam": _set(given=_own_nadam),
    "optimizer_class": _set(given=_optimizer_class(torch.optim.NAdam)),
    "optimizer_class_adamw": _set(given=_optimizer_class(torch.optim.AdamW, betas=(0.7, 0.95))),
    "own_adafactor": _set(given=lambda model: {"optimizers": (_adafactor()(model.parameters(), **_ADAFACTOR), None)}),
    "adafactor_class": _set(given=lambda model: {"optimizer_cls_and_kwargs": (_adafactor(), _ADAFACTOR)}),
    "own_adamw_8bit": _set(given=_own_adamw_8bit),
    # Its name alone is read: CPU ranks do not make it.
    "adamw_8bit": _set(change_arguments=lambda arguments: setattr(arguments, "optim", "adamw_8bit")),
    "model_init": _set(given=_model_init),
    "own_loss": _set(given=lambda model: {"compute_loss_func": cubed_loss}),
    "own_share": _set(given=lambda model: {"trainer_class": _scaled_class()}),
    "own_share_of_groups": _set(given=lambda model: {"trainer_class": _scaled_class(of_groups=True)}),
    "own_mean": _own_class("mean"),
    "own_sum": _own_class("sum"),
    **{f"own_{kind}": _own_mean(kind) for kind in ("focal", "mean_of_samples", "added")},
    "aligned_loss": _own_class("mean", aligned=True),
    "tied": _sizes(tie_word_embeddings=True),
    "one_kv_head": _sizes(num_key_value_heads=1),
    "biases": _sizes(attention_bias=True, mlp_bias=True),
    "odd_vocabulary": _sizes(vocab_size=VOCAB_SIZE + 1),
    "four_layers": _sizes(num_hidden_layers=4),
    "other_dropout": _sizes(resid_pdrop=0.2, embd_pdrop=0.2),
    "unforced": lambda run: run.arguments.get("deepspeed", {}).update({"zero_force_ds_cpu_optimizer": False}),
    "tiled": _tiled,
    "noted": _noted,
    "in_order": _arguments(train_sampling_strategy="sequential"),
    "length_groups": _length_groups,
    "many_length_groups": _arguments(train_sampling_strategy="group_by_length"),
    "workers": _arguments(dataloader_num_workers=1),
    "drawing": _set(collator=drawing),
    "epochs": _epochs,
    "without_labels": _without_labels,
    "logged_seldom": _arguments(logging_steps=2),
    **{kind: _heads(kind) for kind in ("classes", "numbers", "several", "tags")},
    "images": _images("llava", "vision_tower", "projector"),
    "images_frozen": _images("llava"),
    "images_of_qwen": _images("qwen2_5_vl", "vision_tower", "projector"),
    "images_of_qwen_projected": _images("qwen2_5_vl", "projector"),
    "evaluations": _set(evaluations=True),
    "a_part_for_each_rank": _streams_that_differ(lambda rows, rank: rows[rank::2]),
    "fewer_on_one_rank": _streams_that_differ(lambda rows, rank: rows[:1] * (len(rows) - MICRO_STEP_SAMPLES * rank)),
    "stopped_early": _stopped_early,
    "stages": _stages,
    "schedule_of_deepspeed": _schedule_of_deepspeed,
    "stock": _set(stock=True),
    "evaluated": _arguments(eval_strategy="steps", eval_steps=2),
    "cosine": _arguments(lr_scheduler_type="cosine", warmup_steps=1),
    "resumed": _both(_arguments(save_strategy="steps", save_steps=2), _set(resumes=True)),
    "from_directory": _set(starts_from_directory=True),
}
"""What a run may have besides its layout; the first three groups have the names of the table of combinations."""
ONLY_ON_RANKS = (
    "teacher_sharded",
    "teacher_offloaded",
    "verified",
    "tiled",
    "unforced",
    "workers",
    "resumed",
    "from_directory",
)
"""What changes how a run is computed, and not its results; one process omits it."""
TOLERANCES: Mapping[str, float] = {"bf16": 3e-2, "dropout": 0.3, "muon": 1e-3, "stopped_early": 1e-3}
"""In nats for each token: 16-bit numbers are rounded in another order, also in Muon, and dropout draws other masks."""
FIRST_STEP_ON_ZEROS = 0.2
"""Likewise, for AdamW in 16 bit without ZeRO (deepspeed 0.19.8)."""


def reference_of(case: Case) -> Case:
    """Return the run of one process that a case must equal."""
    settings = tuple(name for name in case.settings if name not in ONLY_ON_RANKS)
    return replace(case, layout="single", settings=settings, model=case.family)


def loss_tolerance(case: Case) -> float:
    """Return the largest difference of a loss from the one of one process."""
    if "bf16" in case.settings and "zero0" in case.columns:
        return FIRST_STEP_ON_ZEROS
    return max((TOLERANCES.get(name, LOSS_TOLERANCE) for name in case.settings), default=LOSS_TOLERANCE)


def run_of(case: Case, directory: Any) -> Run:
    """Return what a case trains."""
    run = Run(case=case, arguments=case.arguments(directory))
    for name in case.settings:
        SETTINGS[name](run)
    return run


def make_teacher(case: Case, run: Run) -> Any:
    """Return a teacher that is deeper than the student and whose vocabulary is larger."""
    sizes = run.sizes | {"vocab_size": run.sizes.get("vocab_size", VOCAB_SIZE) + 8}
    return make_model(case.family, sizes, seed=9, layers=3)
