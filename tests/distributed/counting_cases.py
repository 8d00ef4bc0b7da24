"""Training and evaluation runs that show how labels, samples and tokens are counted, under any layout.

Ranks run this file.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from equivalence.cases import FURTHER, IGNORED, LAYOUTS, LONGEST, MICRO_STEP_SAMPLES, Case, make_model, padded, samples
from equivalence.records import logged, training_record
from fresh_process import forget_last_run
from shardwright.ds_configs.specs.errors import UsageError
from shardwright.ds_configs.specs.layout import Layout
from shardwright.plugins.accelerate.cpu_ranks import configure_cpu_ranks
from shardwright.plugins.transformers.training_arguments import training_arguments
from shardwright.trainers.parallel.trainer_for import parallelism_of
from transformers import Trainer

STEPS, LOGGED_EVERY = 4, 3
EVALUATED = 7
STRATEGIES: dict[str, Layout] = {"single": Layout(engine="single"), **LAYOUTS, **FURTHER}


def rows(count: int = EVALUATED) -> list[dict[str, Any]]:
    return samples()[-count:]


def unlabelled(row: Mapping[str, Any]) -> dict[str, Any]:
    return {**row, "labels": row["labels"] * 0 + IGNORED}


def plain(found: list[dict[str, Any]]) -> list[dict[str, list[int]]]:
    return [{name: value.tolist() for name, value in row.items()} for row in found]


def of_one_length(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Collate rows of lists to one length: batches that the first rank reads for all ranks need one shape."""
    import torch

    longest = [{name: torch.full((LONGEST,), IGNORED) for name in ("input_ids", "labels")}]
    batch = padded([{name: torch.as_tensor(value) for name, value in row.items()} for row in found] + longest)
    return {name: value[:-1] for name, value in batch.items()}


def make_trainer(layout: str, directory: Path, *, trainer_class: Any = None, **changes: Any) -> Any:
    strategy = STRATEGIES[layout]
    strategy = replace(strategy, micro_batch_size=MICRO_STEP_SAMPLES // strategy.data_parallel_size)
    case = Case(layout=layout, strategy=strategy, optimizer="adamw_torch")
    overrides = {"use_cpu": True} if strategy.engine == "single" else configure_cpu_ranks(strategy.engine)
    stated = case.training_arguments(directory) | {
        "max_steps": STEPS,
        "logging_steps": LOGGED_EVERY,
        "include_num_input_tokens_seen": "all",
        "per_device_eval_batch_size": 2,
    }
    stated |= changes.pop("arguments", {})
    settings = {
        "model": make_model("llama", {}),
        "args": training_arguments(stated, overrides),
        # The last step of an epoch has one sample.
        "train_dataset": samples()[: 2 * MICRO_STEP_SAMPLES + 1],
        "eval_dataset": rows(),
        "data_collator": padded,
    }
    return parallelism_of(strategy).make_trainer(trainer_class=trainer_class, **(settings | changes))


def counted(layout: str, directory: Path) -> dict[str, Any]:
    trainer = make_trainer(layout, directory, arguments={"gradient_accumulation_steps": 2})
    output = trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "train_loss": output.training_loss,
        "logged": [entry["loss"] for entry in logs],
        "norms": [entry.get("grad_norm") for entry in logs],
        "tokens": trainer.state.num_input_tokens_seen,
    }


def measures(predictions: Any) -> dict[str, float]:
    logits, labels = predictions.predictions, predictions.label_ids
    found = labels != IGNORED
    right = (logits[:, :-1].argmax(-1) == labels[:, 1:])[found[:, 1:]]
    return {
        "samples": len(logits),
        "labels": int(found.sum()),
        "sum": int(labels[found].sum()),
        "right": int(right.sum()),
    }


