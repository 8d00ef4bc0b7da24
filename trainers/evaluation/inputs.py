"""Checks of an evaluation before weights are loaded: all that can be wrong, told together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...ds_configs.specs.errors import Fault, UsageError
from ...plugins.launching.notes import Notify
from ...plugins.lm_eval.tasks import task_faults
from ..replicas.launch import Replicas
from .in_vllm import engine_conflicts
from .loading import Subject, has_tokenizer, read_subject, subject_tokenizer, tokenizer_difference
from .text_windows import TextRequest, TextWindows, number_faults

# The window of published GPTQ and AWQ tables, so that perplexities can be set beside them.
DEFAULT_SEQ_LEN = 2048
_PROBE_TEXT = "Ünïcode, 日本語 and 🤗: x = {'a': 1};\n\tif x != 0:  return [3.14, -2]\n"


def checked_subjects(
    named: Sequence[tuple[str | None, str | None]], text: TextRequest | TextWindows, settings: Mapping[str, Any]
) -> list[Subject]:
    """Return the model, and the baseline where there is one.

    Raises:
        UsageError: everything that is wrong with the request, at once.
        RefusedInputError: files of a model are damaged or unsafe.
        ShardwrightError: the Hub cannot be reached.
    """
    seq_len, batch_size, device = settings["seq_len"], settings["batch_size"], settings["device"]
    faults = number_faults(text, seq_len) if isinstance(text, TextRequest) else []
    if (dataset := settings["dataset_beside_text"]) is not None:
        rule, fix = "stands beside a text", "state it in TextRequest(dataset=...), or leave the text out"
        faults.append(Fault(where="dataset", value=dataset, rule=rule, fix=fix))
    if batch_size < 1:
        faults.append(Fault(where="--batch-size", value=batch_size, rule="must be at least 1"))
    if device is not None and (fault := _device_fault(device)) is not None:
        faults.append(fault)
    replicas: Replicas = settings["replicas"]
    faults += replicas.faults(device=device)
    if settings["engine"] == "vllm":
        faults += engine_conflicts(settings)
    subjects = []
    for (where, revision), role in zip(named, ("model", "baseline"), strict=True):
        if where is None:
            continue
        try:
            subjects.append(read_subject(where, role, revision=revision))
        except UsageError as error:
            faults += error.faults
    for subject in subjects:
        if seq_len is not None and subject.longest is not None and seq_len > subject.longest:
            rule, fix = f"{subject.name} has {subject.longest} positions", f"give at most {subject.longest}"
            faults.append(Fault(where="--seq-len", value=seq_len, rule=rule, fix=fix))
    # vLLM answers no tasks, which is told above; to know their names takes ten seconds.
    if settings["tasks"] is not None and settings["engine"] != "vllm":
        faults += task_faults(settings["tasks"])
    if faults:
        raise UsageError(faults)
    return subjects


def _device_fault(device: str) -> Fault | None:
    import torch

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        detail = " ".join(str(error).split())[:200]
        return Fault(
            where="--device", value=device, rule=f"torch cannot use it ({detail})", fix="such as cpu or cuda:0"
        )
    return None


def default_device() -> str:
    """Return an accelerator where there is one."""
    import torch

    return "cuda:0" if torch.cuda.is_available() else "cpu"


def chosen_seq_len(seq_len: int | None, subjects: Sequence[Subject]) -> int:
    """Return the length that was asked for, or the usual one as far as all models have positions."""
    if seq_len is not None:
        return seq_len
    return min([DEFAULT_SEQ_LEN, *(subject.longest for subject in subjects if subject.longest is not None)])


def shared_tokenizer(subjects: Sequence[Subject], notify: Notify) -> Any:
    """Return the tokenizer of both models.

    Raises:
        UsageError: they differ.
    """
    model, *others = subjects
    for baseline in others:
        if has_tokenizer(baseline) and not has_tokenizer(model):
            notify(f"{model.name} has no tokenizer: the baseline's is used")
            return _fitting(subject_tokenizer(baseline), model)
        if has_tokenizer(model) and has_tokenizer(baseline):
            tokenizer = subject_tokenizer(model)
            fault = tokenizer_difference(tokenizer, subject_tokenizer(baseline), _PROBE_TEXT)
            if fault is not None:
                raise UsageError(fault)
            return _fitting(tokenizer, baseline)
    return _fitting(subject_tokenizer(model), *others)


def _fitting(tokenizer: Any, *subjects: Subject) -> Any:
    largest = max(tokenizer.get_vocab().values())
    for subject in subjects:
        if largest >= subject.vocab_size:
            rule = f"{subject.name} has {subject.vocab_size} tokens, and the tokenizer's largest id is {largest}"
            raise UsageError(Fault(where="vocab_size", value=subject.vocab_size, rule=rule))
    return tokenizer
