"""A Hugging Face causal language model as a DeepSpeed `PipelineModule`, one DeepSpeed layer for each stage.

Seen with deepspeed 0.19.8 (`runtime/pipe/module.py`):

- Layers are given to stages by its own partition methods; one layer for each stage makes "uniform" give exactly the
  stages that a plan chose, and Transformers recomputes single decoder layers inside.
- Weights are tied through `TiedLayerSpec`, whose module is registered twice; tied here is the weight of two modules
  with different forward passes, each under its own name, through the same all-reduce.
- It prints to standard output.
"""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any

import torch
from deepspeed import comm
from deepspeed.pipe import DualPipeVModule, LayerSpec, PipelineModule
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology, PipeModelDataParallelTopology

from ...ds_configs.legality.pipeline import stage_faults, tensor_faults
from ...ds_configs.legality.tensor import tensor_parallel_faults
from ...ds_configs.specs.errors import Fault, UsageError
from ...ds_configs.specs.stages import PipelineStage, partition_faults
from .loading import StageParts
from .stage import CausalLMStage, causal_lm_loss

if TYPE_CHECKING:
    from torch import Tensor


class _CausalLM:
    """The stages, and the head's weight tied to the embedding's where they lie on two ranks."""

    def __init__(self, parts: StageParts, **settings: Any) -> None:
        # The base class asks for the tied modules while it is being built.
        self.source = parts
        super().__init__(**settings)

    def _index_tied_modules(self: Any) -> dict[str, Any]:
        chunks = len(self._layer_specs)
        first, last = self.stage_owner(0), self.stage_owner(chunks - 1)
        if not self.source.tied or first == last:
            return {}
        tied: dict[str, Any] = {}
        for place in self._places():
            ranks = [self._grid.stage_to_global(stage_id=stage, **place) for stage in (first, last)]
            group = comm.new_group(ranks=ranks)
            if self.global_rank not in ranks:
                continue
            family = self.source.family
            name = family.embedding if self.global_rank == ranks[0] else family.head
            module = self.forward_funcs[0].get_submodule(name)
            tied["token_embedding"] = {"ranks": ranks, "group": group, "weight_attr": ["weight"], "module": module}
            # The norm of the gradient counts the matrix once.
            module.weight.ds_pipe_replicated = self.global_rank != ranks[0]
        return tied

    def _places(self: Any) -> list[dict[str, int]]:
        """Return the coordinates of each pipeline of the grid."""
        replicas = [{"data": data} for data in range(self._grid.data_parallel_size)]
        if self.tensor_parallel_size == 1:
            return replicas
        return [place | {"model": rank} for place in replicas for rank in range(self.tensor_parallel_size)]

    def _partition_layers(self: Any, method: str = "uniform") -> None:
        # The grid exists from here on, and the layers are built next.
        if self.tensor_parallel_size > 1:
            for spec in self._layer_specs:
                spec.module_kwargs["tensor_group"] = self._grid.get_slice_parallel_group()
        super()._partition_layers(method)  # type: ignore[misc]

    @property
    def tensor_parallel_size(self: Any) -> int:
        """Ranks that hold a stage together."""
        return int(self._grid.get_slice_parallel_world_size())

    @property
    def tensor_parallel_rank(self: Any) -> int:
        """Index of this rank among them."""
        return int(self._grid.get_slice_parallel_rank())

    @property
    def stages(self: Any) -> tuple[CausalLMStage, ...]:
        """The stages that this rank holds: one, or two with DualPipeV."""
        return tuple(child for child in self.children() if isinstance(child, CausalLMStage))

    @property
    def data_parallel_rank(self: Any) -> int:
        """Index of this rank among those with the same stages."""
        return int(self._grid.data_parallel_id)

    def get_tied_weights_and_groups(self: Any) -> list[tuple[Tensor, Any]]:
        """Return each tied weight that this rank holds, with the ranks that sum its gradient."""
        return [(tied["module"].weight, tied["group"]) for tied in self.tied_comms.values()]


