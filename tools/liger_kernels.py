"""Kernels of liger-kernel by model type: `python tools/liger_kernels.py WHEEL [--write]`.

Reads a release from its wheel (`pip download --no-deps liger-kernel`), without installing it, and prints the difference
from what is stored, or writes `ds_configs/data/liger_kernels.json`.
"""

from __future__ import annotations

import argparse
import ast
import json
import zipfile
from pathlib import Path

from shardwright.ds_configs.specs.model import LIGER_FILE, TEXT_MODEL, Kernels

DATA = Path(__file__).resolve().parents[1] / "ds_configs" / "data" / LIGER_FILE
SOURCE_FILE = "liger_kernel/transformers/monkey_patch.py"
_TABLE = "MODEL_TYPE_TO_APPLY_LIGER_FN"


def kernels_in(source: str) -> Kernels:
    """Return the kernels of each model type from the text of `monkey_patch.py`."""
    body = ast.parse(source).body
    functions = {node.name: node for node in body if isinstance(node, ast.FunctionDef)}
    (table,) = (
        node.value
        for node in body
        if isinstance(node, ast.Assign) and [ast.unparse(name) for name in node.targets] == [_TABLE]
    )
    assert isinstance(table, ast.Dict)
    kernels = {}
    for key, function in zip(table.keys, table.values, strict=True):
        applied = functions[ast.unparse(function)]
        arguments = applied.args
        named = zip(arguments.args[len(arguments.args) - len(arguments.defaults) :], arguments.defaults, strict=True)
        defaults = {argument.arg: getattr(default, "value", None) for argument, default in named}
        switches = {name: default for name, default in defaults.items() if isinstance(default, bool)}
        nested = {TEXT_MODEL: True} if arguments.kwarg and "text_liger_fn" in ast.unparse(applied) else {}
        kernels[str(ast.literal_eval(key))] = switches | nested  # type: ignore[arg-type]
    return kernels


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
