"""Evaluates a model on a text, beside a baseline where one is given, one model in memory at a time."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

from ...plugins.launching.notes import Notify, OnProgress
from ...plugins.lm_eval.tasks import TaskRequest
from ..data.sources import PYTHON_HELP
from ..replicas.launch import ONE_PROCESS, Replicas
from .estimates import exponential, token_mean
from .in_ranks import read_in_ranks
from .in_vllm import Engine, engine_for, read_in_vllm
from .inputs import checked_subjects, chosen_seq_len, default_device, shared_tokenizer
from .loading import Subject, local_directory
from .reading import Findings, Reading, read_models
from .result import KL_SHARES, Comparison, Evaluation, ModelResult, TextFacts
from .stored_sizes import stored_sizes
from .text_windows import TextRequest, TextWindows, text_windows
from .token_measures import Batches, TokenMeasures

EvaluationEngine = Literal["transformers", "vllm"]
DEFAULT_WINDOWS = 64
_PACKAGES = ("shardwright", "torch", "transformers", "compressed-tensors", "bitsandbytes", "lm-eval")


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
    notify: Notify = lambda _: None,
    on_progress: OnProgress = lambda _stage, _done, _total: None,
) -> Evaluation:
    """Return perplexity, KL and agreement with a baseline, sizes and speeds.

    The baseline reads first and leaves the inputs of its output head on the host (tokens · hidden width numbers), and
    its head, so that both models are never in memory together.

    Args:
        source: Hub id or directory of the model.
        baseline: Hub id or directory of what it is compared with, usually what it was made from.
        dataset: What to read, as `--dataset` names it: `ID[:config][#N]` of the Hub, whose split `test` is taken, a
            file or directory of rows, or `python-help`; 64 windows of it. Default: `python-help`.
        text: What to read in the place of a dataset, where there is more to say of it, such as its split or other
            windows, or windows that are tokens already.
        seq_len: Tokens of a window; default: 2048, or fewer where a model has fewer positions, or that of the windows.
        batch_size: Windows that are read together; no result depends on it.
        dtype: Type to load weights as, or `auto` for the stored one.
        device: Such as `cuda:0` or `cpu`; default: an accelerator where there is one.
        engine: `transformers`, or `vllm`, which is found on PATH and reads the same windows in its own environment.
        tasks: Tasks of lm-evaluation-harness.
        revision: Branch, tag or commit of a Hub model.
        baseline_revision: The same of a Hub baseline.
        measure_speeds: Whether tokens/s and memory are measured.
        replicas: Processes that divide the batches; what they find is the same as one process's, to the last bit where
            they compute on the same hardware with as many threads.
        notify: Receives remarks.
        on_progress: Receives what is read, batches done and batches in all.

    Raises:
        UsageError: models, text or numbers that cannot be used, all faults together.
        RefusedInputError: files of a model are corrupt or unsafe, or a model's answers are not numbers.
        ShardwrightError: a model cannot be fetched or loaded, or the engine refuses it.
    """
    start = time.perf_counter()
    chosen = text or TextRequest(dataset=dataset or PYTHON_HELP, num_samples=DEFAULT_WINDOWS)
    length = chosen.seq_len_tokens if isinstance(chosen, TextWindows) else seq_len
    asked: dict[str, Any] = {"seq_len": length, "batch_size": batch_size, "device": device, "tasks": tasks}
    asked |= {"engine": engine, "baseline": baseline, "replicas": replicas}
    asked["dataset_beside_text"] = None if text is None else dataset
    subjects = checked_subjects([(source, revision), (baseline, baseline_revision)], chosen, asked)
    serving = engine_for(subjects[0]) if engine == "vllm" else None
    tokenizer = shared_tokenizer(subjects, notify)
    if isinstance(chosen, TextWindows):
        windows = chosen
    else:
        windows = text_windows(chosen, tokenizer, seq_len=chosen_seq_len(seq_len, subjects))
    run = Reading(
        batches=Batches(windows=windows.windows, size=batch_size),
        dtype=dtype,
        device=device or ("cpu" if serving else default_device()),
        measure_speeds=measure_speeds,
        tasks=tasks,
        on_progress=on_progress,
    )
    if serving is not None:
        measures, found, run = _read_served(subjects[0], serving, run, windows)
        return _evaluation(measures, found, None, windows, run, seconds=time.perf_counter() - start, engine=serving)
    if replicas.are_launched:
        everything = read_in_ranks(replicas, subjects, run, notify)
    else:
        everything = read_models(subjects, run, lambda: tokenizer, notify)
    return _evaluation(*everything, windows, run, seconds=time.perf_counter() - start)


def _read_served(
    subject: Subject, engine: Engine, run: Reading, windows: TextWindows
) -> tuple[TokenMeasures, Findings, Reading]:
    """Let vLLM read everything; its process says which device and type it took."""
    directory = local_directory(subject)
    run.on_progress("reading by vLLM", 0, 1)
    settings = {"batch_size": run.batches.size, "dtype": run.dtype, "measure_speeds": run.measure_speeds}
    found = read_in_vllm(engine, subject, directory, windows, settings=settings)
    run.on_progress("reading by vLLM", 1, 1)
    findings = Findings(subject=subject, dtype=found.dtype, sizes=stored_sizes(directory), speed=found.speed)
    return found.measures, findings, replace(run, device=found.device)


def _evaluation(
    measures: TokenMeasures,
    found: Findings,
    compared: Findings | None,
    windows: TextWindows,
    run: Reading,
    *,
    seconds: float,
    engine: Engine | None = None,
) -> Evaluation:
    own_sums = measures.window_sums(measures.loss_N)
    comparison, baseline = None, None
    if compared is not None:
        assert measures.baseline_loss_N is not None, "a baseline was read"
        baseline = _model_result(compared, measures.window_sums(measures.baseline_loss_N), measures.counts)
        comparison = _comparison(measures)
    return Evaluation(
        text=TextFacts(
            source=windows.source,
            seq_len_tokens=windows.seq_len_tokens,
            stride_tokens=windows.stride_tokens,
            windows=len(windows.windows),
            available_windows=windows.available_windows,
            predicted_tokens=windows.predicted_tokens,
        ),
        model=_model_result(found, own_sums, measures.counts),
        baseline=baseline,
        comparison=comparison,
        window_losses_nats_per_token=_means(own_sums, measures.counts),
        settings={
            "engine": "vllm" if engine else "transformers",
            "batch_size": run.batches.size,
            "device": run.device,
            "dtype": run.dtype,
        },
        versions=_versions() | (dict(engine.versions) if engine else {}),
        seconds=round(seconds, 3),
    )


def _means(sums: Sequence[float], counts: Sequence[int]) -> tuple[float, ...]:
    return tuple(total / count for total, count in zip(sums, counts, strict=True))


def _model_result(found: Findings, sums: Sequence[float], counts: Sequence[int]) -> ModelResult:
    subject, loss = found.subject, token_mean(sums, counts)
    return ModelResult(
        name=subject.source.name,
        revision=subject.source.revision,
        architecture=(getattr(subject.config, "architectures", None) or [subject.config.model_type])[0],
        quantization=subject.quantization,
        dtype=found.dtype,
        loss_nats_per_token=loss,
        perplexity=exponential(loss),
        sizes=found.sizes,
        speed=found.speed,
        tasks=found.tasks,
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


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
