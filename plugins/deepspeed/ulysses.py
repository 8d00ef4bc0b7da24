"""DeepSpeed's Ulysses attention for one model, while it trains or evaluates on shards, with batches of any shape.

Observed with deepspeed 0.19.8 (runtime/sequence_parallel/ulysses_sp.py, parallel_state_sp.py), accelerate 1.15.0 and
transformers 5.17.0:

- The attention function is replaced permanently in the registry of Transformers for every model of the process:
  generation, a second model, or the next run would exchange heads too.
- Shapes are fixed when the function is registered, so the last, smaller batch of a data set fails an assertion.
- With fewer key/value heads than ranks it changes `num_key_value_groups` of the model's modules permanently.
- `num_key_value_heads` is read from every configuration; GPT-NeoX, OPT, Persimmon and BioGPT have none.
- `head_dim` must be a number if a configuration has it, but Mixtral's is null: TypeError.
- Process groups are created once per process, and a second run fails an assertion.
- The stock loss gathers differentiably with `torch.distributed.nn`, whose backward on gloo treats group ranks as global
  ranks: sequence parallelism combined with data parallelism fails there ("not part of group").
- The stock data loader returns slices, and the loss of Transformers calls `view` on them, which fails for more than one
  sample if the tensors are already on the CPU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from ...ds_configs.specs.errors import ConfigError, UsageError
from .. import patches

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

_STOCK_MODULE = "deepspeed.runtime.sequence_parallel.ulysses_sp"


class SharedSequence:
    """The `size` ranks that share the sequences of one model, and its attention while `active`."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.active = False
        """Whether the model's inputs are currently shards; other forward passes are not changed."""
        self.position_ids: torch.Tensor | None = None
        """This rank's positions [B, S / size], for models that do not pass them to their attention."""
        self.attention: Any = None
        """DeepSpeed's module, once Accelerate has registered it."""
        self.exchanges = 0
        self._data_group: Any = None

    @property
    def rank(self) -> int:
        """Index of this rank's shard."""
        import torch.distributed as dist

        return int(dist.get_rank()) % self.size

    @property
    def data_group(self) -> Any:
        """The ranks with the same shard of different sequences; the first access must happen on every rank."""
        import torch.distributed as dist

        if self._data_group is None:
            world = dist.get_world_size()
            groups = [dist.new_group(list(range(shard, world, self.size))) for shard in range(self.size)]
            self._data_group = groups[self.rank]
        return self._data_group

    @contextmanager
    def running(self) -> Iterator[None]:
        """Make the model's attention exchange heads inside the block, in forward and in recomputation."""
        before, self.active = self.active, True
        try:
            yield
        finally:
            self.active = before

    @contextmanager
    def registering(self, model: PreTrainedModel) -> Iterator[None]:
        """Bind the DeepSpeed attention that Accelerate registers inside the block to `model` only."""
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        name, text = model.config._attn_implementation, model.config.get_text_config()
        forget_sequence_parallelism()
        # DeepSpeed also reads the number from configurations without grouped-query attention, which lack it.
        lacks_number = not hasattr(text, "num_key_value_heads")
        lacks_width = getattr(text, "head_dim", 0) is None
        if lacks_number:
            text.num_key_value_heads = text.num_attention_heads
        if lacks_width:
            text.head_dim = text.hidden_size // text.num_attention_heads
        chosen = _ChosenAttention(ALL_ATTENTION_FUNCTIONS[name])
        try:
            with patches.applied("ulysses-shapes", self._attention_class):
                yield
        finally:
            if lacks_number:
                del text.num_key_value_heads
            if lacks_width:
                text.head_dim = None
            patches.apply("ulysses-of-one-model", lambda _: chosen, item=name)
        for module in model.modules():
            chosen.sequences[module] = self

    def check_exchanges(self, model: PreTrainedModel) -> None:
        """Check, after a first forward pass on shards, that attention exchanged heads in every layer.

        Raises:
            UsageError: some layers do not use attention of Transformers' registry.
        """
        layers = model.config.get_text_config().num_hidden_layers
        if self.exchanges < layers:
            rule = f"exchanged heads in {self.exchanges} of {layers} layers: the others attend only within a shard"
            fix = "use sequence_parallel_size = 1, or a model whose attention is in Transformers' registry"
            raise UsageError(ConfigError(where="model", value=type(model).__name__, rule=rule, fix=fix))

    def _attention_class(self, stock: Any) -> Any:
        import torch

        shared = self

        class RaggedUlyssesAttention(stock):
            """Adapts its shapes to each batch and layer."""

            def __init__(self, *args: object, **kwargs: object) -> None:
                super().__init__(*args, **(kwargs | {"disable_in_eval": False}))
                shared.attention = self

            def forward(
                self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, *args: object, **kwargs: object
            ) -> Any:
                # Set what DeepSpeed derives from batch size and heads in its constructor; it adapts the length itself.
                samples, heads, _, width = query.shape
                kv_heads, ranks = key.shape[1], self.world_size
                self.batch_size, self.attn_head_size, self.attn_head_count = samples, width, heads
                self.global_kv_head_count = kv_heads
                self.local_q_head_count = heads // ranks
                self.kv_replication_factor = ranks // kv_heads
                self.local_kv_head_count = max(1, kv_heads // ranks)
                self.required_query_shape = torch.Size([1, samples, heads, width])
                self.required_key_value_shape = torch.Size([1, samples, kv_heads, width])
                self.required_context_shape = torch.Size([1, samples, width * heads // ranks])
                if kwargs.get("position_ids") is None:
                    kwargs["position_ids"] = shared.position_ids
                return super().forward(module, query, key, *args, **kwargs)

        return RaggedUlyssesAttention


class _ChosenAttention:
    """An attention function that exchanges heads for the modules of models whose inputs are shards."""

    def __init__(self, core: Any) -> None:
        self.core = core
        self.sequences: WeakKeyDictionary[Any, SharedSequence] = WeakKeyDictionary()

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args: object,
        **kwargs: object,
    ) -> Any:
        shared = self.sequences.get(module)
        if shared is None or not shared.active or shared.attention is None:
            return self.core(module, query, key, value, attention_mask, *args, **kwargs)
        groups = getattr(module, "num_key_value_groups", None)
        shared.exchanges += 1
        try:
            return shared.attention(module, query, key, value, None, *args, **kwargs)
        finally:
            if groups is not None:
                module.num_key_value_groups = groups


def forget_sequence_parallelism() -> None:
    """Clear groups and attention of an earlier run, so that another run of this process can create its own."""
    if "deepspeed.runtime.sequence_parallel.parallel_state_sp" in sys.modules:
        from deepspeed.runtime.sequence_parallel import parallel_state_sp
        from deepspeed.utils import groups

        if groups.mpu is parallel_state_sp:
            patches.assign("forgotten-mpu", None)
        parallel_state_sp._release_sequence_parallel_groups()
    if "transformers.modeling_utils" in sys.modules:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        for name in list(ALL_ATTENTION_FUNCTIONS):
            function = ALL_ATTENTION_FUNCTIONS[name]
            if isinstance(function, _ChosenAttention):
                patches.apply("ulysses-of-one-model", partial(lambda core, _: core, function.core), item=name)
            elif getattr(function, "__module__", "") == _STOCK_MODULE:
                # The function that DeepSpeed's function hides is still in the mapping of the class.
                ALL_ATTENTION_FUNCTIONS.pop(name)


_SUFFIX = "_whole_sequence"


def keep_own_attention(model: PreTrainedModel) -> None:
    """Register a model's attention function under another name, so that later replacements do not affect it.

    Raises:
        UsageError: the model uses eager attention, which has no entry in the registry.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = model.config._attn_implementation
    if name.endswith(_SUFFIX):
        return
    if name not in ALL_ATTENTION_FUNCTIONS:
        rule = "cannot be separated from the trained model's attention under sequence parallelism"
        fix = "load the second model with attn_implementation='sdpa'"
        raise UsageError(ConfigError(where="attn_implementation", value=name, rule=rule, fix=fix))
    ALL_ATTENTION_FUNCTIONS.register(name + _SUFFIX, ALL_ATTENTION_FUNCTIONS[name])
    ALL_MASK_ATTENTION_FUNCTIONS.register(name + _SUFFIX, ALL_MASK_ATTENTION_FUNCTIONS[name])
    model.set_attn_implementation(name + _SUFFIX)


def sequence_group() -> Any:
    """Return the process group of this rank's sequence; DeepSpeed assigns consecutive ranks to one sequence."""
    from deepspeed.runtime.sequence_parallel import parallel_state_sp

    return parallel_state_sp.get_sequence_parallel_group()


def whole_sequences(inputs: dict[str, Any]) -> dict[str, Any]:
    """Gather the shards [B, S / ranks] of every tensor into sequences [B, S]; every rank of the group must call it."""
    import torch
    import torch.distributed as dist

    group = sequence_group()
    joined: dict[str, Any] = {}
    for name, shard in sorted(inputs.items()):
        if torch.is_tensor(shard) and shard.dim() == 2:
            parts = [torch.empty_like(shard.contiguous()) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, shard.contiguous(), group=group)
            joined[name] = torch.cat(parts, dim=1)
        else:
            joined[name] = shard
    return joined


def own_shard(whole: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor [B, S, ...] along the sequence."""
    import torch.distributed as dist

    group = sequence_group()
    return whole.chunk(dist.get_world_size(group), dim=1)[dist.get_rank(group)]


def gradients_are_added_over_a_sequence(zero_optimization: Mapping[str, Any]) -> bool:
    """Return whether DeepSpeed sums gradients over the ranks that share a sequence instead of averaging them.

    In deepspeed 0.19.8, ZeRO-1 and 2 sum; ZeRO-3 averages with `reduce_scatter`, its default. Without it ZeRO-3 sums
    small buckets and averages larger ones (`__reduce_and_partition_ipg_grads`), so no result is correct for all
    parameters.
    """
    return zero_optimization.get("stage", 0) < 3 or not zero_optimization.get("reduce_scatter", True)
