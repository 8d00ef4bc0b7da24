"""What a command prints, and what it does if its reader leaves."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from session import warm_command

JOB = """
import sys
from pathlib import Path
from shardwright.cli.main import outlast_readers
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
    job = "import sys; from shardwright.cli.main import outlast_readers; outlast_readers(); print('reported', end='');"
    job += "print(open(sys.argv[1]).read(), file=sys.stderr)"
    with (tmp_path / "stdout").open("wb") as stdout:
        command = [sys.executable, "-u", "-c", job, str(tmp_path / "stdout")]
        done = subprocess.run(command, timeout=60, check=True, stdout=stdout, stderr=subprocess.PIPE)
    assert done.stderr.strip() == b"reported"


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from peft import LoraConfig, get_peft_model
    from shardwright.plugins.transformers.training_arguments import byte_tokenizer
    from small_models import llama
    from transformers import AutoModelForCausalLM

    root = tmp_path_factory.mktemp("quiet")
    llama().save_pretrained(root / "model", max_shard_size="50KB")
    base = AutoModelForCausalLM.from_pretrained(root / "model")
    get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"])).save_pretrained(root / "tuned")
    for name in ("model", "tuned"):
        byte_tokenizer(512).save_pretrained(root / name)
    return root / "tuned"


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        "merge {tuned} --output-dir {out}",
        "evaluate {root}/model --baseline {root}/model --seq-len 32 --num-samples 4 --device cpu",
        "quantize {root}/model --scheme W8A16 --method rtn --group-size 16 --no-evaluate --output-dir {out}",
        pytest.param(
            "quantize {root}/model --scheme W4A16 --method gptq --group-size 16 --seq-len 32 --num-samples 4 "
            "--no-evaluate --dataset python-help --output-dir {out}",
            marks=pytest.mark.needs("llmcompressor"),
        ),
        "serve {root}/model --hardware 1xA100-80GB --dry-run",
    ],
)
def test_captured_output_has_neither_warnings_of_libraries_nor_bars(words: str, adapter: Path, tmp_path: Path) -> None:
    arguments = words.format(tuned=adapter, root=adapter.parent, out=tmp_path / "out").split()
    command = [*warm_command("shardwright"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    printed = done.stdout + done.stderr
    assert not re.search(r"\w+Warning\b|\d%\||\d(it|s)/(s|it)|\[transformers\]|\r", printed), printed
