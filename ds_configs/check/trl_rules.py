"""Combinations of values in a TRL configuration that stop a run, or have no effect.

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
_REWARD_FUNCTIONS = (
    "accuracy_reward",
    "reasoning_accuracy_reward",
    "think_format_reward",
    "get_soft_overlong_punishment",
)
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

    def axis(self, name: str) -> int:
        """Return the size of an axis of the Accelerate files, such as `cp`."""
        path = f"parallelism_config.parallelism_config_{name}_size"
        return max((file.integer(path) or 1 for file in self.launch), default=1)


def _without_effect(run: TrlRun, keys: Iterable[str], rule: str, fix: str) -> None:
    for key in keys:
        if key in run.schema and run.sets(key):
            run.report.warning(key, f"has no effect {rule}", fix)


def _divisors(number: int, value: int) -> str:
    """Return the fix that lists divisors of a number above 1, on both sides of a value."""
    legal = [divisor for divisor in range(2, min(number, 100_000) + 1) if number % divisor == 0]
    near = [*[size for size in legal if size < value][-1:], *[size for size in legal if size > value][:1]]
    return f"write {' or '.join(map(str, near))}" if near else "raise the batch"


def check_training_arguments(run: TrlRun) -> None:
    """What `TrainingArguments` and the Trainer reject (training_args.py:1543-1775)."""
    report, evaluates = run.report, run.value("eval_strategy")
    if run.true("fp16") and run.true("bf16"):
        report.error("fp16", "fp16 and bf16 cannot both be enabled", "remove one of them")
    if run.true("load_best_model_at_end") and run.value("save_strategy") != "best":
        saves = run.value("save_strategy")
        every, steps = run.number("eval_steps") or run.number("logging_steps"), run.number("save_steps")
        if evaluates != saves:
            rule = f"requires the same eval_strategy and save_strategy, which are {evaluates} and {saves}"
            report.error("load_best_model_at_end", rule, f"write eval_strategy: {saves}")
        elif evaluates == "steps" and every and steps and every >= 1 and steps >= 1 and steps % every:
            rule = f"must be a multiple of eval_steps {every:g} with load_best_model_at_end"
            fix = f"write {int(steps // every + 1) * every:g}"
            report.error("save_steps", rule, fix, value=steps)
    if run.value("lr_scheduler_type") in ("reduce_lr_on_plateau", "greedy") and evaluates == "no":
        report.error("lr_scheduler_type", "requires evaluation", "write eval_strategy: steps")
    if run.value("logging_strategy") == "steps" and run.number("logging_steps") == 0:
        report.error("logging_steps", "must not be 0", "write logging_strategy: 'no' to log nothing")
    if run.sets("dataloader_prefetch_factor") and run.value("dataloader_num_workers") == 0:
        rule, fix = "requires dataloader_num_workers above 0", "write dataloader_num_workers"
        report.error("dataloader_prefetch_factor", rule, fix)
    # trainer.py:702, for streams.
    stream = "dataset_streaming" if run.true("dataset_streaming") else "streaming" if run.true("streaming") else None
    steps = run.number("max_steps")
    if stream is not None and steps is not None and steps <= 0:
        report.error(stream, "requires max_steps: the length of a stream is unknown", "write max_steps")
    # trl/scripts/utils.py:460-468.
    datasets = run.value("datasets") if isinstance(run.value("datasets"), list) else []
    shares = [isinstance(item, dict) and item.get("fraction") is not None for item in datasets]
    if any(shares) and run.true("streaming"):
        report.error("streaming", "is not supported with the fraction of a dataset", "remove fraction or streaming")
    if any(shares) and not all(shares):
        report.error("datasets", "fraction must be set for all datasets or for none", "add it to every dataset")
    if run.sets("dataset_name") and datasets:
        report.warning("dataset_name", "has no effect: the scripts load `datasets`", "remove one of the two")


def check_adapters(run: TrlRun) -> None:
    report, lora = run.report, run.true("use_peft")
    quantized = next((key for key in ("load_in_4bit", "load_in_8bit") if run.true(key)), None)
    if run.true("load_in_4bit") and run.true("load_in_8bit"):
        # trainer/model_config.py:175.
        report.error("load_in_8bit", "4 bit and 8 bit cannot both be enabled", "remove one of them")
    if quantized and not lora:
        # transformers/trainer_utils.py:132.
        report.error(quantized, "quantized weights cannot be trained without adapters", "write use_peft: true")
    if not lora:
        keys = [key for key in run.schema if key.startswith("lora_")] + ["use_rslora", "use_dora"]
        _without_effect(run, keys, "without use_peft", "write use_peft: true, or remove the key")
    if not quantized:
        keys = [key for key in run.schema if "bnb_" in key]
        _without_effect(run, keys, "without load_in_4bit", "write load_in_4bit: true, or remove the key")
    if (
        lora
        and "lm_head" in run.words("lora_target_modules")
        and run.config not in ("CPOConfig", "ORPOConfig", "RewardConfig")
    ):
        # trainer/dpo_trainer.py:838, and the same in kto, sft, grpo, rloo and distillation.
        rule = "lm_head cannot have an adapter: the fused LM head reads its weight, so that it is never trained"
        report.error("lora_target_modules", rule, "remove lm_head")
    if lora and run.config == "RewardConfig" and run.value("lora_task_type") != "SEQ_CLS":
        rule = "a reward model requires the task type SEQ_CLS, with which PEFT trains and saves the score head"
        report.error("lora_task_type", rule, "write lora_task_type: SEQ_CLS", value=run.value("lora_task_type"))
    if run.number("router_aux_loss_coef") and run.model is not None and not run.model.dimensions.num_experts:
        # trainer/dpo_trainer.py:901, and the same in kto, sft, grpo and rloo.
        report.error("router_aux_loss_coef", "must be 0 for a model without experts", "remove the key")
    if lora and run.true("sync_ref_model"):
        # trainer/dpo_trainer.py:994, kto_trainer.py:1002, grpo_trainer.py:1198, rloo_trainer.py:830.
        rule = "is not supported with use_peft: the reference is the model without its adapters"
        report.error("sync_ref_model", rule, "remove sync_ref_model, or train without use_peft")
    reentrant = run.option("gradient_checkpointing_kwargs", "use_reentrant")
    if lora and run.zero_stage == 3 and run.true("gradient_checkpointing") and reentrant is False:
        # trainer/dpo_trainer.py:708.
        rule = "use_reentrant is forced to true: adapters under ZeRO-3 require it"
        report.warning("gradient_checkpointing_kwargs", rule, "remove use_reentrant")
    if run.sets("use_liger_kernel") and run.config in ("SFTConfig", "GKDConfig", *_REFERENCED, *_GROUPED):
        # trainer/dpo_trainer.py:940-948, and the same in kto, sft, grpo and rloo.
        fix = "write model_init_kwargs: {use_kernels: true}"
        report.warning("use_liger_kernel", "is deprecated here; TRL 2.0 removes it", fix)
        if run.option("liger_kernel_config", "fused_linear_cross_entropy"):
            rule = "fused_linear_cross_entropy is rejected: it replaces the fused LM head of the trainer"
            report.error("liger_kernel_config", rule, "remove fused_linear_cross_entropy")


def check_reference(run: TrlRun) -> None:
    """The reference model of DPO, KTO, GRPO and RLOO."""
    report, beta = run.report, run.number("beta")
    if run.true("sync_ref_model"):
        if run.config in _GROUPED and beta == 0:
            # trainer/grpo_trainer.py:1192, rloo_trainer.py:824.
            rule = "requires beta above 0: with beta 0 no reference model is loaded"
            report.error("sync_ref_model", rule, "write beta, for example 0.04, or remove sync_ref_model")
        if run.true("precompute_ref_log_probs"):
            # trainer/dpo_trainer.py:1003, kto_trainer.py:1011.
            rule = "is not supported with precompute_ref_log_probs, whose log-probabilities are those of a fixed model"
            report.error("sync_ref_model", rule, "remove one of the two")
    else:
        keys = ("ref_model_mixup_alpha", "ref_model_sync_steps")
        _without_effect(run, keys, "without sync_ref_model", "write sync_ref_model: true, or remove the key")
    if run.true("precompute_ref_log_probs") and run.config in _REFERENCED:
        if run.true("dataset_streaming") or run.true("streaming"):
            # trainer/dpo_trainer.py:1170, kto_trainer.py:1222.
            rule = "is not supported for streams: the log-probabilities of all rows are computed first"
            report.error("precompute_ref_log_probs", rule, "remove it, or load the dataset without streaming")
    else:
        fix = "write precompute_ref_log_probs: true, or remove the key"
        _without_effect(run, ["precompute_ref_batch_size"], "without precompute_ref_log_probs", fix)
    losses = run.words("loss_type")
    if beta != 0 or run.config in (*_GROUPED, "GKDConfig", "DistillationConfig") or not report.has("beta"):
        return
    if {"ipo", "sppo_hard", "simpo"} & set(losses):
        # trainer/dpo_trainer.py:1403 and :1444, experimental/cpo/cpo_trainer.py:716.
        report.error("beta", f"loss_type {', '.join(losses)} divides by beta", "write a value above 0, such as 0.1")
    elif run.config in _REFERENCED and "sft" not in losses:
        # trainer/dpo_trainer.py:1387-1510, kto_trainer.py:1451.
        rule = "makes the loss constant: nothing is learned, although the reference model runs"
        report.error("beta", rule, "write a value above 0, such as 0.1")
    elif run.config in ("CPOConfig", "ORPOConfig", *_REFERENCED):
        rule = "removes the preference term: only the cross-entropy of the chosen answers is trained"
        report.error("beta", rule, "write a value above 0, such as 0.1, or run `trl sft`")


def check_preferences(run: TrlRun) -> None:
    """What `DPOConfig`, `CPOConfig`, `KTOConfig`, their trainers and `GKDTrainer` reject."""
    report, losses, loss = run.report, run.words("loss_type"), run.value("loss_type")
    smoothing = run.number("label_smoothing") or 0.0
    if run.config == "DPOConfig":
        weights = run.value("loss_weights")
        if isinstance(weights, list) and len(weights) != len(losses):
            # trainer/dpo_config.py:361.
            rule = f"must have one weight for each of the {len(losses)} loss types, but has {len(weights)}"
            report.error("loss_weights", rule, "make both lists equally long", value=weights)
        if "exo_pair" in losses and smoothing == 0:
            # trainer/dpo_trainer.py:830.
            rule = "must be above 0 with the loss exo_pair, which takes its logarithm"
            report.error("label_smoothing", rule, "write label_smoothing: 1.0e-3", value=smoothing)
        if "robust" in losses and smoothing >= 0.5:
            # trainer/dpo_trainer.py:1431 divides by 1 - 2 label_smoothing.
            report.error("label_smoothing", "must be below 0.5 with the loss robust", "write 0.1")
        # trainer/dpo_trainer.py:812.
        plain = {"nca_pair", "bco_pair", "sppo_hard", "aot", "aot_unpaired", "apo_zero", "apo_down"} & set(losses)
        if run.value("f_divergence_type") != "reverse_kl" and plain:
            rule = f"is not supported with the loss {', '.join(sorted(plain))}"
            report.error("f_divergence_type", rule, "write reverse_kl")
        sorted_losses = {"aot", "aot_unpaired"} & set(losses)
        if run.true("use_weighting") and sorted_losses:
            # trainer/dpo_trainer.py:820.
            rule = f"is not supported with the loss {', '.join(sorted(sorted_losses))}, which sorts samples"
            report.error("use_weighting", rule, "remove use_weighting")
        # trainer/dpo_trainer.py:734.
        _without_effect(run, ["padding_free"], "in DPO of this release: batches are padded", "remove the key")
    if run.config == "CPOConfig" and loss in ("hinge", "ipo") and smoothing > 0:
        # experimental/cpo/cpo_trainer.py:346.
        report.warning("label_smoothing", f"has no effect with the loss {loss}", "write 0.0")
    if run.config == "KTOConfig" and loss == "kto":
        if run.value("per_device_train_batch_size") == 1:
            # trainer/kto_trainer.py:845.
            rule = "must be above 1 with the loss kto, which estimates the KL term from the other rows"
            report.error("per_device_train_batch_size", rule, "write 2, or loss_type: apo_zero_unpaired")
        if run.value("train_sampling_strategy") != "sequential":
            # trainer/kto_trainer.py:838.
            rule = "must be sequential with the loss kto, whose KL completions belong to the neighbors of a row"
            report.error("train_sampling_strategy", rule, "write sequential")
    if run.config == "GKDConfig" and run.number("lmbda") == 1 and run.number("temperature") == 1:
        # experimental/gkd/gkd_trainer.py:206.
        rule = "with temperature 1 this is what DistillationConfig does, with vLLM and a chunked loss"
        report.warning("lmbda", rule, "run `trl distillation`")


def check_recomputation(run: TrlRun) -> None:
    """Keys of `gradient_checkpointing_kwargs` that releases before 5.24 pass on to torch, which fails."""
    kwargs = "gradient_checkpointing_kwargs"
    for key in ("offload", "every_n_layers"):
        if run.option(kwargs, key) and run.true("gradient_checkpointing"):
            rule = f"{key} requires Transformers 5.24 or newer; older ones fail in the first step"
            run.report.warning(kwargs, rule, f"install it, or remove {key}")


def check_supervised(run: TrlRun) -> None:
    """What `SFTTrainer`, from which `GKDTrainer` inherits, rejects."""
    if run.config not in ("SFTConfig", "GKDConfig"):
        return
    report, packs, length = run.report, run.true("packing"), run.value("max_length")
    if packs and length is None:
        # trainer/sft_trainer.py:1468.
        report.error("max_length", "must be set with packing", "write max_length", value="null")
    if run.true("padding_free") and not packs and length is not None:
        # trainer/sft_trainer.py:1000.
        rule = f"without packing, max_length {length} is not enforced, which SFTTrainer rejects"
        report.error("padding_free", rule, "write packing: true, or max_length: null")
    if packs and run.value("packing_strategy") == "wrapped" and run.true("padding_free"):
        # trainer/sft_trainer.py:921.
        rule = "with padding_free, wrapped rows attend to the rest of another sample"
        report.warning("packing_strategy", rule, "write bfd")
    kwargs = "gradient_checkpointing_kwargs"
    if run.option(kwargs, "selective"):
        # trainer/sft_trainer.py:882, :1087 and :1091.
        if not run.true("gradient_checkpointing"):
            report.error(kwargs, "selective requires gradient_checkpointing", "write gradient_checkpointing: true")
        elif run.option(kwargs, "use_reentrant"):
            report.error(kwargs, "selective requires use_reentrant false", "remove use_reentrant")
        elif run.true("use_peft") and run.zero_stage == 3:
            rule = "selective is not supported with adapters under ZeRO-3, which require reentrant recomputation"
            report.error(kwargs, rule, "remove selective, or use ZeRO-2")
    if run.number("label_smoothing_factor") and run.value("loss_type") in ("nll", "chunked_nll"):
        # trainer/sft_trainer.py:1059.
        rule = "is deprecated in SFT, and each step runs a second forward pass with complete logits"
        report.warning("label_smoothing_factor", rule, "remove the key")
    if run.axis("cp") > 1 and (packs or run.true("eval_packing")):
        # trainer/sft_trainer.py:1156.
        key = "packing" if packs else "eval_packing"
        rule = "is rejected with context parallelism, which drops the mask between samples"
        report.error(key, rule, "remove packing, or set parallelism_config_cp_size to 1")
    if run.axis("sp") > 1 and (run.value("loss_type") == "dft" or run.number("label_smoothing_factor")):
        # trainer/sft_trainer.py:1183.
        key = "loss_type" if run.value("loss_type") == "dft" else "label_smoothing_factor"
        report.error(
            key, "is rejected with sequence parallelism of DeepSpeed", "write loss_type: nll without smoothing"
        )


def check_groups(run: TrlRun) -> None:
    """The generation batch of `GRPOConfig` and `RLOOConfig` (trainer/grpo_config.py:1068-1141)."""
    if run.config not in _GROUPED:
        return
    report, processes = run.report, run.processes
    generations, batch = run.count("num_generations"), run.count("per_device_train_batch_size")
    if run.true("auto_find_batch_size"):
        rule = "is rejected: a smaller batch would split the completions of a prompt"
        report.error("auto_find_batch_size", rule, "remove it, and lower per_device_train_batch_size")
    if generations is not None and generations < 2:
        rule = "must be at least 2: the other completions of a prompt are the baseline"
        report.error("num_generations", rule, "write 8", value=generations)
    steps_key = "steps_per_generation" if run.sets("steps_per_generation") else "gradient_accumulation_steps"
    steps, total = run.count(steps_key), run.count("generation_batch_size")
    if run.sets("generation_batch_size") and run.sets("steps_per_generation"):
        rule = "must not be set together with steps_per_generation"
        fix = "remove one of the two"
        report.error("generation_batch_size", rule, fix)
    elif generations and generations > 1 and batch:
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
    if (
        run.value("eval_strategy") in ("steps", "epoch")
        and processes
        and rows
        and evaluated
        and (rows * processes) % evaluated
    ):
        # trainer/grpo_config.py:1124.
        key = "num_generations_eval" if run.sets("num_generations_eval") else "num_generations"
        product = f"per_device_eval_batch_size {rows} · {processes} processes = {rows * processes}"
        fix = f"{_divisors(rows * processes, evaluated)} in num_generations_eval"
        report.error(key, f"must divide the evaluation batch, {product}", fix, value=evaluated)
    for name in run.words("reward_funcs"):
        if "." not in name and name not in _REWARD_FUNCTIONS:
            # scripts/grpo.py:107.
            rule = f"{name} is not a reward function of TRL, which are {', '.join(_REWARD_FUNCTIONS)}"
            report.error("reward_funcs", rule, "write one of them, or the import path of your function")
    functions, weights = run.value("reward_funcs"), run.value("reward_weights")
    if isinstance(functions, list) and isinstance(weights, list):
        # trainer/grpo_trainer.py:570.
        rewards = len(functions) + run.sets("reward_model_name_or_path")
        if len(weights) != rewards:
            rule = f"must have one weight for each of the {rewards} rewards, but has {len(weights)}"
            report.error("reward_weights", rule, "make both lists equally long", value=weights)
    if run.true("dataset_streaming") or run.true("streaming"):
        if run.option("accelerator_config", "dispatch_batches"):
            # trainer/grpo_trainer.py:902.
            report.error("accelerator_config", "dispatch_batches must be false for streams", "write false")
        if run.number("dataloader_num_workers"):
            # trainer/grpo_trainer.py:910.
            rule = "has no effect: streams are read in the process of the trainer, to keep prompts together"
            report.warning("dataloader_num_workers", rule, "write 0")


def check_policy_loss(run: TrlRun) -> None:
    """Losses and corrections of `GRPOConfig` (trainer/grpo_trainer.py:914-945)."""
    if run.config != "GRPOConfig":
        return
    report, loss, level = run.report, run.value("loss_type"), run.value("importance_sampling_level")
    mode = run.value("vllm_importance_sampling_mode")
    if run.value("scale_rewards") not in (True, False, "group", "batch", "none"):
        # trainer/grpo_trainer.py:2782.
        report.error("scale_rewards", "must be group, batch or none", "write group")
    if loss == "luspo" and level != "sequence":
        rule = "the loss luspo requires ratios of sequences, as its paper has"
        report.warning("importance_sampling_level", rule, "write sequence", value=level)
    if loss == "vespo" and level != "token":
        report.warning(
            "importance_sampling_level", "the loss vespo weights sequences itself", "write token", value=level
        )
    if level == "sequence" and loss in ("bnpo", "dr_grpo", "dapo", "cispo"):
        rule = f"the loss {loss} weights each sequence by its length; the objective of GSPO does not"
        report.warning("importance_sampling_level", rule, "write loss_type: grpo", value=level)
    if run.sets("log_completions_hub_repo") and not run.true("log_completions"):
        # trainer/grpo_config.py:1081.
        report.error("log_completions_hub_repo", "requires log_completions", "write log_completions: true")
    correction = "vllm_importance_sampling_correction"
    low, high = (run.number(f"vllm_importance_sampling_clip_{side}") for side in ("min", "max"))
    if low is not None and high is not None and low >= high:
        # trainer/grpo_config.py:1157.
        rule = f"must be less than vllm_importance_sampling_clip_max {high:g}"
        report.error("vllm_importance_sampling_clip_min", rule, "lower it")
    if run.true(correction) and str(mode).endswith("_truncate") and low is None and high is None:
        # trainer/grpo_config.py:1168.
        rule = f"must be set with the mode {mode}"
        report.error("vllm_importance_sampling_clip_max", rule, "write 3.0", value="null")
    if loss == "vespo" and run.true("use_vllm") and run.true(correction) and not str(mode).startswith("token_"):
        # trainer/grpo_trainer.py:938.
        rule = "must be token_truncate or token_mask with the loss vespo"
        report.error("vllm_importance_sampling_mode", rule, "write token_truncate", value=mode)


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
    axis = next((name for name in ("cp", "sp") if run.axis(name) > 1), None)
    if axis is not None:
        # trainer/grpo_config.py:1071, rloo_config.py:642, distillation_config.py:412.
        rule = f"{run.config} rejects parallelism_config_{axis}_size above 1: batches are built after generation"
        report.error("", rule, "set it to 1 in the Accelerate file", value=run.axis(axis))


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
    if run.true("load_in_8bit"):
        # generation/vllm_generation.py:344.
        report.error("load_in_8bit", "colocated vLLM does not support 8-bit weights", "write load_in_4bit: true")
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


_MATCHED = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.eps": "adam_epsilon",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.warmup_max_lr": "learning_rate",
}
"""Keys of a DeepSpeed JSON that must equal an argument (transformers/integrations/deepspeed.py, `fill_match`)."""


def check_launch_files(run: TrlRun) -> None:
    """The file against the Accelerate and DeepSpeed files of its run."""
    report = run.report
    half = run.true("bf16") or (run.value("bf16") is None and not run.true("fp16"))
    # Accelerate copies the values of its own file into the configuration of the engine.
    copied = {
        f"deepspeed_config.{path}": _MATCHED[path] for path in ("gradient_accumulation_steps", "gradient_clipping")
    }
    for files, keys in ((run.engines, _MATCHED), (run.launch, copied)):
        for file in files:
            for path, key in keys.items():
                stated, value = file.number(path), run.number(key)
                if stated is not None and value is not None and stated != value:
                    rule = f"differs from {path} {stated:g} in {file.filename}, which stops the Trainer"
                    report.error(key, rule, f"write {stated:g}, or auto there", value=run.value(key))
    for file in run.engines:
        for kind, enabled in (("bf16", half), ("fp16", run.true("fp16"))):
            stated_flag = file.value(f"{kind}.enabled")
            if isinstance(stated_flag, bool) and stated_flag != enabled:
                word = str(stated_flag).lower()
                rule = f"differs from {kind}.enabled {word} in {file.filename}, which stops the Trainer"
                report.error(kind, rule, f"write {kind}: {word}, or auto there", value=enabled)
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


def check_trainer_on_engine(run: TrlRun) -> None:
    """What the Trainer rejects under FSDP or DeepSpeed (transformers/trainer.py:847-880)."""
    report = run.report
    sharded = [file for file in run.launch if file.text("distributed_type") == "FSDP"]

    def fsdp(key: str) -> str:
        values = [file.value(f"fsdp_config.{prefix}{key}") for file in sharded for prefix in ("fsdp_", "")]
        return next((str(value) for value in values if value is not None), "").upper()

    if fsdp("activation_checkpointing") == "TRUE" and run.true("gradient_checkpointing"):
        rule = "must be false with fsdp_activation_checkpointing"
        if not report.has("gradient_checkpointing"):
            rule += ", but TRL enables it by default"
        report.error("gradient_checkpointing", rule, "write gradient_checkpointing: false", value=True)
    if run.true("auto_find_batch_size") and run.zero_stage == 3:
        report.error("auto_find_batch_size", "is not supported with ZeRO-3", "remove it, or use ZeRO-2")
    if run.true("save_only_model") and (sharded or run.zero_stage is not None):
        if run.true("load_best_model_at_end"):
            rule, fix = "is not supported with load_best_model_at_end under FSDP and DeepSpeed", "remove one of the two"
            report.error("save_only_model", rule, fix)
        if fsdp("state_dict_type") == "SHARDED_STATE_DICT":
            rule, fix = "is not supported with sharded state dicts of FSDP", "write FULL_STATE_DICT, or remove it"
            report.error("save_only_model", rule, fix)


RULES: tuple[Callable[[TrlRun], None], ...] = (
    check_training_arguments,
    check_adapters,
    check_reference,
    check_preferences,
    check_recomputation,
    check_supervised,
    check_groups,
    check_policy_loss,
    check_generation,
    check_colocated_engine,
    check_launch_files,
    check_trainer_on_engine,
)
