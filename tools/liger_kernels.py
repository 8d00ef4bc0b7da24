"""Kernels of liger-kernel by model type: `python tools/liger_kernels.py WHEEL [--write]`.

Reads a release from its wheel (`pip download --no-deps liger-kernel`), without installing it, and prints the difference
from what is stored, or writes `ds_configs/data/liger_kernels.json`.
"""

from __future__ import annotations

import argparse
import json
import zipfile
from pathlib import Path

from shardwright.ds_configs.models.liger import LIGER_FILE, SOURCE_FILE, kernels_in

DATA = Path(__file__).resolve().parents[1] / "ds_configs" / "data" / LIGER_FILE


def main() -> int:
    """Compare or write; return 1 when the stored kernels differ and are not written."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path, help="wheel of liger-kernel")
    parser.add_argument("--write", action="store_true", help=f"update {LIGER_FILE}")
    options = parser.parse_args()
    kernels = kernels_in(zipfile.ZipFile(options.wheel).read(SOURCE_FILE).decode())
    document = {"versions": {"liger-kernel": options.wheel.name.split("-")[1]}, "kernels": kernels}
    if options.write:
        rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(each)}" for name, each in sorted(kernels.items()))
        DATA.write_text(f'{{"versions": {json.dumps(document["versions"])}, "kernels": {{\n{rows}\n}}}}\n')
        return 0
    stored = json.loads(DATA.read_text())
    changed = sorted(
        name for name in kernels.keys() | stored["kernels"].keys() if kernels.get(name) != stored["kernels"].get(name)
    )
    print(f"{stored['versions']} against {document['versions']}: {', '.join(changed) or 'no difference'}")
    return int(bool(changed))


if __name__ == "__main__":
    raise SystemExit(main())
