"""The modules that one rank's stages hold: a live model's own, or built and loaded alone from a checkpoint or seed.

Seen with transformers 5.17.0: `from_pretrained` reads a whole model; here the model is built on the meta device and
only the parts that a rank computes with get memory, so that no rank needs more than its stage.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...ds_configs.specs.errors import Fault, UsageError
from ...ds_configs.specs.stages import PipelineStage
from ..transformers.checkpoint_tensors import CheckpointTensors
from .families import pipeline_family

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class StageParts:
    """Source of the modules of stages."""

    def __init__(
        self,
        model: Any,
        *,
        dtype: torch.dtype | None = None,
        attn_implementation: str | None = None,
        revision: str | None = None,
    ) -> None:
        """Take a live model, one on the meta device, or the directory or Hub id of a checkpoint.

        Args:
            model: With weights its modules are used as they are; on the meta device each part that is asked for gets
                random weights that depend on the process's seed and the part's name, not on the stages.
            dtype: What a checkpoint's weights are cast to; `None` keeps the dtype of its config.
            attn_implementation: Attention of a model from a checkpoint; `None` for Transformers' choice.
            revision: Revision of a Hub id.

        Raises:
            UsageError: No pipeline can be made of the model, or nothing of that name holds safetensors.
        """
        self._tensors: CheckpointTensors | None = None
        if isinstance(model, str | Path):
            self._tensors = CheckpointTensors(str(model), revision=revision)
            model = _on_meta(str(model), dtype=dtype, attn_implementation=attn_implementation, revision=revision)
        self.family = pipeline_family(model)
        self.config = model.config
        self.generation_config = getattr(model, "generation_config", None)
        self.model_class = type(model).__name__
        embedding, head = (model.get_submodule(name) for name in (self.family.embedding, self.family.head))
        self.tied = head.weight is embedding.weight
        """Whether head and token embedding are one matrix."""
        self._model: Any = model
        self._made: dict[int, Tensor] = {}
        """Memory of what was on the meta device, by the identity of its placeholder: tied parts share it."""
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

    def part(self, name: str) -> torch.nn.Module:
        """Return a module of the model with memory and weights."""
        import torch

        module: torch.nn.Module = self._model.get_submodule(name)
        if not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
            return module
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed((torch.initial_seed() + zlib.crc32(self._stored_name(name).encode())) % 2**63)
            self._materialise(name, module)
        return module

    def release(self) -> None:
        """Let go of the model, so that what no stage holds can be freed; parts cannot be asked for afterwards."""
        self._model = None
        self._made.clear()
        self._placeholders.clear()

    def _stored_name(self, name: str) -> str:
        """A tied head is made of what the embedding is made of, on whichever rank it lies."""
        return self.family.embedding if self.tied and name == self.family.head else name

    def _materialise(self, name: str, module: torch.nn.Module) -> None:
        import torch

        loaded: list[Any] = []
        for path, owner, key, placeholder in _meta_tensors(name, module):
            made = self._made.get(id(placeholder))
            if made is None:
                made = torch.empty_like(placeholder, device="cpu")
                if isinstance(placeholder, torch.nn.Parameter):
                    made = torch.nn.Parameter(made)
                    if self._tensors is not None:
                        stored = self._stored_name(name) + path.removeprefix(name)
                        with torch.no_grad():
                            made.copy_(self._tensors.read(stored, shape=placeholder.shape))
                        loaded.append(made)
                self._made[id(placeholder)] = made
                self._placeholders.append(placeholder)
            else:
                loaded.append(made)
            setattr(owner, key, made)
        # Transformers 5 leaves parameters with this mark alone when it initialises a module's others.
        for parameter in loaded:
            parameter._is_hf_initialized = True
        # Also computes buffers that no checkpoint holds, such as rotary frequencies.
        with torch.no_grad():
            for child in module.modules():
                self._model._init_weights(child)
        for parameter in loaded:
            del parameter._is_hf_initialized


def _meta_tensors(name: str, module: Any) -> Iterator[tuple[str, Any, str, Any]]:
    """Yield path, owner, attribute and tensor of what has no memory yet."""
    for prefix, child in list(module.named_modules(prefix=name)):
        for table in (child._parameters, child._buffers):
            for key, tensor in list(table.items()):
                if tensor is not None and tensor.is_meta:
                    yield f"{prefix}.{key}", child, key, tensor


def _on_meta(source: str, *, dtype: torch.dtype | None, attn_implementation: str | None, revision: str | None) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    config = AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=False)
    if type(config) not in AutoModelForCausalLM._model_mapping:
        rule = "has no causal language model in transformers"
        raise UsageError(Fault(where="model_type", value=config.model_type, rule=rule))
    choice = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype or config.dtype or torch.float32, trust_remote_code=False, **choice
        )
    model.tie_weights()
    # Most checkpoints of a base model have none.
    with suppress(OSError):
        model.generation_config = GenerationConfig.from_pretrained(source, revision=revision)
    return model
