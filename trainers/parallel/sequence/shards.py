"""Split batches into shards along the sequence and join the outputs: pure functions on tensors.

Shapes: B samples, S tokens, P tokens padded to a multiple of the ranks, L = P / ranks, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from zlib import crc32

from ....ds_configs.specs.errors import ConfigError, UsageError
from ...data.chat import IGNORED_LABEL

if TYPE_CHECKING:
    import torch

    from ....plugins.deepspeed.ulysses import SharedSequence

LABELS, SHIFT_LABELS, POSITION_IDS, ATTENTION_MASK = "labels", "shift_labels", "position_ids", "attention_mask"
UNSHARDED_TOKENS = "unsharded_tokens"
"""Entry of a batch that is a shard: S, before padding."""
_FLASH_BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""Document borders of an unsharded row, as flash kernels take them; the kernels derive the same from positions."""


def loss_labels(shift_labels_BL: torch.Tensor, *, shifts: bool) -> torch.Tensor:
    """Return labels for a loss: [B, L], or [B, 1 + L] for one that drops the first label and the last logit itself.

    A shard without labels gets one label, so that its mean is finite; its weight is 0.
    """
    import torch

    labels_BL, has_labels = shift_labels_BL.clone(), shift_labels_BL.ne(IGNORED_LABEL).any()
    labels_BL[0, 0] = torch.where(has_labels, labels_BL[0, 0], torch.zeros_like(labels_BL[0, 0]))
    return torch.nn.functional.pad(labels_BL, (1, 0), value=IGNORED_LABEL) if shifts else labels_BL


