"""Corrections of llm-compressor 0.14.0.1 on this or that machine, for the length of one call."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any


@contextmanager
def all_fixes() -> Iterator[None]:
    """Apply every workaround that a run needs; loading mixtures has one of its own."""
    with ExitStack() as stack:
        stack.enter_context(no_pinned_memory_without_cuda())
        stack.enter_context(attention_scores_are_not_kept())
        yield


@contextmanager
def no_pinned_memory_without_cuda() -> Iterator[None]:
    """Let AWQ run on hosts without CUDA.

    llmcompressor 0.14.0.1, `modifiers/transform/awq/base.py` `_apply_smoothing`: calls
    `IntermediatesCache.pin_memory` unconditionally, and torch raises that it needs an accelerator.
    """
    import torch
    from llmcompressor.pipelines.cache import IntermediatesCache

    if torch.cuda.is_available():
        yield
        return
    original = IntermediatesCache.pin_memory

    def leave_pageable(cache: Any, batch_index: int) -> None:
        return None

    IntermediatesCache.pin_memory = leave_pageable
    try:
        yield
    finally:
        IntermediatesCache.pin_memory = original


@contextmanager
def torchvision_is_not_needed() -> Iterator[None]:
    """Let mixtures of experts load where torchvision is not installed.

    llmcompressor 0.14.0.1 with transformers 5.17.0: linearising experts registers patches, and
    `transformers/monkey_patching.py` `apply_patches` then asks `dir()` of every loaded module of Transformers. Those
    that stand for renamed image modules import them when asked, which fails with `ModuleNotFoundError: torchvision`.
    They are taken out of `sys.modules` for the length of the call.
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
    """Leave other mixtures of this process their weights.

    llmcompressor 0.14.0.1, `modeling/moe/linearize.py` `load_quantizable_moe`: registers how one model's experts are
    written for all models of its type. A later `from_pretrained` of that type in the same process renames no expert,
    finds none, and runs with random ones after a warning. What it must write is kept with the model as well.
    """
    from transformers import conversion_mapping

    # Builds the table, if nothing was loaded yet.
    conversion_mapping.get_checkpoint_conversion_mapping("mixtral")
    mappings, registered = (
        conversion_mapping._checkpoint_conversion_mapping_cache,
        conversion_mapping.USER_REGISTERED_MAPPINGS,
    )
    kept_mappings, kept_registered = dict(mappings), set(registered)
    try:
        yield
    finally:
        for current, kept in ((mappings, kept_mappings), (registered, kept_registered)):
            current.clear()
            current.update(kept)


@contextmanager
def attention_scores_are_not_kept() -> Iterator[None]:
    """Let AWQ calibrate on long text.

    llmcompressor 0.14.0.1, `modifiers/transform/awq/base.py` `_run_samples`: keeps whatever a module returns until all
    samples ran, and eager attention returns its scores: 512 samples of 2048 tokens on Llama-3.1-8B are 137 GB. What is
    read in the end is the first output alone.
    """
    import torch
    from llmcompressor.core import active_session
    from llmcompressor.modifiers.transform.awq import AWQModifier

    original = AWQModifier._run_samples

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def run_samples(modifier: Any, module: Any) -> list[Any]:
        cache = modifier._parent_args_cache[module]
        outputs = []
        for batch in cache.iter_prefetch() if active_session().state.sequential_prefetch else cache:
            found = module(**batch)
            outputs.append(found[0] if isinstance(found, tuple) else found)
        return outputs

    AWQModifier._run_samples = run_samples
    try:
        yield
    finally:
        AWQModifier._run_samples = original
