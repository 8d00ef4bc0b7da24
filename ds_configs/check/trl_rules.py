"""Combinations of values in a TRL configuration that have no effect, train nothing, or fail on several GPUs only.

What TRL and Transformers reject in any process, they say within seconds.

Rules are those of trl 1.16.0 and transformers 5.17.0, whose files and lines the comments name.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..legality.combinations import TABLE, TRAINERS, rejection
from ..memory.generation import vllm_bytes
from ..specs.job import TrainingJob
from ..specs.layout import Layout
from ..specs.model import ModelSpec
from ..specs.units import gigabytes
from .report import Node, Report, Schema, check_combinations, columns_of_accelerate, columns_of_deepspeed

GENERATING = ("GRPOConfig", "RLOOConfig", "DistillationConfig")
_GROUPED = ("GRPOConfig", "RLOOConfig")
_REFERENCED = ("DPOConfig", "KTOConfig")
_SERVER = (*(f"vllm_server_{key}" for key in ("base_url", "host", "port", "timeout")), "vllm_group_port")
_COLOCATED = tuple(
    f"vllm_{key}"
    for key in ("gpu_memory_utilization", "max_model_length", "tensor_parallel_size", "enable_sleep_mode", "model_impl")
)


@dataclass(kw_only=True)
class TrlRun:
    """The values of a file under one configuration class, and what its launch files and its model add."""

    config: str
    """Name of the class, such as `DPOConfig`."""
    schema: Mapping[str, Schema]
    report: Report
    """The file with strings converted as argparse does; receives the findings."""
    launch: Sequence[Report] = ()
    """Accelerate files of the run."""
    engines: Sequence[Report] = ()
    """DeepSpeed files of the run."""
    world_size: int | None = None
    model: ModelSpec | None = None
    context_tokens: int | None = None
    gpu_bytes: int | None = None

    @functools.cached_property
    def nodes(self) -> Mapping[str, Node]:
        """Values of the file by key."""
        return {entry.key: entry.node for entry in self.report.root.entries}

    def value(self, key: str) -> Any:
        """Return the value of a key, or its default; `None` if the class has no such key."""
        node = self.nodes.get(key) if key in self.schema else None
        return self.schema.get(key, {}).get("default") if node is None else node.plain()

    def number(self, key: str) -> float | None:
        value = self.value(key)
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        return value if is_number else None

    def count(self, key: str) -> int | None:
        """Return a positive integer; `None` for anything else."""
        value = self.value(key)
        return value if type(value) is int and value > 0 else None

    def true(self, key: str) -> bool:
        return self.value(key) is True

    def sets(self, key: str) -> bool:
        """Return whether the file enables a key: false and null count as absent."""
        return key in self.nodes and self.value(key) is not None and self.value(key) is not False

    def words(self, key: str) -> list[str]:
        """Return the strings of a key that is a list or one string."""
        value = self.value(key)
        return [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, str)]

    def option(self, key: str, name: str) -> Any:
        """Return one value of a key that is a mapping."""
        value = self.value(key)
        return value.get(name) if isinstance(value, dict) else None

    @functools.cached_property
    def processes(self) -> int | None:
        sizes = [self.report.integer("num_processes"), *(file.integer("num_processes") for file in self.launch)]
        return next((size for size in sizes if size and size > 0), self.world_size)

    @functools.cached_property
    def zero_stage(self) -> int | None:
        """The ZeRO stage; `None` if the files do not set it."""
        stages = [file.integer("zero_optimization.stage") for file in self.engines]
        stages += [file.integer("deepspeed_config.zero_stage") for file in self.launch]
        return next((stage for stage in stages if stage is not None), None)


def _without_effect(run: TrlRun, keys: Iterable[str], rule: str, fix: str) -> None:
    for key in keys:
        if key in run.schema and run.sets(key):
            run.report.warning(key, f"has no effect {rule}", fix)


def _divisors(number: int, value: int) -> str:
    """Return the fix that lists divisors of a number above 1, on both sides of a value."""
    legal = [divisor for divisor in range(2, min(number, 100_000) + 1) if number % divisor == 0]
    near = [*[size for size in legal if size < value][-1:], *[size for size in legal if size > value][:1]]
    return f"write {' or '.join(map(str, near))}" if near else "raise the batch"


def check_adapters(run: TrlRun) -> None:
    if not run.true("use_peft"):
        keys = [key for key in run.schema if key.startswith("lora_")] + ["use_rslora", "use_dora"]
        _without_effect(run, keys, "without use_peft", "write use_peft: true, or remove the key")
    if not (run.true("load_in_4bit") or run.true("load_in_8bit")):
        keys = [key for key in run.schema if "bnb_" in key]
        _without_effect(run, keys, "without load_in_4bit", "write load_in_4bit: true, or remove the key")


def check_losses(run: TrlRun) -> None:
    """Values with which a run trains nothing, or something else than its file says."""
    report, beta, losses = run.report, run.number("beta"), run.words("loss_type")
    if not run.true("sync_ref_model"):
        keys = ("ref_model_mixup_alpha", "ref_model_sync_steps")
        _without_effect(run, keys, "without sync_ref_model", "write sync_ref_model: true, or remove the key")
    if not run.true("precompute_ref_log_probs"):
        fix = "write precompute_ref_log_probs: true, or remove the key"
        _without_effect(run, ["precompute_ref_batch_size"], "without precompute_ref_log_probs", fix)
    if run.config == "DPOConfig" and "robust" in losses and (run.number("label_smoothing") or 0) >= 0.5:
        # trainer/dpo_trainer.py:1431 divides by 1 - 2 label_smoothing.
        report.error("label_smoothing", "must be below 0.5 with the loss robust", "write 0.1")
    if beta != 0 or run.config not in ("CPOConfig", "ORPOConfig", *_REFERENCED) or not report.has("beta"):
        return
    if {"ipo", "sppo_hard", "simpo"} & set(losses):
        # trainer/dpo_trainer.py:1403 and :1444, experimental/cpo/cpo_trainer.py:716.
        report.error("beta", f"loss_type {', '.join(losses)} divides by beta", "write a value above 0, such as 0.1")
    elif run.config in _REFERENCED and "sft" not in losses:
        # trainer/dpo_trainer.py:1387-1510, kto_trainer.py:1451.
        rule = "makes the loss constant: nothing is learned, although the reference model runs"
        report.error("beta", rule, "write a value above 0, such as 0.1")
    else:
        rule = "removes the preference term: only the cross-entropy of the chosen answers is trained"
        report.error("beta", rule, "write a value above 0, such as 0.1, or run `trl sft`")


def check_recomputation(run: TrlRun) -> None:
    """Keys of `gradient_checkpointing_kwargs` that releases before 5.24 pass on to torch, which fails."""
    kwargs = "gradient_checkpointing_kwargs"
    for key in ("offload", "every_n_layers"):
        if run.option(kwargs, key) and run.true("gradient_checkpointing"):
            rule = f"{key} requires Transformers 5.24 or newer; older ones fail in the first step"
            run.report.warning(kwargs, rule, f"install it, or remove {key}")


def check_groups(run: TrlRun) -> None:
    """The generation batch of `GRPOConfig` and `RLOOConfig` (trainer/grpo_config.py:1068-1141)."""
    if run.config not in _GROUPED:
        return
    report, processes = run.report, run.processes
    generations, batch = run.count("num_generations"), run.count("per_device_train_batch_size")
    if generations is not None and generations < 2:
        rule = "must be at least 2: the other completions of a prompt are the baseline"
        report.error("num_generations", rule, "write 8", value=generations)
    steps_key = "steps_per_generation" if run.sets("steps_per_generation") else "gradient_accumulation_steps"
    steps, total = run.count(steps_key), run.count("generation_batch_size")
    if generations and generations > 1 and batch:
        origin = "generation_batch_size"
        if total is None and processes and steps:
            total = batch * processes * steps
            origin = f"per_device_train_batch_size {batch} · {processes} processes · {steps_key} {steps}"
        elif total is not None and processes and total % (batch * processes):
            # trainer/grpo_config.py:1104.
            rule = f"must be a multiple of per_device_train_batch_size {batch} · {processes} processes"
            size = batch * processes
            report.error("generation_batch_size", rule, f"write {-(-total // size) * size}")
        if total is not None and total % generations:
            # trainer/grpo_config.py:1132.
            rule = f"must divide the generation batch, {origin} = {total}"
            report.error("num_generations", rule, _divisors(total, generations), value=generations)
    rows = run.count("per_device_eval_batch_size")
    evaluated = run.count("num_generations_eval") or generations
    is_evaluated = run.value("eval_strategy") in ("steps", "epoch")
    if is_evaluated and processes and rows and evaluated and (rows * processes) % evaluated:
        # trainer/grpo_config.py:1124.
        key = "num_generations_eval" if run.sets("num_generations_eval") else "num_generations"
        product = f"per_device_eval_batch_size {rows} · {processes} processes = {rows * processes}"
        fix = f"{_divisors(rows * processes, evaluated)} in num_generations_eval"
        report.error(key, f"must divide the evaluation batch, {product}", fix, value=evaluated)


def check_generation(run: TrlRun) -> None:
    """vLLM and `generate` of GRPO, RLOO and distillation (generation/vllm_generation.py:240-370)."""
    if run.config not in GENERATING:
        return
    report, uses_vllm, mode = run.report, run.true("use_vllm"), run.value("vllm_mode")
    if not uses_vllm:
        keys = [key for key in run.schema if key.startswith("vllm_")]
        _without_effect(run, keys, "without use_vllm", "write use_vllm: true, or remove the key")
    elif mode == "server":
        _without_effect(run, _COLOCATED, "with vllm_mode server", "pass it to `trl vllm-serve`, or remove the key")
    elif mode == "colocate":
        _without_effect(run, _SERVER, "with vllm_mode colocate", "write vllm_mode: server, or remove the key")
    if uses_vllm and mode == "server" and run.sets("vllm_server_base_url"):
        keys = ["vllm_server_host", "vllm_server_port"]
        _without_effect(run, keys, "beside vllm_server_base_url", "remove the key")
    if uses_vllm:
        keys = ["use_transformers_continuous_batching", "use_transformers_paged", "cache_implementation"]
        _without_effect(run, keys, "with use_vllm", "remove the key")
    if not run.sets("use_transformers_continuous_batching") and not run.sets("use_transformers_paged"):
        key, fix = "use_transformers_continuous_batching", "enable it, or remove the key"
        _without_effect(run, ["transformers_continuous_batching_config"], f"without {key}", fix)
    gather = "ds3_gather_for_generation"
    if report.has(gather) and run.value(gather) is False:
        fsdp = any(file.text("distributed_type") == "FSDP" for file in run.launch)
        if uses_vllm:
            # trainer/grpo_config.py, help of the field: not compatible with vLLM.
            rule = "false is not compatible with vLLM, which receives the complete parameters from ZeRO-3"
            report.error(gather, rule, "remove the key")
        elif run.zero_stage == 3:
            # models/utils.py:142.
            rule = "false gathers every layer again for each token that ZeRO-3 generates"
            report.warning(gather, rule, "remove the key if the parameters fit on a GPU, or use vLLM")
        elif run.zero_stage is not None or fsdp:
            report.warning(gather, "has no effect without ZeRO-3", "remove the key")


def check_colocated_engine(run: TrlRun) -> None:
    """Sizes of colocated vLLM."""
    if run.config not in GENERATING or not run.true("use_vllm") or run.value("vllm_mode") != "colocate":
        return
    report, length = run.report, run.count("vllm_max_model_length")
    completion = run.count("max_completion_length")
    if length and completion and completion >= length:
        rule = f"must be less than vllm_max_model_length {length}, which contains the prompt too"
        fix = f"write vllm_max_model_length: {2 * completion}, or a smaller value"
        report.error("max_completion_length", rule, fix, value=completion)
    context = run.context_tokens
    if length and context and length > context:
        rule = f"must be at most {context}, the longest context of the model, else vLLM stops"
        report.error("vllm_max_model_length", rule, f"write {context}")
    elif not length and completion and context and completion >= context:
        rule = f"must be less than {context}, the longest context of the model, which contains the prompt too"
        report.error("max_completion_length", rule, f"write {context // 2}", value=completion)
    size = run.count("vllm_tensor_parallel_size") or 1
    if run.processes and run.processes % size:
        # generation/vllm_generation.py:316.
        report.error(
            "vllm_tensor_parallel_size", f"must divide {run.processes} processes", _divisors(run.processes, size)
        )
        return
    share = run.number("vllm_gpu_memory_utilization")
    tokens = length or run.context_tokens or completion
    quantized = run.true("load_in_4bit") or run.true("load_in_8bit")
    if run.model is None or run.gpu_bytes is None or not share or not tokens or quantized:
        return
    if size > 1024 or tokens > 100_000_000:
        return  # not a number of a real run; `TrainingJob` rejects it
    # vLLM starts if its cache holds one sequence. `vllm_bytes` counts one per rank of the engine, so that each has a
    # part of it.
    job = TrainingJob(
        task="grpo",
        generation="vllm",
        seq_len_tokens=max(2, -(-tokens // size)),
        vllm_tensor_parallel_size=size,
        steps_per_generation=1,
    )
    layout = Layout(engine="ddp", dp_replicate=size, micro_batch_size=1)
    needed, available = vllm_bytes(layout, run.model, job), int(share * run.gpu_bytes)
    if needed > available:
        weights = 2 * run.model.parameter_count // size
        rule = (
            f"reserves {gigabytes(available)} GB of a GPU, but vLLM requires {gigabytes(needed)} GB:"
            f" {gigabytes(weights)} GB of weights, its workspace, and a cache of {tokens} tokens"
        )
        least = -(-100 * needed // run.gpu_bytes) / 100
        fix = f"write {least:g}" if least < 1 else "raise vllm_tensor_parallel_size, or use vllm_mode: server"
        report.error("vllm_gpu_memory_utilization", rule, fix, value=share)


def check_launch_files(run: TrlRun) -> None:
    """The file against the Accelerate and DeepSpeed files of its run."""
    report = run.report
    half = run.true("bf16") or (run.value("bf16") is None and not run.true("fp16"))
    for file in run.launch:
        wanted = file.text("mixed_precision")
        chosen = "fp16" if run.true("fp16") else "bf16" if half else None
        if wanted in ("fp16", "bf16") and chosen is not None and wanted != chosen:
            # transformers/training_args.py:1582-1586.
            rule = f"{chosen} overrides mixed_precision {wanted} of {file.filename}"
            default = "" if report.has(chosen) else ": TRL enables it by default"
            report.warning(chosen, rule + default, f"write {wanted}: true, or the same precision in both", value=True)
    columns = dict.fromkeys(
        column
        for files, read in ((run.launch, columns_of_accelerate), (run.engines, columns_of_deepspeed))
        for file in files
        for column in read(file)
    )
    flags = (("torch_compile", "compile"), ("use_peft", "lora"), ("packing", "packing"))
    settings = [(name, key) for key, name in flags if run.true(key)]
    if report.has("optim") and run.value("optim") in ("adafactor", "adagrad", "sgd", "rmsprop"):
        settings.append((run.value("optim"), "optim"))
    check_combinations(report, settings, columns)
    trainer = run.config.replace("Config", "Trainer")
    trainer = f"trl.{trainer}" if f"trl.{trainer}" in TRAINERS else trainer
    for column in columns:
        verdict = TABLE.get((trainer, column))
        if verdict is not None and not verdict.is_proven:
            rule, fix = rejection(trainer, [column], verdict.reason)
            report.warning("", f"{TRAINERS[trainer]} {rule}", fix)


RULES: tuple[Callable[[TrlRun], None], ...] = (
    check_adapters,
    check_losses,
    check_recomputation,
    check_groups,
    check_generation,
    check_colocated_engine,
    check_launch_files,
)
