"""Inject every fault into every engine or command, and record the outcomes: `python -m faults --help`.

    cd tests && python -m faults kills --results ../docs/measurements/reliability.json

Results go into a JSON file, part by part, which `make docs` shows as tables on the page of reliability.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent / "distributed")]

from faults import campaigns  # noqa: E402

_DOCS = Path(__file__).parent.parent.parent / "docs" / "measurements"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m faults", description="Inject faults into runs.", allow_abbrev=False
    )
    parser.add_argument("part", choices=campaigns.PARTS)
    parser.add_argument("--engines", nargs="+", default=list(campaigns.ENGINES), choices=campaigns.ENGINES)
    parser.add_argument("--only", default="", metavar="REGEX", help="only faults whose location and name match")
    parser.add_argument("--results", type=Path, default=_DOCS / "reliability.json", metavar="FILE.json")
    flags = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="faults-"))
    began = time.monotonic()
    rows: list[campaigns.Row] = []
    try:
        for row in campaigns.run(flags.part, directory, campaigns.Choice(flags.engines, flags.only)):
            rows.append(row)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        seconds = round(time.monotonic() - began)
        _keep(flags.results, flags.part, rows, seconds, anew=not flags.only)
    unexpected = [row for row in rows if not row["expected"]]
    print(f"{flags.part}: {len(rows)} faults in {seconds} s, {len(unexpected)} not as expected")
    for row in unexpected:
        print(json.dumps(row))
    return int(bool(unexpected))


def _keep(results: Path, part: str, rows: list[campaigns.Row], seconds: int, *, anew: bool) -> None:
    """Write the rows of a part; some of them take the places of those that were tried before."""
    known = json.loads(results.read_text()) if results.exists() else {}
    before = {"seconds": 0, "rows": []} if anew else known.get(part, {"seconds": 0, "rows": []})
    places = {(row["where"], row["fault"]): row for row in [*before["rows"], *rows]}
    known[part] = {"seconds": before["seconds"] + seconds, "rows": list(places.values())}
    results.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
