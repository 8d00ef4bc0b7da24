"""Evaluate a model on a text and compare it with a baseline; one model is in memory at a time.

`evaluate_model` checks the request and reads the models in this process, in vLLM, or on ranks that share the batches.
"""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import TypeAdapter

from ...ds_configs.plan.notebook import result_html
from ...ds_configs.specs.errors import ConfigError, UsageError
from ...ds_configs.specs.units import gigabytes
from ...plugins.huggingface_hub.hub import split_revision
from ...plugins.launching.messages import log_progress
from ...plugins.lm_eval import TaskRequest, TaskScore, run_task, task_errors
from ...plugins.planning.from_names import installed_versions
from ..counting.estimates import Estimate, exponential, token_mean
from ..data.sources import PYTHON_HELP
from ..formats.merge import merged_directory, opened_if_adapter
from ..reports.runs import evaluation_table, verdict
from ..runs.launch import ONE_PROCESS, Replicas, run_replicas
from ..runs.share import ALONE, Share, ShareTask
from .in_vllm import engine_conflicts, engine_for, read_in_vllm
from .loading import (
    EvalModel,
    StoredSizes,
    load_eval_model,
    local_directory,
    read_eval_model,
    shared_tokenizer,
    stored_sizes,
)
from .measures import (
    AnswerSource,
    Batches,
    ModelReader,
    StoredAnswers,
    TextRequest,
    TextWindows,
    TokenMeasures,
    measure_tokens,
    number_errors,
    text_windows,
)
from .speed import Speed, measure_speed

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

EvaluationEngine = Literal["transformers", "vllm"]
# The window of published GPTQ and AWQ tables, so that perplexities are comparable.
DEFAULT_SEQ_LEN = 2048
DEFAULT_WINDOWS = 64
_PACKAGES = ("shardwright", "torch", "transformers", "compressed-tensors", "bitsandbytes", "lm-eval")
_LARGE_BYTES = 10**9

logger = logging.getLogger(__name__)


SCHEMA_VERSION = 1
"""Version of `evaluate --format json` and of `evaluation.json`."""
KL_SHARES = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999, 0.9995, 0.9998, 0.9999, 1.0)
"""Shares of the judged tokens for which the largest KL is reported."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextFacts:
    """Text of an evaluation."""

    source: str
    seq_len_tokens: int
    stride_tokens: int
    """From one window's start to the next."""
    windows: int
    available_windows: int
    """Windows of the complete text."""
    predicted_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelResult:
    """Measures of one model."""

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
    speed: Speed | None
    """On this machine; `None` if it was not measured."""
    tasks: tuple[TaskScore, ...]


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

    def _repr_html_(self) -> str:
        data = self.to_dict()
        table = evaluation_table(data)
        return result_html(self.model.name, table.headings, table.rows, *filter(None, [verdict(data)]))

    def to_dict(self) -> dict[str, Any]:
        return {"schema_version": SCHEMA_VERSION} | asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalRun:
    """Settings that the model and the baseline share."""

    batches: Batches
    dtype: str
    """Type to load weights as, or `auto`."""
    device: str
    measure_speeds: bool
    """Whether the first rank measures tokens/s and memory while the others wait."""
    tasks: TaskRequest | None
    share: Share = ALONE


