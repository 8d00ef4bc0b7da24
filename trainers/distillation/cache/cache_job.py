"""What `cache-teacher` does: the samples that `distill` will train on, the key, and the teacher that answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ....ds_configs.specs.errors import Fault, RefusedInputError, UsageError
from ...data.models import StartingModel, check_seq_len, load_config, load_tokenizer
from ...data.samples import Samples, load_samples
from .cache_format import RecordFormat
from .cache_writer import Progress, cache_key, finished_shards, weights_identity, write_cache
from .teacher_cache import CacheKey, TeacherCache


@dataclass(frozen=True, kw_only=True)
class CacheSettings:
    """What the user asked for; the fields are the command's flags."""

    teacher: str
    dataset: str
    dataset_split: str = "train"
    dataset_revision: str | None = None
    seq_len: int = 512
    packing: bool = True
    evaluation_fraction: float = 0.05
    seed: int = 0
    top_k: int = 50
    temperatures: tuple[float, ...] = (1.0,)
    value_bits: int = 6
    batch_size: int = 8
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    revision: str | None = None


@dataclass(frozen=True, kw_only=True)
class CacheJob:
    """A cache that can be written."""

    settings: CacheSettings
    key: CacheKey
    samples: list[list[int]]
    """Token ids of training and held-out samples."""


def prepare_cache(settings: CacheSettings) -> CacheJob:
    """Read configuration, tokenizer and data; nothing is run or written.

    Raises:
        UsageError: a setting that cannot be, a dataset without text, a sequence beyond the model's positions.
        RefusedInputError: the teacher's weights are in another format than safetensors.
    """
    path = Path(settings.teacher)
    if path.is_dir() and not any(path.glob("*.safetensors")):
        rule = "has no safetensors weights to answer with"
        raise RefusedInputError(Fault(where=f"teacher {settings.teacher}", rule=rule))
    if path.is_dir() and settings.revision is not None:
        raise UsageError(Fault(where="--revision", value=settings.revision, rule="only a Hub model has revisions"))
    source = StartingModel(model=settings.teacher, revision=settings.revision)
    config = load_config(source)
    check_seq_len(settings.seq_len, config)
    tokenizer = load_tokenizer(source, config.get_text_config().vocab_size)
    samples = _samples(settings, tokenizer)
    vocab_size = max(tokenizer.get_vocab().values()) + 1
    layout = RecordFormat(
        top_k=min(settings.top_k, vocab_size),
        vocab_size=vocab_size,
        temperatures=settings.temperatures,
        value_bits=settings.value_bits,
    )
    key = cache_key(
        settings.teacher,
        weights_identity(settings.teacher, settings.revision, config),
        tokenizer,
        layout,
        rendered_by_template=samples.statistics.kind == "messages",
    )
    ids = [list(sample["input_ids"]) for sample in (*samples.train, *samples.evaluation)]
    return CacheJob(settings=settings, key=key, samples=ids)


def _samples(settings: CacheSettings, tokenizer: Any) -> Samples:
    return load_samples(
        settings.dataset,
        tokenizer,
        seq_len=settings.seq_len,
        packing=settings.packing,
        split=settings.dataset_split,
        revision=settings.dataset_revision,
        seed=settings.seed,
        evaluation_fraction=settings.evaluation_fraction,
    )


def run_cache_job(job: CacheJob, directory: Path, *, on_progress: Callable[[Progress], None]) -> TeacherCache:
    """Load the teacher and store its answers.

    Raises:
        RefusedInputError: the directory holds another cache.
        ShardwrightError: the teacher's logits are no numbers.
    """
    import torch

    from ....plugins.transformers.teacher_placement import PlacedTeacher, load_teacher

    # A cache that cannot be continued is refused before a teacher is loaded.
    finished_shards(directory, job.key)
    accelerated = torch.accelerator.is_available()
    device = torch.accelerator.current_accelerator() if accelerated else torch.device("cpu")
    dtype = getattr(torch, job.settings.dtype or ("bfloat16" if accelerated else "float32"))
    model = load_teacher(job.settings.teacher, revision=job.settings.revision, dtype=dtype).to(device)
    teacher = PlacedTeacher(model, model, "replica")
    return write_cache(
        directory,
        job.key,
        teacher,
        job.samples,
        batch_size=job.settings.batch_size,
        device=device,
        on_progress=on_progress,
    )
