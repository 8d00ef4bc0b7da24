"""Channels that a student keeps: their importance, and the slicing of a teacher's tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ....plugins.huggingface_hub.hub import ModelSource
from ....plugins.transformers.sound_model import check_config, refused_by_name
from ...data.models import StartingModel, load_tokenizer
from ...data.sources import pack, read_documents
from .layers import MLP_OUTPUT, LayerStack, width_rule
from .request import Widths

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Importance of everything that a narrower width may remove; larger values stay."""

    hidden_H: torch.Tensor
    """Channels of the residual stream, fp64."""
    intermediate: dict[int, torch.Tensor]
    """Channels of each layer's MLP, by the layer's number."""
    energies: dict[str, torch.Tensor]
    """Mean square [H] of each hidden channel before each norm, by the norm's name without the base model's prefix."""


def activation_scores(model: PreTrainedModel, batches: Sequence[dict[str, torch.Tensor]], stack: LayerStack) -> Scores:
    """Return importance from a teacher's activations on token batches.

    A channel of the MLP: mean over tokens of |a| ‖w‖₂, the norm of what it adds to the residual stream, where w are the
    weights that read it. A channel of the residual stream: mean |x| after every norm, each divided by its mean over
    channels, summed (Muralidharan et al. 2024, arXiv 2407.14679, §2.2).
    """
    # Sums over tokens; dividing by their number would not change the order within a layer.
    channels: dict[int, Any] = defaultdict(float)
    outputs: dict[str, Any] = defaultdict(float)
    squares: dict[str, Any] = defaultdict(float)
    tokens: dict[str, int] = defaultdict(int)

    def add_channels(layer: int, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        activations_NI = inputs[0].flatten(0, -2)
        norms_I = module.weight.float().norm(dim=0)
        channels[layer] += (activations_NI.float().abs().sum(dim=0) * norms_I).double().cpu()

    def add_norm(
        name: str, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output_BSH: torch.Tensor
    ) -> None:
        stream_NH = inputs[0].flatten(0, -2).float()
        squares[name] += stream_NH.square().sum(dim=0).double().cpu()
        outputs[name] += output_BSH.flatten(0, -2).float().abs().sum(dim=0).double().cpu()
        tokens[name] += len(stream_NH)

    with ExitStack() as hooks, torch.no_grad():
        for name, module in model.named_modules():
            own = stack.canonical(name)
            layer, rule = stack.layer_of(own + "."), width_rule(f"{own}.weight")
            inside = own.removeprefix(f"{stack.path}.{layer}.")
            if layer is not None and inside == MLP_OUTPUT:
                handle = module.register_forward_pre_hook(partial(add_channels, layer))
            elif rule is not None and rule.is_norm:
                handle = module.register_forward_hook(partial(add_norm, own))
            else:
                continue
            hooks.callback(handle.remove)
        model.eval()
        for batch in batches:
            model(**batch)
    means = {name: total_H / tokens[name] for name, total_H in outputs.items()}
    energies = {name: total_H / tokens[name] for name, total_H in squares.items()}
    return Scores(
        hidden_H=torch.stack([mean_H / mean_H.mean() for mean_H in means.values()]).sum(dim=0),
        intermediate=channels,
        energies=energies,
    )


@dataclass(frozen=True, kw_only=True)
class WidthCutter:
    """Cuts a teacher's tensors to the channels of largest importance."""

    stack: LayerStack
    scores: Scores
    student: Widths

    def cut(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the teacher with the student's widths; the gain of a norm is corrected."""
        rule = width_rule(name)
        assert rule is not None, "names are checked before anything is removed"
        hidden = _largest(self.scores.hidden_H, self.student.hidden_size)
        for axis, meaning in enumerate(rule.axes[: tensor.dim()]):
            if meaning == "hidden":
                tensor = tensor.index_select(axis, hidden)
            elif meaning == "intermediate":
                layer = self.stack.layer_of(name)
                assert layer is not None, "only layers have these channels"
                kept = _largest(self.scores.intermediate[layer], self.student.intermediate_size)
                tensor = tensor.index_select(axis, kept)
        if rule.is_norm:
            # The mean square that the norm divides by changes with the channels.
            energy_H = self.scores.energies[self.stack.canonical(name.rpartition(".")[0])]
            before, after = float(energy_H.mean()), float(energy_H[hidden].mean())
            tensor = (tensor.double() * ((after / before) ** 0.5 if before > 0 else 1.0)).to(tensor.dtype)
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
