"""AutoRound on a model in memory and on tokenized samples (observed with auto-round 0.15.1, transformers 5.17.0)."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..ds_configs.quantization.scheme import QuantizationScheme, WeightQuantization
from ..ds_configs.specs.errors import ConfigError, ShardwrightError, UsageError
from . import patches
from .compressed_tensors.codes import code_range, to_upstream
from .llm_compressor.engine import CompressedModel
from .transformers.quantized_model import LayerProgress, ReportProgress

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_LOG = logging.getLogger(__name__)
_FORMATS = {"compressed-tensors": None, "gptq": "auto_gptq", "awq": "auto_awq"}
_OPTIONS = (
    "iters",
    "lr",
    "minmax_lr",
    "momentum",
    "nblocks",
    "gradient_accumulate_steps",
    "enable_minmax_tuning",
    "enable_quanted_input",
)
"""Options of SignRound that change how roundings are learned, but not the stored format."""
_EXPECTED = ("amp is set to FALSE", "reset enable_torch_compile", "force the batch size", "`loss_type=None` was set")
"""Warnings about settings that Shardwright chooses, or that always occur on a CPU."""


@dataclass(kw_only=True)
class ForeignFormatModel:
    """A model with learned roundings whose checkpoint has the format of GPTQ or AWQ."""

    model: Any
    """Transformers model with rounded weights."""
    quantized_layers: tuple[str, ...]
    """Names of the matrices that were rounded."""
    stored_format: str
    """`gptq` or `awq`."""
    compressor: Any
    """AutoRound's object, which writes the checkpoint."""
    loads_in_transformers: bool = False
    """transformers 5.17.0 requires optimum for GPTQ and gptqmodel for AWQ, which Shardwright does not install."""

    def save(self, directory: Path) -> None:
        """Pack the model in memory and write config and weights; can be called once."""
        with _contained(), _failing_as_error():
            self.compressor.save_quantized(str(directory), format=_FORMATS[self.stored_format], inplace=True)


def quantize_with_auto_round(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    scheme: QuantizationScheme,
    *,
    calibration: Sequence[Mapping[str, Sequence[int]]],
    batch_size: int,
    options: Mapping[str, Any],
    seed: int,
    report: ReportProgress,
    stored_names: Collection[str] = (),
) -> CompressedModel | ForeignFormatModel:
    """Learn each rounding and each range by signed gradient descent, block by block (arXiv 2309.05516).

    Args:
        model: Transformers model with its full weights; changed in place, also by a run that fails.
        tokenizer: Required by AutoRound, but not used for tokenized samples.
        scheme: Integer weights with 16-bit activations.
        calibration: Samples with `input_ids`; samples shorter than the common length are ignored.
        batch_size: Samples per step.
        options: Fields of SignRound, and `format`: `compressed-tensors` (default), `gptq` or `awq`.
        seed: Seed of the order of samples.
        report: Called once for each block.
        stored_names: Tensor names of the original checkpoint, to restore the names of experts.

    Raises:
        UsageError: unknown options, no samples, or layers that AutoRound does not support.
        ShardwrightError: AutoRound failed, or skipped a layer.
    """
    import torch
    from compressed_tensors.utils import match_named_modules

    matches = match_named_modules(model, list(scheme.targets), list(scheme.ignore))
    names = tuple(name for name, module in matches if isinstance(module, torch.nn.Linear))
    stored = str(options.get("format", "compressed-tensors"))
    errors = _errors(model, names, scheme, calibration, options, stored)
    if errors:
        raise UsageError(errors)
    types = {name: value.dtype for name, value in model.named_parameters()}
    rows = equal_rows([list(sample["input_ids"]) for sample in calibration])
    tuning = {key: value for key, value in options.items() if key != "format"}
    with _contained(), _progress(report), _failing_as_error():
        compressor = _compressor(
            model,
            tokenizer,
            scheme,
            names,
            rows=rows,
            batch_size=batch_size,
            seed=seed,
            tuning=tuning,
            scale_dtype=model.dtype if stored == "compressed-tensors" else "fp16",
        )
        compressor.quantize()
    if skipped := [name for name in names if not hasattr(model.get_submodule(name), "scale")]:
        raise ShardwrightError(
            f"autoround skipped {len(skipped)} of {len(names)} matrices ({', '.join(skipped[:3])}); add them to "
            "--ignore, or use --method gptq"
        )
    # AutoRound computes in fp32 if the processor has no bf16, and does not convert the model back.
    for name, value in model.named_parameters():
        value.data = value.data.to(types[name])
    model.eval()
    if stored != "compressed-tensors":
        return ForeignFormatModel(model=model, quantized_layers=names, stored_format=stored, compressor=compressor)
    _hand_over(model, scheme, names)
    return CompressedModel(model=model, quantized_layers=names, stored_names=stored_names)


