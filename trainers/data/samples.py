"""Token samples for training and evaluation, and rows of several conversations that attention keeps apart.

A packed row has `position_ids` that restart with each document, and a batch of such rows has no `attention_mask`:
without a cache, Transformers then derives a mask for each document from the positions
(`masking_utils.find_packed_sequence_indices`), and FlashAttention reads the documents of a batch of one row as
sequences of different lengths (`modeling_flash_attention_utils._is_packed_sequence`). The first token of a document has
no label, because no earlier token of its document predicts it.
"""

from __future__ import annotations

import hashlib
import json
import logging
from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, Literal

from ...ds_configs.plan.plan import Plan
from ...ds_configs.shrink import shrink_model_config
from ...ds_configs.specs.errors import ConfigError, UsageError, collecting
from ...ds_configs.specs.layout import Layout
from ...plugins.launching.messages import log_progress
from .chat import (
    IGNORED_LABEL,
    encode_chat,
    encode_completion,
    rendered_chat,
    special_prefix,
    special_suffix,
    turns_of,
)
from .image_rows import COLUMNS, images_of
from .images import check_image_inputs, encode_images, image_inputs, reads_max_pixels
from .sources import DataSettings, Row, joined_pieces, parse_source, read_rows

Kind = Literal["text", "messages", "prompt and completion", "pairs", "labelled answers", "prompts"]
Sample = dict[str, Any]
"""Tokens and labels by column; of preferences and prompts, a row with the columns that TRL reads."""

