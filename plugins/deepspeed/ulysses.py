"""DeepSpeed's Ulysses attention for one model, while it trains or evaluates on shards, with batches of any shape.

Seen with deepspeed 0.19.8 (runtime/sequence_parallel/ulysses_sp.py, parallel_state_sp.py), accelerate 1.15.0 and
transformers 5.17.0:

- the attention function is replaced in the registry of Transformers for every model of the process and for good: what
  generates, or a teacher, or the next run would exchange heads too;
- shapes are fixed when the function is registered, so that the last, smaller batch of a data set fails an assertion;
- with fewer key/value heads than ranks it changes `num_key_value_groups` of the model's modules and leaves it so;
- `num_key_value_heads` is read of every configuration; GPT-NeoX, OPT, Persimmon and BioGPT have none;
- `head_dim` is taken for a number where a configuration has it, and Mixtral's is null: TypeError;
- groups of ranks are made once in the life of a process, and a second run fails an assertion;
- the stock loss gathers differentiably with `torch.distributed.nn`, whose backward takes ranks of a group for ranks of
  the world on gloo: sequence parallelism beside data parallelism fails there ("not part of group");
- the stock data loader hands out slices, and the loss of Transformers calls `view` on them, which fails for more than
  one sample where tensors lie on the CPU already.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from ...ds_configs.specs.errors import Fault, UsageError

if TYPE_CHECKING:
    import torch

_STOCK_MODULE = "deepspeed.runtime.sequence_parallel.ulysses_sp"
_DATA_GROUPS: dict[tuple[int, int], Any] = {}


class SharedSequence:
    """The ranks that share the sequences of one model, and its attention while `active`."""

    def __init__(self, size: int) -> None:
        self.size = size
        """Ranks that share a sequence."""
        self.active = False
        """Whether the model's inputs are shards now; every other forward is left alone."""
        self.position_ids: torch.Tensor | None = None
        """This rank's positions [B, S / size], for models that do not hand them to their attention."""
        self.attention: Any = None
        """DeepSpeed's module, once Accelerate has registered it."""
        self.exchanges = 0
        """How often attention has exchanged heads."""

    @property
    def group(self) -> Any:
        """The process group of this rank's sequence; DeepSpeed gives consecutive ranks to one sequence."""
        from deepspeed.runtime.sequence_parallel import parallel_state_sp

        return parallel_state_sp.get_sequence_parallel_group()

    @property
    def rank(self) -> int:
        """Index of this rank's shard."""
        import torch.distributed as dist

        return int(dist.get_rank()) % self.size

    @property
    def data_ranks(self) -> int:
        """Number of sequences that are processed at once."""
        import torch.distributed as dist

        return int(dist.get_world_size()) // self.size

    @property
    def data_group(self) -> Any:
        """The ranks that hold the same shard of different sequences; every rank must ask for it together."""
        import torch.distributed as dist

        world = dist.get_world_size()
        key = (id(dist.group.WORLD), self.size)
        if key not in _DATA_GROUPS:
            groups = [dist.new_group(list(range(shard, world, self.size))) for shard in range(self.size)]
            _DATA_GROUPS[key] = groups[self.rank]
        return _DATA_GROUPS[key]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let the model's attention exchange heads inside the block, in forward and in recomputation."""
        before, self.active = self.active, True
        try:
            yield
        finally:
            self.active = before

    @contextmanager
    def registering(self, model: Any) -> Iterator[None]:
        """Let Accelerate register DeepSpeed's attention inside the block, and bind it to `model` alone."""
        from deepspeed.runtime.sequence_parallel import ulysses_sp
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        name, text = model.config._attn_implementation, model.config.get_text_config()
        forget_sequence_parallelism()
        # DeepSpeed reads it of models whose heads all have keys and values of their own, too.
        lacks_number = not hasattr(text, "num_key_value_heads")
        lacks_width = getattr(text, "head_dim", 0) is None
        if lacks_number:
            text.num_key_value_heads = text.num_attention_heads
        if lacks_width:
            text.head_dim = text.hidden_size // text.num_attention_heads
        core, stock = ALL_ATTENTION_FUNCTIONS[name], ulysses_sp.UlyssesSPAttentionHF
        ulysses_sp.UlyssesSPAttentionHF = self._attention_class(stock)
        try:
            yield
        finally:
            if lacks_number:
                del text.num_key_value_heads
            if lacks_width:
                text.head_dim = None
            ulysses_sp.UlyssesSPAttentionHF = stock
            chosen = _ChosenAttention(core)
            ALL_ATTENTION_FUNCTIONS[name] = chosen
        for module in model.modules():
            chosen.sequences[module] = self

    def check_exchanges(self, model: Any) -> None:
        """Make sure, after a first forward pass on shards, that attention was connected in every layer.

        Raises:
            UsageError: layers computed attention by themselves.
        """
        layers = model.config.get_text_config().num_hidden_layers
        if self.exchanges < layers:
            rule = f"exchanged heads in {self.exchanges} of {layers} layers: the others attend within a shard"
            fix = "use sequence_parallel_size = 1, or a model with attention of Transformers' registry"
            raise UsageError(Fault(where="model", value=type(model).__name__, rule=rule, fix=fix))

    def _attention_class(self, stock: Any) -> Any:
        shared = self

        class RaggedUlyssesAttention(stock):
            """Takes the shapes from what comes in, batch by batch and layer by layer."""

            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **(kwargs | {"disable_in_eval": False}))
                shared.attention = self

            def forward(
                self, module: Any, query: Any, key: Any, value: Any, mask: Any, *args: Any, **kwargs: Any
            ) -> Any:
                _adopt_shapes(self, query, key)
                if kwargs.get("position_ids") is None:
                    kwargs["position_ids"] = shared.position_ids
                return super().forward(module, query, key, value, mask, *args, **kwargs)

        return RaggedUlyssesAttention


