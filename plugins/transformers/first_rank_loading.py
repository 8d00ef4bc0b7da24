"""Loading for FSDP2 and ZeRO-3: only the first rank reads weights, and for FSDP2 it holds them as they are stored.

Observed with accelerate 1.15.0 and transformers 5.17.0 under FSDP2 with `fsdp_cpu_ram_efficient_loading`:

- `from_pretrained` reads and converts the checkpoint on every rank, and then replaces the weights of all but the first
  rank of each node by zeros in memory (5.24.0 keeps them).
- `fsdp2_prepare_model` converts the whole model to fp32 on every rank, before it distributes the first rank's weights.
- `fsdp2_load_full_state_dict` cannot distribute persistent buffers.

Under ZeRO-3 too, only the first rank's weights are used, but every rank fuses experts (5.24.0 does not).
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .. import patches
from ..safetensors import read_headers

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module


def load_on_first_rank(engine: Literal["fsdp2", "deepspeed"]) -> None:
    """Make only the first rank read weights that FSDP2 or ZeRO-3 shards.

    Under FSDP2, other ranks get zeros without memory until `Accelerator.prepare`. Nothing changes without
    `fsdp_cpu_ram_efficient_loading`, nor for quantized weights, ignored modules and weights that are sharded already.
    """
    if engine == "deepspeed":
        patches.apply("zero3-unread-weights", _unread_under_zero3)
        return
    patches.apply("fsdp2-unread-weights", _unread)
    patches.apply("fsdp2-untouched-weights", _untouched)
    patches.apply("fsdp2-first-rank", lambda is_first: lambda: is_first() and _rank() == 0)
    patches.apply("fsdp2-upcast", _distributed)


def _unread_under_zero3(load: Callable[..., Any]) -> Any:
    """Read only buffers, which are not partitioned."""

    def loaded(model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, *rest: Any, **named: Any) -> Any:
        from safetensors import safe_open
        from transformers.integrations import is_deepspeed_zero3_enabled

        is_later = is_deepspeed_zero3_enabled() and _rank() > 0 and load_config.hf_quantizer is None
        if is_later and state_dict is None and _are_safetensors(checkpoint_files):
            prefix = f"{model.base_model_prefix}."
            buffers = {name for name, _ in model.named_buffers()}
            buffers |= {name.removeprefix(prefix) for name in buffers}
            state_dict = {}
            for file in checkpoint_files:
                with safe_open(file, framework="pt") as tensors:
                    for name in tensors.keys():  # noqa: SIM118
                        tensor = tensors.get_tensor(name)
                        state_dict[name] = tensor if name in buffers else tensor.to("meta")
        return load(model, state_dict, checkpoint_files, load_config, *rest, **named)

    return staticmethod(loaded)


def _are_safetensors(files: Any) -> bool:
    return bool(files) and all(str(file).endswith(".safetensors") for file in files)


@contextmanager
def stored_precision() -> Iterator[None]:
    """Keep weights in the type of the checkpoint inside the block if the requested type is fp32.

    Every weight of a type of the checkpoint is exact in fp32, to which Accelerate converts trained weights anyway.
    Buffers have the requested type.
    """

    def keeping(load: Callable[..., Any]) -> Any:
        def loaded(model: Any, state_dict: Any, checkpoint_files: Any, *rest: Any, **named: Any) -> Any:
            import torch

            if _are_safetensors(checkpoint_files):
                stored = stored_types(checkpoint_files)
                names = model.state_dict().keys()
                # Matrices that are fused while loading, such as experts, have other names in the checkpoint.
                others = {dtype for name, (dtype, is_matrix) in stored.items() if is_matrix and name not in names}
                fused = (others.pop() if len(others) == 1 else None, True)
                for module, key, name, parameter in _parameters(model):
                    dtype, is_matrix = stored.get(name, fused)
                    if dtype is not None and parameter.dtype == torch.float32 and is_matrix == (parameter.dim() > 1):
                        module._parameters[key] = torch.nn.Parameter(parameter.to(dtype), parameter.requires_grad)
            return load(model, state_dict, checkpoint_files, *rest, **named)

        return staticmethod(loaded)

    with patches.applied("stored-precision", keeping):
        yield


def stored_types(files: Iterable[str]) -> dict[str, tuple[Any, bool]]:
    """Return each tensor's type, `None` unless it has 16 bits, and whether it is a matrix."""
    import torch

    types = {"BF16": torch.bfloat16, "F16": torch.float16}
    stored = read_headers(map(Path, files))
    return {name: (types.get(tensor.dtype), len(tensor.shape) > 1) for name, tensor in stored.items()}


