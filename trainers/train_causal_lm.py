"""Fine-tune a causal language model with the Trainer of Transformers, on whatever the launcher started.

    accelerate launch --config_file accelerate.yaml -m shardwright.trainers.train_causal_lm \\
        --model Qwen/Qwen3-0.6B --text corpus.txt --training-arguments arguments.json --output-dir tuned

The launcher decides between DDP, DeepSpeed and FSDP2, and `torchrun` works too. Ranks without an accelerator
train on CPU. Sequence, expert, tensor and pipeline parallelism are those of the plan that `--plan` names.
Precedence: defaults < `--training-arguments` file < flags.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..ds_configs.plan.output import output_faults, reserved
from ..ds_configs.plan.plan import Plan
from ..ds_configs.plan.write import write_files
from ..ds_configs.specs.errors import Fault, ShardwrightError, UsageError, collecting
from ..ds_configs.specs.json_text import strict_json
from ..ds_configs.specs.settings import GuardSettings, settings_of
from ..plugins.accelerate.cpu_ranks import configure_cpu_ranks
from ..plugins.deepspeed.engine import prepare_nvme_offload
from ..plugins.launching.elastic import recorded
from ..plugins.peft.lora import add_lora
from ..plugins.transformers.training_arguments import (
    check_liger_kernel,
    prepare_model_directory_save,
    refuse_replaced_optimizer,
    save_model_directory,
    training_arguments,
    warn_of_zero0_in_16_bit,
    weights_dtype,
)
from .data.models import StartingModel, check_seq_len, load_config, load_model, load_tokenizer
from .data.text import pack, read_documents
from .guards.hang import watched
from .parallel.trainer_for import PlannedParallelism, planned_parallelism
from .runs.guarded import train_guarded
from .runs.steps import StepLosses, chosen_engine

if TYPE_CHECKING:
    from .runs.plan_callback import PlanCallback

_RESULTS = ("config.json", "*.safetensors", "checkpoint-*")
"""Files of a trained model, and directories of a training."""
DEFAULT_SETTINGS: dict[str, Any] = {"report_to": "none", "save_strategy": "no", "logging_steps": 1}


def parse_flags(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line; options may be spelt with hyphens or underscores."""
    parser = argparse.ArgumentParser(
        prog="python -m shardwright.trainers.train_causal_lm",
        description="Fine-tune a causal language model.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", required=True, help="Hub id, local directory, or config.json")
    add("--revision", help="branch, tag or commit of a Hub model")
    add("--random-weights", action="store_true", help="initialise from the configuration, load no weights")
    add("--tokenizer", help="Hub id or directory; default: the model's, or bytes when a local model has none")
    add("--text", action="append", type=Path, metavar="FILE", help="repeatable; default: Python's help topics")
    add("--training-arguments", type=Path, metavar="FILE.json", help="keys of TrainingArguments")
    add("--seq-len", type=int, default=512, help="tokens per training sample (default 512)")
    add("--max-steps", type=int, help="optimizer steps; default: the file's, or one epoch")
    add("--output-dir", type=Path, required=True, help="where the model directory is written")
    add("--method", choices=("full", "lora", "qlora"), default="full")
    add("--lora-rank", type=int, help="default 16")
    add("--lora-targets", help="module names separated by commas, or all-linear (default)")
    add("--force", action="store_true", help="write over the model and checkpoints of an earlier run in --output-dir")
    add("--resume", action="store_true", help="go on from the newest whole checkpoint in --output-dir, if there is one")
    add(
        "--resume-or-anew", action="store_true", help="as --resume, but begin anew where there are none but broken ones"
    )
    for name, field in GuardSettings.model_fields.items():
        switch: dict[str, Any] = {"action": "store_true"} if field.annotation is bool else {"metavar": "VALUE"}
        default = "" if switch.get("action") else f" (default {field.default})"
        help_text = f"{(field.description or '').lower()}{default}"
        add(f"--{name.replace('_', '-')}", default=field.default, help=help_text, **switch)
    add("--plan", type=Path, metavar="DIR", help="the plan that is run; its prediction is compared with the run")
    add("--losses-json", type=Path, metavar="FILE", help="rank 0 writes the loss of every optimizer step")
    add("--save", action=argparse.BooleanOptionalAction, default=True, help="write the trained model")
    flags = parser.parse_args([_with_hyphens(argument) for argument in argv])
    faults = _flag_faults(flags)
    if faults:
        raise UsageError(faults)
    return flags


def _with_hyphens(argument: str) -> str:
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value


def _flag_faults(flags: argparse.Namespace) -> list[Fault]:
    faults = []
    if flags.seq_len < 2:
        faults.append(Fault(where="--seq-len", value=flags.seq_len, rule="at least 2 tokens, to predict one"))
    for name in ("max_steps", "lora_rank"):
        value = getattr(flags, name)
        if value is not None and value < 1:
            faults.append(Fault(where=f"--{name.replace('_', '-')}", value=value, rule="at least 1"))
    if flags.method == "full":
        faults += [
            Fault(where=f"--{name}", value=value, rule="needs --method lora or qlora", fix="add it or drop this flag")
            for name, value in (("lora-rank", flags.lora_rank), ("lora-targets", flags.lora_targets))
            if value is not None
        ]
    with collecting(faults):
        _guards(flags)
    if flags.revision and Path(flags.model).exists():
        faults.append(Fault(where="--revision", value=flags.revision, rule="only a Hub model has revisions"))
    for path in [*(flags.text or []), *([flags.training_arguments] if flags.training_arguments else [])]:
        if not path.is_file():
            faults.append(Fault(where="file", value=str(path), rule="no such file"))
    return faults


