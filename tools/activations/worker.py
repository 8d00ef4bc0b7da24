"""The process behind `trace_model`: a JSON request on stdin, one result line on stdout."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from math import ceil
from typing import Any

import torch
import transformers
from shardwright.ds_configs.memory.activations import ActivationEstimate, Mode
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import masking_utils
from transformers.initialization import no_init_weights
from transformers.utils import logging

from .depth import ATTENTION_DROPOUTS, SUB_CONFIGS, at_depth, stack_depths
from .request import RESULT_PREFIX
from .run import Phases, enable_checkpointing, run_training_step

# As in `fit.py`: the difference between two depths is what layers keep, free of what lies around them.
SHALLOW, DEEP = 2, 4
TOKEN_LABEL_SUFFIXES = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration")


class Tracer:
    """Traces one model config at one batch shape."""

    def __init__(self, config: Mapping[str, Any], micro_batch_size: int, mode: Mode) -> None:
        self.config = {key: value for key, value in config.items() if key != "auto_map"}
        self.micro_batch_size = micro_batch_size
        self.mode: Mode = mode
        self.element_type = torch.bfloat16 if mode == "bf16" else torch.float32
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)

    def build(self, depths: Mapping[str, int]) -> nn.Module:
        """Builds the model class that the config names, on fake tensors."""
        config = transformers.AutoConfig.for_model(**at_depth(self.config, depths))
        _prepare(config)
        names = config.architectures or []
        found = getattr(transformers, names[0], None) if names else None
        # Fake parameters cannot change their type after the fact (`_apply` in torch 2.13), so they are born with it.
        with self.fake, no_init_weights(), _default_dtype(self.element_type):
            if found is not None:
                config._attn_implementation = "sdpa" if getattr(found, "_supports_sdpa", False) else "eager"
                model = found(config)
            else:
                model = _from_auto_classes(config)
            return model.train()

    def inputs(self, model: Any, seq_len_tokens: int) -> dict[str, Any]:
        """Fake inputs and labels for what the model's forward accepts."""
        accepted = inspect.signature(model.forward).parameters
        config, batch = model.config, self.micro_batch_size
        values: dict[str, Any] = {}
        with self.fake:
            if "input_ids" in accepted:
                text = config.get_text_config()
                length = min(seq_len_tokens, getattr(text, "max_position_embeddings", None) or seq_len_tokens)
                values["input_ids"] = torch.zeros(batch, length, dtype=torch.int64)
            if "pixel_values" in accepted:
                vision = getattr(config, "vision_config", config)
                side, channels = vision.image_size, vision.num_channels
                values["pixel_values"] = torch.zeros(batch, channels, side, side, dtype=self.element_type)
            if "return_loss" in accepted:
                values["return_loss"] = True
            if "labels" in accepted:
                name = type(model).__name__
                if name.endswith(TOKEN_LABEL_SUFFIXES) and "input_ids" in values:
                    values["labels"] = torch.zeros_like(values["input_ids"])
                elif name.endswith("Classification"):
                    values["labels"] = torch.zeros(batch, dtype=torch.int64)
        return values

    def run(self, depths: Mapping[str, int], seq_len_tokens: int, *, checkpointing: bool) -> Phases:
        """Meters one training step of a model with the given depths."""
        model: Any = self.build(depths)
        if checkpointing:
            enable_checkpointing(model)
        inputs = self.inputs(model, seq_len_tokens)
        with self.fake:
            return run_training_step(model, inputs, mode=self.mode, layers=layers_of(model, depths), head=_head(model))

    def estimate(self, seq_len_tokens: int, num_layers: int | None) -> ActivationEstimate:
        """Extrapolates the saved bytes of every stack to its real depth."""
        depths = stack_depths(self.config)
        shallow = dict.fromkeys(depths, SHALLOW)
        saved, base = self._saved(depths, shallow, seq_len_tokens, checkpointing=False)
        try:
            kept, checkpointed = self._saved(depths, shallow, seq_len_tokens, checkpointing=True)
        except ValueError as error:
            if "checkpointing" not in str(error):
                raise
            kept, checkpointed = saved, base
        spread = num_layers or sum(depths.values())
        head = base.head_start
        outside = head - round(SHALLOW * sum(saved[name] for name in depths))
        return ActivationEstimate(
            saved_bytes_per_layer=ceil(sum(saved[name] * depths[name] for name in depths) / spread),
            checkpointed_bytes_per_layer=ceil(sum(kept[name] * depths[name] for name in depths) / spread),
            outside_layer_bytes=max(0, outside),
            backward_transient_bytes=max(0, max(base.backward) - head),
            recompute_backward_transient_bytes=max(0, max(checkpointed.backward) - checkpointed.head_start),
            forward_transient_bytes=max(checkpointed.layer_forward),
            loss_forward_peak_bytes=max(base.loss_forward, default=head) - head,
            loss_kept_bytes=base.kept - head,
            loss_backward_peak_bytes=max(base.loss_backward, default=head) - head,
            autocast_weight_copy_bytes_per_parameter=2 if self.mode == "bf16_autocast" else 0,
            source=f"traced on fake tensors, {self.config['model_type']}, {self.mode}; torch {torch.__version__}, "
            f"transformers {transformers.__version__}",
        )

    def _saved(
        self, depths: Mapping[str, int], shallow: dict[str, int], seq_len_tokens: int, *, checkpointing: bool
    ) -> tuple[dict[str, float], Phases]:
        base = self.run(shallow, seq_len_tokens, checkpointing=checkpointing)
        per_layer = {}
        for name in depths:
            deep = self.run(shallow | {name: DEEP}, seq_len_tokens, checkpointing=checkpointing)
            per_layer[name] = (deep.head_start - base.head_start) / (DEEP - SHALLOW)
        return per_layer, base


