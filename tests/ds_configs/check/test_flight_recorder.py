"""Records of collective operations: the operation and the rank that lags are named, and no file runs code.

`tests/data/failed_runs/collectives` are the records of two ranks with gloo, which torch 2.13.0 wrote. NCCL's have the
same format, with the states of operations.
"""

from __future__ import annotations

import json
import os
import pickle  # noqa: TID251 - torch writes pickles
from pathlib import Path
from typing import Any

import pytest
from commands import every_command
from paths import ROOT
from shardwright.ds_configs.check.flight_recorder import read_record, stuck_groups, summary
from shardwright.ds_configs.specs.errors import InputError

RECORDS = ROOT / "tests" / "data" / "failed_runs" / "collectives"


def nccl(*names: str, unfinished: int | None = None, ranks: int = 2, start: int = 1) -> dict[str, Any]:
    entries = [
        {
            "collective_seq_id": number,
            "process_group": ["0", "default_pg"],
            "profiling_name": f"nccl:{name}",
            "input_sizes": [[8]],
            "is_p2p": False,
            "state": "started" if number == unfinished else "completed",
            "time_created_ns": number,
            "frames": [{"name": "step", "filename": "train.py", "line": number}],
        }
        for number, name in enumerate(names, start=start)
    ]
    return {"entries": entries, "pg_config": {"0": {"name": "0", "ranks": str(list(range(ranks)))}}, "version": "2.10"}


def test_the_operation_and_the_rank_that_lags_are_named(tmp_path: Path) -> None:
    lines = summary(RECORDS)
    assert lines[0] == "process group 0 (default_pg):"
    assert lines[1].startswith("  rank 0 waited in gloo:all_gather number 3 of inputs [[8]] (/home/user/fr.py:11 in ")
    assert lines[2].startswith("  rank 1 lags: its last operation was gloo:all_reduce number 2 of inputs [[4]] (")
    # torch writes pickles, to a path that ends with the rank.
    for rank in range(2):
        record = json.loads((RECORDS / f"rank_{rank}.json").read_text(encoding="utf-8"))
        (tmp_path / f"rank_{rank}").write_bytes(pickle.dumps(record, protocol=2))
    assert summary(tmp_path / "rank_") == summary(tmp_path) == lines
    (tmp_path / "rank_1").unlink()
    assert "rank 1 has no record" in summary(tmp_path)[2]


def test_records_of_an_earlier_run_are_ignored(tmp_path: Path) -> None:
    for rank in range(2):
        file = tmp_path / f"rank_{rank}"
        file.write_text((RECORDS / f"rank_{rank}.json").read_text(encoding="utf-8"), encoding="utf-8")
        os.utime(file, (1000, 1000))
    assert summary(tmp_path, since=2000.0) == [] and summary(tmp_path)


def test_nccl_states_show_who_waits() -> None:
    done = ("all_gather", "reduce_scatter")
    [lagging] = stuck_groups({0: nccl(*done, "all_gather", unfinished=3), 1: nccl(*done)})
    assert list(lagging.waiting) == [0] and lagging.behind[1] is not None and lagging.behind[1].number == 2
    assert lagging.lines()[1] == "  rank 0 waited in nccl:all_gather number 3 of inputs [[8]] (train.py:3 in step)"
    # NCCL's operations are asynchronous: rank 0 has already started others.
    [lagging] = stuck_groups({0: nccl(*done, "all_gather", "all_gather", unfinished=3), 1: nccl(*done)})
    assert lagging.waiting[0].number == 3
    [both] = stuck_groups({rank: nccl(*done, unfinished=2) for rank in range(2)})
    assert list(both.waiting) == [0, 1] and not both.behind and "a link or an accelerator" in both.lines()[-1]
    [differ] = stuck_groups({0: nccl("all_gather", unfinished=1), 1: nccl("all_reduce", unfinished=1)})
    assert differ.differs and "  rank 1 called nccl:all_reduce number 1" in "\n".join(differ.lines())
    assert stuck_groups({rank: nccl(*done) for rank in range(2)}) == []
    # The buffer of rank 1 has lost its first operation.
    assert stuck_groups({0: nccl(*done), 1: nccl("reduce_scatter", start=2)}) == []


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("made-by-a-record",)


@pytest.mark.parametrize(
    "content",
    [pickle.dumps(Harmful()), b"", b"{", b"[]", pickle.dumps([1]), pickle.dumps({"entries": 3}), b"\x80\x02K"],
)
def test_a_file_that_is_no_record_is_rejected_and_runs_nothing(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "rank_0"
    file.write_bytes(content)
    with pytest.raises(InputError, match="is not a record of torch's flight recorder"):
        read_record(file)
    assert not (tmp_path / "made-by-a-record").exists()


def test_explain_reads_a_directory_of_records(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shell = every_command(capsys, monkeypatch)
    done = shell("explain", "--error", tmp_path)
    assert done.code == 2 and "has no records of torch's flight recorder" in done.err
    done = shell("explain", "--error", RECORDS)
    assert done.code == 0 and "rank 1 lags" in done.out
    assert json.loads(shell("explain", "--error", RECORDS, "--format", "json").out)["collectives"] == summary(RECORDS)
