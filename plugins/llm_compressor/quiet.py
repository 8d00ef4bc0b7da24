"""Keeps what llm-compressor says and leaves behind within one call (seen with llmcompressor 0.14.0.1)."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

_LOG = logging.getLogger(__name__)
_LEVELS = ("WARNING", "ERROR", "CRITICAL")
_EXPECTED = (
    "No accelerator available",
    "Failed to find config._name_or_path",
    "Exception during finalizing modifier",
)
"""Warnings about what this package does on purpose, and of a modifier that ends with a run that was interrupted."""
_DISABLED = "LLM_COMPRESSOR_LOG_DISABLED"
_VARIABLES = ("TOKENIZERS_PARALLELISM", "LLM_COMPRESSOR_LOG_FILE")


def import_upstream() -> None:
    """Import llm-compressor without what its first import does to a process.

    llmcompressor 0.14.0.1 `logger.py` removes every handler of loguru, also the application's, and prints from INFO on
    to stdout, unless it is told not to log at all.
    """
    if "llmcompressor" in sys.modules:
        return
    from accelerate.utils import patch_environment

    asked = _DISABLED in os.environ
    with patch_environment(**{_DISABLED: "true"}):
        import llmcompressor.modifiers.gptq
        import llmcompressor.modifiers.quantization
        import llmcompressor.modifiers.transform.awq
        import llmcompressor.modifiers.transform.smoothquant  # noqa: F401  (they look for a GPU, and say when there is none)
        from llmcompressor.logger import LOGGER_CONFIG
    if not asked:
        from loguru import logger

        LOGGER_CONFIG.disabled = False
        logger.enable("llmcompressor")
        # Its own level, which it would have defined when it set its handlers, and without which GPTQ fails.
        logger.level("METRIC", no=38)


@contextmanager
def quiet_upstream() -> Iterator[None]:
    """Turn bars off, pass warnings on to `logging`, write no log file, and put everything back afterwards."""
    import_upstream()
    with ExitStack() as stack:
        stack.enter_context(_environment())
        stack.enter_context(_warnings_to_logging())
        stack.enter_context(without_bars())
        stack.enter_context(_without_tracing_remark())
        stack.enter_context(warnings.catch_warnings())
        # compressed-tensors counts modules in host memory as offloaded, and Transformers warns of those when it saves.
        warnings.filterwarnings("ignore", message="Attempting to save a model with offloaded modules")
        yield


@contextmanager
def named_by_directory(model: Any) -> Iterator[None]:
    """Name the model by a local directory with its config, so that no name is looked up on the Hub.

    llmcompressor 0.14.0.1 reads the config again by `config._name_or_path`, although it holds the model
    (`entrypoints/oneshot.py` `validate_model`); for a model made in memory the name is empty, and it fails.
    """
    with tempfile.TemporaryDirectory(prefix="shardwright-") as directory:
        config = {"model_type": model.config.model_type}
        (Path(directory) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        with _renamed(model, directory):
            yield


@contextmanager
def without_hub_name(model: Any) -> Iterator[None]:
    """Take the model's name away unless it is a directory that holds its config.

    llmcompressor 0.14.0.1 saves `config.json` as the source has it, and looks for that file, for a `recipe.yaml` and
    for Python files under the model's name, on the Hub when it is no path
    (`transformers/compression/compressed_tensors_utils.py`).
    """
    name = getattr(model.config, "_name_or_path", "") or ""
    with _renamed(model, name if name and (Path(name) / "config.json").is_file() else ""):
        yield


@contextmanager
def _renamed(model: Any, name: str) -> Iterator[None]:
    of_config, of_model = model.config._name_or_path, model.name_or_path
    model.config._name_or_path = model.name_or_path = name
    try:
        yield
    finally:
        model.config._name_or_path, model.name_or_path = of_config, of_model


@contextmanager
def _environment() -> Iterator[None]:
    """`oneshot` sets the first for good, with a warning, and writes a file where the second says."""
    saved = {name: os.environ.get(name) for name in _VARIABLES}
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.pop("LLM_COMPRESSOR_LOG_FILE", None)
    try:
        yield
    finally:
        for name, value in saved.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _warnings_to_logging() -> Iterator[None]:
    """loguru 0.7 cannot put a removed handler back, and `disable` would drop warnings: its table is swapped instead."""
    from loguru import logger

    core = logger._core  # type: ignore[attr-defined]
    saved = core.handlers, core.min_level
    core.handlers, core.min_level = {}, math.inf
    handler = logger.add(_pass_on, level="WARNING", format="{message}")
    try:
        yield
    finally:
        with suppress(ValueError):
            logger.remove(handler)
        core.handlers, core.min_level = saved


def _pass_on(message: Any) -> None:
    record = message.record
    # llm-compressor's own level METRIC, number 38, stands above WARNING and says how long each layer took.
    if record["level"].name in _LEVELS and not record["message"].startswith(_EXPECTED):
        _LOG.log(record["level"].no, "%s: %s", (record["name"] or "").partition(".")[0], record["message"])


@contextmanager
def without_bars() -> Iterator[None]:
    """Show none of the bars that libraries draw with tqdm."""
    from tqdm.std import tqdm

    original = tqdm.__init__

    def disabled(bar: Any, *arguments: Any, **named: Any) -> None:
        original(bar, *arguments, **(named | {"disable": True}))

    tqdm.__init__ = disabled
    try:
        yield
    finally:
        tqdm.__init__ = original


@contextmanager
def _without_tracing_remark() -> Iterator[None]:
    """torch 2.13 remarks on `is_fx_tracing`, which Transformers calls, whenever a model is traced."""
    tracing = logging.getLogger("torch.fx._symbolic_trace")
    level = tracing.level
    tracing.setLevel(logging.ERROR)
    try:
        yield
    finally:
        tracing.setLevel(level)
