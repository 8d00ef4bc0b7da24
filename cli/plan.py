"""`shardwright plan`: choose a strategy, explain it, write its files."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from ..ds_configs.plan.plan import Plan, PlanDoesNotFitError
from ..ds_configs.plan.plan_json import job_dict, model_summary, plan_to_dict, rejected_dict
from ..ds_configs.specs.errors import Fault, UsageError
from ..ds_configs.specs.hardware import HardwareSpec
from ..ds_configs.specs.job import LossImplementation, Method, OffloadName, Precision, StrategyName, Switch, TrainingJob
from ..ds_configs.specs.model import ModelSpec
from ..ds_configs.specs.teacher_placement import TeacherPlacementChoice
from .settings import PlanSettings, ResolvedSettings, job_from_settings, resolve_settings

if TYPE_CHECKING:
    from .tensor_layouts import ComparedLayouts


def plan_command(
    model: str,
    *,
    hardware: str | None = None,
    host_memory: str | None = None,
    nvme: str | None = None,
    seq_len: int | None = None,
    micro_batch_size: int | Literal["auto"] | None = None,
    global_batch_size: int | None = None,
    num_processes: int | None = None,
    precision: Precision | None = None,
    optimizer: str | None = None,
    method: Method | None = None,
    lora_rank: int | None = None,
    lora_targets: str | None = None,
    gradient_checkpointing: Switch | None = None,
    strategy: StrategyName | None = None,
    offload: OffloadName | None = None,
    loss: LossImplementation | None = None,
    teacher: str | None = None,
    teacher_placement: TeacherPlacementChoice | None = None,
    tensor_parallel_size: int | Literal["auto"] | None = None,
    pipeline_parallel_size: int | Literal["auto"] | None = None,
    sequence_parallel_size: int | Literal["auto"] | None = None,
    context_parallel_size: int | Literal["auto"] | None = None,
    expert_parallel_size: int | Literal["auto"] | None = None,
    zero_quantized_weights: bool | None = None,
    zero_quantized_gradients: bool | None = None,
    explain_tensor_parallel: Annotated[bool, Parameter(negative="")] = False,
    calibration: bool = True,
    revision: str | None = None,
    trust_remote_code: Annotated[bool, Parameter(negative="")] = False,
    config: Path | None = None,
    output_dir: Path | None = None,
    force: Annotated[bool, Parameter(negative="")] = False,
    dry_run: Annotated[bool, Parameter(negative="")] = False,
    format: Literal["human", "json"] = "human",
) -> int:
    """Choose the ZeRO stage (or FSDP2, or DDP) for a model on some hardware, with the reason and the memory.

    Example: shardwright plan meta-llama/Llama-3.1-8B --hardware 8xA100-80GB --output-dir plan

    Parameters
    ----------
    model
        Hub id, local directory, or config.json. Only config.json and safetensors headers are read.
    hardware
        [[NODESx]GPUSx]GPU such as 8xA100-80GB or 4x8xH100-80GB, a YAML file, or local.
    host_memory
        Memory of one node, such as 1TB. Default: a common server's, said in the plan.
    nvme
        NVMe of one node as PATH:SIZE, such as /local_nvme:3.5TB. Default: none.
    seq_len
        Tokens of one training sequence. Default 4096.
    micro_batch_size
        Sequences of one forward pass on one rank, or auto. Default auto.
    global_batch_size
        Sequences of one optimizer step over all ranks. Default: one micro-batch on each rank, in a
        pipeline as many as fill its stages.
    num_processes
        Accelerators, when the hardware names only their kind.
    precision
        Compute precision; bf16 and fp16 keep fp32 master weights. Default bf16.
    optimizer
        A name of the Trainer's optim. Default adamw_torch_fused.
    method
        Full training, LoRA, or QLoRA. Default full.
    lora_rank
        Rank of the LoRA matrices. Default 16.
    lora_targets
        Module names separated by commas, or all-linear. Default all-linear.
    gradient_checkpointing
        Recompute each layer in the backward pass. Default auto.
    strategy
        Engine and stage. Default auto.
    offload
        none, cpu (optimizer), cpu-all (and parameters) or nvme. Default auto.
    loss
        chunked never materialises the logits of all tokens. Default eager.
    teacher
        A frozen second model for distillation.
    teacher_placement
        replica (whole on every rank), sharded, offloaded (host memory), quantized (4 bit), cached. Default auto.
    tensor_parallel_size
        Ranks that share each layer (AutoTP), 1 for none, or auto. Default auto.
    pipeline_parallel_size
        Pipeline stages, 1 for none, or auto. Default auto.
    sequence_parallel_size
        Ranks that share each sequence (Ulysses), 1 for none, or auto. Default auto.
    context_parallel_size
        Ranks that share each sequence (torch context parallelism, FSDP2), 1 for none, or auto. Default auto.
    expert_parallel_size
        Ranks that share the experts of each layer (AutoEP), 1 for none, or auto. Default auto.
    zero_quantized_weights
        ZeRO++ qwZ: ZeRO-3 gathers weights in int8.
    zero_quantized_gradients
        ZeRO++ qgZ: ZeRO-3 reduces gradients in int4 between nodes.
    explain_tensor_parallel
        Compare 1D, 2D, 2.5D and 3D tensor parallelism on this hardware. Analysis only: nothing runs the last three.
    calibration
        Let runs that `shardwright calibrate` stored narrow the memory interval.
    revision
        Branch, tag or commit of a Hub model; the plan pins the commit.
    trust_remote_code
        Has no effect here: planning never runs a model's own code.
    config
        YAML file with any of these settings; flags win.
    output_dir
        Directory for the files of the plan.
    force
        Replace the files of an earlier plan in the output directory.
    dry_run
        Show the resolved settings and the plan, write nothing.
    format
        human or json; json prints one object on stdout.
    """
    flags = {name: value for name, value in locals().items() if name in PlanSettings.model_fields}
    if trust_remote_code:
        _note("--trust-remote-code has no effect here: planning never runs a model's own code")
    settings = resolve_settings(flags, file=config)
    as_json = format == "json"
    if dry_run and not as_json:
        _show_settings(settings)
    try:
        plan = _make_plan(model, settings.values, calibration=calibration)
    except PlanDoesNotFitError as error:
        layouts = _layouts(error.model, error.hardware, error.job) if explain_tensor_parallel else None
        if as_json:
            found = _does_not_fit(error) | ({} if layouts is None else {"tensor_layouts": layouts.to_dict()})
            print(json.dumps(found, indent=2))
            for line in str(error).splitlines():
                print(f"error: {line}", file=sys.stderr)
            return error.exit_code
        if layouts is not None:
            layouts.show()
        raise
    layouts = _layouts(plan.model, plan.hardware, plan.job) if explain_tensor_parallel else None
    written = [] if output_dir is None or dry_run else plan.write(output_dir, force=force)
    if as_json:
        shown = plan_to_dict(plan) | {"files": [str(path) for path in written] or list(plan.file_names)}
        if layouts is not None:
            shown["tensor_layouts"] = layouts.to_dict()
        print(json.dumps(shown))
        return 0
    from .show import show_plan

    show_plan(plan, output_dir if written else None)
    if layouts is not None:
        layouts.show()
    return 0


def _note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


def _layouts(model: ModelSpec, hardware: HardwareSpec, job: TrainingJob) -> ComparedLayouts | None:
    """Return the compared layouts of tensor parallelism; `None`, with a note, for mixtures of experts."""
    from .tensor_layouts import compared_layouts

    if model.dimensions.num_experts:
        _note(f"--explain-tensor-parallel compares dense layers, and {model.architecture} has experts")
        return None
    return compared_layouts(model, hardware, job)


def _make_plan(model: str, settings: PlanSettings, *, calibration: bool) -> Plan:
    from ..plugins.planning.from_names import plan
    from ..plugins.planning.models import load_model

    cluster = _hardware(settings)
    teacher = load_model(settings.teacher).spec if settings.teacher else None
    loaded = load_model(model, revision=settings.revision)
    job = job_from_settings(settings, teacher)
    return plan(loaded, cluster, job, calibration="user" if calibration else None, notify=_note)


def _hardware(settings: PlanSettings) -> HardwareSpec:
    from ..plugins.planning.from_names import read_hardware

    text = settings.hardware
    if text is None:
        raise UsageError(
            Fault(where="hardware", rule="is missing", fix="give --hardware, such as 8xA100-80GB, or local")
        )
    wanted = settings.num_processes
    if wanted is not None and wanted < 1:
        raise UsageError(Fault(where="num_processes", value=wanted, rule="must be at least 1"))
    if wanted is not None and not re.match(r"\d+x", text) and not text.endswith((".yaml", ".yml")):
        text = text if text == "local" else f"{wanted}x{text}"
    cluster = read_hardware(text, host_memory=settings.host_memory, nvme=settings.nvme)
    if wanted is not None and wanted != cluster.world_size:
        raise UsageError(
            Fault(
                where="num_processes",
                value=wanted,
                rule=f"must equal the {cluster.world_size} accelerators of {cluster.name}",
                fix="leave it out",
            )
        )
    return cluster


def _does_not_fit(error: PlanDoesNotFitError) -> dict[str, object]:
    return {
        "schema_version": 1,
        "model": model_summary(error.model, error.job),
        "hardware": asdict(error.hardware),
        "job": job_dict(error.job),
        "error": {"exit_code": error.exit_code, "message": str(error).splitlines()[0], "faults": []},
        "chosen": None,
        "rejected": [rejected_dict(candidate) for candidate in error.tried],
        "would_fit": [
            {
                "change": suggestion.change,
                "strategy": suggestion.strategy,
                "high_bytes": suggestion.high_bytes,
                "capacity_bytes": suggestion.capacity_bytes,
            }
            for suggestion in error.suggestions
        ],
    }


def _show_settings(settings: ResolvedSettings) -> None:
    from .show import show_settings

    show_settings(settings.values.model_dump(), settings.origins)
