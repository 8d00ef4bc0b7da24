"""Files that DeepSpeed leaves in shared memory go with their ranks, and nobody else's with them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from shardwright.plugins.launching import shared_memory
from shardwright.plugins.launching.launch import Launch, LaunchFailedError, free_port, launch_ranks
from shardwright.plugins.launching.shared_memory import ABANDONED_SECONDS, remove_abandoned_buffers, remove_buffers
from warm_ranks import run_ranks

HOLD = (
    "import mmap, sys; f = open(sys.argv[1], 'r+b'); m = mmap.mmap(f.fileno(), 0); f.close(); print(); sys.stdin.read()"
)
LAUNCH = """
import os, signal, sys
from shardwright.plugins.accelerate.cpu_ranks import configure_cpu_ranks
if sys.argv[1] == "unreleased":
    import shardwright.plugins.accelerate.cpu_ranks as accelerate
    accelerate.release_buffer = lambda: None
configure_cpu_ranks("deepspeed")
import torch.distributed
torch.distributed.barrier()
held = [line for line in open("/proc/self/maps") if "deepspeed_allreduce_buffer" in line]
print("mapped", len({line.split()[5] for line in held}), "deleted", sum("(deleted)" in line for line in held))
if sys.argv[1] != "released" and os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
"""


def buffer(directory: Path, port: int, *, user: int | None = None, age_seconds: float = 0.0) -> Path:
    file = directory / f"deepspeed_allreduce_buffer_{os.getuid() if user is None else user}_127.0.0.1_{port}_0"
    file.write_bytes(b"\0" * 4096)
    os.utime(file, (time.time() - age_seconds,) * 2)
    return file


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(shared_memory, "DIRECTORY", tmp_path)
    return tmp_path


def test_a_group_s_files_go_and_others_stay(shared: Path) -> None:
    own, other, foreign = buffer(shared, 4001), buffer(shared, 14001), buffer(shared, 4001, user=os.getuid() + 1)
    remove_buffers(4001)
    assert not own.exists() and other.exists() and foreign.exists()


@pytest.mark.parametrize("remove", [lambda: remove_buffers(4001), remove_abandoned_buffers], ids=["own", "abandoned"])
def test_what_a_living_process_has_mapped_stays(remove, shared: Path) -> None:
    file = buffer(shared, 4001, age_seconds=2 * ABANDONED_SECONDS)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", HOLD, str(file)], **pipes) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        remove()
        assert file.exists()
        holder.communicate()
    remove()
    assert not file.exists()


def files() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("deepspeed_*")}  # noqa: S108


@pytest.mark.distributed
def test_ranks_release_what_all_have_mapped(deepspeed_cpu_ops: None, tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(LAUNCH)
    before = files()
    printed = run_ranks([script, "released"], environment={"LOCAL_SIZE": "2"})
    assert printed.count("mapped 2 deleted") == 2
    assert files() == before


@pytest.mark.distributed
def test_a_launch_removes_what_a_killed_rank_leaves(deepspeed_cpu_ops: None, tmp_path: Path) -> None:
    """The ranks die before they could release anything; `LOCAL_SIZE` is what DeepSpeed's launcher sets."""
    script = tmp_path / "ranks.py"
    script.write_text(LAUNCH)
    before, port = files(), free_port()
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port)]
    with pytest.raises(LaunchFailedError) as caught:
        launch_ranks(
            Launch(arguments=(*launch, str(script), "unreleased"), environment={"LOCAL_SIZE": "2"}, port=port),
            timeout_seconds=60,
        )
    assert "mapped 2 deleted 0" in caught.value.output
    assert files() == before
