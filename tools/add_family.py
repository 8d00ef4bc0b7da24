"""Adds a family to the stored activation coefficients: `python -m shardwright.tools.add_family CONFIG`.

Traces the model class of a `config.json` at small sizes, on one CPU process, in every precision and with every kind of
attention, and solves for integer coefficients that explain each traced byte, spare shapes included. What is written is
`ds_configs/data/added_activations.json`, from which the tests of all families take it up; of a class that is described
in `tools/activations/kind_families.py`, coefficients of each kind of layer, in `kind_activations.json`. A family that
does not fit is rejected, and keeps the upper bound from its structure.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwright.ds_configs.specs.errors import ConfigError, ShardwrightError, UsageError
from shardwright.tools.activation_trace import ADDED_PATH, KINDS_PATH, VERSIONED_PACKAGES, derive_coefficients, render

if TYPE_CHECKING:
    from shardwright.plugins.planning import LoadedModel

ALREADY_STORED = {"rule": "is stored", "fix": "remove it from the file to derive it again"}


def family_errors(loaded: LoadedModel, stored: dict[str, Any]) -> list[ConfigError]:
    """Return why a family cannot be traced as Llama is."""
    from shardwright.tools.activations.families import FIRST, STANDARD_SIZES
    from transformers import AutoConfig

    spec = loaded.spec

    def error(rule: str, fix: str = "its plans keep the upper bound from its structure") -> ConfigError:
        return ConfigError(where="model_type", value=spec.model_type, rule=rule, fix=fix)

    if spec.model_type in FIRST:
        return [error("is stored", f"python tools/activation_trace.py --write {spec.model_type} derives it again")]
    if spec.model_type in stored["tables"]:
        return [error(**ALREADY_STORED)]
    if spec.task != "causal_lm":
        return [error(f"trains {spec.architecture}, and only causal language models are traced here")]
    if spec.dimensions.num_experts:
        return [error("is a mixture of experts, whose sizes no two families name alike")]
    known = vars(AutoConfig.for_model(spec.model_type))
    missing = [name for name in STANDARD_SIZES if name not in known]
    return [error(f"has no {', '.join(missing)} of its own in its configuration")] if missing else []


def add_family(config: str, *, data: Path = ADDED_PATH, kinds_data: Path = KINDS_PATH) -> str:
    """Derive the coefficients of a model's family, write them, and return its `model_type`.

    Raises:
        UsageError: the family is stored, or cannot be traced like Llama.
        TraceError: its bytes are not linear in its sizes; nothing but tables that were solved before is written.
    """
    from shardwright.plugins.planning import load_model_spec
    from shardwright.tools.activations.kind_families import KIND_FAMILIES
    from transformers.utils import logging

    logging.set_verbosity_error()
    loaded = load_model_spec(config)
    if names := [name for name in KIND_FAMILIES if name.partition(" ")[0] == loaded.spec.architecture]:
        _add_kinds(names, kinds_data)
        return loaded.spec.model_type
    stored = json.loads(data.read_text(encoding="utf-8"))
    if errors := family_errors(loaded, stored):
        raise UsageError(errors)
    family = loaded.spec.model_type
    stored["tables"][family] = derive_coefficients(family)
    _write(data, stored)
    return family


def _add_kinds(names: list[str], path: Path) -> None:
    """Derive the tables that a class has none of yet, each written when it is solved: a family takes minutes."""
    from shardwright.tools.activations.kinds import derive_kind_family

    def stored() -> dict[str, Any]:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found

    found = False
    for name in names:
        for family in derive_kind_family(name, stored()["families"]):
            document = stored()
            found, document["families"][name] = True, family
            document["versions"] = {package: version(package) for package in VERSIONED_PACKAGES}
            _write(path, document)
            print(f"{name}: a table more is written", file=sys.stderr, flush=True)
    if not found:
        raise UsageError([ConfigError(where="architectures", value=names[0], **ALREADY_STORED)])


def _write(path: Path, content: dict[str, Any]) -> None:
    written = path.with_suffix(".new")
    written.write_text(render(content), encoding="utf-8")
    written.replace(path)


def main(arguments: list[str]) -> int:
    """Add the family of one configuration."""
    parser = argparse.ArgumentParser(prog="add_family", description=__doc__)
    # Functions that DeBERTa scripts run other operators the first times.
    os.environ["PYTORCH_JIT"] = "0"
    parser.add_argument("config", help="config.json, directory or Hub id of a model of the family")
    try:
        family = add_family(parser.parse_args(arguments).config)
    except ShardwrightError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return error.exit_code
    print(f"{family}: written to {ADDED_PATH.parent}")
    print(f"Next: pytest tests/ds_configs/memory -k {family}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
