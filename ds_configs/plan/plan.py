"""`Plan`: select a layout, write its files, read them back, adapt it to fewer nodes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from ..legality.axes import pipeline_warnings
from ..memory.activations import activation_mode, activations_are_stored, activations_of
from ..memory.estimate import Calibration
from ..memory.rank_parameters import rank_parameters
from ..models.images import image_tokens
from ..models.stored_shapes import load_shapes
from ..search.candidates import SearchContext, global_batch_reason
from ..search.run_estimates import doubts
from ..search.search import Evaluated, Outcome, search
from ..search.suggestions import Suggestion, adapters_without_offload, cheapest_changes, splits_with_server
from ..search.tuning import Trial, measured, rejected_by_trial, tuned_reason
from ..specs.errors import ConfigError, DoesNotFitError, RefusedInputError, UsageError
from ..specs.hardware import HardwareSpec
from ..specs.job import MODEL_ROLES, TrainingJob
from ..specs.layout import Layout
from ..specs.model import FIRST_RELEASE, ModelSpec
from ..specs.optimizers import OPTIMIZERS, parsed_optim_args
from ..specs.settings import rule_of
from ..specs.tasks import TASKS
from ..specs.texts import control_text, json_line, read_small_file, strict_json, yaml_mapping
from ..specs.units import gigabytes
from ..step_time.learning import MeasuredStep, comparable_steps
from .output import write_files
from .rendering import (
    HEADER,
    LaunchSpec,
    NodeCommand,
    accelerate_config,
    accelerate_text,
    copied_configuration,
    deepspeed_config,
    hostfile,
    launch_script,
    max_grad_norm,
    planned_training_arguments,
    run_line,
    slurm_script,
    trainer_line,
    uses_liger,
)

# Plans are far below 1 MiB; a larger file was not written by `Plan.write` and is not parsed.
_LARGEST_PLAN_BYTES = 16 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Plan(LaunchSpec):
    """Model, hardware, job and chosen layout, written as a directory of files that run them."""

    rejected: tuple[Evaluated, ...]
    """The other layouts: those that fit first, fastest first."""
    versions: tuple[tuple[str, str], ...] = ()
    """Names and versions of the libraries that the plan was made with."""
    activations: Literal["stored", "upper bound"] = "stored"
    """Source of activation bytes: coefficients of the family, or a bound from its structure."""
    command: str = ""
    """Command line that made the plan; empty for a plan made from Python."""
    trials: tuple[Trial, ...] = ()
    """Short real runs of layouts, in the order in which `tune` ran them."""
    learned_from: tuple[MeasuredStep, ...] = ()
    """Stored runs that corrected the chosen layout's step time."""

    def __repr__(self) -> str:
        layout, gpu = self.chosen.layout, self.chosen.memory.gpu
        micro_batches = f"micro-batch {layout.micro_batch_size} x {layout.gradient_accumulation_steps}"
        memory = f"{gigabytes(gpu.peak_bytes)} of {gigabytes(gpu.capacity_bytes)} GB"
        return f"<Plan {self.model.name} on {self.hardware.name}: {layout.label}, {micro_batches}, {memory}>"

    def to_dataframe(self) -> Any:
        """Return the chosen layout, then the others, as a pandas DataFrame: memory in GB, tokens/s, reason."""
        import pandas  # type: ignore[import-untyped]

        rows = [
            {
                "layout": row.layout.label,
                "micro_batch_size": row.layout.micro_batch_size,
                "peak_GB": row.memory.gpu.peak_bytes / 1e9,
                "high_GB": row.memory.gpu.high_bytes / 1e9,
                "tokens_per_second": row.time.tokens_per_second,
                "reason": row.reason,
            }
            for row in (self.chosen, *self.rejected)
        ]
        return pandas.DataFrame(rows)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as the JSON values of `plan.json`."""
        return plan_to_dict(self)

    def training_arguments(self, output_dir: str | Path, **overrides: Any) -> dict[str, Any]:
        """Return keyword arguments for `TrainingArguments` or a subclass such as `SFTConfig`.

        They are the values of `training_arguments.json`, replaced by `overrides`. If overrides change the batch or the
        precision, the prediction no longer applies, and `PlanCallback` warns.

        >>> TrainingArguments(**plan.training_arguments("out", max_steps=100))  # doctest: +SKIP
        """
        return planned_training_arguments(self) | {"output_dir": str(output_dir)} | overrides

    def deepspeed_config(self) -> dict[str, Any]:
        """Return `ds_config.json` with numbers instead of `"auto"`, for a custom loop with `deepspeed.initialize`.

        Raises:
            UsageError: the plan does not use DeepSpeed.

        >>> deepspeed.initialize(model=model, optimizer=optimizer, config=plan.deepspeed_config())  # doctest: +SKIP
        """
        layout, precision = self.chosen.layout, self.job.precision
        if layout.engine != "deepspeed":
            rule = "does not use DeepSpeed"
            fix = "plan with a ZeRO stage, such as --strategy zero2, or launch with Accelerate"
            raise UsageError(ConfigError(where="plan", value=layout.label, rule=rule, fix=fix))
        numbers = {
            "train_batch_size": layout.global_batch_size,
            "train_micro_batch_size_per_gpu": layout.micro_batch_size,
            "gradient_accumulation_steps": layout.gradient_accumulation_steps,
            "gradient_clipping": max_grad_norm(self.job),
            "fp16" if precision == "fp16" else "bf16": {"enabled": precision != "fp32"},
        }
        return deepspeed_config(self) | numbers

    def write(self, directory: str | Path, *, force: bool = False) -> list[Path]:
        """Write the plan's files and return their paths.

        Raises:
            UsageError: the directory is not empty and `force` is false.
            ShardwrightError: writing fails.
        """
        target = Path(directory)
        return write_files(render_files(self, directory=str(target.absolute())), target, force=force)

    @classmethod
    def load(cls, directory: str | Path) -> Plan:
        """Return the plan that `write` wrote to a directory.

        Raises:
            UsageError: there is no `plan.json`.
            RefusedInputError: the file is not a plan of this version.
        """
        path = Path(directory)
        file = path / "plan.json" if path.is_dir() else path
        if not file.is_file():
            rule = "has no plan.json" if path.exists() else "no such file or directory"
            raise UsageError(
                ConfigError(where="plan", value=str(path), rule=rule, fix="run `shardwright plan --output-dir` first")
            )
        if file.stat().st_size > _LARGEST_PLAN_BYTES:
            raise RefusedInputError(ConfigError(where=str(file), rule=f"is larger than {_LARGEST_PLAN_BYTES} bytes"))
        try:
            data = strict_json(content := file.read_bytes())
        except ValueError as error:
            raise RefusedInputError(ConfigError(where=str(file), rule=f"is not valid JSON ({error})")) from None
        if (text := control_text(data)) is not None:
            rule = "has control characters, with which a file could change what a terminal shows"
            raise RefusedInputError(ConfigError(where=str(file), value=ascii(text), rule=rule, fix="remove them"))
        return plan_from_dict(data, source=str(file), text=content)


class PlanDoesNotFitError(DoesNotFitError):
    """No layout fits. Carries model, hardware, job, the layouts tried, and the cheapest changes that would fit."""

    def __init__(
        self,
        tried: tuple[Evaluated, ...],
        suggestions: tuple[Suggestion, ...],
        *,
        model: ModelSpec,
        hardware: HardwareSpec,
        job: TrainingJob,
    ) -> None:
        self.model = model
        self.hardware = hardware
        self.job = job
        self.tried = tried
        self.suggestions = suggestions
        closest = min(tried, key=lambda candidate: candidate.memory.gpu.high_bytes)
        lines = [f"nothing fits; closest: {closest.reason}"]
        lines += [f"would fit: {suggestion}" for suggestion in suggestions]
        if not suggestions:
            lines.append("no change that was tried makes a layout fit")
        super().__init__("\n".join(lines))


def make_plan(
    model: ModelSpec,
    hardware: HardwareSpec,
    job: TrainingJob,
    *,
    calibration: Calibration | None = None,
    measured_steps: tuple[MeasuredStep, ...] = (),
    versions: tuple[tuple[str, str], ...] = (),
) -> Plan:
    """Choose a layout for a model, hardware and job; beside a vLLM server also the split of the GPUs, the fastest one.

    Raises:
        UsageError: the job is invalid, every layout that it allows breaks a rule, or no GPU is left to train.
        PlanDoesNotFitError: no layout fits.
    """
    job = job.completed(model)
    model = job.freeze(model)
    image_tokens(model, job)
    if TASKS[job.task].head == "score":
        model = model.with_score_head()
    whole = SearchContext(
        model=model, hardware=hardware, job=job, calibration=calibration, measured_steps=measured_steps
    )
    plans: list[Plan] = []
    failures: list[UsageError] = []
    misfits: list[tuple[SearchContext, Outcome]] = []
    for context in splits_with_server(whole):
        cluster = context.hardware
        try:
            outcome = search(context)
        except UsageError as error:
            failures.append(error)
            continue
        chosen = outcome.chosen
        if chosen is None:
            misfits.append((context, outcome))
            continue
        if job.generation == "vllm-server":
            reason = (
                f"{chosen.reason} Of {hardware.name}, {outcome.job.vllm_gpus} GPU(s) serve completions with `trl "
                f"vllm-serve --tensor-parallel-size {outcome.job.vllm_tensor_parallel_size}` and {cluster.world_size} "
                "train, the fastest split that was planned."
            )
            chosen = replace(chosen, reason=reason)
        chosen = replace(chosen, reason=chosen.reason + adapters_without_offload(context, chosen))
        plans.append(
            Plan(
                model=model,
                hardware=cluster,
                job=outcome.job,
                chosen=chosen,
                rejected=outcome.rejected,
                versions=versions,
                activations="stored" if activations_are_stored(model, outcome.job, chosen.layout) else "upper bound",
                learned_from=comparable_steps(measured_steps, cluster, chosen.layout.engine)[0],
            )
        )
    if misfits and not plans:
        context, outcome = misfits[0]
        changes = cheapest_changes(whole)
        raise PlanDoesNotFitError(outcome.rejected, changes, model=model, hardware=context.hardware, job=context.job)
    if not plans:
        raise failures[0]
    return max(plans, key=lambda plan: plan.chosen.time.tokens_per_second)


def tuned_plan(plan: Plan, trials: tuple[Trial, ...]) -> Plan:
    """Return a plan whose layout is the fastest of its measured trials, of which there must be one."""
    best = measured(trials)[0]
    candidates = (plan.chosen, *plan.rejected)
    reasons = {trial.key: rejected_by_trial(trial, best) for trial in trials}
    chosen = next(candidate for candidate in candidates if (candidate.layout, candidate.loss) == best.key)
    rejected = tuple(
        replace(candidate, reason=reasons.get((candidate.layout, candidate.loss), candidate.reason), placements={})
        for candidate in candidates
        if candidate is not chosen
    )
    return replace(
        plan,
        job=replace(plan.job, loss=chosen.loss),
        # All layouts of a plan have the second models where the chosen one has them.
        chosen=replace(chosen, reason=tuned_reason(best, trials), placements=plan.chosen.placements),
        rejected=rejected,
        trials=trials,
    )


SCHEMA_VERSION = 1
"""Version of `plan.json` and of `plan --format json`."""


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """Return the plan as JSON values, the inverse of `plan_from_dict`."""
    sequences = plan.chosen.layout.global_batch_size
    reason = global_batch_reason(plan.job, plan.hardware.world_size, sequences)
    return {
        "schema_version": SCHEMA_VERSION,
        "model": model_summary(plan.model, plan.job),
        "hardware": asdict(plan.hardware),
        "job": job_dict(plan.job),
        "chosen": evaluated_dict(plan.chosen)
        | dict.fromkeys(MODEL_ROLES)
        | {role: asdict(choice) for role, choice in plan.chosen.placements.items()},
        "global_batch": {"sequences": sequences, "tokens": sequences * plan.job.seq_len_tokens, "reason": reason},
        "rejected": [evaluated_dict(candidate) for candidate in plan.rejected],
        "doubts": list(doubts(plan.chosen.layout, plan.model, plan.hardware, plan.job)),
        "files": list(plan.file_names),
        "versions": dict(plan.versions),
        **({} if plan.activations == "stored" else {"activations": plan.activations}),
        **({"command": plan.command} if plan.command else {}),
        **({"trials": [trial_dict(trial) for trial in plan.trials]} if plan.trials else {}),
        **({"learned_from": [asdict(step) for step in plan.learned_from]} if plan.learned_from else {}),
    }


def model_summary(model: ModelSpec, job: TrainingJob) -> dict[str, Any]:
    """Return the model section of `plan.json`, with the full specification under `spec`.

    `spec` has the key `release` only if the release of transformers is not `FIRST_RELEASE`.
    """
    spec = asdict(model)
    if model.release == FIRST_RELEASE:
        del spec["release"]
    for parameter in spec["parameters"]:
        if not parameter["frozen"]:
            del parameter["frozen"]
    return {
        "name": model.name,
        "parameters": model.parameter_count,
        "trainable_parameters": rank_parameters(model, job).trainable,
        "architecture": model.architecture,
        "model_type": model.model_type,
        "revision": model.revision,
        "parameters_by_group": model.group_counts(),
        "layer_classes": list(model.layer_classes),
        "spec": spec,
    }


def job_dict(job: TrainingJob) -> dict[str, Any]:
    values = asdict(job)
    return {"seq_len": values.pop("seq_len_tokens"), **values}


def layout_dict(layout: Layout) -> dict[str, Any]:
    return asdict(layout) | {"label": layout.label}


def trial_dict(trial: Trial) -> dict[str, Any]:
    return asdict(trial) | {"layout": layout_dict(trial.layout)}


def evaluated_dict(evaluated: Evaluated) -> dict[str, Any]:
    memory = evaluated.memory
    host = asdict(memory.host)
    nvme_bytes = host.pop("nvme_bytes_per_node")
    step_time = asdict(evaluated.time)
    if not evaluated.time.measured_runs:
        del step_time["learned_scale"], step_time["measured_runs"]
    return {
        "layout": layout_dict(evaluated.layout),
        "reason": evaluated.reason,
        "gpu_memory": asdict(memory.gpu),
        "host_memory": host | {"nvme_capacity_bytes_per_node": memory.nvme_capacity_bytes_per_node},
        "nvme_bytes_per_node": nvme_bytes,
        "step_time": step_time,
        "loss": evaluated.loss,
    }


def plan_from_dict(data: object, *, source: str, text: bytes = b"") -> Plan:
    """Return the plan of JSON values from `plan_to_dict`; errors name the lines of `text`, if it is given.

    Raises:
        RefusedInputError: the schema version or the structure is wrong; all errors together.
    """
    from pydantic import ConfigDict, TypeAdapter, ValidationError

    if not isinstance(data, dict) or "schema_version" not in data:
        raise RefusedInputError(
            ConfigError(where=source, rule="is not a plan", fix="pass a directory written by `shardwright plan`")
        )
    if data["schema_version"] != SCHEMA_VERSION:
        raise RefusedInputError(
            ConfigError(
                where=f"{source}: schema_version",
                value=data["schema_version"],
                rule=f"this version reads {SCHEMA_VERSION}",
                fix="run `shardwright plan` again",
            )
        )
    try:
        job = dict(data["job"])
        job["seq_len_tokens"] = job.pop("seq_len")
        values = {key: value for key, value in data.items() if key not in _DERIVED} | {
            "model": data["model"]["spec"],
            "job": job,
            "chosen": _evaluated_values(data["chosen"]),
            "rejected": [_evaluated_values(candidate) for candidate in data["rejected"]],
            "versions": list(data["versions"].items()),
            "trials": [
                trial | {"layout": {key: value for key, value in trial["layout"].items() if key != "label"}}
                for trial in data.get("trials", [])
            ],
        }
        # Keys of another release that are ignored would change the run. Dataclasses inherit the setting from a list.
        (plan,) = TypeAdapter(list[Plan], config=ConfigDict(extra="forbid")).validate_python([values])
        details = dict.fromkeys(_unknown_keys(data, plan_to_dict(plan)), "is not a key of this version")
        if not details:
            return plan
    except ValidationError as error:
        details = {}
        for item in error.errors(include_url=False):
            keys = item["loc"][1:]
            # The candidate, by which a layout's keys begin.
            start = {"chosen": 1, "rejected": 2}.get(str(keys[0]), 0) if keys else 0
            field = next((field for field in _JSON_KEYS if keys[start : start + len(field)] == field), ())
            details[keys[:start] + _JSON_KEYS.get(field, ()) + keys[start + len(field) :]] = rule_of(item)
    except KeyError as error:
        details = {(): f"missing {error}"}
    except (TypeError, AttributeError, ValueError) as error:
        details = {(): str(error).partition("\n")[0]}
    writer = data["versions"].get("shardwright") if isinstance(data.get("versions"), dict) else None
    by = f"shardwright {writer} did; " if isinstance(writer, str) and writer.isprintable() else ""
    errors = []
    for keys, detail in islice(details.items(), _SHOWN_ERRORS):
        line = json_line(text, keys) if text and keys else None
        path = ".".join(str(key)[:40] for key in keys)
        errors.append(f"{'' if line is None else f'line {line}: '}{path} {detail}".strip())
    more = f"; {len(details) - _SHOWN_ERRORS} more" if len(details) > _SHOWN_ERRORS else ""
    rule = f"is not a plan that this version wrote ({by}{'; '.join(errors)}{more})"
    raise RefusedInputError(ConfigError(where=source, rule=rule, fix="run `shardwright plan` again"))


_SHOWN_ERRORS = 8
_DERIVED = ("schema_version", "global_batch", "doubts", "files")
"""Keys of `plan.json` that repeat what others say."""
_JSON_KEYS = {
    ("model",): ("model", "spec"),
    ("job", "seq_len_tokens"): ("job", "seq_len"),
    ("time",): ("step_time",),
    ("memory", "gpu"): ("gpu_memory",),
    ("memory", "host"): ("host_memory",),
    ("placements",): (),
}
"""Keys of `plan.json` for the fields of a plan or, without `chosen`, of a layout."""


def _unknown_keys(data: object, known: object, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Return the paths of the keys of JSON values that other values of the same structure do not have."""
    if isinstance(data, dict) and isinstance(known, dict):
        return [
            keys
            for name, value in data.items()
            for keys in (_unknown_keys(value, known[name], (*path, name)) if name in known else [(*path, name)])
        ]
    if isinstance(data, list) and isinstance(known, list | tuple):
        pairs = enumerate(zip(data, known, strict=False))
        return [keys for index, (item, other) in pairs for keys in _unknown_keys(item, other, (*path, index))]
    return []


