"""AutoTP and norms of queries and keys that do not train."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from shardwright.plugins import patches
from shardwright.plugins.deepspeed.auto_tp import allow_frozen_norms


def registered(register: Any) -> list[str]:
    """Return the parameters that got a hook, of a model whose first one is frozen."""
    model = torch.nn.ModuleDict({"frozen": torch.nn.LayerNorm(4), "trained": torch.nn.LayerNorm(4)})
    model["frozen"].requires_grad_(False)
    rules = SimpleNamespace(find_matching_spec=lambda name, kind: SimpleNamespace(grad_allreduce=True))
    auto_tp = SimpleNamespace(partition_config=rules, mp_group=object(), mp_size=2, _get_model_type=lambda: "qwen3")
    register(auto_tp, model)
    return [name for name, each in model.named_parameters() if getattr(each, "_ds_grad_allreduce_registered", False)]


def test_autotp_still_puts_hooks_on_frozen_norms() -> None:
    (patch,) = [each for each in patches.PATCHES if each.name == "replicated-gradients-of-trained-parameters"]
    with pytest.raises(RuntimeError, match="cannot register a hook"):
        registered(patches.upstream_value(patch))


def test_only_gradients_of_trained_norms_are_added_up() -> None:
    from deepspeed.module_inject.auto_tp import AutoTP

    allow_frozen_norms()
    try:
        assert registered(AutoTP.register_replicated_grad_hooks) == ["trained.weight", "trained.bias"]
    finally:
        patches.remove("replicated-gradients-of-trained-parameters")
