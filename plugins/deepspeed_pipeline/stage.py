"""One pipeline stage of a causal language model: a part of Transformers' modules, under their own names.

B sequences, S tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from ...ds_configs.legality.axes import PIPELINE_MODEL_TYPES
from ...ds_configs.specs.errors import ConfigError, UsageError
from ...ds_configs.specs.layout import PipelineStage
from .. import patches
from ..deepspeed.engine import stages_of
from ..huggingface_hub import model_directory
from ..safetensors import StoredTensor, opened, read_checkpoint

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from transformers import PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineFamily:
    """Names of a causal language model's parts, as in its checkpoint."""

    embedding: str = "model.embed_tokens"
    position_embedding: str = ""
    """Learned position embedding that is added to the token embedding; empty for rotary positions."""
    dropout: str = ""
    """Dropout after the embedding; empty for none."""
    rotary: str = "model.rotary_emb"
    """Module that turns position ids into cosines and sines; empty for learned positions."""
    layers: str = "model.layers"
    norm: str = "model.norm"
    head: str = "lm_head"
    windows: Literal["never", "everywhere", "by_layer"] = "never"
    """Layers with sliding-window attention, if the config has a window."""


_FAMILIES = {
    "gemma2": PipelineFamily(windows="by_layer"),
    "gpt2": PipelineFamily(
        embedding="transformer.wte",
        position_embedding="transformer.wpe",
        dropout="transformer.drop",
        rotary="",
        layers="transformer.h",
        norm="transformer.ln_f",
    ),
    "llama": PipelineFamily(),
    "mistral": PipelineFamily(windows="everywhere"),
    "phi3": PipelineFamily(windows="everywhere"),
    "qwen2": PipelineFamily(windows="by_layer"),
    "qwen3": PipelineFamily(windows="by_layer"),
}
assert tuple(_FAMILIES) == PIPELINE_MODEL_TYPES


def pipeline_family(model: PreTrainedModel) -> PipelineFamily:
    """Return the family of a Transformers model.

    Raises:
        UsageError: The model is of another family or task, has cross-attention, or is wrapped or quantized.
    """
    name, config = type(model).__name__, getattr(model, "config", None)
    if hasattr(model, "peft_config") or getattr(model, "_hf_peft_config_loaded", False):
        rule, fix = "pipelines train full models, not adapters", "merge the adapter, or train it with ZeRO"
        raise UsageError(ConfigError(where="model", value=name, rule=rule, fix=fix))
    model_type = getattr(config, "model_type", None)
    if model_type not in _FAMILIES:
        rule, fix = f"pipelines support {', '.join(PIPELINE_MODEL_TYPES)}", "use ZeRO-3 for this model"
        raise UsageError(ConfigError(where="model.config.model_type", value=model_type, rule=rule, fix=fix))
    errors = []
    if not name.endswith(("ForCausalLM", "GPT2LMHeadModel")):
        rule, fix = "pipelines need a language modelling head", "use AutoModelForCausalLM"
        errors.append(ConfigError(where="model", value=name, rule=rule, fix=fix))
    if getattr(config, "add_cross_attention", False):
        rule, fix = "pipelines have no encoder to attend to", "set it to false"
        errors.append(ConfigError(where="model.config.add_cross_attention", value=True, rule=rule, fix=fix))
    if getattr(model, "is_quantized", False) or getattr(config, "quantization_config", None) is not None:
        rule, fix = "pipelines cannot train quantized weights", "load it in 16 or 32 bit"
        errors.append(ConfigError(where="model", value=name, rule=rule, fix=fix))
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    if frozen:
        rule, fix = "pipelines train all weights of a model", "set requires_grad of all parameters"
        errors.append(ConfigError(where="model", value=frozen[0], rule=rule, fix=fix))
    if errors:
        raise UsageError(errors)
    return _FAMILIES[model_type]