def _parameters(model: Module) -> list[tuple[Module, str, str, Any]]:
    """Return each parameter with its module, its name there and its name in the model; tied ones with every name."""
    return [
        (module, key, f"{path}.{key}" if path else key, parameter)
        for path, module in model.named_modules()
        for key, parameter in module._parameters.items()
        if parameter is not None
    ]


def _rank() -> int:
    import torch.distributed

    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def _gets_weights_later(device_map: Any, device_mesh: Any, quantizer: Any) -> bool:
    from transformers.modeling_utils import is_fsdp_enabled

    return is_fsdp_enabled() and _rank() > 0 and device_map is None and device_mesh is None and quantizer is None


def _unread(load: Callable[..., Any]) -> Any:
    """Load onto the meta device: the report has missing and mismatched tensors, but no tensor is read."""

    def loaded(model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, *rest: Any, **named: Any) -> Any:
        if _gets_weights_later(load_config.device_map, load_config.device_mesh, load_config.hf_quantizer):
            load_config = replace(load_config, device_map={"": "meta"})
        return load(model, state_dict, checkpoint_files, load_config, *rest, **named)

    return staticmethod(loaded)


def _untouched(move: Callable[..., None]) -> Callable[..., None]:
    def moved(model: Any, missing_keys: Any, device_map: Any, device_mesh: Any, hf_quantizer: Any) -> None:
        import torch

        if not _gets_weights_later(device_map, device_mesh, hf_quantizer):
            move(model, missing_keys, device_map, device_mesh, hf_quantizer)
            return
        for module, key, _, parameter in _parameters(model):
            module._parameters[key] = torch.nn.Parameter(_zeros(parameter), parameter.requires_grad)
        for module in model.modules():
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[key] = torch.zeros_like(buffer, device="cpu")

    return moved


def _zeros(like: Tensor) -> Tensor:
    """Return zeros that take no memory until they are written.

    Unlike tensors on the meta device they have addresses, by which Accelerate finds an optimizer's parameters, and
    scripts may compute with them, for example to add tokens.
    """
    import torch

    if not like.numel():
        return torch.zeros_like(like, device="cpu")
    pages = mmap.mmap(-1, like.numel() * like.element_size(), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=like.dtype).view(like.shape)


class _ConvertedWhenRead(dict[str, Any]):
    """Weights of the first rank; reading one converts it to its new type and releases it."""

    def __init__(self, weights: Mapping[str, Tensor], converted: Mapping[str, Tensor]) -> None:
        super().__init__(weights)
        self._converted = converted

    def __getitem__(self, name: str) -> Tensor:
        return self.pop(name).to(self._converted[name].dtype)


def _distributed(prepare: Callable[[Any, Module], Module]) -> Callable[[Any, Module], Module]:
    """Move the model to the meta device before Accelerate converts it to fp32."""

    def prepared(accelerator: Any, model: Module) -> Module:
        import torch
        from torch import distributed

        plugin = accelerator.state.fsdp_plugin
        plain = all(type(parameter) is torch.nn.Parameter for parameter in model.parameters())
        if not plugin.cpu_ram_efficient_loading or plugin.ignored_modules is not None or not plain:
            return prepare(accelerator, model)
        # Accelerate keeps and restores the buffers that are not persistent.
        buffers = [
            (module, name)
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and name not in module._non_persistent_buffers_set
        ]
        for module, name in buffers:
            module._non_persistent_buffers_set.add(name)
        weights = model.state_dict() if accelerator.is_main_process else {}
        empty: dict[Any, Any] = {}
        for module, key, _, parameter in _parameters(model):
            if parameter not in empty:
                empty[parameter] = torch.nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
            module._parameters[key] = empty[parameter]
        empty.clear()

        def loading(load: Callable[..., Any]) -> Callable[..., Any]:
            def loaded(accelerator: Any, model: Module, full_sd: dict[str, Tensor], *rest: Any, **named: Any) -> Any:
                read = _ConvertedWhenRead(weights, full_sd) if weights else full_sd
                weights.clear()
                return load(accelerator, model, read, *rest, **named)

            return loaded

        with patches.applied("fsdp2-weights", loading):
            model = prepare(accelerator, model)
        for module, name in buffers:
            module._non_persistent_buffers_set.discard(name)
            distributed.broadcast(module._buffers[name], src=0)
        return model

    return prepared
