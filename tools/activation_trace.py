"""Derives the stored activation coefficients: `python tools/activation_trace.py --write [FAMILY ...]`.

`--selective` derives those of layers that keep their products, of dense families alone.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

from shardwright.ds_configs.memory.activation_kinds import KINDS_FILE
from shardwright.ds_configs.memory.activations import (
    ADDED_FILE,
    DATA_FILE,
    SELECTIVE_FILE,
    Adapter,
    Mode,
    load_coefficients,
)
from shardwright.plugins.activations.request import trace_model

__all__ = ["derive_coefficients", "main", "trace_model"]

DATA_PATH = Path(__file__).parents[1] / "ds_configs" / "data" / DATA_FILE
SELECTIVE_PATH = DATA_PATH.with_name(SELECTIVE_FILE)
ADDED_PATH = DATA_PATH.with_name(ADDED_FILE)
KINDS_PATH = DATA_PATH.with_name(KINDS_FILE)
VERSIONED_PACKAGES = ("torch", "transformers", "peft")


def attention_paths(mode: Mode, adapter: Adapter) -> tuple[str, ...]:
    """Attention paths worth storing: only float32 training meets the math kernel on a GPU.

    Adapters take the eager attention of full training, which keeps at least as much.
    """
    eager = ("eager",) if adapter == "none" else ()
    if mode == "fp32":
        return ("fused", "masked", "math", *eager)
    return ("fused",) if mode == "bf16_autocast" and adapter != "none" else ("fused", "masked", *eager)


def is_stored(family: str, mode: Mode, adapter: Adapter, attention: str) -> bool:
    """Whether a table is possible and worth its size: of adapters on families added later, the common case alone.

    PEFT 0.21 adapts the experts of a mixture too under "all-linear" and materialises each adapted expert matrix: those
    are counted with the weights, and what else lives with them has features of its own.
    """
    from shardwright.plugins.activations.families import FIRST, MIXTURES

    if family not in FIRST or (family in MIXTURES and adapter == "lora_all_linear"):
        return adapter == "none" or (mode, adapter, attention) == ("bf16", "lora_all_linear", "fused")
    return True


def derive_coefficients(
    family: str,
    *,
    modes: Iterable[Mode] = get_args(Mode),
    adapters: Iterable[Adapter] = get_args(Adapter),
) -> dict[str, Any]:
    """Traces one family and returns its tables by mode, adapter and attention path.

    Raises:
        TraceError: the measured bytes are not linear in the features.
    """
    from shardwright.plugins.activations.fit import derive_table
    from transformers.utils import logging

    logging.set_verbosity_error()
    tables: dict[str, Any] = {}
    for mode in modes:
        for adapter in adapters:
            for attention in attention_paths(mode, adapter):
                if is_stored(family, mode, adapter, attention):
                    table = derive_table(family, mode=mode, adapter=adapter, attention=attention)
                    tables.setdefault(mode, {}).setdefault(adapter, {})[attention] = table
    return tables


def main(arguments: list[str]) -> int:
    """Derives families and prints their tables, or writes them into the data file next to the stored ones."""
    from shardwright.plugins.activations.families import FIRST, MIXTURES

    parser = argparse.ArgumentParser(prog="activation_trace", description=__doc__)
    known = load_coefficients()["tables"]
    parser.add_argument("families", nargs="*", choices=[*known, []], help="default: all")
    parser.add_argument("--selective", action="store_true", help=f"derive what {SELECTIVE_FILE} holds")
    parser.add_argument("--write", action="store_true", help=f"update {DATA_FILE}")
    options = parser.parse_args(arguments)
    if options.selective:
        return _selective(options.families or [name for name in known if name not in MIXTURES], write=options.write)
    tables: dict[str, Any] = json.loads(DATA_PATH.read_text(encoding="utf-8"))["tables"]
    for family in options.families or FIRST:
        tables[family] = derive_coefficients(family)
        print(f"{family}: derived", file=sys.stderr)
        document = {"versions": {name: version(name) for name in VERSIONED_PACKAGES}, "tables": tables}
        if options.write:
            DATA_PATH.write_text(render(document), encoding="utf-8")
    if not options.write:
        sys.stdout.write(render(document))
    return 0


def _selective(families: Iterable[str], *, write: bool) -> int:
    from shardwright.plugins.activations.fit import derive_selective_table
    from transformers.utils import logging

    logging.set_verbosity_error()
    document = json.loads(SELECTIVE_PATH.read_text(encoding="utf-8"))
    document["versions"] = {name: version(name) for name in VERSIONED_PACKAGES}
    for family in families:
        document["tables"][family] = {
            mode: {
                attention: derive_selective_table(family, mode=mode, attention=attention)
                for attention in ("fused", "masked")
            }
            for mode in get_args(Mode)
        }
        print(f"{family}: derived", file=sys.stderr)
        if write:
            SELECTIVE_PATH.write_text(render(document), encoding="utf-8")
    if not write:
        sys.stdout.write(render(document))
    return 0


def render(document: Any, depth: int = 0) -> str:
    """Writes JSON with one line for every list, so that a change of one quantity is one changed line."""
    if not isinstance(document, dict):
        return json.dumps(document, separators=(",", ":"))
    indent = " " * depth
    lines = [f"{indent} {json.dumps(key)}: {render(value, depth + 1)}" for key, value in document.items()]
    return "{\n" + ",\n".join(lines) + f"\n{indent}}}" + ("\n" if depth == 0 else "")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
