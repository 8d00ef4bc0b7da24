"""Served teachers: losses against the loaded teacher, what is sent, and one line for each failure."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Shell, run_rank_here, shell_in
from distilling import collate, rows, tiny, training_arguments
from shardwright.ds_configs.specs.errors import ShardwrightError, UsageError
from shardwright.plugins.transformers.training_arguments import byte_tokenizer
from shardwright.trainers.data.samples import packed_row
from shardwright.trainers.distillation import DistillationConfig, DistillationTrainer, OnPolicy, ServedTeacher
from shardwright.trainers.distillation import served_teacher as module
from shardwright.trainers.distillation.config import SelfTeacher
from shardwright.trainers.distillation.feature_matching import HiddenStateTerm
from shardwright.trainers.distillation.served_teacher import API_KEY, documents, server_address
from shardwright.trainers.distillation.teacher import split_batch
from teacher_server import NAME, State, loaded_top_k, served

pytestmark = pytest.mark.slow

VOCAB, K, SIZE = 128, 20, 300


@pytest.fixture(autouse=True)
def short_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHECK_SECONDS", 1.5)
    monkeypatch.delenv(API_KEY, raising=False)


@pytest.fixture(scope="module")
def teacher() -> Any:
    return tiny("llama", hidden=48, seed=4)


@pytest.fixture
def state(teacher: Any) -> State:
    return State(model=teacher, tokenizer=None)


@pytest.fixture
def url(state: State) -> Iterator[str]:
    with served(state) as address:
        yield address


def client(url: str, **changes: Any) -> ServedTeacher:
    return ServedTeacher(url, **({"model": NAME, "vocab_size": VOCAB, "top_k": K, "timeout_seconds": 5.0} | changes))


def trained(directory: Path, teacher: Any, data: list[Any], *, vocab_size: int = VOCAB, **changes: Any) -> list[Any]:
    distillation = {"alpha": 0.7, "vocab_size": vocab_size, **changes}
    trainer = DistillationTrainer(
        model=tiny("llama", seed=5, vocab_size=vocab_size),
        args=training_arguments(directory, max_steps=3, learning_rate=0.3, gradient_accumulation_steps=2),
        teacher=teacher,
        distillation=DistillationConfig(**distillation),
        train_dataset=data,
        eval_dataset=data[:5],
        data_collator=collate,
        processing_class=byte_tokenizer(SIZE) if "on_policy" in changes else None,
    )
    trainer.train()
    evaluated = trainer.evaluate()
    names = ("loss", "divergence", "student_cross_entropy", "top1_agreement", "kl_per_token")
    values = [{name: entry[name] for name in names} for entry in trainer.state.log_history if "loss" in entry]
    return [*values, {name: evaluated[f"eval_{name}"] for name in names}]


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd"])
@pytest.mark.parametrize("implementation", ["fused", "plain"])
def test_losses_equal_those_of_the_loaded_teacher(
    tmp_path: Path, teacher: Any, url: str, state: State, divergence: str, implementation: str
) -> None:
    options = {"divergence": divergence, "implementation": implementation}
    expected = trained(tmp_path, loaded_top_k(teacher, K, VOCAB), rows("llama", 24), **options)
    found = trained(tmp_path, client(url), rows("llama", 24), **options)
    assert len(found) == 4
    for own, other in zip(found, expected, strict=True):
        assert own == pytest.approx(other, abs=1e-6)
    assert found[0]["loss"] != found[2]["loss"]
    # A request for each of two micro-batches of three steps; the evaluation has samples of the last step, too.
    assert [path for path, _ in state.requests] == ["/v1/completions"] * 7
    assert [len(body["prompt"]) for _, body in state.requests[:6]] == [4] * 6
    assert all(body["prompt_logprobs"] == K for _, body in state.requests)


def test_completions_of_the_student_are_requested(tmp_path: Path, url: str, state: State) -> None:
    state.model = tiny("llama", hidden=48, seed=4, vocab_size=SIZE)
    options = {"on_policy": OnPolicy(max_new_tokens=6, prompt_tokens=3), "vocab_size": SIZE}
    expected = trained(tmp_path, loaded_top_k(state.model, K, SIZE), rows("llama", 24), **options)
    found = trained(tmp_path, client(url, vocab_size=SIZE), rows("llama", 24), **options)
    for own, other in zip(found, expected, strict=True):
        assert own == pytest.approx(other, abs=1e-6)
    data = {tuple(row["input_ids"]) for row in rows("llama", 24)}
    generated = [tuple(ids) for _, body in state.requests[:6] for ids in body["prompt"]]
    assert generated and not any(ids in data for ids in generated)
    assert {ids[:3] for ids in generated} <= {ids[:3] for ids in data}


def test_documents_of_a_packed_row_are_sent_alone(teacher: Any, url: str, state: State) -> None:
    first, second = ({"input_ids": list(ids), "labels": list(ids)} for ids in ((5, 6, 7, 8), (9, 10, 11)))
    second["labels"][-1] = -100
    row = packed_row([first, second])
    row = {name: [*values, fill] for (name, values), fill in zip(row.items(), (0, -100, 0), strict=True)}
    batch = split_batch({name: torch.tensor([values]) for name, values in row.items()}, shifts=True)
    targets = client(url).read(batch.model_inputs, batch.labels_N, batch.rows_N)
    # The second document ends with its last label.
    assert [body["prompt"] for _, body in state.requests] == [[[5, 6, 7, 8], [9, 10]]]
    alone = []
    for ids in ([5, 6, 7], [9]):
        logits = teacher(input_ids=torch.tensor([ids])).logits[0]
        alone.append(torch.log_softmax(logits.double(), dim=-1))
    exact = torch.cat(alone)
    assert torch.equal(targets.ids_NK, exact.topk(K).indices)
    assert torch.allclose(targets.log_probabilities_NK.double(), exact.gather(1, targets.ids_NK), atol=1e-6)
    masses = targets.log_probabilities_NK.double().exp().sum(1) + targets.tail_log_probability_N.double().exp()
    assert torch.allclose(masses, torch.ones(4, dtype=torch.float64), atol=1e-6)


def test_padding_on_the_left_is_not_sent() -> None:
    ids = torch.tensor([[0, 0, 5, 6, 7], [3, 4, 5, 6, 7]])
    batch = {"input_ids": ids, "attention_mask": torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])}
    labels = torch.tensor([[-100, -100, -100, 6, 7], [-100, -100, 5, -100, -100]])
    split = split_batch(batch | {"labels": labels}, shifts=True)
    found = documents(split.model_inputs, split.labels_N, split.rows_N)
    assert [(each.tokens, each.positions) for each in found] == [((5, 6, 7), (0, 1)), ((3, 4, 5), (1,))]
    hidden = batch | {"attention_mask": torch.tensor([[0, 1, 0, 1, 1], [1, 1, 1, 1, 1]])}
    with pytest.raises(UsageError, match="attention_mask: hides tokens inside a sample"):
        documents(hidden, split.labels_N, split.rows_N)
    with pytest.raises(UsageError, match="reads only tokens, and the batch also has pixel_values"):
        documents(batch | {"pixel_values": ids}, split.labels_N, split.rows_N)


def test_tokens_that_the_student_lacks_are_removed(teacher: Any, url: str) -> None:
    """The others keep their relation to each other, and the mass of what is not in the answer."""
    ids = torch.arange(2, 18)[None]
    batch = split_batch({"input_ids": ids, "labels": ids}, shifts=True)
    known = VOCAB // 2
    found = client(url, vocab_size=known).read(batch.model_inputs, batch.labels_N, batch.rows_N)
    p_NV = torch.softmax(teacher(input_ids=ids).logits[0, :-1].double(), dim=-1)
    top = p_NV.topk(K)
    removed_N = torch.where(top.indices >= known, top.values, 0.0).sum(1)
    assert removed_N.min() > 0 and 0 < found.ids_NK.shape[1] < K and int(found.ids_NK.max()) < known
    expected = (p_NV.gather(1, found.ids_NK) / (1 - removed_N)[:, None]).log()
    assert torch.allclose(found.log_probabilities_NK.double(), expected, atol=1e-6)
    masses = found.log_probabilities_NK.double().exp().sum(1) + found.tail_log_probability_N.double().exp()
    assert torch.allclose(masses, torch.ones(15, dtype=torch.float64), atol=1e-6)
    with pytest.raises(ShardwrightError, match="no tokens of the student; use models of one family"):
        client(url, vocab_size=2).read(batch.model_inputs, batch.labels_N, batch.rows_N)


def test_all_tokens_leave_no_others(teacher: Any, url: str, state: State) -> None:
    state.max_logprobs = VOCAB
    ids = torch.arange(2, 9)[None]
    batch = split_batch({"input_ids": ids, "labels": ids}, shifts=True)
    half = client(url, top_k=VOCAB, vocab_size=VOCAB).read(batch.model_inputs, batch.labels_N, batch.rows_N)
    assert half.ids_NK.shape == (6, VOCAB) and half.tail_log_probability_N.isneginf().all()


def test_long_batches_are_several_requests(url: str, state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_REQUEST_TOKENS", 20)
    batch = collate(rows("llama", 8))
    split = split_batch(batch, shifts=True)
    once = client(url).read(split.model_inputs, split.labels_N, split.rows_N)
    sizes = sorted(sum(map(len, body["prompt"])) for _, body in state.requests)
    assert len(sizes) > 2 and all(20 <= size < 40 for size in sizes[1:])
    monkeypatch.undo()
    again = client(url).read(split.model_inputs, split.labels_N, split.rows_N)
    assert torch.equal(once.ids_NK, again.ids_NK)
    assert torch.allclose(once.log_probabilities_NK, again.log_probabilities_NK, atol=1e-6)


def changed_values(change: Any) -> Any:
    def change_all(content: Any) -> Any:
        for choice in content["choices"]:
            for position in choice["prompt_logprobs"][1:]:
                change(position)
        return content

    return change_all


def set_first(value: object) -> Any:
    def change(position: dict[str, Any]) -> None:
        next(iter(position.values()))["logprob"] = value

    return changed_values(change)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"changed": set_first(float("nan"))}, "sent NaN as a log-probability"),
        ({"changed": set_first(None)}, "sent NaN as a log-probability"),
        ({"changed": set_first(31.5)}, "sent logits instead of log-probabilities"),
        ({"changed": set_first(800.0)}, "sent logits instead of log-probabilities"),
        (
            {"sent_logprobs": 7},
            "sent [78] log-probabilities of a token instead of 20; pass --teacher-top-k [78], or raise",
        ),
        ({"changed": changed_values(dict.clear)}, "sent log-probabilities of other tokens"),
        ({"changed": lambda content: {"choices": content["choices"][1:]}}, "sent 0 answers to 1 prompts"),
        ({"changed": lambda content: {"choices": [{"index": 0}]}}, "sent prompt_logprobs of no tokens"),
        ({"changed": lambda content: [1]}, "sent no JSON object for /v1/completions"),
        ({"changed": lambda content: b"<html>"}, "sent no JSON for /v1/completions"),
        ({"max_logprobs": 5}, r"teacher_top_k = 20: the server allows 5 .*; use --teacher-top-k 5, or serve with"),
        ({"max_model_len": 4}, r"answers 400 to /v1/completions \(maximum context length\)"),
        ({"key": "secret"}, r"rejects the request \(401\); set VLLM_API_KEY"),
        ({"status": lambda path: 404}, r"answers 404 to /v1/completions \(made to fail\)"),
        ({"status": lambda path: 307}, r"redirects /v1/completions \(307\)"),
        ({"status": lambda path: 500}, r"answers 500 to /v1/completions for [12] s; start it again, and resume"),
        ({"status": lambda path: 0}, "cannot be reached .* for [12] s; start it again, and resume from"),
    ],
)
def test_every_failure_is_one_line(url: str, state: State, changes: dict[str, Any], said: str) -> None:
    for name, value in changes.items():
        setattr(state, name, value)
    ids = torch.arange(2, 9)[None]
    batch = split_batch({"input_ids": ids, "labels": ids}, shifts=True)
    with pytest.raises(ShardwrightError, match=said) as caught:
        client(url, timeout_seconds=1.5).read(batch.model_inputs, batch.labels_N, batch.rows_N)
    assert "\n" not in str(caught.value)


def test_a_server_that_hangs_ends_at_the_limit(url: str, state: State) -> None:
    state.changed = lambda content: time.sleep(3) or content
    ids = torch.arange(2, 9)[None]
    batch = split_batch({"input_ids": ids, "labels": ids}, shifts=True)
    started = time.monotonic()
    with pytest.raises(ShardwrightError, match=r"cannot be reached \(timed out\)"):
        client(url, timeout_seconds=1.0).read(batch.model_inputs, batch.labels_N, batch.rows_N)
    assert time.monotonic() - started < 2.5


def test_requests_are_repeated_until_the_server_is_back(
    url: str, state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(API_KEY, "secret")
    state.key = "secret"
    statuses = iter((503, 0, 429, 200))
    state.status = lambda path: next(statuses)
    pauses: list[float] = []
    monkeypatch.setattr(module.time, "sleep", pauses.append)
    ids = torch.arange(2, 9)[None]
    batch = split_batch({"input_ids": ids, "labels": ids}, shifts=True)
    assert len(client(url, timeout_seconds=60).read(batch.model_inputs, batch.labels_N, batch.rows_N).ids_NK) == 6
    assert pauses == [0.5, 1.0, 2.0] and len(state.requests) == 4


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("localhost:8000", "is not the URL of a server"),
        ("ftp://localhost", "is not the URL of a server"),
        ("http://localhost:99999", "is not the URL of a server"),
        ("http://localhost:8000/?x=1", "is not the URL of a server"),
        ("http://me:secret@localhost:8000", "must not contain a user or a password"),
        ("http://10.0.0.7:8000", "would send the samples unencrypted"),
        ("http://localhost.example.org:8000", "would send the samples unencrypted"),
    ],
)
def test_bad_addresses_are_rejected(url: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        server_address(url, allow_remote_http=False)
    assert "secret" not in str(caught.value)


def test_addresses_may_have_the_version() -> None:
    for url in ("http://127.0.0.1:8000/v1/", "http://[::1]:8000/v1", "https://teacher.example.org/base"):
        assert not server_address(url, allow_remote_http=False).endswith(("/", "/v1"))
    assert server_address("http://10.0.0.7:8000", allow_remote_http=True) == "http://10.0.0.7:8000"


def test_terms_that_a_server_cannot_teach_are_rejected(tmp_path: Path) -> None:
    own: dict[str, Any] = {"args": training_arguments(tmp_path), "teacher": client("http://localhost:1")}
    with pytest.raises(UsageError) as caught:
        config = DistillationConfig(temperature=2.0, hidden_states=HiddenStateTerm())
        DistillationTrainer(model=tiny("llama"), distillation=config, **own)
    assert {error.where for error in caught.value.errors} == {"temperature", "teacher"}
    with pytest.raises(UsageError, match="BertForMaskedLM': a served teacher predicts the next token"):
        DistillationTrainer(model=tiny("bert_mlm"), **own)
    with pytest.raises(UsageError, match="pass only one of the two"):
        DistillationTrainer(model=tiny("llama"), distillation=DistillationConfig(self_teacher=SelfTeacher()), **own)


@pytest.fixture
def distill(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Shell:
    return shell_in(tmp_path, "distill", capsys, monkeypatch)


@pytest.fixture
def command_state(tmp_path: Path) -> State:
    tiny("llama", vocab_size=SIZE).save_pretrained(tmp_path / "student")
    return State(model=tiny("llama", hidden=48, seed=4, vocab_size=SIZE), tokenizer=byte_tokenizer(SIZE))


DATA = ("--dataset", "python-help#8", "--seq-len", 32, "--output-dir", "out")


def test_command_trains_with_a_served_teacher(
    distill: Shell, command_state: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(API_KEY, "do-not-store")
    command_state.key = "do-not-store"
    launched = run_rank_here(monkeypatch)
    with served(command_state) as url:
        rest = ("--teacher-url", url, "--hardware", "1xCPU", "--max-steps", 2, "--evaluation-samples", 8)
        found = distill("student", *DATA, *rest, "--learning-rate", "1e-2", "--on-policy", 0.5, "--max-new-tokens", 4)
        assert found.code == 0, found.err
        shown = distill(NAME, "student", *DATA, "--teacher-url", url, "--dry-run", "--force", "--format", "json")
    assert len(launched) == 1
    plan = json.loads(shown.out)["plan"]
    assert plan["chosen"]["teacher"]["placement"] == "cached" and "teacher_targets" in json.dumps(plan)
    assert f"distilled from {NAME}" in found.out
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["result"]["after"]["kl_per_token"] != report["result"]["before"]["kl_per_token"]
    for file in (path for path in (tmp_path / "out").rglob("*") if path.is_file()):
        assert b"do-not-store" not in file.read_bytes(), file


@pytest.mark.parametrize(
    ("words", "changes", "code", "said"),
    [
        (("other", "student"), {}, 2, f"teacher = 'other': is not served by URL, which has: {NAME}"),
        (("student",), {"names": ("a", "b")}, 2, "teacher: must be one of the 2 served models: a, b"),
        (("student",), {"tokenizer": "stranger"}, 2, "tokenizer: student and served teacher split"),
        (("student",), {"max_model_len": 32}, 2, "reads at most 32 tokens, one of which it generates; samples have 32"),
        (("student", "--on-policy", 1, "--max-new-tokens", 60), {}, 2, "serve with --max-model-len 77, or lower"),
        (("student", "--teacher-top-k", 21), {}, 2, "teacher_top_k = 21: the server allows 20 log-probabilities"),
        (("student",), {"status": lambda path: 404 if path == "/tokenize" else 200}, 1, "has no /tokenize (404)"),
        (("student",), {"status": lambda path: 0}, 1, "teacher URL: cannot be reached"),
        (("student",), {"changed": set_first(float("nan"))}, 1, "teacher URL: sent NaN as a log-probability"),
        (("student",), {"key": "secret"}, 1, "rejects the request (401); set VLLM_API_KEY"),
        (("student", "--temperature", 2), {}, 2, "temperature = 2.0: must be 1 with --teacher-url"),
        (
            ("student", "--hidden-states", 1),
            {},
            2,
            "hidden_states = 1.0: requires a live teacher; remove --teacher-url",
        ),
        (("student", "--teacher-placement", "sharded"), {}, 2, "must be auto or cached with --teacher-url"),
        (("student", "--teacher-timeout", 1800), {}, 2, "must be below --hang-timeout (1800 s)"),
        (("student", "--teacher-cache", "student"), {}, 2, "teacher_cache = 'student': cannot be combined"),
    ],
)
def test_bad_servers_are_reported_before_ranks_start(
    distill: Shell, command_state: State, tmp_path: Path, words: Any, changes: dict[str, Any], code: int, said: str
) -> None:
    if changes.get("tokenizer"):
        words_of_stranger = copy.deepcopy(command_state.tokenizer)
        words_of_stranger.add_tokens(["code"])
        changes = {"tokenizer": words_of_stranger}
    for name, value in changes.items():
        setattr(command_state, name, value)
    with served(command_state) as url:
        found = distill(*words, *DATA, "--teacher-url", url)
    assert (found.code, found.out) == (code, ""), found.err
    assert said.replace("URL", url) in found.err and "Traceback" not in found.err
    assert len(found.errors) == 1 and not (tmp_path / "out").exists()


def test_a_missing_server_or_address_is_reported(distill: Shell, command_state: State) -> None:
    with served(command_state) as url:
        pass
    gone = distill("student", *DATA, "--teacher-url", url)
    assert gone.code == 1 and f"teacher {url}: cannot be reached (Connection refused)" in gone.err
    without = distill("student", *DATA, "--teacher-top-k", 5)
    assert without.code == 2 and "teacher_top_k: requires --teacher-url" in without.err
    assert "teacher: is missing; pass TEACHER STUDENT" in without.err
