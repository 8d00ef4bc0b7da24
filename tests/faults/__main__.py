"""Kill a rank in, or fail, each file operation of a save of every engine: `cd tests && python -m faults kills`."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent / "distributed")]

from faults import campaigns  # noqa: E402
from faults.layouts import ENGINES  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m faults", allow_abbrev=False)
    parser.add_argument("part", choices=campaigns.PARTS)
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--only", default="", metavar="REGEX", help="only faults whose location and name match")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as directory:
        rows = list(campaigns.run(flags.part, Path(directory), campaigns.Choice(flags.engines, flags.only)))
    unexpected = [row for row in rows if not row["expected"]]
    print(f"{flags.part}: {len(rows)} faults, {len(unexpected)} not as expected")
    for row in unexpected:
        print(json.dumps(row))
    return int(bool(unexpected))


if __name__ == "__main__":
    sys.exit(main())