def shifted_labels(batch: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the label that each position predicts, [B, S]; `None` for a batch without labels."""
    import torch

    if batch.get(SHIFT_LABELS) is not None:
        return batch[SHIFT_LABELS]
    if batch.get(LABELS) is None:
        return None
    return torch.nn.functional.pad(batch[LABELS][:, 1:], (0, 1), value=IGNORED_LABEL)


def labelled_tokens(batches: Sequence[Mapping[str, Any]]) -> torch.Tensor | None:
    """Return how many tokens of unsharded batches have a label; `None` if a batch has no labels."""
    import torch

    shifted = [shifted_labels(batch) for batch in batches]
    counts = [labels.ne(IGNORED_LABEL).sum() for labels in shifted if labels is not None]
    return torch.stack(counts).sum() if counts and len(counts) == len(shifted) else None


def example_of(batch: Mapping[str, Any]) -> torch.Tensor:
    """Return the input tensor of a batch, [B, S] or [B, S, hidden]."""
    example: torch.Tensor = batch["input_ids"] if batch.get("input_ids") is not None else batch["inputs_embeds"]
    return example


def cut(batch: Mapping[str, Any], *, ranks: int, rank: int, pad_token_id: int = 0) -> dict[str, Any]:
    """Return the shard of a batch that belongs to `rank`, padded on the right to a multiple of `ranks`.

    Tensors [B, S, ...] are split along the sequence; others are copied. The mask is dropped: attention is causal, and
    padding on the right comes after every token. Document borders are dropped too: flash kernels derive them from
    positions. `position_ids` [B, L] count from the start of the unsharded sequence. `shift_labels` [B, L], if there are
    labels, has the label of the token that each position predicts, also across shard borders.

    Raises:
        UsageError: document borders are passed without positions.
    """
    import torch

    if any(name in batch for name in _FLASH_BOUNDARIES) and batch.get(POSITION_IDS) is None:
        rule = "counts tokens of unsharded rows; shards find documents by position_ids only"
        raise UsageError(ConfigError(where="cu_seq_lens", rule=rule, fix="let the collator return position_ids"))
    example = example_of(batch)
    samples, tokens = example.shape[:2]
    length = -(-tokens // ranks)
    extra = length * ranks - tokens
    dropped = (LABELS, SHIFT_LABELS, ATTENTION_MASK, *_FLASH_BOUNDARIES)
    whole = {name: value for name, value in batch.items() if name not in dropped}
    if whole.get(POSITION_IDS) is None:
        whole[POSITION_IDS] = torch.arange(tokens, device=example.device).expand(samples, -1)
    labels_BS = shifted_labels(batch)
    if labels_BS is not None:
        whole[SHIFT_LABELS] = labels_BS
    fills = {"input_ids": pad_token_id, SHIFT_LABELS: IGNORED_LABEL}
    shard: dict[str, Any] = {UNSHARDED_TOKENS: tokens}
    for name, value in whole.items():
        if not torch.is_tensor(value) or value.shape[:2] != (samples, tokens):
            shard[name] = value
            continue
        if extra:
            last = value[:, -1:] + torch.arange(1, extra + 1, device=value.device) if name == POSITION_IDS else None
            padding = value.new_full((samples, extra, *value.shape[2:]), fills.get(name, 0)) if last is None else last
            value = torch.cat([value, padding], dim=1)
        shard[name] = value[:, rank * length : (rank + 1) * length].contiguous()
    return shard


def digest_of(batch: Mapping[str, Any]) -> int:
    """Return a number that two batches share only if their tensors are equal, but for a collision of CRC-32."""
    import torch

    digest = 0
    for name in sorted(batch):
        if torch.is_tensor(value := batch[name]):
            head = f"{name} {value.dtype} {list(value.shape)}".encode()
            content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            digest = crc32(content, crc32(head, digest))
    return digest


def padding_and_packing(batches: Sequence[Mapping[str, Any]]) -> tuple[bool, bool]:
    """Return whether any batch is padded on the left, and whether any packs documents into a row.

    Positions of padding are ignored: their values depend on the collator.
    """
    import torch

    left, packed = [], []
    for batch in batches:
        mask, positions = batch.get(ATTENTION_MASK), batch.get(POSITION_IDS)
        mask = mask if mask is not None and mask.dim() == 2 else None
        if mask is not None:
            left.append((mask[:, 1:] > mask[:, :-1]).any() & (mask <= 1).all())
            packed.append((mask > 1).any())
        if positions is not None and positions.dim() == 2:
            restarts = positions[:, 1:] != positions[:, :-1] + 1
            packed.append((restarts if mask is None else restarts & mask[:, 1:].bool() & mask[:, :-1].bool()).any())
    if not left and not packed:
        return False, False
    device = (left or packed)[0].device
    never = torch.zeros((), dtype=torch.bool, device=device)
    is_left_padded, is_packed = torch.stack([torch.stack([never, *flags]).any() for flags in (left, packed)]).tolist()
    return is_left_padded, is_packed


def mask_dimensions(batches: Sequence[Mapping[str, Any]]) -> int:
    """Return the largest number of dimensions of an attention mask; 2 without a mask."""
    masks = [batch[ATTENTION_MASK] for batch in batches if batch.get(ATTENTION_MASK) is not None]
    return max([2, *(mask.dim() if hasattr(mask, "dim") else 4 for mask in masks)])


def joined(value: Any, shared: SharedSequence, *, whole_tokens: int) -> Any:
    """Return the shards of all ranks of a sequence, concatenated along the sequence and without padding.

    Raises:
        UsageError: the second dimension of a tensor is not the sequence.
    """
    import torch
    import torch.distributed as dist

    if isinstance(value, Mapping):
        return type(value)(  # type: ignore[call-arg]
            {name: joined(item, shared, whole_tokens=whole_tokens) for name, item in value.items()}
        )
    if isinstance(value, list | tuple):
        return type(value)(joined(item, shared, whole_tokens=whole_tokens) for item in value)
    length = -(-whole_tokens // shared.size)
    if not torch.is_tensor(value) or value.dim() < 2 or value.shape[1] not in (length, length + 1):
        shape = list(value.shape) if torch.is_tensor(value) else type(value).__name__
        rule = f"an output of this shape cannot be joined along a sequence of {length} tokens per rank"
        fix = "evaluate with prediction_loss_only=True, or name it in ignore_keys"
        raise UsageError(ConfigError(where="model outputs", value=shape, rule=rule, fix=fix))
    own = value[:, :length].contiguous()
    parts = [torch.empty_like(own) for _ in range(shared.size)]
    dist.all_gather(parts, own, group=shared.group)
    return torch.cat(parts, dim=1)[:, :whole_tokens]