def read_settings(flags: argparse.Namespace) -> dict[str, Any]:
    """Merge defaults, the `--training-arguments` file and the flags into keys of ``TrainingArguments``.

    Raises:
        UsageError: The file is no JSON object.
    """
    settings = dict(DEFAULT_SETTINGS)
    if flags.training_arguments is not None:
        where = str(flags.training_arguments)
        try:
            from_file = strict_json(flags.training_arguments.read_bytes())
        except ValueError as error:
            raise UsageError(Fault(where=where, rule=f"must be JSON: {error}")) from error
        if not isinstance(from_file, dict):
            raise UsageError(Fault(where=where, rule="must hold one JSON object of TrainingArguments keys"))
        settings |= from_file
    settings["output_dir"] = str(flags.output_dir)
    if flags.max_steps is not None:
        settings["max_steps"] = flags.max_steps
    return settings


def fine_tune(flags: argparse.Namespace) -> None:
    """Build everything in the order that ZeRO-3 needs (arguments before weights), train, write, save."""
    settings = read_settings(flags)
    with _reserved(flags), watched(_guards(flags).hang_seconds):
        _train(flags, settings)


def _reserved(flags: argparse.Namespace) -> AbstractContextManager[None]:
    """Return what keeps other runs out of the output directory, on the first rank.

    Raises:
        UsageError: it is a source of this run, cannot be written, or holds what an earlier run left.
    """
    if os.environ.get("RANK", "0") != "0":
        return nullcontext()
    directory, force = flags.output_dir, flags.force or flags.resume or flags.resume_or_anew
    faults = output_faults(directory, force=True, sources={"the model": flags.model})
    found = sorted(path.name for pattern in _RESULTS for path in directory.glob(pattern))
    if found and not force:
        rule, fix = f"holds {found[0]} of an earlier run", "go on with --resume, or write over it with --force"
        faults.append(Fault(where="--output-dir", value=str(directory), rule=rule, fix=fix))
    if faults:
        raise UsageError(faults)
    return reserved(directory, force=True)


def _train(flags: argparse.Namespace, settings: dict[str, Any]) -> None:
    engine = chosen_engine(settings)
    arguments = training_arguments(settings, configure_cpu_ranks(engine))
    _check_world_size(arguments.world_size)
    refuse_replaced_optimizer(arguments)
    warn_of_zero0_in_16_bit(arguments)
    prepare_nvme_offload(arguments)
    check_liger_kernel(arguments)
    planned = plan_callback(flags)
    parallelism = PlannedParallelism() if flags.plan is None else planned_parallelism(Plan.load(flags.plan))
    if flags.save:
        prepare_model_directory_save(arguments)

    source = StartingModel(**{field.name: getattr(flags, field.name) for field in fields(StartingModel)})
    config = load_config(source)
    check_seq_len(flags.seq_len, config)
    tokenizer = load_tokenizer(source, config.get_text_config().vocab_size)
    samples = pack(read_documents(flags.text), tokenizer, flags.seq_len)
    dtype = weights_dtype(arguments, method=flags.method)
    model = load_model(source, config, dtype, arguments.seed, engine=engine, for_stages=parallelism.is_pipeline)
    if flags.method != "full":
        adapters_in_fp32 = engine != "deepspeed"
        model = add_lora(model, rank=flags.lora_rank, targets=flags.lora_targets, fp32_adapters=adapters_in_fp32)

    from transformers import default_data_collator

    from .checkpoints.callback import OR_ANEW

    trainer = parallelism.make_trainer(
        model=model,
        args=arguments,
        revision=flags.revision,
        train_dataset=samples,
        data_collator=default_data_collator,
        processing_class=tokenizer,
    )
    recorder = StepLosses(trainer)
    if planned is not None:
        planned.attach(trainer)
    started = time.monotonic()
    resume = flags.resume or (OR_ANEW if flags.resume_or_anew else arguments.resume_from_checkpoint)
    train_guarded(trainer, resume=resume, **_guards(flags).guards())
    seconds = time.monotonic() - started
    losses = recorder.mean_over_ranks()
    if flags.losses_json is not None and arguments.process_index == 0:
        record = {"engine": engine, "world_size": arguments.world_size, "seconds": seconds, "losses": losses}
        place = flags.losses_json
        write_files({place.name: json.dumps(record, indent=1) + "\n"}, place.parent, force=True)
    if flags.save:
        save_model_directory(trainer, str(flags.output_dir), allow_nonfinite=flags.allow_nonfinite)


def _guards(flags: argparse.Namespace) -> GuardSettings:
    return settings_of(GuardSettings, {name: getattr(flags, name) for name in GuardSettings.model_fields})


def plan_callback(flags: argparse.Namespace) -> PlanCallback | None:
    """Return the callback that compares the run with the plan of ``--plan``; ``None`` without that flag."""
    if flags.plan is None:
        return None
    from .runs.plan_callback import PlanCallback

    return PlanCallback(flags.plan, seq_len_tokens=flags.seq_len, method=flags.method)


def _check_world_size(world_size: int) -> None:
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size != launched:
        raise ShardwrightError(f"the Trainer counts {world_size} ranks where the launcher started {launched}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    try:
        recorded(lambda: fine_tune(parse_flags(sys.argv[1:] if argv is None else argv)))()
    except ShardwrightError as error:
        if os.environ.get("SHARDWRIGHT_DEBUG") == "1":
            raise
        print(f"rank {os.environ.get('RANK', '0')}: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
