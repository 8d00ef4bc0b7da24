"""Channels that a student keeps: their importance, and the slicing of a teacher's tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ....plugins.huggingface_hub import ModelSource
from ....plugins.transformers.meta_model import build_meta_model
from ....plugins.transformers.sound_model import check_config, refused_by_name
from ...data.models import StartingModel, load_tokenizer
from ...data.sources import pack, read_documents
from .layers import LayerStack

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WIDTH_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Model types with RMS norms and gated MLPs, whose widths can be reduced."""
HIDDEN, INTERMEDIATE = "hidden_size", "intermediate_size"
Axes = tuple[str | None, ...]
"""The width that each axis of a tensor has; `None` if no reduced width changes the axis."""


def tensor_axes(teacher: Mapping[str, Any], widths: Mapping[str, int], stack: LayerStack) -> dict[str, Axes]:
    """Return the axes of every tensor of a teacher, by its name without the base model's prefix.

    Compares the shapes of the teacher's config with those of the config with one width reduced.
    """

    def shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        state = build_meta_model(dict(config), source="student").state_dict()
        return {stack.canonical(name): tuple(tensor.shape) for name, tensor in state.items()}

    own = shapes(teacher)
    axes: dict[str, list[str | None]] = {name: [None] * len(shape) for name, shape in own.items()}
    for width in (HIDDEN, INTERMEDIATE):
        for name, shape in shapes({**teacher, "head_dim": widths["head_dim"], width: widths[width]}).items():
            for axis, size in enumerate(shape):
                if size != own[name][axis]:
                    axes[name][axis] = width
    return {name: tuple(meanings) for name, meanings in axes.items()}


class WidthCutter:
    """Cuts a teacher's tensors to the channels of largest importance, from its activations on token batches.

    A channel of the MLP: mean over tokens of |a| ‖w‖₂, the norm of what it adds to the residual stream, where w are the
    weights that read it. A channel of the residual stream: mean |x| after every norm, each divided by its mean over
    channels, summed (Muralidharan et al. 2024, arXiv 2407.14679, §2.2).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        batches: Sequence[dict[str, torch.Tensor]],
        stack: LayerStack,
        axes: Mapping[str, Axes],
        widths: Mapping[str, int],
    ) -> None:
        self._stack, self._axes = stack, axes
        # Sums over tokens; dividing by their number would not change the order within a layer.
        channels: dict[int, Any] = defaultdict(float)
        outputs: dict[str, Any] = defaultdict(float)
        squares: dict[str, Any] = defaultdict(float)

        def add_channels(layer: int, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            activations_NI = inputs[0].flatten(0, -2)
            norms_I = module.weight.float().norm(dim=0)
            channels[layer] += (activations_NI.float().abs().sum(dim=0) * norms_I).double().cpu()

        def add_norm(
            name: str, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output_BSH: torch.Tensor
        ) -> None:
            squares[name] += inputs[0].flatten(0, -2).float().square().sum(dim=0).double().cpu()
            outputs[name] += output_BSH.flatten(0, -2).float().abs().sum(dim=0).double().cpu()

        with ExitStack() as hooks, torch.no_grad():
            for name, module in model.named_modules():
                own = stack.canonical(name)
                layer, weight = stack.layer_of(own + "."), axes.get(f"{own}.weight", ())
                if layer is not None and weight[1:] == (INTERMEDIATE,):
                    handle = module.register_forward_pre_hook(partial(add_channels, layer))
                elif weight == (HIDDEN,):
                    handle = module.register_forward_hook(partial(add_norm, own))
                else:
                    continue
                hooks.callback(handle.remove)
            model.eval()
            for batch in batches:
                model(**batch)
        self._intermediate = {layer: _largest(sum_I, widths[INTERMEDIATE]) for layer, sum_I in channels.items()}
        self._gains: dict[str, float] = {}
        if outputs:
            importance_H = torch.stack([sum_H / sum_H.mean() for sum_H in outputs.values()]).sum(dim=0)
            self._hidden = _largest(importance_H, widths[HIDDEN])
            for name, sum_H in squares.items():
                before, after = float(sum_H.mean()), float(sum_H[self._hidden].mean())
                self._gains[f"{name}.weight"] = (after / before) ** 0.5 if before > 0 else 1.0

    def cut(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the teacher with the student's widths.

        The gain of a norm is multiplied by the change of the root mean square that the norm divides by.
        """
        own = self._stack.canonical(name)
        for axis, width in enumerate(self._axes.get(own, ())):
            if width == HIDDEN:
                tensor = tensor.index_select(axis, self._hidden)
            elif width == INTERMEDIATE:
                layer = self._stack.layer_of(name)
                assert layer is not None, "only layers have these channels"
                tensor = tensor.index_select(axis, self._intermediate[layer])
        if own in self._gains:
            tensor = (tensor.double() * self._gains[own]).to(tensor.dtype)
        return tensor


def _largest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Return the indices of the `count` largest scores, ascending; the lower index wins a tie."""
    return scores.argsort(descending=True, stable=True)[:count].sort().values


MAX_SAMPLE_TOKENS = 512
MAX_SAMPLES = 64
_SAMPLES_PER_BATCH = 4


def teacher_with_batches(
    directory: Path, source: ModelSource, text: tuple[Path, ...]
) -> tuple[PreTrainedModel, list[dict[str, torch.Tensor]]]:
    """Return the teacher in evaluation mode, on a GPU if there is one, and up to 64 samples of up to 512 tokens.

    The samples are spread over the text, which defaults to Python's help topics.

    Raises:
        UsageError: a text cannot be read, or is shorter than one sample.
    """
    import transformers

    architecture = (source.config.get("architectures") or ["AutoModel"])[0]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loader = getattr(transformers, architecture)
    check_config(str(directory))
    with refused_by_name(str(directory)):
        model = loader.from_pretrained(str(directory), trust_remote_code=False, use_safetensors=True, dtype="auto")
    model = model.to(device).eval()
    positions = getattr(model.config, "max_position_embeddings", None) or MAX_SAMPLE_TOKENS
    tokenizer = load_tokenizer(StartingModel(model=str(directory)), model.config.vocab_size)
    samples = pack(read_documents(text), tokenizer, min(MAX_SAMPLE_TOKENS, positions))
    spread = samples[:: -(-len(samples) // MAX_SAMPLES)]
    rows_NT = torch.stack([sample["input_ids"] for sample in spread]).to(device)
    return model, [{"input_ids": part_BT} for part_BT in rows_NT.split(_SAMPLES_PER_BATCH)]
