"""`Plan`: the chosen strategy with its memory and reason, the rejected ones, and the files that run it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from .errors import DoesNotFitError, Fault, RefusedInputError
from .hardware import HardwareSpec
from .job import TrainingJob
from .memory import ActivationSource, MemoryEstimate
from .model import ModelSpec
from .model_states import rank_parameters
from .search import Evaluated, search
from .strategy import Strategy
from .suggestions import Suggestion, cheapest_changes
from .units import gigabytes

SCHEMA_VERSION = 1
"""Version of `plan.json` and of `plan --format json`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A model, the hardware, the job, and the strategy chosen for them."""

    model: ModelSpec
    hardware: HardwareSpec
    job: TrainingJob
    chosen: Evaluated
    rejected: tuple[Evaluated, ...]
    versions: tuple[tuple[str, str], ...] = ()
    """Library versions that the plan was made with, by name."""

    @property
    def file_names(self) -> tuple[str, ...]:
        """Names of the files that the plan consists of."""
        names = ["accelerate.yaml", "launch.sh", "plan.json", "training_arguments.json"]
        if self.chosen.strategy.engine == "deepspeed":
            names.append("ds_config.json")
        if self.hardware.nodes > 1:
            names += ["hostfile", "launch.sbatch"]
        return tuple(sorted(names))

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON values; `from_dict` gives it back."""
        strategy = self.chosen.strategy
        return {
            "schema_version": SCHEMA_VERSION,
            "model": model_summary(self.model, self.job),
            "hardware": asdict(self.hardware),
            "job": _job_dict(self.job),
            "chosen": {
                "strategy": strategy_dict(strategy),
                "gpu_memory": asdict(self.chosen.memory.gpu),
                "host_memory": _host_dict(self.chosen.memory),
                "nvme_bytes_per_node": self.chosen.memory.host.nvme_bytes_per_node,
                "step_time": None,
                "reason": self.chosen.reason,
            },
            "rejected": [_rejected_dict(candidate) for candidate in self.rejected],
            "files": list(self.file_names),
            "versions": dict(self.versions),
        }


class PlanDoesNotFitError(DoesNotFitError):
    """No layout fits; carries what was tried and the cheapest changes that would."""

    def __init__(self, tried: tuple[Evaluated, ...], suggestions: tuple[Suggestion, ...]) -> None:
        self.tried = tried
        self.suggestions = suggestions
        closest = min(tried, key=lambda candidate: candidate.memory.gpu.high_bytes)
        lines = [f"nothing fits; closest: {closest.reason}"]
        lines += [f"would fit: {suggestion}" for suggestion in suggestions]
        if not suggestions:
            lines.append("no single change that was tried would fit")
        super().__init__("\n".join(lines))


def make_plan(
    model: ModelSpec,
    hardware: HardwareSpec,
    job: TrainingJob,
    *,
    activations: ActivationSource | None = None,
    versions: tuple[tuple[str, str], ...] = (),
) -> Plan:
    """Choose a strategy for the model, hardware and job.

    Raises:
        UsageError: the job is invalid, or the layouts that it allows break rules.
        PlanDoesNotFitError: no layout fits.
    """
    outcome = search(model, hardware, job, activations=activations)
    if outcome.chosen is None:
        changes = cheapest_changes(model, hardware, job, activations=activations)
        raise PlanDoesNotFitError(outcome.rejected, changes)
    return Plan(
        model=model,
        hardware=hardware,
        job=job,
        chosen=outcome.chosen,
        rejected=outcome.rejected,
        versions=versions,
    )


def model_summary(model: ModelSpec, job: TrainingJob) -> dict[str, Any]:
    """Return what the plan says of its model, with the full specification under `spec`."""
    return {
        "name": model.name,
        "parameters": model.parameter_count,
        "trainable_parameters": rank_parameters(model, job).trainable,
        "architecture": model.architecture,
        "model_type": model.model_type,
        "revision": model.revision,
        "parameters_by_group": model.group_counts(),
        "layer_classes": list(model.layer_classes),
        "spec": asdict(model),
    }


def _job_dict(job: TrainingJob) -> dict[str, Any]:
    values = asdict(job)
    return {"seq_len": values.pop("seq_len_tokens"), **values}


def strategy_dict(strategy: Strategy) -> dict[str, Any]:
    """Return a strategy as JSON values."""
    return asdict(strategy) | {"label": strategy.label}


def _host_dict(memory: MemoryEstimate) -> dict[str, Any]:
    host = asdict(memory.host)
    del host["nvme_bytes_per_node"]
    return host | {"nvme_capacity_bytes_per_node": memory.nvme_capacity_bytes_per_node}


def _rejected_dict(candidate: Evaluated) -> dict[str, Any]:
    return {
        "strategy": strategy_dict(candidate.strategy),
        "reason": candidate.reason,
        "gpu_memory": asdict(candidate.memory.gpu),
        "host_memory": _host_dict(candidate.memory),
        "nvme_bytes_per_node": candidate.memory.host.nvme_bytes_per_node,
    }


def plan_from_dict(data: object, *, source: str) -> Plan:
    """Return the plan that `Plan.to_dict` wrote.

    Raises:
        RefusedInputError: another schema version, or a structure that is not a plan's.
    """
    from pydantic import TypeAdapter, ValidationError

    if not isinstance(data, dict) or "schema_version" not in data:
        raise RefusedInputError(Fault(where=source, rule="is not a plan", fix="give a directory that `plan` wrote"))
    if data["schema_version"] != SCHEMA_VERSION:
        raise RefusedInputError(
            Fault(
                where=f"{source}: schema_version",
                value=data["schema_version"],
                rule=f"this version reads {SCHEMA_VERSION}",
                fix="make the plan again",
            )
        )
    try:
        return TypeAdapter(Plan).validate_python(_plan_values(data))
    except (ValidationError, KeyError, TypeError, AttributeError) as error:
        detail = str(error).splitlines()[0] if not isinstance(error, KeyError) else f"missing {error}"
        raise RefusedInputError(
            Fault(where=source, rule=f"is not a plan that this version wrote ({detail})", fix="make the plan again")
        ) from None


def _plan_values(data: Mapping[str, Any]) -> dict[str, Any]:
    job = dict(data["job"])
    job["seq_len_tokens"] = job.pop("seq_len")
    return {
        "model": data["model"]["spec"],
        "hardware": data["hardware"],
        "job": job,
        "chosen": _evaluated_values(data["chosen"]),
        "rejected": [_evaluated_values(candidate) for candidate in data["rejected"]],
        "versions": list(data["versions"].items()),
    }


def _evaluated_values(candidate: Mapping[str, Any]) -> dict[str, Any]:
    host = dict(candidate["host_memory"])
    capacity = host.pop("nvme_capacity_bytes_per_node")
    strategy = dict(candidate["strategy"])
    del strategy["label"]
    return {
        "strategy": strategy,
        "reason": candidate["reason"],
        "memory": {
            "gpu": candidate["gpu_memory"],
            "host": host | {"nvme_bytes_per_node": candidate["nvme_bytes_per_node"]},
            "nvme_capacity_bytes_per_node": capacity,
        },
    }


def headline(plan: Plan) -> str:
    """Return the plan in one line."""
    gpu, strategy = plan.chosen.memory.gpu, plan.chosen.strategy
    return (
        f"{plan.model.name} on {plan.hardware.name}: {strategy.label}, micro-batch {strategy.micro_batch_size} x "
        f"{strategy.gradient_accumulation_steps}, {gigabytes(gpu.peak_bytes)} of {gigabytes(gpu.capacity_bytes)} GB"
    )
