"""bitsandbytes: NF4 and INT8 checkpoints, and 4-bit loading for QLoRA under FSDP2 and ZeRO-3."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..ds_configs.quantization.scheme import QuantizationScheme
from ..ds_configs.specs.errors import ConfigError, RefusedInputError, ShardwrightError, UsageError
from . import patches
from .safetensors import each_tensor, read_checkpoint
from .transformers.loading import auto_class, is_finite, without_zero3

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


def quiet_optional_kernels() -> None:
    """Suppress bitsandbytes' import warning that the optional package `kernels` is missing.

    Observed with bitsandbytes 0.50.2 on processors with AVX512-BF16 (`backends/cpu/ops.py`): its own 4-bit kernel is
    slower but correct.
    """
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def keep_layout(model: PreTrainedModel) -> Any:
    """Keep evaluation and saving from changing a model's 4-bit layers, and return the model.

    With bitsandbytes 0.50.2 on processors with AVX512-BF16 (`nn/modules.py`, `Linear4bit.forward`), an evaluation pass
    rounds the scales to bf16 in place, and saving rounds them again and misplaces them. The losses of a QLoRA run would
    then depend on whether it is evaluated or saved in between.
    """
    from bitsandbytes.nn import Linear4bit

    for module in model.modules():
        if isinstance(module, Linear4bit):
            patches.assign("unpacked-4-bit-layers", False, on=module)
    return model


@dataclass(kw_only=True)
class BitsAndBytesModel:
    """A model in memory, and its checkpoint, which was written before the model's first forward pass.

    On processors with AVX512-BF16 the first forward pass of a 4-bit layer rearranges its codes and scales in place. A
    checkpoint saved after that has transposed scales: on a small Llama perplexity went from 3.08 to 3.74.
    """

    model: Any
    """Transformers model with bitsandbytes' layers."""
    quantized_layers: tuple[str, ...]
    """Names of the matrices that are stored in 4 or 8 bit."""
    written: tempfile.TemporaryDirectory[str]
    """The checkpoint."""

    def save(self, directory: Path) -> None:
        """Move the checkpoint to `directory`; can be called once."""
        for file in sorted(Path(self.written.name).iterdir()):
            shutil.move(str(file), str(directory / file.name))
        self.written.cleanup()


def quantize_with_bitsandbytes(
    directory: Path,
    scheme: QuantizationScheme,
    *,
    quantized: Collection[str],
    dense: Sequence[str],
    dtype: str,
    device: str,
) -> BitsAndBytesModel:
    """Load a model with quantized layers and write its checkpoint to a temporary directory.

    `scheme` is `NF4` or `BNB_INT8`; it selects the `quantized` linear layers, and all others are `dense`. Dense layers
    and computations have the `dtype`.

    Raises:
        UsageError: there are layers that bitsandbytes does not replace.
        RefusedInputError: weights are not finite.
        ShardwrightError: Transformers cannot load the model with bitsandbytes.
    """
    # Quantized weights hide NaN.
    fix = "train it again, or download a valid copy"
    if errors := [
        ConfigError(where=str(directory), value=name, rule="holds NaN or infinity", fix=fix)
        for name, tensor in each_tensor(read_checkpoint(directory))
        if not is_finite(tensor)
    ]:
        raise RefusedInputError(errors)
    import torch
    from transformers import AutoConfig, BitsAndBytesConfig

    stored, config = getattr(torch, dtype), BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=list(dense))
    if scheme.weights.bits == 4:
        config = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=stored,
            llm_int8_skip_modules=list(dense),
        )
    try:
        kind = auto_class(AutoConfig.from_pretrained(str(directory), trust_remote_code=False))
        model = kind.from_pretrained(
            str(directory),
            quantization_config=config,
            dtype=stored,
            device_map={"": device},
            trust_remote_code=False,
            use_safetensors=True,
        ).eval()
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        text = " ".join(str(error).split())[:300]
        raise ShardwrightError(f"{directory}: bitsandbytes cannot load it ({type(error).__name__}: {text})") from None
    import bitsandbytes

    kinds = (bitsandbytes.nn.Linear4bit, bitsandbytes.nn.Linear8bitLt)
    layers = tuple(name for name, module in model.named_modules() if isinstance(module, kinds))
    missed = sorted(set(quantized) - set(layers))
    if missed:
        rule = f"{len(missed)} matrices would stay in 16 bit: bitsandbytes replaces linear layers, not fused experts"
        fix = "use --scheme W4A16, which quantizes experts, or add them to --ignore"
        raise UsageError(ConfigError(where="method", value=missed[0], rule=rule, fix=fix))
    written = tempfile.TemporaryDirectory(prefix="shardwright-bitsandbytes-")
    model.save_pretrained(written.name)
    return BitsAndBytesModel(model=model, quantized_layers=layers, written=written)


