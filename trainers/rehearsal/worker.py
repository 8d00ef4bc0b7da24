"""Runs on every rank of a rehearsal: trains the shrunken model through the Trainer, or resumes and loads the export.

Rank files, checkpoints and the exported model directory go to the rehearsal's work directory, where the process that
started the launch reads them.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from ...ds_configs.plan.plan import Plan
from ...plugins.accelerate.cpu_ranks import configure_cpu_ranks
from ...plugins.deepspeed.engine import prepare_nvme_offload
from ...plugins.peft import add_lora
from ...plugins.transformers.gradient_checkpointing import partial_checkpointing_callback
from ...plugins.transformers.training_arguments import (
    prepare_model_directory_save,
    save_model_directory,
    training_arguments,
    weights_dtype,
)
from ..data.models import StartingModel, load_config, load_model
from ..parallel.trainer_for import engine_logits, planned_parallelism
from ..runs.clock import ProgressSender, StepLosses
from ..runs.ranks import check_upstream, chosen_engine, write_json
from ..runs.settings import RankTask
from .files import RehearsalJob

DISTINCT_TOKENS = 16
PROBE_SEED = 7


class RehearsalTask(RehearsalJob, RankTask):
    """One of the two launches of a rehearsal."""

    def run(self, work: Path) -> None:
        {"train": train_shrunken, "resume": resume}[self.stage](self, Plan.load(work), work)


def train_shrunken(job: RehearsalJob, plan: Plan, work: Path) -> None:
    """Train, let every rank compute the same batch, export the model, and write a record."""
    from ...plugins.metering import meter_trainer, start_meter

    arguments = _arguments(job, plan, work)
    prepare_model_directory_save(arguments)
    with start_meter() as meter:
        trainer, recorder = _trainer(job, plan, work, arguments)
        meter_trainer(trainer, meter)
        trainer.train()
        reading = meter.reading()
    logits_BTV = engine_logits(trainer, probe_tokens(plan))
    losses = recorder.mean_over_ranks()
    if arguments.process_index == 0:
        _save_logits(logits_BTV, work / "trained_logits.safetensors")
    save_model_directory(trainer, str(work / "export"))
    record = {
        "world_size": arguments.world_size,
        "losses": losses,
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
    arguments = _arguments(job, plan, work, output_dir=str(work / "resumed"), save_strategy="no")
    trainer, recorder = _trainer(job, plan, work, arguments)
    trainer.train(resume_from_checkpoint=str(work / "checkpoints" / f"checkpoint-{job.save_step}"))
    record |= {"world_size": arguments.world_size, "losses": recorder.mean_over_ranks()}
    write_json(record, work / f"resume-rank{arguments.process_index}.json")


def _arguments(job: RehearsalJob, plan: Plan, work: Path, **changes: Any) -> Any:
    """ZeRO-3 partitions weights while they are made, for which `TrainingArguments` must exist before them."""
    settings = job.training_arguments | {"output_dir": str(work / "checkpoints")} | changes
    engine = chosen_engine(settings)
    arguments = training_arguments(settings, configure_cpu_ranks(engine))
    check_upstream(engine, method=plan.job.method)
    prepare_nvme_offload(arguments)
    return arguments


def _trainer(job: RehearsalJob, plan: Plan, work: Path, arguments: Any) -> tuple[Any, StepLosses]:
    from transformers import AutoConfig, AutoModelForCausalLM, default_data_collator, set_seed

    set_seed(arguments.seed)
    planned, layout = plan.job, plan.chosen.strategy
    dtype = weights_dtype(arguments, method=planned.method, trained=planned.weights_dtype)
    if planned.method == "full":
        config = AutoConfig.from_pretrained(work / "model", trust_remote_code=False)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    else:
        engine = chosen_engine(job.training_arguments)
        base = _load_base(plan, work, dtype, engine=engine)
        targets, fp32 = ",".join(planned.lora_targets), engine != "deepspeed"
        model = add_lora(base, rank=planned.lora_rank, targets=targets, fp32_adapters=fp32)
    length = planned.seq_len_tokens
    stream = skewed_tokens(job.samples * length, plan.model.dimensions.vocab_size, seed=0)
    samples = [{"input_ids": block_T, "labels": block_T} for block_T in stream.view(job.samples, length)]
    trainer = planned_parallelism(plan).make_trainer(
        model=model, args=arguments, train_dataset=samples, data_collator=default_data_collator
    )
    recorder = StepLosses(trainer)
    trainer.add_callback(ProgressSender())
    if layout.checkpointed_layers is not None:
        trainer.add_callback(partial_checkpointing_callback(layout.checkpointed_layers))
    return trainer, recorder


def _load(directory: Path, dtype: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, use_safetensors=True, trust_remote_code=False)


def _load_base(plan: Plan, work: Path, dtype: Any, *, engine: str | None = None) -> Any:
    """Return the base model of adapters, for QLoRA in 4 bit as a training run loads it; `engine` shards it."""
    if plan.job.method != "qlora":
        return _load(work / "model", dtype)
    source = StartingModel(model=str(work / "model"), method=plan.job.method)
    return load_model(source, load_config(source), dtype, seed=0, engine=engine)


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

    bf16, is_full = plan.job.precision == "bf16", plan.job.method == "full"
    autocast = bf16 and engine == "ddp"
    dtype = torch.bfloat16 if bf16 and not (autocast and is_full) else torch.float32
    if is_full:
        model = _load(work / "export", dtype)
    else:
        from peft import PeftModel

        base = _load_base(plan, work, dtype)
        model = PeftModel.from_pretrained(base, str(work / "export"), autocast_adapter_dtype=autocast)
    with torch.autocast("cpu", dtype=torch.bfloat16) if autocast else nullcontext(), torch.no_grad():
        return model.eval()(input_ids=probe_tokens(plan), use_cache=False).logits.float().contiguous()


def _save_logits(logits_BTV: Any, path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"logits_BTV": logits_BTV}, path)
