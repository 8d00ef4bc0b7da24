"""Accelerate on ranks without an accelerator, and the samples that it repeats.

Observed with accelerate 1.15.0, transformers 5.17.0, deepspeed 0.19.8 and torch 2.13.0, two gloo ranks:

- ``accelerate/state.py`` selects a communication backend only for accelerators or for ``cpu=True``. Under
  DeepSpeed on CPU the backend is ``None`` and every rank is rank 0 of 1, although DeepSpeed has started gloo. The batch
  size that replaces ``auto`` is then wrong, and every rank trains on the same samples.
- ``TrainingArguments(use_cpu=True)`` alone corrects the count, but does not start ``deepspeed.comm``, so
  ``zero.Init`` computes the batch for one rank and fails an assertion.
- ``AcceleratorState`` enables FSDP only for ``MULTI_<accelerator>`` types. On CPU ranks it silently drops the FSDP
  plugin, and the Trainer trains with plain DDP.
- torch's ring attention accepts any attention operator, but its tables contain only CUDA's. On the CPU the operator of
  ``scaled_dot_product_attention`` has no strategy ("does not have a sharding strategy registered").
- ``TrainingArguments(bf16=True)`` on such a host needs ``use_cpu=True``.
- Under DDP the device of a CPU rank is ``cpu:0``, which the Trainer gives to ``torch.load`` when it resumes, and torch
  knows the location ``cpu`` alone.

With `even_batches`, the default, accelerate 1.15.0 (data_loader.py) fills the last batches of an epoch with its first
samples, which the mean over tokens counts twice. `BatchSamplerShard` repeats samples of a data set,
`DataLoaderDispatcher` those of a stream that the first rank reads for all, `IterableDatasetShard` those of a stream
that each rank reads. `gather_for_metrics` omits them from an evaluation's predictions, but not from a loss.

During training they lose their labels (`RepeatedSamples`). An evaluation reads each sample once
(`SamplesOnce`), because losses without labels, such as preference losses, are means over the samples of a batch.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary
from zlib import crc32

from ..ds_configs.specs.errors import ConfigError, ShardwrightError, UsageError
from . import patches
from .deepspeed.compiled_operators import break_abandoned_locks
from .launching.messages import note_on_first_rank

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from torch.distributed.device_mesh import DeviceMesh
    from torch.utils.data import DataLoader
    from transformers import Trainer, TrainingArguments

Engine = Literal["ddp", "deepspeed", "fsdp2"]


def configure_cpu_ranks(engine: Engine | None = None) -> dict[str, Any]:
    """Prepare Accelerate for CPU ranks and return the ``TrainingArguments`` keywords that go with it.

    Call it before ``TrainingArguments`` is built. It changes nothing and returns ``{}`` on a host with an accelerator;
    hide the accelerators (``CUDA_VISIBLE_DEVICES=""``) to train on CPU ranks there.

    Args:
        engine: Training engine; ``None`` reads it from the environment that ``accelerate launch`` sets. Pass it if
            ``TrainingArguments(deepspeed=...)`` or ``TrainingArguments(fsdp=True)`` decides.

    Raises:
        UsageError: FSDP version 1 is requested, which cannot run on CPU ranks.
        ShardwrightError: Accelerate still reports another world size than the launcher's ``WORLD_SIZE``.
    """
    import torch

    if torch.accelerator.is_available():
        return {}
    engine = engine or engine_from_environment()
    if "LOCAL_RANK" not in os.environ:
        return {"use_cpu": True}
    if engine == "ddp":
        _accept_indexed_cpu()
        return {"use_cpu": True}
    if engine == "fsdp2":
        version = os.environ.get("FSDP_VERSION", "2")
        if version != "2":
            rule, fix = "CPU ranks support only FSDP2", "set `fsdp_version: 2` in the accelerate configuration"
            raise UsageError(ConfigError(where="fsdp_version", value=version, rule=rule, fix=fix))
        _start_gloo_state(deepspeed=False)
        from accelerate.utils import DistributedType

        # `AcceleratorState` then enters its FSDP branch, which reads only the type; the device is still the CPU.
        patches.apply("fsdp2-on-cpu-ranks", lambda _: DistributedType.MULTI_GPU, item="distributed_type")
    else:
        break_abandoned_locks()
        _start_gloo_state(deepspeed=True)
    return {"use_cpu": True, "accelerator_config": {"use_configured_state": True}}


def serve_scripts_on_cpu_ranks() -> None:
    """Make an unmodified script train on CPU ranks: call it before the script begins.

    The result of `configure_cpu_ranks` becomes part of every `TrainingArguments`, and `Accelerator()` uses the CPU. It
    changes nothing on a host with an accelerator.
    """
    overrides = configure_cpu_ranks()
    if not overrides:
        return
    if "accelerator_config" not in overrides:
        # If the state exists already, accelerate 1.15.0 would initialise only half of it for FSDP.
        os.environ["ACCELERATE_USE_CPU"] = "true"

    def on_cpu_ranks(complete: Any) -> Any:
        def completed(arguments: TrainingArguments) -> None:
            arguments.use_cpu = True
            if "accelerator_config" in overrides:
                config = arguments.accelerator_config
                config = json.loads(config) if isinstance(config, str) else config
                config = {} if config is None else config if isinstance(config, dict) else config.to_dict()
                arguments.accelerator_config = config | overrides["accelerator_config"]
            complete(arguments)

        return completed

    patches.apply("cpu-rank-arguments", on_cpu_ranks)


def engine_from_environment() -> Engine:
    """Return the engine that ``accelerate launch`` set in the environment; plain DDP if it set none."""
    from accelerate.utils import parse_flag_from_env

    if parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"):
        return "deepspeed"
    return "fsdp2" if parse_flag_from_env("ACCELERATE_USE_FSDP") else "ddp"


@cache
def _accept_indexed_cpu() -> None:
    """Make ``torch.load`` accept the location ``cpu:0``, so that DDP ranks can resume from checkpoints."""
    from torch.serialization import register_package

    def on_cpu(storage: torch.UntypedStorage, location: str) -> Any:
        return storage if location.startswith("cpu:") else None

    register_package(15, lambda storage: None, on_cpu)


def _start_gloo_state(*, deepspeed: bool) -> None:
    """Create Accelerate's process state on gloo; for DeepSpeed also the group that ``zero.Init`` reads."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import patch_environment

    AcceleratorState._reset_state(reset_partial_state=True)
    with patch_environment(ACCELERATE_USE_DEEPSPEED=str(deepspeed).lower()):
        state = PartialState(backend="gloo")
    launched = int(os.environ["WORLD_SIZE"])
    if state.num_processes != launched:
        raise ShardwrightError(
            f"Accelerate reports {state.num_processes} processes, but the launcher started WORLD_SIZE = "
            f"{launched}: ranks would train on the same samples; use accelerate 1.15, which was tested"
        )


