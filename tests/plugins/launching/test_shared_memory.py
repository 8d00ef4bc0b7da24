"""Files that DeepSpeed leaves in shared memory go with their ranks, and nobody else's with them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from shardwright.plugins.launching import shared_memory
from shardwright.plugins.launching.launch import Launch, LaunchFailedError, free_port, launch_ranks
from shardwright.plugins.launching.shared_memory import remove_buffers
from warm_ranks import run_ranks

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


def test_a_group_s_files_go_and_others_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "DIRECTORY", tmp_path)
    user = os.getuid()
    names = [f"{user}_127.0.0.1_4001_0", f"{user}_127.0.0.1_14001_0", f"{user + 1}_127.0.0.1_4001_0"]
    own, other, foreign = (tmp_path / f"deepspeed_allreduce_buffer_{name}" for name in names)
    for file in (own, other, foreign):
        file.touch()
    remove_buffers(4001)
    assert not own.exists() and other.exists() and foreign.exists()


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
