"""One training run of a case, the same code on every rank and in the single process that it is compared with.

Ranks run this file.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from equivalence.cases import EVALUATED, IGNORED, LONGEST, Case, make_model, probe_batch, samples
from equivalence.records import Record, logged, training_record, write_records
from equivalence.settings import Run, make_teacher, run_of
from equivalence.stages import figures_of_stages
from fresh_process import forget_last_run
from shardwright.plugins.accelerate import configure_cpu_ranks
from shardwright.plugins.compressed_tensors import weight_levels
from shardwright.plugins.deepspeed.engine import stages_of
from shardwright.plugins.transformers.training_arguments import (
    prepare_model_directory_save,
    save_model_directory,
    training_arguments,
)
from shardwright.trainers.exact import exact_class
from shardwright.trainers.parallel.planned import engine_logits, parallelism_of
from shardwright.trainers.qat import rounding
from transformers import Trainer, TrainerCallback


class Events(TrainerCallback):
    """Counts the events of a training, and whether callbacks get what they read."""

    def __init__(self) -> None:
        self.counts = {"complete": 1}
        self.routed: list[list[list[torch.Tensor]]] = []
        """Logits of the routers for tokens that are no padding, of each micro-batch of each step in one process."""

    def keep_routing(self, model: Any, arguments: Any, inputs: dict[str, Any], outputs: Any) -> None:
        if model.training and outputs.get("router_logits") is not None:
            seen = inputs["attention_mask"].flatten().bool()
            self.routed[-1].append([each.detach()[seen] for each in outputs.router_logits])

    def _count(self, name: str, arguments: dict[str, Any]) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1
        if any(arguments.get(key) is None for key in ("model", "optimizer", "lr_scheduler")):
            self.counts["complete"] = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._count("step_begin", kwargs)
        self.routed.append([])

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._count("substep_end", kwargs)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._count("step_end", kwargs)


ROUTING = ("expert_load", "expert_load_max")


def routing_of(routed: list[list[list[torch.Tensor]]]) -> dict[str, list[float]]:
    """Return of each step the largest load of an expert over the mean load, in mean and maximum over layers."""
    steps = [step for step in routed if step]
    found: dict[str, list[float]] = {name: [] for name in ROUTING} if steps else {}
    for step in steps:
        layers = [torch.cat(parts) for parts in zip(*step, strict=True)]
        counts = [torch.bincount(each.topk(2).indices.flatten(), minlength=each.shape[1]).double() for each in layers]
        loads = [float(count.max() / count.mean()) for count in counts]
        for name, value in zip(ROUTING, (sum(loads) / len(loads), max(loads)), strict=True):
            found[name].append(value)
    return found


def measures(predictions: Any) -> dict[str, float]:
    """Return what metrics see: how many samples and labels, the width of logits, and labels that are predicted."""
    logits, labels = predictions.predictions, predictions.label_ids
    labelled = labels[:, 1:] != IGNORED
    right = (logits[:, :-1].argmax(-1) == labels[:, 1:])[labelled]
    return {"samples": len(logits), "labels": int(labelled.sum()), "width": logits.shape[-1], "right": int(right.sum())}


def _logits_alone(outputs: Any, labels: Any) -> Any:
    """Return the logits; mixtures also return what their routers computed, of another size on each rank."""
    return outputs if torch.is_tensor(outputs) else next(each for each in outputs if each.dim() == 3)


class Collected:
    """Metrics of full sets or single batches: how many predictions, losses and inputs they get."""

    def __init__(self) -> None:
        self.seen = dict.fromkeys(("label_ids", "losses", "inputs"), 0)

    def __call__(self, predictions: Any, compute_result: bool = True) -> dict[str, float]:
        for name in self.seen:
            value = getattr(predictions, name)
            self.seen[name] += 0 if value is None else len(value)
        return dict(self.seen) if compute_result else {}


OPTIONS: dict[str, dict[str, Any]] = {
    "losses and inputs": {"include_for_metrics": ["loss", "inputs"]},
    "batch by batch": {"batch_eval_metrics": True},
    "accumulated": {"eval_accumulation_steps": 1},
    "loss only": {"prediction_loss_only": True},
}
"""Of an evaluation."""


def evaluations(trainer: Any, case: Case) -> dict[str, Any]:
    """Evaluate sets of every size, a stream, and with every option that the layout has."""
    from shardwright.ds_configs.specs.errors import UsageError
    from shardwright.trainers.training.rank import held_out

    unlabelled = [{**row, "labels": row["labels"] * 0 + IGNORED} for row in samples()[:3]]
    found: dict[str, Any] = {"held out": held_out(trainer, case.full_layout)}

    def loss(name: str, rows: Any) -> None:
        try:
            found[name] = trainer.evaluate(rows)["eval_loss"]
        except UsageError as error:
            found[name] = str(error)

    loss("one row", samples()[-1:])
    loss("rows without labels", unlabelled + samples()[-2:])
    loss("no labels", unlabelled)
    two = trainer.evaluate({"a": samples()[-3:], "b": samples()[-5:]})
    found |= {f"two sets {name}": value for name, value in two.items() if name.endswith("_loss")}
    if case.full_layout.pp > 1:
        return found
    trainer.data_collator = one_length
    loss("stream", Rows(samples()[-EVALUATED:]))
    found["predicted"] = trainer.predict(samples()[-5:]).label_ids.flatten().tolist()
    for name, options in OPTIONS.items() if case.full_layout.tp == case.full_layout.sp == 1 else ():
        kept = {option: getattr(trainer.args, option) for option in options}
        trainer.compute_metrics = Collected()
        vars(trainer.args).update(options)
        metrics = trainer.evaluate()
        vars(trainer.args).update(kept)
        names = ("eval_loss", *(f"eval_{each}" for each in Collected().seen))
        found[name] = [metrics[each] for each in names if each in metrics]
    return found


class Rows(torch.utils.data.IterableDataset[dict[str, Any]]):
    """Samples without a length."""

    def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return iter(self.rows)


def one_length(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Collate rows to one length, with positions: batches that one rank reads for all, or shares, have one shape."""
    from equivalence.settings import collated

    batch = collated(rows)
    missing = (0, LONGEST - batch["input_ids"].shape[1])
    fill = {"labels": IGNORED}
    batch = {name: torch.nn.functional.pad(one, missing, value=fill.get(name, 0)) for name, one in batch.items()}
    positions = torch.arange(batch["input_ids"].shape[1]).expand_as(batch["input_ids"])
    return {"position_ids": positions.contiguous(), **batch}


