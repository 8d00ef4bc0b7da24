"""Rows of preference and reinforcement learning tasks: pairs, labelled answers, and prompts.

TRL's trainers render and tokenize them; here rows get TRL's columns, and what no trainer can learn from is skipped and
counted.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...ds_configs.specs.errors import ConfigError, UsageError
from ...ds_configs.specs.job import GROUPED_TASKS
from ...ds_configs.specs.tasks import TaskName
from ..data.chat import turns_of
from ..data.image_rows import COLUMNS, images_of
from ..data.samples import Kind, Samples, SampleStatistics, split_rows
from ..data.sources import DataSettings, Row, parse_source, read_rows

_PROMPTS = ("prompt", "question", "instruction", "query")
"""Names of a prompt's column; the first of a row counts."""
_TRUE = ("true", "1", "1.0", "good", "desirable", "chosen")
_FALSE = ("false", "0", "0.0", "-1", "bad", "undesirable", "rejected")

logger = logging.getLogger(__name__)


def task_samples(task: TaskName, settings: DataSettings, tokenizer: Any, *, completion_tokens: int) -> Samples:
    """Return the rows of a task for training and evaluation, with the columns that TRL's trainer reads.

    - dpo, orpo, cpo, reward: `chosen` and `rejected`, with `prompt` or with the prompt as their common beginning; each
      is text or a list of messages.
    - kto: `prompt`, `completion` and `label` (true or false, also as 1 or 0, or words). A pair makes two rows.
    - grpo, rloo: `prompt`; the reward function gets all other columns.

    Skipped and counted in the log are rows without an answer, with equal answers, or whose prompt is too long for
    `seq_len` tokens with one token of an answer, or with the longest completion that is generated.

    Args:
        tokenizer: Counts tokens, and renders messages with its chat template. Without a padding token it gets its
            end-of-sequence token as one, which TRL's trainers require.

    Raises:
        UsageError: the dataset does not exist, lacks a column, has a row of other types, labels of one kind, or no row
            to train on; or the tokenizer has no end-of-sequence token, or no chat template for messages.
    """
    source = settings.dataset
    rows: list[Row] = list(
        read_rows(parse_source(source), split=settings.dataset_split, revision=settings.dataset_revision)
    )
    if not rows:
        raise UsageError(ConfigError(where="dataset", value=source, rule="has no rows"))
    for index, row in enumerate(rows):
        chats = (row.get("prompt"), row.get("completion"))
        if any(row.get(name) for name in COLUMNS) or any(images_of(chat) for chat in chats if isinstance(chat, list)):
            rule, fix = f"has images, which task {task} does not read here", "use --task sft, or TRL in your own script"
            raise UsageError(ConfigError(where=f"{source}[{index}]", rule=rule, fix=fix))
    kind: Kind = "prompts" if task in GROUPED_TASKS else "labelled answers" if task == "kto" else "pairs"
    convert = {"prompts": _prompts, "labelled answers": _labelled, "pairs": _pairs}[kind]
    skipped: Counter[str] = Counter()
    made: list[dict[str, Any]] = []
    for index, row in enumerate(rows):
        made += convert(row, f"{source}[{index}]", skipped)
    if tokenizer.eos_token is None:
        rule, fix = "has no end-of-sequence token, which ends every answer", "use a model with one"
        raise UsageError(ConfigError(where="tokenizer", rule=rule, fix=fix))
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if any(isinstance(row.get("prompt"), list) for row in made) and not tokenizer.chat_template:
        rule = "has messages, and the tokenizer has no chat template"
        raise UsageError(ConfigError(where="dataset", value=source, rule=rule, fix="pass --chat-template chatml"))
    counted = [(row, _lengths(row, tokenizer, kind, source)) for row in made]
    longest, why_long = settings.seq_len - 1, "whose prompt alone has --seq-len tokens"
    if kind == "prompts":
        longest = settings.seq_len - completion_tokens
        why_long = f"whose prompt and the {completion_tokens} of --completion-tokens exceed --seq-len"
    fitting = [(row, lengths) for row, lengths in counted if lengths[0] <= longest]
    skipped[why_long] = len(counted) - len(fitting)
    for why, count in skipped.items():
        if count:
            logger.info(f"{count:,} of {len(rows):,} rows of {source} are skipped: rows {why}")
    if not fitting:
        why = ", ".join(f"{count:,} {why}" for why, count in skipped.items() if count)
        rule = f"has no row to train on: of {len(rows):,} rows are skipped {why}"
        fix = "check the columns, or raise --seq-len"
        raise UsageError(ConfigError(where="dataset", value=source, rule=rule, fix=fix))
    numbered: list[tuple[int, Row]] = [(index, row) for index, (row, _) in enumerate(fitting)]
    train, evaluation = split_rows(numbered, kind, settings.seed, settings.evaluation_fraction)
    if kind == "labelled answers" and len(labels := {row["label"] for _, row in train}) == 1:
        rule = f"has only answers with the label {str(labels.pop()).lower()}, and KTO learns from their difference"
        fix = "add answers with the other label, or use --task sft with the good ones"
        raise UsageError(ConfigError(where="dataset", value=source, rule=rule, fix=fix))
    chosen = [fitting[index][1] for index, _ in train]
    if kind == "prompts":
        counts = [min(settings.seq_len, lengths[0] + completion_tokens) for lengths in chosen]
    else:
        counts = [sum(min(settings.seq_len, length) for length in lengths[1:]) for lengths in chosen]
    return Samples(
        train=[dict(row) for _, row in train],
        evaluation=[dict(row) for _, row in evaluation],
        statistics=SampleStatistics(
            source=source,
            kind=kind,
            rows=len(rows),
            empty_rows=sum(skipped.values()),
            unlabelled_rows=0,
            cut_rows=sum(max(lengths) > settings.seq_len for _, lengths in fitting),
            train_samples=len(train),
            evaluation_samples=len(evaluation),
            train_tokens=sum(counts),
            train_labels=sum(counts),
            template_rows=sum(isinstance(row["prompt"], list) for row, _ in fitting),
        ),
    )


