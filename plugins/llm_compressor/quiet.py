"""Logging of llm-compressor, and workarounds for its releases (observed with llmcompressor 0.14.0.1)."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .. import patches

if TYPE_CHECKING:
    import torch

_LOG = logging.getLogger(__name__)
_PACKAGES = ("llmcompressor", "compressed_tensors")
_EXPECTED = ("No accelerator available", "Disabling tokenizer parallelism", "Exception during finalizing modifier")
"""Warnings about what always occurs here, and about a modifier of an interrupted run."""


@functools.cache
def import_upstream() -> None:
    """Import llm-compressor once, with its warnings forwarded to `logging`.

    llmcompressor 0.14.0.1 `logger.py` removes every handler of loguru, including the application's, and prints INFO
    messages to stdout, unless its log is disabled.
    """
    from accelerate.utils import patch_environment

    with patch_environment(LLM_COMPRESSOR_LOG_DISABLED="true"):
        import llmcompressor.modifiers.gptq
        import llmcompressor.modifiers.quantization
        import llmcompressor.modifiers.transform.awq
        import llmcompressor.modifiers.transform.smoothquant  # noqa: F401  (they warn if there is no GPU)
    from loguru import logger

    def forward(message: Any) -> None:
        record = message.record
        # llm-compressor's level METRIC is above WARNING and reports the duration of each layer.
        if record["level"].name != "METRIC" and not record["message"].startswith(_EXPECTED):
            _LOG.log(record["level"].no, "%s: %s", record["name"].partition(".")[0], record["message"])

    patches.assign("enabled-log", False)
    logger.enable("llmcompressor")
    # Its own level, which it defines together with its handlers; GPTQ fails without it. Both fail if they are done.
    with suppress(ValueError):
        logger.level("METRIC", no=38)
    # loguru's default handler, which prints all messages to stderr.
    with suppress(ValueError):
        logger.remove(0)
    logger.add(forward, level="WARNING", filter=lambda record: (record["name"] or "").startswith(_PACKAGES))
    # torch 2.13 warns about `is_fx_tracing`, which Transformers calls, when a model is traced.
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)


@contextmanager
def without_bars() -> Iterator[None]:
    """Disable the progress bars that libraries draw with tqdm."""

    def disabled(original: Callable[..., None]) -> Callable[..., None]:
        return lambda bar, *arguments, **named: original(bar, *arguments, **(named | {"disable": True}))

    with patches.applied("no-bars", disabled):
        yield


@contextmanager
def all_fixes() -> Iterator[None]:
    """Let AWQ run without CUDA, and without the attention scores of all samples.

    llmcompressor 0.14.0.1 (`modifiers/transform/awq/base.py`): `_apply_smoothing` pins memory on every host.
    `_run_samples` keeps all outputs of a module until all samples have run, and eager attention returns its scores: 512
    samples of 2048 tokens on Llama-3.1-8B are 137 GB. Only the first output is used.
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

    with ExitStack() as stack:
        stack.enter_context(patches.applied("dropped-attention-scores", lambda _: run_samples))
        if not torch.cuda.is_available():
            stack.enter_context(patches.applied("pageable-memory", lambda _: lambda *_, **__: None))
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