class _ChosenAttention:
    """An attention function that exchanges heads for the modules of models whose inputs are shards."""

    def __init__(self, core: Any) -> None:
        self.core = core
        self.sequences: WeakKeyDictionary[Any, SharedSequence] = WeakKeyDictionary()

    def __call__(self, module: Any, query: Any, key: Any, value: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
        shared = self.sequences.get(module)
        if shared is None or not shared.active or shared.attention is None:
            return self.core(module, query, key, value, mask, *args, **kwargs)
        groups = getattr(module, "num_key_value_groups", None)
        shared.exchanges += 1
        try:
            return shared.attention(module, query, key, value, None, *args, **kwargs)
        finally:
            if groups is not None:
                module.num_key_value_groups = groups


def _adopt_shapes(attention: Any, query: torch.Tensor, key: torch.Tensor) -> None:
    """Set what DeepSpeed derives from batch size and heads in its constructor; it adapts the length itself."""
    import torch

    samples, heads, _, width = query.shape
    kv_heads, ranks = key.shape[1], attention.world_size
    attention.batch_size, attention.attn_head_size, attention.attn_head_count = samples, width, heads
    attention.global_kv_head_count = kv_heads
    attention.local_q_head_count = heads // ranks
    attention.kv_replication_factor = ranks // kv_heads
    attention.local_kv_head_count = max(1, kv_heads // ranks)
    attention.required_query_shape = torch.Size([1, samples, heads, width])
    attention.required_key_value_shape = torch.Size([1, samples, kv_heads, width])
    attention.required_context_shape = torch.Size([1, samples, width * heads // ranks])


def forget_sequence_parallelism() -> None:
    """Let another run of this process form groups and attention of its own, or do without."""
    _DATA_GROUPS.clear()
    if "deepspeed.runtime.sequence_parallel.parallel_state_sp" in sys.modules:
        from deepspeed.runtime.sequence_parallel import parallel_state_sp
        from deepspeed.utils import groups

        if groups.mpu is parallel_state_sp:
            groups.mpu = None
        parallel_state_sp._release_sequence_parallel_groups()
    if "transformers.modeling_utils" in sys.modules:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        for name in list(ALL_ATTENTION_FUNCTIONS):
            function = ALL_ATTENTION_FUNCTIONS[name]
            if isinstance(function, _ChosenAttention):
                ALL_ATTENTION_FUNCTIONS[name] = function.core
            elif getattr(function, "__module__", "") == _STOCK_MODULE:
                # The function that DeepSpeed hid is still in the mapping of the class.
                del ALL_ATTENTION_FUNCTIONS[name]