@dataclass(kw_only=True)
class EvalResult:
    """Measurements of a model while it was in memory."""

    model: EvalModel
    dtype: str
    sizes: StoredSizes
    speed: Speed | None = None
    tasks: tuple[TaskScore, ...] = ()
    """Complete on the first rank."""


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
    engine: EvaluationEngine = "transformers",
    tasks: TaskRequest | None = None,
    revision: str | None = None,
    baseline_revision: str | None = None,
    measure_speeds: bool = True,
    replicas: Replicas = ONE_PROCESS,
) -> Evaluation:
    """Return perplexity, KL divergence and agreement with a baseline, sizes and speeds.

    The baseline is read first. The inputs of its output head stay on the host (tokens · hidden width numbers) with the
    head itself, so that both models are never in memory together. Notes and progress are logged.

    Args:
        source: Hub id or directory of the model, or of a LoRA adapter, which is merged into its base.
        baseline: Hub id or directory of the model to compare with, usually the original of `source`.
        dataset: Dataset as for `--dataset`: `ID[:config][#N]` of the Hub (split `test`), a file or directory of rows,
            or `python-help`. The first 64 windows are read. Default: `python-help`.
        text: Text instead of a dataset, to select its split, stride or number of windows; or tokenized windows.
        seq_len: Tokens per window. Default: 2048, or fewer if a model has fewer positions, or that of `TextWindows`.
        batch_size: Windows per forward pass; no result depends on it.
        dtype: Type to load weights as, or `auto` for the stored one.
        device: Such as `cuda:0` or `cpu`. Default: an accelerator if there is one.
        engine: `transformers`, or `vllm`, which must be on PATH and reads the windows in its own environment.
        tasks: Tasks of lm-evaluation-harness.
        revision: Branch, tag or commit of a Hub model.
        baseline_revision: Branch, tag or commit of a Hub baseline.
        measure_speeds: Whether to measure tokens/s and memory.
        replicas: Processes that share the batches. Results are bit-identical to those of one process on the same
            hardware with as many threads.

    Raises:
        UsageError: models, text or numbers that cannot be used, all errors together.
        RefusedInputError: files of a model are corrupt or unsafe, or its outputs are not numbers.
        ShardwrightError: a model cannot be downloaded or loaded, or the engine rejects it.
    """
    import torch

    start = time.perf_counter()
    with ExitStack() as merged:
        request = text or TextRequest(dataset=dataset or PYTHON_HELP, num_samples=DEFAULT_WINDOWS)
        window_tokens = request.seq_len_tokens if isinstance(request, TextWindows) else seq_len
        errors = number_errors(request, seq_len) if isinstance(request, TextRequest) else []
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
        errors += replicas.errors(device=device)
        if engine == "vllm":
            errors += engine_conflicts(baseline=baseline, tasks=tasks, device=device, replicas=replicas)
        models = []
        for name, role, commit in ((source, "model", revision), (baseline, "baseline", baseline_revision)):
            if name is None:
                continue
            try:
                name, commit = split_revision(name, commit)
                if (adapter := opened_if_adapter(name, revision=commit)) is None:
                    models.append(read_eval_model(name, role, revision=commit))
                else:
                    # Merged below, after all other checks.
                    base = adapter.source
                    models.append(replace(read_eval_model(base.name, role, revision=base.revision), adapter=adapter))
            except UsageError as error:
                errors += error.errors
        for model in models:
            if window_tokens is not None and model.longest is not None and window_tokens > model.longest:
                rule, fix = f"{model.name} has {model.longest} positions", f"pass at most {model.longest}"
                errors.append(ConfigError(where="--seq-len", value=window_tokens, rule=rule, fix=fix))
        # vLLM runs no tasks, which is an error above; checking their names takes ten seconds.
        if tasks is not None and engine != "vllm":
            errors += task_errors(tasks)
        if errors:
            raise UsageError(errors)

        serving = engine_for(models[0]) if engine == "vllm" else None
        tokenizer = shared_tokenizer(models)
        if len(models) > 1 and models[1].has_tokenizer and not models[0].has_tokenizer:
            logger.info(f"{models[0].name} has no tokenizer: using the baseline's")
        if isinstance(request, TextWindows):
            windows = request
        else:
            limits = [model.longest for model in models if model.longest is not None]
            windows = text_windows(request, tokenizer, seq_len=seq_len or min([DEFAULT_SEQ_LEN, *limits]))
        for index, model in enumerate(models):
            if model.adapter is not None:
                directory = merged.enter_context(merged_directory(model.adapter))
                complete = read_eval_model(str(directory), model.role, revision=None)
                models[index] = replace(complete, adapter=model.adapter)
        run = EvalRun(
            batches=Batches(windows=windows.windows, size=batch_size),
            dtype=dtype,
            device=device or ("cpu" if serving else default_device()),
            measure_speeds=measure_speeds,
            tasks=tasks,
        )
        baseline_result: EvalResult | None = None
        if serving is not None:
            # The process of vLLM chooses device and type.
            weights = local_directory(models[0])
            log_progress("reading by vLLM", 0, 1)
            served = read_in_vllm(
                serving, models[0], weights, windows,
                batch_size=batch_size, dtype=dtype, measure_speeds=measure_speeds,
            )  # fmt: skip
            log_progress("reading by vLLM", 1, 1)
            sizes = stored_sizes(weights)
            measures, run = served.measures, replace(run, device=served.device)
            result = EvalResult(model=models[0], dtype=served.dtype, sizes=sizes, speed=served.speed)
        elif replicas.are_launched:
            measures, result, baseline_result = _read_in_ranks(replicas, models, run)
        else:
            measures, result, baseline_result = _read_models(models, run, lambda: tokenizer)
        sums = measures.window_sums(measures.loss_N)
        evaluated_baseline, comparison = None, None
        if baseline_result is not None:
            assert measures.baseline_loss_N is not None, "a baseline was read"
            baseline_sums = measures.window_sums(measures.baseline_loss_N)
            evaluated_baseline = _model_result(baseline_result, baseline_sums, measures.counts)
            comparison = _comparison(measures)
        versions = {}
        for package in _PACKAGES:
            with suppress(PackageNotFoundError):
                versions[package] = version(package)
        return Evaluation(
            text=TextFacts(
                source=windows.source,
                seq_len_tokens=windows.seq_len_tokens,
                stride_tokens=windows.stride_tokens,
                windows=len(windows.windows),
                available_windows=windows.available_windows,
                predicted_tokens=windows.predicted_tokens,
            ),
            model=_model_result(result, sums, measures.counts),
            baseline=evaluated_baseline,
            comparison=comparison,
            window_losses_nats_per_token=_means(sums, measures.counts),
            settings={"engine": engine, "batch_size": run.batches.size, "device": run.device, "dtype": run.dtype},
            versions=versions | ({} if serving is None else dict(serving.installed.versions)),
            seconds=round(time.perf_counter() - start, 3),
        )


