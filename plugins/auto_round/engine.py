"""AutoRound on a model in memory and on tokens at hand (seen with auto-round 0.15.1 and transformers 5.17.0)."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...ds_configs.quantization.scheme import QuantizationScheme, WeightQuantization
from ...ds_configs.specs.errors import Fault, ShardwrightError, UsageError
from ..compressed_tensors.codes import code_range, to_upstream
from ..llm_compressor.engine import CompressedModel
from ..transformers.quantized_model import LayerProgress, ReportProgress

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
"""Options of SignRound that change how roundings are learned, and nothing about what is stored."""
_EXPECTED = ("amp is set to FALSE", "reset enable_torch_compile", "force the batch size", "`loss_type=None` was set")
"""Warnings about what this package asks for, or what a CPU always brings."""


@dataclass(kw_only=True)
class ForeignFormatModel:
    """A model with learned roundings whose checkpoint is one of GPTQ's or AWQ's."""

    model: Any
    """Transformers model whose weights are the rounded ones."""
    quantized_layers: tuple[str, ...]
    """Names of the matrices that were rounded."""
    stored_format: str
    """`gptq` or `awq`."""
    compressor: Any
    """AutoRound's object, which holds what it stores."""
    loads_in_transformers: bool = False
    """transformers 5.17.0 demands optimum for GPTQ and gptqmodel for AWQ, neither of which this package installs."""

    def save(self, directory: Path) -> None:
        """Pack the model in memory and write config and weights; can be called once."""
        with _contained(), _failing_as_error():
            self.compressor.save_quantized(str(directory), format=_FORMATS[self.stored_format], inplace=True)


