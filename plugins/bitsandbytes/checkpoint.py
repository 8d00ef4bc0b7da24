"""NF4 and INT8 checkpoints by bitsandbytes 0.50.2, through Transformers 5.17.0."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...ds_configs.quantization.scheme import QuantizationScheme
from ...ds_configs.specs.errors import Fault, ShardwrightError, UsageError


def quiet_optional_kernels() -> None:
    """Keep bitsandbytes from telling on stderr, whenever it is imported, that it lacks an optional package.

    Seen with bitsandbytes 0.50.2 on processors with AVX512-BF16, without the package `kernels`
    (`backends/cpu/ops.py`): its own 4-bit kernel is slower and right.
    """
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def keep_layout(model: Any) -> Any:
    """Keep a model's 4-bit layers as they were loaded, and return the model.

    Seen with bitsandbytes 0.50.2 on processors with AVX512-BF16 (`nn/modules.py`, `Linear4bit.forward`): a pass in
    evaluation rounds the scales to bf16 in place, and saving rounds them again and misplaces them. A QLoRA run that
    is evaluated or saved in between then loses otherwise than one that is not.
    """
    from bitsandbytes.nn import Linear4bit

    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False
    return model


@dataclass(kw_only=True)
class BitsAndBytesModel:
    """A model in memory, and its checkpoint, which was written before the model ran for the first time.

    On processors with AVX512-BF16 the first forward pass of a 4-bit layer rearranges its codes and scales in place.
    What is saved after that has its scales transposed: on a small Llama perplexity went from 3.08 to 3.74.
    """

    model: Any
    """Transformers model with bitsandbytes' layers."""
    quantized_layers: tuple[str, ...]
    """Names of the matrices that are stored in 4 or 8 bit."""
    written: tempfile.TemporaryDirectory[str]
    """The checkpoint."""

    def save(self, directory: Path) -> None:
        """Move the checkpoint to its place; can be called once."""
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
    options: Mapping[str, Any],
    scratch: Path | None = None,
) -> BitsAndBytesModel:
    """Load a model with quantized layers and write its checkpoint at once.

    Args:
        directory: The model with its full weights.
        scheme: `NF4` or `BNB_INT8`.
        quantized: Linear layers that the scheme selects.
        dense: All other linear layers.
        dtype: Type of what stays dense and of computations.
        device: Where it runs.
        options: None are known.
        scratch: Where the checkpoint lies until it is asked for; default: the system's temporary directory.

    Raises:
        UsageError: options, or layers that bitsandbytes does not replace.
        ShardwrightError: Transformers cannot load the model so.
    """
    if options:
        names = ", ".join(options)
        rule = "is no option of bitsandbytes here, whose formats are fixed by the scheme"
        raise UsageError(Fault(where="method_options", value=names, rule=rule, fix="leave it out"))
    model = _load(directory, scheme, dense, dtype, device)
    found = tuple(name for name, module in model.named_modules() if _is_quantized(module))
    missed = sorted(set(quantized) - set(found))
    if missed:
        rule = f"{len(missed)} matrices would stay in 16 bit: bitsandbytes replaces linear layers, not fused experts"
        fix = "use --scheme W4A16, which quantizes experts, or add them to --ignore"
        raise UsageError(Fault(where="method", value=missed[0], rule=rule, fix=fix))
    written = tempfile.TemporaryDirectory(prefix="shardwright-bitsandbytes-", dir=scratch)
    model.save_pretrained(written.name)
    return BitsAndBytesModel(model=model, quantized_layers=found, written=written)


def _load(directory: Path, scheme: QuantizationScheme, skipped: Sequence[str], dtype: str, device: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    stored = getattr(torch, dtype)
    if scheme.weights.bits == 4:
        how = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=stored,
            llm_int8_skip_modules=list(skipped),
        )
    else:
        how = BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=list(skipped))
    try:
        model = AutoModelForCausalLM.from_pretrained(
            str(directory),
            quantization_config=how,
            dtype=stored,
            device_map={"": device},
            trust_remote_code=False,
            use_safetensors=True,
        )
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        text = " ".join(str(error).split())[:300]
        raise ShardwrightError(f"{directory}: bitsandbytes cannot load it ({type(error).__name__}: {text})") from None
    return model.eval()


def _is_quantized(module: Any) -> bool:
    import bitsandbytes

    return isinstance(module, bitsandbytes.nn.Linear4bit | bitsandbytes.nn.Linear8bitLt)