def _prepare(config: Any) -> None:
    for part in [config, *(getattr(config, name) for name in SUB_CONFIGS if hasattr(config, name))]:
        for name in ATTENTION_DROPOUTS:
            if hasattr(part, name):
                setattr(part, name, 0.0)
    config.use_cache = False
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0


@contextmanager
def _default_dtype(element_type: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(element_type)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _from_auto_classes(config: Any) -> Any:
    for auto in (
        transformers.AutoModelForCausalLM,
        transformers.AutoModelForSeq2SeqLM,
        transformers.AutoModelForMaskedLM,
        transformers.AutoModel,
    ):
        if type(config) in auto._model_mapping:
            return auto.from_config(config, trust_remote_code=False)
    raise ValueError(f"transformers {transformers.__version__} has no model for {type(config).__name__}")


def _head(model: Any) -> nn.Module | None:
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return head if isinstance(head, nn.Module) else None


def layers_of(model: nn.Module, depths: Mapping[str, int]) -> list[nn.Module]:
    """Children of the outermost module lists that are as long as a stack is deep."""
    lengths = set(depths.values())
    layers: list[nn.Module] = []
    taken: tuple[str, ...] = ()
    for path, module in model.named_modules():
        alike = isinstance(module, nn.ModuleList) and len({type(child) for child in module}) == 1
        if alike and len(module) in lengths and not path.startswith(taken):
            layers += list(module.children())
            taken += (f"{path}.",)
    if not layers:
        raise ValueError(f"{type(model).__name__} has no list of layers that follows its config's depth")
    return layers


def clear_lengths(tracer: Tracer, seq_len_tokens: int) -> tuple[int, int]:
    """Two sequence lengths at or just below the requested one that no weight dimension equals.

    Weight gradients are distinguished from activations by shape, so token counts must differ from weight dimensions.
    """
    sizes = {
        size for weight in tracer.build(stack_depths(tracer.config, SHALLOW)).parameters() for size in weight.shape
    }
    lengths = (length for length in range(seq_len_tokens, 1, -1))
    clear = [s for s in lengths if s not in sizes and s * tracer.micro_batch_size not in sizes][:2]
    if len(clear) < 2:
        raise ValueError(f"seq_len_tokens = {seq_len_tokens}: too short to trace; use at least 8")
    return clear[0], clear[1]


def extrapolate(near: ActivationEstimate, far: ActivationEstimate, steps: tuple[int, int]) -> ActivationEstimate:
    """Continues the line through two traced lengths to the asked length, `steps` tokens above each."""
    close, wide = steps
    changes = {}
    for name, value in asdict(near).items():
        other = getattr(far, name)
        if isinstance(value, int) and "per_parameter" not in name:
            changes[name] = ceil(value + (value - other) * close / (wide - close))
    return replace(near, **changes)


def _keep_layers(rand: Any) -> Any:
    """Lets LayerDrop (BART, Whisper) keep every layer: a fake random scalar cannot be compared."""

    def draw(*size: Any, **options: Any) -> Any:
        return 1.0 if size == ([],) else rand(*size, **options)

    return draw


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """Traces what the request asks for; a model that cannot be traced is an answer with `error`."""
    logging.set_verbosity_error()
    # transformers 5.17 takes fake tensors for a compiler's trace and then builds masks that training on
    # unpadded batches never has; values of fake masks cannot be read.
    masking_utils.is_tracing = lambda *_: False
    masking_utils.fast_all = lambda _: True
    masking_utils.find_packed_sequence_indices = lambda *_, **__: None
    torch.rand = _keep_layers(torch.rand)
    tracer = Tracer(request["config"], request["micro_batch_size"], request["mode"])
    asked = request["seq_len_tokens"]
    near, far = clear_lengths(tracer, asked)
    estimate = tracer.estimate(near, request["num_layers"])
    if near != asked:
        further = tracer.estimate(far, request["num_layers"])
        estimate = extrapolate(estimate, further, (asked - near, asked - far))
    return asdict(estimate)


def main() -> int:
    """Answers one request."""
    try:
        result = answer(json.load(sys.stdin))
    except Exception as error:
        # Any upstream failure must reach the asking process as one line instead of a traceback.
        result = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    print(RESULT_PREFIX + json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
