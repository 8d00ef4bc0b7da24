"""Page of a rehearsal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..charts.kinds import curves, stacks
from .page import Chart, Page, Section, Table, Tile
from .words import plain, short_name

_WORDS = {True: "passed", False: "FAILED", None: "not reached"}


def rehearsal_page(data: Mapping[str, Any]) -> Page:
    """Return the report of `rehearsal.json`."""
    plan, passed = data["plan"], data["passed"]
    done = sum(check["passed"] is True for check in data["checks"])
    failure = next((check for check in data["checks"] if check["passed"] is False), None)
    worst = _largest_difference(data)
    tiles = (
        Tile(label="Rehearsal", value="passed" if passed else "failed", state="good" if passed else "bad",
             detail="" if failure is None else f"at {failure['name']}"),
        Tile(label="Checks passed", value=f"{done} of {len(data['checks'])}"),
        Tile(label="Ranks and steps", value=f"{data['ranks']} × {data['steps']}",
             detail=f"{data['nodes']} launcher{'s' if data['nodes'] > 1 else ''}, {data['seconds']:.0f} s in all"),
        *(() if worst is None else (Tile(label="Tensors, measured beside predicted", value=f"{worst:+.2f} %",
                                         detail="largest difference of a phase, fullest rank"),)),
    )  # fmt: skip
    losses = [(step + 1, loss) for step, loss in enumerate(data["losses"])]
    return Page(
        kind="Rehearsal",
        title=short_name(plan["model"]),
        subtitle=f"{plan['strategy']}, planned for {plan['hardware']}, on {data['ranks']} CPU ranks with a small model",
        tiles=tiles,
        sections=tuple(
            section for section in (_checks(data), _memory(data), _losses(losses), _changes(data)) if section
        ),
        command=data.get("command", ""),
        versions=data.get("versions", {}),
        files=("rehearsal.json",),
        series={"training loss, nats a token": losses},
        measures={"checks passed": float(done), "seconds in all": data["seconds"]},
    )


def _totals(data: Mapping[str, Any]) -> list[tuple[str, int, int]]:
    """Return measured and predicted bytes of each phase that has both."""
    found = []
    for phase, roles in data["measured"].items():
        if phase in data["predicted"]:
            predicted = {name: count for name, count in data["predicted"][phase].items() if name != "terms"}
            found.append((phase, sum(roles.values()), sum(predicted.values())))
    return found


def memory_bars(data: Mapping[str, Any]) -> list[tuple[str, Mapping[str, float], bool]]:
    """Return the MB of each phase by role, measured and predicted, as `stacks` takes them."""
    bars: list[tuple[str, Mapping[str, float], bool]] = []
    for phase, roles in data["measured"].items():
        bars.append((f"{phase}\nmeasured", {role: count / 1e6 for role, count in roles.items()}, False))
        predicted = data["predicted"].get(phase, {})
        shown = {role: count / 1e6 for role, count in predicted.items() if role != "terms"}
        bars.append((f"{phase}\npredicted", shown, True))
    return bars


def _largest_difference(data: Mapping[str, Any]) -> float | None:
    found = [100 * (measured / predicted - 1) for _, measured, predicted in _totals(data) if predicted]
    return max(found, key=abs, default=None)


def _checks(data: Mapping[str, Any]) -> Section:
    rows = [(check["name"].replace("_", " "), _WORDS[check["passed"]], check["detail"]) for check in data["checks"]]
    table = Table(headings=("check", "result", "what was seen"), rows=rows, figures=False)
    return Section(heading="Checks", tables=(table,))


def _memory(data: Mapping[str, Any]) -> Section | None:
    totals = _totals(data)
    if not totals:
        return None
    rows = [
        (phase, f"{measured / 1e6:.2f}", f"{predicted / 1e6:.2f}",
         f"{100 * (measured / predicted - 1):+.2f} %" if predicted else "–")
        for phase, measured, predicted in totals
    ]  # fmt: skip
    parts = [
        (f"{phase}: {role}", f"{count / 1e6:.3f}", f"{data['predicted'][phase].get(role, 0) / 1e6:.3f}")
        for phase, _, _ in totals
        for role, count in data["measured"][phase].items()
    ]
    chart = Chart(
        title="Tensors on the fullest rank, MB",
        draw=stacks(memory_bars(data), "MB"),
        note="Hatched: what the plan's formulas say for the same small model. Bytes are counted, not sampled: they "
        "have no error.",
    )
    together = Table(headings=("phase", "measured, MB", "predicted, MB", "difference"), rows=rows)
    by_role = Table(headings=("phase and role", "measured, MB", "predicted, MB"), rows=parts, caption="By role.")
    return Section(heading="Memory", charts=(chart,), tables=(together, by_role))


def _losses(losses: list[tuple[int, float]]) -> Section | None:
    if not losses:
        return None
    note = "Mean over the ranks."
    chart = Chart(title="Loss by step, nats a token", draw=curves({"loss": losses}, "nats a token"), note=note)
    return Section(heading="Training", charts=(chart,))


def _changes(data: Mapping[str, Any]) -> Section | None:
    rows = [(change["where"], plain(change["before"]), plain(change["after"])) for change in data["changes"]]
    if not rows:
        return None
    table = Table(headings=("value", "in the plan", "rehearsed"), rows=rows, figures=False)
    return Section(heading="Scaled to fit this machine", tables=(table,), folded=True)
