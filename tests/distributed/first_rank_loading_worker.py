"""Runs on every rank: loads models under FSDP2 or ZeRO-3, first as upstream does, then with Shardwright's patches."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from engine_settings import fsdp2_settings
from equivalence.cases import LAYOUTS, deepspeed_config
from fresh_process import forget_last_run
from shardwright.plugins.accelerate import configure_cpu_ranks
from shardwright.plugins.peft import add_lora
from shardwright.plugins.transformers.loading import load_on_first_rank, stored_precision
from shardwright.plugins.transformers.training_arguments import save_model_directory

STEPS = 2


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    model: str
    dtype: str | None = "bfloat16"
    layer: str = "LlamaDecoderLayer"
    random: bool = False
    """Create the weights on every rank."""
    lora: bool = False
    offload: bool = False
    own_optimizer: bool = False
    added_tokens: int = 0
    upstream_fails: bool = False


CASES = (
    Case("metered", "metered"),
    Case("tied_with_own_optimizer", "tied", own_optimizer=True, added_tokens=8),
    Case("lora", "tied", lora=True),
    Case("random_with_offload", "tied", random=True, offload=True),
    Case("fused_experts_fp32", "mixtral", dtype="float32", layer="MixtralDecoderLayer"),
    Case("missing_head", "headless"),
    Case("buffers", "buffers", upstream_fails=True),
)


class Resident(threading.Thread):
    """Largest resident memory of this process since it started, beyond what it had then."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        self._process = psutil.Process()
        self._before = self.peak = self._process.memory_info().rss
        self._ends = threading.Event()
        self.start()

    def run(self) -> None:
        while not self._ends.is_set():
            self.peak = max(self.peak, self._process.memory_info().rss)
            time.sleep(0.001)

    def now(self) -> int:
        return self._process.memory_info().rss - self._before

    def end(self) -> int:
        self._ends.set()
        self.join()
        return self.peak - self._before


class WithBuffer(torch.nn.Module):
    """A user's model that is not a Transformers one, with a parameter used twice and a persistent buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(16, 16, bias=False)
        self.outer = torch.nn.Linear(16, 16, bias=False)
        self.outer.weight = self.inner.weight
        self.register_buffer("scale", torch.full((1,), float(os.environ["RANK"]) + 2))
        self.register_buffer("unsaved", torch.ones(1), persistent=False)

    def forward(self, input_ids: Any, labels: Any) -> Any:
        hidden = self.outer(self.inner(torch.nn.functional.one_hot(input_ids % 16, 16).to(self.inner.weight.dtype)))
        return {"loss": (hidden * self.scale).float().square().mean()}


def load(case: Case, directory: Path) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    if case.model == "buffers":
        return WithBuffer()
    dtype = getattr(torch, case.dtype) if case.dtype else None
    if case.random:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), dtype=dtype)
    else:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, use_safetensors=True)
    if case.added_tokens:
        model.resize_token_embeddings(model.config.vocab_size + case.added_tokens)
    return add_lora(model, rank=4, targets="all-linear", fp32_adapters=True) if case.lora else model


def train(case: Case, models: Path, output: Path, prepare: Callable[[], None]) -> dict[str, Any]:
    from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator

    settings = fsdp2_settings(case.layer, cpu_ram_efficient_loading=True)
    if case.model == "buffers":
        del settings["fsdp_config"]["transformer_layer_cls_to_wrap"]
    if case.offload:
        settings["fsdp_config"] |= {"offload_params": True}
    arguments = TrainingArguments(
        str(output),
        per_device_train_batch_size=1,
        max_steps=STEPS,
        optim="sgd",
        learning_rate=0.5,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        bf16=True,
        **settings,
        **configure_cpu_ranks("fsdp2"),
    )
    prepare()
    resident = Resident()
    model = load(case, models / case.model)
    facts: dict[str, Any] = {"loaded": resident.now()}

    class AfterLoading(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            facts["peak"] = resident.end()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.5) if case.own_optimizer else None
    rows = [{"input_ids": [(row * 7 + column * 3) % 512 for column in range(16)]} for row in range(16)]
    kind = type("WithOptimizer", (Trainer,), {"create_optimizer": lambda self, *_: self.optimizer})
    trainer = (kind if optimizer else Trainer)(
        model=model,
        args=arguments,
        train_dataset=[row | {"labels": row["input_ids"]} for row in rows],
        data_collator=default_data_collator,
        callbacks=[AfterLoading()],
    )
    if optimizer is not None:
        trainer.optimizer = optimizer
    del model, optimizer
    trainer.train()
    facts["losses"] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    facts["dtypes"] = sorted({str(parameter.dtype) for parameter in trainer.model.parameters()})
    if case.model == "buffers":
        facts["buffers"] = {name: buffer.item() for name, buffer in trainer.model.named_buffers()}
        facts["saved"] = sorted(trainer.model.state_dict())
    save_model_directory(trainer, str(output))
    return facts


def zero3(model: Path, output: Path) -> dict[str, Any]:
    import deepspeed
    from transformers import AutoModelForCausalLM, TrainingArguments

    arguments = TrainingArguments(
        str(output), deepspeed=deepspeed_config(LAYOUTS["zero3"]), bf16=True, **configure_cpu_ranks("deepspeed")
    )
    resident = Resident()
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, use_safetensors=True)
    facts: dict[str, Any] = {"peak": resident.end(), "ranks": arguments.world_size}
    with deepspeed.zero.GatheredParameters(list(loaded.parameters())):
        tensors = dict(loaded.named_parameters()) | dict(loaded.named_buffers())
        facts["sums"] = {name: tensor.double().sum().item() for name, tensor in tensors.items()}
    return facts


def stock() -> None:
    """Change nothing."""


def main(models: Path, output: Path, engine: str, names: list[str]) -> None:
    # Freed tensors return to the system, so that each case is measured alone.
    ctypes.CDLL(None).mallopt(-3, 2**18)
    record: dict[str, Any] = {}
    if engine == "zero3":
        for name in ("mixtral", "deepseek"):
            record[f"{name}-upstream"] = zero3(models / name, output)
            forget_last_run()
        load_on_first_rank("deepspeed")
        for name in ("mixtral", "deepseek"):
            record[f"{name}-ours"] = zero3(models / name, output)
            forget_last_run()
        (output / f"rank{os.environ['RANK']}.json").write_text(json.dumps(record))
        return
    for way, prepare in (("upstream", stock), ("ours", partial(load_on_first_rank, "fsdp2"))):
        for case in (case for case in CASES if case.name in names):
            name = f"{case.name}-{way}"
            if way == "upstream" and case.upstream_fails:
                try:
                    train(case, models, output / name, prepare)
                    record[name] = None
                except AttributeError as error:
                    record[name] = str(error)
            elif way == "ours" and case.dtype == "float32":
                with stored_precision():
                    record[name] = train(case, models, output / name, prepare)
            else:
                record[name] = train(case, models, output / name, prepare)
            forget_last_run()
    (output / f"rank{os.environ['RANK']}.json").write_text(json.dumps(record))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4:])
