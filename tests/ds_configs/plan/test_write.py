"""Files of every command: written beside their place and renamed, and one rule on what may be replaced."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from shardwright.ds_configs.plan.output import replacing, write_files


def test_files_are_readable_and_scripts_run(tmp_path):
    paths = write_files({"b.sh": "#!/bin/sh\n", "a.json": "{}", "c.png": b"\x89"}, tmp_path / "new" / "out")
    assert [path.name for path in paths] == ["a.json", "b.sh", "c.png"]
    assert [path.stat().st_mode & 0o777 for path in paths] == [0o644, 0o755, 0o644]
    assert sorted(path.name for path in (tmp_path / "new" / "out").iterdir()) == ["a.json", "b.sh", "c.png"]


def test_a_writer_that_is_killed_leaves_the_old_file(tmp_path):
    """A process that dies without a chance to clean up, after its new content is on the disk."""
    (tmp_path / "a.json").write_text("old")
    script = (
        "import os, signal, sys; from pathlib import Path\n"
        "from shardwright.ds_configs.plan.output import replacing\n"
        "with replacing(Path(sys.argv[1])) as temporary:\n"
        "    temporary.write_text('new'); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "a.json")], env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    assert (tmp_path / "a.json").read_text() == "old"
    with replacing(tmp_path / "a.json") as temporary:
        temporary.write_text("new")
    assert (tmp_path / "a.json").read_text() == "new"
