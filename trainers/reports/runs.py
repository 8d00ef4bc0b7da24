"""Reports of plans, training runs (`train`, `distill`, `qat`), evaluations and quantizations, from their JSON files.

`report_html` makes the page of a directory with such files, and `write_html` saves it.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...ds_configs.plan.output import write_files
from ...ds_configs.plan.plan import Plan
from ...ds_configs.search.reasons import display_name
from ...ds_configs.search.run_estimates import doubts
from ...ds_configs.search.tuning import Trial
from ...ds_configs.specs.errors import ConfigError, RefusedInputError, ShardwrightError, UsageError
from ...ds_configs.specs.texts import strict_json
from ...ds_configs.specs.units import human_count
from .report import (
    Metrics,
    Report,
    Section,
    Table,
    figures,
    gb,
    html,
    interval,
    key_value_table,
    markdown,
    mean_with_error,
    plain,
    points,
    rows_of_terms,
    short_name,
    significant,
    with_error,
)


def speed_interval(plan: Plan) -> tuple[float, float]:
    """Return the lowest and highest tokens/s within the interval of the predicted step time."""
    time = plan.chosen.time
    tokens = time.tokens_per_second * time.seconds
    return tokens / time.high_seconds, tokens / time.low_seconds


def plan_report(plan: Plan) -> Report:
    """Return the report of a plan: the selected layout, its memory and time by term, and the other layouts."""
    model, hardware, chosen, layout = plan.model, plan.hardware, plan.chosen, plan.chosen.layout
    gpu, host, time = chosen.memory.gpu, chosen.memory.host, chosen.time
    batch = f"micro-batch {layout.micro_batch_size} × {layout.gradient_accumulation_steps}"
    summary = [
        ("Layout", display_name(layout), batch),
        (
            "Memory per accelerator, predicted",
            gb(gpu.peak_bytes),
            f"{interval(gpu.low_bytes, gpu.high_bytes, gb)}, of {gb(gpu.capacity_bytes)}",
        ),
        (
            "Tokens/s, predicted",
            significant(time.tokens_per_second),
            f"{interval(*speed_interval(plan))}, all ranks together",
        ),
        ("Step, predicted", f"{significant(time.seconds)} s", f"{interval(time.low_seconds, time.high_seconds)} s"),
        ("Host memory per node, predicted", gb(host.peak_bytes_per_node), f"of {gb(host.capacity_bytes_per_node)}"),
    ]
    reasons = [chosen.reason]
    reasons += [f"{role.capitalize()}: {choice.reason}" for role, choice in chosen.placements.items()]
    if plan.activations == "upper bound":
        reasons.append("Activations and loss are an upper bound from the model's structure. The run may need less.")
    reasons += [f"Less certain: {doubt}" for doubt in doubts(layout, model, hardware, plan.job)]
    sections = [Section("Why this layout", reasons)]
    if plan.trials:
        caption = "Spread: longest minus shortest timed step, divided by the median. Tensors: of the fullest rank."
        sections.append(Section("Measured layouts", tables=(Table(*trial_rows(plan.trials), caption),)))
    step = Table(
        ("term", "time", "meaning"),
        rows_of_terms(chosen.terms, "step"),
        f"Total {time.seconds:.4f} s ({time.low_seconds:.4f} to {time.high_seconds:.4f} s).",
    )
    phases = ", ".join(f"{name} {gb(count)}" for name, count in gpu.phases.items())
    of_phase = f"Terms of the {gpu.phase} phase. Tensors by phase: {phases}."
    memory = [
        Table(("term", "size", "meaning"), rows_of_terms(chosen.terms, "accelerator"), of_phase),
        Table(("term", "size", "meaning"), rows_of_terms(chosen.terms, "host"), "Host memory of a node."),
    ]
    others = []
    for other in plan.rejected:
        name, peak = display_name(other.layout), other.memory.gpu
        size = f"{other.layout.micro_batch_size}{' recomputed' if other.layout.gradient_checkpointing else ''}"
        size_range = f"{gb(peak.peak_bytes)} ({interval(peak.low_bytes, peak.high_bytes, gb)})"
        speed = significant(other.time.tokens_per_second)
        others.append((name, size, size_range, speed, other.reason.removeprefix(name).strip()))
    headings = ("layout", "micro-batch", "GPU memory", "tokens/s", "why not")
    sections += [
        Section("Memory", tables=memory),
        Section("Time of a step", tables=(step,)),
        Section("Other layouts", tables=(Table(headings, others, "Other layouts; those that fit come first."),)),
    ]
    return Report(
        kind="Plan",
        title=short_name(model.name),
        subtitle=f"{model.architecture}, {human_count(model.parameter_count)} parameters, on {hardware.world_size} x "
        f"{hardware.gpu} ({gb(hardware.gpu_bytes)} usable each)",
        summary=(figures(summary),),
        sections=sections,
        command=plan.command,
        versions=dict(plan.versions),
        files=("plan.json",),
    )


def trial_rows(trials: Sequence[Trial]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return headings and rows of measured layouts, with predictions."""
    headings = ("layout", "micro-batch", "result", "s per step", "predicted", "spread", "tensors", "predicted tensors")
    rows: list[tuple[str, ...]] = []
    for trial in trials:
        size = f"{trial.layout.micro_batch_size} x {trial.layout.gradient_accumulation_steps}"
        seconds = "–" if trial.step_seconds is None else significant(trial.step_seconds, 3)
        varies = "–" if trial.spread is None else f"{100 * trial.spread:.0f} %"
        measured = "–" if trial.peak_allocated_bytes is None else gb(trial.peak_allocated_bytes)
        result = f"{trial.outcome}: {trial.detail}" if trial.detail else trial.outcome
        predicted = significant(trial.predicted_seconds, 3)
        memory = measured, gb(trial.predicted_allocated_bytes)
        rows.append((trial.name, size, result, seconds, predicted, varies, *memory))
    return headings, rows


