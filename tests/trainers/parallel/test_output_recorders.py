"""DeepSpeed records the router logits of AutoEP's layers, and leaves the recorders of other models as they were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from shardwright.plugins import patches
from shardwright.plugins.deepspeed.auto_ep import accept_class_names_of_recorders
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.utils import output_capturing

NAMES = ("output-recorders-get", "output-recorders-set")
IS_NEEDED = all(patches.needed(patch) for patch in patches.PATCHES if patch.name in NAMES)
UNKNOWN = "<class 'a.model.that.nobody.made'>"


class OtherRouter(torch.nn.Module):
    """Stands in for AutoEP's router."""

    def __init__(self, original: Any) -> None:
        super().__init__()
        self.original = original

    def forward(self, hidden: torch.Tensor) -> Any:
        return self.original(hidden)


def mixtral() -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    return MixtralForCausalLM(
        MixtralConfig(**sizes, num_key_value_heads=2, vocab_size=32, num_local_experts=4, output_router_logits=True)
    ).eval()


def retargeted(model: Any) -> Any:
    """Replace the routers of a model, and let DeepSpeed record those that took their place."""
    from deepspeed.module_inject.auto_ep_presets.base import _retarget_transformers_output_recorders_for_modules

    for layer in model.model.layers:
        layer.mlp.gate = OtherRouter(layer.mlp.gate)
    found = _retarget_transformers_output_recorders_for_modules(
        model=model,
        display_name="Mixtral",
        recorder_key="mixtral",
        retargeted_keys=set(),
        remove_output_capture_hooks=lambda model: 0,
        module_matches=lambda module: getattr(getattr(module, "config", None), "model_type", None) == "mixtral",
        make_output_recorder=lambda recorder: recorder(OtherRouter, index=0),
    )
    assert found > 0
    return model


@contextmanager
def as_upstream() -> Iterator[None]:
    """Undo both patches inside the block, where they are applied already."""
    if not IS_NEEDED:
        yield
        return
    get, set_item = (patches.upstream_value(each) for name in NAMES for each in patches.PATCHES if each.name == name)
    with patches.applied(NAMES[0], lambda _: get), patches.applied(NAMES[1], lambda _: set_item):
        yield


def test_router_logits_of_replaced_routers_are_recorded() -> None:
    accept_class_names_of_recorders()
    tokens = torch.arange(12)[None]
    expected = mixtral()(input_ids=tokens)
    found = retargeted(mixtral())(input_ids=tokens)
    assert len(found.router_logits) == 2
    for one, other in zip(found.router_logits, expected.router_logits, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(found.aux_loss, expected.aux_loss)


def test_later_model_records_its_own_routers() -> None:
    accept_class_names_of_recorders()
    before = dict(output_capturing._CAN_RECORD_REGISTRY)
    retargeted(mixtral())
    after = dict(output_capturing._CAN_RECORD_REGISTRY)
    assert {name: after[name] for name in before} == before
    assert str(str) not in after
    assert len(mixtral()(input_ids=torch.arange(12)[None]).router_logits) == 2


def test_deepspeed_still_reads_recorders_by_name() -> None:
    """Fails when DeepSpeed reads the registry as newer Transformers defines it: `output_recorders.get` can go then."""
    with as_upstream():
        if IS_NEEDED:
            with pytest.raises(TypeError, match="positional arguments"):
                retargeted(mixtral())
        else:
            retargeted(mixtral())


def test_deepspeed_restores_recorders_by_name() -> None:
    """Fails when DeepSpeed restores entries as newer Transformers stores them: `output_recorders.set` can go then."""
    from deepspeed.module_inject.auto_ep_presets.base import _restore_transformers_output_capture_registry

    registry = output_capturing._CAN_RECORD_REGISTRY
    try:
        with as_upstream():
            _restore_transformers_output_capture_registry(registry, {UNKNOWN: {}})
        assert (UNKNOWN in registry, str(str) in registry) == (not IS_NEEDED, IS_NEEDED)
    finally:
        for name in (UNKNOWN, str(str)):
            registry.pop(name, None)
