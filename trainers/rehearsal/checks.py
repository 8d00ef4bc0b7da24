"""Checks of a rehearsal, before its launches and on their results, and the result with its JSON file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, get_args

from ...ds_configs.check.files import check as check_configuration
from ...ds_configs.plan.plan import Plan
from ...ds_configs.shrink import Change
from ...ds_configs.specs.errors import UsageError
from ...ds_configs.specs.tasks import TASKS
from ...ds_configs.specs.texts import strict_json
from ...plugins.safetensors import load_tensors
from .files import PlanFiles

CheckName = Literal[
    "files",
    "layer_classes",
    "optimizer",
    "world_size",
    "launch",
    "loss_finite",
    "loss_falls",
    "ranks_agree",
    "checkpoint",
    "resume",
    "export",
    "script",
]
CHECK_NAMES: tuple[CheckName, ...] = tuple(name for name in get_args(CheckName) if name != "script")
"""Checks of a rehearsal without a script of the user."""
_WORLD_SIZE_KEYS = ("num_processes", "num_machines", "train_batch_size", "sequence_parallel_size", "data_parallel_size")
CONFIG_ERROR, FAILED_AT_RUN_TIME = 2, 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    name: CheckName
    passed: bool | None
    """`None` if an earlier failure ended the rehearsal."""
    detail: str
    """Observation, or error and fix."""
    exit_code: int = 0
    """Of a failure: 2 for an error in the files, 1 at run time; 0 otherwise."""

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "passed": self.passed, "detail": self.detail}


def passed(name: CheckName, detail: str) -> Check:
    return Check(name=name, passed=True, detail=detail)


def failed(name: CheckName, detail: str, *, exit_code: int = FAILED_AT_RUN_TIME) -> Check:
    return Check(name=name, passed=False, detail=detail, exit_code=exit_code)


def _result(name: CheckName, is_passed: bool, observation: str, error: str) -> Check:
    return passed(name, observation) if is_passed else failed(name, error)


def with_unreached(checks: Sequence[Check]) -> tuple[Check, ...]:
    """Return every check in its order; a run-time result replaces an earlier pass of the same name."""
    by_name: dict[str, Check] = {}
    for check in checks:
        if check.name not in by_name or by_name[check.name].passed:
            by_name[check.name] = check
    return tuple(by_name.get(name, Check(name=name, passed=None, detail="not reached")) for name in CHECK_NAMES)


def check_files(directory: Path, plan: Plan) -> list[Check]:
    """Check the plan's files on disk; errors of batch and number of processes are reported as `world_size`."""
    from ...plugins.transformers.training_arguments import class_of_task, unknown_argument_errors

    accelerate, arguments = directory / "accelerate.yaml", directory / "training_arguments.json"
    world_size: list[str] = []
    files: list[str] = []
    for finding in check_configuration(accelerate).findings:
        if finding.kind == "error":
            is_about_ranks = finding.error.where.rpartition(" ")[2] in _WORLD_SIZE_KEYS
            (world_size if is_about_ranks else files).append(str(finding.error))
    kind = class_of_task(TASKS[plan.job.task].config or "transformers.TrainingArguments")
    try:
        settings = strict_json(arguments.read_bytes())
        if isinstance(settings, dict):
            files += [f"{arguments}: {error}" for error in unknown_argument_errors(settings, kind)]
        else:
            files.append(f"{arguments}: must be a JSON object of TrainingArguments keys")
    except OSError as error:
        files.append(f"{arguments}: cannot be read ({error.strerror}); plan again, or write the file")
    except ValueError as error:
        files.append(f"{arguments}: must be JSON ({error})")
    checks = [_verdict("files", files, f"{accelerate.name} with its files, {arguments.name}")]
    if not files and not world_size:
        world_size = world_size_errors(PlanFiles.read(directory), plan)
    checks.append(_verdict("world_size", world_size, f"the files are for {plan.hardware.world_size} ranks"))
    return checks


def _verdict(name: CheckName, errors: Sequence[str], detail: str) -> Check:
    return failed(name, "\n".join(errors), exit_code=CONFIG_ERROR) if errors else passed(name, detail)


def world_size_errors(files: PlanFiles, plan: Plan) -> list[str]:
    """Return where the files contradict the planned hardware or each other's batch size."""
    ranks = plan.hardware.world_size
    errors = []
    for key, wanted in (("num_processes", ranks), ("num_machines", plan.hardware.nodes)):
        value = files.accelerate.get(key, wanted)
        if value != wanted:
            errors.append(
                f"accelerate.yaml {key} = {value!r}: the plan is for {plan.hardware.name}, which has {wanted}; "
                f"write {wanted}, or plan again for other hardware"
            )
    batch = (files.deepspeed or {}).get("train_batch_size", "auto")
    if isinstance(batch, int):
        micro = _stated(
            files.deepspeed, "train_micro_batch_size_per_gpu", files.arguments, "per_device_train_batch_size"
        )
        steps = _stated(files.deepspeed, "gradient_accumulation_steps", files.arguments, "gradient_accumulation_steps")
        product = micro * steps * plan.chosen.layout.data_parallel_size
        if batch != product:
            rule = f"must equal micro-batch · accumulation · ranks = {micro} · {steps} · {product // (micro * steps)}"
            errors.append(f'ds_config.json train_batch_size = {batch}: {rule} = {product}; write {product} or "auto"')
    return errors


