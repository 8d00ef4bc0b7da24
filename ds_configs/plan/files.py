"""Files of a plan: those that DeepSpeed, Accelerate, the Trainer and schedulers read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..legality.pipeline import pipeline_remarks
from ..specs.errors import UsageError
from ..specs.json_text import strict_json
from ..specs.units import gigabytes
from ..specs.yaml_file import read_small_file, yaml_mapping
from .accelerate import accelerate_config, accelerate_text
from .cluster_jobs import ClusterJob, hostfile, slurm_script
from .deepspeed import deepspeed_config
from .deepspeed_copy import HEADER, copied_configuration
from .launch import launch_script, run_line
from .plan import Plan
from .plan_json import plan_to_dict
from .training_arguments import planned_training_arguments

_CARRIERS = {
    "tp": "AutoTP of DeepSpeed; the launch line attaches TensorParallelCallback, which other scripts need too.",
    "pp": "the launch line trains with PipelineTrainer, whose stages follow from the plan.",
    "sp": "Ulysses of DeepSpeed; the launch line attaches SequenceParallelCallback, which other scripts need too.",
    "cp": "torch context parallelism under FSDP2, which Accelerate and the Trainer read from accelerate.yaml.",
    "ep": "AutoEP of DeepSpeed; the launch line attaches ExpertParallelCallback, which other scripts need too.",
}
"""Who carries each axis."""

_COPIED = (
    "Two files hold the DeepSpeed configuration: ds_config.json, and accelerate.yaml as its deepspeed_config_file, "
    "which is what `accelerate launch` reads. Change both alike, or write the path of ds_config.json there; "
    "`shardwright check` compares them."
)
_FSDP2_ON_CPU = (
    "Start it with launch.sh or `shardwright launch DIR SCRIPT`: `accelerate launch` alone trains plain DDP on CPU "
    "ranks without a word (accelerate 1.15.0 shards for accelerators only), so that a plain script ends with an error "
    "about a pre-configured AcceleratorState."
)


def render_files(plan: Plan, *, directory: str = ".") -> dict[str, str]:
    """Return the text of every file of a plan, by name; the same input gives the same bytes.

    `directory` is where the files will lie, for the launch line that they show and for SLURM, which runs a copy of its
    script; nothing else in them names a place, so that the directory may move.
    """
    lines = header_lines(plan, directory)
    header = "".join(f"# {_one_line(line)}\n" for line in lines)
    engine = plan.chosen.strategy.engine
    remark = f"# {_COPIED}\n" if engine == "deepspeed" else ""
    if engine == "fsdp2" and plan.hardware.gpu == "CPU":
        remark = f"# {_FSDP2_ON_CPU}\n"
    texts = {
        "accelerate.yaml": header + remark + accelerate_text(accelerate_config(plan)),
        "launch.sh": launch_script(plan, header),
        "plan.json": _json(plan_to_dict(plan)),
        "training_arguments.json": _json(planned_training_arguments(plan)),
    }
    if engine == "deepspeed":
        described = {HEADER: [_COPIED, *lines], **deepspeed_config(plan)}
        texts["ds_config.json"] = _json(described)
    if plan.hardware.nodes > 1:
        texts["hostfile"] = header + hostfile(plan)
        texts["launch.sbatch"] = slurm_script(ClusterJob(plan=plan, directory=directory), header)
    assert set(texts) == set(plan.file_names), "every named file is rendered"
    return texts


def edited_files(plan: Plan, directory: Path) -> list[str]:
    """Return the configurations in a plan's directory that say something else than the plan; comments do not count."""
    expected: dict[str, Any] = {
        "accelerate.yaml": _with_parsed_copy(accelerate_config(plan)),
        "training_arguments.json": planned_training_arguments(plan),
    }
    if plan.chosen.strategy.engine == "deepspeed":
        expected["ds_config.json"] = deepspeed_config(plan)
    return [name for name in sorted(expected) if not _says(directory / name, expected[name])]


