"""A Hugging Face causal language model as a DeepSpeed `PipelineModule`, with one DeepSpeed layer per stage.

Observed with deepspeed 0.19.8 (`runtime/pipe/module.py`):

- DeepSpeed assigns layers to stages by its own partition methods. With one layer per stage, "uniform" yields exactly
  the stages of a plan, and Transformers recomputes single decoder layers inside a stage.
- `TiedLayerSpec` ties weights by registering a module twice. Here the weights of two modules with different forward
  passes are tied, each under its own name, through the same all-reduce.
- DeepSpeed prints to standard output.
"""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any

import torch
from deepspeed import comm
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology, PipeModelDataParallelTopology

from ...ds_configs.legality.axes import stage_errors, tensor_errors, tensor_parallel_errors
from ...ds_configs.specs.errors import UsageError
from ...ds_configs.specs.layout import Layout, PipelineStage, partition_errors
from ...ds_configs.specs.model import ModelTraits
from .stage import CausalLMStage, StageParts, causal_lm_loss

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


class CausalLMPipeline(PipelineModule):
    """Stages of a causal language model; ties the head's weight to the embedding's if they are on different ranks."""

    def __init__(self, parts: StageParts, **settings: object) -> None:
        # The constructor of the base class calls `_index_tied_modules`.
        self.source = parts
        super().__init__(**settings)

    def _index_tied_modules(self: Any) -> dict[str, Any]:
        chunks = len(self._layer_specs)
        first, last = self.stage_owner(0), self.stage_owner(chunks - 1)
        if not self.source.tied or first == last:
            return {}
        # The coordinates of each pipeline in the grid.
        pipelines = [{"data": data} for data in range(self._grid.data_parallel_size)]
        if self.tensor_parallel_size > 1:
            tensor_ranks = range(self.tensor_parallel_size)
            pipelines = [pipeline | {"model": rank} for pipeline in pipelines for rank in tensor_ranks]
        tied: dict[str, Any] = {}
        for pipeline in pipelines:
            ranks = [self._grid.stage_to_global(stage_id=stage, **pipeline) for stage in (first, last)]
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

    def _partition_layers(self: Any, method: str = "uniform") -> None:
        # The grid exists from here on, and the layers are built next.
        if self.tensor_parallel_size > 1:
            for spec in self._layer_specs:
                spec.module_kwargs["tensor_group"] = self._grid.get_slice_parallel_group()
        super()._partition_layers(method)

    @property
    def tensor_parallel_size(self: Any) -> int:
        """Ranks that shard the layers of a stage."""
        return int(self._grid.get_slice_parallel_world_size())

    @property
    def tensor_parallel_rank(self: Any) -> int:
        """Index of this rank in its tensor-parallel group."""
        return int(self._grid.get_slice_parallel_rank())

    @property
    def stages(self: Any) -> tuple[CausalLMStage, ...]:
        """The stage that this rank holds."""
        return tuple(child for child in self.children() if isinstance(child, CausalLMStage))

    @property
    def data_parallel_rank(self: Any) -> int:
        """Index of this rank among the ranks with the same stages."""
        return int(self._grid.data_parallel_id)

    def get_tied_weights_and_groups(self: Any) -> list[tuple[Tensor, Any]]:
        """Return each tied weight of this rank, with the process group that sums its gradient."""
        return [(tied["module"].weight, tied["group"]) for tied in self.tied_comms.values()]


def build_pipeline_module(
    model: PreTrainedModel,
    stages: tuple[PipelineStage, ...],
    *,
    activation_checkpointing: bool = False,
    tensor_parallel_size: int = 1,
    dtype: torch.dtype | None = None,
    attn_implementation: str | None = None,
    revision: str | None = None,
) -> CausalLMPipeline:
    """Return the module that `deepspeed.initialize` trains; every rank calls it after `init_process_group`.

    The micro-batches of a step must have one shape. DeepSpeed numbers ranks as `rank = (stage * replicas + replica) *
    tensor_parallel_size + tensor_rank`, so the most distant ranks only exchange activations. With a
    `tensor_parallel_size`, the DeepSpeed configuration needs `stage.ENGINE_SECTION`.

    Args:
        model: As for `StageParts`; the stage uses a model's own modules, and a checkpoint's parts are read by each
        rank. stages: Contiguous stages that cover the model, one per rank.

    Raises:
        UsageError: The model, the stages or the ranks do not support a pipeline; lists all errors.
    """
    parts = (
        model
        if isinstance(model, StageParts)
        else StageParts(model, dtype=dtype, attn_implementation=attn_implementation, revision=revision)
    )
    config = parts.config
    errors = partition_errors(stages, config.num_hidden_layers)
    errors += stage_errors(
        stages=max(1, len(stages)),
        num_layers=config.num_hidden_layers,
        world_size=comm.get_world_size(),
        tensor_parallel_size=tensor_parallel_size,
    )
    if tensor_parallel_size > 1:
        axis_errors = tensor_errors(model_type=config.model_type, tensor_parallel_size=tensor_parallel_size)
        errors += axis_errors or tensor_parallel_errors(
            ModelTraits(
                model_type=config.model_type,
                num_attention_heads=config.num_attention_heads,
                num_key_value_heads=config.num_key_value_heads,
                intermediate_size=config.intermediate_size,
                vocab_size=config.vocab_size,
            ),
            Layout(engine="deepspeed", zero_stage=0, tp=tensor_parallel_size),
        )
    if errors:
        raise UsageError(errors)
    specs = [
        LayerSpec(CausalLMStage, parts, stage, activation_checkpointing=activation_checkpointing) for stage in stages
    ]
    replicas = comm.get_world_size() // (len(stages) * tensor_parallel_size)
    if tensor_parallel_size == 1:
        topology = PipeDataParallelTopology(num_pp=len(stages), num_dp=replicas)
    else:
        topology = PipeModelDataParallelTopology(num_pp=len(stages), num_mp=tensor_parallel_size, num_dp=replicas)
    with redirect_stdout(sys.stderr):
        module = CausalLMPipeline(
            parts, layers=specs, topology=topology, loss_fn=causal_lm_loss, partition_method="uniform"
        )
    parts.release()
    return module
