"""Sparse weight matrices: target layers, schedule of zeros, masks and their files."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ...ds_configs.quantization.layers import DEFAULT_IGNORE, is_match
from ...ds_configs.specs.errors import ConfigError, RefusedInputError, UsageError
from ...plugins.deepspeed.engine import named_linear_layers
from ...plugins.safetensors.reading import opened, read_header
from ...plugins.safetensors.writing import save_tensors

if TYPE_CHECKING:
    from torch import Tensor

Pattern = Literal["unstructured", "2:4"]
_DIGITS = ((20, 11), (10, 10), (0, 10))
"""Shift and bits of the three digits into which `smallest` splits the 31 bits of a magnitude."""


def magnitudes(weight: Tensor, pattern: Pattern = "unstructured") -> Tensor:
    """Return |w| of a matrix [O, I], flattened, as int32 in the same order as the fp32 magnitudes.

    With ``2:4`` the two largest of each four neighbours in a row become -1, so they are never pruned. Among equal
    values, the first count as smaller.
    """
    import torch

    bits = weight.float().abs().contiguous().view(torch.int32)
    if pattern == "2:4":
        bits_G4 = bits.reshape(-1, 4)
        order_G4 = bits_G4.argsort(dim=-1, stable=True)
        bits = bits_G4.scatter(-1, order_G4[:, 2:], -1)
    return bits.reshape(-1)


def smallest(
    numbers: Callable[[], Iterable[Tensor]], count: int, *, add_up: Callable[[Tensor], Tensor] = lambda counts: counts
) -> tuple[int, int]:
    """Return the largest of the `count` smallest numbers, and how many numbers equal to it are among them.

    Radix selection: three passes that count one digit each, whatever the amount of numbers.

    Args:
        numbers: Returns the same int32 vectors at each call; negative numbers are ignored.
        count: How many; 0 returns a number below all.
        add_up: Sums counts over ranks that hold other vectors.
    """
    import torch

    if count < 1:
        return -1, 0
    prefix, left = 0, count
    for shift, digits in _DIGITS:
        counted = torch.zeros(1 << digits, dtype=torch.int64)
        for vector in numbers():
            fits = vector[(vector >= 0) & ((vector >> (shift + digits)) == prefix)]
            counted += torch.bincount((fits >> shift) & ((1 << digits) - 1), minlength=1 << digits).cpu()
        up_to = add_up(counted).cumsum(0)
        digit = int((up_to < left).sum())
        left -= int(up_to[digit - 1]) if digit else 0
        prefix = (prefix << digits) | digit
    return prefix, left


def chosen(numbers: Tensor, last: int, equal: int) -> Tensor:
    """Return the mask of numbers below `last`, and of the first `equal` numbers equal to it.

    Args:
        numbers: int32 [N] from `magnitudes`.
        last: From `smallest`.
        equal: From `smallest`, minus those in earlier vectors.
    """
    import torch

    same = numbers == last
    first_equal = same if int(same.sum()) <= equal else same & (same.cumsum(0, dtype=torch.int32) <= equal)
    return ((numbers >= 0) & (numbers < last)) | first_equal


def unpacked_mask(packed: Tensor, length: int) -> Tensor:
    """Return a mask from its bits."""
    import torch

    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(1) >> shifts) & 1).bool().reshape(-1)[:length]


FILE_NAME = "pruning_masks.safetensors"
"""File in every checkpoint; several callbacks share it."""
_METADATA = "masks"
_MAX_ERRORS = 8


def save_masks(
    path: Path, masks: Mapping[str, Tensor], settings: Mapping[str, object], shapes: Mapping[str, Sequence[int]]
) -> None:
    """Add packed masks to a file, by the name of the layer.

    Args:
        path: Path of the file.
        masks: uint8 bits of the flattened matrices.
        settings: Settings of the pruning, which a resumed run must repeat.
        shapes: Rows and columns of each matrix.
    """
    descriptions, others = _read(path) if path.is_file() else ({}, {})
    descriptions |= {name: {"shape": list(shapes[name]), **settings} for name in masks}
    save_tensors(others | dict(masks), path, {_METADATA: json.dumps(descriptions)})


def load_masks(path: Path, settings: Mapping[str, object], shapes: Mapping[str, tuple[int, int]]) -> dict[str, Tensor]:
    """Return the packed masks of a checkpoint for the layers in `shapes`.

    Raises:
        UsageError: they belong to other settings or another model; all differences together.
        RefusedInputError: the file has another format or is damaged.
    """
    descriptions, masks = _read(path)
    fix = "resume with the checkpoint's value, or start again from the model"
    missing = [name for name in shapes if name not in descriptions]
    errors = [ConfigError(where=name, rule="has no mask in the checkpoint", fix=fix) for name in missing]
    differences = {
        (key, json.dumps(value), json.dumps(descriptions[name].get(key)))
        for name, shape in shapes.items()
        if name in descriptions
        for key, value in {"shape": list(shape), **settings}.items()
        if descriptions[name].get(key) != value
    }
    errors += [
        ConfigError(where=key, value=json.loads(value), rule=f"differs from the checkpoint ({stored})", fix=fix)
        for key, value, stored in sorted(differences)
    ]
    if errors:
        raise UsageError(errors[:_MAX_ERRORS])
    damaged = [name for name, (rows, columns) in shapes.items() if masks[name].numel() != (rows * columns + 7) // 8]
    if damaged:
        rule = "the number of bits differs from the number of weights"
        raise RefusedInputError(ConfigError(where=str(path), value=damaged[0], rule=rule))
    return {name: masks[name] for name in shapes}


def _read(path: Path) -> tuple[dict[str, dict[str, Any]], dict[str, Tensor]]:
    header = read_header(path)
    try:
        descriptions = json.loads(header.metadata[_METADATA])
        if not isinstance(descriptions, dict) or not all(isinstance(entry, dict) for entry in descriptions.values()):
            raise ValueError("its metadata must be an object of objects")
    except (KeyError, ValueError) as error:
        fix = "resume from another checkpoint"
        raise RefusedInputError(ConfigError(where=str(path), rule=f"contains no masks: {error}", fix=fix)) from error
    with opened(path) as file:
        return descriptions, {name: file.get_tensor(name) for name in descriptions}


@dataclass(frozen=True, kw_only=True, slots=True)
class PruningSchedule:
    """Fraction of zeros over optimizer steps, which rises fast at first and slowly at the end.

    ``s(t) = s_f + (s_i - s_f) · (1 - (t - t_0) / (t_1 - t_0))³`` (Zhu & Gupta, arXiv 1710.01878, eq. 1), constant
    between updates at t_0, t_0 + every, … and t_1.
    """

    final_sparsity: float
    """Fraction of zeros from `end_step` on, s_f."""
    end_step: int
    """Optimizer steps before the last update, t_1."""
    start_step: int = 0
    """Optimizer steps before the first update, t_0; 0: before training."""
    every: int = 100
    """Optimizer steps between two updates."""
    initial_sparsity: float = 0.0
    """Fraction of zeros at `start_step`, s_i."""

    def is_update(self, step: int) -> bool:
        """Return whether zeros are updated after this many optimizer steps."""
        if not self.start_step <= step <= self.end_step:
            return False
        return step == self.end_step or (step - self.start_step) % self.every == 0

    def sparsity_at(self, step: int) -> float:
        """Return the fraction of zeros after this many optimizer steps."""
        if step < self.start_step:
            return 0.0
        if step >= self.end_step:
            return self.final_sparsity
        last = step - (step - self.start_step) % self.every
        left = 1 - (last - self.start_step) / (self.end_step - self.start_step)
        return self.final_sparsity + (self.initial_sparsity - self.final_sparsity) * left**3

    def errors(self) -> list[ConfigError]:
        """Return all values out of range."""
        errors = []
        for where in ("final_sparsity", "initial_sparsity"):
            share = getattr(self, where)
            if not (math.isfinite(share) and 0 <= share < 1):
                rule = "must be a fraction, at least 0 and below 1"
                fix = f"write {share / 100:g} for {share:g} %" if 1 < share <= 99 else ""
                errors.append(ConfigError(where=where, value=share, rule=rule, fix=fix))
        if self.initial_sparsity > self.final_sparsity:
            rule = f"must not exceed final_sparsity = {self.final_sparsity}: zeros stay zeros"
            errors.append(ConfigError(where="initial_sparsity", value=self.initial_sparsity, rule=rule))
        if self.start_step < 0:
            errors.append(ConfigError(where="start_step", value=self.start_step, rule="must be at least 0"))
        if self.every < 1:
            errors.append(ConfigError(where="every", value=self.every, rule="must be at least 1"))
        if self.end_step < self.start_step:
            rule = f"must not be before start_step = {self.start_step}"
            errors.append(ConfigError(where="end_step", value=self.end_step, rule=rule))
        return errors


def target_layers(
    model: Any, targets: Sequence[str] = ("Linear",), ignore: Sequence[str] = DEFAULT_IGNORE
) -> dict[str, Any]:
    """Return linear layers by their names in the checkpoint, without adapters and a tied output head.

    Args:
        model: Transformers model, or any module.
        targets: Module names, `re:` patterns of names, or `Linear` for all, as in a quantization scheme.
        ignore: Names or patterns of layers that stay dense.

    Raises:
        UsageError: a target or an entry of `ignore` matches no layer, or no layer is left; all errors together.
    """
    import torch

    layers = {name: module for name, module in named_linear_layers(model).items() if ".lora_" not in name}
    errors = []
    for where, pattern in [*(("targets", target) for target in targets), *(("ignore", pattern) for pattern in ignore)]:
        if pattern in DEFAULT_IGNORE or any(is_match(name, pattern) for name in layers):
            continue
        fix = "the model has none (Conv1D of GPT-2 and quantized layers do not count)"
        if layers:
            near = difflib.get_close_matches(pattern, [*layers, "Linear"], n=3, cutoff=0.5)
            fix = f"did you mean {', '.join(near)}?" if near else f"layers have names such as {next(iter(layers))}"
        errors.append(ConfigError(where=where, value=pattern, rule="matches no linear layer of the model", fix=fix))
    embeddings = ("VocabParallelEmbedding", "HiddenParallelEmbedding")
    embedded = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, torch.nn.Embedding) or type(module).__name__ in embeddings
    }
    selected = {}
    for name, module in layers.items():
        is_target = any(is_match(name, target) for target in targets)
        if not is_target or any(is_match(name, pattern) for pattern in ignore):
            continue
        if id(module.weight) not in embedded:
            selected[name] = module
        elif name in targets:
            rule = "shares its weight with the token embedding"
            errors.append(ConfigError(where="targets", value=name, rule=rule, fix="remove it from targets"))
    if not selected and not errors:
        from transformers.pytorch_utils import Conv1D

        transposed = sum(isinstance(module, Conv1D) for module in model.modules())
        rule = "selects no linear layer of the model"
        rule += f", which stores {transposed} matrices in Conv1D" if transposed else ""
        errors.append(ConfigError(where="targets", value=", ".join(targets), rule=rule))
    if errors:
        raise UsageError(errors)
    return selected
