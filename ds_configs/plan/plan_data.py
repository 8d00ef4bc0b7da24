"""What a plan holds, for the renderers below and `Plan` above."""

from __future__ import annotations

from dataclasses import dataclass

from ..search.choice import Evaluated
from ..specs.hardware import HardwareSpec
from ..specs.job import TrainingJob
from ..specs.model import ModelSpec
from ..specs.units import gigabytes


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanData:
    """A model, the hardware, the job, and the strategy chosen for them."""

    model: ModelSpec
    """The model to train."""
    hardware: HardwareSpec
    """The cluster to train on."""
    job: TrainingJob
    """What the user fixed and left open."""
    chosen: Evaluated
    """The strategy that runs, with its memory and reason."""
    rejected: tuple[Evaluated, ...]
    """The other layouts with theirs, most preferred first."""
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


def headline(plan: PlanData) -> str:
    """Return the plan in one line."""
    gpu, strategy = plan.chosen.memory.gpu, plan.chosen.strategy
    return (
        f"{plan.model.name} on {plan.hardware.name}: {strategy.label}, micro-batch {strategy.micro_batch_size} x "
        f"{strategy.gradient_accumulation_steps}, {gigabytes(gpu.peak_bytes)} of {gigabytes(gpu.capacity_bytes)} GB"
    )
