"""What the grids of metered memory share: cases that train on CPU ranks, stored readings, and the tables of a page."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
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
    """Of the file with readings beside this one."""
    document: Path
    cases: Callable[[], Sequence[Any]]
    case_of: Callable[..., Any]
    """Makes a case from the fields in a reading."""
    worker_file: str
    """Script beside this one, which each rank runs with a file of cases and a file for readings."""
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
        worker = Path(__file__).with_name(self.worker_file)
        with tempfile.TemporaryDirectory() as directory:
            for ranks in sorted({case.ranks for case in cases}):
                chosen = [asdict(case) for case in cases if case.ranks == ranks]
                wanted, output = Path(directory) / f"{ranks}.json", Path(directory) / f"{ranks}.jsonl"
                wanted.write_text(json.dumps(chosen), encoding="utf-8")
                launch = ["torchrun", "--nproc-per-node", str(ranks), "--master-port", str(free_port())]
                command = python_arguments([*launch, str(worker), str(wanted), str(output)])
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


def _show(line: str) -> None:
    if line.startswith("measured "):
        print(line, file=sys.stderr)


def fullest(records: Sequence[Record]) -> Record:
    """Return the record of the rank with the highest peak."""
    return max(records, key=lambda record: record.get("peak_bytes", 0))


def run_cases(
    case_of: Callable[..., Any],
    measure: Callable[[Any], Record],
    combine: Callable[[Sequence[Record]], Record] = fullest,
) -> None:
    """Measure, on every rank, the cases of the file in the first argument; rank 0 adds a line each to the second."""
    import torch

    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from fresh_process import forget_last_run

    for values in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        case = case_of(**values)
        records: list[Any] = [measure(case)]
        if torch.distributed.is_initialized():
            own, records = records[0], [None] * case.ranks
            torch.distributed.all_gather_object(records, own)
        if os.environ.get("RANK", "0") == "0":
            combined = combine(records)
            with Path(sys.argv[2]).open("a", encoding="utf-8") as file:
                file.write(json.dumps({"case": asdict(case), **combined}) + "\n")
            print("measured", case.name, combined.get("failed", ""), flush=True)
        forget_last_run()
