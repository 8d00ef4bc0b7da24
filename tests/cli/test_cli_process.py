"""The installed `shardwright` command in processes of its own: signals, pipes, terminals, imports, determinism."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from paths import CONFIGS

pytestmark = pytest.mark.slow

LLAMA = CONFIGS / "meta-llama--Llama-3.1-8B"
COMMAND = str(Path(sys.executable).parent / "shardwright")
GPU = ("--hardware", "8xA100-80GB")
HEAVY = {"torch", "transformers", "deepspeed", "accelerate", "peft", "datasets", "numpy", "bitsandbytes"}


def environment(**changes: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SHARDWRIGHT_")}
    # The store of measured runs that the session's fixture made, never the developer's own.
    kept["SHARDWRIGHT_DATA_DIR"] = os.environ["SHARDWRIGHT_DATA_DIR"]
    return kept | changes


def shardwright(*arguments: str, cwd: Path | None = None, **changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [COMMAND, *arguments], capture_output=True, text=True, env=environment(**changes), cwd=cwd, timeout=120
    )


def imported_by(*arguments: str) -> set[str]:
    program = (
        "import sys, contextlib, io\n"
        "from shardwright.cli.main import run\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        "    code = run(sys.argv[1:])\n"
        "assert code == 0\n"
        "print(*{name.partition('.')[0] for name in sys.modules})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, env=environment(), timeout=120
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_help_and_plan_load_nothing_heavy() -> None:
    assert not imported_by("--help") & (HEAVY | {"pydantic", "yaml", "huggingface_hub", "psutil"})
    assert not imported_by("plan", str(LLAMA), *GPU, "--format", "json") & (HEAVY | {"huggingface_hub"})
    assert "torch" not in imported_by("train", "--help")


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    written = []
    for seed in ("1", "2"):
        done = shardwright(
            *("plan", str(LLAMA), "--hardware", "2x8xA100-80GB", "--output-dir", "plan", "--force"),
            *("--method", "lora", "--format", "json"),
            cwd=tmp_path,
            PYTHONHASHSEED=seed,
        )
        assert done.returncode == 0, done.stderr
        files = {path.name: path.read_bytes() for path in (tmp_path / "plan").iterdir()}
        written.append((done.stdout, files))
    assert written[0] == written[1]
    assert {"plan.json", "launch.sh", "hostfile", "launch.sbatch"} <= written[0][1].keys()


def test_plain_terminals_get_plain_text(tmp_path: Path) -> None:
    plain = {"NO_COLOR": "1", "LANG": "C", "LC_ALL": "C", "COLUMNS": "40", "TERM": "dumb"}
    plain |= {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    planning = ["plan", str(LLAMA), *GPU, "--output-dir=-out", "--force"]
    for arguments in (planning, ["explain", "./-out"], ["--help"]):
        done = shardwright(*arguments, cwd=tmp_path, **plain)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout and "\x1b" not in done.stdout
    assert json.loads((tmp_path / "-out" / "plan.json").read_text())["schema_version"] == 1


def test_a_closed_pipe_is_not_an_error() -> None:
    for arguments in (["plan", str(LLAMA), *GPU], ["--help"]):
        reader, writer = os.pipe()
        os.close(reader)
        done = subprocess.run(
            [COMMAND, *arguments], stdout=writer, stderr=subprocess.PIPE, text=True, env=environment(), timeout=120
        )
        os.close(writer)
        assert (done.returncode, done.stderr) == (0, ""), arguments


def test_a_full_disk_behind_stdout_is_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [COMMAND, "plan", str(LLAMA), *GPU], stdout=full, stderr=subprocess.PIPE, text=True, env=environment()
        )
    assert done.returncode == 1
    assert done.stderr == "error: No space left on device\n"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_end_the_command_with_their_exit_code(tmp_path: Path, number: signal.Signals, code: int) -> None:
    pipe, output = tmp_path / "plan.yaml", tmp_path / "plan"
    os.mkfifo(pipe)
    process = subprocess.Popen(
        [COMMAND, "plan", str(LLAMA), *GPU, "--config", str(pipe), "--output-dir", str(output)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
        # A shell's background job ignores SIGINT, and would pass that on.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    with pipe.open("wb"):  # opens once the command waits for its settings
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (code, b"", b"")
    assert not output.exists()


def test_debug_shows_the_traceback() -> None:
    quiet = shardwright("plan", "/no/such/model", *GPU)
    assert (quiet.returncode, quiet.stdout) == (2, "")
    assert quiet.stderr.startswith("error: model = '/no/such/model'") and quiet.stderr.count("\n") == 1
    loud = shardwright("plan", "/no/such/model", *GPU, SHARDWRIGHT_DEBUG="1")
    assert loud.returncode == 1
    assert "Traceback" in loud.stderr and "UsageError" in loud.stderr
