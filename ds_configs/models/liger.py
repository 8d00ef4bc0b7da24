"""Kernels of liger-kernel by model type: those of the installed release, or of the tested one."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from ..specs.model import stored_facts

LIGER_FILE = "liger_kernels.json"
FUSED_LOSS = "fused_linear_cross_entropy"
SOURCE_FILE = "liger_kernel/transformers/monkey_patch.py"
TEXT_MODEL = "text_model"
"""The kernels of a nested text model, which its family enables; configurations of the Trainer do not reach them."""
_TABLE = "MODEL_TYPE_TO_APPLY_LIGER_FN"

Kernels = Mapping[str, Mapping[str, bool]]
"""The kernels of each model type, with Liger's defaults."""


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


@cache
def liger_kernels() -> Kernels:
    """Return the kernels of each model type; liger-kernel silently ignores other types."""
    try:
        file = Path(str(distribution("liger-kernel").locate_file(SOURCE_FILE)))
        return kernels_in(file.read_text(encoding="utf-8"))
    except (PackageNotFoundError, OSError):
        kernels: Kernels = stored_facts(LIGER_FILE, "0")["kernels"]
        return kernels


def has_liger_loss(model_type: str, *, alone: bool) -> bool:
    """Return whether Liger computes head and loss of a model type together, as it does unless it is disabled.

    `alone` is without its other kernels.
    """
    kernels = liger_kernels().get(model_type, {})
    return kernels.get(FUSED_LOSS, False) and not (alone and TEXT_MODEL in kernels)