def _evaluated_values(candidate: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an `Evaluated`, with keys that this version does not know."""
    rest = dict(candidate)
    layout, host = dict(rest.pop("layout")), dict(rest.pop("host_memory"))
    del layout["label"]
    memory = {
        "gpu": rest.pop("gpu_memory"),
        "nvme_capacity_bytes_per_node": host.pop("nvme_capacity_bytes_per_node"),
        "host": host | {"nvme_bytes_per_node": rest.pop("nvme_bytes_per_node")},
    }
    time, second = rest.pop("step_time"), {role: rest.pop(role, None) for role in MODEL_ROLES}
    placements = {role: choice for role, choice in second.items() if choice}
    return rest | {"layout": layout, "time": time, "placements": placements, "memory": memory}


_COPIED = (
    "The DeepSpeed configuration is in ds_config.json, and as a copy in accelerate.yaml (deepspeed_config_file). "
    "`accelerate launch` reads the copy. Change both, or replace the copy by the path of ds_config.json; "
    "`shardwright check` compares them."
)


def render_files(plan: Plan, *, directory: str = ".") -> dict[str, str]:
    """Return the text of every file of a plan by name; the same input gives the same bytes.

    `directory` appears only in the launch line of the headers and in the SLURM script, because SLURM runs a copy of it.
    Nothing else depends on it, so that the directory can be moved.
    """
    lines = header_lines(plan, directory)
    # A line break in a path must not leave its comment.
    printable = ("".join(character if character.isprintable() else "?" for character in line) for line in lines)
    header = "".join(f"# {line}\n" for line in printable)
    uses_deepspeed = plan.chosen.layout.engine == "deepspeed"
    copied = f"# {_COPIED}\n" if uses_deepspeed else ""
    texts = {
        "accelerate.yaml": header + copied + accelerate_text(accelerate_config(plan)),
        "launch.sh": launch_script(plan, header),
        "plan.json": _json(plan_to_dict(plan)),
        "training_arguments.json": _json(planned_training_arguments(plan)),
    }
    if uses_deepspeed:
        described = {HEADER: [_COPIED, *lines], **deepspeed_config(plan)}
        texts["ds_config.json"] = _json(described)
    if plan.hardware.nodes > 1:
        texts["hostfile"] = header + hostfile(plan.hardware)
        texts["launch.sbatch"] = slurm_script(
            NodeCommand(words=("launch", directory)), plan.hardware, behind=(), header=header
        )
    assert set(texts) == set(plan.file_names), "every named file is rendered"
    return texts


def edited_files(plan: Plan, directory: Path) -> list[str]:
    """Return the configuration files in a plan's directory that differ from the plan, apart from comments."""
    expected: dict[str, Any] = {
        "accelerate.yaml": _with_parsed_copy(accelerate_config(plan)),
        "training_arguments.json": planned_training_arguments(plan),
    }
    if plan.chosen.layout.engine == "deepspeed":
        expected["ds_config.json"] = deepspeed_config(plan)
    edited = []
    for name in sorted(expected):
        file = directory / name
        if not file.is_file():
            continue
        try:
            content = read_small_file(file, what="plan")
            values = strict_json(content) if file.suffix == ".json" else yaml_mapping(content, name=name, what="plan")
            values = {key: value for key, value in values.items() if key != HEADER}
            values = _with_parsed_copy(values) if file.suffix == ".yaml" else values
        except (UsageError, ValueError, AttributeError, RecursionError):
            edited.append(name)
            continue
        # The path of ds_config.json instead of its copy is no edit of the plan.
        engine = expected[name].get("deepspeed_config")
        with_path = {"deepspeed_config": engine | {"deepspeed_config_file": None}} if engine else {}
        if values not in (expected[name], expected[name] | with_path):
            edited.append(name)
    return edited


def _with_parsed_copy(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with its DeepSpeed text parsed; `None` instead of a path."""
    engine = config.get("deepspeed_config")
    if not isinstance(engine, dict) or not isinstance(engine.get("deepspeed_config_file"), str):
        return config
    copy = copied_configuration(engine["deepspeed_config_file"])
    parsed = None if copy is None else {key: value for key, value in strict_json(copy).items() if key != HEADER}
    return config | {"deepspeed_config": engine | {"deepspeed_config_file": parsed}}


def header_lines(plan: Plan, directory: str) -> list[str]:
    """Return the header of every file: purpose, reason, launch command, what a Trainer needs, assumptions."""
    hardware, gpu, layout, job = plan.hardware, plan.chosen.memory.gpu, plan.chosen.layout, plan.job
    # The engine converts what DeepSpeed or adapters train.
    loaded = ""
    if layout.engine != "deepspeed" and job.method == "full" and job.precision != "fp32":
        loaded = f", a model loaded with dtype=torch.{'bfloat16' if job.weights_dtype == 'bf16' else 'float32'}"
    lines = [
        f"{plan.model.name} on {hardware.name}: {layout.label}, micro-batch {layout.micro_batch_size} x "
        f"{layout.gradient_accumulation_steps}, {gigabytes(gpu.peak_bytes)} of {gigabytes(gpu.capacity_bytes)} GB, "
        f"{plan.chosen.time.tokens_per_second:,.0f} tokens/s",
        plan.chosen.reason,
        f"Run: {run_line(plan, directory=directory)}",
        trainer_line(plan),
        f"Assumes {job.precision}, {job.optimizer}, method {job.method}{loaded}, sequences of {job.seq_len_tokens} "
        "tokens without padding, "
        f"{gigabytes(gpu.capacity_bytes)} GB usable per accelerator.",
    ]
    if package := OPTIMIZERS[job.optimizer].package:
        lines.append(f"Requires the package {package}: pip install {package}")
    if job.weights_dtype == "bf16":
        lines.append(bf16_weights_line(job))
    if layout.pp > 1:
        lines += pipeline_warnings(stages=layout.pp, micro_batches=layout.gradient_accumulation_steps)
    if uses_liger(plan):
        lines.append("Requires the package liger-kernel; the training arguments enable its fused head and loss.")
    for second in plan.job.second_models:
        lines.append(f"Memory includes the {second.role} {second.spec.name}.")
    lines += [f"{role.capitalize()}: {choice.reason}" for role, choice in plan.chosen.placements.items()]
    if hardware.assumed:
        values = ", ".join(f"{name} = {getattr(hardware, name):.4g}" for name in hardware.assumed)
        lines.append(f"Assumes the values of a common server: {values}.")
    return lines


def bf16_weights_line(job: TrainingJob) -> str:
    """Return which updates bf16 weights lose, or how the optimizer keeps them.

    bf16 has 8 significant bits: rounding to the nearest value drops an update below 2^-9 to 2^-8 of the weight.
    """
    stated = parsed_optim_args(job.optim_args)
    if stated.get("bf16_stochastic_round", "").lower() in ("true", "1", "yes"):
        return "Weights are bf16. They are rounded stochastically, so that small updates are kept on average."
    if OPTIMIZERS[job.optimizer].compensated:
        return "Weights are bf16. Kahan summation keeps small updates, in 2 more bytes per parameter."
    return (
        "Weights are bf16, and rounding loses updates below 1/256 of a weight: an AdamW step changes a weight by about "
        "the learning rate, so at 1e-5 weights above 0.003 stop learning. adamw_torch_8bit with --optim-args "
        "bf16_stochastic_round=true, or stable_adamw, avoids this."
    )


def _json(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


_LEAST_SHARE = 0.01
"""Smallest relative change of activation bytes to report; the memory interval of a plan is far wider."""


def release_difference(plan: Plan, release: str) -> str | None:
    """Return how another release of Transformers changes the predicted memory; `None` if it does not."""
    planned, layout = plan.model, plan.chosen.layout
    if release == planned.release:
        return None

    def usual(release: str) -> str | None:
        stored = load_shapes(release)["classes"].get(planned.architecture)
        attention: str | None = planned.attention if stored is None else stored["attention"]
        return attention

    # An attention implementation that `config.json` requests stays the same.
    attention = usual(release) if planned.attention == usual(planned.release) else planned.attention
    kept_before, kept_after = (
        activations_of(
            model, plan.job, layout.micro_batch_size, activation_mode(layout, plan.job)
        ).saved_bytes_per_layer
        for model in (planned, replace(planned, release=release, attention=attention))
    )
    changes = []
    if attention != planned.attention:
        changes.append(f"attention is {attention or 'sdpa'} instead of {planned.attention or 'sdpa'}")
    if abs(kept_after - kept_before) > _LEAST_SHARE * kept_before:
        change = 100 * (kept_after / kept_before - 1)
        changes.append(f"a layer keeps {kept_after / 1e6:,.1f} MB for the backward pass ({change:+.0f} %)")
    versions = f"the plan is for transformers {planned.release}, but {release} is installed"
    return f"{versions}: {', and '.join(changes)}; plan again" if changes else None
