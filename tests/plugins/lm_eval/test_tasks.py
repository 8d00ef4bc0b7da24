"""Tasks of lm-evaluation-harness: requests that cannot be run, before and after a model is loaded."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
from harness_task import write_task
from shardwright.ds_configs.specs.errors import ShardwrightError
from shardwright.plugins import lm_eval as harness
from shardwright.plugins.lm_eval import TaskRequest, run_tasks, task_errors
from shardwright.plugins.transformers.training_arguments import byte_tokenizer
from transformers import LlamaForCausalLM

pytestmark = pytest.mark.slow


def test_tasks_that_cannot_be_run(tmp_path, tiny_llama, monkeypatch):
    class Manager:
        def __init__(self, include_path: Any = None, include_defaults: bool = True) -> None:
            self.all_tasks = ["hellaswag", "arc_easy"] if include_defaults else []
            self.all_subtasks = self.all_tasks

    request = TaskRequest(names=("arc_easy", "helaswag"), limit=0, few_shot=-1)
    harness._indexed.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr("lm_eval.tasks.TaskManager", Manager)
        limit, few_shot, unknown = task_errors(request)
    harness._indexed.cache_clear()
    assert (limit.where, few_shot.where) == ("--limit", "--few-shot")
    assert unknown.value == "helaswag"
    (missing,) = task_errors(TaskRequest(names=("x",), include_path=tmp_path / "none"))
    assert "is not a directory" in missing.rule
    write_task(tmp_path / "tiny_lost.yaml", tmp_path / "none.jsonl")
    model = LlamaForCausalLM.from_pretrained(tiny_llama)
    lost = TaskRequest(names=("tiny_lost",), include_path=tmp_path)
    assert task_errors(lost) == []
    with pytest.raises(ShardwrightError, match=r"--tasks tiny_lost: .*none\.jsonl"):
        run_tasks(model, byte_tokenizer(512), lost, batch_size=2)
    find = importlib.util.find_spec
    monkeypatch.setattr(harness, "find_spec", lambda name: None if name == "lm_eval" else find(name))
    (absent,) = task_errors(TaskRequest(names=("hellaswag",)))
    assert absent.fix == "pip install lm-eval"
