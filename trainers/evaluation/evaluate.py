"""Evaluate a model on a text and compare it with a baseline; one model is in memory at a time."""

from __future__ import annotations

import gc
import logging
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...ds_configs.specs.errors import (
    ConfigError,
    InputError,
    RefusedInputError,
    ShardwrightError,
    UsageError,
    not_a_count,
)
from ...plugins.compressed_tensors import load_packed_zero_points
from ...plugins.huggingface_hub import ModelSource, model_directory, read_model_source, split_revision
from ...plugins.launching.messages import log_progress
from ...plugins.llm_compressor import without_bars
from ...plugins.planning import load_model_spec
from ...plugins.safetensors import read_checkpoint
from ...plugins.transformers.loading import (
    auto_class,
    check_weights,
    load_causal_lm,
    refuse_code,
    refuse_other_formats,
    text_classes,
)
from ..counting.counts import Estimate, exponential, token_mean
from ..data.models import (
    StartingModel,
    agreed_vocab_size,
    has_tokenizer,
    load_processor,
    load_tokenizer,
    positions_of,
)
from ..data.samples import collate
from ..data.sources import PYTHON_HELP, one_line
from ..formats.spqr import INDEX, QUANT_METHOD, SINGLE
from .measures import (
    ModelReader,
    TextRequest,
    TextWindows,
    measure_tokens,
    read_baseline,
    text_windows,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class EvalModel:
    """A causal language model that can be loaded."""

    role: str
    """`model` or `baseline`."""
    source: ModelSource
    config: PretrainedConfig
    """The configuration as Transformers reads it."""

    @property
    def name(self) -> str:
        return f"{self.role} {self.source.name}"

    @property
    def longest(self) -> int | None:
        """Number of token positions; `None` if the configuration has none."""
        return positions_of(self.config) or None

    @property
    def vocab_size(self) -> int:
        return int(self.config.get_text_config().vocab_size)

    @property
    def quant_method(self) -> str | None:
        """Library of the weights' format; `None` for plain weights."""
        stored = self.source.config.get("quantization_config") or {}
        return stored.get("quant_method") if isinstance(stored, dict) else None

    @property
    def has_tokenizer(self) -> bool:
        """Whether the model has a tokenizer; for Hub models this is assumed."""
        directory = Path(self.source.name)
        return not directory.is_dir() or has_tokenizer(directory)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Load the tokenizer; text is split into bytes if a local model has none."""
        source = StartingModel(model=self.source.name, revision=self.source.revision)
        return load_tokenizer(source, self.vocab_size)


def read_eval_model(name: str, role: str, *, revision: str | None) -> EvalModel:
    """Check from its configuration that a model can be loaded.

    Raises:
        UsageError: no such model exists, or it is not a causal language model.
        RefusedInputError: files are damaged, or the only weights are not safetensors.
        ShardwrightError: the Hub cannot be reached.
    """
    from transformers import AutoConfig

    try:
        source = read_model_source(name, revision=revision)
    except InputError as error:
        errors = [replace(each, where=role) if each.where == "model" else each for each in error.errors]
        raise type(error)(errors) from None
    refuse_code(source.config, f"{role} {source.name}")
    directory = Path(source.name)
    if source.revision is None and directory.exists():
        if directory.is_file():
            rule, fix = "is a configuration without weights", "pass the model's directory"
            raise UsageError(ConfigError(where=role, value=source.name, rule=rule, fix=fix))
        if not any(directory.glob("*.safetensors")):
            refuse_other_formats(directory, where=role)
            fix = "pass a trained model"
            raise UsageError(ConfigError(where=role, value=source.name, rule="has no weights", fix=fix))
        quantization = source.config.get("quantization_config") or source.config.get("compression_config") or {}
        # Files of the SpQR and low-rank format are checked while they are read.
        if quantization.get("quant_method") != QUANT_METHOD:
            check_weights(directory, quantized=bool(quantization))
    try:
        configuration = model_directory(source.name, revision=source.revision, weights=False)
        config = AutoConfig.from_pretrained(str(configuration), trust_remote_code=False)
    except (ValueError, OSError, KeyError) as error:
        raise RefusedInputError(ConfigError(where=role, value=name, rule=one_line(error))) from None
    architectures = tuple(getattr(config, "architectures", None) or ())
    is_causal = bool(text_classes() & set(architectures))
    if not architectures:
        is_causal = type(config) in auto_class(config)._model_mapping
    if not is_causal or getattr(config, "is_encoder_decoder", False):
        rule = f"{' or '.join(architectures) or config.model_type} is not a causal language model"
        fix = "pass a model such as LlamaForCausalLM"
        raise UsageError(ConfigError(where=role, value=name, rule=rule, fix=fix))
    return EvalModel(role=role, source=source, config=config)


def load_eval_model(model: EvalModel, directory: Path, *, dtype: str, device: str) -> PreTrainedModel:
    """Load the weights of a model for evaluation.

    compressed-tensors 0.19.0 decompresses a model in a hook of its first forward pass, which fails if a module's
    `forward` was replaced. Therefore one token is read here.

    Raises:
        RefusedInputError: weights are missing, unexpected or of another shape.
        ShardwrightError: Transformers cannot load the model; contains its reason.
    """
    import torch

    if model.quant_method == QUANT_METHOD:
        from ..formats.spqr import load_spqr

        small: PreTrainedModel = load_spqr(directory).to(device).eval()
        return small if dtype == "auto" else small.to(getattr(torch, dtype))
    if model.quant_method == "compressed-tensors":
        load_packed_zero_points()
    try:
        with without_bars():
            # An evaluation names the first token whose loss is not finite.
            name, revision = model.source.name, model.source.revision
            options: dict[str, Any] = {"dtype": dtype, "device_map": {"": device}}
            loaded = load_causal_lm(name, revision=revision, allow_nonfinite=True, **options)
            with torch.inference_mode():
                loaded.eval()(input_ids=torch.zeros(1, 1, dtype=torch.long, device=loaded.device))
    except ShardwrightError:
        raise
    except Exception as error:
        # The library of a format may raise anything.
        rule = f"cannot be loaded ({type(error).__name__}: {one_line(error)})"
        raise ShardwrightError(f"{model.role} = {model.source.name!r}: {rule}") from None
    return loaded


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredSizes:
    file_bytes: int
    """Of all safetensors files."""
    parameters: int
    """Weights, biases and embeddings of the model; scales and zero points do not count."""
    bits_per_parameter: float
    """Stored bits of all tensors, scales and tables included, per parameter."""


# The window of published GPTQ and AWQ tables, so that perplexities are comparable.
DEFAULT_SEQ_LEN = 2048
DEFAULT_WINDOWS = 64
_PACKAGES = ("shardwright", "torch", "transformers", "compressed-tensors", "bitsandbytes")

logger = logging.getLogger(__name__)


SCHEMA_VERSION = 1
"""Version of `evaluate --format json` and of `evaluation.json`."""
KL_SHARES = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999, 0.9995, 0.9998, 0.9999, 1.0)
"""Shares of the judged tokens for which the largest KL is reported."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextFacts:
    source: str
    seq_len_tokens: int
    windows: int
    available_windows: int
    """Windows of the complete text."""
    predicted_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelResult:
    name: str
    """Hub id or directory."""
    revision: str | None
    """Commit of a Hub model."""
    architecture: str
    quantization: str | None
    """Library and format of quantized weights; `None` for plain weights."""
    dtype: str
    """Type that the model computes in."""
    loss_nats_per_token: Estimate
    """Mean cross-entropy."""
    perplexity: Estimate
    sizes: StoredSizes


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Difference of a model from its baseline on the same tokens."""

    loss_difference_nats_per_token: Estimate
    """Cross-entropy of the model minus that of the baseline; standard error over paired windows."""
    loss_difference_is_significant: bool | None
    """Whether the difference exceeds two standard errors; `None` with a single window."""
    kl_nats_per_token: Estimate
    kl_nats_at_share: Mapping[str, float]
    """Quantiles of the tokens' KL by share of tokens; `1.0` is the maximum."""
    top1_agreement: Estimate
    compared_vocabulary: int
    """Vocabulary size of KL and agreement."""
    window_loss_differences_nats_per_token: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Evaluation:
    """Evaluation of a model, and of its baseline if there is one, on one text."""

    text: TextFacts
    model: ModelResult
    baseline: ModelResult | None
    """`None` without a baseline."""
    comparison: Comparison | None
    window_losses_nats_per_token: tuple[float, ...]
    """Mean cross-entropy of each window."""
    settings: Mapping[str, Any]
    """Batch size, device and so on."""
    versions: Mapping[str, str]
    seconds: float

    def __repr__(self) -> str:
        baseline = "" if self.baseline is None else f", baseline {self.baseline.name}"
        return f"<Evaluation of {self.model.name}{baseline}: perplexity {self.model.perplexity.value:.4g}>"

    def to_dict(self) -> dict[str, Any]:
        return {"schema_version": SCHEMA_VERSION} | asdict(self)


def default_device() -> str:
    import torch

    return "cuda:0" if torch.cuda.is_available() else "cpu"


def evaluate_model(
    source: str,
    *,
    baseline: str | None = None,
    dataset: str | None = None,
    text: TextRequest | TextWindows | None = None,
    seq_len: int | None = None,
    batch_size: int = 4,
    dtype: str = "auto",
    device: str | None = None,
    revision: str | None = None,
    baseline_revision: str | None = None,
) -> Evaluation:
    """Return perplexity, KL divergence and agreement with a baseline, and sizes.

    The baseline is read first. The inputs of its output head stay on the host (tokens · hidden width numbers) with the
    head itself, so that both models are never in memory together. Notes and progress are logged.

    Args:
        source: Hub id or directory of the model.
        baseline: Hub id or directory of the model to compare with, usually the original of `source`.
        dataset: Dataset as for `--dataset`: `ID[:config][#N]` of the Hub (split `test`), a file or directory of rows,
            or `python-help`. The first 64 windows are read. Default: `python-help`.
        text: Dataset with its split and number of windows; or tokenized windows.
        seq_len: Tokens per window. Default: 2048, or fewer if a model has fewer positions, or that of `TextWindows`.
        batch_size: Windows per forward pass; no result depends on it.
        dtype: Type to load weights as, or `auto` for the stored one.
        device: Such as `cuda:0` or `cpu`. Default: an accelerator if there is one.
        revision: Branch, tag or commit of a Hub model.
        baseline_revision: Branch, tag or commit of a Hub baseline.

    Raises:
        UsageError: models, text or numbers that cannot be used, all errors together.
        RefusedInputError: files of a model are corrupt or unsafe, or its outputs are not numbers.
        ShardwrightError: a model cannot be downloaded or loaded.
    """
    import torch

    start = time.perf_counter()
    request = text or TextRequest(dataset=dataset or PYTHON_HELP, num_samples=DEFAULT_WINDOWS)
    window_tokens = request.seq_len_tokens if isinstance(request, TextWindows) else seq_len
    errors: list[ConfigError] = []
    if isinstance(request, TextRequest):
        for number, value, least, why in (
            ("seq_len", seq_len, 2, ": the first token is not evaluated"),
            ("num_samples", request.num_samples, 1, ""),
        ):
            if value is not None and (error := not_a_count(number, value)):
                errors.append(error)
            elif value is not None and value < least:
                flag, rule = f"--{number.replace('_', '-')}", f"must be at least {least}{why}"
                errors.append(ConfigError(where=flag, value=value, rule=rule))
    if text is not None and dataset is not None:
        rule, fix = "cannot be combined with text", "pass TextRequest(dataset=...), or omit text"
        errors.append(ConfigError(where="dataset", value=dataset, rule=rule, fix=fix))
    if batch_size < 1:
        errors.append(ConfigError(where="--batch-size", value=batch_size, rule="must be at least 1"))
    if device is not None:
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:
            rule = f"torch cannot use this device ({' '.join(str(error).split())[:200]})"
            fix = "pass a device such as cpu or cuda:0"
            errors.append(ConfigError(where="--device", value=device, rule=rule, fix=fix))
    models = []
    for name, role, commit in ((source, "model", revision), (baseline, "baseline", baseline_revision)):
        if name is None:
            continue
        try:
            name, commit = split_revision(name, commit)
            models.append(read_eval_model(name, role, revision=commit))
        except UsageError as failed:
            errors += failed.errors
    for model in models:
        if window_tokens is not None and model.longest is not None and window_tokens > model.longest:
            rule, fix = f"{model.name} has {model.longest} positions", f"pass at most {model.longest}"
            errors.append(ConfigError(where="--seq-len", value=window_tokens, rule=rule, fix=fix))
    if errors:
        raise UsageError(errors)

    owner = next((model for model in models if model.has_tokenizer), models[0])
    tokenizer = owner.tokenizer()
    for model in models:
        if model is not owner and model.has_tokenizer:
            fix = "compare models of one family: KL and agreement need the same tokens"
            agreed_vocab_size(tokenizer, model.tokenizer(), roles=("model", "baseline"), fix=fix)
    largest = max(tokenizer.get_vocab().values())
    for model in models:
        if model is not owner and largest >= model.vocab_size:
            rule = f"{model.name} has {model.vocab_size} tokens, but the tokenizer's largest id is {largest}"
            raise UsageError(ConfigError(where="vocab_size", value=model.vocab_size, rule=rule))
    if owner is not models[0]:
        logger.info(f"{models[0].name} has no tokenizer: using the baseline's")
    processor = None
    if isinstance(request, TextWindows):
        windows = request
    else:
        limits = [model.longest for model in models if model.longest is not None]
        start_of_owner = StartingModel(model=owner.source.name, revision=owner.source.revision)
        processor = load_processor(start_of_owner, owner.config, tokenizer) if owner.has_tokenizer else None
        windows = text_windows(
            request, tokenizer, seq_len=seq_len or min([DEFAULT_SEQ_LEN, *limits]), processor=processor
        )
    device = device or default_device()
    batches = [
        collate(windows.windows[first : first + batch_size], processor=processor)
        for first in range(0, len(windows.windows), batch_size)
    ]

    def load(model: EvalModel) -> tuple[PreTrainedModel, dict[str, Any]]:
        """Return a loaded model, and the fields of its result that do not depend on the text."""
        log_progress(f"loading of the {model.role}", 0, 1)
        directory = model_directory(model.source.name, revision=model.source.revision)
        loaded = load_eval_model(model, directory, dtype=dtype, device=device)
        log_progress(f"loading of the {model.role}", 1, 1)
        files = {"index": INDEX, "single": SINGLE} if model.quant_method == QUANT_METHOD else {}
        tensors = read_checkpoint(directory, **files)
        parameters = load_model_spec(str(directory)).spec.parameter_count
        sizes = StoredSizes(
            file_bytes=sum(file.stat().st_size for file in {tensor.file for tensor in tensors.values()}),
            parameters=parameters,
            bits_per_parameter=sum(tensor.bits for tensor in tensors.values()) / parameters,
        )
        return loaded, {"dtype": str(loaded.dtype).removeprefix("torch."), "sizes": sizes}

    answers, baseline_fields = None, dict[str, Any]()
    if len(models) > 1:
        loaded, baseline_fields = load(models[1])
        answers = read_baseline(ModelReader(loaded, name=models[1].name), batches)
        del loaded
        gc.collect()
    loaded, fields = load(models[0])
    reader = ModelReader(loaded, name=models[0].name)
    measures = measure_tokens(reader, answers, batches, baseline_name=models[-1].name)
    sums = measures.window_sums(measures.loss_N)
    evaluated_baseline, comparison = None, None
    if measures.baseline_loss_N is not None:
        baseline_sums = measures.window_sums(measures.baseline_loss_N)
        evaluated_baseline = _model_result(models[1], baseline_sums, measures.counts, **baseline_fields)
        kl_N, agreement_N, vocabulary = measures.kl_N, measures.agreement_N, measures.compared_vocabulary
        assert kl_N is not None and agreement_N is not None and vocabulary is not None, "a baseline was read"
        differences = measures.window_sums(measures.loss_N.double() - measures.baseline_loss_N.double())
        difference, sorted_N = token_mean(differences, measures.counts), torch.sort(kl_N).values
        comparison = Comparison(
            loss_difference_nats_per_token=difference,
            loss_difference_is_significant=difference.is_significant,
            kl_nats_per_token=token_mean(measures.window_sums(kl_N), measures.counts),
            kl_nats_at_share={
                f"{share:g}": float(sorted_N[max(0, math.ceil(share * len(sorted_N)) - 1)]) for share in KL_SHARES
            },
            top1_agreement=token_mean(measures.window_sums(agreement_N), measures.counts),
            compared_vocabulary=vocabulary,
            window_loss_differences_nats_per_token=_means(differences, measures.counts),
        )
    versions = {}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return Evaluation(
        text=TextFacts(
            source=windows.source,
            seq_len_tokens=windows.seq_len_tokens,
            windows=len(windows.windows),
            available_windows=windows.available_windows,
            predicted_tokens=windows.predicted_tokens,
        ),
        model=_model_result(models[0], sums, measures.counts, **fields),
        baseline=evaluated_baseline,
        comparison=comparison,
        window_losses_nats_per_token=_means(sums, measures.counts),
        settings={"batch_size": batch_size, "device": device, "dtype": dtype},
        versions=versions,
        seconds=round(time.perf_counter() - start, 3),
    )


def _means(sums: Sequence[float], counts: Sequence[int]) -> tuple[float, ...]:
    return tuple(total / count for total, count in zip(sums, counts, strict=True))


def _model_result(model: EvalModel, sums: Sequence[float], counts: Sequence[int], **fields: Any) -> ModelResult:
    loss, method = token_mean(sums, counts), model.quant_method
    stored_format = method and model.source.config["quantization_config"].get("format")
    return ModelResult(
        name=model.source.name,
        revision=model.source.revision,
        architecture=(getattr(model.config, "architectures", None) or [model.config.model_type])[0],
        quantization=f"{method}, {stored_format}" if stored_format else method,
        loss_nats_per_token=loss,
        perplexity=exponential(loss),
        **fields,
    )
