"""Accelerate on ranks without an accelerator: the true world size under DeepSpeed, FSDP2 that really shards.

Seen with accelerate 1.15.0, transformers 5.17.0, deepspeed 0.19.8 and torch 2.13.0, two gloo ranks:

- ``accelerate/state.py`` picks a communication backend only for accelerators or for ``cpu=True``. Under
  DeepSpeed on CPU the backend stays ``None`` and every rank calls itself rank 0 of 1, although DeepSpeed has
  started gloo. The batch size that fills ``auto`` is then wrong and every rank trains on the same samples.
- ``TrainingArguments(use_cpu=True)`` alone repairs the count, yet ``deepspeed.comm`` is not started, so that
  ``zero.Init`` computes the batch for one rank and fails an assertion.
- ``AcceleratorState`` turns on FSDP only for ``MULTI_<accelerator>`` types. On CPU ranks it drops the FSDP
  plugin without a word and the Trainer trains plain DDP.
- ``TrainingArguments(bf16=True)`` on such a host needs ``use_cpu=True``.
- Under DDP the device of a CPU rank is ``cpu:0``, which the Trainer gives to ``torch.load`` when it resumes, and torch
  knows the location ``cpu`` alone.
"""

from __future__ import annotations

import json
import os
from functools import cache
from typing import Any, Literal

from ...ds_configs.specs.errors import Fault, ShardwrightError, UsageError
from ..deepspeed.compiled_operators import break_abandoned_locks
from ..launching.shared_memory import release_buffer

Engine = Literal["ddp", "deepspeed", "fsdp2"]

_TRUE = frozenset({"1", "true", "yes", "on", "y", "t"})


def configure_cpu_ranks(engine: Engine | None = None) -> dict[str, Any]:
    """Prepare Accelerate for CPU ranks and return the ``TrainingArguments`` keywords that go with it.

    Call it before ``TrainingArguments`` is built. It changes nothing and returns ``{}`` on a host with an
    accelerator; hide the accelerators (``CUDA_VISIBLE_DEVICES=""``) to train on CPU ranks there.

    Args:
        engine: What will train; ``None`` reads it from the environment that ``accelerate launch`` sets. Name
            it when ``TrainingArguments(deepspeed=...)`` or ``TrainingArguments(fsdp=True)`` decides.

    Raises:
        UsageError: FSDP version 1 is asked for, which cannot run on CPU ranks.
        ShardwrightError: Accelerate still reports another world size than the launcher's ``WORLD_SIZE``.

    Example:
        >>> overrides = configure_cpu_ranks("deepspeed")  # under torchrun with 2 CPU ranks
        >>> TrainingArguments(output_dir, deepspeed="ds_config.json", bf16=True, **overrides).world_size
        2
    """
    import torch

    if torch.accelerator.is_available():
        return {}
    engine = engine or engine_from_environment()
    if "LOCAL_RANK" not in os.environ:
        return {"use_cpu": True}
    if engine == "ddp":
        _accept_indexed_cpu()
        return {"use_cpu": True}
    if engine == "fsdp2":
        _refuse_fsdp1()
        _start_gloo_state(deepspeed=False)
        _report_as_multi_accelerator()
    else:
        break_abandoned_locks()
        _start_gloo_state(deepspeed=True)
    return {"use_cpu": True, "accelerator_config": {"use_configured_state": True}}


def serve_scripts_on_cpu_ranks() -> None:
    """Let a script that knows nothing of CPU ranks train on them: call it before the script begins.

    What `configure_cpu_ranks` returns becomes part of every `TrainingArguments`, and `Accelerator()` looks for no
    accelerator. It changes nothing on a host with an accelerator.
    """
    overrides = configure_cpu_ranks()
    if not overrides:
        return
    if "accelerator_config" not in overrides:
        # Where the state is made already, accelerate 1.15.0 would leave it half of one for FSDP.
        os.environ["ACCELERATE_USE_CPU"] = "true"
    from transformers import TrainingArguments

    complete = TrainingArguments.__post_init__

    def on_cpu_ranks(arguments: Any) -> None:
        arguments.use_cpu = True
        if "accelerator_config" in overrides:
            stated = arguments.accelerator_config
            stated = json.loads(stated) if isinstance(stated, str) else stated
            stated = {} if stated is None else stated if isinstance(stated, dict) else stated.to_dict()
            arguments.accelerator_config = stated | overrides["accelerator_config"]
        complete(arguments)

    TrainingArguments.__post_init__ = on_cpu_ranks


def engine_from_environment() -> Engine:
    """Return the engine that ``accelerate launch`` announced through its environment; plain DDP when none."""
    if _is_set("ACCELERATE_USE_DEEPSPEED"):
        return "deepspeed"
    return "fsdp2" if _is_set("ACCELERATE_USE_FSDP") else "ddp"


@cache
def _accept_indexed_cpu() -> None:
    """Let ``torch.load`` put what is mapped to ``cpu:0`` on the CPU, so that DDP ranks resume from checkpoints."""
    from torch.serialization import register_package

    def on_cpu(storage: Any, location: str) -> Any:
        return storage if location.startswith("cpu:") else None

    register_package(15, lambda storage: None, on_cpu)


def _start_gloo_state(*, deepspeed: bool) -> None:
    """Create Accelerate's process state on gloo; for DeepSpeed also the group that ``zero.Init`` reads."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import patch_environment

    AcceleratorState._reset_state(reset_partial_state=True)
    with patch_environment(ACCELERATE_USE_DEEPSPEED=str(deepspeed).lower()):
        state = PartialState(backend="gloo")
    launched = int(os.environ["WORLD_SIZE"])
    if state.num_processes != launched:
        raise ShardwrightError(
            f"Accelerate reports {state.num_processes} processes where the launcher started WORLD_SIZE = "
            f"{launched}: ranks would train on the same samples; use accelerate 1.15, which was tested"
        )
    if deepspeed:
        release_buffer()


def _report_as_multi_accelerator() -> None:
    """Let ``AcceleratorState`` enter its FSDP branch, which reads the type alone; the device stays CPU."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def _refuse_fsdp1() -> None:
    version = os.environ.get("FSDP_VERSION", "2")
    if version != "2":
        raise UsageError(
            Fault(
                where="fsdp_version",
                value=version,
                rule="CPU ranks shard with FSDP2 only",
                fix="set `fsdp_version: 2` in the accelerate configuration",
            )
        )


def _is_set(name: str) -> bool:
    return os.environ.get(name, "").lower() in _TRUE
