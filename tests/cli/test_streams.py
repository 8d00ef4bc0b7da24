"""A job whose reader leaves finishes; a command that only prints ends without an error."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

JOB = """
import sys
from pathlib import Path
from shardwright.cli.streams import outlast_readers
outlast_readers()
for number in range(3000):
    print("line", number)
    print("note", number, file=sys.stderr)
Path(sys.argv[1]).write_text("done")
"""


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_a_job_continues_without_its_reader(closed: str, tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | {closed: writing}
    done = subprocess.run([sys.executable, "-c", JOB, str(tmp_path / "file")], timeout=60, check=False, **streams)
    os.close(writing)
    assert done.returncode == 0
    assert (tmp_path / "file").read_text() == "done"
    kept = done.stderr if closed == "stdout" else done.stdout
    assert kept.count(b"\n") == 3000


def test_output_of_an_unbuffered_job_is_readable_while_it_runs(tmp_path: Path) -> None:
    job = (
        "import sys; from shardwright.cli.streams import outlast_readers; outlast_readers(); print('reported', end='');"
    )
    job += "print(open(sys.argv[1]).read(), file=sys.stderr)"
    with (tmp_path / "stdout").open("wb") as stdout:
        command = [sys.executable, "-u", "-c", job, str(tmp_path / "stdout")]
        done = subprocess.run(command, timeout=60, check=True, stdout=stdout, stderr=subprocess.PIPE)
    assert done.stderr.strip() == b"reported"
