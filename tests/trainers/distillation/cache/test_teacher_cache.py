"""Teacher caches: record format, reading and writing, and training against a live teacher."""

from __future__ import annotations

import copy
import errno
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from distilling import collate, tiny, training_arguments
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from shardwright.cli.main import run
from shardwright.ds_configs.specs.errors import RefusedInputError, ShardwrightError, UsageError
from shardwright.plugins.transformers.teacher_placement import PlacedTeacher
from shardwright.plugins.transformers.training_arguments import byte_tokenizer
from shardwright.trainers.data.packing import packed_row
from shardwright.trainers.data.samples import collate as padded_batch
from shardwright.trainers.distillation import DistillationConfig, DistillationTrainer
from shardwright.trainers.distillation.cache.cache_format import RecordFormat, decode, encode, log_probabilities
from shardwright.trainers.distillation.cache.cache_writer import (
    answers_of,
    cache_key,
    teacher_answers,
    tokenizer_hash,
    write_cache,
)
from shardwright.trainers.distillation.cache.teacher_cache import CachedTeacherDataset, TeacherCache
from shardwright.trainers.losses.objective import LogitTargets, TokenObjective, TopKTargets, plain_token_loss

pytestmark = pytest.mark.slow

K = 50


@pytest.mark.parametrize(("vocab_size", "expected"), [(32_000, 112), (128_256, 125), (151_936, 126), (262_144, 131)])
def test_record_size_follows_the_format(vocab_size: int, expected: int) -> None:
    """For 151,936 tokens: 50 · 11 low, 50 + 74 + 1 high and 50 · 6 depth bits are 975 bits or 122 bytes, plus 4."""
    layout = RecordFormat(top_k=K, vocab_size=vocab_size, temperatures=(1.0,))
    assert layout.record_bytes == expected
    assert RecordFormat(top_k=K, vocab_size=vocab_size, temperatures=(1.0, 2.0)).record_bytes == expected + 2


@settings(max_examples=60, deadline=None)
@given(
    st.integers(2, 4000),
    st.integers(1, 60),
    st.integers(2, 16),
    st.integers(0, 2**31),
    st.sampled_from([0.1, 3.0, 30.0]),
)
def test_decoding_restores_encoded_answers(vocab_size: int, k: int, value_bits: int, seed: int, spread: float) -> None:
    k = min(k, vocab_size)
    layout = RecordFormat(top_k=k, vocab_size=vocab_size, temperatures=(1.0, 2.5), value_bits=value_bits)
    logits = spread * torch.randn(5, vocab_size, generator=torch.Generator().manual_seed(seed))
    written = answers_of(logits, layout)
    records = encode(written, layout)
    assert records.shape == (5, layout.record_bytes)
    assert records.dtype == np.uint8
    found = decode(records, layout)
    assert np.array_equal(found.ids_NK, written.ids_NK)
    assert np.array_equal(np.sort(logits.topk(k).indices.numpy()), found.ids_NK)
    depths = np.minimum(written.depths_NK, 60.0)
    codes = 2**value_bits - 1
    steps = np.sqrt(depths / np.maximum(depths.max(axis=1, keepdims=True), 1e-8)) + 1 / codes
    allowed = depths.max(axis=1, keepdims=True) * (steps / codes + 2e-3) + 1e-6
    assert (np.abs(found.depths_NK - depths) <= allowed).all()
    for temperature in layout.temperatures:
        log_p, log_tail = log_probabilities(found, layout, temperature)
        assert np.exp(log_p).sum(axis=1) + np.exp(log_tail) == pytest.approx(np.ones(5), abs=2e-6)


def test_exact_format_restores_exact_probabilities() -> None:
    """Sixteen bits leave the rounding of fp16 numbers."""
    layout = RecordFormat(top_k=8, vocab_size=300, temperatures=(1.0, 2.0, 4.0), value_bits=16)
    logits = 3 * torch.randn(64, 300, generator=torch.Generator().manual_seed(1))
    found = decode(encode(answers_of(logits, layout), layout), layout)
    for temperature in layout.temperatures:
        expected = torch.log_softmax(logits.double() / temperature, -1)
        log_p, log_tail = log_probabilities(found, layout, temperature)
        chosen = expected.gather(1, torch.from_numpy(found.ids_NK))
        assert np.abs(np.exp(log_p) - chosen.exp().numpy()).max() < 2e-3
        tail = 1 - chosen.exp().sum(-1).numpy()
        assert np.exp(log_tail) == pytest.approx(tail, rel=5e-3)


