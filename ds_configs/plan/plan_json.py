"""`plan.json` and `plan --format json`: a plan as JSON values, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ..memory.estimate import MemoryEstimate
from ..memory.rank_parameters import rank_parameters
from ..search.choice import Evaluated
from ..search.questions import doubts
from ..specs.errors import Fault, RefusedInputError
from ..specs.job import TrainingJob
from ..specs.model import ModelSpec
from ..specs.strategy import Strategy
from .plan import Plan

SCHEMA_VERSION = 1
"""Version of `plan.json` and of `plan --format json`."""


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """Return the plan as JSON values; `plan_from_dict` gives it back."""
    strategy = plan.chosen.strategy
    return {
        "schema_version": SCHEMA_VERSION,
        "model": model_summary(plan.model, plan.job),
        "hardware": asdict(plan.hardware),
        "job": job_dict(plan.job),
        "chosen": {
            "strategy": strategy_dict(strategy),
            "gpu_memory": asdict(plan.chosen.memory.gpu),
            "host_memory": _host_dict(plan.chosen.memory),
            "nvme_bytes_per_node": plan.chosen.memory.host.nvme_bytes_per_node,
            "step_time": asdict(plan.chosen.time),
            "loss": plan.chosen.loss,
            "reason": plan.chosen.reason,
            "teacher": None if plan.chosen.teacher is None else asdict(plan.chosen.teacher),
        },
        "rejected": [rejected_dict(candidate) for candidate in plan.rejected],
        "pareto": [asdict(point) for point in plan.pareto],
        "offers": [asdict(offer) for offer in plan.offers],
        "doubts": list(doubts(plan.chosen.strategy, plan.model, plan.hardware, plan.job)),
        "files": list(plan.file_names),
        "versions": dict(plan.versions),
        **({} if plan.activations == "stored" else {"activations": plan.activations}),
        **({"command": plan.command} if plan.command else {}),
    }


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


def job_dict(job: TrainingJob) -> dict[str, Any]:
    """Return a job as JSON values, with the names of the command line."""
    values = asdict(job)
    return {"seq_len": values.pop("seq_len_tokens"), **values}


def strategy_dict(strategy: Strategy) -> dict[str, Any]:
    """Return a strategy as JSON values."""
    return asdict(strategy) | {"label": strategy.label}


def _host_dict(memory: MemoryEstimate) -> dict[str, Any]:
    host = asdict(memory.host)
    del host["nvme_bytes_per_node"]
    return host | {"nvme_capacity_bytes_per_node": memory.nvme_capacity_bytes_per_node}


def rejected_dict(candidate: Evaluated) -> dict[str, Any]:
    """Return a layout that was not taken as JSON values."""
    return {
        "strategy": strategy_dict(candidate.strategy),
        "reason": candidate.reason,
        "analysis_only": candidate.analysis_only,
        "gpu_memory": asdict(candidate.memory.gpu),
        "host_memory": _host_dict(candidate.memory),
        "nvme_bytes_per_node": candidate.memory.host.nvme_bytes_per_node,
        "step_time": asdict(candidate.time),
        "loss": candidate.loss,
    }


def plan_from_dict(data: object, *, source: str) -> Plan:
    """Return the plan that `plan_to_dict` wrote.

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
        plan: Plan = TypeAdapter(Plan).validate_python(_plan_values(data))
        return plan
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
        "pareto": data["pareto"],
        "offers": data["offers"],
        "versions": list(data["versions"].items()),
        "activations": data.get("activations", "stored"),
        "command": data.get("command", ""),
    }


def _evaluated_values(candidate: Mapping[str, Any]) -> dict[str, Any]:
    host = dict(candidate["host_memory"])
    capacity = host.pop("nvme_capacity_bytes_per_node")
    strategy = dict(candidate["strategy"])
    del strategy["label"]
    return {
        "strategy": strategy,
        "reason": candidate["reason"],
        "time": candidate["step_time"],
        "loss": candidate["loss"],
        "teacher": candidate.get("teacher"),
        "analysis_only": candidate.get("analysis_only", False),
        "memory": {
            "gpu": candidate["gpu_memory"],
            "host": host | {"nvme_bytes_per_node": candidate["nvme_bytes_per_node"]},
            "nvme_capacity_bytes_per_node": capacity,
        },
    }