# Queries, keys and values are [batch, heads, sequence, head width].
_SEQUENCE_DIMENSION = 2


def enable_cpu_ring_attention() -> None:
    """Make `torch.distributed.tensor.experimental.context_parallel` run on the CPU, to rehearse and test it there."""
    import torch
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring

    def local(*tensors: object) -> list[Any]:
        return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]

    def whole(mesh: DeviceMesh, results: tuple[Any, ...]) -> tuple[Any, ...]:
        shards = [Shard(_SEQUENCE_DIMENSION)]
        return tuple(DTensor.from_local(tensor, mesh, shards, run_check=False) for tensor in results)

    def forward(operator: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        query, key, value, *rest = arguments
        named = dict(zip(("dropout_p", "is_causal"), rest, strict=False)) | named
        mesh = query.device_mesh
        tensors = local(query, key, value)
        return whole(
            mesh, ring._templated_ring_attention(mesh.get_group(), _SEQUENCE_DIMENSION, operator, *tensors, **named)
        )

    def backward(operator: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        names = ("grad_out", "query", "key", "value", "out", "logsumexp")
        named = dict(zip(names, local(*arguments[:6]), strict=True)) | named
        dropout, is_causal = arguments[6:8]
        mesh = arguments[1].device_mesh
        results = ring._templated_ring_attention_backward(
            mesh.get_group(),
            _SEQUENCE_DIMENSION,
            operator,
            grad_out_name="grad_out",
            is_causal=is_causal,
            dropout_p=dropout,
            **named,
        )
        return whole(mesh, results)

    aten = torch.ops.aten
    attention = aten._scaled_dot_product_flash_attention_for_cpu.default
    patches.apply("ring-attention-on-cpu-ranks", lambda _: forward, item=attention)
    attention = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    patches.apply("ring-attention-on-cpu-ranks", lambda _: backward, item=attention)


_IGNORED = -100
_LABELS = ("labels", "shift_labels")
_WEIGHED: WeakKeyDictionary[Any, list[tuple[Any, int]]] = WeakKeyDictionary()
"""Loaders whose repeated samples have weight zero, with the last batch and its number of rows that count."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptPart:
    """The part of a rank's last batch that is not repeated: its first samples, or first tokens of joined ones."""

    rows: int
    kept_rows: int
    kept_tokens: int | None = None
    """For samples that a collator has joined to one row; `None` if each has its own row."""

    def mask(self, tokens: int, like: torch.Tensor) -> torch.Tensor:
        """Return 1 for tokens of kept samples and 0 for others; `tokens` counts all rows."""
        kept = tokens // self.rows * self.kept_rows if self.kept_tokens is None else self.kept_tokens
        mask_T = like.new_zeros(tokens)
        mask_T[:kept] = 1
        return mask_T


class RepeatedSamples:
    """Removes the labels of samples that a Trainer's training batches repeat.

    A loss without labels is a mean over samples, in which a repeated one counts twice: it is rejected before the first
    step, unless the training ends before a batch repeats samples.
    """

    def __init__(self) -> None:
        self._loader: Any = None
        self._collected: deque[KeptPart | None] = deque()
        """The parts that count of the micro-batches that are collected and not trained yet."""

    def follow(self, loader: Any) -> None:
        """Follow the samples of the loader that the next training run reads."""
        self._loader = loader
        _WEIGHED[loader] = []
        if (sampled := _batch_shard(loader)) is not None:
            sampled.batch_sampler = _RememberedBatches(sampled.batch_sampler, sampled.num_processes)
        _count_stream(loader)

    @property
    def stream(self) -> Any:
        """The stream that every rank reads; `None` if there is none."""
        return None if self._loader is None else getattr(_stream_of_each_rank(self._loader), "dataset", None)

    def unlabelled(self, trainer: Trainer, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches of a step, without the labels of repeated samples."""
        self._collected.clear()
        loader, state = self._loader, trainer.accelerator.gradient_state
        if loader is None:
            yield from batches
            return
        for batch in batches:
            if not self._collected:
                _check_labels(batch, loader, trainer)
            last = _last_samples(loader, state) if state.end_of_dataloader else None
            batch, kept = (batch, None) if last is None else _without_last(batch, loader, *last)
            self._collected.append(kept)
            if kept is not None:
                _WEIGHED[loader] = [(batch, kept.kept_rows)]
            yield batch

    def next_kept_part(self) -> KeptPart | None:
        """Return the part to keep of the next micro-batch; `None` for all of it. Call it once for each."""
        return self._collected.popleft() if self._collected else None


def let_ranks_read_streams(trainer: Any) -> None:
    """Make every rank read the stream and keep its own rows, unless a Trainer's arguments set `dispatch_batches`.

    By default Accelerate's first rank reads for all, which fails if batches are padded to different lengths. With
    data loader workers, whose rows cannot be counted, the first rank still reads for all.
    """
    from torch.utils.data import IterableDataset

    args = trainer.args
    data = (trainer.train_dataset, getattr(trainer, "eval_dataset", None))
    is_stream = any(isinstance(dataset, IterableDataset) for dataset in data)
    if args.world_size == 1 or args.dataloader_num_workers or not is_stream:
        return
    if args.accelerator_config.dispatch_batches is None:
        trainer.accelerator.dataloader_config.dispatch_batches = False
    trainer.reads_streams = True


def hide_files(dataset: Any) -> None:
    """Make a stream of several files look like one of one file, whose rows Accelerate splits."""
    from datasets import IterableDataset

    if isinstance(dataset, IterableDataset) and dataset.n_shards > 1:
        kind: Any = type(dataset)
        hidden = type(kind.__name__, (kind,), {"__module__": kind.__module__, "n_shards": 1})
        patches.swap_class("stream-of-one-file", dataset, hidden)


def check_streams_of_ranks(trainer: Trainer, batches: int) -> None:
    """Check that all ranks have read the same rows of a stream; every rank calls it once for each step.

    Raises:
        UsageError: the ranks have read different rows, or one rank has no rows left while another has.
    """
    import torch
    from torch.utils.data import IterableDataset

    if trainer.args.world_size == 1 or not isinstance(trainer.train_dataset, IterableDataset):
        return
    repeated = getattr(trainer, "repeated_samples", None)
    stream = None if repeated is None else repeated.stream
    digest = stream.digest() if isinstance(stream, _CountedStream) else 0
    own = torch.tensor([[batches, digest]], device=trainer.args.device)
    every = trainer.accelerator.gather(own).tolist()
    counts = [count for count, _ in every]
    if len(set(counts)) > 1:
        first = counts.index(min(counts))
        rule = f"ran out of rows on rank {first} before other ranks (micro-batches of this step: {counts})"
    elif len({digest for _, digest in every}) > 1:
        rule = "yields different rows on different ranks, so each rank would skip rows that no other rank trains on"
    else:
        return
    fix = "pass the full stream in the same order on every rank (seed its shuffling), which each rank splits; "
    fix += "or set accelerator_config={'dispatch_batches': True}, so that the first rank reads for all"
    raise UsageError(ConfigError(where="train_dataset", value=type(trainer.train_dataset).__name__, rule=rule, fix=fix))


def repeated_samples(loader: DataLoader) -> int:
    """Return how many samples the last batch of each epoch repeats and counts; 0 if they have weight zero.

    Also 0 for streams, whose length is unknown.
    """
    shard = _batch_shard(loader)
    if shard is None or loader in _WEIGHED:
        return 0
    seen, _, rows = _last_of_shard(shard)
    return rows * shard.num_processes - seen if seen else 0


def trained_rows(batch: Any) -> int | None:
    """Return how many rows of a training batch are not repeated; `None` for all of them."""
    return next((rows for last in _WEIGHED.values() for known, rows in last if known is batch), None)


@dataclass(frozen=True, kw_only=True)
class EvaluationStep:
    """One batch of an evaluation; samples that do not count have no token or class labels."""

    batch: Any
    rows: int | None
    """Samples of the batch; `None` if unknown."""
    samples: int | None
    """Samples of the batch that count; `None` for all."""


class SamplesOnce:
    """Makes a prepared loader yield every sample of its data set once, in the same number of steps on every rank.

    Samples after the last full batches are distributed in equal shares, and the rest singly. A rank without a sample
    then reads one that does not count. Gathered results are in the order of the data set, and
    `Accelerator.gather_for_metrics` omits samples that do not count. `gradient_state` is Accelerate's, which identifies
    the last batch.
    """

    def __init__(self, loader: DataLoader, gradient_state: Any) -> None:
        self._loader, self._state = loader, gradient_state
        self._shard = _batch_shard(loader, even=False)
        self._steps = 0
        if self._shard is not None:
            patches.swap_class("samples-once", self._shard, _each_sample_once())
        else:
            _count_stream(loader)

    def step(self, batch: Any) -> EvaluationStep:
        """Return which samples of the next batch count; call it once for each batch of the loader."""
        import torch

        index, self._steps = self._steps, self._steps + 1
        if self._shard is not None:
            rows, full, share, rest = _deal(self._shard)
            if index < full:
                return EvaluationStep(batch=batch, rows=rows, samples=None)
            if index == len(self._shard) - 1:
                # Accelerate expects the number of samples after the last full batches.
                self._loader.remainder = rest
            if share and index == full:
                return EvaluationStep(batch=batch, rows=share, samples=None)
            counts = self._shard.process_index < rest
            labels = _labels_of(batch)
            if labels and not counts and not any(values.is_floating_point() for values in labels.values()):
                batch = {**batch, **{name: torch.full_like(values, _IGNORED) for name, values in labels.items()}}
            return EvaluationStep(batch=batch, rows=1, samples=int(counts))
        last = _last_samples(self._loader, self._state) if self._state.end_of_dataloader else None
        if last is None:
            return EvaluationStep(batch=batch, rows=None, samples=None)
        # Accelerate does not know the remainder of a stream that each rank reads.
        self._loader.remainder = last[0]
        samples, rank, rows = last
        kept = kept_rows(samples=samples, rank=rank, rows=rows)
        return EvaluationStep(batch=_masked(batch, self._loader, *last)[0], rows=rows, samples=kept)


def _deal(shard: Any) -> tuple[int, int, int, int]:
    """Return the rows of a rank in a full batch, the full batches, the rows of one batch of equal shares, and the rest.

    The samples of the rest are read singly, in one more batch.
    """
    rows = shard.batch_size // shard.num_processes if shard.split_batches else shard.batch_size
    full, left = divmod(len(shard.batch_sampler.sampler), rows * shard.num_processes)
    return rows, full, *divmod(left, shard.num_processes)


@cache
def _each_sample_once() -> Any:
    from accelerate.data_loader import BatchSamplerShard

    class EachSampleOnce(BatchSamplerShard):
        """Distributes the samples of a data set; see `SamplesOnce`."""

        def __len__(self) -> int:
            _, full, share, rest = _deal(self)
            return full + bool(share) + bool(rest)

        def __iter__(self) -> Iterator[list[Any]]:
            rows, ranks, rank = _deal(self)[0], self.num_processes, self.process_index
            waiting: list[Any] = []
            for batch in self.batch_sampler:
                waiting += batch
                if len(waiting) >= rows * ranks:
                    yield waiting[rank * rows : (rank + 1) * rows]
                    waiting = waiting[rows * ranks :]
            share, rest = divmod(len(waiting), ranks)
            if share:
                yield waiting[rank * share : (rank + 1) * share]
            if rest:
                yield [waiting[share * ranks + min(rank, rest - 1)]]

    return EachSampleOnce


@contextmanager
def gathered_once(accelerator: Accelerator, group: Callable[[], Any]) -> Iterator[None]:
    """Make `accelerator.gather` collect from the ranks of a group in the block, because others have the same samples.

    `group` returns it; the engine that creates it may not exist yet.
    """
    import torch
    import torch.distributed as distributed
    from accelerate.utils import recursively_apply

    def gather_tensor(tensor: torch.Tensor) -> torch.Tensor:
        own = tensor[None].contiguous() if tensor.dim() == 0 else tensor.contiguous()
        parts = [torch.empty_like(own) for _ in range(distributed.get_world_size(group()))]
        distributed.all_gather(parts, own, group=group())
        return torch.cat(parts)

    def gather(data: Any) -> Any:
        return recursively_apply(gather_tensor, data, error_on_other_type=True)

    with patches.applied("samples-of-a-group-once", lambda _: gather, on=accelerator):
        yield


def kept_rows(*, samples: int, rank: int, rows: int) -> int:
    """Return how many rows of a rank's last batch are not repeated; repeated rows are at the end.

    `samples` counts all ranks, and `rank` is the index among the ranks with different samples.

    >>> [kept_rows(samples=3, rank=rank, rows=2) for rank in range(3)]
    [2, 1, 0]
    """
    return min(max(samples - rank * rows, 0), rows)


def _check_labels(batch: Any, loader: DataLoader, trainer: Trainer) -> None:
    """Reject a loss without labels if training reaches a batch that repeats samples."""
    shard = _batch_shard(loader)
    if shard is None or not (samples := _last_of_shard(shard)[0]) or _labels_of(batch):
        return
    steps = -(-len(loader) // trainer.args.gradient_accumulation_steps)
    if trainer.state.max_steps < steps:
        return
    step = _last_of_shard(shard)[2] * shard.num_processes
    rule = (
        f"leave {samples} for the last batch of {step}: Accelerate repeats others, which count twice in the "
        f"loss of {type(trainer).__name__}, a mean over samples"
    )
    fix = f"set dataloader_drop_last=True, or train on a multiple of {step}"
    raise UsageError(
        ConfigError(where="train_dataset", value=f"{len(shard.batch_sampler.sampler)} samples", rule=rule, fix=fix)
    )


def _last_samples(loader: DataLoader, state: Any) -> tuple[int, int, int] | None:
    """Return the samples of the last batch of all ranks, this rank's index among them, and the rows of each rank.

    `None` if no sample is repeated, or if the number is unknown.
    """
    from accelerate.data_loader import DataLoaderDispatcher

    if isinstance(loader, DataLoaderDispatcher):
        ranks, seen = loader.state.num_processes, state.remainder
        return None if loader._drop_last or seen < 0 else (seen, loader.state.process_index, -(-seen // ranks))
    if (stream := _stream_of_each_rank(loader)) is not None:
        rows = stream.batch_size // stream.num_processes if stream.split_batches else stream.batch_size
        count = stream.dataset.count if isinstance(stream.dataset, _CountedStream) else 0
        seen = count % (rows * stream.num_processes)
        return (seen, stream.process_index, rows) if seen else None
    shard = _batch_shard(loader)
    last = None if shard is None else _last_of_shard(shard)
    return last if last and last[0] else None


def _batch_shard(loader: DataLoader, *, even: bool = True) -> Any:
    """Return the sampler that repeats samples of a data set; `None` if there is none.

    Without `even`, also a sampler that repeats none and gives some ranks fewer batches.
    """
    from accelerate.data_loader import BatchSamplerShard

    samplers = (getattr(loader, name, None) for name in ("batch_sampler", "sampler"))
    shard = next((sampler for sampler in samplers if isinstance(sampler, BatchSamplerShard)), None)
    if shard is None or shard.drop_last or not shard.batch_size or (even and not shard.even_batches):
        return None
    return shard if hasattr(shard.batch_sampler, "sampler") else None


def _last_of_shard(shard: Any) -> tuple[int, int, int]:
    rows = shard.batch_size // shard.num_processes if shard.split_batches else shard.batch_size
    return len(shard.batch_sampler.sampler) % (rows * shard.num_processes), shard.process_index, rows


def _stream_of_each_rank(loader: DataLoader) -> Any:
    """Return a rank's shard of a stream that each rank reads; `None` for other loaders, or without repetitions."""
    from accelerate.data_loader import DataLoaderDispatcher, IterableDatasetShard

    if isinstance(loader, DataLoaderDispatcher) or not isinstance(loader.dataset, IterableDatasetShard):
        return None
    return None if loader.dataset.drop_last else loader.dataset


def _count_stream(loader: DataLoader) -> None:
    """Count the samples of a stream that each rank reads, so that its last batch is known."""
    shard = _stream_of_each_rank(loader)
    if shard is None or isinstance(shard.dataset, _CountedStream):
        return
    if loader.num_workers:
        note_on_first_rank("workers read the stream: samples that its last batch repeats count twice")
    else:
        shard.dataset = _CountedStream(shard.dataset)


class _CountedStream:
    """Wraps a stream, and counts its samples while it is read."""

    def __init__(self, samples: Any) -> None:
        self.samples, self.count = samples, 0
        self._latest: Any = None

    def __iter__(self) -> Iterator[Any]:
        self.count = 0
        for sample in self.samples:
            self.count += 1
            self._latest = sample
            yield sample

    def digest(self) -> int:
        """Return a checksum of the latest row, from the first numbers and characters of its values."""
        row = self._latest
        values = row.items() if hasattr(row, "items") else [("", row)]
        return crc32(repr([(name, _beginning(value)) for name, value in values]).encode())

    def __len__(self) -> int:
        return len(self.samples)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.samples, name)


def _beginning(value: Any) -> Any:
    """Return the first numbers or characters; `None` for objects, whose text may differ between ranks."""
    if hasattr(value, "flatten") and hasattr(value, "tolist"):
        value = value.flatten()[:64].tolist()
    return value[:64] if isinstance(value, list | tuple | str) else value if isinstance(value, int | float) else None


class _RememberedBatches:
    """Wraps batches of indices, and remembers the last ones, one for each rank."""

    def __init__(self, batches: Any, ranks: int) -> None:
        self.batches, self.ranks = batches, ranks
        self.last: list[int] = []

    def __iter__(self) -> Iterator[Any]:
        for index, batch in enumerate(self.batches):
            self.last = [*([] if index % self.ranks == 0 else self.last), *batch]
            yield batch

    def __len__(self) -> int:
        return len(self.batches)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.batches, name)


def _labels_of(batch: Any) -> dict[str, Any]:
    import torch

    if not hasattr(batch, "get"):
        return {}
    return {name: batch[name] for name in _LABELS if torch.is_tensor(batch.get(name))}


def _without_last(batch: Any, loader: DataLoader, samples: int, rank: int, rows: int) -> tuple[Any, KeptPart | None]:
    """Return a batch without the effect of repeated samples, and the part of it that is kept.

    Floating-point labels cannot be ignored, so repeated rows are removed. A rank with only repeated rows keeps one,
    which does not count.
    """
    kept = kept_rows(samples=samples, rank=rank, rows=rows)
    labels = _labels_of(batch)
    if kept == rows or not any(len(values) == rows and values.is_floating_point() for values in labels.values()):
        return _masked(batch, loader, samples, rank, rows)
    left = max(kept, 1)
    cut = {name: value[:left] if len(value) == rows else value for name, value in batch.items()}
    return cut, KeptPart(rows=left, kept_rows=kept)


def _masked(batch: Any, loader: DataLoader, samples: int, rank: int, rows: int) -> tuple[Any, KeptPart | None]:
    """Return a batch without the labels of repeated samples, and the part of it that is kept."""
    kept = kept_rows(samples=samples, rank=rank, rows=rows)
    if kept == rows:
        return batch, None
    labels, tokens = _labels_of(batch), None
    if labels and all(len(values) == 1 != rows for values in labels.values()):
        tokens = _joined_tokens(batch, loader, kept, rank * rows)
        labels = labels if tokens is not None else {}
    elif any(len(values) != rows or values.is_floating_point() for values in labels.values()):
        labels = {}
    if not labels:
        note_on_first_rank("the last batch of an epoch repeats samples, which count twice: its labels are unknown")
        return batch, None
    changed = {name: values.clone() for name, values in labels.items()}
    for values in changed.values():
        if tokens is None:
            values[kept:] = _IGNORED
        else:
            values[:, tokens:] = _IGNORED
    return {**batch, **changed}, KeptPart(rows=rows, kept_rows=kept, kept_tokens=tokens)


def _joined_tokens(batch: Any, loader: DataLoader, kept: int, first: int) -> int | None:
    """Return how many tokens the first `kept` samples have in the row of all samples; `None` if unknown."""
    shard = _batch_shard(loader)
    remembered = getattr(shard, "batch_sampler", None)
    if not isinstance(remembered, _RememberedBatches) or shard.split_batches:
        return None
    if not kept:
        return 0
    rows = [loader.dataset[index] for index in remembered.last[first : first + kept]]
    alone = _labels_of(loader.collate_fn(rows))
    for name, labels in _labels_of(batch).items():
        own = alone.get(name)
        if own is None or not bool((own == labels[:, : own.shape[1]].to(own.device)).all()):
            return None
    return int(next(iter(alone.values())).shape[1])
