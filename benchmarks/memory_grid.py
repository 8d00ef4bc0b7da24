"""What the grids of metered memory share: cases that train on CPU ranks, stored readings, and the tables of a page."""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from page_parts import with_part
from shardwright.ds_configs.specs.model import FIRST_RELEASE
from shardwright.plugins.launching.launch import Launch, free_port, launch_ranks, python_arguments
from shardwright.plugins.releases import transformers_release

SECONDS_PER_CASE = 90

Record = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Cases, dataclasses with `ranks` and `name`, whose metered memory a page shows beside predictions."""

    name: str
    """Of the module, and of the file with readings beside it."""
    document: Path
    cases: Callable[[], Sequence[Any]]
    case_of: Callable[..., Any]
    """Makes a case from the fields in a reading."""
    rows: Callable[[Iterable[Record]], list[Any]]
    """Predicts measured cases."""
    tables: Callable[[Sequence[Any]], Mapping[str, str]]
    """Tables of rows, by their name on the page."""
    verdict: Callable[[Sequence[Any]], tuple[bool, str]]
    """Whether the targets are met, and a sentence with the figures."""

    @property
    def measured(self) -> Path:
        return Path(__file__).with_name(f"{self.name}.json")

    def measure(self, cases: Sequence[Any]) -> list[dict[str, Any]]:
        """Train every case on CPU ranks, those with the same number of ranks in one launch, and return the readings."""
        records: list[dict[str, Any]] = []
        worker = Path(__file__).with_name("memory_worker.py")
        with tempfile.TemporaryDirectory() as directory:
            for ranks in sorted({case.ranks for case in cases}):
                chosen = [asdict(case) for case in cases if case.ranks == ranks]
                wanted, output = Path(directory) / f"{ranks}.json", Path(directory) / f"{ranks}.jsonl"
                wanted.write_text(json.dumps(chosen), encoding="utf-8")
                launch = ["torchrun", "--nproc-per-node", str(ranks), "--master-port", str(free_port())]
                command = python_arguments([*launch, str(worker), self.name, str(wanted), str(output)])
                limit = 120 + SECONDS_PER_CASE * len(chosen)
                launch_ranks(Launch(arguments=tuple(command)), timeout_seconds=limit, on_line=_show)
                records += [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
        release = transformers_release()
        if release != FIRST_RELEASE:
            records = [record | {"release": release} for record in records]
        return records

    def main(self, description: str | None) -> int:
        """Measure the grid, or read what was measured before, and print or write every table; return the exit code."""
        parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--only", metavar="REGEX", help="cases whose name matches")
        parser.add_argument("--stored", action="store_true", help=f"predict the measurements in {self.measured.name}")
        parser.add_argument("--write", action="store_true", help=f"store them, and tables in {self.document.name}")
        options = parser.parse_args()
        every = self.cases()
        cases = [case for case in every if re.search(options.only or "", case.name)]
        if not cases:
            parser.error(f"--only {options.only} matches no case")
        stored = json.loads(self.measured.read_text(encoding="utf-8")) if self.measured.exists() else []
        newest = {self.case_of(**record["case"]).name: record for record in stored}
        if not options.stored:
            newest |= {self.case_of(**record["case"]).name: record for record in self.measure(cases)}
        found = self.rows([newest[case.name] for case in cases if case.name in newest])
        for table in self.tables(found).values():
            print(table, end="\n\n")
        passed, sentence = self.verdict(found)
        print(sentence)
        if options.write:
            ordered = [newest[case.name] for case in every if case.name in newest]
            lines = ",\n".join(json.dumps(record, sort_keys=True) for record in ordered)
            self.measured.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
            found = self.rows(ordered)
            text = with_part(self.document.read_text(encoding="utf-8"), "summary", self.verdict(found)[1] + ".")
            for name, table in self.tables(found).items():
                text = with_part(text, name, table)
            self.document.write_text(text, encoding="utf-8")
        return 0 if passed else 1


def error_table(heading: str, groups: Mapping[str, Sequence[float]]) -> str:
    """Return the number, the mean and the largest of the errors of each group as Markdown, without empty groups."""
    lines = [f"| {heading} | cases | MAPE | worst |", "|---|---|---|---|"]
    lines += [f"| {name} | {len(own)} | {mean(own):.2%} | {max(own):.2%} |" for name, own in groups.items() if own]
    return "\n".join(lines)


def total_line(errors: Sequence[float]) -> str:
    """Return the last line of a table of errors."""
    return f"| **all** | {len(errors)} | **{mean(errors):.2%}** | **{max(errors):.2%}** |"


def megabytes(count: int) -> str:
    return f"{count / 1e6:.2f}"


def line(*cells: object) -> str:
    """Return one line of a table as Markdown."""
    return f"| {' | '.join(map(str, cells))} |"


def _show(line: str) -> None:
    if line.startswith("measured "):
        print(line, file=sys.stderr)