def _read_models(
    models: Sequence[EvalModel], run: EvalRun, tokenizer: Callable[[], PreTrainedTokenizerBase]
) -> tuple[TokenMeasures, EvalResult, EvalResult | None]:
    """Read with the baseline first, if there is one; every rank of a share must call it. The first has all results."""
    answers, baseline_result = None, None
    if len(models) > 1:
        answers, baseline_result = _read_baseline(models[1], run, tokenizer)
        # Free what the frames of the baseline held.
        gc.collect()
    model, result = _load(models[0], run)
    reader = ModelReader(model, run.batches, name=models[0].name)
    measures = measure_tokens(reader, answers, run.batches, share=run.share)
    _measure_speed_and_tasks(model, result, run, tokenizer)
    return measures, result, baseline_result


def _read_baseline(
    baseline: EvalModel, run: EvalRun, tokenizer: Callable[[], PreTrainedTokenizerBase]
) -> tuple[AnswerSource, EvalResult]:
    """Read everything with the baseline; it stays in memory if its head cannot be separated."""
    model, result = _load(baseline, run)
    reader = ModelReader(model, run.batches, name=baseline.name)
    rows: dict[int, torch.Tensor] = {}
    total = len(run.batches)
    for index in run.share.indices(total):
        answers = reader.answers(index)
        if reader.head is None:
            break
        rows[index] = answers.rows_ND.cpu()
        log_progress("reading by the baseline", min(total, index + run.share.ranks), total)
    if not all(run.share.by_rank(reader.head is not None)):
        # A single batch on any rank decides how all ranks read.
        reader.head = None
        reader.ways.clear()
    _measure_speed_and_tasks(model, result, run, tokenizer)
    if reader.head is None:
        logger.info(f"{baseline.name}: its output head cannot run separately, so both models stay in memory")
        return reader, result
    stored_bytes = sum(states.nbytes for states in rows.values())
    if stored_bytes >= _LARGE_BYTES:
        logger.info(
            f"{baseline.name}: {gigabytes(stored_bytes)} GB of hidden states are kept on the host; lower --num-samples "
            "to reduce that"
        )
    return StoredAnswers(name=baseline.name, rows=rows, head=reader.head, device=model.device), result


