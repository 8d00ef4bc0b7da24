"""`Plan`: choose a strategy, write its files, read them back."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..memory.calibration import Calibration
from ..memory.tensor_terms import ActivationSource
from ..search.choice import Evaluated, search
from ..search.suggestions import Suggestion, cheapest_changes
from ..specs.errors import DoesNotFitError, Fault, RefusedInputError, UsageError
from ..specs.hardware import HardwareSpec
from ..specs.job import TrainingJob
from ..specs.model import ModelSpec
from .files import render_files
from .plan_data import PlanData
from .plan_json import plan_from_dict, plan_to_dict
from .write import write_files

_LARGEST_PLAN_BYTES = 16 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan(PlanData):
    """A plan that can be written to a directory and loaded from one."""

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as the JSON values of `plan.json`."""
        return plan_to_dict(self)

    def write(self, directory: str | Path, *, force: bool = False) -> list[Path]:
        """Write the plan's files and return their paths.

        Raises:
            UsageError: the directory is not empty and `force` is false.
            ShardwrightError: the system refuses to write.
        """
        target = Path(directory)
        return write_files(render_files(self, directory=str(target.absolute())), target, force=force)

    @classmethod
    def load(cls, directory: str | Path) -> Plan:
        """Return the plan that `write` left in a directory.

        Raises:
            UsageError: there is no `plan.json`.
            RefusedInputError: it is not one that this version wrote.
        """
        path = Path(directory)
        file = path / "plan.json" if path.is_dir() else path
        if not file.is_file():
            raise UsageError(Fault(where="plan", value=str(path), rule="has no plan.json", fix="run `plan` first"))
        if file.stat().st_size > _LARGEST_PLAN_BYTES:
            raise RefusedInputError(Fault(where=str(file), rule=f"is over {_LARGEST_PLAN_BYTES} bytes"))
        try:
            data = json.loads(file.read_bytes())
        except (ValueError, RecursionError) as error:
            raise RefusedInputError(Fault(where=str(file), rule=f"is not valid JSON ({error})")) from None
        return cls._from_data(plan_from_dict(data, source=str(file)))

    @classmethod
    def _from_data(cls, data: PlanData) -> Plan:
        return cls(**{field.name: getattr(data, field.name) for field in fields(PlanData)})


class PlanDoesNotFitError(DoesNotFitError):
    """No layout fits; carries what was asked, what was tried, and the cheapest changes that would fit."""

    def __init__(
        self,
        tried: tuple[Evaluated, ...],
        suggestions: tuple[Suggestion, ...],
        *,
        model: ModelSpec,
        hardware: HardwareSpec,
        job: TrainingJob,
    ) -> None:
        self.model = model
        self.hardware = hardware
        self.job = job
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
    calibration: Calibration | None = None,
    versions: tuple[tuple[str, str], ...] = (),
) -> Plan:
    """Choose a strategy for the model, hardware and job; `calibration` holds measured runs to learn from.

    Raises:
        UsageError: the job is invalid, or the layouts that it allows break rules.
        PlanDoesNotFitError: no layout fits.
    """
    outcome = search(model, hardware, job, activations=activations, calibration=calibration)
    if outcome.chosen is None:
        changes = cheapest_changes(model, hardware, job, activations=activations, calibration=calibration)
        raise PlanDoesNotFitError(outcome.rejected, changes, model=model, hardware=hardware, job=job)
    return Plan(
        model=model,
        hardware=hardware,
        job=job,
        chosen=outcome.chosen,
        rejected=outcome.rejected,
        versions=versions,
    )