def in_complete_batches(samples: Samples, batch_rows: int) -> Samples:
    """Return samples without the last rows that fill no batch of all ranks, which would count twice in a mean.

    Raises:
        UsageError: there are fewer rows than a batch.
    """
    statistics, count = samples.statistics, len(samples.train)
    kept = count // batch_rows * batch_rows
    if not kept:
        rule = f"has {count} rows to train on, fewer than the {batch_rows} of a micro-batch on all ranks"
        fix = "use a smaller --micro-batch-size, or more rows"
        raise UsageError(ConfigError(where="dataset", value=statistics.source, rule=rule, fix=fix))
    if kept < count:
        lost = count - kept
        logger.info(f"{lost} of {count:,} training rows are not used, because they fill no batch of {batch_rows}")
    tokens = round(statistics.train_tokens * kept / count)
    statistics = replace(statistics, train_samples=kept, train_tokens=tokens, train_labels=tokens)
    return replace(samples, train=samples.train[:kept], statistics=statistics)


def _prompt_of(row: Row, where: str) -> Any:
    return next((_text_or_messages(row, name, where) for name in _PROMPTS if row.get(name)), None)


def _text_or_messages(row: Row, name: str, where: str) -> Any:
    value = row[name]
    if isinstance(value, list):
        return turns_of(value, where=f"{where}: {name}")
    if isinstance(value, str):
        return value
    rule, fix = "must be text, or a list of messages", "correct or remove this row"
    raise UsageError(ConfigError(where=f"{where}: {name}", value=value, rule=rule, fix=fix))


def _as_messages(prompt: Any, *answers: Any) -> tuple[Any, ...]:
    """Return the prompt and its answers, all as messages if one of them is."""
    if not any(isinstance(part, list) for part in (prompt, *answers)):
        return (prompt, *answers)
    return tuple(
        [{"role": role, "content": part}] if isinstance(part, str) else part
        for role, part in zip(("user", *["assistant"] * len(answers)), (prompt, *answers), strict=True)
    )


def _pairs(row: Row, where: str, skipped: Counter[str]) -> list[dict[str, Any]]:
    _require(row, ("chosen", "rejected"), where)
    prompt = _prompt_of(row, where)
    chosen, rejected = (_text_or_messages(row, name, where) for name in ("chosen", "rejected"))
    if type(chosen) is not type(rejected):
        rule = f"chosen is a {type(chosen).__name__} and rejected a {type(rejected).__name__}"
        fix = "write both as text, or both as lists of messages"
        raise UsageError(ConfigError(where=where, rule=rule, fix=fix))
    if chosen == rejected:
        skipped["with equal answers"] += 1
        return []
    if prompt is None or (isinstance(chosen, list) and chosen[:1] == rejected[:1] and len(chosen) > 1):
        # The prompt is the common beginning, as in the datasets of Anthropic and of Argilla.
        prompt, chosen, rejected = _common_beginning(chosen, rejected)
    prompt, chosen, rejected = _as_messages(prompt, chosen, rejected)
    if not (prompt and _said(chosen) and _said(rejected)):
        skipped["without a prompt or an answer"] += 1
        return []
    return [{"prompt": prompt, "chosen": chosen, "rejected": rejected}]


