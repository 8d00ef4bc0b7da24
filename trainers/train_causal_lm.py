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
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..ds_configs.plan.plan import Plan
from ..ds_configs.specs.errors import Fault, RefusedInputError, ShardwrightError, UsageError
from ..plugins.accelerate.cpu_ranks import Engine, configure_cpu_ranks, engine_from_environment
from ..plugins.deepspeed.engine import prepare_nvme_offload
from ..plugins.peft.lora import add_lora, four_bit_loading
from ..plugins.transformers.training_arguments import (
    check_liger_kernel,
    prepare_model_directory_save,
    refuse_replaced_optimizer,
    save_model_directory,
    training_arguments,
    warn_of_zero0_in_16_bit,
    weights_dtype,
)
from .notes import note
from .plan_parallelism import PlannedParallelism, planned_parallelism
from .text import load_tokenizer, pack, read_documents

if TYPE_CHECKING:
    from .plan_callback import PlanCallback

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
            from_file = json.loads(flags.training_arguments.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UsageError(Fault(where=where, rule=f"must be JSON: {error}")) from error
        if not isinstance(from_file, dict):
            raise UsageError(Fault(where=where, rule="must hold one JSON object of TrainingArguments keys"))
        settings |= from_file
    settings["output_dir"] = str(flags.output_dir)
    if flags.max_steps is not None:
        settings["max_steps"] = flags.max_steps
    return settings


def chosen_engine(settings: dict[str, Any]) -> Engine:
    """Return the engine that the settings or else the launcher's environment select."""
    if settings.get("deepspeed"):
        return "deepspeed"
    return "fsdp2" if settings.get("fsdp") else engine_from_environment()


def load_config(flags: argparse.Namespace) -> Any:
    """Read the model configuration; code that a repository ships is never run."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(flags.model, revision=flags.revision, trust_remote_code=False)


def load_model(flags: argparse.Namespace, config: Any, dtype: Any, seed: int, *, for_stages: bool = False) -> Any:
    """Load or initialise the model; under ZeRO-3 the weights are partitioned while they are made.

    `for_stages` leaves weights to the stages of a pipeline where these can get them as they are wanted: the model is
    then the name of its checkpoint, or without memory.

    Raises:
        RefusedInputError: A local directory has weights in another format than safetensors.
        UsageError: 4-bit weights are asked for where there are none to load.
    """
    import torch
    from transformers import AutoModelForCausalLM, set_seed

    set_seed(seed)
    source = Path(flags.model)
    random_weights = flags.random_weights or source.is_file()
    if source.is_dir() and not random_weights and not any(source.glob("*.safetensors")):
        unsafe = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in source.glob(pattern))
        if unsafe:
            raise RefusedInputError(
                Fault(
                    where=str(source),
                    value=unsafe,
                    rule="weights are read from safetensors only, other formats can run code",
                    fix="convert them, or pass --random-weights",
                )
            )
        note(f"{source} has no weights: they are initialised at random")
        random_weights = True
    if random_weights and flags.method == "qlora":
        raise UsageError(Fault(where="--method", value="qlora", rule="quantizes loaded weights", fix="use lora"))
    if random_weights:
        with torch.device("meta") if for_stages else nullcontext():
            return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    if for_stages and flags.method == "full":
        return flags.model
    return AutoModelForCausalLM.from_pretrained(
        flags.model,
        revision=flags.revision,
        config=config,
        dtype=dtype,
        quantization_config=four_bit_loading(dtype) if flags.method == "qlora" else None,
        use_safetensors=True,
        trust_remote_code=False,
    )


class StepLosses:
    """Keeps the loss of every optimizer step, which the Trainer's log averages over ``logging_steps``."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._training_step: Callable[..., Any] = trainer.training_step
        self._losses: list[Any] = []
        self._accumulated: Any = 0.0
        trainer.training_step = self._recording_step

    def _recording_step(self, *args: Any, **kwargs: Any) -> Any:
        loss = self._training_step(*args, **kwargs)
        self._accumulated = self._accumulated + loss.detach().float()
        if self._trainer.accelerator.sync_gradients:
            self._losses.append(self._accumulated)
            self._accumulated = 0.0
        return loss

    def mean_over_ranks(self) -> list[float]:
        """Return one loss per optimizer step, in order, none for a finished run; every rank must call it."""
        import torch

        if not self._losses:
            return []
        losses: list[float] = self._trainer.accelerator.reduce(torch.stack(self._losses), "mean").tolist()
        return losses


def train(flags: argparse.Namespace) -> None:
    """Build everything in the order that ZeRO-3 needs (arguments before weights), train, write, save."""
    settings = read_settings(flags)
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

    config = load_config(flags)
    check_seq_len(flags.seq_len, config)
    tokenizer = load_tokenizer(flags, config.get_text_config().vocab_size)
    samples = pack(read_documents(flags.text), tokenizer, flags.seq_len)
    dtype = weights_dtype(arguments, method=flags.method)
    model = load_model(flags, config, dtype, arguments.seed, for_stages=parallelism.is_pipeline)
    if flags.method != "full":
        adapters_in_fp32 = engine != "deepspeed"
        model = add_lora(model, rank=flags.lora_rank, targets=flags.lora_targets, fp32_adapters=adapters_in_fp32)

    from transformers import default_data_collator

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
    trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)
    seconds = time.monotonic() - started
    losses = recorder.mean_over_ranks()
    if flags.losses_json is not None and arguments.process_index == 0:
        record = {"engine": engine, "world_size": arguments.world_size, "seconds": seconds, "losses": losses}
        flags.losses_json.parent.mkdir(parents=True, exist_ok=True)
        flags.losses_json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if flags.save:
        save_model_directory(trainer, str(flags.output_dir))


def plan_callback(flags: argparse.Namespace) -> PlanCallback | None:
    """Return the callback that compares the run with the plan of ``--plan``; ``None`` without that flag."""
    if flags.plan is None:
        return None
    from .plan_callback import PlanCallback

    return PlanCallback(flags.plan, seq_len_tokens=flags.seq_len, method=flags.method)


def _check_world_size(world_size: int) -> None:
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size != launched:
        raise ShardwrightError(f"the Trainer counts {world_size} ranks where the launcher started {launched}")


def check_seq_len(seq_len: int, config: Any) -> None:
    """Refuse a sequence beyond learned positions, and remark on one beyond what rotary positions were trained for.

    Raises:
        UsageError: the model has no embedding for the last positions.
    """
    text = config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None)
    if longest is None or seq_len <= longest:
        return
    if getattr(text, "rope_parameters", None) is None:
        rule = f"the model has {longest} learned positions"
        raise UsageError(Fault(where="--seq-len", value=seq_len, rule=rule, fix="lower it"))
    note(f"--seq-len {seq_len} is beyond the {longest} positions that the model was trained for")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    try:
        train(parse_flags(sys.argv[1:] if argv is None else argv))
    except ShardwrightError as error:
        if os.environ.get("SHARDWRIGHT_DEBUG") == "1":
            raise
        print(f"rank {os.environ.get('RANK', '0')}: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
