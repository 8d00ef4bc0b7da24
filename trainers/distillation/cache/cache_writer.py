"""Write a teacher's outputs to a cache, file by file; an interrupted run resumes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from ....ds_configs.memory.second_models import CACHED_TOP_K
from ....ds_configs.plan.output import disk_errors, output_errors, reserved, write_files
from ....ds_configs.specs.errors import ConfigError, DoesNotFitError, RefusedInputError, ShardwrightError, UsageError
from ....ds_configs.specs.settings import Decimals
from ....plugins.launching.messages import log_progress
from ...data.chat import set_chat_template
from ...data.models import StartingModel, load_config, load_tokenizer, with_positions
from ...data.samples import collate, stated_samples
from ...data.sources import DataSettings, Packing, local_place
from ...evaluation.measures import ModelReader
from .teacher_cache import CACHE_KEY, KEY, OWN_FILES, CacheKey, TeacherCache, sample_hash

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel


# About 79 MB at k = 50: an interrupted run loses little, and a large cache still has few files.
FILE_ROWS = 2**18
# fp32 logits of 512 rows over a vocabulary of 128 k take 263 MB.
CHUNK_ROWS = 512
_SMALLEST_LOGIT = -60.0
"""Of logits minus the largest one: 1 + exp(-60) is 1 in fp32, and 0 · log 0 would not be a number."""


def weights_identity(name: str, revision: str | None, config: PreTrainedConfig) -> str:
    """Return the commit of a Hub model, or a hash of the files of a local one."""
    directory = Path(name)
    if not directory.is_dir():
        return str(getattr(config, "_commit_hash", None) or revision or "main")
    digest = hashlib.sha256()
    for path in sorted([*directory.glob("*.safetensors"), directory / "config.json"]):
        with path.open("rb") as file:
            digest.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def write_cache(
    directory: Path, key: CacheKey, teacher: PreTrainedModel, samples: Sequence[Sequence[int]], *, batch_size: int
) -> None:
    """Store the answers to samples that the directory does not have yet, each sample once.

    After an interruption finished files stay, and later answers are computed again.

    Raises:
        RefusedInputError: the directory has another cache, or damaged files; names all differences.
        ShardwrightError: the teacher's logits are NaN or infinite, or a file cannot be written.
    """
    import torch

    reader = ModelReader(teacher, name=f"teacher {type(teacher).__name__}")
    cache = stored_cache(directory, key)
    missing = {sample_hash(ids): ids for ids in samples if len(ids) and (cache is None or ids not in cache)}
    last = max(directory.glob(OWN_FILES[0]), default=None)
    next_file = 0 if last is None else int(last.stem.removeprefix("answers-")) + 1
    done = len(samples) - len(missing)
    for file, group in enumerate(_groups(missing.values()), start=next_file):
        answers = []
        for first in range(0, len(group), batch_size):
            batch = collate([{"input_ids": ids} for ids in group[first : first + batch_size]])
            rows_ND, head = reader.answers(batch, batch["attention_mask"].bool())
            with torch.no_grad():
                answers += [answers_of(head(rows_nD), key) for rows_nD in rows_ND.split(CHUNK_ROWS)]
            done += len(batch["input_ids"])
            log_progress("sample", done, len(samples))
        write_answers(directory / f"answers-{file:05d}.safetensors", key, group, answers)


def stored_cache(directory: Path, key: CacheKey) -> TeacherCache | None:
    """Return the cache in a directory; `None` if it has none.

    Raises:
        RefusedInputError: the directory has another cache; names all differences.
    """
    return TeacherCache.open(directory, key) if any(directory.glob(OWN_FILES[0])) else None


def _groups(samples: Iterable[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
    """Yield the samples of each file: about `FILE_ROWS` rows, of similar length."""
    group: list[Sequence[int]] = []
    rows = 0
    for ids in sorted(samples, key=len):
        group.append(ids)
        rows += len(ids)
        if rows >= FILE_ROWS:
            yield group
            group, rows = [], 0
    if group:
        yield group


def write_answers(
    path: Path, key: CacheKey, samples: list[Sequence[int]], answers: list[dict[str, torch.Tensor]]
) -> None:
    import torch
    from safetensors.torch import save

    tensors = {name: torch.cat([answer[name] for answer in answers]) for name in answers[0]}
    tensors["hashes"] = torch.tensor([list(sample_hash(ids)) for ids in samples], dtype=torch.uint8)
    tensors["lengths"] = torch.tensor([len(ids) for ids in samples])
    # safetensors (0.8.0) writes several entries of metadata in random order, and equal caches have equal bytes.
    content = save(tensors, metadata={KEY: CACHE_KEY.dump_json(key).decode()})
    write_files({path.name: content}, path.parent, force=True)


def answers_of(logits_NV: torch.Tensor, key: CacheKey) -> dict[str, torch.Tensor]:
    """Return what a file stores of distributions over the first V tokens, computed in fp32, on the CPU.

    Raises:
        ShardwrightError: the logits are NaN or infinite, or fewer than V.
    """
    import torch

    logits_NV = logits_NV[:, : key.vocab_size].float()
    if logits_NV.shape[1] < key.vocab_size:
        raise ShardwrightError(f"teacher: has {logits_NV.shape[1]} logits for {key.vocab_size} tokens")
    largest_N1 = logits_NV.amax(dim=-1, keepdim=True)
    if not bool(torch.isfinite(largest_N1).all()) or bool(torch.isnan(logits_NV).any()):
        raise ShardwrightError("teacher: NaN or infinite logits; load it in bf16 or fp32, and check its weights")
    below_NV = logits_NV - largest_N1
    kept_NK, ids_NK = below_NV.topk(key.top_k, dim=-1)
    rest_NV = below_NV.scatter(1, ids_NK, float("-inf"))
    tails = [(rest_NV / tau).logsumexp(dim=-1) - (below_NV / tau).logsumexp(dim=-1) for tau in key.temperatures]
    return {
        "ids": ids_NK.int().cpu(),
        "logits": kept_NK.clamp(min=_SMALLEST_LOGIT).half().cpu(),
        "log_tails": torch.stack(tails, dim=1).half().cpu(),
    }


class CacheSettings(DataSettings):
    """Settings of `shardwright cache-teacher`; those of the data must equal those of `distill`."""

    group = "Answers"

    dataset: str = Field("python-help", description="As for distill")
    packing: Packing = Field("auto", description="As for distill; conversations are stored one by one with any value")
    top_k: int = Field(CACHED_TOP_K, ge=1, description="Likeliest tokens to store")
    temperature: Decimals = Field((1.0,), description="Temperatures to distill at")
    batch_size: int = Field(8, ge=1, description="Samples per forward pass")
    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        None, description="Dtype of the teacher. Default: bfloat16 on an accelerator, float32 on the CPU"
    )
    revision: str | None = Field(None, description="Branch, tag or commit of a Hub teacher")


@dataclass(frozen=True, kw_only=True)
class CacheJob:
    """A cache to be written."""

    teacher: str
    settings: CacheSettings
    key: CacheKey
    samples: list[list[int]]
    """Token ids of training and held-out samples."""


def prepare_cache(teacher: str, settings: CacheSettings, output_dir: Path | None = None) -> CacheJob:
    """Read configuration, tokenizer and data; nothing is run or written.

    Raises:
        UsageError: invalid settings, a dataset without text, a sequence beyond the model's positions.
        RefusedInputError: the teacher has no safetensors weights.
    """
    sources = {"the teacher": teacher, "the dataset": local_place(settings.dataset)}
    errors: list[ConfigError] = []
    temperatures = settings.temperature
    if not temperatures or len({*temperatures}) < len(temperatures) or not all(0 < each < inf for each in temperatures):
        rule = "must be one or more values above 0, each once"
        errors.append(ConfigError(where="temperature", value=temperatures, rule=rule))
    if output_dir is not None:
        fix = "use another directory"
        errors += output_errors(output_dir, force=False, sources=sources, own=OWN_FILES, fix=fix)
    if errors:
        raise UsageError(errors)
    path = Path(teacher)
    if path.is_dir() and not any(path.glob("*.safetensors")):
        rule = "has no safetensors weights"
        raise RefusedInputError(ConfigError(where=f"teacher {teacher}", rule=rule))
    if path.is_dir() and settings.revision is not None:
        rule = "only a Hub model has revisions"
        raise UsageError(ConfigError(where="--revision", value=settings.revision, rule=rule))
    source = StartingModel(model=teacher, revision=settings.revision)
    config = load_config(source)
    settings = with_positions(settings, config)
    tokenizer = load_tokenizer(source, config.get_text_config().vocab_size)
    set_chat_template(tokenizer, settings.chat_template)
    samples = stated_samples(settings, tokenizer)
    vocab_size = max(tokenizer.get_vocab().values()) + 1
    key = CacheKey(
        teacher=teacher,
        weights=weights_identity(teacher, settings.revision, config),
        vocab_size=vocab_size,
        top_k=min(settings.top_k, vocab_size),
        temperatures=temperatures,
    )
    ids = [list(sample["input_ids"]) for sample in (*samples.train, *samples.evaluation)]
    return CacheJob(teacher=teacher, settings=settings, key=key, samples=ids)


def run_cache_job(job: CacheJob, directory: Path) -> None:
    """Load the teacher and store its outputs.

    Raises:
        UsageError: the directory has other files, or another run writes to it.
        DoesNotFitError: the answers do not fit on its disk.
        RefusedInputError: the directory has another cache.
        ShardwrightError: the teacher's logits are NaN or infinite, or a file cannot be written.
    """
    import torch

    from ....plugins.transformers.second_model import load_second_model

    rows = sum(len(ids) for ids in {tuple(ids) for ids in job.samples})
    rows -= len(stored_cache(directory, job.key) or ())
    if errors := disk_errors(directory, needed_bytes=max(0, rows) * job.key.bytes_per_token):
        raise DoesNotFitError("\n".join(map(str, errors)))
    with reserved(directory, force=False, own=OWN_FILES):
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        device = accelerator or torch.device("cpu")
        dtype = getattr(torch, job.settings.dtype or ("bfloat16" if accelerator else "float32"))
        teacher = load_second_model(job.teacher, revision=job.settings.revision, dtype=dtype).to(device)
        write_cache(directory, job.key, teacher, job.samples, batch_size=job.settings.batch_size)
