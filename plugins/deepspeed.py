"""What DeepSpeed needs from the host before a launch spends time on it.

Seen with deepspeed 0.19.8: NVMe offload compiles `async_io` at first use, which fails minutes into a run when the
header of libaio is missing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..ds_configs.errors import Fault, UsageError
from .deepspeed_nvme import restore_optimizer_states_from_nvme
from .transformers import deepspeed_configuration


def has_libaio() -> bool:
    """Return whether the header that DeepSpeed's async_io build includes is installed."""
    roots = ("/usr/include", "/usr/local/include", str(Path(sys.prefix) / "include"))
    return any((Path(root) / "libaio.h").exists() for root in roots)


def prepare_nvme_offload(arguments: Any) -> None:
    """Refuse NVMe offload on a host that cannot build `async_io`, and let such a run resume with its states.

    `arguments` are `TrainingArguments`.

    Raises:
        UsageError: NVMe offload is asked for, and libaio's header is missing.
    """
    configuration = deepspeed_configuration(arguments) or {}
    zero = configuration.get("zero_optimization", {})
    sections = [zero.get(name) for name in ("offload_optimizer", "offload_param")]
    wanted = any(isinstance(section, dict) and section.get("device") == "nvme" for section in sections)
    if not wanted:
        return
    restore_optimizer_states_from_nvme()
    if not has_libaio():
        raise UsageError(
            Fault(
                where="zero_optimization",
                value="nvme",
                rule="NVMe offload compiles async_io, which needs the header of libaio",
                fix="install libaio-dev (Debian) or libaio-devel, or offload to the CPU",
            )
        )


def share_with_zero3(modules: Iterable[Any]) -> None:
    """Let ZeRO-3 gather the parameters of children too when a module runs that computes with them by itself.

    DeepSpeed gathers what belongs to the module whose forward runs; parameters of children whose own forward is not
    called must be registered (`deepspeed/runtime/zero/partition_parameters.py`, `register_external_parameter`). Modules
    without divided parameters are passed over.
    """
    for module in modules:
        own = {id(parameter) for parameter in module.parameters(recurse=False)}
        foreign = [one for one in module.parameters() if hasattr(one, "ds_id") and id(one) not in own]
        if foreign:
            # `zero` is an attribute of the package, not a module below it.
            import deepspeed

            for parameter in foreign:
                deepspeed.zero.register_external_parameter(module, parameter)
