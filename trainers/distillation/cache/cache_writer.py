"""Writes a teacher's answers to a dataset, shard by shard, so that an interrupted run goes on where it was."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ....ds_configs.plan.write import write_files
from ....ds_configs.specs.errors import Fault, RefusedInputError, ShardwrightError
from ....plugins.launching.notes import OnProgress
from ...losses.head_forward import UnknownLogitsError, accepted_inputs, captured_head_input
from ...replicas.share import ALONE, Share
from .cache_format import CachedAnswers, RecordFormat, encode
from .teacher_cache import (
    MANIFEST,
    CacheKey,
    CacheShard,
    TeacherCache,
    file_sha256,
    key_faults,
    read_manifest,
    sample_hash,
    write_manifest,
)

if TYPE_CHECKING:
    import torch

# About 34 MB at k = 50: an interrupted run loses little, and a large cache still has few files.
SHARD_ROWS = 2**18
# fp32 logits of so many rows over a vocabulary of 128 k take 263 MB.
CHUNK_ROWS = 512
# Ranks wait for the slowest before a file is written: with so many batches of similar length for each, not for long.
_BATCHES_OF_A_RANK = 8


def cache_key(
    teacher: str, weights: str, tokenizer: Any, layout: RecordFormat, *, rendered_by_template: bool
) -> CacheKey:
    """Return the key of a cache."""
    return CacheKey(
        teacher=teacher,
        weights=weights,
        tokenizer=tokenizer_hash(tokenizer),
        template=template_hash(tokenizer, used=rendered_by_template),
        layout=layout,
    )


def tokenizer_hash(tokenizer: Any) -> str:
    """Return a hash of everything that decides how a tokenizer splits text.

    Fast tokenizers keep how the last call padded and truncated (transformers 5.17.0, tokenization_utils_tokenizers.py
    `set_truncation_and_padding`); both are left out.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        content = repr(sorted(tokenizer.get_vocab().items()))
    else:
        content = json.dumps({**json.loads(backend.to_str()), "truncation": None, "padding": None})
    return hashlib.sha256(content.encode()).hexdigest()


def template_hash(tokenizer: Any, *, used: bool) -> str:
    """Return a hash of the chat template; that of an empty one where no conversation is rendered."""
    template = str(getattr(tokenizer, "chat_template", None) or "") if used else ""
    return hashlib.sha256(template.encode()).hexdigest()


def weights_identity(name: str, revision: str | None, config: Any) -> str:
    """Return the commit of a Hub model, or a hash of the files of a local one."""
    directory = Path(name)
    if not directory.is_dir():
        return str(getattr(config, "_commit_hash", None) or revision or "main")
    digest = hashlib.sha256()
    for path in sorted([*directory.glob("*.safetensors"), directory / "config.json"]):
        digest.update(path.name.encode() + bytes.fromhex(file_sha256(path)))
    return digest.hexdigest()


