"""Contain llm-compressor's output and side effects within one call (observed with llmcompressor 0.14.0.1)."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .. import patches
from ..launching.messages import only_errors_logged

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

_LOG = logging.getLogger(__name__)
_LEVELS = ("WARNING", "ERROR", "CRITICAL")
_EXPECTED = (
    "No accelerator available",
    "Failed to find config._name_or_path",
    "Exception during finalizing modifier",
)
"""Warnings about what Shardwright does on purpose, and about a modifier of an interrupted run."""
_DISABLED = "LLM_COMPRESSOR_LOG_DISABLED"
_VARIABLES = ("TOKENIZERS_PARALLELISM", "LLM_COMPRESSOR_LOG_FILE")


def import_upstream() -> None:
    """Import llm-compressor without the side effects of its first import.

    llmcompressor 0.14.0.1 `logger.py` removes every handler of loguru, including the application's, and prints INFO
    messages to stdout, unless its log is disabled.
    """
    if "llmcompressor" in sys.modules:
        return
    from accelerate.utils import patch_environment

    is_disabled_by_user = _DISABLED in os.environ
    with patch_environment(**{_DISABLED: "true"}):
        import llmcompressor.modifiers.gptq
        import llmcompressor.modifiers.quantization
        import llmcompressor.modifiers.transform.awq
        import llmcompressor.modifiers.transform.smoothquant  # noqa: F401  (they warn if there is no GPU)
    if not is_disabled_by_user:
        from loguru import logger

        patches.assign("enabled-log", False)
        logger.enable("llmcompressor")
        # Its own level, which it defines together with its handlers; GPTQ fails without it.
        logger.level("METRIC", no=38)


@contextmanager
def quiet_upstream() -> Iterator[None]:
    """Disable progress bars and log files, and forward warnings to `logging`; restore everything afterwards."""
    import_upstream()
    with ExitStack() as stack:
        stack.enter_context(_environment())
        stack.enter_context(_warnings_to_logging())
        stack.enter_context(without_bars())
        # torch 2.13 warns about `is_fx_tracing`, which Transformers calls, when a model is traced.
        stack.enter_context(only_errors_logged("torch.fx._symbolic_trace"))
        stack.enter_context(warnings.catch_warnings())
        # compressed-tensors counts modules in host memory as offloaded, about which Transformers warns at saving.
        warnings.filterwarnings("ignore", message="Attempting to save a model with offloaded modules")
        yield


@contextmanager
def named_by_directory(model: PreTrainedModel) -> Iterator[None]:
    """Set the model's name to a local directory with its config, so that no name is looked up on the Hub.

    llmcompressor 0.14.0.1 reads the config again by `config._name_or_path`, although it has the model
    (`entrypoints/oneshot.py` `validate_model`); a model created in memory has an empty name, for which it fails.
    """
    with tempfile.TemporaryDirectory(prefix="shardwright-") as directory:
        config = {"model_type": model.config.model_type}
        (Path(directory) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        with _renamed(model, directory):
            yield


@contextmanager
def without_hub_name(model: PreTrainedModel) -> Iterator[None]:
    """Clear the model's name unless it is a directory that contains its config.

    llmcompressor 0.14.0.1 copies the source's `config.json`, and looks for that file, a `recipe.yaml` and Python files
    under the model's name, on the Hub if it is not a path (`transformers/compression/compressed_tensors_utils.py`).
    """
    name = getattr(model.config, "_name_or_path", "") or ""
    with _renamed(model, name if name and (Path(name) / "config.json").is_file() else ""):
        yield


@contextmanager
def _renamed(model: PreTrainedModel, name: str) -> Iterator[None]:
    of_config, of_model = model.config._name_or_path, model.name_or_path
    model.config._name_or_path = model.name_or_path = name
    try:
        yield
    finally:
        model.config._name_or_path, model.name_or_path = of_config, of_model


@contextmanager
def _environment() -> Iterator[None]:
    """Restore `_VARIABLES`: `oneshot` sets the first permanently, and writes a log file at the path of the second."""
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
    """Replace loguru's table of handlers: loguru 0.7 cannot restore a removed one, and `disable` drops warnings."""
    from loguru import logger

    def forward(message: Any) -> None:
        record = message.record
        # llm-compressor's own level METRIC, number 38, is above WARNING and reports the duration of each layer.
        if record["level"].name in _LEVELS and not record["message"].startswith(_EXPECTED):
            package = (record["name"] or "").partition(".")[0]
            _LOG.log(record["level"].no, "%s: %s", package, record["message"])

    with (
        patches.applied("loguru-handlers", lambda _: {}, resets=True),
        patches.applied("loguru-min_level", lambda _: math.inf, resets=True),
    ):
        handler = logger.add(forward, level="WARNING", format="{message}")
        try:
            yield
        finally:
            with suppress(ValueError):
                logger.remove(handler)


