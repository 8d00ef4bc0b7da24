"""A frozen teacher beside a student that trains: whole, sharded, offloaded or quantized."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Literal

from ...ds_configs.specs.errors import Fault, UsageError
from ...ds_configs.specs.teacher_placement import TeacherPlacement
from .output_heads import OutputHead, head_module, output_head, shaped_head
from .sound_model import load_causal_lm
from .whole_loading import weights_on_every_rank

if TYPE_CHECKING:
    import torch

Engine = Literal["ddp", "deepspeed", "fsdp2", "single"]


class PlacedTeacher:
    """A teacher in its place: in evaluation mode, without gradients, called through the wrapper that shards it."""

    def __init__(self, model: Any, wrapped: Any, placement: TeacherPlacement) -> None:
        self.model = model
        """The inner Transformers model."""
        self.placement = placement
        self._wrapped = wrapped

    def __call__(self, **inputs: Any) -> Any:
        """Return the model's outputs for a batch; sharded teachers need every rank to call."""
        import torch

        with torch.no_grad():
            return self._wrapped(**inputs)

    def gathered_head(self) -> Any:
        """Return a context manager that gives the output head with whole weights."""
        return gathered_head(self.model)


@contextmanager
def gathered_head(model: Any) -> Iterator[OutputHead]:
    """Give a model's output head with whole weights on this rank; every rank must enter.

    ZeRO-3 gathers and releases the weight once, FSDP2 all-gathers a copy; other weights are whole already.
    """
    head = head_module(model)
    partitioned = [parameter for parameter in head.parameters() if hasattr(parameter, "ds_id")]
    if partitioned:
        import deepspeed

        with deepspeed.zero.GatheredParameters(partitioned):
            yield output_head(model)
        return
    hook = getattr(head, "_hf_hook", None)
    if hook is not None and getattr(hook, "offload", False):
        with _on_execution_device(head, hook):
            yield output_head(model)
        return
    if any(hasattr(parameter, "full_tensor") for parameter in head.parameters()):
        bias = getattr(head, "bias", None)
        yield shaped_head(model, _whole(head.weight, model), None if bias is None else _whole(bias, model))
        return
    yield output_head(model)


@contextmanager
def _on_execution_device(head: Any, hook: Any) -> Iterator[None]:
    hook.pre_forward(head)
    try:
        yield
    finally:
        hook.post_forward(head, None)


def _whole(parameter: Any, model: Any) -> torch.Tensor:
    found: Any = parameter.detach()
    if hasattr(found, "full_tensor"):
        # Offloaded shards lie on the host, which the accelerator's process group does not gather from.
        found = found.to(found.device_mesh.device_type).full_tensor()
    whole: torch.Tensor = found.to(model.dtype)
    return whole


def load_teacher(
    name: str,
    *,
    revision: str | None = None,
    placement: TeacherPlacement = "replica",
    dtype: Any = None,
    engine: Engine = "single",
    config: Any = None,
    attn_implementation: str | None = None,
) -> Any:
    """Load a causal language model as a teacher.

    A sharded or offloaded teacher of several ranks under DeepSpeed or DDP is partitioned while it loads, by a
    configuration of its own, so that no rank ever holds it whole; the student's configuration, which Transformers keeps
    for the process, is put back.

    Raises:
        UsageError: the placement has no weights to load.
        RefusedInputError: the teacher's files are not sound; `load_causal_lm` says when.
    """
    if placement == "cached":
        raise UsageError(
            Fault(where="teacher_placement", value="cached", rule="reads a cache, there is nothing to load")
        )
    partitioned = (
        placement in ("sharded", "offloaded") and engine != "fsdp2" and int(os.environ.get("WORLD_SIZE", "1")) > 1
    )
    with weights_on_every_rank(), _partitioning(sharded=partitioned, offloaded=placement == "offloaded", dtype=dtype):
        teacher = load_causal_lm(
            name,
            revision=revision,
            config=config,
            dtype=dtype,
            quantization_config=_four_bit(dtype) if placement == "quantized" else None,
            device_map={"": _own_device()} if placement == "quantized" else None,
            attn_implementation=attn_implementation,
        )
    teacher.requires_grad_(False)
    return teacher.eval()


def _own_device() -> str:
    """Return this rank's device; bitsandbytes would take the current one, which is the first before ranks choose."""
    import torch

    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"


def _four_bit(dtype: Any) -> Any:
    from ..peft.lora import four_bit_loading

    return four_bit_loading(dtype)


