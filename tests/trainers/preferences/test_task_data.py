"""Rows of preferences and prompts as users have them, and what is skipped or rejected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from shardwright.ds_configs.specs.errors import UsageError
from shardwright.plugins.transformers.training_arguments import byte_tokenizer
from shardwright.trainers.data.chat import set_chat_template
from shardwright.trainers.data.samples import Samples
from shardwright.trainers.data.sources import DataSettings
from shardwright.trainers.preferences.data import in_complete_batches, task_samples

QUESTION = [{"role": "user", "content": "How many?"}]


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def samples_of(
    task: Any, rows: list[dict[str, Any]], tmp_path: Path, *, template: str | None = None, **settings: Any
) -> Samples:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    tokenizer = byte_tokenizer(300)
    set_chat_template(tokenizer, template)
    own = DataSettings(**{"dataset": str(file), "seq_len": 64, "evaluation_fraction": 0.3} | settings)
    return task_samples(task, own, tokenizer, completion_tokens=16)


def rows_of(samples: Samples) -> list[dict[str, Any]]:
    return sorted([*samples.train, *samples.evaluation], key=lambda row: str(row))


PAIRS = {
    "text": (
        {"prompt": "2+2=", "chosen": "4", "rejected": "5"},
        {"prompt": "2+2=", "chosen": "4", "rejected": "5"},
    ),
    "question": (
        {"question": "2+2=", "chosen": "4", "rejected": "5", "id": 7},
        {"prompt": "2+2=", "chosen": "4", "rejected": "5"},
    ),
    "dialogue": (
        {"chosen": "\n\nHuman: hi\n\nAssistant: hello you", "rejected": "\n\nHuman: hi\n\nAssistant: hello me"},
        {"prompt": "\n\nHuman: hi\n\nAssistant:", "chosen": " hello you", "rejected": " hello me"},
    ),
    "common words": (
        {"chosen": "The answer is four", "rejected": "The answer is five"},
        {"prompt": "The answer is ", "chosen": "four", "rejected": "five"},
    ),
    "messages": (
        {"prompt": QUESTION, "chosen": said("4"), "rejected": said("5")},
        {"prompt": QUESTION, "chosen": said("4"), "rejected": said("5")},
    ),
    "implicit prompt": (
        {"chosen": QUESTION + said("4"), "rejected": QUESTION + said("5")},
        {"prompt": QUESTION, "chosen": said("4"), "rejected": said("5")},
    ),
    "prompt repeated in the answers": (
        {"prompt": "How many?", "chosen": QUESTION + said("4"), "rejected": QUESTION + said("5")},
        {"prompt": QUESTION, "chosen": said("4"), "rejected": said("5")},
    ),
    "messages, answers as text": (
        {"prompt": QUESTION, "chosen": "4", "rejected": "5"},
        {"prompt": QUESTION, "chosen": said("4"), "rejected": said("5")},
    ),
    "messages of another form": (
        {
            "prompt": [{"from": "human", "value": "How many?"}],
            "chosen": [{"from": "gpt", "value": "4"}],
            "rejected": [{"from": "gpt", "value": "5"}],
        },
        {"prompt": QUESTION, "chosen": said("4"), "rejected": said("5")},
    ),
    "text prompt, answers as messages": (
        {"prompt": "How many?", "chosen": said("4"), "rejected": said("5")},
        {"prompt": QUESTION, "chosen": said("4"), "rejected": said("5")},
    ),
}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("task", ["dpo", "orpo", "cpo", "reward"])
def test_pairs_get_the_columns_of_trl(name: str, task: str, tmp_path: Path) -> None:
    row, made = PAIRS[name]
    samples = samples_of(task, [row, row | {"rejected": row["rejected"] * 2}], tmp_path, template="chatml", seq_len=256)
    assert made in rows_of(samples)
    assert samples.statistics.kind == "pairs" and samples.statistics.rows == 2


def test_kto_reads_labels_and_makes_two_rows_of_a_pair(tmp_path: Path) -> None:
    labels = [True, False, 1, 0, "good", "-1"]
    rows = [{"prompt": f"{index}?", "completion": "yes", "label": label} for index, label in enumerate(labels)]
    assert [row["label"] for row in rows_of(samples_of("kto", rows, tmp_path))] == [True, False] * 3
    pairs = [{"prompt": f"{index}?", "chosen": "yes", "rejected": "no"} for index in range(2)]
    made = rows_of(samples_of("kto", pairs, tmp_path))
    assert [(row["completion"], row["label"]) for row in made] == [("no", False), ("yes", True)] * 2
    with pytest.raises(UsageError, match=r"rows.jsonl\[0\]: label = 'maybe': must be true for a desirable answer"):
        samples_of("kto", [rows[0] | {"label": "maybe"}], tmp_path)


def test_prompts_keep_what_the_reward_reads(tmp_path: Path) -> None:
    rows = [{"question": f"{index}+1=", "answer": str(index + 1)} for index in range(3)]
    made = rows_of(samples_of("grpo", rows, tmp_path))
    assert made == [{"answer": str(index + 1), "prompt": f"{index}+1="} for index in range(3)]
    chats = [{"messages": QUESTION + said(str(index)), "answer": str(index)} for index in range(2)]
    made = rows_of(samples_of("rloo", chats, tmp_path, template="chatml", seq_len=96))
    assert [row["prompt"] for row in made] == [QUESTION] * 2


def test_rows_that_teach_nothing_are_skipped_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    good = [{"prompt": f"{index}?", "chosen": "yes", "rejected": "no"} for index in range(4)]
    bad = [
        {"prompt": "a?", "chosen": "same", "rejected": "same"},
        {"prompt": "b?", "chosen": " ", "rejected": "no"},
        {"prompt": "", "chosen": "yes", "rejected": "no"},
        {"prompt": "long" * 20, "chosen": "yes", "rejected": "no"},
    ]
    caplog.set_level("INFO")
    samples = samples_of("dpo", good + bad, tmp_path)
    assert rows_of(samples) == good and samples.statistics.empty_rows == 4
    text = caplog.text
    for part in (
        "1 of 8 rows",
        "with equal answers",
        "2 of 8 rows",
        "without a prompt or an answer",
        "--seq-len tokens",
    ):
        assert part in text
    with pytest.raises(
        UsageError, match="has no row to train on: of 4 rows are skipped 1 with equal answers, 2 without"
    ):
        samples_of("dpo", bad, tmp_path)


@pytest.mark.parametrize(
    ("task", "row", "rule"),
    [
        ("dpo", {"prompt": "a", "chosen": "b"}, r"\[0\]: needs the column rejected, but has prompt, chosen"),
        ("grpo", {"text": "a"}, "needs the column prompt, but has text"),
        ("kto", {"prompt": "a", "completion": "b"}, "needs the column label"),
        ("dpo", {"prompt": "a", "chosen": "b", "rejected": said("c")}, "chosen is a str and rejected a list"),
        ("dpo", {"prompt": QUESTION, "chosen": said("a"), "rejected": said("b")}, "has no chat template; pass --chat"),
        (
            "dpo",
            {"prompt": "a", "chosen": None, "rejected": "b"},
            r"\[0\]: chosen: must be text, or a list of messages",
        ),
        ("dpo", {"prompt": 5, "chosen": "a", "rejected": "b"}, r"\[0\]: prompt = 5: must be text, or a list"),
        ("dpo", {"prompt": "a", "chosen": ["b"], "rejected": ["c"]}, r"chosen = 'b': each message must be an object"),
        ("reward", {"prompt": "a", "chosen": [{"content": "b"}], "rejected": said("c")}, "needs a role and a content"),
        ("kto", {"prompt": "a", "completion": 5, "label": True}, r"\[0\]: completion = 5: must be text"),
        ("grpo", {"prompt": 7}, r"\[0\]: prompt = 7: must be text"),
        ("grpo", {"messages": [{"role": "user"}]}, r"\[0\]: messages = .* each message needs a role and a content"),
    ],
)
def test_rows_that_cannot_be_read_name_the_column(task: str, row: dict[str, Any], rule: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=rule):
        samples_of(task, [row], tmp_path)


def test_kto_needs_good_and_bad_answers(tmp_path: Path) -> None:
    rows = [{"prompt": f"{index}?", "completion": "yes", "label": "good"} for index in range(6)]
    with pytest.raises(UsageError, match="has only answers with the label true, and KTO learns from their difference"):
        samples_of("kto", rows, tmp_path)


def test_prompts_leave_room_for_the_longest_completion(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    rows = [{"prompt": str(index) * length} for index, length in enumerate([48, 49, 48, 63])]
    samples = samples_of("grpo", rows, tmp_path)
    assert [row["prompt"][0] for row in rows_of(samples)] == ["0", "2"]
    assert "2 of 4 rows" in caplog.text and "the 16 of --completion-tokens exceed --seq-len" in caplog.text


def test_a_template_that_rejects_a_conversation_is_named(tmp_path: Path) -> None:
    rows = [{"prompt": QUESTION, "chosen": said("a"), "rejected": said("b")}]
    template = tmp_path / "template.jinja"
    only_one = "{% if messages[0]['content'] == 'How many?' %}{{ raise_exception('no system') }}{% endif %}"
    template.write_text(only_one + "{% for message in messages %}{{ message['content'] }}{% endfor %}")
    with pytest.raises(UsageError, match=r"rows.jsonl': the chat template rejects .*How many.*: no system"):
        samples_of("dpo", rows, tmp_path, template=str(template))


def test_equal_rows_are_in_one_set_and_tokens_are_counted(tmp_path: Path) -> None:
    rows = [{"prompt": f"{index % 3}?", "chosen": "yes", "rejected": "no"} for index in range(30)]
    samples = samples_of("dpo", rows, tmp_path)
    assert not {row["prompt"] for row in samples.train} & {row["prompt"] for row in samples.evaluation}
    # Two sequences: prompt and answer, a byte each.
    assert samples.statistics.train_tokens == len(samples.train) * (2 + 3 + 2 + 2)
    kept = in_complete_batches(samples, 8)
    assert len(kept.train) == len(samples.train) // 8 * 8 == kept.statistics.train_samples
    with pytest.raises(UsageError, match="fewer than the 64 of a micro-batch on all ranks"):
        in_complete_batches(samples, 64)
