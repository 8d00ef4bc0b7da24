"""`group_by_length`: ranks share one order of samples, and a resumed epoch goes on in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cases import RANKS
from length_groups_worker import SAMPLES, SAVED, STEPS, train
from warm_ranks import run_ranks

pytestmark = pytest.mark.distributed


def trained(layout: str, output: Path, *, dropout: float) -> list[dict[str, Any]]:
    run_ranks([Path(__file__).with_name("length_groups_worker.py"), output, layout, str(dropout)], ranks=RANKS)
    return [json.loads((output / f"{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize("layout", ["zero3", "tp2-zero1", "fsdp2"])
def test_resumed_epoch_keeps_its_order(layout: str, tmp_path: Path, deepspeed_cpu_ops: None) -> None:
    """Losses are those of the run in one go, to the bit, and of one process."""
    found = trained(layout, tmp_path, dropout=0.0)[0]
    assert len(found["whole"]["losses"]) == STEPS > SAVED
    assert found["resumed"]["losses"] == found["whole"]["losses"]
    alone = train("", tmp_path / "alone", dropout=0.0, resume=False)
    assert found["whole"]["losses"] == pytest.approx(alone["losses"], abs=1e-5)


def test_ranks_read_every_sample_once_in_an_epoch_with_dropout(tmp_path: Path) -> None:
    """Dropout on batches of different lengths lets the random numbers of ranks part."""
    found = trained("ddp", tmp_path, dropout=0.2)
    assert found[0]["resumed"]["losses"] == found[0]["whole"]["losses"]
    own = SAMPLES // RANKS
    for first in range(0, 2 * own, own):
        epoch = [index for rank in found for index in rank["whole"]["seen"][first : first + own]]
        assert sorted(epoch) == list(range(SAMPLES))


def test_one_process_resumes_in_its_order(tmp_path: Path) -> None:
    whole, resumed = (train("", tmp_path, dropout=0.2, resume=resume) for resume in (False, True))
    assert resumed["losses"] == whole["losses"]