def sequence_parallelism(ranks: int, data_ranks: int) -> Any:
    """Return Accelerate's description of Ulysses sequence parallelism."""
    from accelerate import ParallelismConfig
    from accelerate.utils import DeepSpeedSequenceParallelConfig

    handler = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa")
    return ParallelismConfig(sp_size=ranks, sp_backend="deepspeed", dp_shard_size=data_ranks, sp_handler=handler)


def _parallelism(run: Run) -> Any:
    """Return what runs the layout; the callback of its axis has the run's own keywords."""
    layout = parallelism_of(run.case.full_layout)
    if not run.parallelism:
        return layout
    from shardwright.trainers.parallel.sequence import SequenceParallelCallback

    return replace(layout, callbacks=(SequenceParallelCallback(2, **run.parallelism),))


def make_trainer(case: Case, directory: Path) -> tuple[Any, Run, Events]:
    run, layout = run_of(case, directory), case.full_layout
    # A DistillationTrainer shares sequences by itself.
    shares = run.distillation is not None and layout.sp > 1
    if shares:
        run.arguments["parallelism_config"] = sequence_parallelism(layout.sp, layout.data_parallel_size)
        run.case = replace(case, layout=f"zero{layout.zero_stage}")
    # Before the arguments, with which ZeRO-3 would partition a model while it is made.
    model: Any = None if run.starts_from_directory else _changed(make_model(case.family, run.sizes), run)
    overrides = {"use_cpu": True} if layout.engine == "single" else configure_cpu_ranks(layout.engine)
    if own := run.arguments.pop("accelerator_config", None):
        overrides = {**overrides, "accelerator_config": {**overrides.get("accelerator_config", {}), **own}}
    arguments = training_arguments(run.arguments, overrides)
    for change in run.change_arguments:
        change(arguments)
    prepare_model_directory_save(arguments)
    if model is None:
        model = _from_directory(case, run, directory)
    if run.exports:
        run.source = _saved(make_model(case.family, run.sizes), directory / "source")
    events = Events()
    if layout.engine == "single":
        model.register_forward_hook(events.keep_routing, with_kwargs=True)
    settings: dict[str, Any] = {
        "model": model,
        "args": arguments,
        "train_dataset": Rows(run.data) if run.streams else run.data,
        "eval_dataset": run.held_out,
        "data_collator": one_length if run.streams or shares else run.collator,
        "callbacks": [events, *(make() for make in run.callbacks)],
    }
    if layout.pp == layout.cp == 1 and run.measures and run.distillation is None:
        settings |= {"compute_metrics": measures, "preprocess_logits_for_metrics": _logits_alone}
    if layout.cp > 1:
        # Context parallelism cannot evaluate.
        del settings["eval_dataset"]
    for given in run.given:
        settings |= given(model)
    if run.distillation is not None:
        from shardwright.trainers.distillation import DistillationConfig, DistillationTrainer

        config = DistillationConfig(**run.distillation)
        teacher = _teacher(case, run, directory)
        placed = {} if run.teacher == "replica" else {"teacher_placement": run.teacher}
        settings = (
            {"trainer_class": DistillationTrainer, "teacher": teacher, "distillation": config} | placed | settings
        )
    if run.stock:
        trainer: Any = exact_class(Trainer)(**settings)
    else:
        trainer = _parallelism(run).make_trainer(**settings)
    for change in run.change_trainer:
        change(trainer)
    return trainer, run, events


