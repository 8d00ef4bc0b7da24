"""Rules of resuming: which differences between the saving and the resuming run are refused, converted or remarked.

`RULES` is the table; `docs/guides/checkpoints.md` shows the same one. Without it the Trainer of Transformers 5.17.0
goes on in silence: it takes the learning rate of the checkpoint for a new one, starts the optimizer anew where the
checkpoint has the states of another engine, and counts steps of another batch or another order of the samples as done.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ...ds_configs.specs.errors import Fault
from .selection import Selection

Action = Literal["refused", "converted", "remarked"]
_ANEW = "go on as the checkpoint was trained, or start anew from its weights by naming it as the model"
_MISSING = object()


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """Consequence of a fact of the checkpoint that is not that of the run."""

    fact: str
    """Key of `run_facts`."""
    action: Action
    """What becomes of the run."""
    why: str
    """What would go wrong, or what is done about it."""


RULES = (
    Rule(fact="engine", action="refused", why="each engine keeps its optimizer in a format of its own"),
    Rule(fact="zero_stage", action="refused", why="each stage divides the optimizer states in another way"),
    Rule(fact="axes", action="refused", why="tensors and optimizer states are divided by these axes"),
    Rule(fact="world_size", action="converted", why="random states of the ranks, as dropout draws them, begin anew"),
    Rule(fact="global_batch_size", action="refused", why="the steps that are done would mean other samples"),
    Rule(fact="seed", action="refused", why="the samples would come in another order, some of them twice"),
    Rule(fact="data", action="refused", why="the samples that are done would be others"),
    Rule(fact="model", action="refused", why="the optimizer states belong to other parameters"),
    Rule(fact="trained", action="refused", why="the optimizer states belong to other parameters"),
    Rule(fact="precision", action="refused", why="the states are kept in other formats"),
    Rule(fact="optimizer", action="refused", why="the states of one rule mean nothing to another"),
    Rule(fact="learning_rate", action="refused", why="the schedule of the checkpoint would go on with the old one"),
    Rule(fact="schedule", action="refused", why="the learning rate would jump"),
    Rule(fact="weight_decay", action="refused", why="the checkpoint's would be taken for it"),
    Rule(fact="max_grad_norm", action="remarked", why="later steps are clipped by the new one"),
    Rule(fact="max_steps", action="remarked", why="the rest of the schedule follows the new length"),
    Rule(fact="micro_batch_size", action="remarked", why="the global batch is the same"),
    Rule(fact="plan", action="remarked", why="the run is compared with the new plan"),
    Rule(fact="versions", action="remarked", why="other versions may compute other losses"),
)


def compared(saved: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[list[Fault], list[str]]:
    """Return what forbids to go on, and what is worth a remark.

    Facts that only one of both runs knows are not compared.
    """
    faults, remarks = [], []
    for rule in RULES:
        before, after = saved.get(rule.fact, _MISSING), now.get(rule.fact, _MISSING)
        if before is _MISSING or after is _MISSING or before == after:
            continue
        action, why, fix = _action(rule, saved, now)
        if action == "refused":
            shown = f"the checkpoint was saved with {before}: {why}"
            faults.append(Fault(where=f"resume: {rule.fact}", value=after, rule=shown, fix=fix))
        else:
            remarks.append(f"resume: {rule.fact} was {before} and is now {after}: {why}")
    return faults, remarks


def _action(rule: Rule, saved: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[Action, str, str]:
    if rule.fact == "world_size" and saved.get("axes"):
        fix = f"launch {saved[rule.fact]} ranks, or start anew from its weights by naming it as the model"
        return "refused", "stages and axes keep their ranks", fix
    return rule.action, rule.why, _ANEW


def finished_faults(selection: Selection, facts: Mapping[str, Any], max_steps: int) -> list[Fault]:
    """Refuse to go on with what is done: the Trainer of Transformers 5.17.0 would take one more step.

    Args:
        selection: The checkpoint.
        facts: Those of the run that would go on.
        max_steps: Its optimizer steps; 0 or less where only its epochs are known.
    """
    if selection.record.facts.get("max_steps") == facts.get("max_steps"):
        state = json.loads((selection.path / "trainer_state.json").read_text(encoding="utf-8"))
        max_steps = state["max_steps"]
    if not 0 < max_steps <= selection.record.step:
        return []
    fix = "raise the steps or epochs, or take the weights of the checkpoint"
    rule = f"all of {max_steps} steps are done"
    return [Fault(where="resume", value=selection.path.name, rule=rule, fix=fix)]
