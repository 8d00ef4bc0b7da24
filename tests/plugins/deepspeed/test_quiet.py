"""Suppressed warnings of DeepSpeed: it still emits them."""

from __future__ import annotations

import logging

import pytest
from deepspeed.accelerator import real_accelerator
from shardwright.plugins.deepspeed import quiet_accelerator_choice


@pytest.mark.parametrize("quiet", [False, True])
def test_deepspeed_still_warns_of_a_host_without_accelerators(monkeypatch: pytest.MonkeyPatch, quiet: bool) -> None:
    """Fails when DeepSpeed (0.19.8) keeps quiet by itself: `quiet_accelerator_choice` can go then."""
    logger, reported = logging.getLogger("DeepSpeed"), list[str]()
    own = logging.Handler()
    own.emit = lambda record: reported.append(record.getMessage())  # type: ignore[method-assign]
    monkeypatch.setattr(logger, "handlers", [own])
    monkeypatch.setattr(logger, "filters", [])
    monkeypatch.setattr(real_accelerator, "ds_accelerator", None)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    if quiet:
        quiet_accelerator_choice()
    real_accelerator.get_accelerator()
    assert any(line.startswith("Setting accelerator to CPU.") for line in reported) != quiet