def write_cache(
    directory: Path,
    key: CacheKey,
    teacher: Any,
    samples: Sequence[Sequence[int]],
    *,
    batch_size: int,
    device: Any,
    on_progress: OnProgress = lambda _what, _done, _total: None,
    share: Share = ALONE,
) -> None:
    """Store the answers to samples that the directory does not hold yet, each sample once.

    Ranks of a share each answer whole batches, and the first writes what all answered: the bytes are those of one
    process. Files that are written whole stay when a rank fails; what was answered since is answered again.

    Raises:
        RefusedInputError: the directory holds another cache, or damaged files; every mismatch and file is named.
        ShardwrightError: the teacher's logits are no numbers, or the system refuses to write.
        UsageError: the teacher has no output embeddings.
    """
    # The directory may be of the first rank's machine alone.
    shards, places = share.from_first(lambda: _missing(directory, key, samples))
    missing = [samples[place] for place in places]
    done = len(samples) - len(missing)
    for groups in _rounds(list(_groups(missing)), batch_size, share.ranks):
        batches = [batch for group in groups for batch in _batches(group, batch_size)]
        mine = []
        for index in share.indices(len(batches)):
            answers = teacher_answers(teacher, batches[index], key.layout, device)
            mine.append(np.concatenate([encode(answer, key.layout) for answer in answers]))
            answered = sum(map(len, batches[: index + share.ranks]))
            on_progress("sample", done + answered, len(samples))
        done += sum(map(len, groups))
        found = share.gathered(mine)
        if found is None:
            continue
        records = iter(found)
        for group in groups:
            own = list(islice(records, -(-len(group) // batch_size)))
            shards.append(_write_shard(directory, len(shards), group, own))
            write_manifest(directory, key, shards)
    if not shards and share.is_first:
        write_manifest(directory, key, shards)


def _rounds(groups: list[list[Sequence[int]]], batch_size: int, ranks: int) -> Iterator[list[list[Sequence[int]]]]:
    """Yield groups that are answered before any is written: one for one rank, else enough to keep all ranks busy."""
    least = 1 if ranks == 1 else _BATCHES_OF_A_RANK * ranks
    several: list[list[Sequence[int]]] = []
    for group in groups:
        several.append(group)
        if sum(-(-len(each) // batch_size) for each in several) >= least:
            yield several
            several = []
    if several:
        yield several


def finished_shards(directory: Path, key: CacheKey) -> list[CacheShard]:
    """Return the files that a directory holds of a cache; none where it holds no cache.

    Raises:
        RefusedInputError: it holds another cache; every mismatch is named.
    """
    if not (directory / MANIFEST).exists():
        return []
    found, shards = read_manifest(directory)
    faults = key_faults(found, key, directory)
    if found.layout != key.layout and not faults:
        rule = f"holds other records ({found.layout}, asked for {key.layout})"
        faults = [Fault(where=f"teacher cache {directory}", rule=rule, fix="write to another directory")]
    if faults:
        raise RefusedInputError(faults)
    return shards


def _missing(directory: Path, key: CacheKey, samples: Sequence[Sequence[int]]) -> tuple[list[CacheShard], list[int]]:
    """Return the finished shards, whose content is checked, and the places of the samples that none of them holds."""
    shards = finished_shards(directory, key)
    seen: set[bytes] = set()
    if shards:
        cache = TeacherCache(directory, key, shards)
        rule, fix = "is not what was written", "write the cache again, to an empty directory"
        faults = [Fault(where=str(directory / file), rule=rule, fix=fix) for file in cache.damaged_files()]
        if faults:
            raise RefusedInputError(faults)
        seen = {sample_hash(ids) for ids in samples if ids in cache}
    missing = []
    for place, ids in enumerate(samples):
        digest = sample_hash(ids)
        if digest not in seen and len(ids):
            seen.add(digest)
            missing.append(place)
    return shards, missing


def _groups(samples: Sequence[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
    """Cut samples into groups of about `SHARD_ROWS` rows, similar lengths together."""
    group: list[Sequence[int]] = []
    rows = 0
    for ids in sorted(samples, key=len):
        group.append(ids)
        rows += len(ids)
        if rows >= SHARD_ROWS:
            yield group
            group, rows = [], 0
    if group:
        yield group


def _batches(samples: list[Sequence[int]], batch_size: int) -> Iterator[list[Sequence[int]]]:
    for first in range(0, len(samples), batch_size):
        yield samples[first : first + batch_size]


def _write_shard(directory: Path, number: int, samples: list[Sequence[int]], records: list[Any]) -> CacheShard:
    from safetensors.numpy import save

    lengths = np.array([len(ids) for ids in samples], dtype=np.int64)
    arrays = {
        "records": np.concatenate(records),
        "hashes": np.stack([np.frombuffer(sample_hash(ids), dtype=np.uint8) for ids in samples]),
        "starts": np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64),
        "lengths": lengths,
    }
    name = f"answers-{number:05d}.safetensors"
    content = save(arrays)
    write_files({name: content}, directory, force=True)
    return CacheShard(
        file=name,
        rows=int(lengths.sum()),
        samples=len(samples),
        file_bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
    )


def teacher_answers(
    teacher: Any, samples: Sequence[Sequence[int]], layout: RecordFormat, device: Any
) -> Iterator[CachedAnswers]:
    """Run a placed teacher on a batch of samples and return what it says of every token, some rows at a time.

    Raises:
        ShardwrightError: its logits are no numbers.
        UsageError: it has no output embeddings.
    """
    import torch

    longest = max(len(ids) for ids in samples)
    ids_BS = torch.tensor([[*ids, *([0] * (longest - len(ids)))] for ids in samples], device=device)
    lengths_B = torch.tensor([len(ids) for ids in samples], device=device)
    mask_BS = torch.arange(longest, device=device) < lengths_B[:, None]
    with torch.no_grad(), captured_head_input(teacher.model) as kept:
        outputs = teacher(**accepted_inputs(teacher.model, {"input_ids": ids_BS, "attention_mask": mask_BS.long()}))
    try:
        kept.check(f"teacher {type(teacher.model).__name__}", outputs.logits)
    except UnknownLogitsError:
        yield from _own_logits(teacher, ids_BS, mask_BS, layout)
        return
    hidden_NH = kept.inputs[0][mask_BS]
    with torch.no_grad(), teacher.gathered_head() as head:
        for chunk_nH in hidden_NH.split(CHUNK_ROWS):
            yield answers_of(head.logits(chunk_nH.to(head.weight_VH.dtype)), layout)


def _own_logits(
    teacher: Any, ids_BS: torch.Tensor, mask_BS: torch.Tensor, layout: RecordFormat
) -> Iterator[CachedAnswers]:
    """Return what a teacher says whose logits come of more than a head."""
    import torch

    with torch.no_grad():
        outputs = teacher(**accepted_inputs(teacher.model, {"input_ids": ids_BS, "attention_mask": mask_BS.long()}))
    for chunk_nV in outputs.logits[mask_BS].split(CHUNK_ROWS):
        yield answers_of(chunk_nV, layout)


def answers_of(logits_NV: torch.Tensor, layout: RecordFormat) -> CachedAnswers:
    """Return the K likeliest of the first V tokens with everything that a record holds, computed in fp32.

    Raises:
        ShardwrightError: the logits are no numbers.
    """
    import torch

    logits_NV = logits_NV[:, : layout.vocab_size].float()
    if logits_NV.shape[1] < layout.vocab_size:
        rule = f"has {logits_NV.shape[1]} logits for {layout.vocab_size} tokens"
        raise ShardwrightError(f"teacher: {rule}")
    largest_N1 = logits_NV.amax(dim=-1, keepdim=True)
    if not bool(torch.isfinite(largest_N1).all()) or bool(torch.isnan(logits_NV).any()):
        raise ShardwrightError("teacher: NaN or infinite logits; load it in bf16 or fp32, and check its weights")
    below_NV = logits_NV - largest_N1
    ids_NK = below_NV.topk(layout.top_k, dim=-1).indices.sort(dim=-1).values
    rest_NV = below_NV.scatter(1, ids_NK, float("-inf"))
    tails = [
        (rest_NV / temperature).logsumexp(dim=-1) - (below_NV / temperature).logsumexp(dim=-1)
        for temperature in layout.temperatures
    ]
    return CachedAnswers(
        ids_NK=ids_NK.cpu().numpy(),
        depths_NK=-below_NV.gather(1, ids_NK).cpu().numpy(),
        log_tail_NT=torch.stack(tails, dim=1).cpu().numpy(),
    )
