"""Tables of docs/measurements/reliability.md: which fault was injected where, how often, and the outcome."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "measurements" / "reliability.json"

TITLES = {
    "kills": "Kills in the middle of a file operation of a save",
    "disks": "Full and failing disks while saving",
    "signals": "Signals to one rank",
    "commands": "Signals through whole commands",
    "checkpoints": "Damaged checkpoints",
    "ranks": "Other ranks than saved the checkpoint",
    "models": "Broken models",
    "hub": "A Hub that misbehaves",
}
EXPECTED = {
    "kills": (
        "Expected: SIGKILL, and a resumed run with the losses of the run without the fault. Of operations of one "
        "kind in a row the first, the second and the last are tried. What a kill in the last ones finds over "
        "already is no row."
    ),
    "disks": (
        "Expected: the run ends with an error, and the resumed one has the losses of the run without the fault, "
        "once the disk works again."
    ),
    "signals": "Expected: exit code 143 or 130 with a complete checkpoint of the step, and its losses when resumed.",
    "commands": (
        "Nothing is warm: command, launcher and ranks are those of users. Expected: the exit code of the signal (1 "
        "where a rank or the launcher was killed or stopped, within the 15 s of `--hang-timeout`), no process left "
        "after 20 s, and after one SIGTERM or SIGINT a complete checkpoint. After a second signal, or a kill of the "
        "command, ranks may have saved or not."
    ),
    "checkpoints": (
        "Expected: the checkpoint before, whose losses are those of the run without the fault; of a whole one with "
        "another layout a refusal."
    ),
    "models": (
        "Expected: exit code 2 or 4, one line that names the model's directory, no traceback, no code run and no "
        "weights left behind. Only `plan` and `rehearse`, which read configuration and headers, may end with 0 "
        "where the damage is in the data, and `plan` where a kernel or code is named, without which it plans."
    ),
}
"""What each part counts as expected, if the introduction of the page does not say it."""


def reliability() -> str:
    """Return the results, part by part."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    parts = [_summary(results)]
    for part, title in TITLES.items():
        if part in results:
            parts.append(_section(title, part, results[part]["rows"]))
            if note := results[part].get("note"):
                parts.append(f"{note}\n")
    if "overhead" in results:
        parts.append(_overhead(results["overhead"]))
    if "soak" in results:
        parts.append(_soak(results["soak"]))
    return "\n".join(parts)


def _summary(results: Mapping[str, Mapping[str, Any]]) -> str:
    lines = ["| part | faults | as expected | seconds |", "|---|---|---|---|"]
    for part, title in TITLES.items():
        if part in results:
            rows = results[part]["rows"]
            good = sum(row["expected"] for row in rows)
            lines.append(
                f"| {title.lower()} (`{part}`) | {len(rows)} | {good} | {results[part]['seconds'] or 'not taken'} |"
            )
    return "\n".join(lines) + "\n"


def _section(title: str, part: str, rows: Sequence[Mapping[str, Any]]) -> str:
    head = f"## {title}\n\n" + (f"{EXPECTED[part]}\n\n" if part in EXPECTED else "")
    if part == "kills":
        return head + _kills(rows)
    lines = ["| where | fault | what happened | |", "|---|---|---|---|"]
    lines += [f"| {row['where']} | {row['fault']} | {_cell(row['happened'])} | {_mark(row)} |" for row in rows]
    return head + "\n".join(lines) + "\n"


def _kills(rows: Sequence[Mapping[str, Any]]) -> str:
    """Kills by engine and rank; those that were not as expected one by one."""
    lines = ["| where | kills | kinds of operations | resumed from | largest difference |", "|---|---|---|---|---|"]
    for where in dict.fromkeys(row["where"] for row in rows):
        own = [row for row in rows if row["where"] == where]
        kinds = sorted({row["fault"].split("(")[-1].rstrip(")") for row in own})
        starts = Counter(row["happened"].split("resumed from ")[-1].split(",")[0] for row in own)
        largest = max(row["happened"].split("difference ")[-1] for row in own)
        shown = ", ".join(f"{start} {count}x" for start, count in sorted(starts.items()))
        lines.append(f"| {where} | {len(own)} | {', '.join(kinds)} | {shown} | {largest} |")
    bad = [row for row in rows if not row["expected"]]
    lines += ["", *(f"- not as expected: {row['where']}, {row['fault']}: {row['happened']}" for row in bad)]
    return "\n".join(lines) + "\n"


def _overhead(found: Mapping[str, Any]) -> str:
    """Return the table of the cost of complete checkpoints and of the guard."""
    lines = [
        "## What it costs\n",
        f"`python benchmarks/checkpoint_overhead.py --write`: {found['ranks']} CPU ranks, a checkpoint of "
        f"{found['checkpoint_megabytes']} MB, {found['rounds']} turns of each way. A turn is a save and the "
        f"{found['steps_after_a_save']} steps after it. A bare save takes {found['save_seconds']:.2f} s and leaves its "
        "bytes in the page cache.\n",
        "| save | training stands still for | turn of save and steps | median difference to the bare turn beside it |",
        "|---|---|---|---|",
        f"| bare | | {found['turn_seconds']['bare']:.2f} s | |",
    ]
    for way in ("waited for", "beside the training"):
        still, turn, added = (found[name][way] for name in ("standstill_of_save", "turn_seconds", "turn_added_of_save"))
        lines.append(f"| made whole, {way} | {still:.1%} of a save | {turn:.2f} s | {added:+.1%} of a save |")
    plain, guarded = (found["step_seconds"][way] for way in ("plain", "guarded"))
    lines += [
        "",
        f"Steps in turns with and without the guard took {guarded:.4f} and {plain:.4f} s "
        f"({found['guarded_by_plain']:+.2%}). The machine had other work,"
        " more than what a save adds to a turn.",
    ]
    return "\n".join(lines) + "\n"


def _soak(found: Mapping[str, Any]) -> str:
    """What many steps leave behind."""
    shown = " / ".join(str(step) for step in found["seen_after"])
    lines = [
        "## Many steps\n",
        f"`python benchmarks/soak.py --write`: {found['steps']} steps on two CPU ranks, one checkpoint every "
        f"{found['save_steps']} steps, as the Trainer alone saves them (bare) and with guard and complete checkpoints "
        f"(guarded). What a rank holds after {shown} steps, and what the launch left.\n",
        "| engine | way | rank | resident MB | growth | descriptors | threads | mapped in /dev/shm | left there |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in found["rows"]:
        cells = [" / ".join(f"{one['bytes'] / 1e6:.0f}" for one in row["seen"])]
        cells.append(f"{row['seen'][-1]['bytes'] / row['seen'][0]['bytes'] - 1:+.1%}")
        for name in ("descriptors", "threads", "shared_names"):
            counts = [str(one[name]) for one in row["seen"]]
            cells.append(counts[0] if len(set(counts)) == 1 else " / ".join(counts))
        left = len(row["left_in_shared_memory"])
        lines.append(f"| {row['engine']} | {row['way']} | {row['rank']} | {' | '.join(cells)} | {left} |")
    lines += ["", found["note"]] if "note" in found else []
    return "\n".join(lines) + "\n"


def _mark(row: Mapping[str, Any]) -> str:
    return "ok" if row["expected"] else "**not as expected**"


def _cell(text: str) -> str:
    """Return what happened without the advice of an error and the arguments of a launcher, which may be cut short."""
    told = re.sub(r"((?:error|rank \d+): [^;]*);.*", r"\1", text)
    return re.sub(r" torchrun --.*", " torchrun ...", told).replace("|", "\\|")