def equal_rows(rows: Sequence[Sequence[int]]) -> list[list[int]]:
    """Truncate rows to the one length that keeps most tokens, because AutoRound batches rows without padding.

    >>> equal_rows([[1], [1, 2, 3, 4], [5, 6, 7]])
    [[1, 2, 3], [5, 6, 7]]
    """
    lengths = sorted((len(row) for row in rows), reverse=True)
    _, best = max((length * (rank + 1), length) for rank, length in enumerate(lengths))
    return [list(row[:best]) for row in rows if len(row) >= best]


def _errors(
    model: PreTrainedModel,
    names: Sequence[str],
    scheme: QuantizationScheme,
    calibration: Sequence[Any],
    options: Mapping[str, Any],
    stored: str,
) -> list[ConfigError]:
    rule, fix = "is not an option of autoround", f"use format, {', '.join(_OPTIONS)}"
    unknown = [name for name in options if name not in ("format", *_OPTIONS)]
    errors = [ConfigError(where="method_options", value=name, rule=rule, fix=fix) for name in unknown]
    if stored not in _FORMATS:
        errors.append(
            ConfigError(where="method_options.format", value=stored, rule=f"must be one of {', '.join(_FORMATS)}")
        )
    weights = scheme.weights
    if stored == "awq" and (weights.bits != 4 or weights.strategy != "group"):
        rule = "stores only 4-bit weights in groups"
        errors.append(
            ConfigError(where="method_options.format", value=stored, rule=rule, fix="use W4A16, or format: gptq")
        )
    if stored == "gptq" and weights.bits not in (2, 3, 4, 8):
        rule = f"stores 2, 3, 4 or 8 bits, and {scheme.name} has {weights.bits}"
        errors.append(ConfigError(where="method_options.format", value=stored, rule=rule, fix="use W4A16"))
    if not any(sample["input_ids"] for sample in calibration):
        rule, fix = "autoround needs text for calibration", "pass --dataset, such as python-help"
        errors.append(ConfigError(where="dataset", rule=rule, fix=fix))
    head = model.get_output_embeddings()
    heads = [name for name in names if model.get_submodule(name) is head]
    if heads:
        rule = "learns the rounding only of decoder layers, but the head is among the targets"
        errors.append(ConfigError(where="method", value="autoround", rule=rule, fix=f"add {heads[0]} to --ignore"))
    return errors


def _compressor(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    scheme: QuantizationScheme,
    names: Sequence[str],
    *,
    rows: Sequence[Sequence[int]],
    batch_size: int,
    seed: int,
    tuning: Mapping[str, Any],
    scale_dtype: Any,
) -> Any:
    import torch
    from auto_round import AutoRound
    from auto_round.algorithms.quantization.sign_round.config import SignRoundConfig

    chosen = set(names)
    dense = {
        name: {"bits": 16, "act_bits": 16, "data_type": "fp"}
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name not in chosen
    }
    return AutoRound(
        model,
        tokenizer=tokenizer,
        scheme=_upstream_scheme(scheme.weights),
        alg_configs=SignRoundConfig(**tuning),
        layer_config=dense,
        dataset=_batches(rows, batch_size),
        nsamples=len(rows),
        seqlen=len(rows[0]),
        batch_size=min(batch_size, len(rows)),
        device_map=str(model.device),
        enable_torch_compile=False,
        scale_dtype=scale_dtype,
        seed=seed,
    )


def _upstream_scheme(weights: WeightQuantization) -> dict[str, Any]:
    size = {"channel": -1, "tensor": 0}.get(weights.strategy, weights.group_size)
    named = {"bits": weights.bits, "group_size": size, "sym": weights.symmetric}
    return {**named, "data_type": "int", "act_bits": 16}