@contextmanager
def without_bars() -> Iterator[None]:
    """Disable the progress bars that libraries draw with tqdm."""

    def disabled(original: Callable[..., None]) -> Callable[..., None]:
        return lambda bar, *arguments, **named: original(bar, *arguments, **(named | {"disable": True}))

    with patches.applied("no-bars", disabled):
        yield


@contextmanager
def all_fixes() -> Iterator[None]:
    """Apply every workaround that a run needs; loading mixtures needs further ones."""
    with no_pinned_memory_without_cuda(), attention_scores_are_not_kept():
        yield


@contextmanager
def no_pinned_memory_without_cuda() -> Iterator[None]:
    """Make AWQ run on hosts without CUDA.

    llmcompressor 0.14.0.1 (`modifiers/transform/awq/base.py` `_apply_smoothing`) always calls
    `IntermediatesCache.pin_memory`, which fails without an accelerator.
    """
    import torch

    if torch.cuda.is_available():
        yield
        return
    with patches.applied("pageable-memory", lambda _: lambda *_, **__: None):
        yield


@contextmanager
def torchvision_is_not_needed() -> Iterator[None]:
    """Load mixtures of experts without torchvision.

    llmcompressor 0.14.0.1 with transformers 5.17.0: linearising experts registers patches, and
    `transformers/monkey_patching.py` `apply_patches` then calls `dir()` on every loaded module of Transformers. Aliases
    of renamed image modules import these, which fails with `ModuleNotFoundError: torchvision`. The aliases are removed
    from `sys.modules` inside the block.
    """
    hidden: dict[str, ModuleType] = {}
    for name, module in list(sys.modules.items()):
        if name.startswith("transformers.") and "__dir__" in vars(module):
            try:
                dir(module)
            except ImportError:
                hidden[name] = sys.modules.pop(name)
    try:
        yield
    finally:
        sys.modules.update(hidden)


@contextmanager
def kept_conversion_mappings() -> Iterator[None]:
    """Restore Transformers' conversion mappings, so that other mixtures of this process load their weights.

    llmcompressor 0.14.0.1 (`modeling/moe/linearize.py` `load_quantizable_moe`) registers how one model's experts are
    written for all models of its type. A later `from_pretrained` of that type in the same process renames no expert,
    finds none, and runs with random ones after a warning. The model keeps its own copy of the mapping for saving.
    """
    from transformers import conversion_mapping

    # Builds the table, if nothing was loaded yet.
    conversion_mapping.get_checkpoint_conversion_mapping("mixtral")
    mappings, registered = (
        conversion_mapping._checkpoint_conversion_mapping_cache,
        conversion_mapping.USER_REGISTERED_MAPPINGS,
    )
    saved_mappings, saved_registered = dict(mappings), set(registered)
    try:
        yield
    finally:
        for current, saved in ((mappings, saved_mappings), (registered, saved_registered)):
            current.clear()
            current.update(saved)


@contextmanager
def attention_scores_are_not_kept() -> Iterator[None]:
    """Keep AWQ from storing attention scores during calibration.

    llmcompressor 0.14.0.1 (`modifiers/transform/awq/base.py` `_run_samples`) keeps all outputs of a module until all
    samples have run, and eager attention returns its scores: 512 samples of 2048 tokens on Llama-3.1-8B are 137 GB.
    Only the first output is used.
    """
    import torch
    from llmcompressor.core import active_session

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def run_samples(modifier: Any, module: torch.nn.Module) -> list[Any]:
        cache = modifier._parent_args_cache[module]
        outputs = []
        for batch in cache.iter_prefetch() if active_session().state.sequential_prefetch else cache:
            output = module(**batch)
            outputs.append(output[0] if isinstance(output, tuple) else output)
        return outputs

    with patches.applied("dropped-attention-scores", lambda _: run_samples):
        yield
