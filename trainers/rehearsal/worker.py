"""Runs on every rank of a rehearsal: trains the shrunken model, resumes and loads the export, or runs a user's script.

Rank files, checkpoints and the exported model directory go to the rehearsal's work directory, where the process that
started the launch reads them.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any

from ...ds_configs.plan.plan import Plan
from ...ds_configs.specs.errors import UsageError
from ...plugins import patches
from ...plugins.accelerate import Engine
from ...plugins.transformers.training_arguments import (
    byte_tokenizer,
    prepare_model_directory_save,
    save_model_directory,
)
from ..data.models import StartingModel, load_config, load_model
from ..parallel.planned import engine_logits
from ..runs.clock import ProgressSender
from ..runs.plan_callback import TRAINED_TYPE, argument_differences, keep_planned_memory
from ..runs.ranks import chosen_engine, rank_arguments, write_json
from ..runs.settings import TRAIN_SAMPLES, RankTask
from ..training.rank import run_script
from ..training.synthetic import synthetic_trainer
from .files import OWN_ARGUMENTS, SCRIPT_STAGE, RehearsalJob, RehearsedScriptJob

DISTINCT_TOKENS = 16
PROBE_SEED = 7


class RehearsalTask(RehearsalJob, RankTask):
    def run(self, work: Path) -> None:
        {"train": train_shrunken, "resume": resume}[self.stage](self, Plan.load(work), work)


def train_shrunken(job: RehearsalJob, plan: Plan, work: Path) -> None:
    """Train, let every rank compute the same batch, export the model, and write a record."""
    from ...plugins.metering import meter_trainer, start_meter

    arguments, engine = _arguments(job, plan, work)
    prepare_model_directory_save(arguments)
    with start_meter() as meter:
        trainer = _trainer(job, plan, work, arguments, engine)
        meter_trainer(trainer, meter)
        trainer.train()
        reading = meter.reading()
    logits_BTV = engine_logits(trainer, probe_tokens(plan))
    if arguments.process_index == 0:
        _save_logits(logits_BTV, work / "trained_logits.safetensors")
    save_model_directory(trainer, str(work / "export"))
    record = {
        "world_size": arguments.world_size,
        "losses": _losses(trainer),
        "probe_mean": logits_BTV.double().mean().item(),
        "probe_digest": hashlib.sha256(logits_BTV.numpy().tobytes()).hexdigest(),
        "roles": reading.roles,
        "host_bytes": reading.host_peak_bytes,
    }
    write_json(record, work / f"train-rank{arguments.process_index}.json")


def resume(job: RehearsalJob, plan: Plan, work: Path) -> None:
    """Load the export as a user would, before the engine exists; then resume from the middle checkpoint."""
    record: dict[str, Any] = {}
    if os.environ.get("RANK", "0") == "0":
        try:
            logits_BTV = _exported_logits(plan, work, chosen_engine(job.training_arguments))
            _save_logits(logits_BTV, work / "export_logits.safetensors")
        except Exception as error:
            record["export_error"] = f"{type(error).__name__}: {error}"
    # With NVMe offload DeepSpeed 0.19.8 cannot save a step again where the first launch saved it.
    arguments, engine = _arguments(job, plan, work, output_dir=str(work / "resumed"), save_strategy="no")
    trainer = _trainer(job, plan, work, arguments, engine)
    trainer.train(resume_from_checkpoint=str(work / "checkpoints" / f"checkpoint-{job.save_step}"))
    record |= {"world_size": arguments.world_size, "losses": _losses(trainer, after=job.save_step)}
    write_json(record, work / f"resume-rank{arguments.process_index}.json")


def _arguments(job: RehearsalJob, plan: Plan, work: Path, **changes: Any) -> tuple[Any, Engine]:
    settings = job.training_arguments | {"output_dir": str(work / "checkpoints")} | changes
    return rank_arguments(settings, method=plan.job.method, task=plan.job.task)


def _losses(trainer: Any, *, after: int = 0) -> list[float]:
    """Return the logged loss of each step after a step: its mean over the ranks."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry and entry["step"] > after]


