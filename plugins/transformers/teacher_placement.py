"""Placement of a frozen teacher during training: replicated, sharded, offloaded or quantized."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from ...ds_configs.specs.errors import ConfigError, UsageError
from ...ds_configs.specs.second_models import Placement
from ..peft import four_bit_loading
from .checkpoint_tensors import without_zero3
from .document_attention import attend_by_document
from .output_heads import OutputHead, head_module, output_head, shaped_head
from .sound_model import load_causal_lm, weights_on_every_rank

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from transformers import PreTrainedModel

Engine = Literal["ddp", "deepspeed", "fsdp2", "single"]


class PlacedTeacher:
    """A teacher in evaluation mode, without gradients, called through the wrapper that shards it."""

    def __init__(self, model: PreTrainedModel, wrapped: Any, placement: Placement) -> None:
        self.model = model
        self.placement = placement
        self._wrapped = wrapped

    def __call__(self, **inputs: object) -> Any:
        """Return the model's outputs for a batch; every rank must call a sharded teacher."""
        import torch

        with torch.no_grad():
            return self._wrapped(**inputs)

    def gathered_head(self) -> Any:
        """Return a context manager that yields the output head with gathered weights."""
        return gathered_head(self.model)


@contextmanager
def gathered_head(model: PreTrainedModel) -> Iterator[OutputHead]:
    """Yield a model's output head with gathered weights; every rank must enter the block.

    ZeRO-3 gathers and releases the weight once, FSDP2 all-gathers a copy; other weights are not sharded.
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
        hook.pre_forward(head)
        try:
            yield output_head(model)
        finally:
            hook.post_forward(head, None)
        return
    if any(hasattr(parameter, "full_tensor") for parameter in head.parameters()):
        bias = getattr(head, "bias", None)
        yield shaped_head(model, _gathered(head.weight, model), None if bias is None else _gathered(bias, model))
        return
    yield output_head(model)


def _gathered(parameter: torch.Tensor, model: PreTrainedModel) -> torch.Tensor:
    tensor = parameter.detach()
    if hasattr(tensor, "full_tensor"):
        # Offloaded shards are on the host, from which the accelerator's process group cannot gather.
        tensor = tensor.to(tensor.device_mesh.device_type).full_tensor()
    return tensor.to(model.dtype)


def load_teacher(
    name: str,
    *,
    revision: str | None = None,
    placement: Placement = "replica",
    dtype: torch.dtype = None,
    engine: Engine = "single",
    config: Any = None,
    attn_implementation: str | None = None,
) -> Any:
    """Load a causal language model as a teacher.

    Under DeepSpeed or DDP on several ranks, a sharded or offloaded teacher is partitioned while it loads, with its own
    DeepSpeed configuration, so that no rank ever holds all of it. The student's configuration, which Transformers keeps
    for the process, is restored afterwards.

    Raises:
        UsageError: the placement has no weights to load.
        RefusedInputError: the teacher's files are invalid; see `load_causal_lm`.
    """
    if placement == "cached":
        rule = "reads a cache and loads no teacher"
        raise UsageError(ConfigError(where="teacher_placement", value=placement, rule=rule))
    offloaded, quantized = placement == "offloaded", placement == "quantized"
    partitioned = (
        (offloaded or placement == "sharded") and engine != "fsdp2" and int(os.environ.get("WORLD_SIZE", "1")) > 1
    )
    if quantized:
        import torch

        # This rank's device: bitsandbytes would use the current one, which is the first before ranks choose theirs.
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"
    with weights_on_every_rank(), without_zero3():
        if partitioned:
            from transformers.integrations import HfDeepSpeedConfig

            # Transformers keeps only a weak reference to it.
            configuration = HfDeepSpeedConfig(_zero3_configuration(dtype, micro_batch_size=1, offloaded=offloaded))
        teacher = load_causal_lm(
            name,
            revision=revision,
            config=config,
            dtype=dtype,
            quantization_config=four_bit_loading(dtype) if quantized else None,
            device_map={"": device} if quantized else None,
            attn_implementation=attn_implementation,
        )
        if partitioned:
            del configuration
    teacher.requires_grad_(False)
    attend_by_document(teacher)
    return teacher.eval()


def _zero3_configuration(dtype: torch.dtype | None, *, micro_batch_size: int, offloaded: bool) -> dict[str, Any]:
    """Return a ZeRO-3 configuration without an optimizer.

    `memory_efficient_linear` would replace ``torch.nn.functional.linear`` for the student too (deepspeed 0.19.8).
    """
    import torch

    name = str(dtype or torch.float32).removeprefix("torch.")
    configuration: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "memory_efficient_linear": False},
    }
    if offloaded:
        pinned = torch.accelerator.is_available()
        configuration["zero_optimization"]["offload_param"] = {"device": "cpu", "pin_memory": pinned}
    section = {"bfloat16": "bf16", "float16": "fp16"}.get(name)
    if section:
        configuration[section] = {"enabled": True}
    return configuration


def place_teacher(
    teacher: PreTrainedModel, placement: Placement, *, accelerator: Accelerator, micro_batch_size: int = 1
) -> PlacedTeacher:
    """Place a loaded teacher on devices or host memory, next to the student that the accelerator prepares.

    A sharded teacher gets its own DeepSpeed engine, or per-layer FSDP2 units if the student uses FSDP2, because
    ``accelerator.prepare`` supports one model. An offloaded teacher is sharded with its shards in host memory: each
    rank copies its shard over PCIe before the ranks gather it. A single process streams from its own copy.

    Raises:
        UsageError: the placement needs a cache instead of a model.
    """
    teacher.requires_grad_(False)
    teacher.eval()
    if placement == "cached":
        rule = "needs a TeacherCache, not a model"
        raise UsageError(ConfigError(where="teacher_placement", value=placement, rule=rule))
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
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is not None and plugin.fsdp_version == 2:
        _fully_shard(teacher, accelerator, offloaded=offloaded)
        return PlacedTeacher(teacher, teacher, placement)
    import deepspeed

    configuration = _zero3_configuration(teacher.dtype, micro_batch_size=micro_batch_size, offloaded=offloaded)
    engine, *_ = deepspeed.initialize(model=teacher, config=configuration)
    engine.eval()
    return PlacedTeacher(teacher, engine, placement)


def _fully_shard(teacher: PreTrainedModel, accelerator: Accelerator, *, offloaded: bool) -> None:
    """Shard each layer as one FSDP2 unit, and embeddings, norm and head as the last unit."""
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
