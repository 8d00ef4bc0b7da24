"""Files that run a plan: DeepSpeed JSON, Accelerate YAML, training arguments, launch scripts and scripts of clusters.

Other schedulers than SLURM: `examples/clusters`.
"""

from __future__ import annotations

import base64
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from ..memory.activations import has_fused_loss, has_window_blocks
from ..memory.estimate import expands_segments
from ..memory.generation import vllm_share
from ..memory.host import stock_loading_bytes
from ..search.search import Evaluated
from ..specs.errors import ConfigError
from ..specs.hardware import HardwareSpec
from ..specs.job import GROUPED_TASKS, TeacherFields, TrainingFields, TrainingJob
from ..specs.model import ModelSpec
from ..specs.optimizers import OPTIMIZERS, PREPARED_UNDER_FSDP2, parsed_optim_args
from ..specs.tasks import TASKS
from ..specs.texts import flag_words, read_small_file, strict_json, yaml_mapping
from ..specs.units import ROUNDED_PINNED_MB, gigabytes

MAIN_PORT = 29500
"""Default rendezvous port of several nodes, as in torchrun and Accelerate."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class LaunchSpec:
    """Everything that a launch needs: model, cluster, job and chosen layout."""

    model: ModelSpec
    hardware: HardwareSpec
    job: TrainingJob
    chosen: Evaluated

    @property
    def environment(self) -> dict[str, str]:
        """Variables of the ranks that the memory estimate assumes."""
        settings = ["expandable_segments:True"] if expands_segments(self.job, self.hardware) else []
        layout = self.chosen.layout
        offloads = layout.offload_optimizer != "none" or layout.offloaded_checkpoints > 0
        offloads = offloads or any(choice.placement == "offloaded" for choice in self.chosen.placements.values())
        if offloads and self.hardware.gpu != "CPU":
            # Cached blocks of other sizes than powers of two would be reused for larger ones (torch 2.13.0,
            # `get_free_block`).
            settings += [f"pinned_max_{name}_mb:{ROUNDED_PINNED_MB}" for name in ("round_threshold", "cached_size")]
        return {"PYTORCH_ALLOC_CONF": ",".join(settings)} if settings else {}

    @property
    def file_names(self) -> tuple[str, ...]:
        names = ["accelerate.yaml", "launch.sh", "plan.json", "training_arguments.json"]
        if self.chosen.layout.engine == "deepspeed":
            names.append("ds_config.json")
        if self.hardware.nodes > 1:
            names += ["hostfile", "launch.sbatch"]
        return tuple(sorted(names))


@dataclass(frozen=True, kw_only=True, slots=True)
class NodePlace:
    """Rank of a node and the rendezvous address of a launch."""

    rank: int | str
    """Node rank; node 0 is the rendezvous. A string for a placeholder in a script."""
    main_address: str
    """Name or address of node 0."""
    main_port: int | str = MAIN_PORT

    @property
    def is_first(self) -> bool:
        """Whether this node reports the results."""
        return str(self.rank) == "0"


def launch_arguments(plan: LaunchSpec, *, directory: str, node: NodePlace | None = None) -> list[str]:
    """Return the launcher of a plan's ranks on one node, before the module or script that they run.

    It reads `ds_config.json` of the directory instead of the copy in `accelerate.yaml`. Plain data parallelism over CPU
    ranks uses torchrun, because Accelerate starts a single process for MULTI_CPU.
    """
    hardware, engine = plan.hardware, plan.chosen.layout.engine
    if hardware.gpu == "CPU" and engine == "ddp":
        rendezvous = ["--standalone"]
        if node is not None:
            rendezvous = [f"--nnodes={hardware.nodes}", "--node-rank", str(node.rank)]
            rendezvous += ["--master-addr", node.main_address, "--master-port", str(node.main_port)]
        return ["torchrun", *rendezvous, f"--nproc_per_node={hardware.gpus_per_node}"]
    command = ["accelerate", "launch", "--config_file", f"{directory}/accelerate.yaml"]
    if node is not None:
        command += ["--machine_rank", str(node.rank), "--main_process_ip", node.main_address]
        command += ["--main_process_port", str(node.main_port)]
    return command if engine != "deepspeed" else [*command, "--deepspeed_config_file", f"{directory}/ds_config.json"]


def train_arguments(plan: LaunchSpec, *, directory: str) -> list[str]:
    """Return the command that trains on the user's data under a plan; `YOUR_DATA` and `OUTPUT` are placeholders.

    With a teacher the command is `distill`, which makes its own plan.
    """
    words = _dataset_words(plan)
    if plan.job.teacher is None:
        words[2:2] = ["--plan", directory]
    if plan.job.task in GROUPED_TASKS and plan.job.reward is None:
        words += ["--reward", "FILE.py:FUNCTION"]
    return ["shardwright", *words, "--dataset", "YOUR_DATA", "--output-dir", "OUTPUT"]


def _dataset_words(plan: LaunchSpec) -> list[str]:
    """Return the command with its models that trains on a dataset."""
    revision = [] if plan.model.revision is None else ["--revision", plan.model.revision]
    if teacher := plan.job.teacher:
        job = replace(plan.job, global_batch_size=plan.chosen.layout.global_batch_size)
        hardware = {name: text for name, text in plan.hardware.options().items() if name != "num_processes"}
        flags = flag_words(hardware) + job.flags(of=_DISTILL_OPTIONS)
        return ["distill", teacher.name, plan.model.name, *revision, *flags]
    return ["train", plan.model.name, *revision]


_DISTILL_OPTIONS = {*TrainingFields.__dataclass_fields__, *TeacherFields.__dataclass_fields__}
_DISTILL_OPTIONS |= {"seq_len", "precision", "method"}
"""Options of a job that `distill` has."""


def run_line(plan: LaunchSpec, *, directory: str = ".") -> str:
    """Return how to start a training with `launch.sh`; for several nodes, on each, or with SLURM."""
    script, data = shlex.quote(f"{directory}/launch.sh"), "--dataset FILE --output-dir DIRECTORY"
    if plan.hardware.nodes == 1:
        return f"{script} SCRIPT [ARGUMENTS], or {script} {data}"
    batch = shlex.quote(f"{directory}/launch.sbatch")
    return (
        f"{script} MACHINE_RANK MAIN_PROCESS_IP SCRIPT [ARGUMENTS] on each node, or sbatch {batch} SCRIPT [ARGUMENTS]"
    )


def launch_script(plan: LaunchSpec, header: str) -> str:
    """Return `launch.sh`: runs the user's script, or trains on the user's data, with the files next to it.

    It runs `shardwright launch`, `train` or `distill`, which check data, accelerators and packages before ranks start.
    """
    command = _dataset_words(plan)
    own_plan = "" if plan.job.teacher else ' --plan "$directory"'
    needed, places, take_places, passed_places = 1, "", "", ""
    if plan.hardware.nodes > 1:
        needed, places, passed_places = 3, "MACHINE_RANK MAIN_PROCESS_IP ", ' "${places[@]}"'
        port = f"${{MAIN_PROCESS_PORT:-{MAIN_PORT}}}"
        take_places = f'places=(--node-rank "$1" --main-address "$2" --main-port "{port}")\nshift 2\n'
    usage = f"usage: $0 {places}SCRIPT [ARGUMENTS], or $0 {places}--dataset FILE --output-dir DIRECTORY [OPTIONS]"
    return (
        f"#!/usr/bin/env bash\n{header}set -euo pipefail\n"
        f'if [ $# -lt {needed} ]; then echo "{usage}" >&2; exit 2; fi\n'
        'directory="$(cd "$(dirname "$0")" && pwd)"\n'
        'python="$(command -v python || command -v python3)"\n'
        f"{take_places}"
        "# After a script, --dataset is an argument of the script.\n"
        'case "$1 $* " in\n'
        "  -*' --dataset '* | -*' --dataset='*)\n"
        f'    set -- {shlex.join(command)}{own_plan}{passed_places} "$@" ;;\n'
        f'  *) set -- launch "$directory"{passed_places} -- "$@" ;;\n'
        "esac\n"
        "printf 'Running: shardwright%s\\n' \"$(printf ' %q' \"$@\")\" >&2\n"
        'exec "$python" -m shardwright "$@"\n'
    )


def trainer_line(plan: LaunchSpec) -> str:
    """Return whether a stock Trainer can run a plan, and what it needs for that."""
    layout, job = plan.chosen.layout, plan.job
    if job.teacher:
        return "Trainer: `shardwright distill`, or DistillationTrainer in your script"
    if layout.pp > 1 or layout.cp > 1:
        axis = "pipelines" if layout.pp > 1 else "context parallelism"
        return f"Trainer: `shardwright train` or trainer_for; a stock Trainer has no {axis}"
    needs = [f"{axis.upper()} {size}" for axis, size in layout.axes.items()]
    if plan.hardware.gpu == "CPU" and layout.engine != "single" and not layout.axes:
        needs.append("CPU ranks")
    spec, sharded = OPTIMIZERS[job.optimizer], layout.engine == "fsdp2"
    prepared = sharded and (spec.factored or job.optimizer in PREPARED_UNDER_FSDP2)
    if layout.engine != "deepspeed" and (spec.matrix_states or spec.low_rank or prepared):
        needs.append(job.optimizer)
    elif job.optimizer == "muon":
        needs.append("muon, with args=plan.training_arguments(...)")
    stock_bytes = stock_loading_bytes(layout, plan.model, plan.hardware, job)
    if stock_bytes > plan.hardware.host_bytes_per_node:
        needs.append(f"loading in less than {gigabytes(stock_bytes)} GB per node")
    of_callback = {
        "partial recomputation": layout.recomputes_in_part,
        "tiled MLPs": layout.tiled_mlp,
        "the tiled loss": job.loss == "chunked" and not uses_liger(plan),
        "checkpoints in host memory": layout.offloaded_checkpoints > 0 and "offload" not in checkpointing_kwargs(plan),
        "windows without a mask": has_window_blocks(plan.model, job.seq_len_tokens),
        # Gathered weights would stay in the graph of the backward pass.
        "QLoRA under ZeRO-3": layout.zero_stage == 3 and job.method == "qlora" and not layout.recomputes_in_part,
    }
    way = "trainer_for" if needs else "PlanCallback"
    needs += [name for name, is_on in of_callback.items() if is_on]
    if needs:
        return f"Stock Trainer: use `shardwright launch` or {way} ({', '.join(needs)})"
    return "Stock Trainer: use `accelerate launch` or `shardwright launch`"


FUSED_LOSS_ONLY = {
    "cross_entropy": False,
    "fused_linear_cross_entropy": True,
    "geglu": False,
    "layer_norm": False,
    "relu_squared": False,
    "rms_norm": False,
    "rope": False,
    "swiglu": False,
}
"""Enables Liger's chunked head and loss, but not its other kernels."""


