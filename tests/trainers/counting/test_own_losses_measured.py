"""What kind of loss a user's Trainer computes is measured, and micro-batches are weighed by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from shardwright.ds_configs.specs.errors import UsageError
from shardwright.trainers.counting.counts import Counting, kind_of_loss
from shardwright.trainers.exact import count_as_one_process
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, Trainer, TrainingArguments

ROWS, STEPS = 8, 2


def cross_entropies(outputs: Any, labels: Any) -> Any:
    return F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="none")


class Focal(Trainer):  # type: ignore[misc]
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        losses = cross_entropies(outputs, labels)[labels[:, 1:].flatten() != -100]
        loss = ((1 - torch.exp(-losses)) ** 2 * losses).mean()
        return (loss, outputs) if return_outputs else loss


class WithoutCount(Trainer):  # type: ignore[misc]
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


class Divided(Trainer):  # type: ignore[misc]
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs["labels"]
        outputs = model(input_ids=inputs["input_ids"])
        loss = cross_entropies(outputs, labels).sum() / num_items_in_batch
        return (loss, outputs) if return_outputs else loss


class Sum(Trainer):  # type: ignore[misc]
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(input_ids=inputs["input_ids"])
        loss = cross_entropies(outputs, inputs["labels"]).sum() / 100
        return (loss, outputs) if return_outputs else loss


class Added(Trainer):  # type: ignore[misc]
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        loss = loss + 3.0 * outputs.logits.pow(2).mean()
        return (loss, outputs) if return_outputs else loss


class AddedWithoutCount(Added):
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss, outputs = Trainer.compute_loss(self, model, inputs, True)
        loss = loss + 3.0 * cross_entropies(outputs, inputs["labels"]).sum() / inputs["labels"][:, 1:].ne(-100).sum()
        return (loss, outputs) if return_outputs else loss


class Contrastive(Trainer):  # type: ignore[misc]
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        pooled = model(input_ids=inputs["input_ids"]).logits.mean(1)
        return F.cross_entropy(pooled @ pooled.T, torch.arange(len(pooled)))


class Dictionary(Focal):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return {"loss": super().compute_loss(*args, **kwargs)}


class Values(Focal):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        return loss, loss, loss


class Vector(Focal):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs).repeat(2)


def rows() -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(0)
    data = [{"input_ids": torch.randint(0, 32, (10,), generator=draw)} for _ in range(STEPS * ROWS)]
    for row, unlabelled in zip(data, [0, 8, 3, 5, 1, 7, 2, 6] * STEPS, strict=True):
        row["labels"] = row["input_ids"].clone()
        row["labels"][:unlabelled] = -100
    return data


def trained(kind: type, directory: Path, parts: int, **settings: Any) -> list[float]:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=32))
    model.lm_head.weight.data *= 20
    smoothing = settings.pop("label_smoothing_factor", 0.0)
    args = TrainingArguments(
        directory,
        use_cpu=True,
        report_to="none",
        per_device_train_batch_size=ROWS // parts,
        per_device_eval_batch_size=ROWS // parts,
        gradient_accumulation_steps=parts,
        max_steps=STEPS,
        logging_steps=1,
        learning_rate=1e-2,
        label_smoothing_factor=smoothing,
        disable_tqdm=True,
    )
    own = settings.pop("own_loss", None)
    trainer = kind(model=model, args=args, train_dataset=rows(), eval_dataset=rows()[:ROWS], **settings)
    if own:
        trainer.own_loss = own
    count_as_one_process(trainer, weighs_own_losses=True)
    trainer.train()
    logs = trainer.state.log_history
    figures = [each[name] for name in ("loss", "grad_norm") for each in logs if name in each]
    return [*figures, trainer.evaluate()["eval_loss"]]


def func(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    return cross_entropies(outputs, labels).sum() / labels[:, 1:].ne(-100).sum()


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (Focal, {}),
        (Focal, {"own_loss": "mean"}),
        (WithoutCount, {}),
        (Divided, {}),
        (Divided, {"own_loss": "sum"}),
        (AddedWithoutCount, {}),
        (Focal, {"label_smoothing_factor": 0.1}),
        (Trainer, {"compute_loss_func": func}),
    ],
)
def test_own_losses_of_micro_batches_equal_the_loss_of_the_whole_batch(
    kind: type, settings: dict[str, Any], tmp_path: Path
) -> None:
    assert trained(kind, tmp_path, 4, **settings) == pytest.approx(trained(kind, tmp_path, 1, **settings), abs=1e-5)


@pytest.mark.parametrize(
    ("kind", "settings"), [(Added, {}), (Added, {"label_smoothing_factor": 0.1}), (Sum, {}), (Sum, {"own_loss": "sum"})]
)
def test_sums_and_regularizers_of_samples_are_weighed_in_training(
    kind: type, settings: dict[str, Any], tmp_path: Path
) -> None:
    split, whole = (trained(kind, tmp_path, parts, **settings)[:-1] for parts in (4, 1))
    assert split == pytest.approx(whole, abs=1e-5)


@pytest.mark.parametrize(("balances", "ranks", "weighed"), [(False, 1, True), (True, 1, False), (False, 2, False)])
def test_an_own_loss_is_one_of_rows_unless_ranks_or_a_balance_loss_share_it(
    balances: bool, ranks: int, weighed: bool, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = MixtralConfig(**sizes, num_key_value_heads=2, vocab_size=32, output_router_logits=balances)
    args = TrainingArguments(tmp_path, use_cpu=True, report_to="none")
    trainer = Trainer(model=MixtralForCausalLM(config), args=args, train_dataset=rows(), compute_loss_func=func)
    counting = Counting(trainer, ranks, weighs_means=True, weighs_own_losses=True)
    assert (counting.own_loss is not None) == weighed


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Contrastive, "neither a sum nor a mean"),
        (Dictionary, "a dict"),
        (Values, "a tuple"),
        (Vector, "2 values"),
    ],
)
def test_losses_that_cannot_be_weighed_are_rejected(kind: type, reason: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=reason):
        trained(kind, tmp_path, 4)
    with pytest.raises(UsageError, match="must be one of"):
        trained(Focal, tmp_path, 4, own_loss="average")


def test_the_trainer_still_multiplies_own_means_by_the_micro_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "count_as_one_process", lambda trainer, **_: None)
    losses = [trained(Focal, tmp_path, parts)[0] for parts in (4, 1)]
    assert losses[0] > 3 * losses[1]


def test_the_nearest_kind_is_chosen_where_several_are_within_the_tolerance() -> None:
    """A constant hides whether a small term is a mean over labels or over samples."""
    batch = {"input_ids": torch.arange(12).reshape(2, 6), "labels": torch.arange(12).reshape(2, 6)}

    def loss_of(rows: Any, items: float | None) -> torch.Tensor:
        return 1 + 3e-5 * rows["input_ids"][:, 0].double().mean()

    def labels_in(rows: Any) -> int:
        return int(rows["labels"].ne(-100).sum())

    assert kind_of_loss(loss_of, batch, labels_in, lambda tensor: tensor, input_name="input_ids") == "sample_mean"