Data = Mapping[str, Any]
"""Content of a JSON file."""

_KINDS = {"train": "Training", "distill": "Distillation", "qat": "Quantization-aware training"}
_LOSSES = {
    "loss": "loss",
    "student_cross_entropy": "cross-entropy of the labels",
    "teacher_cross_entropy": "teacher's cross-entropy",
    "kl_per_token": "KL(teacher | trained model)",
}
"""Labels of losses and measures in nats per token, by name in the log."""
_ACCURACIES = {
    "dpo": (
        "rewards/accuracies",
        "Win rate against the reference",
        "held-out pairs whose preferred answer gained more log-probability over the reference than the rejected one",
    ),
    "reward": ("accuracy", "Accuracy on held-out pairs", "held-out pairs whose preferred answer has the higher score"),
}
"""Name in an evaluation, label, and meaning of the share of pairs that a task ranks correctly."""
_TEACHER_SETTINGS = ("alpha", "temperature", "loss", "mixture", "teacher_placement")
"""Settings of `qat` that have no effect without a teacher."""


def training_report(data: Data, metrics: Metrics, plan: Plan) -> Report:
    """Return the report of `report.json`, `metrics.jsonl` and the plan that ran."""
    kind = data["kind"]
    title = " to ".join(short_name(data[name]) for name in ("teacher", "student")) if kind == "distill" else ""
    measures, evaluations = data["measures"], data.get("evaluations")
    caption = f"Means over all labelled tokens of {data['dataset']['evaluation_samples']} held-out samples"
    if evaluations:
        caption = f"Means over {data['dataset']['evaluation_samples']} held-out samples, by TRL's trainer."
    else:
        caption += ". `shardwright evaluate` measures standard errors."
    reasons = [plan.chosen.reason]
    reasons += [f"{role.capitalize()}: {choice.reason}" for role, choice in plan.chosen.placements.items()]
    has_teacher = data["kind"] != "qat" or data["teacher"]
    settings = [(n, v) for n, v in data["settings"].items() if has_teacher or n not in _TEACHER_SETTINGS]
    dataset = [(n.replace("_", " "), f"{v:,}" if isinstance(v, int) else v) for n, v in data["dataset"].items()]
    tables = [
        key_value_table([(n, data[n]) for n in ("model", "teacher", "student") if data.get(n)], "Models"),
        key_value_table(settings, "Settings"),
        key_value_table(dataset, "Data"),
    ]
    sections = [Section("Settings and data", reasons, tables=tables)]
    if kind == "qat":
        rounded, dense, trained = (data["cross_entropy"][stage] for stage in ("rounded", "dense", "trained"))
        texts = []
        if rounded is not None and dense is not None and rounded > dense:
            share, cost = (rounded - trained) / (rounded - dense), f"{rounded - dense:.4f} nats per token"
            texts.append(
                f"Rounding alone costs {cost}; training recovered {100 * share:.0f} % of it."
                if share <= 1
                else f"Rounding alone costs {cost}. The trained model is better than the model before, because it also "
                "learned this data. For a fair comparison, fine-tune in full precision for as many steps, then round."
            )
        sections.insert(0, Section("Checkpoint", texts, (key_value_table(checkpoint_facts(data)),)))
    # Speed and memory, measured and predicted; ± is over the intervals between two lines of `metrics.jsonl`.
    gpu, time, result = plan.chosen.memory.gpu, plan.chosen.time, data["result"]
    # The first logged interval includes compilation and allocation.
    _, error = mean_with_error([value for _, value in points(metrics, "tokens_per_second")][1:] or [0.0])
    speed = with_error(data["tokens_per_second"], error)
    predicted = f"predicted {significant(time.tokens_per_second)} ({interval(*speed_interval(plan))})"
    speeds = [("Tokens/s of all ranks", speed, predicted)]
    counted = [step for step in metrics if "positions_per_second" in step and "tokens_per_second" in step]
    positions, tokens = (sum(step[f"{what}_per_second"] for step in counted) for what in ("positions", "tokens"))
    # Tokens of a step are those of an average sample, so small differences mean nothing.
    share_with_padding = positions / tokens if positions > 1.02 * tokens else 1.0
    if share_with_padding > 1:
        # A plan counts every position of a row.
        padded = significant(share_with_padding * data["tokens_per_second"])
        speeds = [("Tokens/s of all ranks, with padding", padded, predicted), ("Tokens/s without padding", speed, "")]
    steps, peak = [value for _, value in points(metrics, "step_seconds")], result["peak_bytes"]
    mean = result["step_seconds"] / data["steps"] if data["steps"] else 0.0
    speeds += [
        (
            "Seconds per step",
            with_error(*(mean_with_error(steps[1:]) if len(steps) > 1 else (mean, None))),
            f"predicted {significant(time.seconds)} ({interval(time.low_seconds, time.high_seconds)})",
        ),
        (
            "Peak memory of tensors per accelerator",
            "not measured" if peak is None else gb(peak),
            f"predicted {gb(gpu.allocated_bytes)}; with runtime and fragmentation {gb(gpu.peak_bytes)} "
            f"({interval(gpu.low_bytes, gpu.high_bytes, gb)}) of {gb(gpu.capacity_bytes)}",
        ),
        (
            "Steps",
            f"{data['steps']:,}",
            f"{data['tokens']:,} tokens in {result['step_seconds']:.1f} s of training steps; "
            f"{data['seconds']:,.0f} s total",
        ),
    ]
    name, label, meaning = _ACCURACIES.get(data.get("task", ""), ("", "", ""))
    if evaluations and name in evaluations["after"]:
        share, pairs = evaluations["after"][name], data["dataset"]["evaluation_samples"]
        low, high = _wilson_interval(share, pairs)
        value = f"{100 * share:.1f} % ({100 * low:.1f} to {100 * high:.1f})"
        speeds.insert(0, (label, value, f"{meaning}; {pairs:,} pairs, with the 95 % interval"))
    logged = {label: values for key, label in _LOSSES.items() if (values := points(metrics, key))}
    if end := ", ".join(f"{label} {values[-1][1]:.4f}" for label, values in logged.items()):
        speeds.append(("Logged at the end", end, f"means over {data['settings'].get('logging_steps')} steps"))
    return Report(
        kind=_KINDS[kind],
        title=title or short_name(data["model"]),
        subtitle=f"on {data['dataset']['source']}; {data['layout']}, {data['hardware']}",
        summary=(Table(measures["headings"], measures["rows"], caption), figures(speeds)),
        sections=sections,
        command=data.get("command", ""),
        versions=data["versions"],
        files=("report.json", "metrics.jsonl", "plan/plan.json"),
    )