def uses_liger(plan: LaunchSpec) -> bool:
    """Return whether liger-kernel computes a chunked loss; otherwise Shardwright's callback computes it in tiles."""
    return has_fused_loss(plan.model, plan.chosen.layout, plan.job, gpu=plan.hardware.gpu != "CPU")


MAX_GRAD_NORM = 1.0
"""Norm at which gradients are clipped, the default of Trainer and DeepSpeed."""


def max_grad_norm(job: TrainingJob) -> float:
    """Return the norm at which gradients are clipped; 0 for Muon.

    DeepSpeed would clip Muon's orthogonalized updates, whose norm is far above 1 (stage_1_and_2.py:3036).
    """
    return 0.0 if OPTIMIZERS[job.optimizer].matrix_states else MAX_GRAD_NORM


def checkpointing_kwargs(plan: LaunchSpec) -> dict[str, object]:
    """Return the `gradient_checkpointing_kwargs` of a plan; empty for the defaults of Transformers."""
    kwargs: dict[str, object] = {"use_reentrant": True} if plan.job.gradient_checkpointing == "reentrant" else {}
    upstream = plan.job.offload_activations == "transformers" and plan.chosen.layout.offloaded_checkpoints > 0
    return kwargs | ({"offload": True} if upstream else {})


def planned_training_arguments(plan: LaunchSpec) -> dict[str, object]:
    """Return the keys of `TrainingArguments` that the plan decides.

    With FSDP2 and accumulation, the Trainer would keep gradients unsharded between micro-batches
    (`Accelerator.no_sync`, accelerate/accelerator.py:1167); `sync_each_batch` keeps them sharded, as planned.
    """
    layout, job = plan.chosen.layout, plan.job
    arguments: dict[str, object] = {
        "per_device_train_batch_size": layout.micro_batch_size,
        "gradient_accumulation_steps": layout.gradient_accumulation_steps,
        "gradient_checkpointing": layout.gradient_checkpointing,
        "bf16": job.precision == "bf16" and job.weights_dtype != "bf16",
        "fp16": job.precision == "fp16",
        "optim": job.optimizer,
        "max_grad_norm": max_grad_norm(job),
    }
    if recomputation := checkpointing_kwargs(plan):
        arguments["gradient_checkpointing_kwargs"] = recomputation
    arguments |= task_arguments(plan)
    if job.optim_args:
        arguments["optim_args"] = job.optim_args
    if OPTIMIZERS[job.optimizer].low_rank:
        arguments["optim_target_modules"] = "all-linear"
    if plan.hardware.gpu == "CPU":
        arguments["use_cpu"] = True
    if job.torch_compile:
        arguments["torch_compile"] = True
    if job.use_liger_kernel:
        arguments["use_liger_kernel"] = True
        fused = {"cross_entropy": False, "fused_linear_cross_entropy": uses_liger(plan)}
        if layout.tiled_mlp:
            # Tiles replace the forward pass of MLPs, as these kernels do.
            fused |= {"swiglu": False, "geglu": False}
        arguments["liger_kernel_config"] = fused
    elif uses_liger(plan):
        arguments["use_liger_kernel"] = True
        arguments["liger_kernel_config"] = FUSED_LOSS_ONLY
    if layout.engine == "fsdp2":
        accelerator: dict[str, object] = {}
        if layout.gradient_accumulation_steps > 1:
            accelerator["gradient_accumulation_kwargs"] = {"sync_each_batch": True}
        if plan.hardware.gpu == "CPU":
            # accelerate 1.15.0 silently trains plain DDP here. `shardwright launch` creates the state that this key
            # requires; a script launched without it fails instead of running another layout.
            accelerator["use_configured_state"] = True
        if accelerator:
            arguments["accelerator_config"] = accelerator
    return arguments