def attention_masks(
    family: PipelineFamily,
    config: PreTrainedConfig,
    hidden_BSD: Tensor,
    attention_mask_BS: Tensor | None,
    position_ids_BS: Tensor,
    layers: range,
) -> dict[int, Any]:
    """Return each layer's attention mask, made by Transformers for the model's attention implementation.

    Of `hidden_BSD`, the input of the first layer, only shape, dtype and device are used. The padding mask has 1 for
    tokens. Without it, positions [1 or B, S] distinguish packed sequences. `layers` are indices in the model.
    """
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

    makers = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}
    if family.windows == "by_layer":
        kinds = {layer: str(config.layer_types[layer]) for layer in layers}
    else:
        windowed = family.windows == "everywhere" and config.sliding_window is not None
        kinds = dict.fromkeys(layers, "sliding_attention" if windowed else "full_attention")
    masks = {
        # No cache: Transformers 5.24 renamed the fourth parameter.
        kind: makers[kind](config, hidden_BSD, attention_mask_BS, None, position_ids=position_ids_BS)
        for kind in sorted(set(kinds.values()))
    }
    return {layer: masks[kind] for layer, kind in kinds.items()}


class StageParts:
    """Source of the modules of stages: a model, which may be on the meta device, or a checkpoint's directory or Hub id.

    Parts on the meta device get random weights, which depend on the process's seed and the part's name, not on the
    stages. Weights of a checkpoint are cast to `dtype`, by default that of its config.

    Raises:
        UsageError: The model does not support pipelines.
        RefusedInputError: The checkpoint has no safetensors, or damaged ones.
    """

    def __init__(
        self,
        model: PreTrainedModel | str | Path,
        *,
        dtype: torch.dtype | None = None,
        attn_implementation: str | None = None,
        revision: str | None = None,
    ) -> None:
        self._stored: Mapping[str, StoredTensor] | None = None
        if isinstance(model, str | Path):
            from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

            source = str(model)
            directory = model_directory(source, revision=revision)
            self._stored = read_checkpoint(directory)
            config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
            # A checkpoint must not record a directory of this machine's cache.
            config._name_or_path = source
            if type(config) not in AutoModelForCausalLM._model_mapping:
                rule = "has no causal language model in transformers"
                raise UsageError(ConfigError(where="model_type", value=config.model_type, rule=rule))
            choice = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(
                    config, dtype=dtype or config.dtype or torch.float32, trust_remote_code=False, **choice
                )
            model.tie_weights()
            # Most checkpoints of a base model have none.
            with suppress(OSError):
                model.generation_config = GenerationConfig.from_pretrained(directory)
        self.family = pipeline_family(model)
        self.config = model.config
        self.generation_config = getattr(model, "generation_config", None)
        self.model_class = type(model).__name__
        embedding, head = (model.get_submodule(name) for name in (self.family.embedding, self.family.head))
        self.tied = head.weight is embedding.weight
        """Whether head and token embedding are one matrix."""
        self._model: Any = model
        self._made: dict[int, Tensor] = {}
        """Tensors that replaced meta tensors, by the identity of the meta tensor: tied parts share one."""
        self._placeholders: list[Tensor] = []

    def __repr__(self) -> str:
        return f"StageParts({self.model_class})"

    def names(self, stage: PipelineStage) -> tuple[str, ...]:
        """Return the names of a stage's modules in the order of the forward pass."""
        family = self.family
        first = (family.embedding, family.position_embedding, family.dropout) if stage.has_embedding else ()
        layers = (f"{family.layers}.{index}" for index in range(stage.first_layer, stage.end_layer))
        last = (family.norm, family.head) if stage.has_head else ()
        return tuple(name for name in (*first, family.rotary, *layers, *last) if name)

    def part(self, name: str) -> nn.Module:
        """Return a module of the model with memory, and weights from the checkpoint or random ones."""
        module: nn.Module = self._model.get_submodule(name)
        if not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
            return module
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed((torch.initial_seed() + zlib.crc32(self._stored_name(name).encode())) % 2**63)
            meta_tensors = [
                (f"{prefix}.{key}", child, key, tensor)
                for prefix, child in list(module.named_modules(prefix=name))
                for table in (child._parameters, child._buffers)
                for key, tensor in list(table.items())
                if tensor is not None and tensor.is_meta
            ]
            loaded: list[Any] = []
            for path, owner, key, placeholder in meta_tensors:
                made = self._made.get(id(placeholder))
                if made is None:
                    made = torch.empty_like(placeholder, device="cpu")
                    if isinstance(placeholder, nn.Parameter):
                        made = nn.Parameter(made)
                        if self._stored is not None:
                            self._read(self._stored_name(name) + path.removeprefix(name), made)
                            loaded.append(made)
                    self._made[id(placeholder)] = made
                    self._placeholders.append(placeholder)
                else:
                    loaded.append(made)
                setattr(owner, key, made)
            # Transformers 5 does not initialise parameters with this mark.
            for parameter in loaded:
                parameter._is_hf_initialized = True
            # Also computes buffers that no checkpoint holds, such as rotary frequencies.
            with torch.no_grad():
                for child in module.modules():
                    self._model._init_weights(child)
            for parameter in loaded:
                del parameter._is_hf_initialized
        return module

    def release(self) -> None:
        """Drop the model, so that modules of other stages can be freed; `part` cannot be called afterwards."""
        self._model = None
        self._made.clear()
        self._placeholders.clear()

    def _stored_name(self, name: str) -> str:
        """Return the checkpoint name of a part; a tied head uses the embedding's tensor on any rank."""
        return self.family.embedding if self.tied and name == self.family.head else name

    def _read(self, name: str, made: Tensor) -> None:
        """Copy a tensor of the checkpoint, in which names of a base model lack the first part."""
        assert self._stored is not None, "the parts come from a checkpoint"
        names = (candidate for candidate in (name, name.partition(".")[2]) if candidate in self._stored)
        stored = next(names, None)
        shape = None if stored is None else self._stored[stored].shape
        if stored is None or shape != made.shape:
            rule = "is missing in the checkpoint"
            if shape is not None:
                rule = f"has shape {shape}, but the config requires {tuple(made.shape)}"
            raise UsageError(ConfigError(where="model", value=name, rule=rule))
        with opened(self._stored[stored].file) as file, torch.no_grad():
            made.copy_(file.get_tensor(stored))