def _stated(config: Mapping[str, Any] | None, key: str, arguments: Mapping[str, Any], argument: str) -> int:
    value = (config or {}).get(key, "auto")
    if isinstance(value, int):
        return value
    default = 8 if argument == "per_device_train_batch_size" else 1
    stated = arguments.get(argument, default)
    return stated if isinstance(stated, int) and stated > 0 else default


def check_layer_classes(accelerate: Mapping[str, Any], plan: Plan, class_names: set[str]) -> Check:
    """Check that the model has the classes that FSDP wraps or checkpointing recomputes."""
    wrapped = (accelerate.get("fsdp_config") or {}).get("fsdp_transformer_layer_cls_to_wrap")
    names = list(plan.model.layer_classes)
    if isinstance(wrapped, str):
        names = [name.strip() for name in wrapped.split(",")]
    elif isinstance(wrapped, list):
        names = [str(name) for name in wrapped]
    missing = [name for name in names if name not in class_names]
    if not missing:
        return passed("layer_classes", f"{plan.model.architecture} has {', '.join(names)}")
    layers = ", ".join(sorted(name for name in class_names if name.endswith(("Layer", "Block")))) or "none"
    detail = f"{', '.join(missing)}: no such class in {plan.model.architecture}; its layers are {layers}"
    return failed("layer_classes", detail, exit_code=CONFIG_ERROR)


def check_optimizer(deepspeed: Mapping[str, Any] | None, arguments: Mapping[str, Any]) -> Check:
    """Check that optimizer offload keeps the update rule of the optimizer."""
    from ...plugins.transformers.training_arguments import refuse_replaced_optimizer

    optimizer = arguments.get("optim", "adamw_torch_fused")
    if deepspeed is not None:
        configuration = {"zero_optimization": {}, **deepspeed}
        plugin = SimpleNamespace(deepspeed_config=configuration)
        try:
            refuse_replaced_optimizer(SimpleNamespace(deepspeed_plugin=plugin, optim=optimizer))
        except UsageError as error:
            return failed("optimizer", str(error), exit_code=CONFIG_ERROR)
    return passed("optimizer", f"{optimizer} is used unchanged")


def check_training(
    records: Sequence[Mapping[str, Any]], *, ranks: int, steps: int, vocab_size: int, learns: bool = True
) -> list[Check]:
    """Check what the ranks recorded; the loss of a policy gradient does not fall as it `learns`."""
    losses = list(records[0]["losses"])
    shown = f"{losses[0]:.3f} to {losses[-1]:.3f} in {steps} steps"
    finite = all(math.isfinite(loss) for loss in losses)
    sizes = sorted({record["world_size"] for record in records})
    means = ", ".join(f"rank {index}: {record['probe_mean']!r}" for index, record in enumerate(records))
    return [
        _result(
            "world_size",
            sizes == [ranks] and len(records) == ranks,
            f"the Trainers of all {ranks} ranks have world size {ranks}",
            f"launched {ranks} ranks, {len(records)} trained, with world size {', '.join(map(str, sizes))}",
        ),
        _result("loss_finite", finite, f"{len(losses)} losses", f"losses: {', '.join(f'{n:.3f}' for n in losses)}"),
        _result(
            "loss_falls",
            finite and (not learns or (min(losses[1:]) < losses[0] and losses[-1] < losses[0])),
            f"{shown} (untrained: ln {vocab_size} = {math.log(vocab_size):.3f})",
            f"{shown}: the optimizer does not reduce the loss",
        ),
        _result(
            "ranks_agree",
            len({record["probe_digest"] for record in records}) == 1,
            f"all {ranks} ranks compute bit-identical logits for one batch",
            f"ranks compute different mean logits for the same batch: {means}",
        ),
    ]


def check_checkpoint(directory: Path) -> Check:
    if (directory / "trainer_state.json").is_file():
        size = sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
        return passed("checkpoint", f"{directory.name}: {size / 1e6:.1f} MB")
    return failed("checkpoint", f"{directory.name} was not saved")


CPU_OPTIMIZER_TOLERANCE = 1e-3
"""DeepSpeed 0.19.8's CPU Adam accumulates the powers of its bias correction, but recomputes them after resuming
(`IncrementStep` in csrc/includes/cpu_adam.h). Master weights then differ by 1e-7, which changes a few bf16 roundings.
Observed: 3e-4."""


