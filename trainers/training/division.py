"""Division of a streamed dataset among the machines of a training, of which each reads its own part alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...ds_configs.plan.launch import NodePlace
from ...ds_configs.plan.plan import Plan
from ...ds_configs.specs.hardware import HardwareSpec
from ...plugins.launching.notes import Notify
from ..data.divided import DividedSamples
from ..data.samples import Samples, SampleStatistics
from ..data.sources import WHOLE, Part
from ..replicas.share import Share
from ..runs.inputs import training_job
from .settings import TrainJob, TrainSettings

if TYPE_CHECKING:
    from datasets import Dataset

_ORDERS = ("random", "sequential")
"""Values of `train_sampling_strategy` under which a machine need not know the samples of the others."""


def streamed_count(settings: TrainSettings, plan: Plan | None, hardware: HardwareSpec) -> int | None:
    """Return the samples of all optimizer steps where the dataset is read no further; `None`: the whole of it."""
    if not settings.streaming or settings.max_steps is None:
        return None
    batch = (
        training_job(settings, hardware).global_batch_size if plan is None else plan.chosen.strategy.global_batch_size
    )
    assert batch is not None, "a training job of the settings has a batch"
    return settings.max_steps * batch


def part_of(settings: TrainSettings, plan: Plan | None, place: NodePlace | None, notify: Notify) -> Part:
    """Return the part of the rows that a machine reads: the whole, unless it is one of several whose ranks differ.

    Ranks that share samples (tensor, pipeline, sequence and context parallelism) may be on other machines, and a
    sampler that looks at all lengths needs all samples.
    """
    if not settings.streaming or place is None or plan is None or plan.hardware.nodes == 1:
        return WHOLE
    strategy, order = plan.chosen.strategy, settings.arg.get("train_sampling_strategy", "random")
    why = ""
    if strategy.data_parallel_size != strategy.world_size:
        why = f"ranks of {strategy.label} share samples"
    elif order not in _ORDERS:
        why = f"train_sampling_strategy {order} looks at all of them"
    if not why:
        return Part(index=int(place.rank), count=plan.hardware.nodes)
    notify(f"each machine reads all rows: {why}")
    return WHOLE


def read_line(samples: Samples, settings: TrainSettings, plan: Plan) -> str:
    """Return how far the dataset was read, and whether it is too short."""
    found = samples.statistics
    wanted = (streamed_count(settings, plan, plan.hardware) or 0) // found.machines
    one_of = f", of one of {found.machines} machines" if found.machines > 1 else ""
    line = f"read {found.rows:,} rows for {settings.max_steps:,} steps{one_of}"
    if found.train_samples >= wanted:
        return line
    part = "the machine's part of the dataset" if one_of else "the dataset"
    return f"{line}: {part} has {found.train_samples:,} of {wanted:,} samples, which come again"


def divided_job_fields(statistics: SampleStatistics, settings: TrainSettings, plan: Plan) -> dict[str, Any]:
    """Return fields of this machine's `TrainJob`: its part of the samples, which may come again, and their tokens."""
    wanted = (streamed_count(settings, plan, plan.hardware) or 0) // statistics.machines
    return {
        "machines": statistics.machines,
        "train_samples": wanted,
        "train_tokens": round(statistics.train_tokens * wanted / statistics.train_samples),
    }


def divided_training(job: TrainJob, own_samples: Dataset, arguments: Any) -> tuple[TrainJob, DividedSamples]:
    """Return the job with the counts of all machines, and the samples to train on; every rank must call it.

    Each machine's samples are drawn in a random order of the data's seed, unless the user wants them in theirs.
    """
    rank, world_size = arguments.process_index, arguments.world_size
    ranks = world_size // job.machines
    told = Share(rank=rank, ranks=world_size).told((job.train_samples, job.train_tokens))
    samples, tokens = (sum(counts) for counts in zip(*told[::ranks], strict=True))
    if job.settings.arg.get("train_sampling_strategy") != "sequential":
        seed = arguments.seed if arguments.data_seed is None else arguments.data_seed
        own_samples = own_samples.shuffle(seed=seed, keep_in_memory=True)
    divided = DividedSamples(
        own_samples=own_samples,
        machine=rank // ranks,
        machines=job.machines,
        ranks_per_machine=ranks,
        batch_size=arguments.per_device_train_batch_size,
        count=samples,
    )
    return job.model_copy(update={"train_samples": samples, "train_tokens": tokens}), divided