def quantize_with_auto_round(
    model: Any,
    tokenizer: Any,
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
        tokenizer: Asked for by AutoRound; samples are tokens already.
        scheme: Integer weights with 16-bit activations.
        calibration: Samples with `input_ids`; those shorter than the common length are left out.
        batch_size: Samples of one step.
        options: Fields of SignRound, and `format`: `compressed-tensors` (default), `gptq` or `awq`.
        seed: Of the order of samples.
        report: Told once for each block.
        stored_names: Tensors of the checkpoint that the model came from, after which those of experts are named again.

    Raises:
        UsageError: unknown options, no samples, or layers that AutoRound leaves as they are.
        ShardwrightError: AutoRound gave up, or left a layer out.
    """
    names = _targets(model, scheme)
    stored = str(options.get("format", "compressed-tensors"))
    faults = _faults(model, names, scheme, calibration, options, stored)
    if faults:
        raise UsageError(faults)
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
    _check_rounded(model, names)
    # AutoRound computes in fp32 where the processor has no bf16, and leaves the whole model in it.
    for name, value in model.named_parameters():
        value.data = value.data.to(types[name])
    model.eval()
    if stored != "compressed-tensors":
        return ForeignFormatModel(model=model, quantized_layers=names, stored_format=stored, compressor=compressor)
    _hand_over(model, scheme, names)
    return CompressedModel(model=model, quantized_layers=names, stored_names=stored_names)


def equal_rows(rows: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return rows cut to the one length that keeps most tokens; AutoRound batches rows without padding.

    >>> equal_rows([[1], [1, 2, 3, 4], [5, 6, 7]])
    [[1, 2, 3], [5, 6, 7]]
    """
    lengths = sorted((len(row) for row in rows), reverse=True)
    _, best = max((length * (rank + 1), length) for rank, length in enumerate(lengths))
    return [list(row[:best]) for row in rows if len(row) >= best]


def _targets(model: Any, scheme: QuantizationScheme) -> tuple[str, ...]:
    import torch
    from compressed_tensors.utils import match_named_modules

    found = match_named_modules(model, list(scheme.targets), list(scheme.ignore))
    return tuple(name for name, module in found if isinstance(module, torch.nn.Linear))


def _faults(
    model: Any,
    names: Sequence[str],
    scheme: QuantizationScheme,
    calibration: Sequence[Any],
    options: Mapping[str, Any],
    stored: str,
) -> list[Fault]:
    rule, fix = "is no option of autoround", f"known: format, {', '.join(_OPTIONS)}"
    unknown = [name for name in options if name not in ("format", *_OPTIONS)]
    faults = [Fault(where="method_options", value=name, rule=rule, fix=fix) for name in unknown]
    if stored not in _FORMATS:
        faults.append(Fault(where="method_options.format", value=stored, rule=f"must be one of {', '.join(_FORMATS)}"))
    weights = scheme.weights
    if stored == "awq" and (weights.bits != 4 or weights.strategy != "group"):
        rule = "stores 4-bit weights in groups alone"
        faults.append(Fault(where="method_options.format", value=stored, rule=rule, fix="use W4A16, or format: gptq"))
    if stored == "gptq" and weights.bits not in (2, 3, 4, 8):
        rule = f"stores 2, 3, 4 or 8 bits, and {scheme.name} has {weights.bits}"
        faults.append(Fault(where="method_options.format", value=stored, rule=rule, fix="use W4A16"))
    if not any(sample["input_ids"] for sample in calibration):
        rule, fix = "autoround needs text to calibrate on", "name one with --dataset, such as python-help"
        faults.append(Fault(where="dataset", rule=rule, fix=fix))
    head = model.get_output_embeddings()
    heads = [name for name in names if model.get_submodule(name) is head]
    if heads:
        rule = "learns the rounding of decoder layers alone, and the head is among the targets"
        faults.append(Fault(where="method", value="autoround", rule=rule, fix=f"add {heads[0]} to --ignore"))
    return faults


def _compressor(
    model: Any,
    tokenizer: Any,
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
    """A list is taken as it is; text would be split by AutoRound, and a name looked up on the Hub.

    The last place is masked as AutoRound masks it itself: some models drop a mask of ones, and its blocks then miss it.
    """
    import torch

    batches = []
    for start in range(0, len(rows), batch_size):
        ids_BS = torch.tensor([list(row) for row in rows[start : start + batch_size]])
        mask_BS = torch.ones_like(ids_BS)
        mask_BS[:, -1] = 0
        batches.append({"input_ids": ids_BS, "attention_mask": mask_BS})
    return batches


def _check_rounded(model: Any, names: Sequence[str]) -> None:
    left = [name for name in names if not hasattr(model.get_submodule(name), "scale")]
    if left:
        shown = ", ".join(left[:3])
        raise ShardwrightError(
            f"autoround left {len(left)} of {len(names)} matrices in 16 bit ({shown}); add them to --ignore, or use "
            "--method gptq"
        )


def _hand_over(model: Any, scheme: QuantizationScheme, names: Sequence[str]) -> None:
    """Give the learned scales to compressed-tensors' modules, which then round and save as those of every method.

    AutoRound's own export writes fp32 dense weights on a CPU. Its zero points count codes from 0, those of
    compressed-tensors from the lowest code; its symmetric grids may have negative scales, which both sides allow.
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
    """Stands where AutoRound draws a bar, and reports blocks instead."""

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
    from auto_round.compressors import orchestrator

    original = orchestrator.tqdm
    orchestrator.tqdm = lambda steps: _Bar(steps, report=report)
    try:
        yield
    finally:
        orchestrator.tqdm = original


@contextlib.contextmanager
def _failing_as_error() -> Iterator[None]:
    """AutoRound ends the process by `exit(-1)` where it finds no data, and otherwise raises what torch raised."""
    try:
        yield
    except SystemExit:
        raise ShardwrightError("autoround gave up; its last message says why") from None
    except (ValueError, RuntimeError, NotImplementedError, AttributeError, KeyError) as error:
        text = " ".join(str(error).split())[:300]
        raise ShardwrightError(f"autoround failed ({type(error).__name__}: {text})") from error


@contextlib.contextmanager
def _contained() -> Iterator[None]:
    """Pass warnings on to `logging`, and undo what AutoRound leaves behind in the process.

    auto-round 0.15.1 `compressors/base.py`: switches torch to deterministic algorithms and sets
    `CUBLAS_WORKSPACE_CONFIG`; `logger.py`: prints from INFO on, in colours, to stderr.
    """
    import torch
    from auto_round.logger import logger

    handlers, variable = list(logger.handlers), os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    logger.handlers = [_PassOn(logging.WARNING)]
    try:
        with torch.random.fork_rng(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="In CPU autocast, but the target dtype is not supported")
            yield
    finally:
        logger.handlers = handlers
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        if variable is None:
            os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


class _PassOn(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if not text.startswith(_EXPECTED) and "already exists, this may cause" not in text:
            _LOG.log(record.levelno, "auto-round: %s", text)
