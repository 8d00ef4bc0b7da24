"""`shardwright explain`: explain a written plan, or one term, strategy or rule."""

from __future__ import annotations

import json
from dataclasses import asdict
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

from ...ds_configs.legality.rules import RULES
from ...ds_configs.memory.meanings import KERNEL_MEANINGS, STRATEGY_MEANINGS
from ...ds_configs.plan.plan import Plan
from ...ds_configs.search.reasons import display_name
from ...ds_configs.specs.errors import ConfigError, UsageError
from ...ds_configs.specs.settings import NOT_COVERED
from ...ds_configs.specs.terms import Place, Term
from ...ds_configs.step_time.estimate import TERMS
from ..options import FormatOptions
from ..settings import FILLED, Options, grouped

grouped(FormatOptions)


def explain_command(subject: str, *, options: Annotated[FormatOptions, Options] = FILLED) -> int:
    """Explain a written plan, or a strategy, a memory term or a rule.

    Parameters
    ----------
    subject
        Directory or plan.json of a plan, or a strategy, memory term or rule; `names` lists them.
    """
    name = subject.strip().lower().replace(" ", "_").replace("-", "_").replace(".", "_")
    rules = {rule.__name__: str(rule.__doc__).splitlines()[0] for rule in RULES}
    strategies = {name.replace("-", "_"): meaning for name, meaning in STRATEGY_MEANINGS.items()}
    meanings = {name: term.meaning for name, term in TERMS.items()} | strategies | rules
    meanings |= dict(KERNEL_MEANINGS) | dict(NOT_COVERED)
    try:
        exists = Path(subject).exists()
    except OSError:
        # Longer than a path may be, or in a directory without access.
        exists = False
    if not exists and name == "names":
        print(json.dumps({"schema_version": 1, "names": sorted(meanings)}) if options.as_json else "\n".join(meanings))
        return 0
    if not exists and name in meanings:
        if options.as_json:
            print(json.dumps({"schema_version": 1, "name": name, "meaning": meanings[name]}))
        else:
            from ..show import console

            console().print(f"{name}: {meanings[name]}", markup=False)
        return 0
    if not exists:
        near = [] if _is_written_as_path(subject) else get_close_matches(name, list(meanings), n=3, cutoff=0.5)
        fix = f"did you mean {', '.join(near)}?" if near else "shardwright explain names lists all names"
        rule = "no such file or directory" if _is_written_as_path(subject) else "is not a path, strategy, term or rule"
        raise UsageError(ConfigError(where="subject", value=subject, rule=rule, fix=fix))
    plan = Plan.load(subject)
    if options.as_json:
        chosen = plan.chosen
        explained = {
            "schema_version": 1,
            "model": plan.model.name,
            "strategy": chosen.strategy.label,
            "reason": chosen.reason,
            "phases": chosen.memory.gpu.phases,
            "terms": {t.name: {"bytes": t.bytes, "meaning": t.meaning} for t in _bytes_of(plan, "accelerator")},
            "host_terms": {t.name: {"bytes": t.bytes, "meaning": t.meaning} for t in _bytes_of(plan, "host")},
            "step_time": {
                term.name: {"seconds": term.seconds, "meaning": term.meaning}
                for term in chosen.terms
                if term.seconds is not None
            },
            **({"learned": _learned_dict(plan)} if plan.learned_from else {}),
            "rejected": [{"strategy": other.strategy.label, "reason": other.reason} for other in plan.rejected],
        }
        print(json.dumps(explained, indent=2))
        return 0
    from rich.text import Text

    from ...ds_configs.specs.units import gigabytes
    from ..show import console, memory_bar, print_rows

    out = console()
    gpu = plan.chosen.memory.gpu
    place = f" for {plan.model.name} on {plan.hardware.name}"
    out.print(Text.assemble((display_name(plan.chosen.strategy), "bold"), place))
    out.print(plan.chosen.reason, markup=False)
    out.print(memory_bar(gpu, columns=out.width))
    phases = ", ".join(f"{name} {gigabytes(count)}" for name, count in gpu.phases.items())
    out.print(f"Tensors by phase, GB: {phases}. The largest phase decides.")
    titles: dict[Place, str] = {"accelerator": f"Terms of the {gpu.phase} phase", "host": "Host memory of a node"}
    for place, title in titles.items():
        terms = sorted(_bytes_of(plan, place), key=lambda term: -(term.bytes or 0))
        rows = [(term.title, gigabytes(term.bytes or 0), term.meaning) for term in terms]
        print_rows(out, ("term", "GB", "meaning"), rows, title=title, figures=("GB",), folded={"meaning": 40})
    seconds_of = [(term, term.seconds) for term in plan.chosen.terms if term.seconds is not None]
    rows = [(t.title, f"{seconds:.4f}", t.meaning) for t, seconds in sorted(seconds_of, key=lambda item: -item[1])]
    headings = ("term", "seconds", "meaning")
    print_rows(out, headings, rows, title="Terms of the step's time", figures=headings[1:2], folded={"meaning": 40})
    if plan.learned_from:
        from .calibrate import show_steps

        factor = f"{plan.chosen.time.learned_scale:.2f} times the published prediction"
        out.print(f"{factor}, from the runs below. The published prediction counts as one run.")
        show_steps(plan.learned_from, title="Runs that corrected the step's time, seconds")
    out.print("[bold]Why not another layout[/bold]")
    for other in plan.rejected:
        out.print(f"- {other.reason}", markup=False)
    return 0


def _learned_dict(plan: Plan) -> dict[str, Any]:
    runs = [asdict(step) | {"ratio": step.ratio} for step in plan.learned_from]
    return {"factor": plan.chosen.time.learned_scale, "runs": runs}


def _is_written_as_path(subject: str) -> bool:
    return "/" in subject or subject.endswith(".json")


def _bytes_of(plan: Plan, place: Place) -> list[Term]:
    """Return the terms of a memory with their bytes."""
    return [term for term in plan.chosen.terms if term.bytes is not None and term.lives_on == place]
