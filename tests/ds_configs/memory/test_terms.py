"""Terms of memory and time: each one is declared once, and memory, time, reports and `explain` know it."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import get_args

import predictions
import pytest
from planning import llama, public_model
from shardwright.cli.main import run
from shardwright.cli.page.app import term_rows
from shardwright.ds_configs.memory import estimate as memory_estimate
from shardwright.ds_configs.memory import host
from shardwright.ds_configs.memory.communication import default_zero_options
from shardwright.ds_configs.memory.estimate import declared_terms, estimate_memory
from shardwright.ds_configs.memory.rank_parameters import summed
from shardwright.ds_configs.plan.out_of_memory import OutOfMemory, out_of_memory_text
from shardwright.ds_configs.plan.plan import make_plan, plan_to_dict
from shardwright.ds_configs.specs.hardware import parse_hardware
from shardwright.ds_configs.specs.job import TrainingJob
from shardwright.ds_configs.specs.layout import Layout
from shardwright.ds_configs.specs.second_models import SecondModelRole
from shardwright.ds_configs.specs.terms import Term
from shardwright.ds_configs.step_time import estimate
from shardwright.ds_configs.step_time.estimate import TERMS
from shardwright.trainers.reports.runs import plan_report

SMALL = llama(num_hidden_layers=8, hidden_size=512, intermediate_size=1536, vocab_size=4000)
A100 = parse_hardware("8xA100-80GB", nvme="/nvme:9TB")


@pytest.mark.parametrize("place", ["accelerator", "host", "step"])
def test_every_term_occurs_where_it_is_declared_and_nowhere_else(place):
    assert max(Counter(term.name for term in declared_terms()).values()) == 1
    values = [case["values"] for case in predictions.STORED["cases"]]
    # Stored names have the place first: `accelerator of stage 0: weights`.
    named = {tuple(key.split(": ")) for each in values for key, value in each.items() if ": " in key and value}
    occurring = {name for where, name in named if where.partition(" of ")[0] == place}
    # What only a teacher's loss reads has a term for each role.
    of_teachers = ("hidden_states", "head", "targets", "cache_reads")
    others = {f"{role}_{part}" for role in get_args(SecondModelRole) if role != "teacher" for part in of_teachers}
    # No drawn job recomputes reentrantly; `test_long_sequences.py` has its term.
    others |= {"value_forward", "reentrant_output"}
    # TRL has no offloaded reference or reward model.
    others |= {"reference_weights", "reward_weights"} if place == "host" else set()
    declared = {name for name, term in TERMS.items() if term.lives_on == place}
    if place == "host":
        # Offload moves them.
        declared |= {"weights", "master_weights", "gradients", "optimizer_states"}
        declared |= {"value_gradients", "value_optimizer_states"}
        declared |= {f"{role}_weights" for role in get_args(SecondModelRole)}
    declared -= others
    assert occurring == declared, f"declare its place in the module that computes it: {occurring ^ declared}"
    assert all(term.meaning for term in TERMS.values())


@pytest.mark.parametrize("place", ["accelerator", "host", "step"])
def test_a_new_term_is_known_everywhere_by_its_declaration_and_its_formula(place, monkeypatch, capsys, tmp_path):
    term = Term("dummy_copies", "copies that a test adds", lives_on=place, label="copies of a test")
    monkeypatch.setitem(TERMS, term.name, term)

    bytes_of, host_of, seconds_of = memory_estimate.loss_terms, host.offloaded_states, estimate.offload_seconds
    formulas = {
        "accelerator": lambda step: {
            moment: summed(each, {term.name: 8 * 10**9}) for moment, each in bytes_of(step).items()
        },
        "host": lambda *inputs: (each := host_of(*inputs))._replace(host=each.host | {term.name: 10**9}),
        "step": lambda *inputs, **rates: seconds_of(*inputs, **rates) | {term.name: 1.0},
    }
    module, name = {
        "accelerator": (memory_estimate, "loss_terms"),
        "host": (host, "offloaded_states"),
        "step": (estimate, "offload_seconds"),
    }[place]
    monkeypatch.setattr(module, name, formulas[place])
    plan = make_plan(SMALL, A100, TrainingJob(offload="cpu", seq_len_tokens=1033 + len(place)))
    chosen, data = plan.chosen, plan_to_dict(plan)["chosen"]
    values = {
        "accelerator": (chosen.memory.gpu.terms, data["gpu_memory"]["terms"], "terms", 8 * 10**9, "8.0 GB"),
        "host": (chosen.memory.host.terms, data["host_memory"]["terms"], "host_terms", 8 * 10**9, "8.0 GB"),
        "step": (chosen.time.terms, data["step_time"]["terms"], "step_time", 1.0, "1.0000 s"),
    }
    rows = [row for section in plan_report(plan).sections for table in section.tables for row in table.rows]
    assert [row[1] for row in rows if row[0] == term.label] == [values[place][-1]]
    group = "memory" if place == "accelerator" else place
    assert [(row[0], row[2]) for row in term_rows(plan) if row[1] == term.label] == [(group, values[place][-1])]
    plan.write(tmp_path)
    capsys.readouterr()
    assert run(["explain", str(tmp_path), "--format", "json"]) == 0
    explained = json.loads(capsys.readouterr().out)
    for other, (terms, written, key, amount, _) in values.items():
        assert (terms.get(term.name), term.name in written, term.name in explained[key]) == (
            (amount, True, True) if other == place else (None, False, False)
        )
    assert sum(chosen.time.terms.values()) == pytest.approx(chosen.time.seconds)
    assert sum(chosen.memory.gpu.terms.values()) == chosen.memory.gpu.peak_bytes
    assert sum(chosen.memory.host.terms.values()) == chosen.memory.host.peak_bytes_per_node
    assert run(["explain", "dummy copies"]) == 0 and term.meaning in capsys.readouterr().out
    if place != "step":
        failure = OutOfMemory(phase="backward", error="out of memory", on_host=place == "host")
        assert term.title in out_of_memory_text(plan, failure)


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