def _wilson_interval(share: float, count: int) -> tuple[float, float]:
    """Return the 95 % interval of a share of independent cases (Wilson 1927).

    >>> [round(bound, 3) for bound in _wilson_interval(1.0, 8)]
    [0.676, 1.0]
    """
    z2 = 1.96**2
    middle, half = share + z2 / (2 * count), math.sqrt(z2 * share * (1 - share) / count + (z2 / (2 * count)) ** 2)
    return max(0.0, (middle - half) / (1 + z2 / count)), min(1.0, (middle + half) / (1 + z2 / count))


def checkpoint_facts(data: Data) -> list[tuple[str, str]]:
    """Return format and verification of a checkpoint that `qat` exported, from its JSON values."""
    differences = {
        "largest difference of a weight, trained and exported": data["weight_difference"],
        "largest difference of a logit, trained and reloaded": data["logit_difference"],
    }
    return [
        ("format", f"compressed-tensors, {data['scheme']['format']}"),
        ("weights", scheme_text(data["scheme"])),
        ("quantized matrices", f"{data['quantized_layers']:,}"),
        *((name, "not compared" if value is None else f"{value:g}") for name, value in differences.items()),
    ]


def scheme_text(scheme: Data) -> str:
    """Return bits, zero points and scales of the weights of a scheme, and the rounding of inputs, in words."""
    weights, inputs = scheme["weights"], scheme["activations"]
    shared = {"tensor": "a scale for each matrix", "channel": "a scale for each output channel"}
    scales = shared.get(weights["strategy"], f"a scale for {weights['group_size']} weights")
    text = f"{weights['bits']} bit, {'symmetric' if weights['symmetric'] else 'with zero points'}, {scales}"
    if inputs is None:
        return text
    return f"{text}; inputs {inputs['bits']} bit, {'by token' if inputs['dynamic'] else 'with stored ranges'}"


