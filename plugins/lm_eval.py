"""Tasks of lm-evaluation-harness on a loaded model.

Observed with lm-eval 0.4.13:

- `HFLM` accepts a loaded model, but reads its tokenizer from the Hub by the model's name unless one is passed.
- `TaskManager` treats an unknown task name as a file path.
- Indexing the built-in tasks parses about 13,000 files, which takes 10 to 20 s.
- `simple_evaluate` returns nothing if `LOCAL_RANK` is not 0, even for an unsharded model.
- Task files may name Python functions (`!function`), which run from the directory of the file.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..ds_configs.specs.errors import ConfigError, ShardwrightError
from .launching.messages import only_errors_logged
from .llm_compressor import without_bars

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_LONGEST_DETAIL = 300


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskRequest:
    """Tasks to run, and how much of them."""

    names: tuple[str, ...]
    """Tasks, groups or tags, such as `hellaswag`."""
    limit: int | None = None
    """Documents of each task; `None`: all."""
    few_shot: int | None = None
    """Solved examples before each question; `None`: what the task states."""
    include_path: Path | None = None
    """Directory with task files of the user's own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskScore:
    """One metric of one task."""

    task: str
    metric: str
    """Such as `acc_norm`; with the filter behind a comma where it is not `none`."""
    value: float
    standard_error: float | None
    """As the harness states it, over documents; `None` where it states none."""
    higher_is_better: bool | None
    """Direction; `None` where the task does not say."""
    documents: int
    few_shot: int | None
    """Solved examples before each question."""


def task_errors(request: TaskRequest) -> list[ConfigError]:
    """Return the errors of a request, before any model is loaded."""
    if find_spec("lm_eval") is None:
        rule = "needs the package lm-eval, which is not installed"
        return [ConfigError(where="--tasks", value=",".join(request.names), rule=rule, fix="pip install lm-eval")]
    errors = []
    if request.limit is not None and request.limit < 1:
        errors.append(ConfigError(where="--limit", value=request.limit, rule="must be at least 1"))
    if request.few_shot is not None and request.few_shot < 0:
        errors.append(ConfigError(where="--few-shot", value=request.few_shot, rule="must be at least 0"))
    where = request.include_path
    if where is not None and not where.is_dir():
        rule = "is not a directory"
        return [*errors, ConfigError(where="--include-path", value=str(where), rule=rule)]
    known = _manager(request.names, where).all_tasks
    for name in request.names:
        if name not in known:
            rule, fix = "is not a task of lm-evaluation-harness", "`lm-eval ls tasks` lists them"
            errors.append(ConfigError(where="--tasks", value=name, rule=rule, fix=fix))
    return errors


@lru_cache(maxsize=1)
def _manager(names: tuple[str, ...], include_path: Path | None) -> Any:
    """Return the index of tasks; only that of the include path if it contains all requested tasks."""
    from lm_eval.tasks import TaskManager

    if include_path is not None:
        own = TaskManager(include_path=str(include_path), include_defaults=False)
        if set(names) <= set(own.all_subtasks):
            return own
    return TaskManager(include_path=None if include_path is None else str(include_path))


def run_tasks(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, request: TaskRequest, *, batch_size: int
) -> tuple[TaskScore, ...]:
    """Return the scores of a loaded Transformers model.

    Raises:
        ShardwrightError: the harness fails, for example because a data set cannot be downloaded; includes its reason.
    """
    from accelerate.utils import patch_environment
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    try:
        with only_errors_logged("lm_eval"), without_bars(), patch_environment(LOCAL_RANK="0"):
            results = simple_evaluate(
                model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, backend="causal"),
                tasks=list(request.names),
                num_fewshot=request.few_shot,
                limit=request.limit,
                task_manager=_manager(request.names, request.include_path),
                log_samples=False,
                bootstrap_iters=1000,
            )
    except Exception as error:
        # Task files, metrics and data sets raise any exception.
        detail = " ".join(str(error).split())[:_LONGEST_DETAIL]
        raise ShardwrightError(f"--tasks {','.join(request.names)}: {type(error).__name__}: {detail}") from None
    scores = []
    for task, values in results["results"].items():
        for key, value in values.items():
            metric, _, filtered = key.partition(",")
            if not isinstance(value, int | float) or metric.endswith("_stderr") or not filtered:
                continue
            deviation = values.get(f"{metric}_stderr,{filtered}")
            score = TaskScore(
                task=task,
                metric=metric if filtered == "none" else key,
                value=float(value),
                standard_error=float(deviation) if isinstance(deviation, int | float) else None,
                higher_is_better=results.get("higher_is_better", {}).get(task, {}).get(metric),
                documents=int(results.get("n-samples", {}).get(task, {}).get("effective", 0)),
                few_shot=results.get("n-shot", {}).get(task),
            )
            scores.append(score)
    return tuple(scores)
