"""Samples of datasets: rows that are read, the evaluation set, and the labels of every token."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shardwright.ds_configs.specs.errors import UsageError
from shardwright.plugins.transformers.training_arguments import byte_tokenizer
from shardwright.trainers.data.chat import (
    CHAT_TEMPLATES,
    IGNORED_LABEL,
    encode_chat,
    encode_completion,
    set_chat_template,
)
from shardwright.trainers.data.samples import Samples, collate, load_samples
from shardwright.trainers.data.sources import Source, parse_source

END = "<|endoftext|>"
PLAIN = (
    "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>\n{{ m['content'] }}"
    "{% if 'tool_calls' in m %}{{ m['tool_calls'] | length }}{% endif %}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>\n{% endif %}"
)
MARKED = (
    "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>\n{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}{{ eos_token }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}<assistant>\n{% endif %}"
)
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Größe?"},
    {"role": "assistant", "content": "Ü 42"},
]


def tokenizer(template: str | None = None, *, bos: bool = False) -> Any:
    """Return bytes as tokens; padding is the end-of-sequence token, and `bos` puts a token before every text."""
    made = byte_tokenizer(384)
    made.pad_token = made.eos_token
    made.chat_template = template
    if bos:
        from tokenizers.processors import TemplateProcessing

        made.add_special_tokens({"bos_token": "<s>"})
        made.backend_tokenizer.post_processor = TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", made.bos_token_id)]
        )
    return made


def labelled_text(made: Any, ids: list[int], labels: list[int]) -> list[str]:
    """Return the runs of labelled tokens as text; labels are the tokens themselves."""
    runs: list[list[int]] = [[]]
    for token, label in zip(ids, labels, strict=True):
        assert label in (token, IGNORED_LABEL)
        if label == IGNORED_LABEL:
            runs.append([])
        else:
            runs[-1].append(token)
    return [made.decode(run) for run in runs if run]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def texts(made: Any, samples: list[dict[str, list[int]]]) -> str:
    return "".join(made.decode(sample["input_ids"]) for sample in samples)


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["by prefix", "by marks"])
@pytest.mark.parametrize("bos", [False, True], ids=["without bos", "with bos"])
def test_assistant_messages_and_their_end_have_labels(template: str, bos: bool) -> None:
    made = tokenizer(template, bos=bos)
    ids, labels = encode_chat(made, CHAT)
    assert labelled_text(made, ids, labels) == [f"Hello.{END}", f"Ü 42{END}"]
    if bos:
        assert ids.count(made.bos_token_id) == 1 and ids[0] == made.bos_token_id
    assert made.decode(ids) == made.apply_chat_template(CHAT, tokenize=False)


@pytest.mark.parametrize("bos", [False, True])
def test_prompts_have_no_labels_and_completions_end(bos: bool) -> None:
    made = tokenizer(bos=bos)
    ids, labels = encode_completion(made, "2 + 2 =", " 4")
    assert labelled_text(made, ids, labels) == [f" 4{END}"]
    assert ids[:1] == ([made.bos_token_id] if bos else made("2")["input_ids"])
    assert encode_completion(made, "a", f"b{END}") == encode_completion(made, "a", "b")


def test_padding_with_the_end_token_keeps_its_label() -> None:
    made = tokenizer(PLAIN)
    rows = [encode_chat(made, CHAT[1:3]), encode_chat(made, CHAT)]
    samples = [{"input_ids": ids, "labels": labels} for ids, labels in rows]
    samples[0]["teacher_rows"], samples[1]["teacher_rows"] = ([5] * len(row[0]) for row in rows)
    batch = collate(samples, pad_token_id=made.pad_token_id)
    short = len(rows[0][0])
    assert batch["labels"][0].tolist() == rows[0][1] + [IGNORED_LABEL] * (len(rows[1][0]) - short)
    assert made.eos_token_id in batch["labels"][0, :short].tolist()
    assert set(batch["input_ids"][0, short:].tolist()) == {made.eos_token_id}
    assert batch["attention_mask"].sum(1).tolist() == [short, len(rows[1][0])]
    assert batch["teacher_rows"][0].tolist() == [5] * short + [-1] * (len(rows[1][0]) - short)


def test_plain_text_is_joined_and_split_without_loss(tmp_path: Path) -> None:
    made = tokenizer(bos=True)
    written = [f"Document {index} says " + f"{index} and again " * (40 + index) for index in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in written))
    found = load_samples(str(tmp_path / "rows.jsonl"), made, seq_len=32, evaluation_fraction=0.1)
    assert found.statistics.rows == 12 and found.statistics.kind == "text"
    assert {len(sample["input_ids"]) for sample in found.train + found.evaluation} == {32}
    assert all(sample["labels"] == sample["input_ids"] for sample in found.train)
    assert all(sample["labels"] is not sample["input_ids"] for sample in found.train), "masking would change tokens"
    joined = texts(made, found.train)
    kept = [text for text in written if text[:20] in joined]
    whole = "".join(f"<s>{text}{END}" for text in kept)
    assert len(kept) < 12
    assert len(whole) - 32 * 20 < len(joined)
    assert len(joined) > 1000 and whole.startswith(joined)
    assert found.statistics.train_tokens == found.statistics.train_labels == 32 * len(found.train)


def test_unpacked_text_keeps_the_last_piece_of_each_document(tmp_path: Path) -> None:
    """A last piece of one token, which predicts nothing, is dropped."""
    source = write_rows(tmp_path / "rows.jsonl", [{"text": text} for text in ("abcdefg", "mnop", "xyz", "  ")])
    made = tokenizer()
    found = load_samples(source, made, seq_len=4, packing=False, evaluation_fraction=0)
    assert [made.decode(sample["input_ids"]) for sample in found.train] == ["abcd", f"efg{END}", "mnop", f"xyz{END}"]
    assert (found.statistics.rows, found.statistics.empty_rows) == (4, 1)


def test_every_file_format_gives_the_same_samples(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    rows = [{"text": f"document {index} says nothing new"} for index in range(9)]
    write_rows(tmp_path / "a.jsonl", rows)
    (tmp_path / "b.json").write_text(json.dumps(rows))
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "c.parquet")
    # Spreadsheets begin a CSV file with a byte order mark.
    (tmp_path / "d.csv").write_text("\n".join(["text", *(row["text"] for row in rows)]), encoding="utf-8-sig")
    for index, row in enumerate(rows):
        folder = tmp_path / "texts"
        folder.mkdir(exist_ok=True)
        (folder / f"{index}.txt").write_text(row["text"])
    made = tokenizer()
    found = [
        load_samples(str(tmp_path / name), made, seq_len=16)
        for name in ("a.jsonl", "b.json", "c.parquet", "d.csv", "texts")
    ]
    assert all(other.train == found[0].train and other.evaluation == found[0].evaluation for other in found)
    assert load_samples(f"{tmp_path / 'a.jsonl'}#3", made, seq_len=8).statistics.rows == 3


def load_turns(tmp_path: Path, rows: list[dict[str, Any]], seq_len: int = 256, **how: Any) -> Samples:
    return load_samples(write_rows(tmp_path / "r.jsonl", rows), tokenizer(PLAIN), seq_len=seq_len, **how)


def test_conversations_and_completions_make_one_sample_each(tmp_path: Path) -> None:
    made = tokenizer(PLAIN)
    turns = load_turns(tmp_path, [{"messages": CHAT}, {"messages": CHAT[1:3]}], evaluation_fraction=0)
    assert [labelled_text(made, **by_name(sample)) for sample in turns.train] == [
        [f"Hello.{END}", f"Ü 42{END}"],
        [f"Hello.{END}"],
    ]
    assert turns.statistics.train_labels == len("Hello.Ü 42Hello.".encode()) + 3
    speakers = {"system": "system", "user": "human", "assistant": "gpt"}
    other = [{"from": speakers[turn["role"]], "value": turn["content"], "tool_calls": None} for turn in CHAT]
    assert load_turns(tmp_path, [{"conversations": other}], evaluation_fraction=0).train == turns.train[:1]
    pairs = load_turns(tmp_path, [{"prompt": "a", "completion": "b"}], evaluation_fraction=0)
    assert labelled_text(made, **by_name(pairs.train[0])) == [f"b{END}"]
    chats = load_turns(tmp_path, [{"prompt": CHAT[:4], "completion": CHAT[4:]}], evaluation_fraction=0)
    assert labelled_text(made, **by_name(chats.train[0])) == [f"Ü 42{END}"]


def by_name(sample: dict[str, list[int]]) -> dict[str, list[int]]:
    return {"ids": sample["input_ids"], "labels": sample["labels"]}


def test_rows_without_labels_are_counted(tmp_path: Path) -> None:
    long = [{"role": "user", "content": "x" * 300}, {"role": "assistant", "content": "late"}]
    found = load_turns(tmp_path, [{"messages": CHAT}, {"messages": long}], seq_len=128, evaluation_fraction=0)
    assert (found.statistics.unlabelled_rows, found.statistics.cut_rows, len(found.train)) == (1, 1, 1)
    (sample,) = found.train
    exact = load_turns(tmp_path, [{"messages": CHAT}], seq_len=len(sample["input_ids"]), evaluation_fraction=0)
    assert (exact.statistics.cut_rows, exact.train) == (0, found.train)
    # Nothing predicts the first token, so a row with no other label is not a sample.
    made = tokenizer("{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}{% endfor %}")
    said = [{"messages": [{"role": "assistant", "content": content}]} for content in ("a", "bc")]
    source = write_rows(tmp_path / "r.jsonl", said)
    assert load_samples(source, made, seq_len=8, evaluation_fraction=0).statistics.unlabelled_rows == 1
    with pytest.raises(UsageError, match="every label is masked: no row of 1 has text of the assistant"):
        load_turns(tmp_path, [{"messages": long}], seq_len=128)


@given(st.lists(st.integers(0, 40), min_size=2, max_size=60), st.integers(0, 3), st.floats(0.01, 0.9))
def test_training_and_evaluation_set_share_no_row(tmp_path_factory: Any, words: list[int], seed: int, share: float):
    # Equal rows, with their columns in any order, are on one side.
    pairs = [[("prompt", f"p{word}"), ("completion", "c")] for word in words]
    rows = [dict(pair[:: (-1) ** index]) for index, pair in enumerate(pairs)]
    path = write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", rows)
    made = tokenizer()
    found, again = (load_samples(path, made, seq_len=64, seed=seed, evaluation_fraction=share) for _ in range(2))
    kept, held_out = ({made.decode(s["input_ids"]) for s in side} for side in (found.train, found.evaluation))
    assert not kept & held_out and len(found.train) + len(found.evaluation) == len(rows)
    assert (again.train, again.evaluation) == (found.train, found.evaluation)
    assert bool(held_out) == (len(set(words)) > 1)
    # The requested share, exceeded by less than one group of equal rows, while any other row is left to train on.
    wanted = max(1, round(len(rows) * share))
    assert len(found.evaluation) >= wanted or len(kept) == 1
    assert len(found.evaluation) < wanted + max(Counter(words).values())


def test_the_seed_selects_the_evaluation_set(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": f"p{index}", "completion": "c"} for index in range(40)])
    sides = [load_samples(path, tokenizer(), seq_len=64, seed=seed, evaluation_fraction=0.5) for seed in (0, 1)]
    assert sides[0].evaluation != sides[1].evaluation and len(sides[0].evaluation) == len(sides[1].evaluation) == 20


def test_single_document_is_split_into_two_parts(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("0123456789" * 100)
    found = load_samples(str(tmp_path / "one.txt"), tokenizer(), seq_len=10, evaluation_fraction=0.1)
    assert (len(found.train), len(found.evaluation)) == (90, 10)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.jsonl", '{"text": "a"}\n{oops\n', r"a\.jsonl:2: is not valid JSON"),
        ("a.parquet", "no parquet", "is not readable Parquet"),
        ("a.jsonl", '{"body": "a", "id": 1}\n', "needs a column text, .*has body, id"),
        ("a.jsonl", '{"text": ""}\n{"text": null}\n', "none of its 2 rows has text"),
        ("a.jsonl", "", "has no rows"),
        ("a.csv", "text,id\none\n", r"a\.csv:2: must have 2 values, like the first line"),
        ("a.jsonl", '{"text": "ab"}\n', "shorter than one sample of seq_len = 64"),
        ("a.xlsx", "text\na\n", "a dataset file ends in"),
    ],
)
def test_unreadable_dataset_is_a_one_line_error(tmp_path: Path, name: str, text: str, said: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(UsageError, match=said) as caught:
        load_samples(str(path), tokenizer(), seq_len=64)
    assert "\n" not in str(caught.value)


def test_sources_are_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_source("org/data:part#70") == Source(name="org/data", config="part", limit=70)
    assert parse_source("imdb") == Source(name="imdb")
    odd = tmp_path / "odd#7.txt"
    odd.write_text("text")
    assert parse_source(str(odd)) == Source(name=str(odd))
    for text, said in (
        ("imdb#0", "at least 1"),
        ("imdb#many", "at least 1"),
        ("./none", "no such file"),
        ("missing.jsonl", "no such file"),
        ("a/b/c", "no such file"),
    ):
        with pytest.raises(UsageError, match=said):
            parse_source(text)
    with pytest.raises(UsageError, match="only a Hub dataset has revisions"):
        load_samples("python-help", tokenizer(), seq_len=8, revision="main")


CALL = {"name": "add", "arguments": {"a": 1}}
TOOL_CHAT = [
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": CALL}]},
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "Two."},
]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize("name", CHAT_TEMPLATES)
def test_named_templates_label_answers_and_their_end_tokens(name: str) -> None:
    made = tokenizer(bos=True)
    set_chat_template(made, name)
    ids, labels = encode_chat(made, CHAT)
    end = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>"}.get(name, END)
    assert labelled_text(made, ids, labels) == [f"Hello.{end}", f"Ü 42{end}"]
    rendered = made.apply_chat_template(CHAT, tokenize=False)
    assert made.decode(ids) == rendered and "Be brief." in rendered
    prompt = made.apply_chat_template(CHAT[:4], tokenize=False, add_generation_prompt=True)
    assert rendered.startswith(f"{prompt}Ü 42{end}")


def test_tool_calls_have_labels_and_json_arguments_are_objects() -> None:
    made = tokenizer()
    set_chat_template(made, "chatml")
    ids, labels = encode_chat(made, TOOL_CHAT, tools=TOOLS)
    call = f"<tool_call>{json.dumps(CALL)}</tool_call><|im_end|>"
    assert labelled_text(made, ids, labels) == [call, "Two.<|im_end|>"]
    assert json.dumps(TOOLS[0]) in made.decode(ids) and "<tool_response>2</tool_response>" in made.decode(ids)
    texts = {"type": "function", "function": CALL | {"arguments": json.dumps(CALL["arguments"])}}
    as_text = [*TOOL_CHAT[:1], TOOL_CHAT[1] | {"tool_calls": [texts]}, *TOOL_CHAT[2:]]
    assert encode_chat(made, as_text, tools=TOOLS) == (ids, labels)
    set_chat_template(made, "alpaca")
    with pytest.raises(UsageError, match="renders no tool calls; use chatml"):
        encode_chat(made, TOOL_CHAT)


def test_tools_of_a_row_are_rendered(tmp_path: Path) -> None:
    made = tokenizer()
    set_chat_template(made, "chatml")
    source = write_rows(
        tmp_path / "tools.jsonl",
        [{"messages": TOOL_CHAT, "tools": TOOLS}, {"messages": TOOL_CHAT, "tools": json.dumps(TOOLS)}],
    )
    first, second = load_samples(source, made, seq_len=1000, evaluation_fraction=0).train
    assert first == second and json.dumps(TOOLS[0]) in made.decode(first["input_ids"])
    broken = write_rows(tmp_path / "broken.jsonl", [{"messages": TOOL_CHAT, "tools": "[{"}])
    with pytest.raises(UsageError, match=r"broken.jsonl\[0\]: its tools are not valid JSON"):
        load_samples(broken, made, seq_len=1000, evaluation_fraction=0)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for m in messages %}", "cannot render a question and its answer: Unexpected end of template"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "cannot render .* '__class__' .* is unsafe"),
        ("", "renders nothing"),
    ],
    ids=["syntax", "reads private attributes", "empty"],
)
def test_template_files_that_cannot_render_are_rejected(template: str, said: str, tmp_path: Path) -> None:
    made, file = tokenizer(PLAIN), tmp_path / "own.jinja"
    file.write_text(template)
    with pytest.raises(UsageError, match=said) as caught:
        set_chat_template(made, str(file))
    assert str(caught.value).startswith("chat_template = ") and made.chat_template == PLAIN


ALPACA = [
    {"instruction": "Add.", "input": "1 and 1", "output": "2"},
    {"instruction": "Say hello.", "input": "", "output": "Hello"},
]


def test_alpaca_rows_are_prompts_and_completions(tmp_path: Path) -> None:
    source, made = write_rows(tmp_path / "alpaca.jsonl", ALPACA), tokenizer()
    found = load_samples(source, made, seq_len=1000, evaluation_fraction=0)
    assert found.statistics.kind == "prompt and completion"
    with_input, without = found.train
    assert labelled_text(made, **by_name(with_input)) == [f"2{END}"]
    assert "further context" in texts(made, [with_input])
    assert "### Instruction:\nAdd.\n\n### Input:\n1 and 1\n\n### Response:\n2" in texts(made, [with_input])
    assert "### Instruction:\nSay hello.\n\n### Response:\nHello" in texts(made, [without])
    assert "Input" not in texts(made, [without])


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (
            [{"messages": CHAT}, ALPACA[0]],
            r"rows.jsonl\[1\]: has prompt and completion, but earlier rows have messages",
        ),
        ([ALPACA[0], {"text": "plain"}], r"rows.jsonl\[1\]: has text, but earlier rows have prompt and completion"),
        ([{"text": "plain"}, {"messages": CHAT}], r"rows.jsonl\[1\]: has messages, but earlier rows have text"),
        ([{"prompt": CHAT[:1], "completion": "text"}], "prompt is a list and completion a str"),
    ],
)
def test_mixed_formats_are_rejected(rows: list[dict[str, Any]], said: str, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "rows.jsonl", rows)
    with pytest.raises(UsageError, match=said):
        load_samples(source, tokenizer(PLAIN), seq_len=100, evaluation_fraction=0)
