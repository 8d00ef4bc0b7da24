"""Experts divided over ranks train as in one process, log what routers do, and leave a normal checkpoint."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import RANKS
from expert_cases import CASES, STEPS, Case, model, reference
from warm_ranks import OnDemand, run_ranks

pytestmark = pytest.mark.distributed

LOSS_TOLERANCE = 1e-5
WEIGHT_TOLERANCE = 1e-4
"""Relative, of a tensor's norm."""
LOGIT_TOLERANCE = 1e-6
NEVER_MOVED = "k_proj.bias"
"""Has no gradient but rounding, because softmax forgets it; Adam makes steps of it all the same."""

Outputs = dict[str, Path]
"""Where ranks left what they did, by the case's name, done when a test asks for it."""


@pytest.fixture(scope="module")
def outputs(deepspeed_cpu_ops: None, tmp_path_factory: pytest.TempPathFactory) -> Outputs:
    directory = tmp_path_factory.mktemp("expert-parallel")

    def run(name: str) -> Path:
        case = next((case for case in CASES if case.name == name), None)
        if case is not None and case.from_pretrained:
            model(case).save_pretrained(directory / f"{name}-start")
        run_ranks([Path(__file__).with_name("expert_cases.py"), directory, name], ranks=RANKS)
        return directory

    return OnDemand(run)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def trained(case: Case) -> Any:
        return reference(case, tmp_path_factory.mktemp("alone"))

    def of(case: Case) -> Any:
        plain = {"zero_stage": 0, "resumed": False, "from_pretrained": False, "checkpointing": False}
        kept = {name: getattr(case, name) for name in ("family", "accumulation", "optimizer", "balanced", "evaluated")}
        return trained(Case(**kept, **plain))

    return of


def history(case: Case, outputs: Outputs) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((outputs[case.name] / f"{case.name}.json").read_text())
    return found


def logged(entries: list[dict[str, Any]], key: str) -> list[float]:
    return [entry[key] for entry in entries if key in entry]


def loaded(case: Case, outputs: Outputs) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(outputs[case.name] / f"{case.name}-saved", dtype=torch.float32).eval()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_ranks_train_as_one_process(case: Case, outputs: Outputs, alone: Any) -> None:
    entries, expected = history(case, outputs), alone(case)
    wanted = expected.state.log_history
    assert len(logged(entries, "loss")) == STEPS
    assert logged(entries, "loss") == pytest.approx(logged(wanted, "loss"), abs=LOSS_TOLERANCE)
    assert logged(entries, "grad_norm") == pytest.approx(logged(wanted, "grad_norm"), abs=LOSS_TOLERANCE)
    assert min(logged(wanted, "grad_norm")) > 0.5, "gradients are clipped"
    assert logged(entries, "eval_loss") == pytest.approx(logged(wanted, "eval_loss"), abs=LOSS_TOLERANCE)
    state = loaded(case, outputs).state_dict()
    for name, value in expected.model.state_dict().items():
        if not name.endswith(NEVER_MOVED):
            assert (state[name] - value).norm() <= WEIGHT_TOLERANCE * value.norm(), name


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_saved_model_equals_the_trained_model(case: Case, outputs: Outputs) -> None:
    logits = torch.load(outputs[case.name] / f"{case.name}.logits.pt", weights_only=True)
    with torch.no_grad():
        found = loaded(case, outputs)(input_ids=torch.arange(24)[None]).logits
    torch.testing.assert_close(found, logits, atol=LOGIT_TOLERANCE, rtol=0)
    saved = sorted(path.name for path in (outputs[case.name] / f"{case.name}-saved").iterdir())
    assert saved == ["config.json", "generation_config.json", "model.safetensors"]
    config = json.loads((outputs[case.name] / f"{case.name}-saved" / "config.json").read_text())
    assert config.get("output_router_logits", False) == (case.balanced or "deepseek" in case.family)


@pytest.mark.parametrize("case", [one for one in CASES if one.balanced], ids=lambda case: case.name)
def test_model_returns_the_logits_of_its_routers(case: Case, outputs: Outputs) -> None:
    logits = torch.load(outputs[case.name] / f"{case.name}.router_logits.pt", weights_only=True)
    with torch.no_grad():
        expected = loaded(case, outputs)(input_ids=torch.arange(24)[None]).router_logits
    assert len(logits) == len(expected) == 2
    for found, one in zip(logits, expected, strict=True):
        torch.testing.assert_close(found, one, atol=LOGIT_TOLERANCE, rtol=0)


@pytest.mark.parametrize("case", [one for one in CASES if one.balanced], ids=lambda case: case.name)
def test_logged_routing_equals_that_of_one_process(case: Case, outputs: Outputs, alone: Any) -> None:
    entries, trainer = history(case, outputs), alone(case)
    steps = [trainer.routing[first :: case.accumulation] for first in range(case.accumulation)]
    for step, micro_batches in enumerate(zip(*steps, strict=True)):
        load, worst, entropy = routing_of(micro_batches)
        assert logged(entries, "expert_load")[step] == pytest.approx(load, rel=1e-5)
        assert logged(entries, "expert_load_max")[step] == pytest.approx(worst, rel=1e-5)
        assert logged(entries, "router_entropy")[step] == pytest.approx(entropy, rel=1e-5)
    assert logged(entries, "dropped_tokens") == [0.0] * STEPS


def routing_of(micro_batches: Any) -> tuple[float, float, float]:
    layers: list[list[torch.Tensor]] = []
    for logits, mask in micro_batches:
        layers.append([each[mask.bool()] for each in logits])
    joined = [torch.cat(parts) for parts in zip(*layers, strict=True)]
    counts = [torch.bincount(each.topk(2).indices.flatten(), minlength=each.shape[1]).double() for each in joined]
    load = [(count.max() / count.mean()).item() for count in counts]
    entropy = torch.stack([torch.distributions.Categorical(logits=each).entropy().mean() for each in joined]).mean()
    return sum(load) / len(load), max(load), entropy.item()


def test_deepspeed_still_requires_marked_expert_groups(outputs: Outputs) -> None:
    """Fails when ZeRO-2 takes the Trainer's groups as they are: `mark_expert_groups` can go then."""
    reported = json.loads((outputs["without-workarounds"] / "without_mark_expert_groups.json").read_text())["reported"]
    assert "None of the param groups are marked as MoE" in reported


def test_deepspeed_still_clips_experts_by_the_wrong_norm(outputs: Outputs, alone: Any) -> None:
    """Fails when clipping without ZeRO counts the experts of all ranks: `clip_by_the_whole_norm` can go then."""
    embedding = torch.load(outputs["without-workarounds"] / "without_clip_by_the_whole_norm.pt", weights_only=True)
    case = Case(family=CASES[0].family)
    wanted = alone(case).model.get_input_embeddings().weight
    assert (embedding - wanted).norm() > WEIGHT_TOLERANCE * wanted.norm()