def _teacher(case: Case, run: Run, directory: Path) -> Any:
    from shardwright.plugins.transformers.second_model import load_second_model

    made = make_teacher(case, run)
    if run.teacher == "replica":
        return made
    path = _saved(made, directory / "teacher")
    engine: Any = case.full_layout.engine
    placement: Any = run.teacher
    return load_second_model(str(path), placement=placement, dtype=torch.float32, engine=engine)


def _saved(model: Any, path: Path) -> Path:
    """Save a model on the first rank while the others wait; under ZeRO-3 `save_pretrained` would gather it."""
    from accelerate.state import PartialState
    from safetensors.torch import save_file

    if os.environ.get("RANK", "0") == "0":
        model.config.save_pretrained(path)
        state = {name: value.clone() for name, value in model.state_dict().items()}
        save_file(state, path / "model.safetensors", metadata={"format": "pt"})
    PartialState().wait_for_everyone()
    return path


def _changed(model: Any, run: Run) -> Any:
    for change in run.change_model:
        model = change(model)
    return model


def _from_directory(case: Case, run: Run, directory: Path) -> Any:
    """Return the model's directory for a pipeline, or a model that ZeRO-3 partitions while it loads."""
    from transformers import AutoModelForCausalLM

    start = _saved(make_model(case.family, run.sizes), directory / "start")
    if case.full_layout.pp > 1:
        return str(start)
    model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    assert all(hasattr(parameter, "ds_id") for parameter in model.parameters())
    return _changed(model, run)


def trained_state(trainer: Any, directory: Path) -> dict[str, torch.Tensor]:
    """Return all trained tensors on the first rank: adapters and learned scales too."""
    from safetensors.torch import load_file

    if stages_of(trainer.model) is None:
        # Under ZeRO-3 rank 0 alone gets it.
        state = trainer.accelerator.get_state_dict(trainer.model_wrapped) or {}
        return {name.replace("_orig_mod.", ""): value for name, value in state.items()}
    trainer.save_model(str(directory / "stages"))
    files = sorted((directory / "stages").glob("*.safetensors"))
    return {name: value for file in files for name, value in load_file(file).items()}


def differing_parameters(model: Any) -> list[str]:
    """Return the parameters that every rank of tensor parallelism holds whole, and that differ between its ranks."""
    from deepspeed.utils import groups

    found = []
    for name, parameter in model.named_parameters():
        if getattr(parameter, "tensor_model_parallel", False):
            continue
        first = parameter.detach().clone()
        source = groups.get_tensor_model_parallel_src_rank()
        torch.distributed.broadcast(first, src=source, group=groups.get_tensor_model_parallel_group())
        if not torch.equal(first, parameter):
            found.append(name)
    return found


def _kept_elements(parameter: Any) -> int:
    """Return the elements of a parameter that this rank stores."""
    if hasattr(parameter, "ds_tensor"):
        return int(parameter.ds_tensor.numel())
    return int((parameter.to_local() if hasattr(parameter, "to_local") else parameter).numel())


