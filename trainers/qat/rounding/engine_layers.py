"""Rounding in the layers that DeepSpeed puts in the place of a model's own: AutoTP's parts, AutoEP's experts, stages.

Each rank rounds its part of a matrix as the whole one is rounded: groups lie along the inputs, so that parts of rows
have whole groups where the group's size divides them, and a range by channel or by tensor is one of all ranks.

Seen with deepspeed 0.19.8: `deepspeed.initialize` makes these layers of the weights alone, whatever the class of the
layer was, so that training went on without any rounding.

Shapes: T rows of tokens, H hidden channels, F channels inside an expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from ....ds_configs.specs.errors import Fault, UsageError
from ....plugins.compressed_tensors.codes import StoredLayer
from ....plugins.deepspeed.engine_layers import stages_of, whole_shape
from .attachment import Attachment
from .experts import FakeQuantizedExperts, is_fused_experts
from .fake_quantized_linear import LinearTensors, fake_quantized_linear
from .grouped_linear import GroupedRounding, grouped_fake_quantized_linear
from .layers import FakeQuantizedLinear, LayerQuantizer

if TYPE_CHECKING:
    from torch import Tensor

_DIVIDED = ("LinearLayer", "VocabParallelLinear", "LinearAllreduce", "LinearAllreduceWithReplicatedInput")
"""AutoTP's layers that hold some rows, or some columns, of one matrix."""


def follow_engine(model: Any, attachment: Attachment) -> None:
    """Let what an engine has made of a model round as the model did before; modules that it left alone stay.

    Args:
        model: As it is about to be trained, or this rank's stages of it.
        attachment: What `attach` put into the whole model; afterwards it names the modules of this rank.

    Raises:
        UsageError: parts of a matrix cannot be rounded as the whole one; all faults at once.
    """
    stages = stages_of(model)
    roots = (model,) if stages is None else stages.stages
    present = {name: module for root in roots for name, module in root.named_modules()}
    if stages is not None:
        for name in [name for name in attachment.modules if name not in present]:
            del attachment.modules[name]
    faults: dict[tuple[str, str], Fault] = {}
    for name, old in attachment.modules.items():
        new = present.get(name, old)
        if new is old:
            continue
        for fault in _divided_faults(name, new, attachment):
            faults.setdefault((fault.where, fault.rule), fault)
        if not faults:
            _round_as(new, old)
            attachment.modules[name] = new
    if faults:
        raise UsageError(list(faults.values()))


def _round_as(new: Any, old: Any) -> None:
    """Let a module round as another did."""
    if is_fused_experts(old):
        new.__class__ = _fake_quantized_auto_ep()
        new.quantizers = old.quantizers
        return
    kind: Any = type(new)
    new.__class__ = FakeQuantizedLinear if kind.__name__ == "Linear" else _fake_quantized_auto_tp(kind)
    new.quantizer = old.quantizer


def _divided_faults(name: str, module: Any, attachment: Attachment) -> list[Fault]:
    """Return why a part of a layer cannot be rounded as the whole one."""
    import torch

    kind, scheme = type(module).__name__, attachment.scheme
    if kind == "GroupedExperts" or type(module) is torch.nn.Linear:
        return []
    where = name.rpartition(".")[2]
    if kind not in _DIVIDED:
        rule = f"is a {kind} now, which interleaves rows of several matrices"
        return [Fault(where=where, rule=rule, fix="train without tensor parallelism")]
    if attachment.config.weight_rule != "minmax":
        rule = "is a mean over parts of a matrix, which ranks add up in another order than a loader of the whole one"
        value = attachment.config.weight_rule
        return [Fault(where="weight_rule", value=value, rule=rule, fix="use minmax")]
    if scheme.activations is not None:
        rule = "are rounded token by token, of whose channels a rank sees a part"
        return [Fault(where="inputs", value=scheme.name, rule=rule, fix="use W4A16 or another scheme of weights alone")]
    size, columns = scheme.weights.group_size, int(module.weight.shape[1])
    if scheme.weights.strategy == "group" and size and columns % size:
        rule = f"leaves each rank {columns} of {whole_shape(module)[1]} inputs of {where}, no whole groups of {size}"
        fix = "use a group size that divides them, or less tensor parallelism"
        return [Fault(where="tensor_parallel", value=module.tp_world_size, rule=rule, fix=fix)]
    return []


