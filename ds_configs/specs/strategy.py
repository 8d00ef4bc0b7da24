"""`Strategy`: one point of the space of parallel layouts, as data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Engine = Literal["single", "ddp", "deepspeed", "fsdp2"]
OffloadDevice = Literal["none", "cpu", "nvme"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ZeroOptions:
    """DeepSpeed `zero_optimization` values that change memory; counts are elements, not bytes."""

    reduce_bucket_size: int = 100_000_000
    """Elements of one gradient reduction bucket."""
    overlap_comm: bool = True
    """Whether reduction overlaps the backward pass; doubles the bucket in stages 1 and 2."""
    stage3_prefetch_bucket_size: int = 50_000_000
    """Elements that stage 3 gathers ahead."""
    stage3_param_persistence_threshold: int = 100_000
    """Stage 3 keeps tensors of at most this many elements on every rank."""
    stage3_max_live_parameters: int = 1_000_000_000
    """Gathered elements beyond which stage 3 stops prefetching; in effect how far it runs ahead."""
    stage3_max_reuse_distance: int = 1_000_000_000
    """Stage 3 keeps a tensor gathered when it is used again within this many elements."""
    sub_group_size: int = 1_000_000_000
    """Elements that the stage-3 optimizer steps at once."""
    hpz_partition_size: int = 1
    """Ranks of the secondary ZeRO++ shard; 1 means none."""
    quantized_weights: bool = False
    """ZeRO++ qwZ: int8 weight gathers."""
    quantized_gradients: bool = False
    """ZeRO++ qgZ: int4 gradient reduction; only between nodes."""
    gradient_accumulation_fp32: bool = False
    """Whether gradients accumulate in fp32 (`data_types.grad_accum_dtype`)."""
    parameter_buffer_elements: int = 0
    """Elements of one NVMe parameter swap buffer; 0 without NVMe."""
    parameter_buffer_count: int = 5
    """NVMe parameter swap buffers of each rank."""
    optimizer_buffer_count: int = 4
    """NVMe optimizer swap buffers of each rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Strategy:
    """One parallel layout with its micro-batch; `rules.py` says which are legal."""

    engine: Engine
    """Who shards: nobody (`single`, `ddp`), DeepSpeed ZeRO, or PyTorch FSDP2 through Accelerate."""
    zero_stage: int | None = None
    """0 to 3 with DeepSpeed, `None` with other engines."""
    offload_optimizer: OffloadDevice = "none"
    """Where optimizer states and their update live."""
    offload_param: OffloadDevice = "none"
    """Where parameter shards live (ZeRO-3; with FSDP2 the same flag moves both)."""
    dp_replicate: int = 1
    """Data-parallel replicas of the sharding group."""
    dp_shard: int = 1
    """Ranks over which model states are sharded."""
    tp: int = 1
    """Tensor-parallel ranks."""
    pp: int = 1
    """Pipeline stages."""
    sp: int = 1
    """Ulysses sequence-parallel ranks."""
    cp: int = 1
    """Context-parallel ranks."""
    ep: int = 1
    """Expert-parallel ranks, taken from the data-parallel ones."""
    micro_batch_size: int = 1
    """Sequences of one forward pass on one rank."""
    gradient_accumulation_steps: int = 1
    """Micro-batches of one optimizer step."""
    gradient_checkpointing: bool = False
    """Whether layers are recomputed in the backward pass."""
    checkpointed_layers: int | None = None
    """With gradient checkpointing, the decoder layers that are recomputed: the first so many, in a pipeline of each
    stage; `None` for all."""
    keeps_products: bool = False
    """With gradient checkpointing, whether recomputed layers keep the results of their matrix products and of fused
    attention, so that only what is bound by memory runs again (torch's selective checkpointing)."""
    zero: ZeroOptions = field(default_factory=ZeroOptions)
    """DeepSpeed buffers; unused by other engines."""

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.dp_replicate * self.dp_shard * self.tp * self.pp * self.sp * self.cp

    @property
    def data_parallel_size(self) -> int:
        """Ranks that see different sequences."""
        return self.dp_replicate * self.dp_shard

    @property
    def global_batch_size(self) -> int:
        """Sequences of one optimizer step over all ranks."""
        return self.micro_batch_size * self.gradient_accumulation_steps * self.data_parallel_size

    @property
    def shard_size(self) -> int:
        """Ranks over which ZeRO or FSDP2 divides model states (sequence-parallel ranks join in)."""
        return self.dp_shard * self.sp * self.cp

    def recomputed_layers(self, layers: int) -> int:
        """Return how many of a rank's decoder layers run their forward pass again."""
        if not self.gradient_checkpointing:
            return 0
        return layers if self.checkpointed_layers is None else min(self.checkpointed_layers, layers)

    @property
    def axes(self) -> dict[str, int]:
        """The axes beyond data parallelism that are in use, by name."""
        sizes = {"tp": self.tp, "pp": self.pp, "sp": self.sp, "cp": self.cp, "ep": self.ep}
        return {axis: size for axis, size in sizes.items() if size > 1}

    @property
    def label(self) -> str:
        """The name that the user gives with `--strategy`, with axes and offload spelled out: `zero1+tp2+pp4`."""
        name = self.engine if self.engine != "deepspeed" else f"zero{self.zero_stage}"
        if self.zero.hpz_partition_size > 1:
            name += "-hpz"
        if self.engine == "fsdp2" and self.dp_replicate > 1:
            name += "-hybrid"
        name += "".join(f"+{axis}{size}" for axis, size in self.axes.items())
        if self.offload_param not in ("none", self.offload_optimizer):
            return f"{name}+{self.offload_optimizer}-offload of optimizer, {self.offload_param}-offload of parameters"
        if self.offload_param != "none":
            return f"{name}+{self.offload_param}-offload of optimizer and parameters"
        if self.offload_optimizer != "none":
            return f"{name}+{self.offload_optimizer}-offload of optimizer"
        return name
