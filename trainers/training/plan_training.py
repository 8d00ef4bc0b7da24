"""The training of a plan without a script: a causal language model on packed text, by the Trainer.

The launcher selects DDP, DeepSpeed or FSDP2; `torchrun` works too. Ranks without an accelerator train on the CPU.
`--plan` selects sequence, expert, tensor and pipeline parallelism.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any

from ...ds_configs.plan.output import output_errors, reserved, write_files
from ...ds_configs.plan.plan import Plan
from ...ds_configs.specs.errors import ConfigError, ShardwrightError, UsageError
from ...plugins.peft import add_lora
from ...plugins.transformers.training_arguments import (
    package_errors,
    prepare_model_directory_save,
    save_model_directory,
    weights_dtype,
)
from ..data.models import StartingModel, check_seq_len, load_config, load_model, load_tokenizer
from ..data.sources import pack, read_documents
from ..parallel.trainer_for import PlannedParallelism, planned_parallelism
from ..runs.inputs import PLANNED_DEVICE_FIX
from ..runs.out_of_memory import FILE_NAME, memory_errors
from ..runs.ranks import StepLosses, rank_arguments, train_guarded
from ..runs.settings import RankTask
from .plan_flags import PlanTrainingJob

_RESULTS = ("config.json", "*.safetensors", "checkpoint-*")
"""Files of a trained model, and checkpoints."""


class PlanTrainingTask(PlanTrainingJob, RankTask):
    """Training of a causal language model on packed text."""

    def run(self, work: Path) -> None:
        """Reserve the output directory on the first rank, then train and save."""
        plan = None if self.plan is None else Plan.load(self.plan)
        with nullcontext() if plan is None else memory_errors(plan, report=self.output_dir / FILE_NAME):
            self._run_reserved()

    def _run_reserved(self) -> None:
        settings = self.read_settings()
        if os.environ.get("RANK", "0") != "0":
            self._train(settings)
            return
        directory, force = self.output_dir, self.force or self.resume or self.resume_or_anew
        errors = output_errors(directory, force=True, sources={"the model": self.model})
        results = sorted(path.name for pattern in _RESULTS for path in directory.glob(pattern))
        if results and not force:
            rule, fix = f"contains {results[0]} of an earlier run", "continue with --resume, or overwrite with --force"
            errors.append(ConfigError(where="--output-dir", value=str(directory), rule=rule, fix=fix))
        if errors:
            raise UsageError(errors)
        with reserved(directory, force=True):
            self._train(settings)

    def _train(self, settings: dict[str, Any]) -> None:
        # ZeRO-3 needs the arguments before weights are made.
        arguments, engine = rank_arguments(settings, method=self.method)
        launched = int(os.environ.get("WORLD_SIZE", "1"))
        if arguments.world_size != launched:
            raise ShardwrightError(f"the Trainer has {arguments.world_size} ranks, but the launcher started {launched}")
        if errors := package_errors(vars(arguments)):
            raise UsageError(errors)
        planned, parallelism = None, PlannedParallelism()
        if self.plan is not None:
            from ..runs.plan_callback import PlanCallback

            plan = Plan.load(self.plan)
            if plan.hardware.gpu != "CPU" and arguments.device.type == "cpu" and not settings.get("use_cpu"):
                rule, fix = "is planned, but this machine has no accelerator", PLANNED_DEVICE_FIX
                raise UsageError(ConfigError(where="hardware", value=plan.hardware.name, rule=rule, fix=fix))
            planned = PlanCallback(self.plan, seq_len_tokens=self.seq_len, method=self.method)
            parallelism = planned_parallelism(plan)
        if self.save:
            prepare_model_directory_save(arguments)

        source = StartingModel(**{field.name: getattr(self, field.name) for field in fields(StartingModel)})
        config = load_config(source)
        check_seq_len(self.seq_len, config)
        tokenizer = load_tokenizer(source, config.get_text_config().vocab_size)
        samples = pack(read_documents(None if self.is_python_help else list(self.text)), tokenizer, self.seq_len)
        dtype = weights_dtype(arguments, method=self.method)
        model = load_model(source, config, dtype, arguments.seed, engine=engine, for_stages=parallelism.is_pipeline)
        if self.method != "full":
            fp32 = engine != "deepspeed"
            model = add_lora(
                model,
                rank=self.lora_rank,
                targets=self.lora_targets,
                alpha=self.lora_alpha,
                dropout=self.lora_dropout or 0.0,
                fp32_adapters=fp32,
            )

        from transformers import default_data_collator

        from ..checkpoints.callback import OR_ANEW

        trainer = parallelism.make_trainer(
            model=model,
            args=arguments,
            revision=self.revision,
            train_dataset=samples,
            data_collator=default_data_collator,
            processing_class=tokenizer,
        )
        recorder = StepLosses(trainer)
        if planned is not None:
            planned.attach(trainer)
        started = time.monotonic()
        resume = self.resume or (OR_ANEW if self.resume_or_anew else arguments.resume_from_checkpoint)
        train_guarded(trainer, resume=resume, **self.guards())
        seconds = time.monotonic() - started
        losses = recorder.mean_over_ranks()
        if self.losses_json is not None and arguments.process_index == 0:
            record = {"engine": engine, "world_size": arguments.world_size, "seconds": seconds, "losses": losses}
            text = json.dumps(record, indent=1) + "\n"
            write_files({self.losses_json.name: text}, self.losses_json.parent, force=True)
        if self.save:
            save_model_directory(trainer, str(self.output_dir), allow_nonfinite=self.allow_nonfinite)
