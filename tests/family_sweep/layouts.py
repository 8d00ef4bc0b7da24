"""Families under sequence, tensor and pipeline parallelism on two ranks: equal to one process, or refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equivalence.cases import deepspeed_config
from equivalence.records import Record, each_record, training_record, write_records
from family_sweep.checks import Finding, arguments_in, compared, samples
from family_sweep.tiny_configs import tiny_model
from shardwright.ds_configs.specs.layout import Layout

AXES: dict[str, Layout] = {
    "sp": Layout(engine="deepspeed", zero_stage=1, sp=2),
    "tp": Layout(engine="deepspeed", zero_stage=1, tp=2),
    "pp": Layout(engine="deepspeed", zero_stage=0, pp=2),
}


@dataclass(frozen=True, kw_only=True)
class Cell:
    class_name: str
    axis: str

    @property
    def name(self) -> str:
        return f"{self.class_name}.{self.axis}"

    @property
    def strategy(self) -> Layout:
        return AXES.get(self.axis, Layout(engine="single"))


def make_trainer(cell: Cell, directory: Path) -> Any:
    from shardwright.plugins.accelerate.cpu_ranks import configure_cpu_ranks
    from shardwright.trainers.parallel.trainer_for import parallelism_of

    changes: dict[str, Any] = {}
    if cell.strategy.engine == "deepspeed":
        changes = {"deepspeed": deepspeed_config(cell.strategy), **configure_cpu_ranks("deepspeed")}
    arguments = arguments_in(str(directory), **changes)
    model = tiny_model(cell.class_name)
    return parallelism_of(cell.strategy).make_trainer(model=model, args=arguments, train_dataset=samples())


def record(cell: Cell, output: Path) -> Record:
    return training_record(lambda: make_trainer(cell, output / f"{cell.class_name}-{cell.axis}"))


def findings(asked: Sequence[tuple[str, str]], directory: Path) -> Iterator[tuple[str, str, Finding]]:
    references: dict[str, Record] = {}
    cells = [Cell(class_name=class_name, axis=axis) for class_name, axis in asked]
    for cell, own in each_record(cells, directory, Path(__file__)):
        if "losses" in own and cell.class_name not in references:
            references[cell.class_name] = record(Cell(class_name=cell.class_name, axis="none"), directory)
        yield cell.class_name, cell.axis, compared(own, references.get(cell.class_name, {}))


if __name__ == "__main__":
    write_records(Cell, record)