def _load(model: EvalModel, run: EvalRun) -> tuple[PreTrainedModel, EvalResult]:
    directory = local_directory(model)
    log_progress(f"loading of the {model.role}", 0, 1)
    loaded = load_eval_model(model, directory, dtype=run.dtype, device=run.device)
    log_progress(f"loading of the {model.role}", 1, 1)
    dtype = str(loaded.dtype).removeprefix("torch.")
    return loaded, EvalResult(model=model, dtype=dtype, sizes=stored_sizes(directory))


def _measure_speed_and_tasks(
    model: PreTrainedModel, result: EvalResult, run: EvalRun, tokenizer: Callable[[], PreTrainedTokenizerBase]
) -> None:
    """Time the model on the first rank, and distribute the tasks over the ranks."""
    role, share = result.model.role, run.share
    if run.measure_speeds:
        # Ranks that read or load the next model would disturb the measurement.
        share.wait()
        if share.is_first:
            log_progress(f"timing of the {role}", 0, 1)
            result.speed = measure_speed(model, run.batches.windows[0])
            log_progress(f"timing of the {role}", 1, 1)
        share.wait()
    if run.tasks is not None:
        names, size = run.tasks.names, run.batches.size
        log_progress(f"tasks of the {role}", 0, 1)
        own = [
            run_task(model, tokenizer(), run.tasks, names[index], batch_size=size)
            for index in share.indices(len(names))
        ]
        scores = [score for scored in share.gathered(own) or () for score in scored]
        # A task that is requested itself and in a group appears once.
        result.tasks = tuple({(score.task, score.metric): score for score in reversed(scores)}.values())[::-1]
        log_progress(f"tasks of the {role}", 1, 1)


_MEASURES, _RESULTS = "measures.safetensors", "results.json"
_TASKS: TypeAdapter[TaskRequest | None] = TypeAdapter(TaskRequest | None)


def _read_in_ranks(
    replicas: Replicas, models: Sequence[EvalModel], run: EvalRun
) -> tuple[TokenMeasures, EvalResult, EvalResult | None]:
    """Read on ranks, each with its share of the batches; every machine gets the measures of all of them."""
    from safetensors.torch import load_file

    # Download once for all ranks of this machine.
    directories = [local_directory(model) for model in models]
    tasks = run.tasks
    if tasks is not None and tasks.include_path is not None:
        tasks = replace(tasks, include_path=tasks.include_path.absolute())
    job = {
        "models": [[model.local_name, model.role, model.source.revision] for model in models],
        "windows": list(run.batches.windows),
        "batch_size": run.batches.size,
        "dtype": run.dtype,
        # Each rank has its own accelerator.
        "device": run.device.partition(":")[0],
        "measure_speeds": run.measure_speeds,
        "tasks": _TASKS.dump_python(tasks, mode="json"),
    }
    with tempfile.TemporaryDirectory(prefix="shardwright-evaluate-", ignore_cleanup_errors=True) as directory:
        work = Path(directory)
        run_replicas(replicas, EvaluationTask(content=job), work, on_cpu=run.device == "cpu")
        tensors = load_file(str(work / _MEASURES))
        records = json.loads((work / _RESULTS).read_text(encoding="utf-8"))
    counts, vocabulary = tuple(tensors.pop("counts").tolist()), tensors.pop("compared_vocabulary", None)
    size = None if vocabulary is None else int(vocabulary)
    measures = TokenMeasures(**tensors, counts=counts, compared_vocabulary=size)
    results = [
        EvalResult(
            model=model,
            dtype=record["dtype"],
            sizes=stored_sizes(model_files),
            speed=None if record["speed"] is None else Speed(**record["speed"]),
            tasks=tuple(TaskScore(**score) for score in record["tasks"]),
        )
        for model, model_files, record in zip(models, directories, records, strict=True)
    ]
    return measures, results[0], results[1] if len(results) > 1 else None


