"""Every causal language model and encoder-decoder of Transformers: distillation, rounding, `quantize`, sp, tp and pp.

`python benchmarks/families.py --write` trains them all, small, and writes docs/measurements/family_trainers.md; names
of classes sweep these alone. Each cell passes, is rejected with a reason, or is broken, which fails the command. It
takes a quarter of an hour on two cores. `--records FILE` keeps what was found, and goes on where a file ends.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "distributed")]
PAGE = ROOT / "docs" / "measurements" / "family_trainers.md"
MARKS = {"passes": "✓", "refused": "rejected", "late": "rejected by the check", "broken": "**broken**"}
_LATE = "the checkpoint did not pass"

Row = tuple[str, str, str, str]
"""Class, check, state, and what was said."""


def main() -> int:
    """Sweep, and write or print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("classes", nargs="*", help="default: all")
    parser.add_argument("--write", action="store_true", help="write docs/measurements/family_trainers.md")
    parser.add_argument("--records", type=Path, help="a file of JSON lines, one for each cell")
    flags = parser.parse_args()
    known = [tuple(json.loads(line)[:4]) for line in _lines(flags.records)]
    rows: list[Row] = [*known]  # type: ignore[list-item]
    for row in swept(flags.classes, done={(row[0], row[1]) for row in rows}):
        rows.append(row)
        print(*row[:3], file=sys.stderr)
        if flags.records:
            with flags.records.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    text = page(rows)
    if flags.write:
        PAGE.write_text(text, encoding="utf-8")
    else:
        print(text)
    return int(any(state == "broken" for _, _, state, _ in rows))


def swept(classes: Iterable[str], done: set[tuple[str, str]]) -> Iterator[Row]:
    """Yield the cells of classes that are not known yet."""
    import session
    from family_sweep.checks import CHECKS, finding
    from family_sweep.layouts import AXES, findings
    from family_sweep.tiny_configs import every_class, tiny_model

    opened = session.open_session()
    try:
        built = []
        for name in classes or every_class():
            if (name, "build") in done:
                continue
            try:
                tiny_model(name)
            except Exception as error:
                yield name, "build", "no", f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[-1]}"
                continue
            built.append(name)
            for check in CHECKS:
                if (name, check) not in done:
                    found = finding(check, name)
                    yield name, check, found.state, found.said
        asked = [(name, axis) for name in built for axis in AXES if (name, axis) not in done]
        with tempfile.TemporaryDirectory(prefix="families-") as directory:
            for name, axis, found in findings(asked, Path(directory)):
                yield name, axis, found.state, found.said
    finally:
        opened.close()


def page(rows: Iterable[Row]) -> str:
    """Return the page: counts, one line for each class, and every reason."""
    cells: dict[str, dict[str, tuple[str, str]]] = {}
    for name, check, state, said in rows:
        kind = "late" if state == "refused" and _LATE in said else state
        cells.setdefault(name, {})[check] = (kind, _reason(said))
    checks = ("distillation", "QAT export", "quantize", "sp", "tp", "pp")
    built = {name: own for name, own in cells.items() if "build" not in own}
    counts = Counter((check, own[check][0]) for own in built.values() for check in checks if check in own)
    reasons: dict[str, int] = {}
    lines = [
        "# Trainers of every family",
        "",
        f"The {len(cells)} causal language models and encoder-decoders of the installed Transformers, each as small as",
        "its configuration allows, with random weights. `python benchmarks/families.py --write` makes this page.",
        "",
        "- distillation: two steps of `DistillationTrainer`, the loss in the place of the head within 1e-5 of the one",
        "  from whole logits;",
        "- QAT export: a step of training with W4A16, the checkpoint loaded and compared with the trained model;",
        "- quantize: `shardwright quantize --method rtn`, what was written loaded and compared;",
        "- sp, tp, pp: two steps on two ranks, losses within 1e-5 of one process.",
        "",
        "An empty cell was not run.",
        "",
        "| | " + " | ".join(checks) + " |",
        "|---|" + "--:|" * len(checks),
    ]
    for state, shown in (("passes", "passes"), ("refused", "rejected before work"), ("late", MARKS["late"])):
        lines.append(f"| {shown} | " + " | ".join(str(counts[check, state]) for check in checks) + " |")
    lines.append("| broken | " + " | ".join(str(counts[check, "broken"]) for check in checks) + " |")
    lines += ["", "| class | " + " | ".join(checks) + " |", "|---|" + "---|" * len(checks)]
    for name, own in sorted(built.items()):
        shown = [_shown(own.get(check), reasons) for check in checks]
        lines.append(f"| {name} | " + " | ".join(shown) + " |")
    lines += ["", "## Reasons", "", *(f"{number}. {reason}" for reason, number in reasons.items())]
    lines += ["", f"## Not built ({len(cells) - len(built)})", ""]
    lines += [f"- {name}: {own['build'][1]}" for name, own in sorted(cells.items()) if "build" in own]
    return "\n".join(lines) + "\n"


def _shown(found: tuple[str, str] | None, reasons: dict[str, int]) -> str:
    if found is None:
        return ""
    state, said = found
    return MARKS[state] if state == "passes" else f"{MARKS[state]} ({reasons.setdefault(said, len(reasons) + 1)})"


def _reason(said: str) -> str:
    """Return what was said without places of this run, and without what differs from class to class."""
    import re

    text = re.sub(r"/\S*family-\S*/(source|export|quantized)\S*", "the model", said)
    text = re.sub(r"; it is in .*", "", text).replace("|", "\\|")
    return text[:240]


def _lines(file: Path | None) -> list[Any]:
    return file.read_text(encoding="utf-8").splitlines() if file is not None and file.is_file() else []


if __name__ == "__main__":
    raise SystemExit(main())
