"""Models with layers of several kinds: what the planner offers for engines, axes and trainers, and what happens.

`python benchmarks/hybrid_legality.py --write` trains shrunken ones for two steps on two CPU ranks, holds the losses
against one process, and makes docs/measurements/hybrids.md; names of classes train these alone. Axes that are rejected
are tried all the same. `--stored` judges what was found before by the legality of today. A cell that is offered and
fails, or loses otherwise, fails the command.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "distributed")]
FOUND = Path(__file__).with_suffix(".json")
PAGE = ROOT / "docs" / "measurements" / "hybrids.md"

Row = dict[str, str]
"""`class`, `layout`, `state` (passes, refused, broken) and what was `said`."""


def main() -> int:
    """Train or read the stored rows, print the page, and return 1 if an offered axis fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("classes", nargs="*", help="default: all")
    parser.add_argument("--layouts", default="", help="columns, separated by commas; default: all")
    parser.add_argument("--write", action="store_true", help="store what was found, and write the page")
    parser.add_argument("--stored", action="store_true", help="train nothing")
    flags = parser.parse_args()
    rows = stored()
    if not flags.stored:
        for row in trained(flags.classes, [name for name in flags.layouts.split(",") if name]):
            print(*row.values(), file=sys.stderr, flush=True)
            rows = [one for one in rows if (one["class"], one["layout"]) != (row["class"], row["layout"])] + [row]
    text = page(rows)
    if flags.write:
        lines = sorted(json.dumps(row, sort_keys=True) for row in rows)
        FOUND.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")
        PAGE.write_text(text, encoding="utf-8")
    else:
        print(text)
    return int(bool(offered_in_vain(rows)))


def stored() -> list[Row]:
    """Return what was found before."""
    found: list[Row] = json.loads(FOUND.read_text(encoding="utf-8")) if FOUND.exists() else []
    return found


def trained(classes: Iterable[str], layouts: Iterable[str]) -> Iterator[Row]:
    """Yield what training did, class by class, so that one that hangs costs the others nothing."""
    import session
    from family_sweep.hybrids import HYBRIDS, LAYOUTS, findings

    opened = session.open_session()
    try:
        for name in list(classes) or HYBRIDS:
            with tempfile.TemporaryDirectory(prefix="hybrids-") as directory:
                asked = [(name, layout) for layout in list(layouts) or LAYOUTS]
                for class_name, layout, found in findings(asked, Path(directory)):
                    yield {"class": class_name, "layout": layout, "state": found.state, "said": found.said}
    finally:
        opened.close()


def offered_in_vain(rows: Iterable[Row]) -> list[Row]:
    """Return what the planner offers although it fails, or loses otherwise than one process."""
    from family_sweep.hybrids import verdict

    return [row for row in rows if row["state"] == "broken" and not verdict(row["class"], row["layout"])]


def refused_in_vain(rows: Iterable[Row]) -> list[Row]:
    """Return what the planner rejects although the training equals that of one process."""
    from family_sweep.hybrids import verdict

    return [row for row in rows if row["state"] == "passes" and verdict(row["class"], row["layout"])]


def page(rows: Iterable[Row]) -> str:
    """Return docs/measurements/hybrids.md."""
    from family_sweep.checks import LOSS_TOLERANCE
    from family_sweep.hybrids import HYBRIDS, LAYOUTS, verdict

    found: dict[tuple[str, str], Any] = {(row["class"], row["layout"]): row for row in rows}
    reasons: dict[str, int] = {}
    lines = [f"| class | {' | '.join(LAYOUTS)} |", "|---" * (len(LAYOUTS) + 1) + "|"]
    for name in HYBRIDS:
        cells = []
        for layout in LAYOUTS:
            errors, row = verdict(name, layout), found.get((name, layout))
            cells.append(_cell(errors, row, reasons))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    notes = [f"{number}. {text}" for text, number in reasons.items()]
    kinds = [f"- {name}: {what}" for name, (what, _) in HYBRIDS.items()]
    counted = [row for row in rows if (row["class"], row["layout"]) in found]
    passing = sum(row["state"] == "passes" and not verdict(row["class"], row["layout"]) for row in counted)
    return "\n".join(
        [
            "# Models with layers of several kinds",
            "",
            "What the planner offers for shrunken models of these classes, beside what two steps of training on two",
            f"CPU ranks did (fp32, SGD; losses within {LOSS_TOLERANCE:.0e} of one process).",
            "`python benchmarks/hybrid_legality.py --write` makes this page.",
            "",
            *kinds,
            "",
            "✓ is offered, and has the losses of one process. A rejected layout has the number of its reason, and",
            "the result without the rejection: ✗ fails, ≠ has other losses, = has the same losses. Stages of",
            "a pipeline are written for each family: there is nothing to try. sp and tp run with ZeRO-1, ep with",
            "ZeRO-2, cp with FSDP2; LoRA adapts all linear layers; QAT rounds to W4A16 and is judged by its own",
            "command.",
            "",
            *lines,
            "",
            f"Offered and equal: {passing}; offered but not equal: {len(offered_in_vain(counted))}; "
            f"rejected although equal: {len(refused_in_vain(counted))}.",
            "",
            "## Reasons",
            "",
            *notes,
            "",
        ]
    )


def _cell(errors: tuple[str, ...], row: Row | None, reasons: dict[str, int]) -> str:
    if not errors and row is None:
        return ""
    if not errors and row is not None and row["state"] == "passes":
        return "✓"
    said = errors[0] if errors else row["said"] if row is not None else ""
    number = reasons.setdefault(" ".join(said.split())[:300], len(reasons) + 1)
    if not errors:
        return f"rejected ({number})" if row is not None and row["state"] == "refused" else f"**broken** ({number})"
    if row is None:
        return f"rejected ({number})"
    if row["state"] == "passes":
        return f"rejected ({number}) ="
    loses_otherwise = row["state"] == "broken" and row["said"][:1].isdigit()
    return f"rejected ({number}) {'≠' if loses_otherwise else '✗'}"


if __name__ == "__main__":
    raise SystemExit(main())
