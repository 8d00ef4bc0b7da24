"""The trainer of a preference or reinforcement learning task on a rank: TRL's, for the layout of the plan."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...ds_configs.plan.plan import Plan
from ...ds_configs.specs.errors import ConfigError, UsageError
from ...ds_configs.specs.job import GROUPED_TASKS
from ...ds_configs.specs.tasks import TASKS, TaskName
from ...plugins.transformers.loading import load_causal_lm
from ...plugins.transformers.second_model import load_second_model, shard_by_layer
from ...plugins.transformers.training_arguments import class_of_task, compute_dtype
from ...plugins.trl import vllm_releases
from ..data.models import StartingModel, agreed_vocab_size, load_tokenizer
from ..parallel.planned import planned_parallelism


def task_trainer(
    plan: Plan,
    arguments: Any,
    engine: str,
    *,
    name: str,
    revision: str | None = None,
    reward: Any = None,
    **settings: Any,
) -> Any:
    """Return TRL's trainer of the planned task for a loaded `model`, one of the `settings`, with its reference.

    TRL loads a reference that is the trained model itself, or computes it ahead, and shards it as the engine does.
    Under FSDP2 the ranks other than the first would give it no weights, so that every rank loads it here.
    """
    job, task = plan.job, TASKS[plan.job.task]
    assert task.trainer is not None, "rejected before ranks start"
    reference = job.reference
    if reference is not None and job.task not in GROUPED_TASKS:
        placement = plan.chosen.placements["reference"].placement
        is_other = reference.name != plan.model.name
        if is_other or (placement == "sharded" and engine == "fsdp2"):
            name, revision = (reference.name, None) if is_other else (name, revision)
            settings["ref_model"] = load_second_model(name, revision=revision, dtype=compute_dtype(arguments))
            if engine == "fsdp2":
                # TRL would gather all of it as one unit.
                shard_by_layer(settings["ref_model"], arguments.device.type, arguments.world_size)
    if job.task in GROUPED_TASKS:
        assert reward is not None, "rejected before ranks start"
        settings["reward_funcs"] = [reward]
        if isinstance(reward, str):
            from accelerate.utils import patch_environment

            with patch_environment(FSDP_CPU_RAM_EFFICIENT_LOADING="false"):
                settings["reward_funcs"] = [load_causal_lm(reward, score_head="stored", dtype=compute_dtype(arguments))]
    kind, rows = class_of_task(task.trainer), settings["train_dataset"]
    trainer = planned_parallelism(plan).make_trainer(trainer_class=kind, args=arguments, **settings)
    if "ref" in getattr(trainer.model, "peft_config", {}):
        # TRL's copy of the untrained adapter, which is the model without adapters. With two adapters in a checkpoint,
        # Transformers resumes without the trained one.
        trainer.model.delete_adapter("ref")
    if job.task in GROUPED_TASKS and isinstance(reward, str) and isinstance(rows[0]["prompt"], str):
        trainer.reward_processing_classes[0] = ending_texts(trainer.reward_processing_classes[0])
    return trainer


def limited_reward(name: str | None, seconds: float | None) -> Any:
    """Return a reward function that fails when a call takes too long for a run that ends after `seconds` of silence.

    The names of reward models, and `None`, are returned unchanged.
    """
    if name is None or not is_reward_function(name):
        return name
    function = reward_function(name)
    if seconds is None or inspect.iscoroutinefunction(function):
        return function

    @functools.wraps(function)
    def limited(*arguments: Any, **columns: Any) -> Any:
        # Before the guard ends this rank, and the others that wait for it, without the name of the function.
        with _limited(_SHARE_OF_HANG * seconds, "raise --hang-timeout, or return None for such completions"):
            return function(*arguments, **columns)

    return limited


def ending_texts(tokenizer: Any) -> Callable[..., Any]:
    """Return what encodes texts as the tokenizer of a reward model does, each with its end-of-sequence token.

    TRL's RewardTrainer ends answers that are text with this token. Its GRPOTrainer and RLOOTrainer pass completions
    without it, and a reward model would score them at a token at which it has never judged.
    """

    def encode(text: list[str], **options: Any) -> Any:
        return tokenizer([each + (tokenizer.eos_token or "") for each in text], **options)

    return encode


def is_reward_function(name: str) -> bool:
    """Return whether a reward is `FILE.py:FUNCTION` instead of a model.

    >>> is_reward_function("rewards.py:accuracy"), is_reward_function("org/reward-model")
    (True, False)
    """
    return name.rpartition(":")[0].endswith(".py")


def reward_function(name: str) -> Callable[..., Any]:
    """Return a function of a Python file, `FILE.py:FUNCTION`, which gets prompts, completions and the other columns.

    Raises:
        UsageError: there is no such file or function, or the file cannot be run.
    """
    file, _, attribute = name.rpartition(":")
    path = Path(file)
    error = ConfigError(where="reward", value=name, rule="has no such file", fix="pass FILE.py:FUNCTION")
    if not path.is_file():
        raise UsageError(error)
    spec = importlib.util.spec_from_file_location(f"shardwright_reward_{path.stem}", path)
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    try:
        with _limited(IMPORT_SECONDS, "move slow work into the function"):
            spec.loader.exec_module(module)
    except Exception as failure:
        rule = f"fails when it is imported ({type(failure).__name__}: {' '.join(str(failure).split())[:200]})"
        raise UsageError(ConfigError(where="reward", value=name, rule=rule)) from failure
    function: Callable[..., Any] | None = getattr(module, attribute, None)
    if function is None or not callable(function):
        known = ", ".join(sorted(own for own, value in vars(module).items() if callable(value) and own[0] != "_"))
        rule = f"has no function {attribute}"
        raise UsageError(ConfigError(where="reward", value=name, rule=rule, fix=f"it has {known}" if known else ""))
    try:
        parameters = inspect.signature(function).parameters
    except (ValueError, TypeError):
        # Some callables of C have none.
        return function
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    if not takes_all and (missing := [column for column in _COLUMNS if column not in parameters]):
        rule = f"does not accept {' and '.join(missing)}, which every reward function gets by name"
        raise UsageError(ConfigError(where="reward", value=name, rule=rule, fix="add **others to its parameters"))
    return function


IMPORT_SECONDS = 120.0
"""Longest import of a file with a reward function."""
_SHARE_OF_HANG = 0.8
"""Longest call of a reward function, over the time without progress that ends a run."""
_COLUMNS = ("prompts", "completions", "completion_ids")
"""What every reward function gets, besides the columns of the dataset."""


@contextmanager
def _limited(seconds: float, fix: str) -> Iterator[None]:
    """Raise a TimeoutError in the block after some seconds."""
    if not hasattr(signal, "SIGALRM") or threading.current_thread() is not threading.main_thread():
        # Only the main thread gets signals, and Windows has no alarm.
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise TimeoutError(f"not done after {seconds:g} s; {fix}")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


_OF_SPEED = ("runtime", "per_second", "num_tokens", "step_time")


def evaluated(trainer: Any, *, first: bool) -> dict[str, float]:
    """Return the numbers of the first or the last evaluation in the Trainer's log, without those of its speed."""
    entries = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    if first:
        entries = [entry for entry in entries if entry["step"] == 0]
    entry = entries[0 if first else -1] if entries else {}
    return {
        name.removeprefix("eval_"): float(value)
        for name, value in entry.items()
        # A mean of no values, such as the reward of completions that a function does not judge, is null in the log.
        if name.startswith("eval_") and value is not None and not name.endswith(_OF_SPEED)
    }