def test_excluded_tokens_have_no_probability() -> None:
    logits = torch.full((1, 40), float("-inf"))
    logits[0, :3] = torch.tensor([1.0, 2.0, 3.0])
    layout = RecordFormat(top_k=6, vocab_size=40, temperatures=(1.0,))
    found = decode(encode(answers_of(logits, layout), layout), layout)
    log_p, log_tail = log_probabilities(found, layout, 1.0)
    probability = dict(zip(found.ids_NK[0].tolist(), np.exp(log_p[0]).tolist(), strict=True))
    assert [probability[index] for index in range(3)] == pytest.approx([0.0900, 0.2447, 0.6652], abs=0.02)
    assert sum(value for index, value in probability.items() if index > 2) < 1e-12
    assert np.isneginf(log_tail[0])


VOCAB_SIZE = 384


def trained_pair() -> tuple[Any, Any, list[dict[str, Any]]]:
    """Train a teacher and a student on the bytes of Python's help topics, and return 24 unseen samples."""
    from shardwright.trainers.data.sources import pack, read_documents

    samples = pack(read_documents(None)[:40], byte_tokenizer(VOCAB_SIZE), 64)
    models = []
    for hidden, steps, seed in ((64, 120, 4), (32, 40, 5)):
        model = tiny("llama", hidden=hidden, vocab_size=VOCAB_SIZE, seed=seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        for step in range(steps):
            ids = torch.stack([sample["input_ids"] for sample in samples[24 + 8 * step : 32 + 8 * step]])
            model(ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        models.append(model.eval())
    rows = [{"input_ids": sample["input_ids"].tolist(), "labels": sample["labels"].tolist()} for sample in samples[:24]]
    return models[0].requires_grad_(False), models[1], rows


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any, list[dict[str, Any]]]:
    return trained_pair()


class Words:
    """Fake tokenizer with a vocabulary."""

    def __init__(self, count: int) -> None:
        self.count = count

    def get_vocab(self) -> dict[str, int]:
        return {f"word {index}": index for index in range(self.count)}


def written(directory: Path, pair: Any, *, temperatures: tuple[float, ...] = (1.0, 2.0), weights: str = "one") -> Any:
    teacher, _, rows = pair
    layout = RecordFormat(top_k=K, vocab_size=VOCAB_SIZE, temperatures=temperatures)
    key = cache_key("teacher", weights, Words(VOCAB_SIZE), layout, rendered_by_template=False)
    placed = PlacedTeacher(teacher, teacher, "replica")
    write_cache(directory, key, placed, [row["input_ids"] for row in rows], batch_size=8, device="cpu")
    return TeacherCache.open(directory, key)


def both_losses(
    student_logits: torch.Tensor, taught: torch.Tensor, targets: Any, temperature: float
) -> tuple[float, float, float]:
    """Return the live loss, the cached one, and the cosine between their gradients."""
    labels, objective = torch.zeros(len(taught), dtype=torch.long), TokenObjective(alpha=1.0, temperature=temperature)
    values, gradients = [], []
    for source in (LogitTargets(logits_NV=taught), targets):
        logits = student_logits.detach().clone().requires_grad_()
        sums = plain_token_loss(logits, labels, source, objective)
        gradients.append(torch.autograd.grad(sums.loss / sums.weight, logits)[0].flatten().double())
        values.append(float(sums.loss.detach() / sums.weight))
    return *values, float(torch.nn.functional.cosine_similarity(*gradients, dim=0))


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_cached_teacher_loses_only_the_shape_of_the_tail(temperature: float, pair: Any, tmp_path: Path) -> None:
    """For real text and a long-tailed teacher: KL = KL over K + 1 bins + r KL(teacher's tail | student's tail)."""
    teacher, student, rows = pair
    cache = written(tmp_path / "cache", pair)
    ids = torch.tensor([row["input_ids"] for row in rows])
    with torch.no_grad():
        taught, own = (model(ids).logits[:, :-1].flatten(0, 1) for model in (teacher, student))
    cached_rows = torch.tensor([cache.rows_of(row["input_ids"])[:-1] for row in rows]).flatten()
    targets = cache.read(cached_rows, temperature)
    live, cached, cosine = both_losses(own, taught, targets, temperature)
    p, q = (
        torch.softmax(logits.double() / temperature, -1).scatter(1, targets.ids_NK, 0.0) for logits in (taught, own)
    )
    mass, conditional = p.sum(-1, keepdim=True), [one / one.sum(-1, keepdim=True) for one in (p, q)]
    ratio = torch.where(p > 0, conditional[0] / conditional[1], torch.ones_like(p)).log()
    missing = float((mass * conditional[0] * ratio).sum(-1).mean()) * temperature**2
    assert cached == pytest.approx(live - missing, abs=1e-3)
    assert cosine > 0.99


def test_cached_and_live_teacher_give_similar_gradients() -> None:
    """In this language 99.9 % of the probability is on at most forty successors of each word."""
    draw = torch.Generator().manual_seed(2)
    taught = 2.0 * torch.randn(2048, 1024, generator=draw)
    taught[:, 40:] -= 14.0
    taught = taught.gather(1, torch.rand(2048, 1024, generator=draw).argsort(-1))
    own = taught + torch.randn(2048, 1024, generator=draw)
    for temperature in (1.0, 2.0):
        layout = RecordFormat(top_k=K, vocab_size=1024, temperatures=(temperature,))
        answers = decode(encode(answers_of(taught, layout), layout), layout)
        log_p, log_tail = log_probabilities(answers, layout, temperature)
        targets = TopKTargets(
            ids_NK=torch.from_numpy(answers.ids_NK),
            log_probabilities_NK=torch.from_numpy(log_p),
            tail_log_probability_N=torch.from_numpy(log_tail),
            temperature=temperature,
        )
        live, cached, cosine = both_losses(own, taught, targets, temperature)
        if temperature == 1.0:
            assert cached == pytest.approx(live, abs=1e-3)
        assert cosine > 0.99


def test_training_from_the_cache(pair: Any, tmp_path: Path) -> None:
    teacher, student, rows = pair
    cache = written(tmp_path / "cache", pair)
    found = {}
    for name, source, data in (("live", teacher, rows), ("cached", cache, CachedTeacherDataset(rows, cache))):
        for implementation in ("fused", "plain"):
            trainer = DistillationTrainer(
                model=copy.deepcopy(student),
                args=training_arguments(tmp_path, max_steps=2, learning_rate=0.1, gradient_accumulation_steps=3),
                teacher=source,
                distillation=DistillationConfig(alpha=0.8, implementation=implementation),  # type: ignore[arg-type]
                train_dataset=data,
                data_collator=collate,
            )
            trainer.train()
            found[name, implementation] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert found["cached", "fused"] == pytest.approx(found["cached", "plain"], rel=1e-6)
    for cached, live in zip(found["cached", "fused"], found["live", "fused"], strict=True):
        assert live - 0.02 < cached < live, "what is lacking is the shape of the tail, which is never negative"


def test_a_packed_row_has_the_answers_to_its_documents(pair: Any, tmp_path: Path) -> None:
    _, student, rows = pair
    cache = written(tmp_path / "cache", pair)
    single, packed = (CachedTeacherDataset(data, cache) for data in (rows[3:6], [packed_row(rows[3:6])]))
    assert packed[0]["teacher_rows"] == [row for sample in single for row in sample["teacher_rows"]]
    with pytest.raises(UsageError, match="has no sample of 192 tokens"):
        CachedTeacherDataset([{"input_ids": packed[0]["input_ids"]}], cache)[0]
    losses = []
    for data, collator in ((single, collate), (packed, padded_batch)):
        trainer = DistillationTrainer(
            model=copy.deepcopy(student),
            args=training_arguments(tmp_path),
            teacher=cache,
            distillation=DistillationConfig(alpha=0.8),
            train_dataset=data,
            data_collator=collator,
        )
        trainer.train()
        losses.append(next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry))
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


