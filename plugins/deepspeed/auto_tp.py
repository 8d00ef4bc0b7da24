"""DeepSpeed AutoTP under the Trainer: sharding plans, cleanup between runs, and groups that share their batches.

Observed with deepspeed 0.19.8, transformers 5.17.0, accelerate 1.15.0 and torch 2.13.0, on two and four gloo ranks.
Losses, weights, clipped gradient norms and the loss over all tokens need no correction: DeepSpeed averages over the
data-parallel ranks, and the Trainer counts the tokens of every rank and multiplies by all ranks, which cancels out.
These need a correction:

- `module_inject/tp_plan_converter.py` does not know `rowwise_split_input`, so Phi-3 is rejected. The style is that of
  `LinearAllreduceWithReplicatedInput`, which AutoTP uses only for output heads: names of `lm_head_patterns`.
- `AutoTP.update_mp_params` divides `num_key_value_heads` of an attention whose projections are gathered again.
- For tied embeddings, transformers adds `embedding_rowwise` to the plan. AutoTP then replaces the loss, and each rank
  keeps only the logits of its vocabulary shard, which a user's own loss or metric receives.
- `Accelerator.gather` collects the results of every rank of a group, and `gather_for_metrics` truncates the last batch
  by the number of samples that one rank saw: 18 samples on two ranks came back as 34.
- Accelerate dispatches iterable data sets from the first rank, the same batch to all groups.
- `AutoTP.register_replicated_grad_hooks` adds hooks to `q_norm` and `k_norm` (Qwen3, Gemma 3), also to frozen ones.
- Process groups, the mode and the arguments of `tp_model_init` are global: a second model of another size is rejected,
  and a model without tensor parallelism uses the first model's groups as its data-parallel groups.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ...ds_configs.specs.errors import ConfigError
from .. import patches
from .engine import own_part, with_all_columns_and_rows

if TYPE_CHECKING:
    import torch
    from deepspeed import DeepSpeedEngine
    from transformers import PreTrainedModel, Trainer

FUSED_MLP_UP = "gate_up_proj"
"""One matrix with gate and up projection, which are sharded separately (Phi-3)."""
FUSED_MLP_DOWN = "down_proj"
_GATHERED = ("colwise_gather_output", "colwise_rep")
_SPLIT_INPUT = "rowwise_split_input"


def tensor_plan(model: PreTrainedModel) -> dict[str, str]:
    """Return the model's tensor-parallel plan, name patterns to styles; empty when transformers has none."""
    from deepspeed.runtime.tensor_parallel.config import _get_hf_tp_plan

    return dict(_get_hf_tp_plan(model) or {})


def partition_config(plan: Mapping[str, str]) -> dict[str, Any] | None:
    """Return DeepSpeed's `partition_config` for a plan that AutoTP cannot translate; `None` if AutoTP can.

    Attention with one matrix for query, key and value runs unsharded, with sharded weights: its projection is gathered,
    and the output projection reads a part of its input. A fused MLP is sharded completely, each half separately.
    """
    if _SPLIT_INPUT not in plan.values():
        return None
    specs: list[dict[str, Any]] = []
    split = set()
    for pattern, style in plan.items():
        name = pattern.rpartition(".")[2]
        spec: dict[str, Any] = {"patterns": [".*" + re.escape(pattern).replace(r"\*", ".*") + r"\.weight$"]}
        if name == FUSED_MLP_UP:
            spec |= {"partition_type": "column", "shape": [2, -1], "partition_dim": 0}
        elif style == "colwise" or style in _GATHERED:
            spec |= {"partition_type": "column", "gather_output": style in _GATHERED}
        elif style == _SPLIT_INPUT or style == "rowwise":
            spec |= {"partition_type": "row"}
            if style == _SPLIT_INPUT and name != FUSED_MLP_DOWN:
                split.add(name)
        else:
            continue
        specs.append(spec)
    return {"use_default_specs": False, "layer_specs": specs, "lm_head_patterns": sorted(split)}