def task_arguments(plan: LaunchSpec) -> dict[str, object]:
    """Return the keys of a TRL configuration that the plan of a task decides."""
    layout, job, task = plan.chosen.layout, plan.job, TASKS[plan.job.task]
    if task.head == "model":
        return {}
    arguments: dict[str, object] = {"beta": job.divergence_weight} if "reference" in task.second_models else {}
    if job.task == "gkd":
        return {"max_length": job.seq_len_tokens, "max_new_tokens": job.generated_tokens}
    if job.task not in GROUPED_TASKS:
        placement = plan.chosen.placements.get("reference")
        if placement is not None and placement.placement == "cached":
            arguments["precompute_ref_log_probs"] = True
        return arguments | {"max_length": job.seq_len_tokens}
    arguments |= {
        "max_completion_length": job.generated_tokens,
        "num_generations": job.generations,
        "steps_per_generation": job.steps_per_generation or layout.gradient_accumulation_steps,
    }
    if job.generation == "transformers":
        return arguments
    arguments |= {"use_vllm": True, "vllm_max_model_length": job.seq_len_tokens}
    if job.generation == "vllm-server":
        return arguments | {"vllm_mode": "server"}
    return arguments | {
        "vllm_mode": "colocate",
        "vllm_tensor_parallel_size": job.vllm_tensor_parallel_size or 1,
        "vllm_gpu_memory_utilization": vllm_share(layout, plan.model, job, plan.hardware.gpu_bytes),
        "vllm_enable_sleep_mode": job.vllm_sleep == "on",
    }


