"""Packing of conversations: several documents in one row, which attention and positions keep apart.

A packed row has `position_ids` that restart with each document, and a batch of such rows has no `attention_mask`:
without a cache, Transformers then derives a mask for each document from the positions
(`masking_utils.find_packed_sequence_indices`), and FlashAttention reads the documents of a batch of one row as
sequences of different lengths (`modeling_flash_attention_utils._is_packed_sequence`). The first token of a document has
no label, as nothing of its own document predicts it.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...ds_configs.plan.plan import Plan
from ...ds_configs.shrink.config import shrink_model_config
from ...ds_configs.specs.errors import ConfigError, UsageError
from ...ds_configs.specs.layout import Layout
from .chat import IGNORED_LABEL
from .samples import Sample, Samples
from .sources import DataSettings

_FLASH = "flash"
_PROBED_TOKENS = (5, 7)

logger = logging.getLogger(__name__)


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
        settings: With `packing`.
        plan: The layout that trains.
        models: `config.json` and attention implementation of each model that reads the rows.
        obstacle: Why the training cannot use packed rows, if it cannot.

    Raises:
        UsageError: `--packing on`, but conversations cannot be packed.
    """
    statistics, layout = samples.statistics, plan.chosen.layout
    if settings.packing == "off" or statistics.kind == "text":
        return samples
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

    Args:
        layout: The layout that trains.
        config: The model's `config.json`.
        attention: Its attention implementation.
        seq_len: Length of a row.
    """
    for size, name in ((layout.pp, "pipeline"), (layout.sp, "sequence"), (layout.cp, "context")):
        if size > 1:
            return f"{name} parallelism does not support document masks"
    if attention is not None and _FLASH in attention and layout.micro_batch_size > 1:
        return f"{attention} separates documents only with --micro-batch-size 1"
    if config.get("output_router_logits"):
        return "the balance loss of the router (output_router_logits) would count padding"
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

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
            model = AutoModelForCausalLM.from_config(made, dtype=torch.float32, trust_remote_code=False).eval()
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
        return f"a small model of its classes cannot read packed rows ({type(error).__name__}: {error})"
    return None