class CausalLMPipeline(_CausalLM, PipelineModule):
    """Stages of a causal language model for the 1F1B schedule."""


class CausalLMDualPipe(_CausalLM, DualPipeVModule):
    """Stages of a causal language model for DualPipeV: rank r holds parts r and 2p - 1 - r."""


def build_pipeline_module(
    model: Any,
    stages: tuple[PipelineStage, ...],
    *,
    activation_checkpointing: bool = False,
    dual_pipe: bool = False,
    tensor_parallel_size: int = 1,
    dtype: torch.dtype | None = None,
    attn_implementation: str | None = None,
    revision: str | None = None,
) -> CausalLMPipeline | CausalLMDualPipe:
    """Return the module that `deepspeed.initialize` trains; every rank calls it, with the process group ready.

    The micro-batches of a step must have one shape.

    Ranks are laid out as DeepSpeed does, `rank = (stage * replicas + replica) * tensor_parallel_size + tensor_rank`, so
    that neighbours share the layers of a stage and the most distant ranks only pass activations on.

    Args:
        model: A live model, whose own modules the stage holds; one on the meta device; or the directory or Hub id of a
            checkpoint, of which each rank reads its stage alone.
        stages: p contiguous parts that cover the model, 2p for DualPipeV.
        activation_checkpointing: Whether each decoder layer is recomputed in the backward pass.
        dual_pipe: Whether DualPipeV runs it.
        tensor_parallel_size: Ranks that hold the layers of a stage together. The DeepSpeed configuration then needs
            `pipeline_tensor_parallel.ENGINE_SECTION`; a live model's matrices are cut in place.
        dtype: Weights of a checkpoint are cast to it; `None` keeps the dtype of its config.
        attn_implementation: Attention of a model from a checkpoint.
        revision: Revision of a Hub id.

    Raises:
        UsageError: The model, the stages or the ranks do not allow it; all faults together.
    """
    parts = (
        model
        if isinstance(model, StageParts)
        else StageParts(model, dtype=dtype, attn_implementation=attn_implementation, revision=revision)
    )
    pipeline_ranks = len(stages) // 2 if dual_pipe else len(stages)
    faults = partition_faults(stages, parts.config.num_hidden_layers, dual_pipe=dual_pipe)
    faults += stage_faults(
        stages=max(1, pipeline_ranks),
        num_layers=parts.config.num_hidden_layers,
        world_size=comm.get_world_size(),
        tensor_parallel_size=tensor_parallel_size,
        dual_pipe=dual_pipe,
    )
    faults += _tensor_faults(parts.config, tensor_parallel_size, dual_pipe=dual_pipe)
    if faults:
        raise UsageError(faults)
    specs = [
        LayerSpec(CausalLMStage, parts, stage, activation_checkpointing=activation_checkpointing) for stage in stages
    ]
    module_class: Any = CausalLMDualPipe if dual_pipe else CausalLMPipeline
    with redirect_stdout(sys.stderr):
        module: CausalLMPipeline | CausalLMDualPipe = module_class(
            parts,
            layers=specs,
            topology=_topology(pipeline_ranks, tensor_parallel_size),
            loss_fn=causal_lm_loss,
            partition_method="uniform",
        )
    parts.release()
    return module


def _topology(stages: int, tensor_ranks: int) -> Any:
    replicas = comm.get_world_size() // (stages * tensor_ranks)
    if tensor_ranks == 1:
        return PipeDataParallelTopology(num_pp=stages, num_dp=replicas)
    return PipeModelDataParallelTopology(num_pp=stages, num_mp=tensor_ranks, num_dp=replicas)


def _tensor_faults(config: Any, size: int, *, dual_pipe: bool) -> list[Fault]:
    if size == 1:
        return []
    faults = tensor_faults(model_type=config.model_type, tensor_parallel_size=size, dual_pipe=dual_pipe)
    if faults:
        return faults
    return tensor_parallel_faults(
        tensor_parallel_size=size,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        model_type=config.model_type,
    )
