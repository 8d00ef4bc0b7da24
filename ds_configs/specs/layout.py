"""`Layout`: one point of the search space, and the pipeline stages of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from .errors import ConfigError

Engine = Literal["single", "ddp", "deepspeed", "fsdp2"]
OffloadDevice = Literal["none", "cpu", "nvme"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ZeroOptions:
    """DeepSpeed `zero_optimization` values that change memory; counts are elements, not bytes."""

    reduce_bucket_size: int = 100_000_000
    overlap_comm: bool = True
    """Whether reduction overlaps the backward pass; doubles the bucket in stages 1 and 2."""
    stage3_prefetch_bucket_size: int = 50_000_000
    stage3_param_persistence_threshold: int = 100_000
    """Stage 3 keeps tensors of at most this many elements on every rank."""
    stage3_max_live_parameters: int = 1_000_000_000
    """Gathered elements above which stage 3 stops prefetching."""
    stage3_max_reuse_distance: int = 1_000_000_000
    """Stage 3 keeps a tensor gathered if it is used again within this many elements."""
    sub_group_size: int = 1_000_000_000
    """Elements that the stage-3 optimizer steps together."""
    hpz_partition_size: int = 1
    """Ranks of the secondary ZeRO++ shard; 1 means none."""
    quantized_weights: bool = False
    """ZeRO++ qwZ: int8 weight gathers."""
    quantized_gradients: bool = False
    """ZeRO++ qgZ: int4 gradient reduction; only between nodes."""
    parameter_buffer_elements: int = 0
    """Elements of one NVMe parameter swap buffer; 0 without NVMe."""
    parameter_buffer_count: int = 5
    optimizer_buffer_count: int = 4


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One parallel layout with its micro-batch size; `legality/rules.py` defines which layouts are legal."""

    engine: Engine
    """What shards the model: nothing (`single`, `ddp`), DeepSpeed ZeRO, or PyTorch FSDP2 through Accelerate."""
    zero_stage: int | None = None
    """0 to 3 with DeepSpeed, `None` with other engines."""
    offload_optimizer: OffloadDevice = "none"
    """Device of the optimizer states and their update."""
    offload_param: OffloadDevice = "none"
    """Device of the parameter shards (ZeRO-3; FSDP2 always moves both)."""
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
    """Expert-parallel ranks, a subset of the data-parallel ranks."""
    micro_batch_size: int = 1
    """Sequences of one forward pass on one rank."""
    gradient_accumulation_steps: int = 1
    """Micro-batches of one optimizer step."""
    gradient_checkpointing: bool = False
    checkpointed_layers: int | None = None
    """With gradient checkpointing, the number of decoder layers that are recomputed, counted from the first one (in
    each pipeline stage); `None` for all."""
    offloaded_checkpoints: int = 0
    """Of the recomputed layers, the number whose input waits for the backward pass in pinned host memory, counted from
    the first layer (in each pipeline stage)."""
    tiled_mlp: bool = False
    """Whether MLPs compute the sequence in tiles, which the backward pass computes again."""
    zero: ZeroOptions = field(default_factory=ZeroOptions)
    """DeepSpeed buffers; unused by other engines."""

    def changed(self, **values: Any) -> Layout:
        """Return a copy with other values of fields, as `replace` does in ten times as long: a search makes thousands.

        >>> Layout(engine="ddp", dp_replicate=8).changed(micro_batch_size=4).global_batch_size
        32
        """
        copy = object.__new__(Layout)
        copy.__dict__.update(self.__dict__, **values)
        assert len(copy.__dict__) == len(self.__dict__), "every name is a field"
        return copy

    @property
    def world_size(self) -> int:
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
        """Ranks over which ZeRO or FSDP2 shards model states; these include sequence-parallel ranks."""
        return self.dp_shard * self.sp * self.cp

    @property
    def shards_parameters(self) -> bool:
        """Whether ranks hold shards of the parameters, which ZeRO-3 and FSDP2 gather before they are used."""
        return self.zero_stage == 3 or self.engine == "fsdp2"

    def recomputed_layers(self, layers: int) -> int:
        """Return how many of a rank's decoder layers are recomputed."""
        if not self.gradient_checkpointing:
            return 0
        return layers if self.checkpointed_layers is None else min(self.checkpointed_layers, layers)

    def offloaded_layers(self, layers: int) -> int:
        """Return how many of a rank's layer inputs wait in host memory."""
        return min(self.offloaded_checkpoints, self.recomputed_layers(layers))

    @property
    def recomputes_in_part(self) -> bool:
        """Whether checkpointing covers only some layers, which a stock Trainer cannot express."""
        return self.gradient_checkpointing and self.checkpointed_layers is not None

    @property
    def axes(self) -> dict[str, int]:
        """The sizes above 1 of the axes beyond data parallelism, by name."""
        sizes = {"tp": self.tp, "pp": self.pp, "sp": self.sp, "cp": self.cp, "ep": self.ep}
        return {axis: size for axis, size in sizes.items() if size > 1}

    @property
    def offload_name(self) -> str:
        """The value of `--offload` that selects these devices."""
        return "cpu-all" if self.offload_param == "cpu" else self.offload_optimizer

    @property
    def label(self) -> str:
        """The name of the layout with its axes and offload, such as `zero1+tp2+pp4`."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineStage:
    """One pipeline stage: a contiguous range of layers."""

    index: int
    first_layer: int
    end_layer: int
    """Its last decoder layer + 1."""
    has_embedding: bool
    has_head: bool
    """Whether it has the final norm, output head and loss (the last stage)."""

    @property
    def num_layers(self) -> int:
        return self.end_layer - self.first_layer


def contiguous_stages(ends: Sequence[int]) -> tuple[PipelineStage, ...]:
    """Return the stages of a model, given the end layer of each.

    >>> [stage.num_layers for stage in contiguous_stages([4, 6])]
    [4, 2]
    """
    last = len(ends) - 1
    return tuple(
        PipelineStage(index=index, first_layer=first, end_layer=end, has_embedding=index == 0, has_head=index == last)
        for index, (first, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True))
    )


def partition_errors(stages: Sequence[PipelineStage], num_layers: int) -> list[ConfigError]:
    """Return the errors of a partition: every layer once and in order."""
    errors, where = [], "pipeline_stages"
    borders = [0, *(stage.end_layer for stage in stages)]
    is_complete = borders[-1] == num_layers and all(
        stage.index == index
        and stage.first_layer == borders[index]
        and stage.num_layers >= 1
        and (stage.has_embedding, stage.has_head) == (index == 0, index == len(stages) - 1)
        for index, stage in enumerate(stages)
    )
    if not is_complete:
        shown = ", ".join(f"{stage.first_layer}-{stage.end_layer}" for stage in stages)
        rule = (
            f"must contain each of the {num_layers} decoder layers once and in order, at least one per stage, with the "
            "embedding in the first stage and the head in the last"
        )
        errors.append(ConfigError(where=where, value=shown, rule=rule, fix="pass the number of stages instead"))
    return errors


def bubble_fraction(stages: int, micro_batches: int) -> float:
    """Return the idle fraction of a 1F1B step, `(p - 1) / (m + p - 1)` (Megatron-LM, arXiv 2104.04473, section 2.2).

    >>> bubble_fraction(4, 9)
    0.25
    """
    return (stages - 1) / (micro_batches + stages - 1)
