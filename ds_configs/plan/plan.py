"""`Plan`: choose a strategy, write its files, read them back."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ..memory.activation_source import ActivationSource, activations_are_stored
from ..memory.calibration import Calibration
from ..search.choice import Evaluated, ParetoPoint, search
from ..search.questions import clusters
from ..search.suggestions import Offer, Suggestion, cheapest_changes, faster_changes
from ..specs.errors import DoesNotFitError, Fault, RefusedInputError, UsageError
from ..specs.hardware import HardwareSpec
from ..specs.job import TrainingJob
from ..specs.json_text import strict_json
from ..specs.model import ModelSpec
from ..specs.strategy import Strategy
from .write import write_files

# Plans with every rejected layout stay far below 1 MiB; what is larger was not written here and is not parsed.
_LARGEST_PLAN_BYTES = 16 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Plan:
    """A model, the hardware, the job, and the strategy chosen for them; lies in a directory as the files that run it.

    What renders and reads files imports `Plan`, so that the methods import it when they are called.
    """

    model: ModelSpec
    """The model to train."""
    hardware: HardwareSpec
    """The cluster to train on."""
    job: TrainingJob
    """What the user fixed and left open."""
    chosen: Evaluated
    """The strategy that runs, with its memory and reason."""
    rejected: tuple[Evaluated, ...]
    """The other layouts with theirs: those that fit first, fastest first."""
    pareto: tuple[ParetoPoint, ...] = ()
    """Layouts from the fastest to the leanest, none of which another one beats in both."""
    offers: tuple[Offer, ...] = ()
    """What would be faster if the training's numbers may change."""
    versions: tuple[tuple[str, str], ...] = ()
    """Library versions that the plan was made with, by name."""
    activations: Literal["stored", "traced", "upper bound"] = "stored"
    """What activation bytes rest on: coefficients of the family, a trace of the model, or a bound of its structure."""
    command: str = ""
    """Command line that made it; empty where a Python program did."""

    @property
    def file_names(self) -> tuple[str, ...]:
        """Names of the files that the plan consists of."""
        names = ["accelerate.yaml", "launch.sh", "plan.json", "training_arguments.json"]
        if self.chosen.strategy.engine == "deepspeed":
            names.append("ds_config.json")
        if self.hardware.nodes > 1:
            names += ["hostfile", "launch.sbatch"]
        return tuple(sorted(names))

    def __repr__(self) -> str:
        """Return what was chosen for what, in one line."""
        from .notebook import plan_line

        return plan_line(self)

    def _repr_html_(self) -> str:
        """Return the plan as a notebook shows it."""
        from .notebook import plan_html

        return plan_html(self)

    def to_dataframe(self) -> Any:
        """Return the chosen layout and then the others as a pandas DataFrame: memory in GB, tokens/s, the reason."""
        import pandas  # type: ignore[import-untyped]

        from .notebook import plan_rows

        return pandas.DataFrame(plan_rows(self))

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as the JSON values of `plan.json`."""
        from .plan_json import plan_to_dict

        return plan_to_dict(self)

    def training_arguments(self, output_dir: str | Path, **overrides: Any) -> dict[str, Any]:
        """Return what belongs into `TrainingArguments`, or a subclass such as `SFTConfig`, as keyword arguments.

        They are what `training_arguments.json` holds, with `overrides` in their place where both name one. A batch or
        a precision that is not the plan's makes its prediction void, which `PlanCallback` says.

        >>> TrainingArguments(**plan.training_arguments("out", max_steps=100))  # doctest: +SKIP
        """
        from .training_arguments import planned_training_arguments

        return planned_training_arguments(self) | {"output_dir": str(output_dir)} | overrides

    def deepspeed_config(self) -> dict[str, Any]:
        """Return `ds_config.json` with numbers for `"auto"`, for a loop of one's own around `deepspeed.initialize`.

        Raises:
            UsageError: the plan runs another engine.

        >>> deepspeed.initialize(model=model, optimizer=optimizer, config=plan.deepspeed_config())  # doctest: +SKIP
        """
        from .deepspeed import resolved_deepspeed_config

        return resolved_deepspeed_config(self)

    def write(self, directory: str | Path, *, force: bool = False) -> list[Path]:
        """Write the plan's files and return their paths.

        Raises:
            UsageError: the directory is not empty and `force` is false.
            ShardwrightError: the system refuses to write.
        """
        from .files import render_files

        target = Path(directory)
        return write_files(render_files(self, directory=str(target.absolute())), target, force=force)

    @classmethod
    def load(cls, directory: str | Path) -> Plan:
        """Return the plan that `write` left in a directory.

        Raises:
            UsageError: there is no `plan.json`.
            RefusedInputError: it is not one that this version wrote.
        """
        from .plan_json import plan_from_dict

        path = Path(directory)
        file = path / "plan.json" if path.is_dir() else path
        if not file.is_file():
            rule = "has no plan.json" if path.exists() else "no such file or directory"
            raise UsageError(Fault(where="plan", value=str(path), rule=rule, fix="run `plan --output-dir` first"))
        if file.stat().st_size > _LARGEST_PLAN_BYTES:
            raise RefusedInputError(Fault(where=str(file), rule=f"is over {_LARGEST_PLAN_BYTES} bytes"))
        try:
            data = strict_json(file.read_bytes())
        except ValueError as error:
            raise RefusedInputError(Fault(where=str(file), rule=f"is not valid JSON ({error})")) from None
        return plan_from_dict(data, source=str(file))


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
    offers: bool = True,
) -> Plan:
    """Choose a strategy for the model, hardware and job; `calibration` holds measured runs to learn from.

    Without `offers`, which take searches of their own, `with_offers` adds them later.

    Raises:
        UsageError: the job is invalid, or the layouts that it allows break rules.
        PlanDoesNotFitError: no layout fits.
    """
    if job.objective == "cost":
        hardware = _cheapest(model, hardware, job, activations, calibration)
    outcome = search(model, hardware, job, activations=activations, calibration=calibration)
    if outcome.chosen is None:
        changes = cheapest_changes(model, hardware, job, activations=activations, calibration=calibration)
        raise PlanDoesNotFitError(outcome.rejected, changes, model=model, hardware=hardware, job=job)
    plan = Plan(
        model=model,
        hardware=hardware,
        job=outcome.job,
        chosen=outcome.chosen,
        rejected=outcome.rejected,
        pareto=outcome.pareto,
        versions=versions,
        activations=_activations_from(model, outcome.job, outcome.chosen.strategy, activations),
    )
    return with_offers(plan) if offers else plan


def with_offers(plan: Plan) -> Plan:
    """Return the plan with what would be faster if the training's numbers may change."""
    return replace(plan, offers=faster_changes(plan.chosen, plan.model, plan.hardware, plan.job))


def _cheapest(
    model: ModelSpec,
    hardware: HardwareSpec,
    job: TrainingJob,
    activations: ActivationSource | None,
    calibration: Calibration | None,
) -> HardwareSpec:
    """Return the part of a cluster with most tokens for each accelerator-second; of those within 1 % the largest.

    The whole cluster where nothing fits on any part.
    """
    speeds: list[tuple[float, HardwareSpec]] = []
    for part in (*clusters(hardware, most=hardware.world_size - 1), hardware):
        try:
            chosen = search(model, part, job, activations=activations, calibration=calibration).chosen
        except UsageError:
            continue
        if chosen is not None:
            speeds.append((chosen.time.tokens_per_second / part.world_size, part))
    best = max((speed for speed, _ in speeds), default=0.0)
    return next((part for speed, part in reversed(speeds) if speed >= 0.99 * best), hardware)


def _activations_from(
    model: ModelSpec, job: TrainingJob, chosen: Strategy, given: ActivationSource | None
) -> Literal["stored", "traced", "upper bound"]:
    if given is not None:
        return "traced"
    return "stored" if activations_are_stored(model, job, chosen) else "upper bound"
