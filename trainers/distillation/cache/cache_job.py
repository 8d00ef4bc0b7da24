"""Job of `cache-teacher`: the samples that `distill` will train on, the key, and the teacher that answers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field

from ....ds_configs.plan.output import disk_faults, output_faults, reserved
from ....ds_configs.specs.errors import DoesNotFitError, Fault, RefusedInputError, UsageError
from ....ds_configs.specs.settings import Decimals
from ....plugins.launching.notes import Notify, OnProgress
from ...data.models import StartingModel, load_config, load_tokenizer, with_positions
from ...data.samples import stated_samples
from ...data.settings import DataSettings
from ...data.sources import local_place
from ...replicas.launch import ONE_PROCESS, Replicas
from .answering import AnswerRequest, answer_in_ranks, store_answers
from .cache_format import RecordFormat
from .cache_writer import cache_key, finished_shards, weights_identity
from .teacher_cache import OWN_FILES, CacheKey


class CacheSettings(DataSettings):
    """Every setting of `shardwright cache-teacher`; those of the data are to be those of `distill`."""

    group = "Answers"

    dataset: str = Field("python-help", description="As for distill")
    top_k: int = Field(50, description="Likeliest tokens to store")
    temperature: Decimals = Field((1.0,), description="Temperatures to distil at")
    value_bits: int = Field(6, description="Bits of each probability, 2 to 16")
    batch_size: int = Field(8, ge=1, description="Samples of one forward pass")
    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        None, description="Precision of the teacher. Default: bfloat16 on an accelerator, float32 on the CPU"
    )
    revision: str | None = Field(None, description="Branch, tag or commit of a Hub teacher")


@dataclass(frozen=True, kw_only=True)
class CacheJob:
    """A cache that can be written."""

    teacher: str
    """Hub id or directory of the teacher."""
    settings: CacheSettings
    key: CacheKey
    samples: list[list[int]]
    """Token ids of training and held-out samples."""

    @property
    def request(self) -> AnswerRequest:
        """Samples for the teacher, and the way it answers."""
        settings = self.settings
        return AnswerRequest(
            teacher=self.teacher,
            revision=settings.revision,
            dtype=settings.dtype,
            batch_size=settings.batch_size,
            key=self.key,
            samples=self.samples,
        )


def prepare_cache(
    teacher: str, settings: CacheSettings, output_dir: Path | None = None, *, replicas: Replicas = ONE_PROCESS
) -> CacheJob:
    """Read configuration, tokenizer and data; nothing is run or written.

    Args:
        teacher: Hub id or directory.
        settings: What to store.
        output_dir: Where answers will go; `None` where none are written.
        replicas: Processes that will divide the batches.

    Raises:
        UsageError: a setting that cannot be, a dataset without text, a sequence beyond the model's positions.
        RefusedInputError: the teacher's weights are in another format than safetensors.
    """
    sources = {"the teacher": teacher, "the dataset": local_place(settings.dataset)}
    faults = replicas.faults()
    if output_dir is not None and replicas.result_is_here:
        fix = "name another directory"
        faults += output_faults(output_dir, force=False, sources=sources, own=OWN_FILES, fix=fix)
    if faults:
        raise UsageError(faults)
    path = Path(teacher)
    if path.is_dir() and not any(path.glob("*.safetensors")):
        rule = "has no safetensors weights to answer with"
        raise RefusedInputError(Fault(where=f"teacher {teacher}", rule=rule))
    if path.is_dir() and settings.revision is not None:
        raise UsageError(Fault(where="--revision", value=settings.revision, rule="only a Hub model has revisions"))
    source = StartingModel(model=teacher, revision=settings.revision)
    config = load_config(source)
    settings = with_positions(settings, config)
    tokenizer = load_tokenizer(source, config.get_text_config().vocab_size)
    samples = stated_samples(settings, tokenizer)
    vocab_size = max(tokenizer.get_vocab().values()) + 1
    layout = RecordFormat(
        top_k=min(settings.top_k, vocab_size),
        vocab_size=vocab_size,
        temperatures=settings.temperature,
        value_bits=settings.value_bits,
    )
    key = cache_key(
        teacher,
        weights_identity(teacher, settings.revision, config),
        tokenizer,
        layout,
        rendered_by_template=samples.statistics.kind == "messages",
    )
    ids = [list(sample["input_ids"]) for sample in (*samples.train, *samples.evaluation)]
    return CacheJob(teacher=teacher, settings=settings, key=key, samples=ids)


def run_cache_job(
    job: CacheJob,
    directory: Path,
    *,
    replicas: Replicas = ONE_PROCESS,
    notify: Notify = lambda _: None,
    on_progress: OnProgress,
) -> None:
    """Load the teacher and store its answers.

    Args:
        job: What is stored.
        directory: Where.
        replicas: Processes that divide the batches; the files have the bytes of one process.
        notify: Receives remarks.
        on_progress: Hears how far it is.

    Raises:
        UsageError: the directory holds other files, or another run writes to it.
        DoesNotFitError: the answers do not fit on its disk.
        RefusedInputError: the directory holds another cache.
        ShardwrightError: the teacher's logits are no numbers, or a rank failed.
    """
    if not replicas.result_is_here:
        answer_in_ranks(job.request, directory, replicas, notify=notify, on_progress=on_progress)
        return
    if faults := disk_faults(directory, needed_bytes=_missing_bytes(job, directory)):
        raise DoesNotFitError("\n".join(map(str, faults)))
    with reserved(directory, force=False, own=OWN_FILES):
        if replicas.are_launched:
            answer_in_ranks(job.request, directory, replicas, notify=notify, on_progress=on_progress)
        else:
            store_answers(job.request, directory, on_progress=on_progress)


def _missing_bytes(job: CacheJob, directory: Path) -> int:
    """Return what answers take beside those that are there already."""
    rows = sum(len(ids) for ids in {tuple(ids) for ids in job.samples})
    return max(0, rows - sum(shard.rows for shard in finished_shards(directory, job.key))) * job.key.layout.record_bytes