ENGINE_SECTION = {"pipe_partitioned": False, "grad_partitioned": False}
"""`pipeline` section of the DeepSpeed configuration. By default DeepSpeed shards activations before it sends them, with
sizes that it communicates only once (runtime/pipe/engine.py, `pipe_partition_input_meta_cache`)."""

_BY_OUTPUT = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_BY_INPUT = ("o_proj", "down_proj")
_OF_HEADS = ("q_norm", "k_norm")
"""Norms of single heads: replicated, but each rank applies them only to its own heads."""


def divide_layer(layer: nn.Module, group: ProcessGroup) -> None:
    """Replace the matrices of a decoder layer (not of GPT-2) by this rank's shards, in place."""
    from deepspeed.module_inject.layers import LinearAllreduce, LinearLayer, set_autotp_mode

    def summed(gradient: Tensor) -> Tensor:
        gradient = gradient.contiguous()
        torch.distributed.all_reduce(gradient, group=group)
        return gradient

    # The mode is global and read in every forward pass: it stays set until `forget_tensor_parallel`.
    set_autotp_mode(training=True)
    for path, module in list(layer.named_modules()):
        parent, _, name = path.rpartition(".")
        if name in _BY_OUTPUT:
            setattr(layer.get_submodule(parent), name, LinearLayer(module, group, name=path))
        elif name in _BY_INPUT:
            setattr(layer.get_submodule(parent), name, LinearAllreduce(module, group, name=path))
        elif name in _OF_HEADS:
            module.weight.register_hook(summed)


