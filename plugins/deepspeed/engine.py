"""DeepSpeed's needs: of the host, of modules under ZeRO-3, and to be told the samples of a step.

Seen with deepspeed 0.19.8: NVMe offload compiles `async_io` at first use, which fails minutes into a run when the
header of libaio is missing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ...ds_configs.specs.errors import Fault, UsageError
from ..transformers.training_arguments import deepspeed_configuration
from .compiled_operators import break_abandoned_locks
from .nvme import restore_optimizer_states_from_nvme

_TOTAL_BY_ALL_RANKS = "train_batch_size (calculated)"
"""Begins the line in which Transformers reports the mismatch."""


def has_libaio() -> bool:
    """Return whether the header that DeepSpeed's async_io build includes is installed."""
    roots = ("/usr/include", "/usr/local/include", str(Path(sys.prefix) / "include"))
    return any((Path(root) / "libaio.h").exists() for root in roots)


def prepare_nvme_offload(arguments: Any) -> None:
    """Refuse NVMe offload on a host that cannot build `async_io`, and let such a run resume with its states.

    Under any DeepSpeed configuration ranks also pass the locks of operators that killed ranks left.

    `arguments` are `TrainingArguments`.

    Raises:
        UsageError: NVMe offload is asked for, and libaio's header is missing.
    """
    configuration = deepspeed_configuration(arguments) or {}
    if configuration:
        break_abandoned_locks()
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


def train_batch_size(arguments: Any, *, size: int) -> int:
    """Return the samples of one optimizer step where `size` ranks read the same samples."""
    micro, accumulation = arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps
    return int(micro * accumulation * max(1, arguments.world_size // size))


def accept_train_batch_size(arguments: Any, *, size: int) -> None:
    """Let a DeepSpeed section name its true `train_batch_size`, which Transformers takes for a mistake.

    Transformers 5.17.0 (integrations/deepspeed.py, `trainer_config_process`) multiplies by all ranks; Accelerate 1.15.0
    puts the true number in when it prepares the model.
    """
    configuration = deepspeed_configuration(arguments)
    if configuration is None or configuration.get("train_batch_size") != train_batch_size(arguments, size=size):
        return
    processed = getattr(arguments, "hf_deepspeed_config", None)
    if processed is None:
        configuration["train_batch_size"] = "auto"
    else:
        processed.mismatches = [one for one in processed.mismatches if _TOTAL_BY_ALL_RANKS not in one]


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
