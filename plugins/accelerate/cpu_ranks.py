"""Accelerate on ranks without an accelerator: the correct world size under DeepSpeed, FSDP2, and ring attention.

Observed with accelerate 1.15.0, transformers 5.17.0, deepspeed 0.19.8 and torch 2.13.0, two gloo ranks:

- ``accelerate/state.py`` selects a communication backend only for accelerators or for ``cpu=True``. Under
  DeepSpeed on CPU the backend is ``None`` and every rank is rank 0 of 1, although DeepSpeed has started gloo. The batch
  size that replaces ``auto`` is then wrong, and every rank trains on the same samples.
- ``TrainingArguments(use_cpu=True)`` alone corrects the count, but does not start ``deepspeed.comm``, so
  ``zero.Init`` computes the batch for one rank and fails an assertion.
- ``AcceleratorState`` enables FSDP only for ``MULTI_<accelerator>`` types. On CPU ranks it silently drops the FSDP
  plugin, and the Trainer trains with plain DDP.
- torch's ring attention accepts any attention operator, but its tables contain only CUDA's. On the CPU the operator of
  ``scaled_dot_product_attention`` has no strategy ("does not have a sharding strategy registered").
- ``TrainingArguments(bf16=True)`` on such a host needs ``use_cpu=True``.
- Under DDP the device of a CPU rank is ``cpu:0``, which the Trainer gives to ``torch.load`` when it resumes, and torch
  knows the location ``cpu`` alone.
"""

from __future__ import annotations

import json
import os
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from ...ds_configs.specs.errors import ConfigError, ShardwrightError, UsageError
from .. import patches
from ..deepspeed.compiled_operators import break_abandoned_locks

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import TrainingArguments

Engine = Literal["ddp", "deepspeed", "fsdp2"]

_TRUE = frozenset({"1", "true", "yes", "on", "y", "t"})
_ENGINE_VARIABLES: dict[str, Engine] = {"ACCELERATE_USE_DEEPSPEED": "deepspeed", "ACCELERATE_USE_FSDP": "fsdp2"}


def configure_cpu_ranks(engine: Engine | None = None) -> dict[str, Any]:
    """Prepare Accelerate for CPU ranks and return the ``TrainingArguments`` keywords that go with it.

    Call it before ``TrainingArguments`` is built. It changes nothing and returns ``{}`` on a host with an accelerator;
    hide the accelerators (``CUDA_VISIBLE_DEVICES=""``) to train on CPU ranks there.

    Args:
        engine: Training engine; ``None`` reads it from the environment that ``accelerate launch`` sets. Pass it if
            ``TrainingArguments(deepspeed=...)`` or ``TrainingArguments(fsdp=True)`` decides.

    Raises:
        UsageError: FSDP version 1 is requested, which cannot run on CPU ranks.
        ShardwrightError: Accelerate still reports another world size than the launcher's ``WORLD_SIZE``.
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
        version = os.environ.get("FSDP_VERSION", "2")
        if version != "2":
            rule, fix = "CPU ranks support only FSDP2", "set `fsdp_version: 2` in the accelerate configuration"
            raise UsageError(ConfigError(where="fsdp_version", value=version, rule=rule, fix=fix))
        _start_gloo_state(deepspeed=False)
        from accelerate.utils import DistributedType

        # `AcceleratorState` then enters its FSDP branch, which reads only the type; the device is still the CPU.
        patches.apply("fsdp2-on-cpu-ranks", lambda _: DistributedType.MULTI_GPU, item="distributed_type")
    else:
        break_abandoned_locks()
        _start_gloo_state(deepspeed=True)
    return {"use_cpu": True, "accelerator_config": {"use_configured_state": True}}


def serve_scripts_on_cpu_ranks() -> None:
    """Make an unmodified script train on CPU ranks: call it before the script begins.

    The result of `configure_cpu_ranks` becomes part of every `TrainingArguments`, and `Accelerator()` uses the CPU. It
    changes nothing on a host with an accelerator.
    """
    overrides = configure_cpu_ranks()
    if not overrides:
        return
    if "accelerator_config" not in overrides:
        # If the state exists already, accelerate 1.15.0 would initialise only half of it for FSDP.
        os.environ["ACCELERATE_USE_CPU"] = "true"

    def on_cpu_ranks(complete: Any) -> Any:
        def completed(arguments: TrainingArguments) -> None:
            arguments.use_cpu = True
            if "accelerator_config" in overrides:
                config = arguments.accelerator_config
                config = json.loads(config) if isinstance(config, str) else config
                config = {} if config is None else config if isinstance(config, dict) else config.to_dict()
                arguments.accelerator_config = config | overrides["accelerator_config"]
            complete(arguments)

        return completed

    patches.apply("cpu-rank-arguments", on_cpu_ranks)


def engine_from_environment() -> Engine:
    """Return the engine that ``accelerate launch`` set in the environment; plain DDP if it set none."""
    for name, engine in _ENGINE_VARIABLES.items():
        if os.environ.get(name, "").lower() in _TRUE:
            return engine
    return "ddp"


@cache
def _accept_indexed_cpu() -> None:
    """Make ``torch.load`` accept the location ``cpu:0``, so that DDP ranks can resume from checkpoints."""
    from torch.serialization import register_package

    def on_cpu(storage: torch.UntypedStorage, location: str) -> Any:
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
            f"Accelerate reports {state.num_processes} processes, but the launcher started WORLD_SIZE = "
            f"{launched}: ranks would train on the same samples; use accelerate 1.15, which was tested"
        )


# Queries, keys and values are [batch, heads, sequence, head width].
_SEQUENCE_DIMENSION = 2


def enable_cpu_ring_attention() -> None:
    """Make `torch.distributed.tensor.experimental.context_parallel` run on the CPU, to rehearse and test it there."""
    import torch
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring

    def local(*tensors: object) -> list[Any]:
        return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]

    def whole(mesh: DeviceMesh, results: tuple[Any, ...]) -> tuple[Any, ...]:
        shards = [Shard(_SEQUENCE_DIMENSION)]
        return tuple(DTensor.from_local(tensor, mesh, shards, run_check=False) for tensor in results)

    def forward(operator: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        query, key, value, *rest = arguments
        named = dict(zip(("dropout_p", "is_causal"), rest, strict=False)) | named
        mesh = query.device_mesh
        tensors = local(query, key, value)
        return whole(
            mesh, ring._templated_ring_attention(mesh.get_group(), _SEQUENCE_DIMENSION, operator, *tensors, **named)
        )

    def backward(operator: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        names = ("grad_out", "query", "key", "value", "out", "logsumexp")
        named = dict(zip(names, local(*arguments[:6]), strict=True)) | named
        dropout, is_causal = arguments[6:8]
        mesh = arguments[1].device_mesh
        results = ring._templated_ring_attention_backward(
            mesh.get_group(),
            _SEQUENCE_DIMENSION,
            operator,
            grad_out_name="grad_out",
            is_causal=is_causal,
            dropout_p=dropout,
            **named,
        )
        return whole(mesh, results)

    aten = torch.ops.aten
    attention = aten._scaled_dot_product_flash_attention_for_cpu.default
    patches.apply("ring-attention-on-cpu-ranks", lambda _: forward, item=attention)
    attention = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    patches.apply("ring-attention-on-cpu-ranks", lambda _: backward, item=attention)