def _trainer(job: RehearsalJob, plan: Plan, work: Path, arguments: Any, engine: Engine) -> Any:
    from datasets import load_from_disk
    from transformers import TrainerCallback

    class PlannedMemory(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            keep_planned_memory(plan, args, kwargs["model"])

    if plan.job.task == "sft":
        length = plan.job.seq_len_tokens
        stream = skewed_tokens(job.samples * length, plan.model.dimensions.vocab_size, seed=0)
        samples = [{"input_ids": block_T, "labels": block_T} for block_T in stream.view(job.samples, length)]
    else:
        samples = load_from_disk(str(work / TRAIN_SAMPLES))
    random_weights = plan.job.task == "sft" and plan.job.method == "full"
    trainer = synthetic_trainer(plan, arguments, engine, samples, random_weights=random_weights)
    trainer.add_callback(PlannedMemory())
    return trainer


def skewed_tokens(count: int, vocab_size: int, *, seed: int) -> Any:
    """Return tokens of which each is half as frequent as the one before, `DISTINCT_TOKENS` in all, spread over the ids.

    Their entropy is 2 bits, so that the loss of random weights, ln(vocabulary), has far to fall.
    """
    import torch

    distinct = min(DISTINCT_TOKENS, vocab_size)
    weights = 0.5 ** torch.arange(distinct, dtype=torch.float64)
    draws = torch.multinomial(weights, count, replacement=True, generator=torch.Generator().manual_seed(seed))
    return draws * (vocab_size // distinct)


def probe_tokens(plan: Plan) -> Any:
    """Return the token ids [2, T] on which the trained engine and the exported model are compared."""
    length = plan.job.seq_len_tokens
    return skewed_tokens(2 * length, plan.model.dimensions.vocab_size, seed=PROBE_SEED).view(2, length)


def _exported_logits(plan: Plan, work: Path, engine: str | None) -> Any:
    """Compute the probe in the engine's arithmetic: DDP under autocast, DeepSpeed and FSDP2 on 16-bit weights."""
    import torch
    from transformers import AutoConfig

    from ...plugins.transformers.loading import auto_class

    is_reward = plan.job.task == "reward"
    bf16, is_full = plan.job.precision == "bf16", plan.job.method == "full"
    autocast = bf16 and engine == "ddp"
    dtype = torch.bfloat16 if bf16 and not (autocast and is_full) else torch.float32
    export = str(work / "export")
    if is_full:
        loading = {"dtype": dtype, "use_safetensors": True, "trust_remote_code": False}
        kind = auto_class(AutoConfig.from_pretrained(export, trust_remote_code=False), score_head=is_reward)
        model = kind.from_pretrained(export, **loading)
    else:
        from peft import PeftModel

        source = StartingModel(model=plan.model.name, method=plan.job.method)
        config = load_config(source)
        if is_reward:
            config.pad_token_id = byte_tokenizer(config.vocab_size).eos_token_id
        base = load_model(source, config, dtype, seed=0, score_head=is_reward)
        model = PeftModel.from_pretrained(base, export, autocast_adapter_dtype=autocast)
    with torch.autocast("cpu", dtype=torch.bfloat16) if autocast else nullcontext(), torch.no_grad():
        return model.eval()(input_ids=probe_tokens(plan), use_cache=False).logits.float().contiguous()


def _save_logits(logits_BTV: Any, path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"logits_BTV": logits_BTV}, path)


_COMPARED = ("per_device_train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing", "bf16", "fp16")
"""Arguments that determine a plan's memory and time."""


class RehearsedScriptTask(RehearsedScriptJob, RankTask):
    """A user's script with the shrunken model in place of its own."""

    def run(self, work: Path) -> None:
        """Run the script on this rank, and write a record."""
        from transformers import TrainerCallback, TrainingArguments

        record: dict[str, Any] = {"trainers": 0, "losses": [], "differences": [], "errors": []}
        plan = Plan.load(work)

        def from_directory(bound: Any) -> Any:
            # Everything with the name of the plan's model is loaded from the rehearsal's.
            load = bound.__func__

            def loaded(kind: Any, named: Any, *args: Any, **settings: Any) -> Any:
                if str(named) == self.model_name:
                    named = str(work / "model")
                    settings.pop("revision", None)
                return load(kind, named, *args, **settings)

            return classmethod(loaded)

        for loader in patches.names("rehearsal-model-"):
            patches.apply(loader, from_directory)
        defaults = {field.name: field.default for field in fields(TrainingArguments)}
        limits = OWN_ARGUMENTS | {
            "output_dir": str(work / "output"),
            "max_steps": self.steps,
            "save_strategy": "no",
            "eval_strategy": "no",
            "load_best_model_at_end": False,
            "push_to_hub": False,
        }

        def scaling(complete: Callable[[Any], None]) -> Callable[[Any], None]:
            # The plan's values become the rehearsal's, and the run is limited.
            def scaled(arguments: Any) -> None:
                for name, planned in self.planned.items():
                    stated = getattr(arguments, name)
                    stated = getattr(stated, "value", stated)
                    if stated == planned:
                        setattr(arguments, name, self.training_arguments.get(name, defaults[name]))
                    elif name in _COMPARED:
                        record["differences"].append(f"{name} is {stated}, but the plan has {planned}")
                for name, value in limits.items():
                    setattr(arguments, name, value)
                complete(arguments)

            return scaled

        patches.apply("rehearsal-arguments", scaling)

        class Recorder(TrainerCallback):
            def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                record["trainers"] += 1
                lines = argument_differences(plan, args, kwargs.get("model"), ranks=args.world_size)
                record["errors"] += [line for line in lines if line.startswith(TRAINED_TYPE)]
                try:
                    keep_planned_memory(plan, args, kwargs.get("model"))
                except UsageError as error:
                    record["errors"].append(str(error))

            def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
                if "loss" in (logs or {}):
                    record["losses"].append(float(logs["loss"]))

        os.chdir(self.working_directory)
        os.environ["PWD"] = self.working_directory
        # Caches would be written to the directories of modules outside the copy.
        sys.dont_write_bytecode = True
        try:
            run_script(plan, self.script, self.arguments, [Recorder, ProgressSender])
        finally:
            write_json(record, work / f"{SCRIPT_STAGE}-rank{os.environ.get('RANK', '0')}.json")
