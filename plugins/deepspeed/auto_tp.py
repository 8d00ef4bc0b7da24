"""DeepSpeed AutoTP under the Trainer: what it divides, what it leaves behind, and groups that share their batches.

Seen with deepspeed 0.19.8, transformers 5.17.0, accelerate 1.15.0 and torch 2.13.0, on two and four gloo ranks. Losses,
weights, clipped gradient norms and the loss over all tokens are right as they come: DeepSpeed averages over the
data-parallel ranks, and the Trainer counts the tokens of every rank and multiplies by all ranks, which cancels out. Not
right as they come:

- `module_inject/tp_plan_converter.py` knows no `rowwise_split_input`, so that Phi-3 is refused. The style is that of
  `LinearAllreduceWithReplicatedInput`, which AutoTP keeps for output heads: names of `lm_head_patterns`.
- `AutoTP.update_mp_params` divides `num_key_value_heads` of an attention whose projections are gathered again.
- For tied embeddings, transformers adds `embedding_rowwise` to the plan, and AutoTP then replaces the loss and leaves
  each rank with the logits of its own part of the vocabulary; a loss or metric of the user's sees those.
- `Accelerator.gather_for_metrics` collects the answers of every rank of a group, and cuts the last batch by the number
  of samples that one of them saw: 18 samples on two ranks came back as 34.
- Accelerate dispatches iterable data sets from the first rank, the same batch to all groups.
- Process groups, the mode and the arguments of `tp_model_init` are global: a second model of another size is refused,
  and one without tensor parallelism takes the first one's groups for its data-parallel ones.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ...ds_configs.specs.errors import Fault

if TYPE_CHECKING:
    import torch

FUSED_MLP_UP = "gate_up_proj"
"""One matrix for gate and up projection, which are divided one by one (Phi-3)."""
FUSED_MLP_DOWN = "down_proj"
_GATHERED = ("colwise_gather_output", "colwise_rep")
_SPLIT_INPUT = "rowwise_split_input"
_PYTHON_WORDS = 625
"""Words in the state of Python's Mersenne twister, with its position."""


def tensor_plan(model: Any) -> dict[str, str]:
    """Return the model's tensor-parallel plan, name patterns to styles; empty when transformers has none."""
    from deepspeed.runtime.tensor_parallel.config import _get_hf_tp_plan

    return dict(_get_hf_tp_plan(model) or {})


def partition_config(plan: Mapping[str, str]) -> dict[str, Any] | None:
    """Return DeepSpeed's `partition_config` for a plan that AutoTP does not translate; `None` where it does.

    Attention whose query, key and value are one matrix computes whole on every rank, from divided weights: its
    projection is gathered, and the output projection reads a part of its input. A fused MLP is divided through and
    through, each half of `gate_up_proj` by itself.
    """
    if _SPLIT_INPUT not in plan.values():
        return None
    specs: list[dict[str, Any]] = []
    split = set()
    for pattern, style in plan.items():
        name = pattern.rpartition(".")[2]
        spec: dict[str, Any] = {"patterns": [_parameter_regex(pattern)]}
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


def tensor_parallel_section(model: Any, size: int, *, vocabulary_parallel_head: bool) -> dict[str, Any]:
    """Return the `tensor_parallel` section of the DeepSpeed configuration for a model."""
    section: dict[str, Any] = {"autotp_size": size, "vocab_parallel_lm_head": vocabulary_parallel_head}
    written = partition_config(tensor_plan(model))
    return section if written is None else section | {"partition_config": written}


def keep_whole_attention(model: Any) -> None:
    """Keep AutoTP from dividing the head counts of attention that computes whole on every rank."""
    patterns = [_module_regex(pattern) for pattern, style in tensor_plan(model).items() if style == _SPLIT_INPUT]
    for name in [name for name, _ in model.named_modules()]:
        if any(pattern.fullmatch(name) for pattern in patterns) and not name.endswith(FUSED_MLP_DOWN):
            # What AutoTP marks as done already it does not visit (module_inject/auto_tp.py, update_mp_params).
            model.get_submodule(name.rpartition(".")[0]).replaced = True


def layers_without_rule(model: Any) -> list[Fault]:
    """Return a fault for each matrix of a model that its plan does not name, before anything is divided."""
    patterns = [_module_regex(pattern) for pattern, style in tensor_plan(model).items() if "wise" in style]
    found = dict.fromkeys(
        _starred(name) for name, _ in _matrices(model) if not any(pattern.fullmatch(name) for pattern in patterns)
    )
    return [_left_whole(name) for name in found]


