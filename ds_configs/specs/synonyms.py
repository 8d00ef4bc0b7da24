"""Names of options in other tools, and the option of this package with that meaning."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import NamedTuple


class Option(NamedTuple):
    """An option that replaces another name."""

    name: str
    values: str = ""
    """Values that have the meaning of the other name; empty if it takes the same value."""
    beside: str = ""
    """An option that the command must have too, if commands use `name` for different things."""


_STAGES = Option("strategy", "zero1, zero2 or zero3")
_LORA, _QLORA = Option("method", "lora", "lora_rank"), Option("method", "qlora", "lora_rank")
_CPU = Option("offload", "cpu or cpu-all")
_COUNTED = (Option("num_processes"), Option("hardware", "8xA100-80GB"))
_PRECISION = Option("precision", "bf16, fp16 or fp32")
_DTYPES = (_PRECISION, Option("dtype", "bfloat16, float16 or float32"))
_RANK = Option("lora_rank")
_PER_STEP = Option("global_batch_size")

# Options with the first name are preferred; a command has one of them, or none.
_OPTIONS: Mapping[tuple[str, ...], tuple[Option, ...]] = {
    ("zero_stage", "zero", "stage", "deepspeed", "deepspeed_stage", "ds_stage"): (_STAGES,),
    ("fsdp", "fsdp2", "full_shard"): (Option("strategy", "fsdp2"),),
    ("ddp", "data_parallel"): (Option("strategy", "ddp"),),
    ("engine", "backend", "parallelism", "distributed_type"): (Option("strategy"),),
    ("lora", "use_lora", "peft", "use_peft"): (_LORA,),
    ("qlora", "use_qlora", "load_in_4bit"): (_QLORA, Option("scheme", "NF4")),
    ("load_in_8bit",): (Option("scheme", "BNB_INT8"),),
    ("lora_r", "lora_dim", "lora_rank", "r", "rank"): (_RANK,),
    ("lora_target_modules", "target_modules"): (Option("lora_targets"),),
    ("lr", "learning_rate", "peak_lr", "max_lr"): (Option("learning_rate"),),
    ("epoch", "epochs", "num_epochs", "n_epochs", "num_train_epochs", "max_epochs"): (Option("epochs"),),
    ("max_train_steps", "num_steps", "num_training_steps", "iterations", "train_iters", "steps"): (
        Option("max_steps"),
    ),
    (
        "per_device_train_batch_size",
        "per_device_batch_size",
        "per_gpu_train_batch_size",
        "train_micro_batch_size_per_gpu",
        "micro_batch",
        "mbs",
        "batch_size",
        "bs",
    ): (Option("micro_batch_size"), Option("batch_size")),
    ("train_batch_size", "total_batch_size", "effective_batch_size", "gbs"): (_PER_STEP,),
    ("gradient_accumulation_steps", "gradient_accumulation", "grad_accum", "accumulation"): (_PER_STEP,),
    (
        "max_length",
        "max_seq_length",
        "max_seq_len",
        "model_max_length",
        "seq_length",
        "sequence_length",
        "context_length",
        "context",
        "block_size",
        "cutoff_len",
    ): (Option("seq_len"), Option("max_model_len")),
    ("no_packing", "disable_packing"): (Option("packing", "off"),),
    ("sample_packing", "pack", "group_texts"): (Option("packing", "auto, on or off"),),
    ("optim", "optimizer", "optimiser"): (Option("optimizer"),),
    ("tp", "tp_size", "tensor_parallel", "tensor_model_parallel_size"): (Option("tensor_parallel_size"),),
    ("pp", "pp_size", "pipeline_parallel", "pipeline_model_parallel_size"): (Option("pipeline_parallel_size"),),
    ("sp", "sp_size", "sequence_parallel", "ulysses", "ulysses_degree"): (Option("sequence_parallel_size"),),
    ("cp", "cp_size", "context_parallel"): (Option("context_parallel_size"),),
    ("ep", "ep_size", "expert_parallel", "expert_model_parallel_size"): (Option("expert_parallel_size"),),
    ("gpus", "num_gpus", "n_gpus", "ngpus", "nproc_per_node", "world_size"): _COUNTED,
    ("gpu", "gpu_type", "device_type", "accelerator", "machine", "cluster"): (Option("hardware", "8xA100-80GB"),),
    ("nodes", "nnodes", "num_nodes", "num_machines"): (Option("hardware", "2x8xA100-80GB"),),
    ("bf16", "fp16", "fp32", "mixed_precision", "amp", "half"): _DTYPES,
    ("torch_dtype", "dtype", "compute_dtype"): _DTYPES,
    ("cpu_offload", "offload_optimizer", "offload_optimizer_device", "zero_offload"): (_CPU,),
    ("offload_param", "offload_params", "offload_param_device"): (Option("offload", "cpu-all"),),
    ("activation_checkpointing", "recompute", "recomputation", "checkpointing"): (Option("gradient_checkpointing"),),
    ("data", "dataset_name", "dataset_path", "data_path", "train_file", "train_data", "train_dataset"): (
        Option("dataset"),
    ),
    ("eval_dataset", "validation_file", "eval_file", "eval_data", "test_dataset"): (Option("evaluation_dataset"),),
    ("model", "model_name", "model_id", "model_path", "model_name_or_path", "base_model"): (Option("model"),),
    ("teacher_model", "teacher_name_or_path"): (Option("teacher"),),
    ("student_model", "student_name_or_path"): (Option("student"),),
    ("out", "output", "o", "save_dir", "output_directory", "output_path", "save_path", "outdir"): (
        Option("output_dir"),
    ),
    ("resume_from_checkpoint", "resume_from"): (Option("resume"),),
    ("overwrite", "overwrite_output_dir", "yes"): (Option("force"),),
    ("wandb", "tensorboard", "mlflow", "logger", "trackers"): (Option("report_to", "wandb, tensorboard or mlflow"),),
    ("hub_model_id", "hub_repo", "upload"): (Option("push_to_hub"),),
    ("json",): (Option("format", "json"),),
    ("bits", "wbits", "w_bit", "quantization", "quant", "quantize", "bnb", "int4", "int8", "fp8"): (
        Option("scheme", "W4A16, W8A8 or FP8_DYNAMIC"),
    ),
    ("awq", "gptq", "smoothquant", "algorithm", "quant_method"): (
        Option("method", "gptq, awq or smoothquant", "scheme"),
    ),
    ("groupsize", "q_group_size"): (Option("group_size"),),
    ("calibration_dataset", "calib_data", "calib_dataset"): (Option("dataset"),),
    ("num_calibration_samples", "calib_size", "nsamples"): (Option("num_samples"),),
}
REMOVED: Mapping[str, str] = {
    **dict.fromkeys(("address", "image", "volume"), "start from a file of examples/clusters, which has it"),
    **dict.fromkeys(("ray", "kubernetes", "jobset", "skypilot"), "start from its file in examples/clusters"),
    **dict.fromkeys(
        (
            *(f"configs={name}" for name in ("quantize", "quantization", "fp8-dynamic", "nf4", "nvfp4", "w3-spqr")),
            *(f"configs={name}" for name in ("w4a16-awq", "w4a16-gptq", "w4a16-rtn", "w8a16-rtn")),
            *(f"configs={name}" for name in ("w8a8-smoothquant-gptq", "w8a8-static-l2")),
        ),
        "recipes are files of examples/quantization: pass one to quantize --config",
    ),
    **dict.fromkeys(
        ("compression_training", "quantize_training"),
        "use options of shardwright qat: docs/guides/migrate_compression_training.md lists them",
    ),
    **dict.fromkeys(("subject=plan", "subject=serving"), "omit it: read a plan.json with Plan.load"),
    "offload=zenflow": "use cpu, and write zero_optimization.zenflow into your own DeepSpeed file",
    "offload=superoffload": "use cpu, and write offload_optimizer.super_offload into your own DeepSpeed file",
    "gradient_checkpointing=selective": "use auto, which recomputes as few layers as needed",
    "forget=cpu": "omit it: rates of CPU ranks are not stored",
    "nodes_as_ranks": "omit it: a rehearsal has one launcher; node checks of launch test several machines",
    "streaming": "write #N after the dataset, such as imdb#2000, to read only its first N rows",
    "importance": "omit it: channels and heads are compared by the activations on --text",
    **dict.fromkeys(("low_rank", "low_rank_energy"), "use quantize --method low-rank"),
    **dict.fromkeys(("sparsity", "prune", "granularity"), "train with MagnitudePruningCallback"),
    **dict.fromkeys(("heads", "kv_heads"), "omit it: students keep all heads; --hidden and --intermediate cut widths"),
    **dict.fromkeys(("loss=skewed_kl", "loss=total_variation"), "use jsd, which is bounded too"),
    "loss=skewed_reverse_kl": "use reverse_kl",
    "resume_adapter": "load it with PEFT: PeftModel.from_pretrained(model, DIR, is_trainable=True), in a script",
    "value_bits": "omit it: a cache stores logits in fp16",
    **dict.fromkeys(
        ("teacher_url", "teacher_top_k", "teacher_timeout", "allow_remote_http"),
        "run shardwright cache-teacher TEACHER first, then distill TEACHER STUDENT --teacher-cache DIRECTORY",
    ),
    **dict.fromkeys(("on_policy", "prompt_tokens"), "run TRL's GKDTrainer in a script, with shardwright.trainer_for"),
    "cross_tokenizer": "use a teacher with the student's tokenizer, or the GOLDTrainer of TRL",
    **dict.fromkeys(
        ("method=autoround", "method=auto-round", "method=auto_round", "autoround", "auto_round"),
        "use gptq, which needs an eighth of the time, or run the auto-round package",
    ),
    "resume": "omit it: the command starts from the beginning",
    "format": "omit it: checkpoints have the format of compressed-tensors",
    "kv_cache": "omit it: serve the checkpoint with --kv-cache-dtype fp8",
    "sparse_fraction": "omit it: --method spqr keeps outliers",
    "outlier_fraction": "use outlier_threshold, of which larger values keep fewer outliers",
    "create": "run python -m venv ENV && ENV/bin/pip install 'shardwright[quantize]'",
    **dict.fromkeys(("min_nodes", "wait_for_nodes", "nodes"), "plan for the machines that are left, then --resume"),
    "restarts": "repeat the command until it succeeds, with -- --resume-or-anew",
    "nonfinite": "omit it: --nonfinite-steps counts the steps with NaN or Inf after which a run stops",
    "text": "rehearse a script that reads your data with --script",
    **dict.fromkeys(("link_bytes_per_s", "network_bytes_per_s"), "write it into a hardware file for the command line"),
    "deadline": "omit it: --tokens prints the hours of a run; plan for larger --hardware to be faster",
    **dict.fromkeys(
        ("save_seconds", "mtbf_hours"), "omit it: --save-steps of train sets how often checkpoints are saved"
    ),
    "objective=cost": "plan for each size of cluster, and compare tokens/s per accelerator",
    "longest_sequence": "pass a --seq-len that is too long: the error has a length that fits",
    "gpu_hour_price": "omit it, and multiply the GPU hours that --tokens prints by your price",
    "bit_schedule": "omit it: train with the scheme's bits from --start-step on",
    "torchtitan": "not covered: plans predict the Trainer; FSDP2 with --torch-compile, --precision fp8 is closest",
    "shared_prefix": "omit it: vLLM shares blocks of equal prefixes by itself",
}
"""Options and values of earlier versions, and what replaces them."""
_ONE_PROCESS = "omit it: evaluate runs in one process"
_LM_EVAL = "run lm_eval --model hf --model_args pretrained=DIRECTORY --tasks TASKS, of the package lm-eval"
_ONE_TEACHER = "omit it: cache-teacher runs in one process; distill without a cache runs the teacher on every rank"
_LAUNCHED = "plan first, then shardwright launch PLAN --on ssh|slurm; or start each machine with --node-rank"
_REMOVED_BESIDE: Mapping[tuple[str, str], str] = {
    **{(name, "baseline_revision"): "omit it: vllm bench serve measures speed" for name in ("speed", "no_speed")},
    **{
        (name, "baseline_revision"): _ONE_PROCESS
        for name in ("num_processes", "num_nodes", "on", "hostfile", "node_rank")
    },
    **{(name, "baseline_revision"): _LM_EVAL for name in ("tasks", "limit", "few_shot", "include_path")},
    **{(name, "top_k"): _ONE_TEACHER for name in ("num_processes", "num_nodes", "on", "hostfile", "node_rank")},
    **{
        (name, "trials"): "pass it to plan, and tune the plan"
        for name in ("hardware", "seq_len", "micro_batch_size", "global_batch_size", "strategy", "precision", "method")
    },
    ("script", "trials"): "omit it: trials train with random weights; launch runs a script with the tuned plan",
    **{(name, "node_rank"): _LAUNCHED for name in ("on", "hostfile", "ssh_config", "sbatch", "name")},
    **{
        (name, "weight_rule"): "omit it: ranges are observed during training"
        for name in ("calibration", "calibration_samples", "freeze_step")
    },
    ("ranges", "weight_rule"): "omit it: a moving average observes ranges; shardwright quantize --ranges searches them",
    ("teacher_revision", "weight_rule"): "use --revision: the teacher is the model itself",
    ("lora", "weight_rule"): "omit it: qat merges adapters; train --method qlora trains them on a 4-bit base",
    **{(name, "keep_layers"): "upload it after it was distilled" for name in ("push_to_hub", "private")},
    ("text", "baseline_revision"): "pass the .txt file, or a directory of them, as --dataset",
    ("stride", "baseline_revision"): "omit it: windows follow one another without overlap",
    ("engine", "baseline_revision"): "run lm_eval --model vllm --model_args pretrained=DIRECTORY --tasks wikitext",
    ("engine", "max_model_len"): "omit it: serve starts vLLM only",
    ("report", "transformers"): "omit it: check --format json prints the findings for other programs",
}
"""The same for names that other commands use, by the name and an option that the command has."""
SYNONYMS: Mapping[str, tuple[Option, ...]] = {name: options for names, options in _OPTIONS.items() for name in names}
"""Options with the meaning of a name in other tools, or of one of these options where a command lacks it."""


_COMMANDS: Mapping[tuple[str, ...], str] = {
    ("finetune", "fine_tune", "sft", "fit", "tune", "pretrain", "run"): "train",
    ("estimate", "memory", "suggest", "config", "configure"): "plan",
    ("compress", "awq", "gptq"): "quantize",
    ("eval", "benchmark", "perplexity"): "evaluate",
    ("validate", "verify", "lint"): "check",
    ("generate", "chat", "infer", "deploy"): "serve",
    ("prune",): "student",
    ("dryrun", "simulate", "test"): "rehearse",
    ("submit",): "launch",
}
_MEANT_COMMANDS = {name: command for names, command in _COMMANDS.items() for name in names}


def command_meant(word: str, commands: Collection[str]) -> str:
    """Return the command with this meaning in other tools, or with the nearest name; else nothing.

    >>> command_meant("fine-tune", ["train", "plan"]), command_meant("trian", ["train", "plan"])
    ('train', 'train')
    """
    plain = word.lower().replace("-", "_")
    near = get_close_matches(word.lower(), commands, n=1, cutoff=0.6)
    return _MEANT_COMMANDS.get(plain, near[0] if near else "")


def meant(name: str, known: Collection[str], *, flag: bool = False) -> str:
    """Return the fix for a name of another tool: the known option with its meaning; else nothing."""
    plain = _plain(name)
    for (removed, beside), fix in _REMOVED_BESIDE.items():
        if removed == plain and beside in known:
            return fix
    if plain in REMOVED and plain not in SYNONYMS:
        return REMOVED[plain]
    for option in SYNONYMS.get(plain.lower(), ()):
        if option.name in known and option.name != plain and (not option.beside or option.beside in known):
            written = _written(option.name, option.values, flag=flag)
            return f"use {written}" if option.values else f"did you mean {written}?"
    return ""


def meanings(name: str) -> tuple[str, ...]:
    """Return the option of this name, and options with its meaning.

    >>> meanings("--lr")
    ('lr', 'learning_rate')
    """
    plain = _plain(name)
    return plain, *(option.name for option in SYNONYMS.get(plain.lower(), ()) if not option.values)


def _plain(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


def _written(option: str, values: str = "", *, flag: bool) -> str:
    if flag:
        return f"--{option.replace('_', '-')} {values}".rstrip()
    return f"{option}: {values}" if values else option


def suggested(name: str, known: Collection[str], *, flag: bool = False) -> str:
    """Return the fix for an unknown option: the option with its meaning, or with the nearest name; else nothing.

    `flag` writes the option as a flag.

    >>> suggested("zero_stage", ["strategy"], flag=True), suggested("lora_rnk", ["lora_rank"])
    ('use --strategy zero1, zero2 or zero3', 'did you mean lora_rank?')
    """
    if fix := meant(name, known, flag=flag):
        return fix
    plain = _plain(name)
    near = get_close_matches(plain, known, n=1, cutoff=0.7 if plain.lower() in SYNONYMS else 0.6)
    return f"did you mean {_written(near[0], flag=flag)}?" if near else ""
