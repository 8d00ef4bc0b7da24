"""What `pip install '.[quantize]'` downgrades: as the installed llm-compressor requires, before and after."""

from __future__ import annotations

from importlib import metadata

import pytest
from packaging.requirements import Requirement
from shardwright.plugins.llm_compressor.environment import (
    CEILINGS,
    downgrades,
    installation_of_quantize,
    llm_compressor_release,
)


@pytest.mark.needs("llmcompressor")
def test_the_ceilings_are_those_of_the_installed_release() -> None:
    """When this fails: write what the new release requires."""
    wanted = [Requirement(line) for line in metadata.requires("llmcompressor") or () if "extra ==" not in line]
    held = {
        one.name: specifier.version
        for one in wanted
        for specifier in one.specifier
        if specifier.operator == "<=" and one.name in ("torch", "transformers", "accelerate", "datasets")
    }
    assert (metadata.version("llmcompressor"), held) == (llm_compressor_release(), CEILINGS)


def test_downgrades_are_reported_before_and_after() -> None:
    newer = {"torch": "2.15.0+cu130", "transformers": "5.23.0"}
    assert downgrades(newer) == ["torch 2.15.0+cu130 to 2.14.0", "transformers 5.23.0 to 5.17.0"]
    before = installation_of_quantize(newer)
    assert before.startswith("not installed")
    assert before.endswith("would downgrade torch 2.15.0+cu130 to 2.14.0 and transformers 5.23.0 to 5.17.0")
    assert installation_of_quantize({"torch": "2.14.0+cpu"}).endswith("downgrades neither")
    after = installation_of_quantize({"llmcompressor": llm_compressor_release()})
    assert after.startswith("installed; llmcompressor requires torch <= 2.14.0")