GATHER_ON_SAVE = "stage3_gather_16bit_weights_on_model_save"


def deepspeed_config(plan: LaunchSpec) -> dict[str, object]:
    """Return the DeepSpeed configuration of a plan, without keys that have no effect."""
    layout, job = plan.chosen.layout, plan.job
    zero = layout.zero
    section: dict[str, Any] = {"stage": layout.zero_stage}
    if layout.tp > 1 and layout.pp == 1:
        # Accelerate asks for it before it saves a tensor-parallel model, at any stage (accelerator.py:4072).
        section[GATHER_ON_SAVE] = True
    if layout.zero_stage:
        section |= {
            "overlap_comm": zero.overlap_comm,
            "contiguous_gradients": True,
            "reduce_bucket_size": zero.reduce_bucket_size,
        }
    if layout.zero_stage == 3:
        if job.optimizer == "muon":
            section["reduce_scatter"] = False
        section |= {
            "stage3_prefetch_bucket_size": zero.stage3_prefetch_bucket_size,
            "stage3_param_persistence_threshold": zero.stage3_param_persistence_threshold,
            "stage3_max_live_parameters": zero.stage3_max_live_parameters,
            "stage3_max_reuse_distance": zero.stage3_max_reuse_distance,
            GATHER_ON_SAVE: True,
            "sub_group_size": zero.sub_group_size,
        }
        if zero.hpz_partition_size > 1:
            section["zero_hpz_partition_size"] = zero.hpz_partition_size
        for name in ("quantized_weights", "quantized_gradients"):
            if getattr(zero, name):
                section[f"zero_{name}"] = True
    buffers = {
        "offload_optimizer": {"buffer_count": zero.optimizer_buffer_count},
        "offload_param": {"buffer_count": zero.parameter_buffer_count, "buffer_size": zero.parameter_buffer_elements},
    }
    for name, of_nvme in buffers.items():
        if (device := getattr(layout, name)) != "none":
            section[name] = {"device": device, "pin_memory": True}
            if device == "nvme":
                section[name] |= {"nvme_path": plan.hardware.nvme_path, **of_nvme}
    config: dict[str, object] = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": section,
    }
    if job.precision == "fp16":
        config["fp16"] = {"enabled": "auto"}
        del config["bf16"]
    if job.optimizer == "muon":
        config["optimizer"] = {"type": "Muon", "params": muon_parameters(job)}
    if layout.offload_optimizer != "none":
        # Accelerate does the same by default. It is safe, because only optimizers with an equivalent CPU kernel reach
        # this point (rule offloaded_optimizer_has_cpu_kernel).
        config["zero_force_ds_cpu_optimizer"] = True
    if layout.tp > 1 and layout.pp > 1:
        # The stages split their own layers; DeepSpeed must not also partition the tensors between stages.
        config["pipeline"] = {"pipe_partitioned": False, "grad_partitioned": False}
    elif layout.tp > 1:
        # The callback splits the layers by these values; without a vocabulary-parallel head the logits stay complete.
        config["tensor_parallel"] = {"autotp_size": layout.tp, "vocab_parallel_lm_head": False}
    if layout.ep > 1:
        config["expert_parallel"] = {"enabled": True, "autoep_size": layout.ep}
    if "nvme" in (layout.offload_optimizer, layout.offload_param):
        config["aio"] = {"block_size": 1048576, "queue_depth": 32, "single_submit": False, "overlap_events": True}
    return config


