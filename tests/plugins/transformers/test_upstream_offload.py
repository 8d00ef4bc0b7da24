"""Activation offloading of Transformers, which releases from 5.24 have, and the reentrant kind of checkpointing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from shardwright.plugins import patches
from shardwright.plugins.metering import ByteMeter
from shardwright.plugins.transformers.gradient_checkpointing import allow_offload_on_cpu_ranks, offload_checkpoints
from small_models import llama

has_offload = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.24"), reason="Transformers offloads from 5.24 on"
)


def run(model: Any) -> tuple[list[torch.Tensor], int]:
    """Return the gradients of a model, and the host bytes of its pass."""
    ids = torch.arange(2 * 40).view(2, 40) % 64
    model.zero_grad()
    with ByteMeter() as meter:
        model(input_ids=ids, labels=ids).loss.backward()
        host = meter.reading().host_peak_bytes
    return [parameter.grad.clone() for parameter in model.parameters()], host


@has_offload
def test_transformers_offloads_on_accelerators_only() -> None:
    model = llama(num_hidden_layers=3).train()
    model.activation_checkpointing_enable(offload=True)
    with pytest.raises(RuntimeError, match="pin_memory"):
        run(model)


@has_offload
def test_both_offloads_compute_the_same_gradients_and_keep_the_same_bytes() -> None:
    model = llama(num_hidden_layers=3).train()
    model.gradient_checkpointing_enable()
    plain, _ = run(model)
    offload_checkpoints(model, 3)
    own, own_bytes = run(model)
    offload_checkpoints(model, 0)
    allow_offload_on_cpu_ranks()
    try:
        model.activation_checkpointing_enable(offload=True)
        upstream, upstream_bytes = run(model)
    finally:
        patches.remove("offload-on-cpu-ranks")
    assert all(torch.equal(*pair) for pair in zip(own, plain, strict=True))
    assert all(torch.equal(*pair) for pair in zip(upstream, plain, strict=True))
    assert own_bytes == upstream_bytes == 3 * 2 * 40 * model.config.hidden_size * 4
