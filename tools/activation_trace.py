"""Derives the stored activation coefficients: `python tools/activation_trace.py --write [FAMILY ...]`.

`--liger` derives those of layers with Liger's kernels, and `--compiled` those of layers that torch.compile
has compiled. `--change '>=5.18'` writes what differs in the installed Transformers as a change for those releases.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

from shardwright.ds_configs.memory.activations import (
    ADDED_FILE,
    DATA_FILE,
    KERNELS_FILE,
    KINDS_FILE,
    Adapter,
    Mode,
)
from shardwright.ds_configs.specs.model import merged
from shardwright.tools.release_changes import CHANGE_HELP, facts_in, with_facts

__all__ = ["derive_coefficients", "main"]

DATA_PATH = Path(__file__).parents[1] / "ds_configs" / "data" / DATA_FILE
ADDED_PATH = DATA_PATH.with_name(ADDED_FILE)
KERNELS_PATH = DATA_PATH.with_name(KERNELS_FILE)
KINDS_PATH = DATA_PATH.with_name(KINDS_FILE)
VERSIONED_PACKAGES = ("torch", "transformers", "peft")
ADAPTERS: tuple[Adapter, ...] = ("none", "lora_all_linear", "lora_attention", "lora_experts")
"""What is trained of text families."""


def attention_paths(family: str, mode: Mode, adapter: Adapter) -> tuple[str, ...]:
    """Attention paths worth storing: only float32 training meets the math kernel on a GPU.

    Adapters take the eager attention of full training, which keeps at least as much.
    """
    from shardwright.tools.activations.families import has_sdpa

    eager = ("eager",) if adapter == "none" else ()
    if not has_sdpa(family):
        return eager
    if mode == "fp32":
        return ("fused", "masked", "math", *eager)
    return ("fused",) if mode == "bf16_autocast" and adapter != "none" else ("fused", "masked", *eager)


def is_stored(family: str, mode: Mode, adapter: Adapter, attention: str) -> bool:
    """Whether a table is possible and worth its size: of adapters on families added later, the common case alone.

    PEFT 0.21 adapts the experts of a mixture too under "all-linear" and materialises each adapted expert matrix: those
    are counted with the weights, and what else lives with them has features of its own.
    """
    from shardwright.tools.activations.families import FIRST, MIXTURES

    if adapter == "lora_experts":
        return family in MIXTURES and attention == "fused"
    if family not in FIRST or (family in MIXTURES and adapter == "lora_all_linear"):
        return adapter == "none" or (mode, adapter, attention) == ("bf16", "lora_all_linear", "fused")
    return True


def derive_coefficients(
    family: str,
    *,
    modes: Iterable[Mode] = get_args(Mode),
    adapters: Iterable[Adapter] = ADAPTERS,
) -> dict[str, Any]:
    """Traces one family and returns its tables by mode, adapter and attention path.

    Raises:
        TraceError: the measured bytes are not linear in the features.
    """
    from shardwright.tools.activations.fit import derive_table
    from transformers.utils import logging

    logging.set_verbosity_error()
    tables: dict[str, Any] = {}
    for mode in modes:
        for adapter in adapters:
            for attention in attention_paths(family, mode, adapter):
                if is_stored(family, mode, adapter, attention):
                    table = derive_table(family, mode=mode, adapter=adapter, attention=attention)
                    tables.setdefault(mode, {}).setdefault(adapter, {})[attention] = table
    return tables


def main(arguments: list[str]) -> int:
    """Derives families and prints their tables, or writes them into the data file next to the stored ones."""
    from shardwright.tools.activations.families import FIRST

    parser = argparse.ArgumentParser(prog="activation_trace", description=__doc__)
    stored = json.loads(DATA_PATH.read_text(encoding="utf-8"))
    known = [*stored["tables"], *json.loads(ADDED_PATH.read_text(encoding="utf-8"))["tables"]]
    parser.add_argument("families", nargs="*", choices=[*known, []], help="default: all")
    for name, derive_kernels in KERNELS.items():
        parser.add_argument(f"--{name}", dest="kernels", action="store_const", const=name, help=derive_kernels.__doc__)
    parser.add_argument("--adapters", nargs="+", choices=ADAPTERS, default=ADAPTERS)
    parser.add_argument("--write", action="store_true", help=f"update {DATA_FILE}")
    parser.add_argument("--change", metavar="RELEASES", help=CHANGE_HELP)
    options = parser.parse_args(arguments)
    if options.kernels:
        kept = json.loads(KERNELS_PATH.read_text(encoding="utf-8"))["tables"][options.kernels]
        families, derive, path = list(kept), KERNELS[options.kernels], KERNELS_PATH
    else:
        families, path = list(FIRST), DATA_PATH
        derive = partial(derive_coefficients, adapters=options.adapters)
    document = json.loads(path.read_text(encoding="utf-8"))
    for family in options.families or families:
        tables: dict[str, Any] = {family: derive(family)}
        tables = {options.kernels: tables} if options.kernels else tables
        found = {"versions": {name: version(name) for name in VERSIONED_PACKAGES}, "tables": tables}
        # A path that the installed release does not have is that of others.
        facts = merged(facts_in(document, version("transformers")), found)
        document = with_facts(document, facts, release=version("transformers"), change=options.change)
        print(f"{family}: derived", file=sys.stderr)
        if options.write:
            path.write_text(render(document), encoding="utf-8")
    if not options.write:
        sys.stdout.write(render(document))
    return 0


def derive_liger(family: str) -> dict[str, Any]:
    """Traces layers that allocate what Liger's kernels do, without a mask, and returns their tables by mode."""
    from shardwright.tools.activations.fit import derive_table
    from transformers.utils import logging

    logging.set_verbosity_error()
    return {
        mode: {"fused": derive_table(family, mode=mode, adapter="none", attention="fused", liger=True)}
        for mode in get_args(Mode)
    }


def derive_compiled(family: str) -> dict[str, Any]:
    """Traces the graphs of a compiled model without a mask in the batch, and returns its tables by mode."""
    from shardwright.ds_configs.memory.activations import load_coefficients
    from shardwright.tools.activations.compiled import derive_compiled_table

    eager = load_coefficients(version("transformers"))["tables"][family]
    return {
        mode: {"fused": derive_compiled_table(family, mode, eager[mode]["none"]["fused"])} for mode in get_args(Mode)
    }


KERNELS = {"liger": derive_liger, "compiled": derive_compiled}
"""Derives the tables of a family with other kernels, by their name in `Kernels`."""


def render(document: Any, depth: int = 0) -> str:
    """Writes JSON with one line for every list or change of one, so that a changed quantity is a changed line."""
    if not isinstance(document, dict) or "column" in document:
        return json.dumps(document, separators=(",", ":"))
    indent = " " * depth
    lines = [f"{indent} {json.dumps(key)}: {render(value, depth + 1)}" for key, value in document.items()]
    return "{\n" + ",\n".join(lines) + f"\n{indent}}}" + ("\n" if depth == 0 else "")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