class EvaluationTask(ShareTask):
    """Task of every rank of an evaluation."""

    task: Literal["evaluate"] = "evaluate"

    def do_share(self, share: Share, work: Path) -> None:
        import torch
        from safetensors.torch import save_file

        job = self.content
        models = [read_eval_model(name, role, revision=revision) for name, role, revision in job["models"]]
        parts = {name: job[name] for name in ("batch_size", "dtype", "measure_speeds", "tasks")}
        parts["versions"] = dict(installed_versions())
        if share.is_first_here:
            parts["text"] = hashlib.sha256(json.dumps(job["windows"]).encode()).hexdigest()
            sizes = [asdict(stored_sizes(local_directory(model))) for model in models]
            parts["weights"] = [[model.source.revision for model in models], sizes]
        share.check_same(parts)
        run = EvalRun(
            batches=Batches(windows=job["windows"], size=job["batch_size"]),
            dtype=job["dtype"],
            device=job["device"],
            measure_speeds=job["measure_speeds"],
            tasks=_TASKS.validate_python(job["tasks"]),
            share=share,
        )
        measures, *results = _read_models(models, run, lambda: shared_tokenizer(models))
        own = [
            {
                "dtype": result.dtype,
                "speed": None if result.speed is None else asdict(result.speed),
                "tasks": list(map(asdict, result.tasks)),
            }
            for result in results
            if result is not None
        ]
        records = share.from_first(lambda: own)
        if not share.is_first_here:
            return
        tensors = {"counts": torch.tensor(measures.counts, dtype=torch.int64)}
        for name in ("loss_N", "baseline_loss_N", "kl_N", "agreement_N"):
            values_N = getattr(measures, name)
            if values_N is not None:
                tensors[name] = values_N
        if measures.compared_vocabulary is not None:
            tensors["compared_vocabulary"] = torch.tensor(measures.compared_vocabulary)
        save_file(tensors, str(work / _MEASURES))
        (work / _RESULTS).write_text(json.dumps(records), encoding="utf-8")


def _means(sums: Sequence[float], counts: Sequence[int]) -> tuple[float, ...]:
    return tuple(total / count for total, count in zip(sums, counts, strict=True))


def _model_result(result: EvalResult, sums: Sequence[float], counts: Sequence[int]) -> ModelResult:
    model, loss = result.model, token_mean(sums, counts)
    return ModelResult(
        name=model.title,
        revision=model.source.revision if model.adapter is None else model.adapter.revision,
        architecture=(getattr(model.config, "architectures", None) or [model.config.model_type])[0],
        quantization=model.quantization,
        dtype=result.dtype,
        loss_nats_per_token=loss,
        perplexity=exponential(loss),
        sizes=result.sizes,
        speed=result.speed,
        tasks=result.tasks,
    )


def _comparison(measures: TokenMeasures) -> Comparison:
    import torch

    loss_N, other_N = measures.loss_N, measures.baseline_loss_N
    kl_N, agreement_N = measures.kl_N, measures.agreement_N
    assert other_N is not None and kl_N is not None and agreement_N is not None, "a baseline was read"
    assert measures.compared_vocabulary is not None
    difference_sums = measures.window_sums(loss_N.double() - other_N.double())
    difference = token_mean(difference_sums, measures.counts)
    sorted_N = torch.sort(kl_N).values
    return Comparison(
        loss_difference_nats_per_token=difference,
        loss_difference_is_significant=difference.is_significant,
        kl_nats_per_token=token_mean(measures.window_sums(kl_N), measures.counts),
        kl_nats_at_share={
            f"{share:g}": float(sorted_N[max(0, math.ceil(share * len(sorted_N)) - 1)]) for share in KL_SHARES
        },
        top1_agreement=token_mean(measures.window_sums(agreement_N), measures.counts),
        compared_vocabulary=measures.compared_vocabulary,
        window_loss_differences_nats_per_token=_means(difference_sums, measures.counts),
    )
