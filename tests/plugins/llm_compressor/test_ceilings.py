"""What `pip install '.[quantize]'` moves down: as the installed llm-compressor says, and told before and after."""

from __future__ import annotations

from importlib import metadata

from packaging.requirements import Requirement
from shardwright.plugins.llm_compressor.ceilings import CEILINGS, SEEN_IN, installation_of_quantize


def test_the_ceilings_are_those_of_the_installed_release() -> None:
    """When this fails: write what the new release says."""
    wanted = [Requirement(line) for line in metadata.requires("llmcompressor") or () if "extra ==" not in line]
    held = {
        one.name: specifier.version
        for one in wanted
        for specifier in one.specifier
        if specifier.operator == "<=" and one.name in ("torch", "transformers", "accelerate", "datasets")
    }
    assert (metadata.version("llmcompressor"), held) == (SEEN_IN, CEILINGS)


def test_it_is_said_before_and_after() -> None:
    newer = {"torch": "2.15.0+cu130", "transformers": "5.23.0"}
    before = installation_of_quantize(newer)
    assert before.startswith("not installed")
    assert before.endswith("would move torch from 2.15.0+cu130 to 2.14.0 and transformers from 5.23.0 to 5.17.0")
    assert installation_of_quantize({"torch": "2.14.0+cpu"}).endswith("would move neither")
    assert installation_of_quantize({"llmcompressor": SEEN_IN}).startswith("installed; llmcompressor holds torch")