def _says(file: Path, expected: dict[str, Any]) -> bool:
    """Tell whether a configuration holds what is expected, or is not there."""
    if not file.is_file():
        return True
    try:
        content = read_small_file(file, what="plan")
        found = strict_json(content) if file.suffix == ".json" else yaml_mapping(content, name=file.name, what="plan")
        found = {name: value for name, value in found.items() if name != HEADER}
        found = _with_parsed_copy(found) if file.suffix == ".yaml" else found
    except (UsageError, ValueError, AttributeError, RecursionError):
        return False
    return found == expected or found == _with_path(expected)


def _with_parsed_copy(config: dict[str, Any]) -> dict[str, Any]:
    """Put values in the place of the text of a DeepSpeed configuration; `None` for the path of one."""
    engine = config.get("deepspeed_config")
    if not isinstance(engine, dict) or not isinstance(engine.get("deepspeed_config_file"), str):
        return config
    copy = copied_configuration(engine["deepspeed_config_file"])
    parsed = None if copy is None else {key: value for key, value in strict_json(copy).items() if key != HEADER}
    return config | {"deepspeed_config": engine | {"deepspeed_config_file": parsed}}


def _with_path(expected: dict[str, Any]) -> dict[str, Any]:
    """Return what an `accelerate.yaml` holds that names its DeepSpeed file, which is no edit of the plan."""
    engine = expected.get("deepspeed_config")
    return expected | {"deepspeed_config": engine | {"deepspeed_config_file": None}} if engine else expected


def header_lines(plan: Plan, directory: str) -> list[str]:
    """Return what each file says of itself: purpose, command, assumptions."""
    hardware, gpu, strategy = plan.hardware, plan.chosen.memory.gpu, plan.chosen.strategy
    lines = [
        f"{plan.model.name} on {hardware.name}: {strategy.label}, micro-batch {strategy.micro_batch_size} x "
        f"{strategy.gradient_accumulation_steps}, {gigabytes(gpu.peak_bytes)} of {gigabytes(gpu.capacity_bytes)} GB",
        plan.chosen.reason,
        f"Run: {run_line(plan, directory=directory)}",
        f"Assumes {plan.job.precision}, {plan.job.optimizer}, method {plan.job.method}, sequences of "
        f"{plan.job.seq_len_tokens} tokens without padding, {gigabytes(gpu.capacity_bytes)} GB usable on each "
        f"accelerator.",
    ]
    axes = strategy.axes
    carriers = _CARRIERS | ({"tp": "the stages of the pipeline divide their layers by it."} if "pp" in axes else {})
    lines += [f"{axis.upper()} {size}: {carriers[axis]}" for axis, size in axes.items()]
    if "pp" in axes:
        lines += pipeline_remarks(stages=axes["pp"], micro_batches=strategy.gradient_accumulation_steps)
    if plan.job.loss == "chunked":
        lines.append("Needs the package liger-kernel, whose fused head and loss the training arguments switch on.")
    if plan.job.teacher is not None:
        lines += _teacher_lines(plan)
    if hardware.assumed:
        values = ", ".join(f"{name} = {getattr(hardware, name):.4g}" for name in hardware.assumed)
        lines.append(f"Assumes a common server where you stated nothing: {values}.")
    return lines


def _teacher_lines(plan: Plan) -> list[str]:
    assert plan.job.teacher is not None, "a plan without a teacher says nothing of one"
    lines = [
        f"Memory holds the teacher {plan.job.teacher.name}; the launch line trains the student alone, "
        "`shardwright distill` trains it with its teacher."
    ]
    if plan.chosen.teacher is not None:
        lines.append(f"Teacher: {plan.chosen.teacher.reason}")
    return lines


def _one_line(text: str) -> str:
    """Keep a path with a line break inside its comment."""
    return "".join(character if character.isprintable() else "?" for character in text)


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