def muon_parameters(job: TrainingJob) -> dict[str, object]:
    """Return the parameters of DeepSpeed's Muon; `torch_adam` and `standard` need no compiled kernels."""
    stated = parsed_optim_args(job.optim_args)
    parameters: dict[str, object] = {"lr": "auto", "weight_decay": "auto", "betas": "auto", "eps": "auto"}
    parameters |= {key: float(stated[key]) for key in ("muon_lr", "momentum") if key in stated}
    return parameters | {"ns_method": "standard", "torch_adam": True}


def accelerate_config(plan: LaunchSpec) -> dict[str, object]:
    """Return the Accelerate configuration of a plan.

    It contains the DeepSpeed configuration as text, which accelerate 1.15.0 accepts instead of a path
    (utils/deepspeed.py, `HfDeepSpeedConfig`). A path would be relative to the working directory of the launch, and
    wrong after the directory was moved. `num_processes` counts the processes of all nodes. With a DeepSpeed file
    neither `mixed_precision` nor a value of that file is allowed (accelerate/utils/dataclasses.py:1507).
    """
    layout, hardware = plan.chosen.layout, plan.hardware
    # MULTI_GPU also for CPU ranks: accelerate 1.15.0 starts one plain process for MULTI_CPU.
    types = {"single": "NO", "ddp": "MULTI_GPU", "deepspeed": "DEEPSPEED", "fsdp2": "FSDP"}
    is_hpu = layout.engine == "ddp" and hardware.gpu.startswith("Gaudi")
    distributed_type = "MULTI_HPU" if is_hpu else types[layout.engine]
    config: dict[str, object] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": distributed_type,
        "num_machines": hardware.nodes,
        "num_processes": hardware.world_size,
        "machine_rank": 0,
        "main_training_function": "main",
        "debug": False,
    }
    if hardware.nodes > 1:
        config["main_process_ip"] = "main-process-host"
        config["main_process_port"] = 29500
    if layout.engine == "deepspeed":
        launcher = {"deepspeed_multinode_launcher": "standard"} if hardware.nodes > 1 else {}
        config["deepspeed_config"] = {
            "deepspeed_config_file": json.dumps(deepspeed_config(plan), indent=2) + "\n",
            "zero3_init_flag": layout.zero_stage == 3,
            **launcher,
        }
        if layout.sp > 1:
            # `dp_shard_size` counts the groups that share a sequence; Accelerate computes the batch from it. The
            # attention is the model's own, which the callback replaces.
            config["parallelism_config"] = {
                "parallelism_config_dp_shard_size": hardware.world_size // layout.sp,
                "parallelism_config_sp_size": layout.sp,
                "parallelism_config_sp_backend": "deepspeed",
                "parallelism_config_sp_seq_length_is_variable": True,
                "parallelism_config_sp_attn_implementation": plan.model.attention or "sdpa",
            }
        return config
    # With bf16 weights there is nothing to autocast, and Accelerate would convert FSDP2's weights to fp32.
    is_mixed = plan.job.precision != "fp32" and plan.job.weights_dtype != "bf16"
    config["mixed_precision"] = plan.job.precision if is_mixed else "no"
    is_fp8 = plan.job.precision == "fp8"
    if is_fp8:
        config["fp8_config"] = {"fp8_backend": "AO"}
    if layout.engine == "fsdp2":
        config["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_transformer_layer_cls_to_wrap": ",".join(plan.model.layer_classes),
            "fsdp_reshard_after_forward": True,
            "fsdp_offload_params": layout.offload_param == "cpu",
            # Accelerate 1.15.0 cannot use it with 4-bit weights (fsdp_utils.py:830) and torchao's fp8 layers
            # (accelerator.py:519); every rank reads the weights itself.
            "fsdp_cpu_ram_efficient_loading": plan.job.method != "qlora" and not is_fp8,
            "fsdp_state_dict_type": "FULL_STATE_DICT",
            # The Trainer enables checkpointing and rejects both switches together (trainer.py:847).
            "fsdp_activation_checkpointing": False,
        }
        if layout.dp_replicate > 1 or layout.cp > 1:
            parallelism: dict[str, object] = {
                "parallelism_config_dp_replicate_size": layout.dp_replicate,
                "parallelism_config_dp_shard_size": layout.dp_shard,
            }
            if layout.cp > 1:
                parallelism |= {
                    "parallelism_config_cp_size": layout.cp,
                    "parallelism_config_cp_comm_strategy": "allgather",
                }
            config["parallelism_config"] = parallelism
    return config


