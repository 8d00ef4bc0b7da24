"""A frozen second model beside the one that trains: loading, placement, forward."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from ...ds_configs.specs.errors import ConfigError, UsageError
from ...ds_configs.specs.second_models import Placement
from ..peft import four_bit_loading
from .attention import attend_by_document
from .loading import load_causal_lm, without_zero3
from .output_heads import OutputHead, head_module, output_head, shaped_head

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from transformers import PreTrainedModel

Engine = Literal["ddp", "deepspeed", "fsdp2", "single"]


class PlacedModel:
    """A second model in evaluation mode, without gradients, called through the wrapper that shards it."""

    def __init__(self, model: PreTrainedModel, wrapped: Any = None) -> None:
        self.model = model
        """The inner Transformers model."""
        self._wrapped = model if wrapped is None else wrapped

    def __call__(self, **inputs: object) -> Any:
        """Return the model's outputs for a batch; every rank must call a sharded model."""
        import torch

        with torch.no_grad():
            return self._wrapped(**inputs)


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


def load_second_model(
    name: str,
    *,
    revision: str | None = None,
    placement: Placement = "replica",
    dtype: torch.dtype = None,
    engine: Engine = "single",
) -> PreTrainedModel:
    """Load a causal language model without gradients, in evaluation mode.

    Under DeepSpeed or DDP on several ranks, a sharded or offloaded model is partitioned while it loads, with its own
    DeepSpeed configuration, so that no rank ever holds all of it. The trained model's configuration, which Transformers
    keeps for the process, is restored afterwards.

    Raises:
        RefusedInputError: the model's files are invalid; see `load_causal_lm`.
    """
    assert placement != "cached", "stored outputs need no model"
    options: dict[str, Any] = {}
    if placement == "quantized":
        import torch

        # This rank's device: bitsandbytes would use the current one, which is the first before ranks choose theirs.
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"
        options = {"quantization_config": four_bit_loading(dtype), "device_map": {"": device}}
    from accelerate.utils import patch_environment

    # Every rank reads the weights.
    with patch_environment(FSDP_CPU_RAM_EFFICIENT_LOADING="false"), without_zero3():
        is_spread = placement in ("sharded", "offloaded") and int(os.environ.get("WORLD_SIZE", "1")) > 1
        if is_spread and engine != "fsdp2":
            from transformers.integrations import HfDeepSpeedConfig

            # Transformers keeps only a weak reference to it.
            configuration = HfDeepSpeedConfig(_zero3_configuration(dtype, offloaded=placement == "offloaded"))
            model = load_causal_lm(name, revision=revision, dtype=dtype)
            del configuration
        else:
            model = load_causal_lm(name, revision=revision, dtype=dtype, **options)
    attend_by_document(model)
    model.has_weights_on_every_rank = True
    return model.requires_grad_(False).eval()


def _zero3_configuration(dtype: torch.dtype | None, *, offloaded: bool) -> dict[str, Any]:
    """Return a ZeRO-3 configuration without an optimizer.

    `memory_efficient_linear` would replace ``torch.nn.functional.linear`` for the trained model too (deepspeed 0.19.8).
    """
    import torch

    name = str(dtype or torch.float32).removeprefix("torch.")
    configuration: dict[str, Any] = {
        # No forward pass reads it, but DeepSpeed requires it.
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "memory_efficient_linear": False},
    }
    if offloaded:
        pinned = torch.accelerator.is_available()
        configuration["zero_optimization"]["offload_param"] = {"device": "cpu", "pin_memory": pinned}
    section = {"bfloat16": "bf16", "float16": "fp16"}.get(name)
    if section:
        configuration[section] = {"enabled": True}
    return configuration


def shard_by_layer(model: PreTrainedModel, device_type: str, ranks: int, *, offloaded: bool = False) -> None:
    """Make each layer of a model an FSDP2 unit over all ranks, and embeddings, norm and head the last one."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    mesh = init_device_mesh(device_type, (ranks,))
    policy = CPUOffloadPolicy(pin_memory=torch.accelerator.is_available()) if offloaded else OffloadPolicy()
    layers = set(getattr(model, "_no_split_modules", None) or ())
    for module in [*(each for each in model.modules() if type(each).__name__ in layers), model]:
        fully_shard(module, mesh=mesh, reshard_after_forward=True, offload_policy=policy)


def place_second_model(model: PreTrainedModel, placement: Placement, *, accelerator: Accelerator) -> PlacedModel:
    """Place a loaded model on devices or host memory, next to the model that the accelerator prepares.

    A sharded model gets its own DeepSpeed engine, or per-layer FSDP2 units if the trained model uses FSDP2, because
    ``accelerator.prepare`` supports one model. An offloaded model is sharded with its shards in host memory: each
    rank copies its shard over PCIe before the ranks gather it. A single process streams from its own copy. Weights that
    ZeRO-3 partitioned while loading stay partitioned.

    Raises:
        UsageError: the placement needs stored outputs instead of a model.
    """
    model.requires_grad_(False)
    model.eval()
    if placement == "cached":
        rule, fix = "needs stored outputs, not a model", "pass its stored outputs, or use another placement"
        raise UsageError(ConfigError(where="placement", value=placement, rule=rule, fix=fix))
    if placement == "quantized":
        return PlacedModel(model)
    offloaded, alone = placement == "offloaded", accelerator.num_processes == 1
    if offloaded and alone:
        from accelerate import cpu_offload

        return PlacedModel(cpu_offload(model, execution_device=accelerator.device))
    partitioned = any(hasattr(parameter, "ds_id") for parameter in model.parameters())
    if alone or (placement == "replica" and not partitioned):
        return PlacedModel(model.to(accelerator.device))
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is not None and plugin.fsdp_version == 2:
        shard_by_layer(model, accelerator.device.type, accelerator.num_processes, offloaded=offloaded)
        return PlacedModel(model)
    import deepspeed

    engine, *_ = deepspeed.initialize(model=model, config=_zero3_configuration(model.dtype, offloaded=offloaded))
    engine.eval()
    return PlacedModel(model, engine)