def is_divided(engine: str | None) -> bool:
    """Return whether an engine (`deepspeed`, `fsdp2`, ...) shards the weights of this run: FSDP2, or ZeRO-3."""
    from transformers.integrations import is_deepspeed_zero3_enabled

    return engine == "fsdp2" or is_deepspeed_zero3_enabled()


@contextmanager
def on_host() -> Iterator[dict[str, Any]]:
    """Yield the arguments of `from_pretrained` that load a 4-bit model into host memory.

    Transformers rejects any `device_map` under ZeRO-3 (integrations/accelerate.py:135), which has no other effect on
    how a quantized model is loaded.
    """
    with without_zero3():
        yield {"device_map": {"": "cpu"}}


def place_for_division(model: PreTrainedModel) -> Any:
    """Prepare a 4-bit model in host memory for the engine that shards it, and return it.

    Under ZeRO-3 its weights are partitioned here; those of other models are partitioned while they are built.
    """
    from transformers.integrations import deepspeed_config, is_deepspeed_zero3_enabled

    # Accelerate rejects a 4-bit model on another device than the one it trains on (accelerator.py:1861).
    model.__dict__.pop("hf_device_map", None)
    if is_deepspeed_zero3_enabled():
        import deepspeed
        from deepspeed.accelerator import get_accelerator

        deepspeed.zero.Init(module=model, config_dict_or_path=deepspeed_config())
        for parameter in model.parameters():
            if (scales := getattr(parameter, "quant_state", None)) is not None:
                scales.to(get_accelerator().current_device_name())
        read_weights_in_backward(model)
    return model


def read_weights_in_backward(model: PreTrainedModel) -> None:
    """Make the backward pass of each 4-bit layer read the weight that ZeRO-3 gathers for it.

    bitsandbytes 0.50.2 keeps a view of the weight on the node of its product (autograd/_functions.py:358, `MatMul4Bit`)
    and not among the saved tensors: neither ZeRO-3's release nor checkpointing frees it, and every rank would hold all
    4-bit weights from the forward pass to the end of the step. FSDP2 empties the storage itself.
    """
    from bitsandbytes.nn import Linear4bit

    def replace_kept_weight(module: torch.nn.Module, _: object, output: torch.Tensor) -> None:
        node = output.grad_fn
        # If the input's dtype differs from the product's, the layer casts the product before it returns it.
        for product in () if node is None else (node, *(before for before, _ in node.next_functions)):
            if type(product).__name__ == "MatMul4BitBackward":
                patches.assign("weight-read-in-backward", _WeightInBackward(module), on=product)

    for module in model.modules():
        if isinstance(module, Linear4bit):
            # Before DeepSpeed's hooks, which add nodes after the layer's output.
            module.register_forward_hook(replace_kept_weight, prepend=True)


class _WeightInBackward:
    """Replaces the pair that `MatMul4Bit.backward` unpacks: `None`, and the packed weight as a column."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    def __iter__(self) -> Iterator[Any]:
        return iter((None, self._module.weight.data.view(-1, 1)))
