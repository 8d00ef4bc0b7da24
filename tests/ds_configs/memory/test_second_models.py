"""Second models of any role, frozen, trained or shared: everything that a plan shows knows them."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
from paths import CONFIGS
from planning import llama
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass
from shardwright.cli.main import run
from shardwright.ds_configs.memory.estimate import estimate_memory, second_model_terms, share_moment_terms
from shardwright.ds_configs.memory.host import estimate_host_memory, loading_terms
from shardwright.ds_configs.memory.rank_parameters import RankShare, rank_parameters
from shardwright.ds_configs.plan.out_of_memory import OutOfMemory, out_of_memory_text
from shardwright.ds_configs.plan.plan import Plan, header_lines, make_plan
from shardwright.ds_configs.specs import job as jobs
from shardwright.ds_configs.specs.errors import UsageError
from shardwright.ds_configs.specs.hardware import parse_hardware
from shardwright.ds_configs.specs.layout import Layout
from shardwright.ds_configs.specs.model import ModelSpec
from shardwright.ds_configs.specs.second_models import PlacementOption
from shardwright.ds_configs.step_time.estimate import estimate_step_time
from shardwright.ds_configs.step_time.utilization import utilization
from shardwright.plugins.planning.models import load_model_spec
from shardwright.trainers.rehearsal.files import PlanFiles, scale_plan
from shardwright.trainers.reports.plans import plan_report
from shardwright.trainers.training.script import train_words

ROLES = ("teacher", "reference", "reward", "value")
OpenPlacement = PlacementOption | Literal["shared", "layout"]
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


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class PreferenceJob(jobs.TrainingJob):  # type: ignore[misc]
    """A job of a release whose second models are those of every preference and reinforcement learning method."""

    reference: ModelSpec | None = None
    reference_placement: OpenPlacement = "auto"
    reward: ModelSpec | None = None
    reward_placement: OpenPlacement = "auto"
    value: ModelSpec | None = None
    value_placement: OpenPlacement = "auto"

    __hash__ = jobs.TrainingJob.__hash__


@pytest.fixture(autouse=True)
def _roles(monkeypatch: pytest.MonkeyPatch) -> None:
    old = jobs.ROLES
    for module in list(sys.modules.values()):
        if vars(module).get("ROLES") is old:
            monkeypatch.setattr(module, "ROLES", ROLES)
    monkeypatch.setattr(jobs, "TrainingJob", PreferenceJob)


def job_of(**settings: Any) -> PreferenceJob:
    return PreferenceJob(seq_len_tokens=1024, **settings)


def alone(model: ModelSpec, layout: Layout, **settings: Any) -> Any:
    """Return the terms of a model that is the trained one, at each moment."""
    return share_moment_terms(layout, RankShare(model=model), jobs.TrainingJob(seq_len_tokens=1024, **settings))


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
    parameters = rank_parameters(WIDE, plain, layout)
    host = estimate_host_memory(layout, WIDE, A100, plain, parameters)
    loading = loading_terms(layout, WIDE, A100, plain, parameters)
    offloaded = sum(count for name, count in host.terms.items() if name not in loading)
    assert sum(count for name, count in both.host.terms.items() if name.startswith("value_")) == offloaded
    time, second = estimate_step_time(layout, SMALL, A100, job), estimate_step_time(layout, WIDE, A100, plain)
    assert time.terms["value_step"] == pytest.approx(second.seconds - second.terms["step_overhead"])
    assert time.seconds == pytest.approx(
        estimate_step_time(layout, SMALL, A100, plain).seconds + time.terms["value_step"]
    )
    assert 0 < utilization(time, SMALL, A100, job) < 1


def test_a_reference_that_shares_the_trained_model_has_no_weights() -> None:
    job = job_of(reference=SMALL, method="lora", lora_rank=4)
    plan = make_plan(SMALL, A100, job)
    choice = plan.chosen.placements["reference"]
    assert choice.placement == "shared" and choice.reason.startswith("shared is the simplest placement")
    assert {cost.placement for cost in choice.alternatives} == {
        "replica",
        "sharded",
        "offloaded",
        "quantized",
        "cached",
    }
    for layout in LAYOUTS:
        shared, replica = (job.placed("reference", name) for name in ("shared", "replica"))
        own, other = (second_model_terms(each.second_models[0], layout, each) for each in (shared, replica))
        assert "reference_weights" not in own["step"]
        is_sharded = layout.zero_stage == 3 or layout.engine == "fsdp2"
        assert (own["second_models_forward"].get("reference_gathered", 0) > 0) == is_sharded
        head = own["forward_end"].get("reference_head", 0)
        assert head == (2 * SMALL.embedding_parameters if is_sharded else 0)
        name = "reference_activations"
        assert own["second_models_forward"][name] == other["second_models_forward"][name]
        assert (
            estimate_memory(layout, SMALL, A100, shared).host
            == estimate_memory(layout, SMALL, A100, job_of(method="lora", lora_rank=4)).host
        )
        assert estimate_step_time(layout, SMALL, A100, shared).terms["reference_forward"] > 0
    for wrong, rule in (
        ({"method": "full"}, "reference_placement = 'shared': requires adapters"),
        ({"reference": WIDE}, "reference_placement = 'shared': requires adapters"),
        (
            {"reward": WIDE, "reward_placement": "layout"},
            "reward_placement = 'layout': requires a model that is trained",
        ),
        ({"value": WIDE, "value_placement": "replica"}, "value_placement = 'replica': must be layout: it is trained"),
    ):
        with pytest.raises(UsageError, match=rule):
            make_plan(SMALL, A100, replace(job, reference_placement="shared", **wrong))


def test_four_second_models_are_in_everything_that_a_plan_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model_spec(str(CONFIGS / "Qwen--Qwen2.5-0.5B")).spec
    seconds = {"teacher": WIDE, "reference": model, "reward": WIDE, "value": SMALL}
    requested = {"teacher_placement": "quantized", "reward_placement": "sharded"}
    job = job_of(method="lora", strategy="zero3", **seconds, **requested)
    plan = make_plan(model, A100, job)
    placements = {role: choice.placement for role, choice in plan.chosen.placements.items()}
    assert placements == {"teacher": "quantized", "reference": "shared", "reward": "sharded", "value": "layout"}
    terms = {term.name for term in plan.chosen.terms}
    assert {"teacher_weights", "reward_weights", "value_optimizer_states"} <= terms
    assert {"teacher_forward", "reference_forward", "reward_forward", "value_step"} <= plan.chosen.time.terms.keys()
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
    flags = plan.job.flags(jobs.TrainingJob())
    assert {"--reward-placement", "--value", "--reference", "--teacher"} <= set(flags)
    text = out_of_memory_text(plan, OutOfMemory(phase="backward", error="out of memory"))
    proposed = [line for line in text.splitlines() if line.startswith("    shardwright plan ")]
    assert all(f"--{role}" in line for line in proposed for role in ROLES)
    data = plan.to_dict()
    assert {role: data["chosen"][role]["placement"] for role in ROLES} == placements
    plan.write(tmp_path / "plan")
    monkeypatch.setattr(Plan, "load", classmethod(lambda cls, directory: plan))
    with pytest.raises(UsageError, match=r"has the teacher .*but train uses none"):
        train_words(tmp_path / "plan", ["--dataset", "d"])


def test_a_rehearsal_runs_without_second_models(tmp_path: Path) -> None:
    directory = CONFIGS / "Qwen--Qwen2.5-0.5B"
    model = load_model_spec(str(directory)).spec
    plan = make_plan(model, A100, job_of(reward=WIDE, value=SMALL, strategy="zero3"))
    plan.write(tmp_path / "plan")
    (tmp_path / "work").mkdir()
    config = json.loads((directory / "config.json").read_text())
    small = scale_plan(plan, PlanFiles.read(tmp_path / "plan"), config, ranks=2, steps=2, work=tmp_path / "work")
    assert small.plan.job.second_models == ()
    assert {change.where for change in small.changes} >= {"job: reward", "job: value"}