def evaluated(layout: str, directory: Path) -> dict[str, Any]:
    from datasets import Dataset
    from shardwright.trainers.training.rank import held_out

    strategy = STRATEGIES[layout]
    has_logits = strategy.pp == 1
    # A step that changes nothing: Transformers prepares no model of ZeRO-1 for an evaluation before training.
    trainer = make_trainer(
        layout,
        directory,
        arguments={"max_steps": 1, "learning_rate": 0.0},
        compute_metrics=measures if has_logits else None,
    )
    trainer.train()
    found: dict[str, Any] = {"held out": held_out(trainer, strategy).value}

    def loss(data: Any) -> Any:
        try:
            return trainer.evaluate(data)["eval_loss"]
        except UsageError as error:
            return str(error)

    whole = trainer.evaluate()
    names = ("loss", "samples", "labels", "sum", "right") if has_logits else ("loss",)
    found |= {name: whole[f"eval_{name}"] for name in names if f"eval_{name}" in whole}
    found["one row"] = loss(rows(1))
    found["rows without labels"] = loss([unlabelled(row) for row in rows(3)] + rows(2))
    found["no labels"] = loss([unlabelled(row) for row in rows(3)])
    found |= {
        f"two sets {name}": value
        for name, value in trainer.evaluate({"a": rows(3), "b": rows(5)}).items()
        if name.endswith("_loss")
    }
    if strategy.pp == 1:
        trainer.data_collator = of_one_length
        found["stream"] = loss(Dataset.from_list(plain(rows())).to_iterable_dataset())
        found["predicted"] = trainer.predict(rows(5)).label_ids.flatten().tolist()
    return found


def without_labels(layout: str, directory: Path) -> dict[str, Any]:
    """Train on steps in which one rank, or none at all, has labels."""
    found = samples()[: 3 * MICRO_STEP_SAMPLES]
    half = MICRO_STEP_SAMPLES // 2
    found[half:MICRO_STEP_SAMPLES] = map(unlabelled, found[half:MICRO_STEP_SAMPLES])
    found[MICRO_STEP_SAMPLES : 2 * MICRO_STEP_SAMPLES] = map(
        unlabelled, found[MICRO_STEP_SAMPLES : 2 * MICRO_STEP_SAMPLES]
    )
    arguments = {"max_steps": 3, "logging_steps": 1, "train_sampling_strategy": "sequential", "weight_decay": 0.0}
    trainer = make_trainer(layout, directory, train_dataset=found, arguments=arguments)
    trainer.train()
    return {"losses": logged(trainer), "norms": logged(trainer, "grad_norm")}


def own_loss(scales: bool) -> Any:
    """Return a Trainer whose loss is the mean over a rank's tokens, or its share of the mean over all ranks."""
    from torch.nn.functional import cross_entropy

    class OwnLoss(Trainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None):
            outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
            logits, labels = outputs.logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten()
            loss = cross_entropy(logits, labels, reduction="sum" if scales else "mean")
            if scales:
                loss = loss / num_items_in_batch * self.accelerator.num_processes
            return (loss, outputs) if return_outputs else loss

    return OwnLoss


