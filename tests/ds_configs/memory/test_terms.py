"""Terms of memory and time: each one is declared once, and memory, time, reports and `explain` know it."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import get_args

from planning import llama, public_model
from shardwright.cli.main import run
from shardwright.ds_configs.memory import host, offload
from shardwright.ds_configs.memory.communication import default_zero_options
from shardwright.ds_configs.memory.estimate import declared_terms, estimate_memory, share_moment_terms
from shardwright.ds_configs.memory.rank_parameters import rank_shares
from shardwright.ds_configs.plan.plan import make_plan, plan_to_dict
from shardwright.ds_configs.specs.hardware import parse_hardware
from shardwright.ds_configs.specs.job import TrainingJob
from shardwright.ds_configs.specs.layout import Layout
from shardwright.ds_configs.specs.second_models import PLACEMENTS, SecondModelRole
from shardwright.ds_configs.specs.terms import Term
from shardwright.ds_configs.step_time import estimate
from shardwright.ds_configs.step_time.estimate import TERMS, estimate_step_time
from shardwright.trainers.reports.plans import plan_report

SMALL = llama(num_hidden_layers=8, hidden_size=512, intermediate_size=1536, vocab_size=4000)
MIXTURE = public_model("Qwen/Qwen3-30B-A3B")
A100 = parse_hardware("8xA100-80GB", nvme="/nvme:9TB")
NODES = parse_hardware("2x4xA100-80GB", nvme="/nvme:9TB")
TWO_STEPS = {"gradient_accumulation_steps": 2}


def zero(stage, model=SMALL, **changes):
    sizes = {"dp_replicate": 8} if stage == 0 else {"dp_shard": 8}
    options = replace(
        default_zero_options(model, TrainingJob(), stage=stage),
        hpz_partition_size=changes.pop("hpz", 1),
        parameter_buffer_elements=1000,
    )
    return Layout(**{"engine": "deepspeed", "zero_stage": stage, "zero": options, **sizes, **changes})


def cases():
    """Layouts, models and jobs that together have every term."""
    yield Layout(engine="ddp", dp_replicate=8, **TWO_STEPS), SMALL, {}
    yield Layout(engine="fsdp2", dp_shard=8, gradient_checkpointing=True), SMALL, {"loss": "chunked"}
    yield Layout(engine="fsdp2", dp_shard=8, offload_optimizer="cpu", offload_param="cpu"), SMALL, {}
    yield Layout(engine="fsdp2", dp_shard=4, cp=2), SMALL, {"seq_len_tokens": 4096}
    yield zero(0), SMALL, {}
    yield zero(1, **TWO_STEPS), SMALL, {}
    yield zero(1, dp_shard=4, pp=2, gradient_accumulation_steps=4), SMALL, {}
    yield zero(2, dp_shard=4, tp=2), SMALL, {}
    yield zero(2, dp_shard=4, sp=2), SMALL, {}
    yield zero(2, ep=8), MIXTURE, {}
    yield zero(2, offload_optimizer="cpu"), SMALL, {}
    yield zero(3, hpz=4, gradient_checkpointing=True), SMALL, {"method": "qlora"}
    yield zero(3, offload_optimizer="nvme", offload_param="nvme"), SMALL, {}
    yield (
        zero(3, gradient_checkpointing=True, tiled_mlp=True, offloaded_checkpoints=8),
        SMALL,
        {"seq_len_tokens": 65536},
    )
    yield zero(3, gradient_checkpointing=True), MIXTURE, {"method": "lora"}
    yield zero(2, tiled_mlp=True), SMALL, {}
    yield zero(2, dp_shard=512), SMALL, {}
    # Layers that are too fast to hide copies of their inputs, and gathers that are too slow to be hidden.
    narrow = llama(num_hidden_layers=8, hidden_size=256, intermediate_size=256, vocab_size=100)
    inputs = {"gradient_checkpointing": True, "offloaded_checkpoints": 8, "micro_batch_size": 4096}
    yield Layout(engine="ddp", dp_replicate=8, **inputs), narrow, {"seq_len_tokens": 256}
    yield zero(3, hpz=4), public_model("meta-llama/Llama-3.1-8B"), {"seq_len_tokens": 128}
    for placement in PLACEMENTS:
        yield zero(3), SMALL, {"teacher": SMALL, "teacher_placement": placement}


def test_every_term_is_declared_once_and_every_declared_term_occurs():
    counts = Counter(term.name for term in declared_terms())
    assert counts.keys() <= TERMS.keys() and max(counts.values()) == 1
    assert all(term.meaning for term in TERMS.values())
    seen: dict[str, set[str]] = {"accelerator": set(), "host": set(), "time": set()}
    for layout, model, settings in cases():
        job, hardware = TrainingJob(**settings), NODES if layout.zero.hpz_partition_size > 1 else A100
        memory = estimate_memory(layout, model, hardware, job)
        seen["accelerator"] |= memory.gpu.terms.keys()
        for share in rank_shares(layout, model, job):
            seen["accelerator"] |= {name for terms in share_moment_terms(layout, share, job).values() for name in terms}
        seen["host"] |= memory.host.terms.keys()
        seen["time"] |= estimate_step_time(layout, model, hardware, job).terms.keys()
    everywhere = set().union(*seen.values())
    assert everywhere <= TERMS.keys(), "declare them in TERMS of the module that computes them"
    assert all(TERMS[name].lives_on == "host" for name in seen["host"])
    roles = set(get_args(SecondModelRole)) - {"teacher"}
    planned = {name for name in TERMS if not any(role in name for role in roles)}
    assert planned - everywhere == set(), "no layout has them"


def test_a_new_term_is_in_memory_time_reports_json_and_explain(monkeypatch, capsys):
    """Declared and computed in one module, here `offload`, it needs no line elsewhere."""
    term = Term("dummy_copies", "copies that a test adds", lives_on="host", label="copies of a test")
    monkeypatch.setitem(TERMS, term.name, term)
    plain_bytes, plain_seconds = offload.offload_terms, offload.offloaded_step_seconds
    monkeypatch.setattr(host, "offload_terms", lambda *place: plain_bytes(*place) | {term.name: 10**9})
    monkeypatch.setattr(
        estimate, "offloaded_step_seconds", lambda *step, **rates: plain_seconds(*step, **rates) | {term.name: 1.0}
    )
    plan = make_plan(SMALL, A100, TrainingJob(offload="cpu", seq_len_tokens=1033))
    chosen = plan.chosen
    assert chosen.memory.host.terms[term.name] == 8 * 10**9
    assert chosen.memory.host.peak_bytes_per_node == sum(chosen.memory.host.terms.values())
    assert chosen.time.terms[term.name] == 1.0
    assert [(t.bytes, t.seconds) for t in chosen.terms if t.name == term.name] == [(8 * 10**9, None), (None, 1.0)]
    rows = [row for section in plan_report(plan).sections for table in section.tables for row in table.rows]
    assert [row[1] for row in rows if row[0] == term.label] == ["8.0 GB", "1.0000 s"]
    data = plan_to_dict(plan)["chosen"]
    assert term.name in data["host_memory"]["terms"] and term.name in data["step_time"]["terms"]
    assert run(["explain", "dummy copies"]) == 0
    assert term.meaning in capsys.readouterr().out


def test_worked_example_of_the_docstring_has_every_term_of_its_plan():
    model, job = public_model("meta-llama/Llama-3.1-8B"), TrainingJob()
    options = default_zero_options(model, job, stage=3)
    layout = Layout(engine="deepspeed", zero_stage=3, dp_shard=8, gradient_checkpointing=True, zero=options)
    memory = estimate_memory(layout, model, parse_hardware("8xA100-80GB"), job)
    text, sizes = str(estimate_memory.__doc__), model.dimensions
    rows = re.findall(r"^ +(\w+) {1,}(\S.*?) {2,}([\d,]+)$", text, re.MULTILINE)
    symbols = {"P": model.parameter_count, "N": 8, "L": sizes.num_layers, "h": sizes.hidden_size, "d": sizes.head_dim}
    symbols |= {"V": sizes.vocab_size, "T": job.seq_len_tokens, "tensors": memory.gpu.allocated_bytes}
    for name, formula, count in rows:
        assert memory.gpu.terms[name] == int(count.replace(",", "")) == round(eval(formula, {}, symbols)), name  # noqa: S307
    assert memory.gpu.terms.keys() == {name for name, _, _ in rows}
    for symbol, value in re.findall(r"\b([A-Z]|h|d) = (\d+)", text):
        assert symbols[symbol] == int(value), symbol
    shown = (memory.gpu.peak_bytes, memory.gpu.allocated_bytes, memory.gpu.phases["step"], *memory.host.terms.values())
    assert all(f"{count:,}" in text for count in shown)
    assert memory.gpu.phase == "loss" and memory.host.terms.keys() == {"processes"}
