"""Predictions of drawn jobs: every term of memory at every moment, every term of a step's time, and a few searches.

`python tests/predictions.py --write` renews `predictions.json` after an intended change of a formula. It keeps the
stored jobs, and draws more while two of the `CHOICES` occur in no job together.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

from planning import public_config
from shardwright.ds_configs.legality.rules import legality_errors
from shardwright.ds_configs.memory.activations import activations_are_stored
from shardwright.ds_configs.memory.communication import default_zero_options
from shardwright.ds_configs.memory.estimate import (
    OVERHEADS,
    cpu_share_terms,
    estimate_memory,
    second_model_bytes,
    share_moment_terms,
)
from shardwright.ds_configs.memory.host import stock_loading_bytes
from shardwright.ds_configs.memory.rank_parameters import rank_shares
from shardwright.ds_configs.models.images import image_tokens
from shardwright.ds_configs.models.stored_shapes import model_spec_from_config
from shardwright.ds_configs.search.candidates import SearchContext
from shardwright.ds_configs.search.run_estimates import doubts
from shardwright.ds_configs.search.search import Evaluated, search
from shardwright.ds_configs.search.suggestions import cheapest_changes
from shardwright.ds_configs.specs.errors import UsageError
from shardwright.ds_configs.specs.hardware import HardwareSpec, parse_hardware
from shardwright.ds_configs.specs.job import TrainingJob
from shardwright.ds_configs.specs.layout import Layout, ZeroOptions
from shardwright.ds_configs.specs.model import FIRST_RELEASE, ModelSpec
from shardwright.ds_configs.specs.tasks import TASKS
from shardwright.ds_configs.step_time.estimate import estimate_step_time
from shardwright.ds_configs.step_time.learning import MeasuredStep, corrected_time
from shardwright.ds_configs.step_time.rates import TRANSFORMERS
from shardwright.ds_configs.step_time.utilization import low_utilization_reason, utilization

FILE = Path(__file__).parent / "data" / "predictions.json"

STORED: Mapping[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
"""`models`: a `config.json`, or the Hub id of one that the package has; `choices`: what a job, its layout and its
hardware can be, the usual value first; `cases` with their `picks` among these, and `searches`, each with its values."""
CHOICES: Mapping[str, list[Any]] = {"model": list(STORED["models"]), **STORED["choices"]}

OTHER_SOFTWARE = replace(
    TRANSFORMERS,
    attention="fused",
    overlapped_tensor_parallel=0.5,
    sequence_parallel_norms=True,
    overlaps_updates=True,
    scatters_transfers=True,
    reduces_to_owners=True,
    reduction_bytes=4,
    even_stages=True,
    virtual_stages=2,
    padded_vocabulary=128,
    vocabulary_parallel=True,
    selective_recomputation=True,
)
"""What published steps ran instead of Transformers (`benchmarks/published_stacks.py`)."""

USUAL_ZERO = asdict(ZeroOptions())
_MOST_PAIRS, _TRIES, _LINE = 36, 20, 1000


@cache
def model_of(name: str) -> ModelSpec:
    """Return a model for the release that the stored predictions are for."""
    config = STORED["models"][name]
    config = public_config(config) if isinstance(config, str) else config
    spec = model_spec_from_config(config, name=name, release=FIRST_RELEASE)
    assert spec is not None, name
    return spec


def job_of(picks: Mapping[str, Any]) -> TrainingJob:
    method, _, adapters = picks["method"].partition(" ")
    changes: dict[str, Any] = {picks["kernels"]: True} if picks["kernels"] else {}
    if picks["teacher"]:
        placement, _, teacher = picks["teacher"].partition(" ")
        changes |= {"teacher": model_of(teacher or "llama"), "teacher_placement": placement}
    if adapters == "dora":
        changes["lora_variant"] = adapters
    elif adapters:
        changes["lora_targets"] = ("q_proj", "v_proj")
    if picks["task"]:
        changes |= task_of(picks, method)
    if picks["images"]:
        count, size, part = picks["images"].split()
        changes |= {"images_per_sample": int(count), "image_size": size, "vision_tower": part, "projector": part}
    return TrainingJob(
        seq_len_tokens=picks["seq_len_tokens"],
        precision=picks["precision"],
        method=method,
        optimizer=picks["optimizer"],
        weights_dtype=picks["weights"],
        **{"loss": picks["loss"]} | changes,
    )


def task_of(picks: Mapping[str, Any], method: str) -> dict[str, Any]:
    """Return the fields of a task: its second models as TRL places them, and how it generates."""
    name, _, generation = picks["task"].partition(" ")
    task = TASKS[name]
    if picks["teacher"] and "teacher" not in task.second_models:
        raise UsageError([])
    placed = "sharded" if picks["engine"] in ("zero3", "zero3-hpz", "fsdp2", "fsdp2-hybrid") else "replica"
    fields: dict[str, Any] = {"task": name, "loss": "auto", "completion_tokens": picks["seq_len_tokens"] // 4}
    models = {"reference": model_of(picks["model"]), "teacher": model_of("llama")}
    for role in task.second_models:
        if role != "teacher" or not picks["teacher"]:
            fields[role] = models.get(role) or model_of("llama").with_score_head()
            fields[f"{role}_placement"] = "layout" if role == "value" else placed
    if "reference" in task.second_models and method != "full":
        fields["reference_placement"] = "shared"
    if task.generates:
        engine, _, sleep = generation.partition(" ")
        fields |= {"generation": engine or "transformers", "vllm_sleep": sleep or "off", "num_generations": 2}
        fields |= {"vllm_tensor_parallel_size": 2, "vllm_memory_share": 0.3} if sleep else {}
    return fields


def layout_of(picks: Mapping[str, Any], model: ModelSpec, job: TrainingJob, hardware: HardwareSpec) -> Layout:
    axes = {part[:2]: int(part[2:]) for part in picks["axes"].split()}
    ranks = hardware.world_size
    for axis, size in axes.items():
        ranks //= size if axis != "ep" else 1
    engine = picks["engine"]
    stage = int(engine[4]) if engine.startswith("zero") else None
    replicas = ranks if engine in ("single", "ddp", "zero0") else hardware.nodes if engine.endswith("hybrid") else 1
    optimizer, parameters = (picks["offload"] + " none").split()[:2]
    micro, _, steps = picks["batch"].partition(" x ")
    layers = model.dimensions.num_layers
    recomputed, _, on_host = picks["recomputed"].partition(" on ")
    changes: dict[str, Any] = axes
    if stage is not None:
        changes["zero"] = replace(
            default_zero_options(model, job, stage=stage, lean=picks["lean"]),
            quantized_weights=picks["quantized"] == "weights",
            quantized_gradients=picks["quantized"] == "gradients",
            hpz_partition_size=hardware.gpus_per_node if engine.endswith("hpz") else 1,
            parameter_buffer_elements=-(-model.largest_parameter // ranks) if parameters == "nvme" else 0,
        )
    return Layout(
        engine=engine.partition("-")[0] if stage is None else "deepspeed",
        zero_stage=stage,
        offload_optimizer=optimizer,
        offload_param=parameters,
        dp_replicate=replicas,
        dp_shard=ranks // replicas,
        micro_batch_size=int(micro),
        gradient_accumulation_steps=int(steps or 1),
        gradient_checkpointing=recomputed != "none",
        checkpointed_layers=max(1, layers // 3) if recomputed == "some" else None,
        offloaded_checkpoints=(layers // 4 if recomputed == "some" else layers) if on_host else 0,
        tiled_mlp=picks["tiled_mlp"],
        **changes,
    )


def subject(picks: Mapping[str, Any]) -> tuple[Layout, ModelSpec, HardwareSpec, TrainingJob]:
    picks = {name: choices[0] for name, choices in CHOICES.items()} | dict(picks)
    model, job, hardware = model_of(picks["model"]), job_of(picks), parse_hardware(picks["hardware"], nvme="/nvme:9TB")
    model = job.freeze(model)
    image_tokens(model, job)
    return layout_of(picks, model, job, hardware), model, hardware, job


Values = dict[str, Any]
"""Numbers and words by name; a list has one number for each moment or phase, unless all are equal."""


def predictions(picks: Mapping[str, Any]) -> Values:
    """Return everything that is predicted of a case, by name."""
    layout, model, hardware, job = subject(picks)
    memory = estimate_memory(layout, model, hardware, job)
    time = estimate_step_time(layout, model, hardware, job)
    other = estimate_step_time(layout, model, hardware, job, software=OTHER_SOFTWARE)
    values: Values = {"layout": layout.label, "stored activations": activations_are_stored(model, job, layout)}
    values |= {f"zero {name}": value for name, value in asdict(layout.zero).items() if value != USUAL_ZERO[name]}
    for share in rank_shares(layout, model, job):
        stage = "" if share.stage is None else f" of stage {share.stage.index}"
        moments = share_moment_terms(layout, share, job, gpu=hardware.gpu != "CPU", device_bytes=hardware.gpu_bytes)
        values |= _by_moment(f"accelerator{stage}", list(moments.values()))
    if hardware.gpu == "CPU":
        for share, phases in cpu_share_terms(layout, model, job):
            values |= _by_moment(f"CPU rank of {share.model.parameter_count:,}", list(phases.values()))
    for kind, estimate in (("accelerator", memory.gpu), ("host", memory.host)):
        values |= {f"{kind} {name}": value for name, value in asdict(estimate).items() if isinstance(value, int | str)}
    values |= {f"host: {name}": count for name, count in memory.host.terms.items()}
    values |= {f"accelerator: {term.name}": memory.gpu.terms.get(term.name, 0) for term in OVERHEADS}
    values["host while stock code loads"] = stock_loading_bytes(layout, model, hardware, job)
    for second in job.second_models:
        on_accelerator, on_host = second_model_bytes(second, layout, hardware, job)
        values |= {f"{second.role} on an accelerator": on_accelerator, f"{second.role} on the host": on_host}
    names = dict.fromkeys(("identifier", "model", "layout"), "") | {"gpu": hardware.gpu, "engine": "ddp"}
    run = MeasuredStep(**names, ranks=1, predicted_seconds=1.0, measured_seconds=1.3)
    corrected = corrected_time(time, (run,), hardware=hardware, engine=layout.engine)
    values["step after a run"] = [corrected.low_seconds, corrected.seconds, corrected.high_seconds]
    for kind, estimated in (("step", time), ("step of other software", other)):
        values |= {f"{kind}: {name}": seconds for name, seconds in estimated.terms.items()}
    values |= {f"step {name}": value for name, value in asdict(time).items() if name != "terms"}
    values["step utilization"] = utilization(time, model, hardware, job)
    values["step of low utilization"] = low_utilization_reason(time, model, hardware, job) is not None
    return values


def _by_moment(where: str, moments: list[dict[str, int]]) -> Values:
    names = dict.fromkeys(name for terms in moments for name in terms)
    counts = {name: [terms.get(name, 0) for terms in moments] for name in names}
    return {f"{where}: {name}": each if len(set(each)) > 1 else each[0] for name, each in counts.items() if any(each)}


def search_values(name: str) -> Values:
    """Return what a search chooses and rejects, with the figures that decide."""
    model, hardware, fields = STORED["searches"][name]["plan"]
    job = {field: model_of(value) if field == "teacher" else value for field, value in fields.items()}
    name, _, nvme = hardware.partition(" ")
    cluster = parse_hardware(name, nvme=nvme or None)
    context = SearchContext(model=model_of(model), hardware=cluster, job=TrainingJob(**job))
    try:
        outcome = search(context)
    except UsageError as error:
        return {"error": str(error)}

    def figures(each: Evaluated) -> list[float]:
        layout = each.layout
        recomputed = layout.recomputed_layers(10**6) and (layout.checkpointed_layers or -1)
        return [
            layout.micro_batch_size,
            layout.gradient_accumulation_steps,
            recomputed,
            layout.offloaded_checkpoints,
            layout.zero.reduce_bucket_size,
            each.memory.gpu.high_bytes,
            each.time.tokens_per_second,
        ]

    values: Values = {f"rejected {each.layout.label} with {each.loss} loss": figures(each) for each in outcome.rejected}
    values |= {f"why not {each.layout.label}": each.reason for each in outcome.rejected}
    chosen = outcome.chosen
    if chosen is None:
        return values | {"what would fit": list(map(str, cheapest_changes(context)))}
    values["less certain"] = list(doubts(chosen.layout, context.model, cluster, outcome.job))
    values |= {f"{role} {choice.placement}": choice.reason for role, choice in chosen.placements.items()}
    return {f"chosen {chosen.layout.label} with {chosen.loss} loss": figures(chosen), "why": chosen.reason} | values


def differences(before: Values, now: Values) -> list[str]:
    """Return what moved, and by how much."""
    moved = []
    for name in dict.fromkeys((*before, *now)):
        old, new = before.get(name), now.get(name)
        pairs = zip(*(each if isinstance(each, list) else [each] * 13 for each in (old, new)), strict=False)
        changed = {f"{_shown(a)} -> {_shown(b)}{_gain(a, b)}": None for a, b in pairs if not _equal(a, b)}
        if changed:
            moved.append(f"{name}: {', '.join(changed)}")
    return moved


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b) <= 1e-9 * max(abs(a), abs(b))
    return bool(a == b)


def _shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int | float) else str(value)


def _gain(a: Any, b: Any) -> str:
    numbers = a and b and all(isinstance(value, int | float) for value in (a, b))
    return f" ({100 * (b / a - 1):+.2g} %)" if numbers else ""


# --- drawing ---


def pairs_of(picks: Mapping[str, Any]) -> Iterator[tuple[tuple[str, Any], ...]]:
    """Yield what a case covers: its values, and pairs of fields that together have at most `_MOST_PAIRS` of them."""
    yield from ((each,) for each in picks.items())
    for one, two in combinations(picks.items(), 2):
        if len(CHOICES[one[0]]) * len(CHOICES[two[0]]) <= _MOST_PAIRS:
            yield one, two


def drawn(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the cases, and further legal ones with the pairs that these do not have."""
    choose = random.Random(len(cases))
    usual = {name: choices[0] for name, choices in CHOICES.items()}
    covered = {pair for picks in cases for pair in pairs_of(usual | picks)}
    every = {
        pair
        for one, two in combinations(CHOICES, 2)
        for first in CHOICES[one]
        for second in CHOICES[two]
        for pair in pairs_of({one: first, two: second})
    }
    for wanted in sorted(every - covered, key=str):
        if wanted in covered:
            continue
        starts = [
            usual | {name: choose.choice(CHOICES[name]) for name in choose.sample(list(CHOICES), count)}
            for count in range(8)
            for _ in range(_TRIES)
        ]
        picks = next((start | dict(wanted) for start in starts if _legal(start | dict(wanted))), {})
        if not picks:
            continue
        # Change one field after the other to a value that is legal and covers more.
        for name in choose.sample(list(CHOICES), len(CHOICES)):
            changed = [picks | {name: value} for value in CHOICES[name] if name not in dict(wanted)]
            changed.sort(key=lambda other: -len(set(pairs_of(other)) - covered))
            picks = next((other for other in changed if _legal(other)), picks)
        covered |= set(pairs_of(picks))
        cases = [*cases, {name: value for name, value in picks.items() if value != usual[name]}]
    return cases


def _legal(picks: Mapping[str, Any]) -> bool:
    try:
        layout, model, hardware, job = subject(picks)
        return layout.world_size == hardware.world_size and not legality_errors(model, layout, job, hardware)
    except (UsageError, AssertionError, ZeroDivisionError):
        return False


def _text(part: Any) -> str:
    """Return JSON with short parts on one line."""
    line = json.dumps(part)
    if len(line) < _LINE or not isinstance(part, list | dict):
        return line
    if isinstance(part, list):
        return "[\n" + ",\n".join(map(_text, part)) + "]"
    return "{\n" + ",\n".join(f"{json.dumps(name)}: {_text(each)}" for name, each in part.items()) + "}"


if __name__ == "__main__":
    if "--write" not in sys.argv:
        sys.exit(__doc__)
    document = {
        "models": STORED["models"],
        "choices": STORED["choices"],
        "cases": [
            {"picks": picks, "values": predictions(picks)}
            for picks in drawn([each["picks"] for each in STORED["cases"]])
        ],
        "searches": {
            name: {"plan": each["plan"], "values": search_values(name)} for name, each in STORED["searches"].items()
        },
    }
    FILE.write_text(_text(document) + "\n", encoding="utf-8")
