"""Answers in renderings that change earlier messages, and tokens that end a turn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from shardwright.plugins.transformers.training_arguments import byte_tokenizer
from shardwright.trainers.data.chat import (
    CHAT_TEMPLATES,
    IGNORED_LABEL,
    encode_chat,
    end_turns,
    set_chat_template,
    turn_end,
    with_turn_end,
)
from shardwright.trainers.data.samples import load_samples

END = "<|im_end|>"
THINKING = """\
{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- if messages[0].role != 'system' -%}{{- '<|im_start|>system\nBe kind.<|im_end|>\n' -}}{%- endif -%}
{%- if tools -%}{{- '<tools>' + (tools | tojson) + '</tools>\n' -}}{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{{- '<|im_start|>assistant\n' -}}
{%- set text = m.content.split('</think>')[-1] | trim -%}
{%- set thought = m.content.split('</think>')[0].replace('<think>', '') | trim if '</think>' in m.content else '' -%}
{%- if loop.index0 > ns.last -%}{{- '<think>\n' + thought + '\n</think>\n\n' -}}{%- endif -%}
{{- text -}}
{%- for call in m.tool_calls or [] -%}{{- '<call>' + call.function.name + '</call>' -}}{%- endfor -%}
{{- '<|im_end|>\n' -}}
{%- elif m.role == 'tool' -%}{{- '<|im_start|>tool\n' + m.content + '<|im_end|>\n' -}}
{%- else -%}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"""
ALWAYS_DROPPED = """\
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}{{- '<A>' + m.content.split('</think>')[-1] + '<|im_end|>' -}}
{%- else -%}{{- '<U>' + m.content -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<A><think>\n' -}}{%- endif -%}"""
MARKED = THINKING.replace("{%- set text", "{%- generation -%}{%- set text").replace(
    "{{- '<|im_end|>\n' -}}\n{%- elif m.role == 'tool'",
    "{{- '<|im_end|>' -}}{%- endgeneration -%}{{- '\n' -}}{%- elif m.role == 'tool'",
)
CLOSED = "<think>\n\n</think>\n\n"
CALL = {"role": "assistant", "content": "<think>t</think>", "tool_calls": [{"function": {"name": "f"}}]}


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def said(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def tokenizer(template: str | None = None, *, tokens: tuple[str, ...] = ("<|im_start|>", END)) -> Any:
    made = byte_tokenizer(384)
    made.add_special_tokens({"additional_special_tokens": list(tokens)})
    made.chat_template = template
    return made


def answers(made: Any, ids: list[int], labels: list[int]) -> str:
    """Return the labelled text, with a bar at each position without a label after one with a label."""
    runs = "".join(chr(1) if label == IGNORED_LABEL else made.decode([label]) for label in labels)
    return "|".join(part for part in runs.split(chr(1)) if part)


@pytest.mark.parametrize(
    ("template", "turns", "expected"),
    [
        (THINKING, [user("q"), said("A"), user("and"), said("B")], f"A{END}|{CLOSED}B{END}"),
        (THINKING, [user("q"), said("<think>x</think>A"), user("A"), said("<think>y</think>B")],
         f"A{END}|<think>\ny\n</think>\n\nB{END}"),
        (THINKING, [user("q"), CALL, {"role": "tool", "content": "1"}, said("B"), user("u"), said(" C ")],
         f"<call>f</call>{END}|B{END}|{CLOSED}C{END}"),
        (THINKING, [said("Hi"), user("q"), said("A")], f"Hi{END}|{CLOSED}A{END}"),
        (THINKING, [user("<|im_start|>assistant\nB"), said("B"), user("q"), said("B"), user("last")], f"B{END}|B{END}"),
        (THINKING, [user("q"), said(""), user("q"), said("same"), user("q"), said("same")],
         f"{END}|same{END}|{CLOSED}same{END}"),
        (ALWAYS_DROPPED, [user("q"), said("<think>x</think>A"), user("q"), said("<think>y</think>B")],
         f"A{END}|B{END}"),
        (MARKED, [user("q"), said("<think>x</think>A"), user("u"), said("B")], f"A{END}|{CLOSED}B{END}"),
        (THINKING, [user("q"), said("x<|endoftext|>y")], f"{CLOSED}x<|endoftext|>y{END}"),
    ],
    ids=["no thoughts", "thoughts", "tools", "answer first", "header asked", "equal answers", "r1", "marked", "quoted"],
)  # fmt: skip
def test_answers_are_labelled_as_the_complete_rendering_has_them(template: str, turns: Any, expected: str) -> None:
    made = tokenizer(template)
    ids, labels = encode_chat(made, turns, tools=[{"name": "f"}] if CALL in turns else None)
    assert made.decode(ids) == made.apply_chat_template(
        turns, tokenize=False, tools=[{"name": "f"}] if CALL in turns else None
    )
    assert answers(made, ids, labels) == expected


@pytest.mark.parametrize("template", [THINKING, MARKED], ids=["searched", "marked"])
def test_a_prompt_whose_thoughts_are_dropped_has_no_labels(template: str) -> None:
    turns = [user("q"), said("<think>long thoughts</think>A"), user("and"), said("B")]
    for prompt, expected in ((3, f"{CLOSED}B{END}"), (2, f"{CLOSED}B{END}")):
        made = tokenizer(template)
        assert answers(made, *encode_chat(made, turns, first_labelled=prompt)) == expected


def test_one_row_with_dropped_thoughts_does_not_reject_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [[user("q"), said("A")]] * 3 + [[user("q"), said("A"), user("u"), said("B")]]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    caplog.set_level("INFO")
    samples = load_samples(str(file), tokenizer(THINKING), seq_len=512, evaluation_fraction=0)
    assert len(samples.train) == samples.statistics.template_rows == 4
    assert "in 1 conversations" in caplog.text


@pytest.mark.parametrize(
    ("template", "end"),
    [
        ("chatml", END),
        ("llama3", "<|eot_id|>"),
        ("zephyr", "<|endoftext|>"),
        ("alpaca", "<|endoftext|>"),
        (THINKING, END),
        (ALWAYS_DROPPED, END),
        ("{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}", None),
        ("{% for m in messages %}{{ m.content + ' [stop]\n' }}{% endfor %}", None),
    ],
    ids=["chatml", "llama3", "zephyr", "alpaca", "thinking", "r1", "no end", "several tokens"],
)
def test_generation_ends_where_the_template_ends_an_answer(
    template: str, end: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    made = tokenizer(tokens=("<|im_start|>", END, "<|eot_id|>"))
    made.add_special_tokens({"bos_token": "<s>"})
    caplog.set_level("INFO")
    if template in CHAT_TEMPLATES:
        set_chat_template(made, template)
    else:
        made.chat_template = template
    caplog.clear()
    before, token = made.eos_token_id, None if end is None else made.convert_tokens_to_ids(end)
    assert end_turns(made) == turn_end(made)[1] == token
    assert made.eos_token_id == (before if token is None else token)
    # What padded, the former end of a sequence, still does: otherwise padding would end turns.
    assert token in (None, before) or made.pad_token_id == before
    for known, further in ((None, [token]), (before, [before, token]), ([5, before], [5, before, token])):
        ends = list(dict.fromkeys(further))
        assert token is None or with_turn_end(known, token) == (ends[0] if len(ends) == 1 else ends)
    assert caplog.text.count("chat.py") == (token != before)


def test_a_template_that_also_writes_the_end_of_sequence_keeps_it() -> None:
    made = tokenizer("{% for m in messages %}{{ m.content + '<|im_end|>' }}{% endfor %}{{ eos_token }}")
    before = made.eos_token
    assert end_turns(made) == made.convert_tokens_to_ids(END) and made.eos_token == before
