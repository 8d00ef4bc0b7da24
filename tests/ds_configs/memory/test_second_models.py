"""Second models of any role, frozen, trained or shared: everything that a plan shows knows them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from paths import CONFIGS
from planning import llama
from shardwright.cli.main import run
from shardwright.ds_configs.memory.estimate import estimate_memory, second_model_terms, share_moment_terms
from shardwright.ds_configs.memory.host import estimate_host_memory, loading_terms
from shardwright.ds_configs.memory.rank_parameters import RankShare
from shardwright.ds_configs.plan.out_of_memory import OutOfMemory, out_of_memory_text
from shardwright.ds_configs.plan.plan import Plan, header_lines, make_plan
from shardwright.ds_configs.specs.errors import UsageError
from shardwright.ds_configs.specs.hardware import parse_hardware
from shardwright.ds_configs.specs.job import TrainingJob
from shardwright.ds_configs.specs.layout import Layout
from shardwright.ds_configs.specs.model import ModelSpec
from shardwright.ds_configs.step_time.estimate import estimate_step_time
from shardwright.ds_configs.step_time.utilization import utilization
from shardwright.plugins.planning import load_model_spec
from shardwright.trainers.rehearsal.files import PlanFiles, scale_plan
from shardwright.trainers.reports.runs import plan_report
from shardwright.trainers.training.script import train_words

SMALL = llama(num_hidden_layers=4, hidden_size=512, intermediate_size=1536, vocab_size=4000)
WIDE = llama(num_hidden_layers=2, hidden_size=1024, intermediate_size=2048, vocab_size=4000)
A100 = parse_hardware("8xA100-80GB")
ZERO3 = Layout(engine="deepspeed", zero_stage=3, dp_shard=8)
LAYOUTS = (
    ZERO3,
    replace(ZERO3, zero_stage=2, gradient_accumulation_steps=2),
    replace(ZERO3, offload_optimizer="cpu", offload_param="cpu"),
    Layout(engine="ddp", dp_replicate=8),
    Layout(engine="fsdp2", dp_shard=8, gradient_checkpointing=True),
)


def job_of(**settings: Any) -> TrainingJob:
    return TrainingJob(seq_len_tokens=1024, **settings)


def alone(model: ModelSpec, layout: Layout, **settings: Any) -> Any:
    """Return the terms of a model that is the trained one, at each moment."""
    return share_moment_terms(layout, RankShare(model=model), TrainingJob(seq_len_tokens=1024, **settings))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_trained_second_model_needs_what_it_needs_alone(layout: Layout) -> None:
    """Its peak is that of its own step, its states stay, and host bytes and seconds are added."""
    job, plain = job_of(value=WIDE), job_of()
    (value,) = job.second_models
    assert value.trained and value.planned_placement == "layout"
    moments, own = second_model_terms(value, layout, job), alone(WIDE, layout)
    steps = [terms for moment, terms in own.items() if moment != "init"]
    assert sum(moments["second_models_forward"].values()) == max(sum(terms.values()) for terms in steps)
    states = {"weights", "master_weights", "optimizer_states"}
    for terms in (moments["step"], moments["forward_end"]):
        kept = sum(terms.values())
        least = sum(min(step.get(name, 0) for step in steps) for name in states)
        assert least <= kept <= min(sum(step.values()) for step in steps)
        assert not terms.get("value_activations"), "those of its step are gone"
    both = estimate_memory(layout, SMALL, A100, job)
    first = estimate_memory(layout, SMALL, A100, plain)
    kept = sum(moments["step"].values())
    assert both.gpu.phases["step"] == first.gpu.phases["step"] + kept
    assert both.host.nvme_bytes_per_node == first.host.nvme_bytes_per_node == 0
    host = estimate_host_memory(layout, WIDE, A100, plain)
    loading = loading_terms(layout, WIDE, A100, plain)
    offloaded = sum(count for name, count in host.terms.items() if name not in loading)
    assert sum(count for name, count in both.host.terms.items() if name.startswith("value_")) == offloaded
    time, second = estimate_step_time(layout, SMALL, A100, job), estimate_step_time(layout, WIDE, A100, plain)
    assert time.terms["value_step"] == pytest.approx(second.seconds - second.terms["step_overhead"])
    assert time.seconds == pytest.approx(
        estimate_step_time(layout, SMALL, A100, plain).seconds + time.terms["value_step"]
    )
    assert 0 < utilization(time, SMALL, A100, job) < 1


def test_a_reference_that_shares_the_trained_model_has_no_weights() -> None:
    job = job_of(task="dpo", method="lora", lora_rank=4).completed(SMALL)
    assert job.reference == SMALL
    plan = make_plan(SMALL, A100, job)
    choice = plan.chosen.placements["reference"]
    assert choice.placement == "shared" and choice.reason.startswith("shared is the simplest placement")
    for layout in LAYOUTS:
        shared, replica = (job.placed("reference", name) for name in ("shared", "replica"))
        own, other = (second_model_terms(each.second_models[0], layout, each) for each in (shared, replica))
        is_sharded = layout.zero_stage == 3 or layout.engine == "fsdp2"
        assert "reference_weights" not in own["step"]
        assert (own["forward_end"].get("reference_gathered", 0) > 0) == is_sharded
        assert own["forward_end"]["reference_activations"] == other["forward_end"]["reference_activations"]
        assert (
            estimate_memory(layout, SMALL, A100, shared).host
            == estimate_memory(layout, SMALL, A100, job_of(method="lora", lora_rank=4)).host
        )
        assert estimate_step_time(layout, SMALL, A100, shared).terms["reference_forward"] > 0
    for wrong, rule in (
        ({"method": "full"}, "reference_placement = 'shared': requires adapters"),
        ({"reference": WIDE}, "reference_placement = 'shared': requires adapters"),
        (
            {"task": "grpo", "reward": WIDE, "reward_placement": "shared"},
            "reward_placement = 'shared': requires adapters",
        ),
    ):
        with pytest.raises(UsageError, match=rule):
            make_plan(SMALL, A100, replace(job, reference_placement="shared", **wrong))


def test_a_reference_runs_while_the_activations_of_the_trained_model_exist() -> None:
    layout = Layout(engine="ddp", dp_replicate=8)
    with_reference = job_of(task="dpo", reference=WIDE, reference_placement="replica")
    dpo, orpo = (
        share_moment_terms(layout, RankShare(model=SMALL), job) for job in (with_reference, job_of(task="dpo"))
    )
    during, before = dpo["forward_end"], orpo["forward_end"]
    assert during["activations"] == before["activations"] and during["reference_activations"] > 0
    assert sum(during.values()) - during["reference_weights"] > sum(before.values()) - before["loss"]
    # A pair has two sequences.
    alone = share_moment_terms(layout.changed(micro_batch_size=2), RankShare(model=SMALL), job_of(task="kto"))
    assert alone["forward_end"] == before


def test_phases_of_generation_are_never_added_to_the_update() -> None:
    model = load_model_spec(str(CONFIGS / "Qwen--Qwen2.5-0.5B")).spec
    job = job_of(task="grpo", reward=model, generation="vllm", vllm_memory_share=0.5).completed(model)
    asleep, awake = (replace(job, vllm_sleep=sleep, vllm_tensor_parallel_size=1) for sleep in ("on", "off"))
    layout = replace(ZERO3, zero_stage=2, gradient_accumulation_steps=8)
    phases = {name: estimate_memory(layout, model, A100, each).gpu for name, each in (("on", asleep), ("off", awake))}
    share = round(A100.gpu_bytes * 0.5)
    for phase in ("loss", "backward", "step", "score"):
        assert phases["off"].phases[phase] == phases["on"].phases[phase] + share, phase
    assert phases["on"].phases["generate"] == phases["off"].phases["generate"] > share
    assert phases["on"].phase == "generate" and phases["on"].allocated_bytes == phases["on"].phases["generate"]
    # Every rank gathers all parameters for `generate` under ZeRO-3.
    own = replace(job, generation="transformers", vllm_memory_share=None)
    for stage, gathered in ((2, None), (3, 2 * model.parameter_count)):
        moments = share_moment_terms(replace(layout, zero_stage=stage), RankShare(model=model), own)
        assert moments["generate"].get("generation_weights") == gathered
        cache = 2 * 2 * 8 * 1024 * model.dimensions.num_layers * model.dimensions.key_value_size
        assert moments["generate"]["kv_cache"] == cache + cache // (2 * model.dimensions.num_layers)
    times = {name: estimate_step_time(layout, model, A100, each) for name, each in (("vllm", asleep), ("own", own))}
    assert times["vllm"].terms["generation_decode"] < times["own"].terms["generation_decode"]
    assert times["own"].terms.get("scoring_forward") is None and times["own"].terms["reward_forward"] > 0


def test_three_second_models_are_in_everything_that_a_plan_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model_spec(str(CONFIGS / "Qwen--Qwen2.5-0.5B")).spec
    seconds = {"reference": model, "reward": WIDE, "value": SMALL}
    job = job_of(task="ppo", method="lora", strategy="zero3", reward_placement="sharded", **seconds)
    plan = make_plan(model, A100, job)
    placements = {role: choice.placement for role, choice in plan.chosen.placements.items()}
    assert placements == {"reference": "shared", "reward": "sharded", "value": "layout"}
    terms = {term.name for term in plan.chosen.terms}
    assert {"reward_weights", "value_optimizer_states"} <= terms
    assert {"reference_forward", "reward_forward", "value_step", "generation_decode"} <= plan.chosen.time.terms.keys()
    assert not {"reference_weights", "value_forward"} & terms
    placed = plan.job
    for role, placement in placements.items():
        placed = placed.placed(role, placement)
    memory = estimate_memory(plan.chosen.layout, model, A100, placed)
    assert memory.gpu.terms == plan.chosen.memory.gpu.terms
    report = json.dumps([[section.texts, [t.rows for t in section.tables]] for section in plan_report(plan).sections])
    lines = "\n".join(header_lines(plan, "here"))
    for second in plan.job.second_models:
        assert f"Memory includes the {second.role}" in lines and f"{second.role.capitalize()}: " in report
    assert "gradients of the trained value" in report or "the training step of the value" in report
    assert run(["explain", "value_optimizer_states"]) == 0
    assert "master weights and optimizer states of the trained value" in capsys.readouterr().out
    flags = plan.job.flags(TrainingJob())
    assert {"--task", "--reward-placement", "--value", "--reference"} <= set(flags)
    text = out_of_memory_text(plan, OutOfMemory(phase="backward", error="out of memory"))
    proposed = [line for line in text.splitlines() if line.startswith("    shardwright plan ")]
    assert all(f"--{role}" in line for line in proposed for role in seconds)
    data = plan.to_dict()
    assert {role: data["chosen"][role]["placement"] for role in seconds} == placements
    plan.write(tmp_path / "plan")
    monkeypatch.setattr(Plan, "load", classmethod(lambda cls, directory: plan))
    with pytest.raises(UsageError, match=r"has the reference .*but train uses none"):
        train_words(tmp_path / "plan", ["--dataset", "d"])


def test_a_rehearsal_runs_without_second_models(tmp_path: Path) -> None:
    directory = CONFIGS / "Qwen--Qwen2.5-0.5B"
    model = load_model_spec(str(directory)).spec
    plan = make_plan(model, A100, job_of(task="ppo", reward=WIDE, value=SMALL, strategy="zero3"))
    plan.write(tmp_path / "plan")
    (tmp_path / "work").mkdir()
    config = json.loads((directory / "config.json").read_text())
    small = scale_plan(plan, PlanFiles.read(tmp_path / "plan"), config, ranks=2, steps=2, work=tmp_path / "work")
    assert small.plan.job.second_models == ()
    assert {change.where for change in small.changes} >= {"job: reward", "job: value"}
