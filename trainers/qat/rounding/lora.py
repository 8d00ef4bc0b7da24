"""LoRA under quantization-aware training: the sum of weight and adapter is rounded, as it will be merged.

Rounding the frozen weight alone and adding the adapter at export would round again, to another grid than the one that
was trained. Seen with peft 0.21.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from ....ds_configs.specs.errors import Fault
from ....plugins.compressed_tensors.codes import StoredLayer
from .fake_quantized_linear import LinearTensors, fake_quantized_linear, merged_weight
from .layers import LEARNED, LayerQuantizer, observe_inputs, rounding_tensors, stored_from

if TYPE_CHECKING:
    from torch import Tensor


def is_lora_linear(module: Any) -> bool:
    """Tell whether a module is peft's LoRA around a plain linear layer."""
    import torch

    lora = _lora_class()
    return lora is not None and isinstance(module, lora) and isinstance(module.get_base_layer(), torch.nn.Linear)


def lora_faults(name: str, module: Any) -> list[Fault]:
    """Return why the sum of a weight and its adapter cannot be what a forward pass computes with."""
    where, faults = f"LoRA of {name}", []
    if len(module.active_adapters) != 1:
        rule, value = "one adapter is rounded with its weight", ", ".join(module.active_adapters) or "none"
        faults.append(Fault(where=where, value=value, rule=rule, fix="activate one, and merge the others"))
        return faults
    adapter = module.active_adapters[0]
    if adapter in module.lora_variant:
        rule = "only plain LoRA (rank-stabilised too) has a product that is added to the weight"
        fix = "turn DoRA and its like off, or use lora = on_quantized_base"
        faults.append(Fault(where=where, value=type(module.lora_variant[adapter]).__name__, rule=rule, fix=fix))
    dropout = getattr(module.lora_dropout[adapter], "p", 0.0)
    if dropout:
        rule = "drops inputs of the adapter, which a merged weight cannot"
        fix = "use lora_dropout=0, or lora = on_quantized_base"
        faults.append(Fault(where=where, value=f"lora_dropout={dropout}", rule=rule, fix=fix))
    if module.lora_B[adapter].bias is not None:
        faults.append(Fault(where=where, value="lora_bias", rule="has no place in the weight", fix="turn it off"))
    if module.merged:
        faults.append(Fault(where=where, value="merged", rule="the adapter is in the weight already", fix="unmerge it"))
    return faults


def make_fake_quantized(module: Any, quantizer: LayerQuantizer) -> None:
    """Change the class of a LoRA layer so that its sum is rounded."""
    module.__class__ = _fake_quantized_class()
    module.quantizer = quantizer


@cache
def _lora_class() -> Any:
    try:
        from peft.tuners.lora import Linear
    except ImportError:
        return None
    return Linear


@cache
def _fake_quantized_class() -> Any:
    lora = _lora_class()

    class FakeQuantizedLora(lora):  # type: ignore[misc,valid-type]
        """peft's LoRA layer, computing with ``round(W + scaling · B A)``."""

        quantizer: LayerQuantizer

        @property
        def consumed(self) -> tuple[str, ...]:
            adapter = self.active_adapters[0]
            own = ("base_layer.weight", f"lora_A.{adapter}.weight", f"lora_B.{adapter}.weight")
            return (*own, *(name for name in LEARNED if name in self._parameters))

        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            quantizer = self.quantizer
            observe_inputs(quantizer, x, training=self.training)
            if not quantizer.state.enabled or self.disable_adapters or self.merged:
                found: Tensor = super().forward(x, *args, **kwargs)
                return found
            adapter = self.active_adapters[0]
            base = self.get_base_layer()
            quantizer.forward_dtype = base.weight.dtype
            tensors = LinearTensors(
                weight=base.weight,
                bias=base.bias,
                adapter_a=self.lora_A[adapter].weight,
                adapter_b=self.lora_B[adapter].weight,
                **rounding_tensors(self, quantizer, x.device),
            )
            return fake_quantized_linear(x, tensors, quantizer.rounding(adapter_scaling=self.scaling[adapter]))

        def stored_layers(self, parameters: Mapping[str, Tensor]) -> dict[str, StoredLayer]:
            """Return what the checkpoint holds in place of weight and adapter."""
            weight, a, b = (parameters[name] for name in self.consumed[:3])
            seen = self.quantizer.forward_dtype
            if seen is not None and seen != weight.dtype:
                # A policy that shows the weight in another type shows the adapter in it too.
                weight, a, b = weight.to(seen), a.to(seen), b.to(seen)
            merged = merged_weight(weight, a, b, self.scaling[self.active_adapters[0]])
            return {"": stored_from(self.quantizer, merged, parameters)}

    return FakeQuantizedLora