def without_partitioning() -> AbstractContextManager[None]:
    """Return a context manager in which models are made whole, whatever the student's DeepSpeed configuration says."""
    return _partitioning(sharded=False, offloaded=False, dtype=None)


@contextmanager
def _partitioning(*, sharded: bool, offloaded: bool, dtype: Any) -> Iterator[None]:
    """Let Transformers partition what it loads by the teacher's configuration, or not at all."""
    from transformers.integrations import deepspeed as integration

    student = integration._hf_deepspeed_config_weak_ref
    integration.unset_hf_deepspeed_config()
    kept = None
    try:
        if sharded:
            kept = integration.HfDeepSpeedConfig(_zero3_configuration(dtype, micro_batch_size=1, offloaded=offloaded))
        yield
    finally:
        del kept
        integration._hf_deepspeed_config_weak_ref = student


def _zero3_configuration(dtype: Any, *, micro_batch_size: int, offloaded: bool) -> dict[str, Any]:
    """Return a ZeRO-3 configuration without an optimizer.

    `memory_efficient_linear` would replace ``torch.nn.functional.linear`` for the student too (deepspeed 0.19.8).
    """
    import torch

    name = str(dtype or torch.float32).removeprefix("torch.")
    configuration: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "memory_efficient_linear": False,
        },
    }
    if offloaded:
        pinned = torch.accelerator.is_available()
        configuration["zero_optimization"]["offload_param"] = {"device": "cpu", "pin_memory": pinned}
    section = {"bfloat16": "bf16", "float16": "fp16"}.get(name)
    if section:
        configuration[section] = {"enabled": True}
    return configuration


def place_teacher(
    teacher: Any, placement: TeacherPlacement, *, accelerator: Any, micro_batch_size: int = 1
) -> PlacedTeacher:
    """Put a loaded teacher in its place beside the student that the accelerator prepares.

    Sharded teachers get a DeepSpeed engine of their own, or per-layer FSDP2 units where the student has these; they
    never pass through ``accelerator.prepare``, which knows one model. Offloaded teachers are sharded in the same way,
    with their shards in host memory: the ranks of a node then hold one copy together instead of one each, and each
    copies its share over PCIe before the ranks gather it. One process alone streams from its own copy.

    Raises:
        UsageError: nothing can be placed that way here.
    """
    teacher.requires_grad_(False)
    teacher.eval()
    if placement == "cached":
        raise UsageError(Fault(where="teacher_placement", value="cached", rule="takes a TeacherCache, not a model"))
    if placement == "quantized":
        return PlacedTeacher(teacher, teacher, placement)
    if placement == "replica":
        return PlacedTeacher(teacher, teacher.to(accelerator.device), placement)
    offloaded = placement == "offloaded"
    if offloaded and accelerator.num_processes == 1:
        from accelerate import cpu_offload

        return PlacedTeacher(teacher, cpu_offload(teacher, execution_device=accelerator.device), placement)
    if accelerator.num_processes == 1:
        return PlacedTeacher(teacher, teacher.to(accelerator.device), "replica")
    if _is_fsdp2(accelerator):
        return PlacedTeacher(teacher, _fully_sharded(teacher, accelerator, offloaded=offloaded), placement)
    return PlacedTeacher(teacher, _zero3_engine(teacher, micro_batch_size, offloaded=offloaded), placement)


def _is_fsdp2(accelerator: Any) -> bool:
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    return plugin is not None and plugin.fsdp_version == 2


def _zero3_engine(teacher: Any, micro_batch_size: int, *, offloaded: bool) -> Any:
    import deepspeed

    configuration = _zero3_configuration(teacher.dtype, micro_batch_size=micro_batch_size, offloaded=offloaded)
    engine, *_ = deepspeed.initialize(model=teacher, config=configuration)
    engine.eval()
    return engine


def _fully_sharded(teacher: Any, accelerator: Any, *, offloaded: bool) -> Any:
    """Shard each layer as a unit of its own, and embeddings, norm and head as the last one."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    policy = CPUOffloadPolicy(pin_memory=torch.accelerator.is_available()) if offloaded else OffloadPolicy()
    names = set(getattr(teacher, "_no_split_modules", None) or ())
    for module in list(teacher.modules()):
        if type(module).__name__ in names:
            fully_shard(module, mesh=mesh, reshard_after_forward=True, offload_policy=policy)
    fully_shard(teacher, mesh=mesh, reshard_after_forward=True, offload_policy=policy)
    return teacher