def evaluation_report(data: Data) -> Report:
    text, baseline = data["text"], data["baseline"]
    against = "" if baseline is None else f"against {short_name(baseline['name'])}, "
    return Report(
        kind="Evaluation",
        title=short_name(data["model"]["name"]),
        subtitle=f"{against}{text['predicted_tokens']:,} tokens of {text['source']}: {text['windows']:,} of "
        f"{text['available_windows']:,} windows of {text['seq_len_tokens']:,} tokens",
        summary=(evaluation_table(data),),
        sections=(_evaluation_settings(data),),
        command=data.get("command", ""),
        versions=data["versions"],
        files=("evaluation.json",),
    )


def evaluation_files(data: Data) -> dict[str, str | bytes]:
    """Return `REPORT.md` and `evaluation.json` by name."""
    numbers = json.dumps(data, indent=2, allow_nan=False) + "\n"
    return {"REPORT.md": markdown(evaluation_report(data)), "evaluation.json": numbers}


def _estimate(estimate: Data) -> str:
    return with_error(estimate["value"], estimate["standard_error"])


def _percentage(estimate: Data) -> str:
    error = estimate["standard_error"]
    return f"{100 * estimate['value']:.2f}{'' if error is None else f' ± {100 * error:.2g}'} %"


def evaluation_table(data: Data) -> Table:
    """Return every measure of the model; with a baseline also the baseline's, and how they differ."""
    model, baseline, comparison = data["model"], data["baseline"], data["comparison"]
    rows = [
        [name, _estimate(model[key]), "" if baseline is None else _estimate(baseline[key]), ""]
        for name, key in (("perplexity", "perplexity"), ("cross-entropy, nats per token", "loss_nats_per_token"))
    ]
    if baseline is not None and comparison is not None:
        rows[0][3] = _change(model["perplexity"]["value"] / baseline["perplexity"]["value"] - 1)
        loss, is_significant = (
            comparison["loss_difference_nats_per_token"],
            comparison["loss_difference_is_significant"],
        )
        error = "" if loss["standard_error"] is None else f" ± {loss['standard_error']:.2g}"
        rows[1][3] = f"{loss['value']:+.4g}{error}{', within noise' if is_significant is False else ''}"
        rows += [
            ["KL(baseline | model), nats per token", _estimate(comparison["kl_nats_per_token"]), "", ""],
            ["KL of 99 % of the tokens is below", f"{comparison['kl_nats_at_share']['0.99']:.4g}", "", ""],
            ["same most likely token", _percentage(comparison["top1_agreement"]), "", ""],
        ]
    for name, key, shape in _SIZES:
        own, other = (side and side["sizes"][key] for side in (model, baseline))
        ratio = f"× {own / other:.3g}" if other and key != "parameters" else ""
        rows.append([name, shape(own), "" if other is None else shape(other), ratio])
    headings = ("", "model", "baseline", "difference") if comparison is not None else ("", "model")
    caption = "± is one standard error over windows of text. " + (
        "Differences compare the same windows of both models; more than two standard errors are significant. "
        if comparison is not None
        else ""
    )
    caption += "The first token of a window is not counted. Bits include scales, zero points and tables."
    return Table(headings, [row[: len(headings)] for row in rows], caption)