def stage_inputs(
    first: Tensor, attention_mask_BS: Tensor | None = None, position_ids_BS: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Return the inputs of a stage: ids [B, S] or hidden states [B, S, D], then padding mask and positions, if any.

    Positions without a mask distinguish packed sequences. Masks (1 for tokens, 0 for padding) are uint8 and positions
    int32, so that a stage recognizes them by dtype.
    """
    mask = () if attention_mask_BS is None else (attention_mask_BS.to(torch.uint8),)
    positions = () if position_ids_BS is None else (position_ids_BS.to(torch.int32),)
    return (first, *mask, *positions)


def _mask_and_positions(others: Sequence[Tensor]) -> tuple[Tensor | None, Tensor | None]:
    positions = next((tensor for tensor in others if tensor.dtype == torch.int32), None)
    mask = next((tensor for tensor in others if tensor is not positions), None)
    return mask, positions


class CausalLMStage(nn.Module):
    """Contiguous layers of a model, with the embedding on the first stage and the head on the last.

    The first stage reads `stage_inputs(...)`, the last returns logits. The others return hidden states with the same
    mask and positions, because making rotary tables and causal masks on each stage is cheaper than sending them. A
    `tensor_group` shards the layers.
    """

    def __init__(
        self,
        parts: StageParts,
        stage: PipelineStage,
        *,
        activation_checkpointing: bool = False,
        tensor_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.config, self.stage, self._family = parts.config, stage, parts.family
        for name in parts.names(stage):
            module = parts.part(name)
            # One after the other, so that at most one layer is unsharded.
            if tensor_group is not None and name.startswith(f"{self._family.layers}."):
                divide_layer(module, tensor_group)
            *parents, own_name = name.split(".")
            root: nn.Module = self
            for parent in parents:
                if parent not in root._modules:
                    root.add_module(parent, nn.Module())
                root = root.get_submodule(parent)
            root.add_module(own_name, module)
        self.tied_name = f"{parts.family.head}.weight" if parts.tied and stage.has_head else None
        """Name of the head's weight if it is tied to the token embedding, which another stage may hold."""
        if activation_checkpointing:
            for index in self._layers:
                layer: Any = self.get_submodule(f"{self._family.layers}.{index}")
                layer.gradient_checkpointing = True
                checkpoint = partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
                patches.assign("pipeline-checkpointing", checkpoint, on=layer)

    @property
    def _layers(self) -> range:
        return range(self.stage.first_layer, self.stage.end_layer)

    def forward(self, inputs: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        """Return the inputs of the next stage, or logits on the last stage."""
        first, *others = (inputs,) if isinstance(inputs, Tensor) else inputs
        sent = stage_inputs(first, *_mask_and_positions(others))[1:]
        mask_BS, own_positions_BS = _mask_and_positions(sent)
        # Default positions count from 0, padding included, as in the models.
        counted_BS = torch.arange(first.shape[1], device=first.device)[None]
        position_ids_BS = counted_BS if own_positions_BS is None else own_positions_BS.long()
        family, hidden_BSD = self._family, first
        if self.stage.has_embedding:
            hidden_BSD = self.get_submodule(family.embedding)(first)
            if family.position_embedding:
                hidden_BSD = hidden_BSD + self.get_submodule(family.position_embedding)(position_ids_BS)
            if family.dropout:
                hidden_BSD = self.get_submodule(family.dropout)(hidden_BSD)
        masks = attention_masks(family, self.config, hidden_BSD, mask_BS, position_ids_BS, self._layers)
        rotary = {}
        if family.rotary:
            rotary["position_embeddings"] = self.get_submodule(family.rotary)(hidden_BSD, position_ids_BS)
        for index in self._layers:
            hidden_BSD = self.get_submodule(f"{family.layers}.{index}")(
                hidden_BSD, attention_mask=masks[index], position_ids=position_ids_BS, use_cache=False, **rotary
            )
        if not self.stage.has_head:
            return (hidden_BSD, *sent) if sent else hidden_BSD
        logits_BSV: Tensor = self.get_submodule(family.head)(self.get_submodule(family.norm)(hidden_BSD))
        cap = getattr(self.config, "final_logit_softcapping", None)
        return logits_BSV if cap is None else torch.tanh(logits_BSV / cap) * cap


def causal_lm_loss(logits_BSV: Tensor, labels: tuple[Tensor, Tensor]) -> Tensor:
    """Return `scale * sum(-log p(label))` over the labelled tokens, summed in fp32.

    DeepSpeed averages a step's loss over micro-batches and data-parallel ranks. With `scale = micro_batches *
    data_parallel_size / tokens`, where `tokens` counts the whole global batch, this is the mean over tokens that the
    Trainer computes from `num_items_in_batch`. `labels` are labels [B, S], not shifted, -100 for none, and the scale.
    """
    labels_BS, scale = labels
    # Shift the labels instead of the logits, which would be copied.
    next_BS = nn.functional.pad(labels_BS[:, 1:], (0, 1), value=-100)
    losses = nn.functional.cross_entropy(
        logits_BSV.flatten(0, 1).float(), next_BS.flatten(), ignore_index=-100, reduction="sum"
    )
    return losses * scale.to(losses.dtype)


def add_over_stages(model: nn.Module, counts: Tensor) -> Tensor:
    """Return counts summed over the ranks that hold the stages of a model; every rank must call it."""
    pipeline: Any = stages_of(model)
    if pipeline is None:
        return counts
    summed = counts.to(next(pipeline.parameters()).device)
    torch.distributed.all_reduce(summed, group=pipeline._grid.get_pipe_parallel_group())
    return summed.to(counts.device)