def task_errors(task: TaskName, *, reward: str | None) -> list[ConfigError]:
    """Return the errors of a task's settings that are known before data and model are read."""
    errors = []
    if TASKS[task].trainer is None:
        rule = f"can be planned, but trl 1.16.0 has no trainer for {task}"
        errors.append(ConfigError(where="task", value=task, rule=rule, fix="use --task grpo or rloo"))
    if task == "gkd":
        rule, fix = "has a teacher, as no run of train", "pass TRL's GKDTrainer to shardwright.trainer_for"
        errors.append(ConfigError(where="task", value=task, rule=rule, fix=fix))
    if task in GROUPED_TASKS and reward is None:
        rule, fix = f"is required by task {task}", "pass --reward FILE.py:FUNCTION, or a reward model"
        errors.append(ConfigError(where="reward", rule=rule, fix=fix))
    elif reward is not None and is_reward_function(reward):
        if task not in GROUPED_TASKS:
            rule, fix = f"is not used by task {task}", "use --task grpo or rloo, or omit it"
            errors.append(ConfigError(where="reward", value=reward, rule=rule, fix=fix))
        try:
            reward_function(reward)
        except UsageError as error:
            errors += error.errors
    elif reward is not None and reward.endswith(".py"):
        rule, fix = "names a file without a function", f"pass {reward}:FUNCTION"
        errors.append(ConfigError(where="reward", value=reward, rule=rule, fix=fix))
    return errors


def second_model_errors(role: str, name: str, config: Mapping[str, Any], tokenizer: Any) -> list[ConfigError]:
    """Return the errors of a reference or reward model for a task whose model has this tokenizer."""
    errors = []
    scores = str(next(iter(config.get("architectures") or ()), "")).endswith("ForSequenceClassification")
    labels = int(config.get("num_labels") or len(config.get("id2label") or (0, 1)))
    if role == "reward" and not (scores and labels == 1):
        rule = f"returns {labels} classes" if scores else "returns no score of a sequence"
        fix = "train one with --task reward, or pass --reward FILE.py:FUNCTION"
        errors.append(ConfigError(where=role, value=name, rule=rule, fix=fix))
    if role == "reference":
        if scores:
            rule, fix = "returns a score of a sequence instead of tokens", "pass a causal language model"
            errors.append(ConfigError(where=role, value=name, rule=rule, fix=fix))
        try:
            vocab_size = config.get("vocab_size") or (config.get("text_config") or {})["vocab_size"]
            own = load_tokenizer(StartingModel(model=name), vocab_size)
            fix = "use a reference with the tokenizer of the model, such as the model before training"
            agreed_vocab_size(tokenizer, own, roles=("model", "reference"), fix=fix)
        except UsageError as error:
            errors += [replace(each, where=role, value=name) for each in error.errors]
    return errors


def generation_errors(plan: Plan) -> list[ConfigError]:
    """Return an error if this environment cannot generate completions as planned."""
    if plan.job.generation not in ("vllm", "vllm-server"):
        return []
    value = plan.job.generation
    if plan.hardware.gpu == "CPU":
        rule, fix = "needs an accelerator", "use --generation transformers"
        return [ConfigError(where="generation", value=value, rule=rule, fix=fix)]
    supported, version = vllm_releases()
    fix = f"pip install 'vllm{supported}'"
    if version is None:
        rule, fix = "needs the package vllm, which is not installed", f"{fix}, or use --generation transformers"
        return [ConfigError(where="generation", value=value, rule=rule, fix=fix)]
    if not supported.contains(version, prereleases=True):
        rule = f"needs vllm{supported}, which the installed trl supports, but {version} is installed"
        return [ConfigError(where="generation", value=value, rule=rule, fix=fix)]
    return []
