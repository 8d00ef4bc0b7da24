"""`ResolvedQuantization`, a scheme with the method that finds its codes, and what they mean for a model's layers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..specs.errors import Fault
from .layers import DEFAULT_IGNORE, LinearLayer, scheme_faults, scheme_remarks, selected_layers, with_named_heads
from .memory import QuantizationMemory, estimate_quantization_memory
from .methods import METHODS, MethodName
from .mixtures import unloadable_expert_faults
from .scheme import QuantizationScheme
from .sizes import TensorShape, checkpoint_bytes, tensor_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedQuantization:
    """Scheme and method that fit together."""

    scheme: QuantizationScheme
    """The named scheme with what the settings change."""
    method: MethodName
    """The method, named or chosen."""
    method_reason: str
    """Why this method; `named` when the user named it."""

    def of_layers(
        self, layers: Sequence[LinearLayer], *, default_ignore: Sequence[str] | None = None
    ) -> SelectedQuantization:
        """Select among the linear layers of a model.

        Args:
            layers: Every linear layer.
            default_ignore: Layers that this model cannot lose; `None` where the user listed what to leave out.
        """
        scheme = self.scheme
        if default_ignore is not None:
            scheme = replace(scheme, ignore=tuple(dict.fromkeys((*DEFAULT_IGNORE, *default_ignore))))
        chosen = selected_layers(scheme, layers)
        return SelectedQuantization(
            method=self.method, scheme=with_named_heads(scheme, chosen), layers=chosen, candidates=tuple(layers)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SelectedQuantization:
    """Quantization of the layers of one model."""

    method: MethodName
    """The method."""
    scheme: QuantizationScheme
    """The scheme with what this model needs left out, and its output heads by name."""
    layers: tuple[LinearLayer, ...]
    """Layers that will be quantized."""
    candidates: tuple[LinearLayer, ...]
    """Every linear layer of the model."""

    @property
    def has_own_format(self) -> bool:
        """Whether dense weights are written, with a small format of this package beside them."""
        return METHODS[self.method].engine == "shardwright"

    def faults(self) -> list[Fault]:
        """Return everything that keeps scheme and method from being applied to these layers, all together."""
        faults = scheme_faults(self.scheme, self.candidates, self.layers)
        experts = [layer.name for layer in self.layers if layer.is_expert]
        if experts and self.has_own_format:
            # They are linear layers only while they are calibrated: the format would name modules that a model made
            # from its config does not have.
            rule = f"{self.method} stores plain linear layers alone, and {len(experts)} are parts of experts"
            fix = "use --method gptq, or ignore experts"
            faults.append(Fault(where="method", value=experts[0], rule=rule, fix=fix))
        return faults + unloadable_expert_faults(self.scheme, self.layers, self.candidates)

    def remarks(self) -> list[str]:
        """Return what is legal and worth knowing before it costs hours; a dense export needs no kernels of its own."""
        return [] if self.has_own_format else scheme_remarks(self.scheme, self.layers)

    def checkpoint_bytes(
        self, tensors: Mapping[str, TensorShape], *, dtype: str, kept_in_fp32: Collection[str] = ()
    ) -> int:
        """Return the bytes that will be written, own formats with the dense weights that they lie beside."""
        if self.has_own_format:
            return 2 * tensor_bytes(tensors.values())
        return checkpoint_bytes(self.scheme, self.layers, tensors, dtype=dtype, kept_in_fp32=kept_in_fp32)

    def memory(self, **run: Any) -> QuantizationMemory:
        """Return what the method needs at most; `run` holds the other arguments of `estimate_quantization_memory`."""
        return estimate_quantization_memory(layers=self.layers, scheme=self.scheme, method=self.method, **run)