def accelerate_text(config: Mapping[str, object]) -> str:
    """Return the YAML of a configuration, with multi-line texts as indented blocks."""
    return yaml.dump(dict(config), Dumper=_ReadableDumper, sort_keys=False)


class _ReadableDumper(yaml.SafeDumper):
    def represent_str(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", data, style="|" if "\n" in data else None)


_ReadableDumper.add_representer(str, _ReadableDumper.represent_str)


DEEPSPEED_FILE = "ds_config.json"
HEADER = "_shardwright"
"""Key of the header in `ds_config.json`, which DeepSpeed ignores."""


def copied_configuration(value: str) -> str | None:
    """Return the JSON of `deepspeed_config_file` if it is text or base64; `None` if it is a path.

    Distinguishes them as `HfDeepSpeedConfig` of accelerate 1.15.0 does (utils/deepspeed.py).

    >>> copied_configuration('{"bf16": {"enabled": true}}')
    '{"bf16": {"enabled": true}}'
    >>> copied_configuration("plan/ds_config.json")
    """
    # `Path.exists` raises for texts that are too long for a name; `os.path.exists` returns false.
    if os.path.exists(value):  # noqa: PTH110
        return None
    if value.lstrip().startswith("{"):
        return value
    try:
        decoded = base64.urlsafe_b64decode(value).decode("utf-8")
        return decoded if isinstance(json.loads(decoded), dict) else None
    except (ValueError, RecursionError):
        return None


def differing_keys(copy: str, directory: Path) -> list[str]:
    """Return the top-level keys in which a copy differs from `ds_config.json` of a directory, apart from the header.

    Empty if the file is missing, or if either is not JSON.
    """
    try:
        copied, other = strict_json(copy), strict_json((directory / DEEPSPEED_FILE).read_bytes())
    except (OSError, ValueError):
        return []
    if not isinstance(copied, dict) or not isinstance(other, dict):
        return []
    keys = [key for key in (*copied, *other) if key != HEADER and copied.get(key) != other.get(key)]
    return list(dict.fromkeys(keys))


def copy_errors(directory: Path) -> list[ConfigError]:
    """Return an error if the two DeepSpeed configurations of a plan differ."""
    try:
        content = read_small_file(directory / "accelerate.yaml", what="plan")
        section = yaml_mapping(content, name="accelerate.yaml", what="plan").get("deepspeed_config")
    except ValueError:
        return []
    named = section.get("deepspeed_config_file") if isinstance(section, dict) else None
    copy = copied_configuration(named) if isinstance(named, str) else None
    keys = [] if copy is None else differing_keys(copy, directory)
    return [copy_error(directory, keys)] if keys else []


def copy_error(directory: Path, keys: Sequence[str]) -> ConfigError:
    """Return the error of a DeepSpeed configuration that was edited in only one of the two files."""
    return ConfigError(
        where=f"{directory / 'accelerate.yaml'}: deepspeed_config.deepspeed_config_file",
        rule=f"differs from {directory / DEEPSPEED_FILE} in {', '.join(keys)}; Accelerate reads only this copy",
        fix="make the same change in both, or replace the copy by the path of ds_config.json",
    )


SAVING_SECONDS = 300
"""Default time in seconds to write a checkpoint after a scheduler stops the run."""
RESUME = "--resume-or-anew"
"""Argument of a restarted run: resumes, or starts again if no checkpoint is valid, because no user can decide."""
_STOPPED = 143
"""Exit code of a run that saved after SIGTERM."""
_MEETING = (
    "set -uo pipefail\n"
    'main_address="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"\n'
    "# Two jobs that share a machine meet at different ports.\n"
    "main_port=$((20000 + SLURM_JOB_ID % 10000))\n"
)
"""Script lines that set the rendezvous address and port."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeCommand:
    """A command of Shardwright that each node runs, with its rank and the address of the first one."""

    words: tuple[str, ...]
    """Name and arguments, without options of machines."""
    program: tuple[str, ...] = ("shardwright",)

    def node_words(self, place: NodePlace, *options: str) -> list[str]:
        """Return the command of one node; options of machines precede the arguments, which may be a script's."""
        meeting = ["--main-address", place.main_address, "--main-port", str(place.main_port)]
        return [*self.program, self.words[0], "--node-rank", str(place.rank), *meeting, *options, *self.words[1:]]


def placeholder_hosts(nodes: int) -> list[str]:
    """Return the placeholders for host names in the hostfile that `plan` writes."""
    return [f"node-{index}" for index in range(nodes)]


def hostfile(hardware: HardwareSpec) -> str:
    """Return the hostfile of `--on ssh` and of DeepSpeed's launchers, with placeholder names."""
    return "".join(f"{name} slots={hardware.gpus_per_node}\n" for name in placeholder_hosts(hardware.nodes))


def slurm_script(
    command: NodeCommand,
    hardware: HardwareSpec,
    *,
    behind: Sequence[str],
    header: str = "",
    name: str = "shardwright",
    settings: Sequence[str] = (),
) -> str:
    """Return an `sbatch` script: one launcher per exclusive node, stopped in time to save.

    The directory `.` in the command is that of the submission. The script adds arguments that it gets itself to those
    `behind`, and `settings` to the options of `sbatch`. The job is requeued as long as it makes progress.
    """
    options = [f"--job-name={name}", f"--nodes={hardware.nodes}", "--ntasks-per-node=1"]
    if hardware.gpu != "CPU":
        options.append(f"--gpus-per-node={hardware.gpus_per_node}")
    options += ["--exclusive", "--requeue", "--open-mode=append"]
    options += [f"--signal=TERM@{SAVING_SECONDS}", *settings]
    head = "#!/usr/bin/env bash\n" + "".join(f"#SBATCH {option}\n" for option in options) + header + _MEETING
    program, same = shlex.join([*command.program, command.words[0]]), len(command.program) + 1
    words = " ".join('"$SLURM_SUBMIT_DIR"' if word == "." else shlex.quote(word) for word in command.words[1:])
    # Node-specific arguments follow the words that are the same on all nodes.
    run = (
        f"srun --wait={SAVING_SECONDS} bash -c "
        f'\'exec "${{@:1:{same}}}" --node-rank "$SLURM_NODEID" "${{@:{same + 1}}}"\' node '
        f'{program} --main-address "$main_address" --main-port "$main_port" {words}'
    )
    return (
        f'{head}set -- {"".join(f"{shlex.quote(word)} " for word in behind)}"$@"\n'
        "# Your own script must read SLURM_RESTART_COUNT itself.\n"
        'case "${1:--}" in -*) set -- "$@" ${SLURM_RESTART_COUNT:+"'
        f'{RESUME}"}} ;; esac\n'
        f'{run} -- "$@"\n'
        "code=$?\n"
        "# The run was stopped before its time limit and has saved. Requeue it to resume, if it made progress.\n"
        f'if [ "$code" -eq {_STOPPED} ] && {program} {words} --turn-ended -- "$@"; then\n'
        '  scontrol requeue "$SLURM_JOB_ID"\n'
        "fi\n"
        'exit "$code"\n'
    )