def unpartitioned_layers(model: Any, size: int) -> list[Fault]:
    """Return a fault for each matrix of a partitioned model that every rank holds whole, or unevenly.

    An output head that shares its weight with the token embedding is whole on purpose.
    """
    from deepspeed.module_inject.layers import TensorParallel_Layer

    uneven = {}
    for name, module in model.named_modules():
        sizes = set(getattr(module, "_partition_sizes", ())) if isinstance(module, TensorParallel_Layer) else set()
        # The rest of an odd vocabulary is padded when the logits are gathered.
        if len(sizes) > 1 and name.rpartition(".")[2] not in ("lm_head", "embed_out"):
            uneven[_starred(name)] = sorted(sizes)
    faults = [
        Fault(where=name, value=sizes, rule="is cut unevenly", fix=f"use a tp that divides it, not {size}")
        for name, sizes in uneven.items()
    ]
    whole = dict.fromkeys(_starred(name) for name, _ in _matrices(model))
    return faults + [_left_whole(name) for name in whole]


def _matrices(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield undivided linear layers, but for an output head that shares its weight with the token embedding."""
    import torch
    from transformers.pytorch_utils import Conv1D

    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear | Conv1D) and id(module.weight) not in embeddings:
            yield name, module


def _left_whole(name: str) -> Fault:
    rule = "would stay whole on every rank: AutoTP has no rule for it"
    return Fault(where=name, rule=rule, fix="use tp = 1 with ZeRO-3 or a pipeline, or leave this layer out")


def forget_tensor_parallel() -> None:
    """Forget groups, mode and arguments of an earlier run, so that the next engine of this process makes its own."""
    if "deepspeed" not in sys.modules:
        return
    from deepspeed.module_inject.layers import set_autotp_mode
    from deepspeed.runtime.tensor_parallel import init_utils
    from deepspeed.utils import groups

    init_utils._TP_MODEL_INIT_ARGS = None
    set_autotp_mode(training=False)
    groups.mpu = None
    for name in ("_TENSOR_MODEL_PARALLEL_GROUP", "_MODEL_PARALLEL_GROUP", "_DATA_PARALLEL_GROUP"):
        setattr(groups, name, None)


def align_random_state(device: Any) -> None:
    """Give every rank of a tensor-parallel group the generator states of its first rank.

    Torch's own on CPU and `device` draw dropout between layers; Python's and numpy's draw what collators mask.
    """
    import torch
    import torch.distributed as dist
    from deepspeed.utils import groups

    group, source = groups.get_tensor_model_parallel_group(), groups.get_tensor_model_parallel_src_rank()

    def shared(state: torch.Tensor) -> torch.Tensor:
        state = state.to(device)
        dist.broadcast(state, src=source, group=group)
        return state.cpu()

    torch.set_rng_state(shared(torch.get_rng_state()))
    if device.type != "cpu":
        generators = torch.get_device_module(device)
        generators.set_rng_state(shared(generators.get_rng_state()))
    set_host_generators(shared(host_generators()))


def host_generators() -> torch.Tensor:
    """Return the states of Python's and numpy's global generators as one fp64 tensor; their words have 32 bits."""
    import numpy
    import torch

    version, words, gauss = random.getstate()
    python = [version, gauss is not None, gauss or 0.0, *words]
    state: Any = numpy.random.get_state()
    _, keys, position, has_gauss, cached = state
    return torch.tensor([*python, position, has_gauss, cached, *keys.tolist()], dtype=torch.float64)


def set_host_generators(states: torch.Tensor) -> None:
    """Set Python's and numpy's global generators to states of `host_generators`."""
    import numpy

    values = states.tolist()
    python, other = values[: 3 + _PYTHON_WORDS], values[3 + _PYTHON_WORDS :]
    random.setstate((int(python[0]), tuple(map(int, python[3:])), python[2] if python[1] else None))
    keys = numpy.array(other[3:], dtype=numpy.uint32)
    numpy.random.set_state(("MT19937", keys, int(other[0]), int(other[1]), other[2]))


def seed_workers_by_group(trainer: Any, size: int) -> None:
    """Let workers of a training data loader draw alike within a group of `size` ranks.

    Transformers 5.17.0 (trainer.py, `_get_dataloader`) seeds workers of map-style data sets by rank.
    """
    from functools import partial

    from transformers.trainer_utils import seed_worker

    make = trainer.get_train_dataloader

    def get_train_dataloader() -> Any:
        loader = make()
        source = getattr(loader, "base_dataloader", loader)
        if isinstance(source.worker_init_fn, partial) and source.worker_init_fn.func is seed_worker:
            group = trainer.args.process_index // size
            source.worker_init_fn = partial(seed_worker, num_workers=source.num_workers, rank=group)
        return loader

    trainer.get_train_dataloader = get_train_dataloader


def gather_vocabulary(logits: Any) -> Any:
    """Return whole logits [..., V] from each rank's part [..., V / tp]."""
    import torch
    import torch.distributed as dist
    from deepspeed.utils import groups

    group = groups.get_tensor_model_parallel_group()
    parts = [torch.empty_like(logits) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, logits.contiguous(), group=group)
    return torch.cat(parts, dim=-1)


def _parameter_regex(pattern: str) -> str:
    return ".*" + re.escape(pattern).replace(r"\*", ".*") + r"\.weight$"


def _module_regex(pattern: str) -> re.Pattern[str]:
    return re.compile(".*" + re.escape(pattern).replace(r"\*", r"\d+"))


def _starred(name: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", name)