class _FakeQuantizedPart:
    """AutoTP's layer whose forward pass computes with the numbers of the checkpoint."""

    quantizer: LayerQuantizer
    consumed = ("weight",)
    """Own parameters that the packed form takes the place of."""

    def forward(self: Any, input: Tensor) -> Tensor:
        """Return what the layer does, of a rounded weight."""
        from deepspeed.module_inject import layers

        quantizer = self.quantizer
        if not quantizer.state.enabled:
            plain: Tensor = super().forward(input)  # type: ignore[misc]
            return plain
        quantizer.forward_dtype = self.weight.dtype
        by_input = isinstance(self, layers.LinearAllreduce)
        rounding = quantizer.rounding(ranks=_sharing_ranks(self, quantizer, by_input=by_input))
        if not by_input:
            seen = layers.ColumnParallel.apply(self.mp_group, input)
            output = fake_quantized_linear(seen, LinearTensors(weight=self.weight, bias=self.bias), rounding)
            if not self.gather_output:
                return output
            whole: Tensor = layers.GatherFromTensorParallelRegion.apply(self.mp_group, output, self._partition_sizes)
            return whole
        if isinstance(self, layers.LinearAllreduceWithReplicatedInput):
            input = layers.ScatterToTensorParallelRegion.apply(
                self.mp_group, input, self._partition_sizes, self.tp_index
            )
        part = fake_quantized_linear(input, LinearTensors(weight=self.weight), rounding)
        output = layers.RowParallel.apply(self.mp_group, part, not self.is_training_mode())
        return output if self.bias is None else output + self.bias

    def stored_layers(self: Any, parameters: Mapping[str, Tensor]) -> dict[str, StoredLayer]:
        """Return what the checkpoint holds in place of the weight, from the whole one."""
        return FakeQuantizedLinear.stored_layers(self, parameters)


def _sharing_ranks(layer: Any, quantizer: LayerQuantizer, *, by_input: bool) -> Any:
    """Return the group whose ranks hold parts of what shares a scale."""
    strategy = quantizer.scheme.weights.strategy
    return layer.mp_group if strategy == "tensor" or (strategy == "channel" and by_input) else None


@cache
def _fake_quantized_auto_tp(layer: Any) -> type:
    return type(f"FakeQuantized{layer.__name__}", (_FakeQuantizedPart, layer), {})


@cache
def _fake_quantized_auto_ep() -> type:
    from deepspeed.moe.ep_experts import GroupedExperts, apply_expert_activation

    class FakeQuantizedGroupedExperts(GroupedExperts):
        """AutoEP's experts of one rank, whose forward pass computes with the numbers of the checkpoint."""

        quantizers: dict[str, LayerQuantizer]
        consumed = ("gate_up_proj", "down_proj")
        """Parameters of the whole model that the packed form takes the place of."""
        has_gate = True

        def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
            """Return what the experts make of their rows [T, H]; rows beyond the last expert's are padding."""
            quantizer = next(iter(self.quantizers.values()))
            if not quantizer.state.enabled:
                plain: Tensor = super().forward(x, num_tokens_per_expert)
                return plain
            for each in self.quantizers.values():
                each.forward_dtype = self.w1.dtype
            ends = tuple(num_tokens_per_expert.cumsum(0).tolist())
            rounding = GroupedRounding(weight=quantizer.rounding().weight)
            gate_TF = grouped_fake_quantized_linear(x, ends, self.w1, rounding)
            up_TF = grouped_fake_quantized_linear(x, ends, self.w3, rounding)
            activation = (self.activation, self.activation_alpha, self.activation_limit)
            active_TF = apply_expert_activation(gate_TF, up_TF, *activation)
            return grouped_fake_quantized_linear(active_TF, ends, self.w2, rounding)

        def stored_layers(self, parameters: Mapping[str, Tensor]) -> dict[str, StoredLayer]:
            """Return what the checkpoint holds in place of the parameters of all ranks."""
            return FakeQuantizedExperts.stored_layers(self, parameters)

    return FakeQuantizedGroupedExperts