def test_writing_resumes_and_keeps_finished_files(pair: Any, tmp_path: Path) -> None:
    teacher, student, rows = pair
    first = written(tmp_path / "cache", (teacher, student, rows[:10]))
    assert len(first) == 640
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "cache").glob("*.safetensors")}
    both = written(tmp_path / "cache", (teacher, student, rows + rows[:3]))
    assert len(both) == 24 * 64
    assert {name: (tmp_path / "cache" / name).stat().st_mtime_ns for name in before} == before
    whole = written(tmp_path / "whole", pair)
    for row in rows:
        parts = [cache.answers(cache.rows_of(row["input_ids"])) for cache in (both, whole)]
        assert np.array_equal(parts[0].ids_NK, parts[1].ids_NK)
        assert np.allclose(parts[0].depths_NK, parts[1].depths_NK, atol=0.05)
    assert both.damaged_files() == []


def test_every_batch_logs_progress(pair: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    teacher, _, rows = pair
    layout = RecordFormat(top_k=K, vocab_size=VOCAB_SIZE, temperatures=(1.0,))
    key = cache_key("teacher", "one", Words(VOCAB_SIZE), layout, rendered_by_template=False)
    samples = [row["input_ids"] for row in rows]
    placed = PlacedTeacher(teacher, teacher, "replica")
    with caplog.at_level("INFO"):
        write_cache(tmp_path, key, placed, samples, batch_size=10, device="cpu")
    assert caplog.messages == ["sample 10 of 24", "sample 20 of 24", "sample 24 of 24"]


def test_pickled_cache_maps_files_again(pair: Any, tmp_path: Path) -> None:
    """Data loader workers that are spawned get a pickled dataset."""
    cache = written(tmp_path / "cache", pair)
    ids = pair[2][0]["input_ids"]
    found = copy.deepcopy(CachedTeacherDataset(pair[2][:1], cache))
    assert found[0]["teacher_rows"] == cache.rows_of(ids)
    (tmp_path / "cache" / "manifest.json").unlink()
    with pytest.raises(RefusedInputError, match="has no manifest"):
        copy.deepcopy(cache)


def test_tokenizer_hash_ignores_padding_and_truncation() -> None:
    tokenizer = byte_tokenizer(VOCAB_SIZE)
    tokenizer.pad_token = tokenizer.eos_token
    before = tokenizer_hash(tokenizer)
    tokenizer(["a long text", "text"], truncation=True, max_length=5, padding=True)
    assert tokenizer_hash(tokenizer) == before
    tokenizer.add_tokens(["<new>"])
    assert tokenizer_hash(tokenizer) != before


def test_reading_thousands_of_rows_is_fast(pair: Any, tmp_path: Path) -> None:
    """Not a benchmark: a quarter of a second would slow down every step."""
    cache = written(tmp_path / "cache", pair)
    rows = torch.randint(0, len(cache), (8192,), generator=torch.Generator().manual_seed(0))
    started = time.perf_counter()
    found = cache.read(rows, 1.0)
    print(f"{1e3 * (time.perf_counter() - started):.0f} ms for 8,192 rows")
    assert found.ids_NK.shape == (8192, K)


class TestBadInput:
    def test_another_teacher_or_tokenizer_is_rejected(self, pair: Any, tmp_path: Path) -> None:
        cache = written(tmp_path / "cache", pair)
        with pytest.raises(RefusedInputError, match="was made with another teacher"):
            written(tmp_path / "cache", pair, weights="other")
        other = cache_key("teacher", "two", Words(VOCAB_SIZE - 1), cache.key.layout, rendered_by_template=False)
        with pytest.raises(RefusedInputError) as caught:
            TeacherCache.open(tmp_path / "cache", other)
        assert [error.rule.split(" (")[0] for error in caught.value.errors] == [
            "was made with another teacher",
            "was made with another tokenizer",
        ]

    def test_missing_temperature_is_rejected(self, pair: Any, tmp_path: Path) -> None:
        cache = written(tmp_path / "cache", pair)
        with pytest.raises(UsageError, match=r"temperature = 3\.0: the cache has 1\.0, 2\.0"):
            cache.read(torch.tensor([0]), 3.0)

    def test_missing_sample_is_rejected(self, pair: Any, tmp_path: Path) -> None:
        cache = written(tmp_path / "cache", pair)
        with pytest.raises(UsageError, match=r"has no sample of 3 tokens that starts with \[1, 2, 3\]"):
            cache.rows_of([1, 2, 3])
        with pytest.raises(UsageError, match="a labelled position has row -1"):
            cache.read(torch.tensor([-1]), 1.0)

    def test_damaged_files_are_rejected(self, pair: Any, tmp_path: Path) -> None:
        written(tmp_path / "cache", pair)
        (file,) = (tmp_path / "cache").glob("*.safetensors")
        content = file.read_bytes()
        file.write_bytes(content[:-5])
        with pytest.raises(RefusedInputError, match=rf"must have {len(content)} bytes"):
            TeacherCache.open(tmp_path / "cache")
        file.write_bytes(content[:-5] + bytes(5))
        assert TeacherCache.open(tmp_path / "cache").damaged_files() == [file.name]
        with pytest.raises(RefusedInputError, match=rf"{file.name}: was changed after it was written"):
            written(tmp_path / "cache", pair)
        (tmp_path / "cache" / "manifest.json").write_text("{")
        with pytest.raises(RefusedInputError, match="cannot be read"):
            TeacherCache.open(tmp_path / "cache")

    @pytest.mark.parametrize(
        "changed",
        [
            b"[" * 100_000,
            b"[1]",
            b'{"schema_version": 1, "key": 5, "shards": []}',
            b'{"schema_version": 1, "schema_version": 1}',
            b'{"schema_version": NaN}',
            b"\xff",
        ],
    )
    def test_damaged_manifest_is_rejected(self, changed: bytes, tmp_path: Path) -> None:
        (tmp_path / "manifest.json").write_bytes(changed)
        with pytest.raises(RefusedInputError, match=r"manifest\.json: cannot be read"):
            TeacherCache.open(tmp_path)

    def test_inconsistent_arrays_are_rejected(self, pair: Any, tmp_path: Path) -> None:
        """The headers are valid, but the arrays do not fit together."""
        written(tmp_path, pair)
        (file,) = tmp_path.glob("*.safetensors")
        manifest = json.loads((tmp_path / "manifest.json").read_text())
        sound = load_file(file)
        for name, array, reported in (
            ("starts", sound["starts"][:-1], r"'starts': is int64 of shape \[\d+\]"),
            ("lengths", sound["lengths"].view(np.uint8), "'lengths': is uint8 of shape"),
            ("starts", sound["starts"] + 10**6, "samples have rows that do not exist"),
            ("lengths", -sound["lengths"], "samples have rows that do not exist"),
            ("hashes", sound["hashes"][:0], r"'hashes': is uint8 of shape \[0, 16\]"),
        ):
            save_file({**sound, name: array}, file)
            manifest["shards"][0]["file_bytes"] = file.stat().st_size
            (tmp_path / "manifest.json").write_text(json.dumps(manifest))
            with pytest.raises(RefusedInputError, match=reported):
                TeacherCache.open(tmp_path)

    def test_damaged_records_are_rejected(self) -> None:
        layout = RecordFormat(top_k=5, vocab_size=100, temperatures=(1.0,))
        records = encode(answers_of(torch.randn(3, 100), layout), layout)
        for byte in (0, 255):
            damaged = records.copy()
            damaged[1, : layout.packed_bytes] = byte
            with pytest.raises(UsageError, match="has damaged records"):
                decode(damaged, layout)

    def test_records_of_another_size_are_rejected(self, pair: Any, tmp_path: Path) -> None:
        written(tmp_path / "cache", pair)
        manifest = tmp_path / "cache" / "manifest.json"
        content = json.loads(manifest.read_text())
        content["key"]["layout"]["temperatures"] = [1.0]
        manifest.write_text(json.dumps(content))
        with pytest.raises(RefusedInputError, match=r"'records': is uint8 of shape \[1536, \d+\]"):
            TeacherCache.open(tmp_path / "cache")

    def test_full_disk_leaves_no_files(self, pair: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(descriptor: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(ShardwrightError, match="cannot be written"):
            written(tmp_path / "cache", pair)
        assert list((tmp_path / "cache").iterdir()) == []

    def test_other_schema_version_is_rejected(self, pair: Any, tmp_path: Path) -> None:
        written(tmp_path / "cache", pair)
        manifest = tmp_path / "cache" / "manifest.json"
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"schema_version": 9}))
        with pytest.raises(RefusedInputError, match="schema version 9, this version reads 1"):
            TeacherCache.open(tmp_path / "cache")

    def test_nan_teacher_logits_are_rejected(self, tmp_path: Path) -> None:
        teacher = tiny("llama", vocab_size=VOCAB_SIZE)
        teacher.lm_head.weight.data[7] = float("nan")
        with pytest.raises(ShardwrightError, match="teacher: NaN or infinite logits"):
            written(tmp_path / "cache", (teacher, None, [{"input_ids": [1, 2, 3]}]))
        assert not list((tmp_path / "cache").glob("*.safetensors"))

    def test_format_reports_all_errors(self) -> None:
        with pytest.raises(UsageError) as caught:
            RecordFormat(top_k=0, vocab_size=1, temperatures=(1.0, 1.0), value_bits=1)
        assert [error.where for error in caught.value.errors] == ["vocab_size", "top_k", "value_bits", "temperatures"]


