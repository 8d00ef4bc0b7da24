"""`shardwright distill --teacher-url` on one and two CPU ranks, and when the server ends."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from distilling import tiny
from shardwright.plugins.transformers.training_arguments import byte_tokenizer
from teacher_server import State, served
from training_runs import command, completed, losses_of, make_inputs

pytestmark = pytest.mark.distributed

VOCAB = 257
"""Bytes and the end of a text: models without further columns, so that no token of the teacher is removed."""
SETTINGS: dict[str, Any] = {"alpha": 0.7, "micro_batch_size": 1, "max_steps": 5, "save_steps": 1, "teacher_timeout": 3}


def run_of(root: Path, directory: Path, url: str, flags: str) -> list[str]:
    return command(root, "llama", directory, f"{flags} --teacher-url {url}", name="distill", **SETTINGS)


def expected_loss(root: Path, state: State, samples: int) -> float:
    """Return 0.3 CE + 0.7 KL over 20 tokens and all others, of the untrained student, over the held-out samples."""
    from shardwright.trainers.data.samples import load_samples
    from transformers import AutoModelForCausalLM

    student = AutoModelForCausalLM.from_pretrained(root / "llama")
    held_out = load_samples(str(root / "rows.jsonl"), byte_tokenizer(VOCAB), seq_len=32).evaluation[:samples]
    total, count = 0.0, 0
    for sample in held_out:
        ids, labels = torch.tensor([sample["input_ids"]]), torch.tensor(sample["labels"][1:])
        with torch.no_grad():
            log_q = torch.log_softmax(student(ids).logits[0, :-1].double(), -1)[labels != -100]
            log_p = torch.log_softmax(state.model(ids).logits[0, :-1].double(), -1)[labels != -100]
        kept = log_p.topk(20).indices
        bins = []
        for values in (log_p, log_q):
            others = values.scatter(1, kept, -torch.inf).logsumexp(1, keepdim=True)
            bins.append(torch.cat([values.gather(1, kept), others], 1))
        kl = (bins[0].exp() * (bins[0] - bins[1])).sum()
        cross_entropy = -log_q.gather(1, labels[labels != -100][:, None]).sum()
        total += float(0.3 * cross_entropy + 0.7 * kl)
        count += len(log_q)
    return total / count


def test_ranks_equal_one_process_and_resume_after_the_server_ended(tmp_path: Path) -> None:
    make_inputs(tmp_path)
    tiny("llama", hidden=64, vocab_size=VOCAB).save_pretrained(tmp_path / "llama")
    state = State(model=tiny("llama", hidden=48, seed=9, vocab_size=VOCAB), tokenizer=byte_tokenizer(VOCAB))
    losses: dict[str, list[float]] = {}
    with served(state) as url:
        for name, flags in (("one", "--hardware 1xCPU"), ("two", "--strategy ddp"), ("zero3", "--strategy zero3")):
            state.requests.clear()
            done = completed(run_of(tmp_path, tmp_path / name, url, flags), tmp_path / name)
            losses[name] = losses_of(tmp_path / name)
            before = json.loads(done.stdout)["before"]
            loss = 0.3 * before["student_cross_entropy"] + 0.7 * before["kl_per_token"]
            assert loss == pytest.approx(expected_loss(tmp_path, state, 4), abs=1e-6)
            prompts = [ids for path, body in state.requests if path == "/v1/completions" for ids in body["prompt"]]
            # Probe, held-out samples before and after, and the samples of five steps: no rank asks for another's.
            assert 20 < len(prompts) <= 1 + 4 + 4 + 5 * 4
    assert len(losses["one"]) == 5 and losses["one"][0] != losses["one"][4]
    for name in ("two", "zero3"):
        assert losses[name] == pytest.approx(losses["one"], abs=1e-6)

    directory = tmp_path / "ended"
    state.status = lambda path: 0 if (directory / "out" / "checkpoints" / "checkpoint-2").exists() else 200
    with served(state) as url:
        arguments = run_of(tmp_path, directory, url, "--strategy ddp")
        failed = subprocess.run(arguments, capture_output=True, text=True, cwd=directory, timeout=300)
    error = json.loads(failed.stdout)["error"]
    assert failed.returncode == error["exit_code"] == 1 and "Traceback" not in failed.stderr
    assert f"teacher {url}: cannot be reached" in error["message"] and "\n" not in error["message"]
    assert error["message"].endswith("start it again, and resume from the last checkpoint with --resume")
    # The next server may have another address.
    state.status = lambda path: 200
    with served(state) as url:
        arguments = run_of(tmp_path, directory, url, "--strategy ddp --resume")
        completed(arguments, directory)
    assert losses_of(directory) == pytest.approx(losses["two"], abs=1e-6)
