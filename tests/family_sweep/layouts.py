"""Families under sequence, tensor and pipeline parallelism on two ranks: equal to one process, or refused."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from family_sweep.checks import LOSS_TOLERANCE, arguments_in, losses_of, samples
from family_sweep.tiny_configs import tiny_model
from shardwright.ds_configs.specs.errors import ShardwrightError
from shardwright.ds_configs.specs.layout import Layout

AXES: dict[str, Layout] = {
    "sp": Layout(engine="deepspeed", zero_stage=1, sp=2),
    "tp": Layout(engine="deepspeed", zero_stage=1, tp=2),
    "pp": Layout(engine="deepspeed", zero_stage=0, pp=2),
}
ONE_PROCESS = Layout(engine="single")
RANKS = 2
_SECONDS_OF_A_FAMILY = 30.0


def train(class_name: str, strategy: Layout, directory: str) -> list[float]:
    from equivalence.cases import deepspeed_config
    from shardwright.plugins.accelerate.cpu_ranks import configure_cpu_ranks
    from shardwright.trainers.parallel.trainer_for import parallelism_of

    changes: dict[str, Any] = {"per_device_train_batch_size": 4}
    if strategy.engine == "deepspeed":
        changes |= {"deepspeed": deepspeed_config(strategy), **configure_cpu_ranks("deepspeed")}
    arguments = arguments_in(directory, **changes)
    model = tiny_model(class_name)
    return losses_of(parallelism_of(strategy).make_trainer(model=model, args=arguments, train_dataset=samples()))


def record(class_name: str, strategy: Layout, directory: str) -> dict[str, Any]:
    try:
        return {"losses": train(class_name, strategy, directory)}
    except ShardwrightError as error:
        return {"refused": str(error).splitlines()[0]}
    except Exception:
        return {"error": traceback.format_exc()}


def findings(asked: Sequence[tuple[str, str]], directory: Path) -> Iterator[tuple[str, str, dict[str, str]]]:
    references: dict[str, dict[str, Any]] = {}
    waiting = list(asked)
    while waiting:
        done = attempt(waiting, directory, Path(__file__))
        for (class_name, axis), own in done:
            if "losses" in own and class_name not in references:
                references[class_name] = record(class_name, ONE_PROCESS, str(directory))
            yield class_name, axis, _compared(own, references.get(class_name, {}))
        waiting = waiting[len(done) :]


def _compared(own: dict[str, Any], reference: dict[str, Any]) -> dict[str, str]:
    if "refused" in own:
        return {"state": "refused", "said": own["refused"]}
    if "error" in own or "losses" not in reference:
        text = own.get("error") or reference.get("error") or str(reference)
        return {"state": "broken", "said": text.strip().splitlines()[-1]}
    difference = max(abs(one - other) for one, other in zip(own["losses"], reference["losses"], strict=True))
    return {"state": "passes" if difference <= LOSS_TOLERANCE else "broken", "said": f"{difference:.1e}"}


def attempt(
    asked: Sequence[tuple[str, str]], directory: Path, worker: Path
) -> list[tuple[tuple[str, str], dict[str, Any]]]:
    """Let ranks of a script train until one ends them; the rest is for the next attempt."""
    from warm_ranks import RanksFailedError, run_ranks

    failure = "no record"
    try:
        timeout = min(600.0, 60.0 + _SECONDS_OF_A_FAMILY * len(asked))
        run_ranks([worker, directory, json.dumps(asked)], ranks=RANKS, timeout_seconds=timeout)
    except RanksFailedError as error:
        failure = str(error)
    done = []
    for class_name, axis in asked:
        files = [directory / f"{class_name}.{axis}.{rank}.json" for rank in range(RANKS)]
        records = [json.loads(file.read_text()) for file in files if file.is_file()]
        wrong = next((one for one in records if "error" in one), None)
        complete = len(records) == RANKS and wrong is None
        done.append(((class_name, axis), records[0] if complete else wrong or {"error": failure}))
        if not complete:
            break
    return done


def main(directory: Path, asked: Sequence[tuple[str, str]]) -> None:
    from fresh_process import forget_last_run

    for class_name, axis in asked:
        found = record(class_name, AXES[axis], str(directory / f"{class_name}-{axis}"))
        (directory / f"{class_name}.{axis}.{os.environ['RANK']}.json").write_text(json.dumps(found))
        if "error" in found:
            raise SystemExit(1)
        forget_last_run()


if __name__ == "__main__":
    main(Path(sys.argv[1]), [(one, axis) for one, axis in json.loads(sys.argv[2])])