def tensor_parallel_section(model: PreTrainedModel, size: int) -> dict[str, Any]:
    """Return the `tensor_parallel` section of the DeepSpeed configuration for a model."""
    section: dict[str, Any] = {"autotp_size": size, "vocab_parallel_lm_head": False}
    partition = partition_config(tensor_plan(model))
    return section if partition is None else section | {"partition_config": partition}


def keep_whole_attention(model: PreTrainedModel) -> None:
    """Keep AutoTP from dividing the head counts of attention that runs unsharded on every rank."""
    patterns = [_module_regex(pattern) for pattern, style in tensor_plan(model).items() if style == _SPLIT_INPUT]
    for name in [name for name, _ in model.named_modules()]:
        if any(pattern.fullmatch(name) for pattern in patterns) and not name.endswith(FUSED_MLP_DOWN):
            # AutoTP skips modules with this mark (module_inject/auto_tp.py, update_mp_params).
            model.get_submodule(name.rpartition(".")[0]).replaced = True


def allow_frozen_norms() -> None:
    """Restrict AutoTP's gradient hooks on query and key norms to norms that are trained."""

    def of_trained(register: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        def register_replicated_grad_hooks(auto_tp: Any, model: PreTrainedModel) -> None:
            trained = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
            # AutoTP calls no other method of the model.
            register(auto_tp, SimpleNamespace(named_parameters=lambda: trained))

        return register_replicated_grad_hooks

    patches.apply("replicated-gradients-of-trained-parameters", of_trained)


def layers_without_rule(model: PreTrainedModel) -> list[ConfigError]:
    """Return an error for each matrix of an unsharded model that the tensor-parallel plan does not name."""
    patterns = [_module_regex(pattern) for pattern, style in tensor_plan(model).items() if "wise" in style]
    names = (name for name in _matrices(model) if not any(pattern.fullmatch(name) for pattern in patterns))
    return _unsharded_errors(names)


def unpartitioned_layers(model: PreTrainedModel, size: int) -> list[ConfigError]:
    """Return an error for each matrix of a sharded model that is replicated on every rank or sharded unevenly.

    An output head that shares its weight with the token embedding is replicated on purpose.
    """
    from deepspeed.module_inject.layers import TensorParallel_Layer

    uneven = {}
    for name, module in model.named_modules():
        sizes = set(getattr(module, "_partition_sizes", ())) if isinstance(module, TensorParallel_Layer) else set()
        # Logits of an unevenly sharded vocabulary are padded when they are gathered.
        if len(sizes) > 1 and name.rpartition(".")[2] not in ("lm_head", "embed_out"):
            uneven[_starred(name)] = sorted(sizes)
    errors = [
        ConfigError(where=name, value=sizes, rule="is sharded unevenly", fix=f"use a tp that divides it, not {size}")
        for name, sizes in uneven.items()
    ]
    return errors + _unsharded_errors(_matrices(model))


def _matrices(model: PreTrainedModel) -> Iterator[str]:
    """Yield the names of unsharded linear layers, without heads that share their weight with the token embedding."""
    import torch
    from transformers.pytorch_utils import Conv1D

    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear | Conv1D) and id(module.weight) not in embeddings:
            yield name


def _unsharded_errors(names: Iterable[str]) -> list[ConfigError]:
    rule = "would be replicated on every rank: AutoTP has no rule for it"
    fix = "use tp = 1 with ZeRO-3 or a pipeline, or remove this layer"
    return [ConfigError(where=name, rule=rule, fix=fix) for name in dict.fromkeys(map(_starred, names))]


def forget_tensor_parallel() -> None:
    """Clear groups, mode and arguments of an earlier run, so that the next engine of this process makes new ones."""
    if "deepspeed" not in sys.modules:
        return
    from deepspeed.module_inject.layers import set_autotp_mode

    set_autotp_mode(training=False)
    groups = ("_TENSOR_MODEL_PARALLEL_GROUP", "_MODEL_PARALLEL_GROUP", "_DATA_PARALLEL_GROUP")
    for name in ("_TP_MODEL_INIT_ARGS", "mpu", *groups):
        patches.assign(f"forgotten-{name}", None)