def _change(share: float) -> str:
    return f"{100 * share:+.2f} %"


_SIZES: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("safetensors on disk", "file_bytes", gb),
    ("bits per parameter", "bits_per_parameter", "{:.3f}".format),
    ("parameters", "parameters", human_count),
)
"""Name and key of a model's sizes, and how a value is shown."""


def verdict(data: Data) -> str:
    """Return the result of an evaluation's comparison in one sentence; empty without a baseline."""
    comparison = data["comparison"]
    if comparison is None:
        return ""
    difference = comparison["loss_difference_nats_per_token"]["value"]
    change = _change(math.exp(min(difference, 700.0)) - 1)
    agreement = f"Both models agree on the most likely token {_percentage(comparison['top1_agreement'])} of the time."
    if comparison["loss_difference_is_significant"] is None:
        return f"Perplexity changes by {change} on a single window, which gives no estimate of the noise. {agreement}"
    if not comparison["loss_difference_is_significant"]:
        return f"Perplexity changes by {change}, which is within the noise of this text. {agreement}"
    direction = "higher" if difference > 0 else "lower"
    return f"Perplexity is {change[1:]} {direction} than the baseline's, beyond the noise of this text. {agreement}"


def _evaluation_settings(data: Data) -> Section:
    models = [
        (m["name"], m["architecture"], plain(m["quantization"]), m["dtype"], plain(m["revision"]))
        for m in (data["model"], data["baseline"])
        if m is not None
    ]
    headings = ("model", "class", "quantization", "computes in", "commit")
    settings = [
        ("seconds total", f"{data['seconds']:.0f}"),
        *((name.replace("_", " "), value) for name, value in data["settings"].items()),
    ]
    tables = (Table(headings, models), key_value_table(settings))
    return Section("How it was measured", [verdict(data)], tables)


def serving_text(method: str, storage: str) -> str:
    """Return which libraries load and serve a quantized checkpoint."""
    if method in ("spqr", "low-rank"):
        return (
            "The checkpoint stores the weights twice: in a compact format of Shardwright, and dense for Transformers, "
            "vLLM and SGLang. No engine computes with the compact format."
        )
    engines = (
        "vLLM and Transformers read the format through bitsandbytes."
        if storage == "bitsandbytes"
        else "vLLM, SGLang and Transformers read the format."
    )
    return f"Serve it with `vllm serve DIRECTORY`. {engines} This run loaded it with Transformers only."


def quantization_report(data: Data) -> Report:
    evaluation, scheme, verification = data["evaluation"], data["scheme"], data["verification"]
    difference = verification["largest_logit_difference"]
    name = plain(scheme.get("name"))
    # Files of earlier versions have the second name.
    passed = not verification.get("errors", verification.get("faults"))
    reason = "" if data["method_reason"] == "named" else f": {data['method_reason']}"
    reloaded = "not reloaded" if difference is None else f"largest difference of a logit {significant(difference)}"
    rows = [
        ("Checkpoint verified", "yes" if passed else "no", reloaded),
        ("Scheme", name, f"by {data['method']}"),
        ("Quantized matrices", f"{len(data['quantized_layers']):,}", ""),
        ("Checkpoint, predicted", gb(data["checkpoint_bytes"]), ""),
    ]
    memory = data["memory_estimate"]
    facts = [(f"verification: {n.replace('_', ' ')}", value) for n, value in verification.items()]
    facts += [(f"calibration {n.replace('_', ' ')}", value) for n, value in (data["calibration"] or {}).items()]
    for device in ("host", "device"):
        facts += [(f"predicted memory, {device}: {n}", gb(size)) for n, size in memory[f"{device}_terms"].items()]
    facts += [(f"seconds, {stage}", f"{seconds:.1f}") for stage, seconds in data["seconds"].items()]
    texts = [serving_text(data["method"], scheme["storage"])]
    if data["calibration"] is None:
        texts.append("The method needs no calibration data.")
    measured = () if evaluation is None else (evaluation_table(evaluation),)
    return Report(
        kind="Quantization",
        title=short_name(data["model"]),
        subtitle=f"{name} by {data['method']}{reason}",
        summary=(figures(rows), *measured),
        sections=(
            *(() if evaluation is None else (_evaluation_settings(evaluation),)),
            Section("Checkpoint", texts, (key_value_table(facts),)),
            Section("Settings", tables=(key_value_table(data["settings"].items()),)),
        ),
        command=data.get("command", ""),
        versions=data["versions"],
        files=("quantization.json",),
    )