MESSAGE_COLUMNS = ("messages", "conversations")
PROMPT_COLUMNS = (("prompt", "completion"), ("instruction", "output"))
"""Columns of a prompt and its completion; the second pair is Alpaca's, with an optional `input`."""
_ALPACA_PROMPT = (
    "Below is an instruction that describes a task{with_input}. Write a response that appropriately completes the "
    "request.\n\n### Instruction:\n{instruction}\n\n{input}### Response:\n"
)
"""The prompt of tatsu-lab/stanford_alpaca, for a tokenizer without a chat template."""
_FILL = {"input_ids": None, "labels": IGNORED_LABEL, "position_ids": 0}
"""Padding value of each column; `None` for the padding token."""
ROWS_SUFFIX = "_rows"
"""End of the name of a column that has the row of each token in a cache of a second model; padded with -1."""
TYPES_SUFFIX = "token_type_ids"
"""End of the name of a column that has the type of each token, as processors of images return it."""
_NumberedRow = tuple[int, Row]
"""A row with its index, which errors name."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleStatistics:
    """Counts of rows that were read, and of the samples made of them."""

    source: str
    """The dataset as the user wrote it."""
    kind: Kind
    rows: int
    empty_rows: int
    """Rows without text, which were skipped."""
    unlabelled_rows: int
    """Rows without a label within `seq_len` tokens, which were skipped."""
    cut_rows: int
    """Rows longer than `seq_len`, which were truncated."""
    train_samples: int
    evaluation_samples: int
    train_tokens: int
    """Training tokens, without padding."""
    train_labels: int
    """Training tokens with a label."""
    image_rows: int = 0
    """Rows with images."""
    images_per_sample: int = 0
    """Images of the row that has the most tokens of images."""
    image_tokens: int = 0
    """Tokens that these images become."""
    image_sizes: Sequence[str] = ()
    """Their different widths and heights in pixels, such as `640x480`, from the largest area."""
    template_rows: int = 0
    """Rows that the chat template rendered."""
    packed_documents: int = 0
    """Training documents in the `train_samples` rows; 0 if each row is one document, or plain text that is joined."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """Samples of at most `seq_len` tokens; each a dict of `input_ids` and `labels`."""

    train: list[Sample]
    evaluation: list[Sample]
    """Evaluation samples, from rows that are not trained on."""
    statistics: SampleStatistics


def stated_samples(settings: DataSettings, tokenizer: Any, processor: Any = None) -> Samples:
    """Return the samples that settings describe, and log truncation; a cache and the training use the same.

    `processor` reads images; without one, rows with images are an error.

    Raises:
        UsageError: as `load_samples`.
    """
    samples = load_samples(
        settings.dataset,
        tokenizer,
        seq_len=settings.seq_len,
        packing=settings.packing != "off",
        split=settings.dataset_split,
        revision=settings.dataset_revision,
        seed=settings.seed,
        evaluation_fraction=settings.evaluation_fraction,
        text_column=settings.text_column,
        processor=processor,
    )
    statistics = samples.statistics
    if statistics.cut_rows:
        logger.info(
            f"{statistics.cut_rows:,} of {statistics.rows:,} rows of {statistics.source} are longer than "
            f"{settings.seq_len} tokens and are truncated"
        )
    return samples


def load_samples(
    source: str,
    tokenizer: Any,
    *,
    seq_len: int,
    packing: bool = True,
    split: str = "train",
    revision: str | None = None,
    seed: int = 0,
    evaluation_fraction: float = 0.05,
    text_column: str | None = None,
    processor: Any = None,
) -> Samples:
    """Read a dataset and turn it into samples.

    Rows have `text`; `messages` or `conversations`, with or without `tools`; `prompt` and `completion`; or, as Alpaca,
    `instruction`, `input` and `output`. Plain text is joined, with the
    end-of-sequence token after each document, and split into samples of exactly `seq_len` tokens; with `packing=False`
    each document is split separately and its last piece is shorter. Any other row makes one sample, truncated to
    `seq_len`, with labels on what the assistant or the completion says.

    Only the content and the seed decide which rows are evaluation rows, so equal rows are in the same set. A single
    document is split into two parts.

    Args:
        source: `ID[:config][#N]` of the Hub, a `.jsonl`, `.json`, `.csv`, `.parquet` or `.txt` file, a directory of
            such files, or `python-help`.
        tokenizer: Its template renders conversations.
        seq_len: Largest sample length in tokens.
        packing: Whether plain text is joined.
        seed: Selects the evaluation rows.
        evaluation_fraction: Share of evaluation rows, 0 to below 1; 0 for none.
        text_column: Column that is read as `text`; other columns are ignored.
        processor: Reads the images of conversations; samples then have a column `images`.

    Raises:
        UsageError: the dataset does not exist, has no text, is shorter than one sample, or all labels are masked; or
            images cannot be read, or exceed `seq_len`.
        RefusedInputError: an image is broken.
    """
    rows: list[Row] = list(read_rows(parse_source(source), split=split, revision=revision))
    if text_column is not None:
        known = list(rows[0]) if rows else [text_column]
        if text_column not in known:
            near = get_close_matches(text_column, known, n=1)
            fix = f"did you mean {near[0]}?" if near else f"it has {', '.join(known)}"
            rule = f"is not a column of {source}"
            raise UsageError(ConfigError(where="text_column", value=text_column, rule=rule, fix=fix))
        rows = [{"text": row.get(text_column)} for row in rows]
    if not rows:
        raise UsageError(ConfigError(where="dataset", value=source, rule="has no rows"))
    columns = list(rows[0])
    kind: Kind
    if any(name in columns for name in MESSAGE_COLUMNS):
        kind = "messages"
    elif any(name in columns and other in columns for name, other in PROMPT_COLUMNS):
        kind = "prompt and completion"
    elif "text" in columns:
        kind = "text"
        with_images = ((index, name) for index, row in enumerate(rows) for name in COLUMNS if row.get(name))
        if (first := next(with_images, None)) is not None:
            index, name = first
            rule = f"has text and {name}, but images need a chat"
            chat = '{"role": "user", "content": "<image>QUESTION"}, {"role": "assistant", "content": "ANSWER"}'
            fix = f'write "messages": [{chat}] instead of text, or use train --text-column text without the images'
            raise UsageError(ConfigError(where=f"{source}[{index}]", rule=rule, fix=fix))
    else:
        rule = (
            f"needs a column text, {' or '.join(MESSAGE_COLUMNS)}, prompt and completion, or instruction and output, "
            f"but has {', '.join(columns)}"
        )
        fix = "select one with --text-column"
        fix = f"{fix} {columns[0]}" if len(columns) == 1 else f"{fix}, or rename two to prompt and completion"
        raise UsageError(ConfigError(where="dataset", value=source, rule=rule, fix=fix))
    filled = [(index, row) for index, row in enumerate(rows) if _has_text(row, kind)]
    kinds: tuple[Kind, ...] = ("messages", "prompt and completion", "text")
    for index, row in enumerate(rows):
        if not _has_text(row, kind) and (other := next((name for name in kinds if _has_text(row, name)), None)):
            rule = f"has {other}, but earlier rows have {kind}: all rows of a dataset must have one format"
            fix = "convert the rows, or train on one file per format"
            raise UsageError(ConfigError(where=f"{source}[{index}]", rule=rule, fix=fix))
    if not filled:
        rule = f"none of its {len(rows)} rows has text"
        raise UsageError(ConfigError(where="dataset", value=source, rule=rule))
    chats: Counter[str] = Counter()
    (train, counts), (evaluation, _) = (
        _made_samples(
            part, tokenizer, seq_len, kind=kind, packing=packing, source=source, chats=chats, processor=processor
        )
        for part in split_rows(filled, kind, seed, evaluation_fraction)
    )
    sizes = [sample.pop("sizes", ()) for sample in (*train, *evaluation)]
    tokens = [sample.pop("image_tokens", 0) for sample in (*train, *evaluation)]
    most_tokens, largest = max(zip(tokens, sizes, strict=True), key=lambda row: row[0], default=(0, ()))
    if not largest:
        for sample in (*train, *evaluation):
            sample.pop("images", None)
    if chats["rewritten"]:
        lost = chats["unlabelled answers"]
        logger.info(
            f"the chat template changes earlier messages, such as their thoughts, in {chats['rewritten']:,} "
            f"conversations of {source}: labels are those of the complete rendering"
            + (f"; {lost:,} answers are not in it and have no labels" if lost else "")
        )
    if not train:
        if kind == "text":
            rule = f"its text is shorter than one sample of seq_len = {seq_len} tokens"
            fix = "lower --seq-len, or add more text"
        else:
            speaker = "the assistant" if kind == "messages" else "the completion"
            rule = f"every label is masked: no row of {len(filled)} has text of {speaker} within seq_len = {seq_len} "
            rule += "tokens"
            fix = "raise --seq-len, or check the roles in the rows"
        raise UsageError(ConfigError(where="dataset", value=source, rule=rule, fix=fix))
    statistics = SampleStatistics(
        source=source,
        kind=kind,
        rows=len(rows),
        empty_rows=len(rows) - len(filled),
        unlabelled_rows=counts["unlabelled"],
        cut_rows=counts["cut"],
        train_samples=len(train),
        evaluation_samples=len(evaluation),
        train_tokens=sum(len(sample["input_ids"]) for sample in train),
        train_labels=sum(label != IGNORED_LABEL for sample in train for label in sample["labels"]),
        template_rows=chats["rendered"],
        image_rows=sum(map(bool, sizes)),
        images_per_sample=len(largest),
        image_tokens=most_tokens,
        image_sizes=[
            f"{width}x{height}" for width, height in sorted(set(largest), key=lambda size: (-size[0] * size[1], size))
        ],
    )
    return Samples(train=train, evaluation=evaluation, statistics=statistics)


def collate(samples: Sequence[dict[str, Any]], *, pad_token_id: int = 0, processor: Any = None) -> dict[str, Any]:
    """Pad samples on the right to the longest and return tensors [B, S]; unless packed, with an `attention_mask`.

    The mask depends on positions, not on tokens: an end-of-sequence token that is also the padding token keeps its
    label. `position_ids`, types of tokens, and rows of a cache (`ROWS_SUFFIX`), are padded if samples have them. The
    `processor` turns `images` into its tensors; without any image of the batch, there are none.
    """
    import torch

    lengths = [len(sample["input_ids"]) for sample in samples]
    batch = {}
    for name in samples[0]:
        if name in _FILL or name.endswith((ROWS_SUFFIX, TYPES_SUFFIX)):
            fill = _FILL.get(name, -1 if name.endswith(ROWS_SUFFIX) else 0)
            value = pad_token_id if fill is None else fill
            padded = [
                [*sample[name], *[value] * (max(lengths) - length)]
                for sample, length in zip(samples, lengths, strict=True)
            ]
            batch[name] = torch.tensor(padded)
    if "images" in samples[0]:
        batch |= image_inputs(processor, [sample["images"] for sample in samples])
    if "position_ids" in batch:
        # The positions of packed documents make the mask; each token of padding, with position 0, is a document.
        return batch
    positions_S = torch.arange(max(lengths))
    batch["attention_mask"] = (positions_S[None] < torch.tensor(lengths)[:, None]).long()
    return batch


def _messages(row: Row) -> Any:
    return next((row[name] for name in MESSAGE_COLUMNS if row.get(name)), None)


def _has_text(row: Row, kind: Kind) -> bool:
    if kind == "messages":
        return isinstance(_messages(row), list)
    if kind == "prompt and completion":
        return any(bool(row.get(name)) and bool(row.get(other)) for name, other in PROMPT_COLUMNS)
    text = row.get("text")
    return isinstance(text, str) and bool(text.strip())


def split_rows(
    rows: list[_NumberedRow], kind: Kind, seed: int, fraction: float
) -> tuple[list[_NumberedRow], list[_NumberedRow]]:
    """Return training and evaluation rows: content and seed decide, so that equal rows are in the same set."""
    if fraction <= 0:
        return rows, []
    if len(rows) == 1 and kind == "text":
        ((index, row),) = rows
        end = round(len(row["text"]) * (1 - fraction))
        return [(index, {"text": row["text"][:end]})], [(index, {"text": row["text"][end:]})]
    # Equal rows have equal digests.
    texts = (json.dumps(row, sort_keys=True, default=str) for _, row in rows)
    digests = [hashlib.sha256(f"{seed}\n{text}".encode()).digest() for text in texts]
    equal_rows, missing, selected = Counter(digests), max(1, round(len(rows) * fraction)), set()
    # The last digest is never selected, so that there is always a row to train on.
    for digest in sorted(equal_rows)[:-1]:
        if missing <= 0:
            break
        selected.add(digest)
        missing -= equal_rows[digest]
    train = [row for row, digest in zip(rows, digests, strict=True) if digest not in selected]
    return train, [row for row, digest in zip(rows, digests, strict=True) if digest in selected]


def _made_samples(
    rows: Sequence[_NumberedRow],
    tokenizer: Any,
    seq_len: int,
    *,
    kind: Kind,
    packing: bool,
    source: str,
    chats: Counter[str],
    processor: Any = None,
) -> tuple[list[Sample], Counter[str]]:
    """Return samples of at most `seq_len` tokens, and the numbers of `unlabelled` and of truncated (`cut`) rows.

    `chats` counts what a chat template does to conversations, as `encode_chat`.
    """
    counts: Counter[str] = Counter()
    if kind == "text":
        before, after = special_prefix(tokenizer), special_suffix(tokenizer)
        documents = (
            [*before, *tokenizer(row["text"], add_special_tokens=False)["input_ids"], *after] for _, row in rows
        )
        pieces = (
            document[start : start + seq_len]
            for document in documents
            for start in range(0, len(document), seq_len)
            if min(seq_len, len(document) - start) > 1
        )
        # Labels are a copy, so that masking a label does not change the tokens.
        joined = joined_pieces(documents, seq_len) if packing else pieces
        return [{"input_ids": tokens, "labels": list(tokens)} for tokens in joined], counts
    samples: list[Sample] = []
    errors: list[ConfigError] = []
    is_checked = False
    for number, (index, row) in enumerate(rows):
        where = f"{source}[{index}]"
        if kind == "messages":
            turns, first_labelled = _messages(row), 0
        else:
            prompt: Any = row.get("prompt")
            completion: Any = row.get("completion")
            if not (prompt and completion):
                instruction, further, completion = str(row["instruction"]), row.get("input"), str(row["output"])
                if tokenizer.chat_template:
                    question = f"{instruction}\n\n{further}" if further else instruction
                    prompt = [{"role": "user", "content": question}]
                    completion = [{"role": "assistant", "content": completion}]
                else:
                    prompt = _ALPACA_PROMPT.format(
                        with_input=", paired with an input that provides further context" if further else "",
                        instruction=instruction,
                        input=f"### Input:\n{further}\n\n" if further else "",
                    )
            if not any(isinstance(prompt, each) and isinstance(completion, each) for each in (str, list)):
                rule = f"prompt is a {type(prompt).__name__} and completion a {type(completion).__name__}"
                fix = "write both as text, or both as lists of messages"
                raise UsageError(ConfigError(where=where, rule=rule, fix=fix))
            is_chat = isinstance(prompt, list)
            turns, first_labelled = ([*prompt, *completion], len(prompt)) if is_chat else (None, 0)
        sample: Sample
        if turns is None:
            ids, labels = encode_completion(tokenizer, prompt, completion)
            sample = {"input_ids": ids, "labels": labels}
            if processor is not None:
                types = [name for name in processor.model_input_names if name.endswith(TYPES_SUFFIX)]
                sample |= {name: [0] * len(ids) for name in types}
                sample |= {"images": [], "sizes": [], "image_tokens": 0}
        else:
            tools = row.get("tools")
            if isinstance(tools, str) and tools.strip():
                try:
                    tools = json.loads(tools)
                except ValueError as error:
                    rule = f"its tools are not valid JSON ({error})"
                    raise UsageError(ConfigError(where=where, rule=rule)) from None
            if tools and not isinstance(tools, list):
                rule = f"its tools must be a list, not {type(tools).__name__}"
                raise UsageError(ConfigError(where=where, rule=rule))
            settings: dict[str, Any] = {"first_labelled": first_labelled, "tools": tools or None, "where": where}
            turns = turns_of(turns, where=where)
            images = images_of(turns)
            if processor is None and images:
                rule = "has images, but the model has no processor for them, or this command reads none"
                fix = "use train or evaluate, and a vision-language model with its processor_config.json"
                raise UsageError(ConfigError(where=where, rule=rule, fix=fix))
            if processor is None:
                ids, labels = encode_chat(tokenizer, turns, counts=chats, **settings)
                sample = {"input_ids": ids, "labels": labels}
            else:
                sample = {}
                with collecting(errors):
                    chat = rendered_chat(tokenizer, turns, counts=chats, image_token=processor.image_token, **settings)
                    sample = encode_images(processor, chat, images, where)
                if number and number % _PROGRESS_ROWS == 0:
                    log_progress("reading rows with images", number, len(rows))
                if not sample:
                    continue
                if images and not is_checked:
                    check_image_inputs(processor, images[0], where)
                    is_checked = True
                if (needed := sample.pop("last") + 1) > seq_len:
                    rule = f"its images end at token {needed}, but seq_len is {seq_len}"
                    fix = f"use --seq-len {needed} or more, or fewer or smaller images"
                    fix += " (--max-pixels)" if reads_max_pixels(processor) else ""
                    errors.append(ConfigError(where=where, rule=rule, fix=fix))
        counts["cut"] += len(sample["input_ids"]) > seq_len
        sample = {name: values if name in _OF_ROWS else values[:seq_len] for name, values in sample.items()}
        # The first token is never predicted.
        if any(label != IGNORED_LABEL for label in sample["labels"][1:]):
            samples.append(sample)
        else:
            counts["unlabelled"] += 1
    if errors:
        more = len(errors) - _SHOWN_ERRORS
        if more > 0:
            logger.info(f"{more:,} more rows of {source} have errors of images")
        raise UsageError(errors[:_SHOWN_ERRORS])
    return samples, counts


_OF_ROWS = ("images", "sizes", "image_tokens")
"""Columns that have no value for each token."""
_SHOWN_ERRORS = 3
_PROGRESS_ROWS = 1000
"""Rows between two lines of progress: a processor reads tens to hundreds in a second."""


_FLASH = "flash"
_PROBED_TOKENS = (5, 7)


def packed_if_possible(
    samples: Samples,
    settings: DataSettings,
    plan: Plan,
    models: Sequence[tuple[Mapping[str, Any], str | None]],
    *,
    obstacle: str | None = None,
) -> Samples:
    """Return the samples with several conversations in a row, where layout, models and data allow it, and log which.

    Args:
        samples: One conversation each; plain text is returned as it is.
        models: `config.json` and attention implementation of each model that reads the rows.

    Raises:
        UsageError: `--packing on`, but conversations cannot be packed.
    """
    statistics, layout = samples.statistics, plan.chosen.layout
    if settings.packing == "off" or statistics.kind == "text":
        return samples
    if statistics.image_rows:
        obstacle = "some have images"
    for config, attention in models:
        obstacle = obstacle or packing_obstacle(layout, config, attention=attention, seq_len=settings.seq_len)
    documents, rows = samples.train, 0
    if obstacle is None:
        indices = fitting_rows([len(document["input_ids"]) for document in documents], settings.seq_len)
        rows = len(indices)
        if settings.packing == "auto" and rows < layout.global_batch_size:
            obstacle = f"they fill {rows} rows, fewer than the global batch of {layout.global_batch_size}"
    if obstacle is None:
        filled = statistics.train_tokens / (rows * settings.seq_len)
        per_step = layout.global_batch_size * statistics.train_samples / rows
        logger.info(
            f"packed {statistics.train_samples:,} conversations into {rows:,} rows of {settings.seq_len} tokens, "
            f"{100 * filled:.0f} % filled: a step trains on about {per_step:,.0f} conversations, with --packing off on "
            f"{layout.global_batch_size}"
        )
        packed = [packed_row([documents[index] for index in row]) for row in indices]
        statistics = replace(statistics, train_samples=rows, packed_documents=len(documents))
        return replace(samples, train=packed, statistics=statistics)
    if settings.packing == "on":
        rule, fix = f"is not supported here: {obstacle}", "use --packing auto, which pads conversations"
        raise UsageError(ConfigError(where="packing", value="on", rule=rule, fix=fix))
    logger.info(f"conversations are padded, not packed: {obstacle}")
    return samples


def fitting_rows(lengths: Sequence[int], seq_len: int) -> list[list[int]]:
    """Return the documents of each row by their index: each, from the longest, goes where it leaves least space.

    >>> fitting_rows([3, 6, 2, 4], 8)
    [[1, 2], [3, 0]]
    """
    rows: list[list[int]] = []
    by_space: dict[int, list[int]] = defaultdict(list)
    spaces: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        length = lengths[index]
        nearest = bisect_left(spaces, length)
        if nearest < len(spaces):
            space = spaces[nearest]
            row = by_space[space].pop()
            if not by_space[space]:
                del spaces[nearest]
        else:
            space, row = seq_len, len(rows)
            rows.append([])
        rows[row].append(index)
        left = space - length
        if not by_space[left]:
            insort(spaces, left)
        by_space[left].append(row)
    return rows


def packed_row(documents: Sequence[Sample]) -> Sample:
    row: Sample = {"input_ids": [], "labels": [], "position_ids": []}
    for document in documents:
        row["input_ids"] += document["input_ids"]
        row["labels"] += [IGNORED_LABEL, *document["labels"][1:]]
        row["position_ids"] += range(len(document["input_ids"]))
    return row


def packing_obstacle(layout: Layout, config: Mapping[str, Any], *, attention: str | None, seq_len: int) -> str | None:
    """Return why conversations cannot be packed; `None` if they can.

    A small model of the same classes is run on the CPU to see that its documents do not read each other: the gradient
    of one document's logits is exactly zero for the embeddings of another, in both directions, because masked attention
    weights are exactly zero; and its logits are those of the document alone.
    """
    for size, name in ((layout.pp, "pipeline"), (layout.sp, "sequence"), (layout.cp, "context")):
        if size > 1:
            return f"{name} parallelism does not support document masks"
    if attention is not None and _FLASH in attention and layout.micro_batch_size > 1:
        return f"{attention} separates documents only with --micro-batch-size 1"
    if config.get("output_router_logits"):
        return "the balance loss of the router (output_router_logits) would count padding"
    import torch
    from transformers import AutoConfig

    from ...plugins.transformers.loading import auto_class

    small, _ = shrink_model_config(dict(config), layout=layout, seq_len_tokens=max(seq_len, 64), hidden_size=64)
    first, second = _PROBED_TOKENS
    try:
        # The seed of the process is not changed.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            values = dict(small)
            if attention is not None and _FLASH in attention:
                # Its kernels need a GPU; they read documents from the same positions as SDPA does.
                values = {name: value for name, value in values.items() if "attn_implementation" not in name}
            made = AutoConfig.for_model(values.pop("model_type"), **values)
            model = auto_class(made).from_config(made, dtype=torch.float32, trust_remote_code=False).eval()
            ids_BS = torch.randint(3, made.get_text_config().vocab_size, (1, first + second + 2))
        # Two tokens of padding, each with position 0.
        positions_BS = torch.tensor([[*range(first), *range(second), 0, 0]])
        documents = slice(0, first), slice(first, first + second)
        embedded: list[torch.Tensor] = []

        def with_gradient(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
            embedded.append(output.detach().requires_grad_())
            return embedded[-1]

        model.get_input_embeddings().register_forward_hook(with_gradient)
        logits_BSV = model(input_ids=ids_BS, position_ids=positions_BS, use_cache=False).logits
        for own, other in (documents, documents[::-1]):
            (gradient_BSD,) = torch.autograd.grad(logits_BSV[:, own].square().sum(), embedded[0], retain_graph=True)
            if gradient_BSD[:, other].any():
                return f"{type(model).__name__} mixes the documents of a packed row"
            alone_BSV = model(input_ids=ids_BS[:, own], use_cache=False).logits
            if not torch.allclose(logits_BSV[:, own], alone_BSV, rtol=1e-4, atol=1e-5):
                return f"{type(model).__name__} does not treat each document of a packed row as a new sequence"
    except Exception as error:
        return f"packed rows fail in a small model of the same classes ({type(error).__name__}: {error})"
    return None