def align_random_state(device: torch.device) -> None:
    """Copy the random generator states of a tensor-parallel group's first rank to all its ranks.

    torch's generators on the CPU and `device` draw dropout; collators draw masks from Python's and numpy's.
    """
    import numpy
    import torch
    import torch.distributed as dist
    from deepspeed.utils import groups

    generators = None if device.type == "cpu" else torch.get_device_module(device)
    states: list[Any] = [torch.get_rng_state(), random.getstate(), numpy.random.get_state()]
    states.append(None if generators is None else generators.get_rng_state())
    source = groups.get_tensor_model_parallel_src_rank()
    dist.broadcast_object_list(states, src=source, group=groups.get_tensor_model_parallel_group(), device=device)
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    numpy.random.set_state(states[2])
    if generators is not None:
        generators.set_rng_state(states[3])


def seed_workers_by_group(trainer: Trainer, loader: Any, size: int) -> None:
    """Seed the workers of a training data loader by group of `size` ranks.

    Transformers 5.17.0 (trainer.py, `_get_dataloader`) seeds the workers of map-style data sets by rank.
    """
    from functools import partial

    from transformers.trainer_utils import seed_worker

    source = getattr(loader, "base_dataloader", loader)
    if isinstance(source.worker_init_fn, partial) and source.worker_init_fn.func is seed_worker:
        group = trainer.args.process_index // size
        source.worker_init_fn = partial(seed_worker, num_workers=source.num_workers, rank=group)


def _module_regex(pattern: str) -> re.Pattern[str]:
    return re.compile(".*" + re.escape(pattern).replace(r"\*", r"\d+"))


def _starred(name: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", name)


def gather_heads_for_losses() -> None:
    """Make every model that AutoTP shards from now on provide its gathered output head to losses."""

    def sharing_heads(partition: Callable[..., Any]) -> Callable[..., Any]:
        def apply_autotp_partitioning(engine: DeepSpeedEngine, model: PreTrainedModel, tp_config: Any) -> Any:
            sources = partition(engine, model, tp_config)
            share_head(model)
            return sources

        return apply_autotp_partitioning

    patches.apply("tensor-parallel-head", sharing_heads)


def share_head(model: PreTrainedModel) -> None:
    """Gather a sharded output head for readers of its weight during a forward pass; ignore an unsharded head."""
    from deepspeed.module_inject.layers import LinearLayer

    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    # Without `gather_output` the head returns the logits of its vocabulary shard.
    if not isinstance(head, LinearLayer) or not head.gather_output or isinstance(head, _SharedHead):
        return
    kind = type(head)
    shared = type(kind.__name__, (_SharedHead, kind), {"__module__": kind.__module__})
    patches.swap_class("tensor-parallel-head-weight", head, shared)

    def end(*_: object) -> None:
        _RUNNING.pop()

    model.register_forward_pre_hook(lambda model, _inputs: _RUNNING.append(model))
    model.register_forward_hook(end, always_call=True)


class _SharedHead:
    """Mixin placed before the class of a sharded head."""

    _computes = False

    @property
    def weight(self) -> Any:
        return self._seen("weight")

    @property
    def bias(self) -> Any:
        return self._seen("bias")

    def forward(self, *arguments: object, **keywords: object) -> Any:
        self._computes = True
        try:
            return super().forward(*arguments, **keywords)  # type: ignore[misc]
        finally:
            self._computes = False

    def _seen(self, name: str) -> Any:
        # A layer without a bias has it as a plain attribute.
        own = self._parameters.get(name, vars(self).get(name))  # type: ignore[attr-defined]
        if own is None or self._computes or not _RUNNING:
            return own
        import torch

        class Gathered(torch.autograd.Function):
            """Return all rows forward, and the rank's own rows of the gradient backward."""

            @staticmethod
            def forward(ctx: Any, weight: torch.Tensor) -> Any:
                return with_all_columns_and_rows(own, weight)

            @staticmethod
            def backward(ctx: Any, gradient: torch.Tensor) -> Any:
                return own_part(own, gradient)

        return Gathered.apply(own)


_RUNNING: list[Any] = []
"""Models in a forward pass; a loss may read the head of one inside the forward pass of another."""