def result(trainer: Any, case: Case, run: Run, events: Events, directory: Path) -> Record:
    """Return what a run computed, and write its weights and the logits of its engine."""
    from safetensors.torch import save_file

    record: Record = {
        "world_size": trainer.args.world_size,
        "losses": logged(trainer),
        "grad_norms": [float(norm) for norm in logged(trainer, "grad_norm")],
        "rates": logged(trainer, "learning_rate"),
        "eval_losses": logged(trainer, "eval_loss"),
        "routing": {name: logged(trainer, name) for name in ROUTING},
        "tokens": trainer.state.num_input_tokens_seen,
        "train_loss": trainer.state.log_history[-1].get("train_loss"),
        "best": [trainer.state.best_metric, trainer.state.best_global_step],
        "events": events.counts,
        "seen": list(run.seen),
        "held": sum(parameter.numel() for parameter in trainer.model.parameters()),
    }
    layout = case.full_layout
    if layout.engine == "single":
        record["routing"] = routing_of(events.routed)
    if layout.cp == 1:
        found = trainer.evaluate()
        names = ("loss", "samples", "labels", "width", "right")
        if run.evaluations:
            record["evaluations"] = evaluations(trainer, case)
        record["evaluation"] = {name: found[f"eval_{name}"] for name in names if f"eval_{name}" in found}
    if run.distillation is not None:
        record["kl_per_token"] = logged(trainer, "kl_per_token")
    if run.distillation is not None and trainer.teacher is not None:
        teacher = trainer.teacher.model
        whole = sum(parameter.numel() for parameter in make_teacher(case, run).parameters())
        record["teacher"] = {
            "share": sum(map(_kept_elements, teacher.parameters())) / whole,
            "changes": any(module.training for module in teacher.modules())
            or any(parameter.grad is not None for parameter in teacher.parameters()),
            # ZeRO-3 replaces it for the whole process.
            "replaces linear": torch.nn.functional.linear is not torch._C._nn.linear,
        }
    if layout.tp > 1 and layout.pp == 1:
        record["differing"] = differing_parameters(trainer.model)
    state = trained_state(trainer, directory)
    if trainer.args.process_index == 0:
        directory.mkdir(parents=True, exist_ok=True)
        save_file({name: value.float().clone().contiguous() for name, value in state.items()}, directory / "weights")
    if run.exports:
        from shardwright.plugins.transformers.training_arguments import byte_tokenizer

        callback = next(each for each in trainer.callback_handler.callbacks if hasattr(each, "export"))
        tokenizer = byte_tokenizer(run.sizes["vocab_size"])
        source, verify = str(run.source), "verified" in case.settings
        callback.export(trainer, directory / "export", tokenizer=tokenizer, source=source, verify=verify)
    if set(case.settings) <= SAVED:
        logits = engine_logits(trainer, probe_batch()["input_ids"])
        save_model_directory(trainer, str(directory / "model"))
        save_file({"logits": logits}, directory / f"logits{trainer.args.process_index}")
    return record


SAVED = frozenset(
    ("sgd", "last_batch", "tied", "odd_vocabulary", "balance_loss", "biases", "one_kv_head", "from_directory")
)
"""Settings of cases whose model directory is loaded again."""


def record(case: Case, output: Path) -> Record:
    directory = output / case.name
    made: list[Any] = []
    # A setting may have replaced it for the run before.
    rounding.weight_levels = weight_levels

    def make(path: Path) -> Any:
        # What one rank draws besides must not give it other dropout masks.
        _draw_on_each_rank()
        made[:] = make_trainer(case, path)
        return made[0]

    def finished(trainer: Any) -> Record:
        if made[1].resumes and case.full_layout.engine != "single":
            whole = result(trainer, case, made[1], made[2], directory / "whole")["losses"]
            del trainer
            made.clear()
            forget_last_run()
            trainer = make(directory / "resumed")
            trainer.train(resume_from_checkpoint=str(directory / f"checkpoint-{made[1].arguments['save_steps']}"))
            found = result(trainer, case, made[1], made[2], directory)
            return found | {"whole": whole}
        return result(trainer, case, made[1], made[2], directory)

    if "stages" in case.settings:
        return training_record(
            lambda: make(directory), lambda trainer: figures_of_stages(trainer, case, directory), trains=False
        )
    return training_record(lambda: make(directory), finished)


def _draw_on_each_rank() -> None:
    import random

    import numpy

    rank = int(os.environ.get("RANK", "0"))
    torch.rand(1 + rank)
    random.seed(rank)
    numpy.random.seed(rank)


if __name__ == "__main__":
    write_records(Case, record)