def _common_beginning(chosen: Any, rejected: Any) -> tuple[Any, Any, Any]:
    """Return prompt and answers of a pair; text is split after the last common word, before a role's name."""
    length = 0
    for one, other in zip(chosen, rejected, strict=False):
        if one != other:
            break
        length += 1
    if isinstance(chosen, str):
        # Anthropic's dialogues: the last turn of the assistant is the answer.
        marker = "\n\nAssistant:"
        start = chosen.rfind(marker, 0, length)
        length = start + len(marker) if start >= 0 else chosen.rfind(" ", 0, length) + 1
    return chosen[:length], chosen[length:], rejected[length:]


def _labelled(row: Row, where: str, skipped: Counter[str]) -> list[dict[str, Any]]:
    if "chosen" in row and "label" not in row:
        return [
            {"prompt": pair["prompt"], "completion": pair[name], "label": name == "chosen"}
            for pair in _pairs(row, where, skipped)
            for name in ("chosen", "rejected")
        ]
    _require(row, ("completion", "label"), where)
    prompt, completion = _as_messages(_prompt_of(row, where), _text_or_messages(row, "completion", where))
    stated = row["label"]
    word = str(stated).strip().lower()
    if word not in (*_TRUE, *_FALSE):
        rule, fix = "must be true for a desirable answer, or false", "write true or false, or 1 or 0"
        raise UsageError(ConfigError(where=f"{where}: label", value=stated, rule=rule, fix=fix))
    if not (prompt and _said(completion)):
        skipped["without a prompt or an answer"] += 1
        return []
    return [{"prompt": prompt, "completion": completion, "label": word in _TRUE}]


def _prompts(row: Row, where: str, skipped: Counter[str]) -> list[dict[str, Any]]:
    prompt = _prompt_of(row, where)
    if prompt is None and isinstance(row.get("messages"), list):
        # Everything before the answer of the assistant.
        messages = _text_or_messages(row, "messages", where)
        end = next((index for index, message in enumerate(messages) if message["role"] == "assistant"), None)
        prompt = messages[:end]
    if prompt is None and not row.keys() & {*_PROMPTS, "messages"}:
        _require(row, ("prompt",), where)
    if not prompt:
        skipped["without a prompt or an answer"] += 1
        return []
    others = {name: value for name, value in row.items() if name not in (*_PROMPTS, "messages")}
    return [others | {"prompt": prompt}]


def _require(row: Row, names: Sequence[str], where: str) -> None:
    if missing := [name for name in names if name not in row]:
        rule = f"needs the column {' and '.join(missing)}, but has {', '.join(row)}"
        raise UsageError(ConfigError(where=where, rule=rule, fix="rename the columns"))


def _said(answer: Any) -> bool:
    if isinstance(answer, str):
        return bool(answer.strip())
    contents = [message["content"] or message.get("tool_calls") or "" for message in answer]
    return bool(contents) and all(str(content).strip() for content in contents)


def _lengths(row: dict[str, Any], tokenizer: Any, kind: Kind, source: str) -> list[int]:
    """Return the tokens of the prompt, and of the prompt with each answer."""

    def tokens(text: Any, *, asks: bool) -> int:
        if isinstance(text, str):
            return len(tokenizer(text)["input_ids"])
        try:
            return len(tokenizer.apply_chat_template(text, add_generation_prompt=asks, return_dict=False))
        except Exception as error:
            rule = f"the chat template rejects {str(text)[:200]}: {' '.join(str(error).split())}"
            raise UsageError(ConfigError(where="dataset", value=source, rule=rule)) from None

    prompt = row["prompt"]
    answers = {"pairs": ("chosen", "rejected"), "labelled answers": ("completion",)}.get(kind, ())
    return [tokens(prompt, asks=True), *(tokens(prompt + row[name], asks=False) for name in answers)]