def _batches(rows: Sequence[Sequence[int]], batch_size: int) -> list[dict[str, Any]]:
    """Return batches as a list, which AutoRound uses directly instead of splitting text or loading a data set.

    The last position is masked, as AutoRound does: some models drop a mask of ones, which its blocks then lack.
    """
    import torch

    batches = []
    for start in range(0, len(rows), batch_size):
        ids_BS = torch.tensor([list(row) for row in rows[start : start + batch_size]])
        mask_BS = torch.ones_like(ids_BS)
        mask_BS[:, -1] = 0
        batches.append({"input_ids": ids_BS, "attention_mask": mask_BS})
    return batches


def _hand_over(model: PreTrainedModel, scheme: QuantizationScheme, names: Sequence[str]) -> None:
    """Copy the learned scales to compressed-tensors' modules, which round and save like those of other methods.

    AutoRound's own export writes fp32 dense weights on a CPU. Its zero points count codes from 0, those of
    compressed-tensors from the lowest code. Its symmetric grids may have negative scales, which both support.
    """
    import torch
    from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus, apply_quantization_config

    config = QuantizationConfig(
        config_groups={"group_0": to_upstream(scheme)},
        ignore=list(scheme.ignore),
        quantization_status=QuantizationStatus.INITIALIZED,
    )
    apply_quantization_config(model, config, show_progress=False)
    lowest, _ = code_range(scheme.weights.bits)
    for name in names:
        module = model.get_submodule(name)
        scale, zero_point = module.scale, module.zp
        del module.scale, module.zp
        with torch.no_grad():
            module.weight_scale.copy_(scale.reshape(module.weight_scale.shape))
            if not scheme.weights.symmetric:
                shift = torch.as_tensor(zero_point, device=scale.device).expand_as(scale) + lowest
                module.weight_zero_point.copy_(shift.reshape(module.weight_zero_point.shape))
        module.quantization_status = QuantizationStatus.FROZEN


class _Bar:
    """Replaces AutoRound's progress bar, and reports blocks."""

    def __init__(self, steps: Sequence[int], *, report: ReportProgress) -> None:
        self._count, self._done, self._report = len(steps), 0, report

    def set_description(self, text: str) -> None:
        if self._done < self._count:
            name = text.removeprefix("Quantizing ")
            step = LayerProgress(index=self._done, count=self._count, stage="quantizing", names=(name,))
            self._report(step)

    def update(self, count: int) -> None:
        self._done += count

    def close(self) -> None:
        self._report(LayerProgress(index=max(self._count - 1, 0), count=self._count, stage="done"))


@contextlib.contextmanager
def _progress(report: ReportProgress) -> Iterator[None]:
    with patches.applied("autoround-progress", lambda _: lambda steps: _Bar(steps, report=report)):
        yield


@contextlib.contextmanager
def _failing_as_error() -> Iterator[None]:
    """Convert AutoRound's errors: it calls `exit(-1)` if it finds no data, and otherwise raises torch's errors."""
    try:
        yield
    except SystemExit:
        raise ShardwrightError("autoround failed; its last message has the reason") from None
    except (ValueError, RuntimeError, NotImplementedError, AttributeError, KeyError) as error:
        text = " ".join(str(error).split())[:300]
        raise ShardwrightError(f"autoround failed ({type(error).__name__}: {text})") from error


@contextlib.contextmanager
def _contained() -> Iterator[None]:
    """Forward warnings to `logging`, and undo AutoRound's changes to the process.

    auto-round 0.15.1 switches torch to deterministic algorithms and sets `CUBLAS_WORKSPACE_CONFIG`
    (`compressors/base.py`), and prints INFO messages in colour to stderr (`logger.py`).
    """
    import torch

    variable = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    own_handlers = patches.applied("autoround-log", lambda _: [_PassOn(logging.WARNING)], resets=True)
    try:
        with own_handlers, torch.random.fork_rng(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="In CPU autocast, but the target dtype is not supported")
            yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        if variable is None:
            os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


class _PassOn(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if not text.startswith(_EXPECTED) and "already exists, this may cause" not in text:
            _LOG.log(record.levelno, "auto-round: %s", text)