def check_resumed(
    losses: Sequence[float],
    resumed: Sequence[float],
    *,
    save_step: int,
    cpu_optimizer: bool = False,
) -> Check:
    """Check that steps after the checkpoint have bit-identical losses in both launches, but for `cpu_optimizer`."""
    expected = list(losses[save_step:])
    steps = f"steps {save_step + 1} to {len(losses)}"
    if expected == list(resumed):
        return passed("resume", f"{steps} have bit-identical losses after resuming")
    if len(expected) == len(resumed):
        difference = max(abs(before - after) for before, after in zip(expected, resumed, strict=True))
        if cpu_optimizer and difference <= CPU_OPTIMIZER_TOLERANCE:
            detail = f"{steps} have equal losses after resuming within {difference:.0e} (DeepSpeed's CPU Adam)"
            return passed("resume", detail)
    pairs = ", ".join(f"{before!r} then {after!r}" for before, after in zip(expected, resumed, strict=False))
    return failed("resume", f"{len(resumed)} of {len(expected)} steps after resuming from step {save_step}: {pairs}")


def check_export(directory: Path, trained_file: Path, export_file: Path, error: str | None, *, precision: str) -> Check:
    """Check that the export is one safetensors model directory whose logits equal the trained engine's."""
    names = sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []
    unsafe = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".pkl"))]
    if not any(name.endswith(".safetensors") for name in names) or unsafe:
        listed = ", ".join(unsafe or names) or "nothing"
        return failed("export", f"the export is not a safetensors model directory; it has {listed}")
    if error is not None:
        return failed("export", f"from_pretrained fails: {error}")
    trained, exported = (load_tensors(path)["logits_BTV"] for path in (trained_file, export_file))
    assert trained.shape == exported.shape, "both computed the same batch"
    difference, largest = float((trained - exported).abs().max()), float(trained.abs().max())
    allowed = LOGIT_TOLERANCE[precision] * largest
    seen = "bit-identically" if difference == 0 else f"within {difference:.1e} of {largest:.1e}"
    return _result(
        "export",
        difference <= allowed,
        f"from_pretrained gives the trained logits {seen}",
        f"logits of the export differ from the trained engine's by {difference:.3g} of {largest:.3g}",
    )


LOGIT_TOLERANCE: Mapping[str, float] = {"fp32": 1e-5, "bf16": 2.0**-6}
"""Tolerance relative to the largest logit: another order of fp32 sums; two roundings to bf16."""


SCHEMA_VERSION = 1
"""Version of `rehearsal.json` and of `rehearse --format json`."""
REPORT_FILE = "rehearsal.json"
PHASES = ("generate", "score", "loss", "backward", "step")

OFFLOADED = "offloaded_checkpoints"
"""Term of layer inputs that wait in host memory."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Rehearsal:
    plan: Plan
    source: str | None
    """Directory of the plan; `None` for a plan without files."""
    ranks: int
    steps: int
    checks: tuple[Check, ...]
    changes: tuple[Change, ...] = ()
    """Values that differ from the plan's."""
    losses: tuple[float, ...] = ()
    """Loss of each step, mean over the ranks."""
    measured: Mapping[str, Mapping[str, int]] | None = None
    """Bytes by phase and role on the fullest rank; `None` when training was not reached."""
    predicted: Mapping[str, Mapping[str, Any]] | None = None
    """Bytes of the plan's formulas for the same sizes, by phase and role and by `terms`; `None` as for `measured`."""
    host: Mapping[str, int] | None = None
    """Measured and predicted bytes of layer inputs in host memory on the fullest rank; `None` if none wait there."""
    seconds: float = 0.0
    files: tuple[str, ...] = ()
    """Paths of the written files."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of the libraries that ran, by name."""
    command: str = ""
    """Command line of the rehearsal; empty when a Python program started it."""

    def __repr__(self) -> str:
        verdict = "passed" if self.failure is None else f"failed at {self.failure.name}"
        return f"<Rehearsal of {self.plan.model.name}, {self.plan.chosen.layout.label}, {self.ranks} ranks: {verdict}>"

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    @property
    def failure(self) -> Check | None:
        return next((check for check in self.checks if check.passed is False), None)

    @property
    def exit_code(self) -> int:
        """0 when passed, 2 for an error in the files, 1 for a failure at run time."""
        return self.failure.exit_code if self.failure is not None else 0

    def to_dict(self) -> dict[str, Any]:
        """Return the rehearsal as the JSON values of `rehearsal.json`."""
        plan = self.plan
        return {
            "schema_version": SCHEMA_VERSION,
            "passed": self.passed,
            "checks": [check.to_dict() for check in self.checks],
            "plan": {
                "directory": self.source,
                "model": plan.model.name,
                "hardware": plan.hardware.name,
                "layout": plan.chosen.layout.label,
                "method": plan.job.method,
                "precision": plan.job.precision,
            },
            "ranks": self.ranks,
            "steps": self.steps,
            "changes": [asdict(change) for change in self.changes],
            "losses": list(self.losses),
            "measured": {phase: dict(roles) for phase, roles in (self.measured or {}).items()},
            "predicted": {phase: dict(roles) for phase, roles in (self.predicted or {}).items()},
            "host": None if self.host is None else dict(self.host),
            "files": list(self.files),
            "seconds": round(self.seconds, 1),
            "versions": dict(self.versions),
            "command": self.command,
        }
