"""Every causal language model and encoder-decoder of Transformers: distillation, rounding, `quantize`, sp, tp and pp.

`python benchmarks/families.py --write` trains small models of all of them. It writes the counts to
docs/measurements/family_trainers.md, and the result of each class to build/family_trainers.md. With names of classes,
it trains only these. Each cell passes, is rejected with a reason, or is broken, which fails the command. It takes a
quarter of an hour on two cores. `--records FILE` stores the results; a later call with this file runs the missing ones.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "distributed")]
PAGE = ROOT / "docs" / "measurements" / "family_trainers.md"
DETAILS = ROOT / "build" / "family_trainers.md"
CHECKS = ("distillation", "QAT export", "quantize", "sp", "tp", "pp")
STATES = {
    "passes": "passes",
    "refused": "rejected before work",
    "late": "rejected by the check",
    "broken": "broken",
}
FREQUENT = 4
"""Classes that a reason must reject to be on the page."""
_AFTER_NAMES = ("layers carry a state", "has no loss with", "has no single matrices", "does not use the attention")
"""Phrases of reasons that follow the name of a class, or of its layers."""
MARKS = {"passes": "✓", "refused": "rejected", "late": "rejected by the check", "broken": "**broken**"}
_LATE = "the checkpoint did not pass"

Row = tuple[str, str, str, str]
"""Class, check, state, and the reason or error."""


def main() -> int:
    """Sweep, and write or print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("classes", nargs="*", help="default: all")
    parser.add_argument("--write", action="store_true", help="write the page, and the details to build/")
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
    if flags.write:
        DETAILS.parent.mkdir(exist_ok=True)
        PAGE.write_text(page(rows), encoding="utf-8")
        DETAILS.write_text(details(rows), encoding="utf-8")
    else:
        print(page(rows), details(rows), sep="\n")
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
    """Return the page: counts, and how many classes each reason rejects."""
    cells = _cells(rows)
    built = {name: own for name, own in cells.items() if "build" not in own}
    counts = Counter((check, own[check][0]) for own in built.values() for check in CHECKS if check in own)
    lines = [
        "# Trainers of every family",
        "",
        f"The {len(cells)} causal language models and encoder-decoders of the installed Transformers, each as small as",
        f"its configuration allows, with random weights. {len(built)} of them were built.",
        "",
        "- distillation: two steps of `DistillationTrainer`. The fused loss is within 1e-5 of the loss of full logits.",
        "- QAT export: one training step with W4A16. The checkpoint is loaded and compared with the trained model.",
        "- quantize: `shardwright quantize --method rtn`. The checkpoint is loaded and compared.",
        "- sp, tp, pp: two steps on two ranks. Losses are within 1e-5 of one process.",
        "",
        "| | " + " | ".join(CHECKS) + " |",
        "|---|" + "--:|" * len(CHECKS),
    ]
    for state, shown in STATES.items():
        lines.append(f"| {shown} | " + " | ".join(str(counts[check, state]) for check in CHECKS) + " |")
    lines += [
        "",
        "`python benchmarks/families.py --write` makes this page, and writes the result and reason of each class to",
        "`build/family_trainers.md`.",
        "",
        "## Reasons of rejections",
        "",
        "| check | classes | reason |",
        "|---|--:|---|",
    ]
    rejected = [(check, _kind(own[check][1])) for own in built.values() for check in CHECKS if _is_rejected(own, check)]
    reasons = Counter(rejected)
    frequent = {key: count for key, count in reasons.items() if count >= FREQUENT}
    for (check, kind), count in sorted(frequent.items(), key=lambda item: (CHECKS.index(item[0][0]), -item[1])):
        lines.append(f"| {check} | {count} | {kind} |")
    rare = len(reasons) - len(frequent)
    lines += ["", f"The other {len(rejected) - sum(frequent.values())} rejections have {rare} reasons."]
    return "\n".join(lines) + "\n"


def details(rows: Iterable[Row]) -> str:
    """Return a line for each class, every reason, and the classes that were not built."""
    cells = _cells(rows)
    reasons: dict[str, int] = {}
    lines = ["| class | " + " | ".join(CHECKS) + " |", "|---|" + "---|" * len(CHECKS)]
    for name, own in sorted(cells.items()):
        if "build" not in own:
            lines.append(f"| {name} | " + " | ".join(_shown(own.get(check), reasons) for check in CHECKS) + " |")
    lines += ["", "An empty cell was not run.", "", "## Reasons", ""]
    lines += [f"{number}. {reason}" for reason, number in reasons.items()]
    lines += ["", "## Not built", ""]
    lines += [f"- {name}: {own['build'][1]}" for name, own in sorted(cells.items()) if "build" in own]
    return "\n".join(lines) + "\n"


def _cells(rows: Iterable[Row]) -> dict[str, dict[str, tuple[str, str]]]:
    cells: dict[str, dict[str, tuple[str, str]]] = {}
    for name, check, state, said in rows:
        kind = "late" if state == "refused" and _LATE in said else state
        cells.setdefault(name, {})[check] = (kind, _reason(said))
    return cells


def _is_rejected(own: dict[str, tuple[str, str]], check: str) -> bool:
    return check in own and own[check][0] in ("refused", "late")


def _shown(found: tuple[str, str] | None, reasons: dict[str, int]) -> str:
    if found is None:
        return ""
    state, said = found
    return MARKS[state] if state == "passes" else f"{MARKS[state]} ({reasons.setdefault(said, len(reasons) + 1)})"


def _kind(reason: str) -> str:
    """Return a rejection without its value, its fix, and the names and numbers that differ from class to class."""
    if _LATE in reason:
        return f"{_LATE} verification"
    text = re.sub(r"^[\w .()]+ = .*?: ", "", reason).partition(";")[0]
    for phrase in _AFTER_NAMES:
        if phrase in text:
            text = phrase + text.partition(phrase)[2]
    return re.sub(r" \(\d+ .*?\)", "", text)


def _reason(said: str) -> str:
    """Return what was said without places of this run, and without what differs from class to class."""
    text = re.sub(r"/\S*family-\S*/(source|export|quantized)\S*", "the model", said)
    text = re.sub(r"; it is in .*", "", text).replace("|", "\\|")
    return text[:240]


def _lines(file: Path | None) -> list[Any]:
    return file.read_text(encoding="utf-8").splitlines() if file is not None and file.is_file() else []


if __name__ == "__main__":
    raise SystemExit(main())
