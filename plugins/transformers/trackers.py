"""Trackers that the Trainer reports to: whether they are here and ready."""

from __future__ import annotations

import netrc
import os
from collections.abc import Sequence
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path

from ...ds_configs.specs.errors import Fault

_PACKAGES = {"azure_ml": "azureml-core", "flyte": "flytekit"}
"""Distributions of trackers that have another name."""


def tracker_faults(names: Sequence[str]) -> list[Fault]:
    """Return a fault for each tracker that is unknown, not installed, or would ask for a login on the ranks."""
    if not names:
        return []
    from transformers.integrations import get_available_reporting_integrations
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    here = {"none", "all", *get_available_reporting_integrations()}
    faults = []
    for name in names:
        if name not in here and name in INTEGRATION_TO_CALLBACK:
            fix = f"pip install {_PACKAGES.get(name, name)}, or leave it out"
            faults.append(Fault(where="report_to", value=name, rule="is not installed", fix=fix))
        elif name not in here:
            near = get_close_matches(name, INTEGRATION_TO_CALLBACK, n=1)
            fix = f"did you mean {near[0]}?" if near else f"it knows {', '.join(sorted(INTEGRATION_TO_CALLBACK))}"
            faults.append(Fault(where="report_to", value=name, rule="is no tracker of Transformers", fix=fix))
        elif name == "wandb" and not _wandb_is_ready():
            fix = "wandb login, or set WANDB_API_KEY, or WANDB_MODE=offline"
            faults.append(Fault(where="report_to", value=name, rule="is not logged in", fix=fix))
    return faults


def _wandb_is_ready() -> bool:
    """Tell whether wandb finds a key, or needs none; it asks on the terminal otherwise, which ranks do not have."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun"):
        return True
    file = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    try:
        return find_spec("wandb") is not None and any("wandb" in host for host in netrc.netrc(file).hosts)
    except (OSError, netrc.NetrcParseError):
        return False