class TestCommand:
    """The command with a model and a text on disk."""

    @pytest.fixture()
    def files(self, tmp_path: Path) -> tuple[str, str]:
        tiny("llama", vocab_size=VOCAB_SIZE).save_pretrained(tmp_path / "teacher")
        byte_tokenizer(VOCAB_SIZE).save_pretrained(tmp_path / "teacher")
        (tmp_path / "text.txt").write_text("\n\n".join(f"Line {index} of a text." * 4 for index in range(40)))
        return str(tmp_path / "teacher"), str(tmp_path / "text.txt")

    def arguments(self, files: tuple[str, str], *more: str) -> list[str]:
        data = () if "--dataset" in more else ("--dataset", files[1])
        return ["cache-teacher", files[0], *data, "--seq-len", "32", *more]

    def test_command_writes_a_cache_that_distill_reads(
        self, files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        from shardwright.trainers.data.samples import load_samples
        from transformers import AutoTokenizer

        output = tmp_path / "answers"
        command = self.arguments(files, "--output-dir", str(output), "--temperature", "2", "--format", "json")
        assert run(command) == 0
        shown = json.loads(capsys.readouterr().out)
        assert shown["temperatures"] == [2.0]
        assert shown["bytes"] == shown["tokens"] * shown["bytes_per_token"]
        cache = TeacherCache.open(output)
        samples = load_samples(files[1], AutoTokenizer.from_pretrained(files[0]), seq_len=32)
        assert all(sample["input_ids"] in cache for sample in (*samples.train, *samples.evaluation))
        assert len(cache) <= shown["tokens"]
        before = {path.name: path.stat().st_mtime_ns for path in output.glob("*.safetensors")}
        assert run(command) == 0
        assert {path.name: path.stat().st_mtime_ns for path in output.glob("*.safetensors")} == before
        capsys.readouterr()
        assert run([*command, "--top-k", "5"]) == 4
        assert "has records of another format" in capsys.readouterr().err

    def test_dry_run_writes_nothing(
        self, files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        before = sorted(tmp_path.rglob("*"))
        assert run(self.arguments(files, "--dry-run")) == 0
        assert "nothing was run or written." in capsys.readouterr().out
        assert sorted(tmp_path.rglob("*")) == before

    @pytest.mark.parametrize(
        ("more", "code", "line"),
        [
            (("--batch-size", "0"), 2, "batch_size = 0"),
            (("--batch-size", "0"), 2, "output_dir: is missing; pass --output-dir, or --dry-run"),
            (("--dry-run", "--top-k", "0"), 2, "top_k = 0: must be from 1"),
            (("--dry-run", "--temperature", "-1"), 2, "temperatures = (-1.0,): must be one or more values above 0"),
            (("--dry-run", "--revision", "main"), 2, "only a Hub model has revisions"),
            (("--dry-run", "--dataset", "nowhere.txt"), 2, "nowhere.txt"),
        ],
    )
    def test_bad_input(
        self, files: tuple[str, str], more: tuple[str, ...], code: int, line: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run(self.arguments(files, *more)) == code
        assert line in capsys.readouterr().err

    def test_teacher_without_weights_is_rejected(
        self, files: tuple[str, str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        (Path(files[0]) / "model.safetensors").unlink()
        assert run(self.arguments(files, "--dry-run")) == 4
        assert "has no safetensors weights" in capsys.readouterr().err


def test_cache_stores_soft_capped_logits() -> None:
    """The model's logits differ from its head's output; the cache stores the model's."""
    teacher = tiny("recurrent_gemma")
    placed = PlacedTeacher(teacher, teacher, "replica")
    samples = [[3, 9, 4, 11, 5], [8, 6, 7]]
    layout = RecordFormat(vocab_size=128, top_k=8, temperatures=(1.0,))
    found = [teacher_answers(placed, [ids], layout, torch.device("cpu")) for ids in samples]
    for ids, answers in zip(samples, found, strict=True):
        with torch.no_grad():
            expected = answers_of(teacher(input_ids=torch.tensor([ids]), use_cache=False).logits[0], layout)
        (own,) = answers
        assert (own.ids_NK == expected.ids_NK).all()
        assert abs(own.depths_NK - expected.depths_NK).max() < 1e-6