def own_losses(layout: str, directory: Path) -> dict[str, Any]:
    """Train on losses that scripts compute, with uneven numbers of labels; one process has a whole batch."""
    from torch.nn.functional import cross_entropy

    def of_tokens(outputs: Any, labels: Any) -> Any:
        return cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="none")

    def focal(outputs: Any, labels: Any) -> Any:
        losses = of_tokens(outputs, labels)[labels[:, 1:].flatten() != IGNORED]
        return ((1 - (-losses).exp()) ** 2 * losses).mean()

    def of_samples(outputs: Any, labels: Any) -> Any:
        losses = of_tokens(outputs, labels).reshape(len(labels), -1)
        return (losses.sum(1) / labels[:, 1:].ne(IGNORED).sum(1)).mean()

    def rms(outputs: Any, labels: Any) -> Any:
        return outputs.logits.float().pow(2).mean()

    def trainer(own: Callable[[Any, Any], Any], *, adds: bool = False, returned: Callable[..., Any]) -> type[Trainer]:
        class OwnLoss(Trainer):  # type: ignore[misc]
            def compute_loss(
                self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
            ) -> Any:
                if adds:
                    loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
                    loss = loss + 0.3 * own(outputs, inputs["labels"])
                else:
                    outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
                    loss = own(outputs, inputs["labels"])
                return returned(loss, outputs) if return_outputs else returned(loss, None)

        return OwnLoss

    def plain_loss(loss: Any, outputs: Any) -> Any:
        return loss if outputs is None else (loss, outputs)

    def with_dictionary(loss: Any, outputs: Any) -> Any:
        return loss if outputs is None else (loss, {"logits": outputs.logits, "square": outputs.logits.pow(2)})

    def share(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        return of_tokens(outputs, labels).sum() / num_items_in_batch

    settings: dict[str, dict[str, Any]] = {
        "focal": {"trainer_class": trainer(focal, returned=plain_loss)},
        "focal and outputs in a dictionary": {"trainer_class": trainer(focal, returned=with_dictionary)},
        "mean of samples": {"trainer_class": trainer(of_samples, returned=plain_loss)},
        "stock loss and a mean over values": {"trainer_class": trainer(rms, adds=True, returned=plain_loss)},
        "stock loss and a mean over labels": {"trainer_class": trainer(focal, adds=True, returned=plain_loss)},
        "function that divides by all labels": {"compute_loss_func": share},
        "dictionary": {"trainer_class": trainer(focal, returned=lambda loss, outputs: {"loss": loss})},
        "several values": {"trainer_class": trainer(focal, returned=lambda loss, outputs: (loss, loss, outputs))},
        "list": {"trainer_class": trainer(focal, returned=lambda loss, outputs: [loss])},
    }
    batch = {"per_device_train_batch_size": 2 * MICRO_STEP_SAMPLES} if layout == "single" else {}
    steps = {"max_steps": 3, "logging_steps": 1, "gradient_accumulation_steps": 1 if batch else 2}
    found: dict[str, Any] = {}
    for name, changes in settings.items():
        made = make_trainer(
            layout,
            directory,
            arguments=steps | batch,
            data_collator=of_one_length,
            train_dataset=samples()[: 3 * 2 * MICRO_STEP_SAMPLES],
            **changes,
        )
        record = training_record(
            lambda made=made: made,
            lambda made: {
                "losses": logged(made),
                "norms": logged(made, "grad_norm"),
                "loss": made.evaluate()["eval_loss"],
            },
        )
        assert "error" not in record, record["error"]
        found |= {f"{name}: {figure}": value for figure, value in record.items()}
        if layout != "single":
            forget_last_run()
    return found


def stream_of(found: list[dict[str, Any]]) -> Any:
    from torch.utils.data import IterableDataset

    class Stream(IterableDataset):  # type: ignore[misc,type-arg]
        def __iter__(self) -> Any:
            return iter(found)

    return Stream()


def streams(layout: str, directory: Path) -> dict[str, Any]:
    """Train on a stream with an incomplete last batch, and on streams that differ between ranks."""

    whole = samples()[: 2 * MICRO_STEP_SAMPLES + 1]
    rank = int(os.environ.get("RANK", "0"))
    given = {
        "whole": whole,
        "a part for each rank": whole[rank::2],
        "fewer on one rank": whole[:1] * (len(whole) - MICRO_STEP_SAMPLES * rank),
    }
    found: dict[str, Any] = {}
    for name, rows_of_rank in given.items():
        arguments = {"max_steps": 4, "logging_steps": 1, "weight_decay": 0.0}
        trainer = make_trainer(layout, directory, train_dataset=stream_of(rows_of_rank), arguments=arguments)
        try:
            trainer.train()
            found[name] = logged(trainer) + logged(trainer, "grad_norm")
        except UsageError as error:
            found[name] = str(error)
        if layout == "single":
            break
        if name != list(given)[-1]:
            forget_last_run()
    return found


KINDS = ("classes", "numbers", "several", "tags")
"""Heads that are not over the vocabulary: a class, a number or several classes of a sequence; a class of each token."""


def head_model(kind: str) -> Any:
    from transformers import LlamaForSequenceClassification, LlamaForTokenClassification, set_seed

    config = make_model("llama", {}).config
    config.num_labels, config.pad_token_id, config.classifier_dropout = (1 if kind == "numbers" else 3), 0, 0.0
    set_seed(0)
    return (LlamaForTokenClassification if kind == "tags" else LlamaForSequenceClassification)(config)


def head_rows(found: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    import torch

    def label(index: int, row: dict[str, Any]) -> Any:
        if kind == "tags":
            return torch.where(row["labels"] == IGNORED, IGNORED, row["input_ids"] % 3)
        if kind == "several":
            return torch.tensor([index % 2, index % 3 > 0, 1], dtype=torch.float32)
        return torch.tensor(index / 8 if kind == "numbers" else index % 3)

    return [{**row, "labels": label(index, row)} for index, row in enumerate(found)]


def collated(found: list[dict[str, Any]]) -> dict[str, Any]:
    import torch

    if found[0]["labels"].shape == found[0]["input_ids"].shape:
        return padded(found)
    batch = padded([{**row, "labels": row["input_ids"]} for row in found])
    return batch | {"labels": torch.stack([row["labels"] for row in found])}


def heads(layout: str, directory: Path) -> dict[str, Any]:
    """Train classification and regression heads; the reference is the stock Trainer with one batch per step."""

    found: dict[str, Any] = {}
    for kind in KINDS:
        rows_of_kind = head_rows(samples()[: 2 * MICRO_STEP_SAMPLES + 1], kind)
        if kind in ("classes", "tags"):
            # The second half of the first micro-batch: one of two ranks has no label.
            for row in rows_of_kind[MICRO_STEP_SAMPLES // 2 : MICRO_STEP_SAMPLES]:
                row["labels"] = row["labels"] * 0 + IGNORED
        arguments = {"max_steps": 4, "logging_steps": 1, "train_sampling_strategy": "sequential"}
        settings = {"model": head_model(kind), "train_dataset": rows_of_kind, "data_collator": collated}
        if layout == "single":
            whole = {"per_device_train_batch_size": 2 * MICRO_STEP_SAMPLES}
            made = make_trainer(layout, directory, arguments=arguments | whole).args
            trainer = Trainer(args=made, **settings)
        else:
            arguments["gradient_accumulation_steps"] = 2
            trainer = make_trainer(layout, directory, arguments=arguments, **settings)
        trainer.train()
        found[kind] = logged(trainer) + logged(trainer, "grad_norm")
        if layout != "single" and kind != KINDS[-1]:
            forget_last_run()
    return found


def sequences(layout: str, directory: Path, kind: str) -> float:
    data = head_rows(rows(), kind)
    settings = {"model": head_model(kind), "train_dataset": data, "eval_dataset": data, "data_collator": collated}
    return losses_of(layout, directory, **settings)["eval_loss"]


def losses_of(layout: str, directory: Path, **changes: Any) -> dict[str, float]:
    arguments = {"max_steps": 1, "learning_rate": 0.0} | changes.pop("arguments", {})
    trainer = make_trainer(layout, directory, arguments=arguments, **changes)
    trainer.train()
    return dict(trainer.evaluate())


class Collected:
    """Metrics of full sets or single batches: the numbers of losses and inputs with the predictions."""

    def __init__(self) -> None:
        self.seen = {"samples": 0, "losses": 0, "inputs": 0, "calls": 0}

    def __call__(self, predictions: Any, compute_result: bool = True) -> dict[str, float]:
        for name, value in {
            "samples": predictions.label_ids,
            "losses": predictions.losses,
            "inputs": predictions.inputs,
        }.items():
            self.seen[name] += 0 if value is None else len(value)
        self.seen["calls"] += 1
        return dict(self.seen) if compute_result else {}


def options(layout: str, directory: Path) -> dict[str, Any]:
    """Evaluate with every option of `evaluate`, and with losses of every kind."""
    given: dict[str, dict[str, Any]] = {
        "losses and inputs": {"include_for_metrics": ["loss", "inputs"]},
        "batch by batch": {"batch_eval_metrics": True},
        "accumulated": {"eval_accumulation_steps": 1},
        "loss only": {"prediction_loss_only": True},
        "kept apart": {"eval_do_concat_batches": False},
    }
    found: dict[str, Any] = {}
    for name, arguments in given.items():
        metrics = losses_of(
            layout, directory, arguments=arguments, data_collator=of_one_length, compute_metrics=Collected()
        )
        names = ("loss", *Collected().seen)
        found[name] = [metrics[f"eval_{one}"] for one in names if f"eval_{one}" in metrics and one != "calls"]
    found["own mean"] = losses_of(layout, directory, trainer_class=own_loss(False))["eval_loss"]
    found["own share"] = losses_of(layout, directory, trainer_class=own_loss(True))["eval_loss"]
    found["classes"] = sequences(layout, directory, "classes")
    found["numbers"] = sequences(layout, directory, "numbers")
    if STRATEGIES[layout].engine != "fsdp2":
        mixture = make_model("mixtral", {"output_router_logits": True, "router_aux_loss_coef": 0.5})
        found["mixture"] = losses_of(layout, directory, model=mixture)["eval_loss"]
    return found


def preferences(layout: str, directory: Path) -> dict[str, Any]:
    """Return the losses of TRL's trainers on sets whose size is not a multiple of the ranks."""
    from accelerate.state import PartialState
    from datasets import Dataset
    from shardwright.plugins.transformers.training_arguments import byte_tokenizer
    from transformers import LlamaForCausalLM
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    strategy = STRATEGIES[layout]
    strategy = replace(strategy, micro_batch_size=MICRO_STEP_SAMPLES // strategy.data_parallel_size)
    case = Case(layout=layout, strategy=strategy, optimizer="adamw_torch")
    texts = ["a", "more of it", "and then", "b c d e f g", "over", "the lazy dog sleeps", "end"]
    pairs = Dataset.from_list(
        [{"prompt": f"{text}? ", "chosen": text[::-1], "rejected": f"{text} {text}"} for text in texts]
    )
    completions = Dataset.from_list([{"prompt": f"{text}? ", "completion": text[::-1]} for text in texts])
    found: dict[str, Any] = {}
    kinds = [("sft", SFTTrainer, SFTConfig, completions)]
    if strategy.sp == strategy.tp == 1:
        kinds.append(("dpo", DPOTrainer, DPOConfig, pairs))
    model = directory / "model"
    for name, kind, config, data in kinds:
        overrides = {"use_cpu": True} if strategy.engine == "single" else configure_cpu_ranks(strategy.engine)
        make_model("llama", {"vocab_size": 512}).save_pretrained(model)
        PartialState(cpu=True).wait_for_everyone()
        stated = case.training_arguments(directory) | overrides | {"max_steps": 1, "learning_rate": 0.0}
        stated |= {"per_device_eval_batch_size": 2, "max_length": 32, "dataset_num_proc": None, "bf16": False}
        stated |= {"eval_strategy": "steps", "eval_steps": 1}
        trainer = parallelism_of(strategy).make_trainer(
            trainer_class=kind,
            model=LlamaForCausalLM.from_pretrained(model, dtype="float32"),
            args=config(**stated),
            processing_class=byte_tokenizer(512),
            **({"ref_model": make_model("llama", {"vocab_size": 512}, seed=9)} if name == "dpo" else {}),
            train_dataset=data,
            eval_dataset=data,
        )
        trainer.train()
        logs = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
        found[name] = logs[-1]["eval_loss"]
        if name != kinds[-1][0] and strategy.engine != "single":
            forget_last_run()
    return found


def stopped_early(layout: str, directory: Path) -> dict[str, Any]:
    """Train until the evaluation loss rises, and load the best model."""
    from transformers import EarlyStoppingCallback

    arguments = {"max_steps": 8, "learning_rate": 0.3, "logging_steps": 1, "load_best_model_at_end": True}
    arguments |= {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    trainer = make_trainer(layout, directory, arguments=arguments, callbacks=[EarlyStoppingCallback(1)])
    trainer.train()
    state = trainer.state
    best = {"best": state.best_metric, "best step": state.best_global_step}
    return {"steps": state.global_step, **best, "losses": logged(trainer, "eval_loss")}


WORK: dict[str, Callable[[str, Path], dict[str, Any]]] = {
    "counted": counted,
    "evaluated": evaluated,
    "without_labels": without_labels,
    "heads": heads,
    "options": options,
    "own_losses": own_losses,
    "preferences": preferences,
    "stopped_early": stopped_early,
    "streams": streams,
}


if __name__ == "__main__":
    output = Path(sys.argv[1])
    for name in sys.argv[2:]:
        work, _, layout = name.partition("-")
        record = WORK[work](layout, output / name)
        if os.environ["RANK"] == "0":
            (output / f"{name}.json").write_text(json.dumps(record))
        forget_last_run()