logger = logging.getLogger(__name__)

REPORT_FILE = "report.html"
TRAINING_FILE, METRICS_FILE, PLAN_DIRECTORY = "report.json", "metrics.jsonl", "plan"
SCHEMA_VERSION = 1
"""Of every file that is read here."""


def read_report(path: Path) -> Report:
    """Return the report of a command's output directory, or of the one file with its results.

    Raises:
        UsageError: there is nothing to report, or it cannot be read.
        RefusedInputError: a file is damaged or of another version.
    """
    directory, names = (path, list(_READERS)) if path.is_dir() else (path.parent, [path.name])
    for name in names:
        if name in _READERS and (directory / name).is_file():
            try:
                return _READERS[name](directory)
            except (KeyError, TypeError, AttributeError, IndexError, ValueError, ZeroDivisionError) as error:
                if isinstance(error, UsageError | RefusedInputError):
                    raise
                rule = f"is not a file of this version ({type(error).__name__}: {str(error).splitlines()[0]})"
                fix = "run the command again"
                raise RefusedInputError(ConfigError(where=str(directory / name), rule=rule, fix=fix)) from None
    rule = f"contains none of {', '.join(_READERS)}" if path.exists() else "no such file or directory"
    fix = "pass the output directory of plan, train, distill, qat, quantize or evaluate"
    raise UsageError(ConfigError(where="run", value=str(path), rule=rule, fix=fix))


def _content(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise UsageError(ConfigError(where=str(file), rule=f"cannot be read ({error.strerror})")) from None


def _json(file: Path) -> Mapping[str, Any]:
    data: Any = strict_json(_content(file))
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version != SCHEMA_VERSION:
        rule = f"must be {SCHEMA_VERSION} for this version of Shardwright"
        where = f"{file}: schema_version"
        raise RefusedInputError(ConfigError(where=where, value=version, rule=rule, fix="run the command again"))
    return dict(data)


def _training(directory: Path) -> Report:
    lines = _content(directory / METRICS_FILE).splitlines()
    plan = Plan.load(directory / PLAN_DIRECTORY)
    return training_report(_json(directory / TRAINING_FILE), [strict_json(line) for line in lines], plan)


_READERS: Mapping[str, Callable[[Path], Report]] = {
    TRAINING_FILE: _training,
    "quantization.json": lambda directory: quantization_report(_json(directory / "quantization.json")),
    "evaluation.json": lambda directory: evaluation_report(_json(directory / "evaluation.json")),
    "plan.json": lambda directory: plan_report(Plan.load(directory)),
}
"""Reader by file, in the order in which files are looked up."""


def report_html(run: str | Path) -> str:
    """Return the report of a command's output directory as one HTML file without external resources.

    Raises:
        UsageError: the directory has nothing to report.
        RefusedInputError: a file is damaged or of another version.
    """
    return html(read_report(Path(run)))


def write_html(directory: Path, *, must: bool = True) -> Path:
    """Write `report.html` into the directory of a run, and return its path.

    Unless it `must`, a report that cannot be made is only logged.

    Raises:
        ShardwrightError: the report cannot be made, or the file cannot be written.
    """
    try:
        write_files({REPORT_FILE: report_html(directory)}, directory, force=True)
    except ShardwrightError as error:
        if must:
            raise
        logger.info(f"{REPORT_FILE} was not written: {error}")
    return directory / REPORT_FILE
