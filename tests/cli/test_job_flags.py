"""Every field of a job survives flags, settings and plans, and proposed commands plan what they name."""

from __future__ import annotations

import shlex
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from paths import CONFIGS
from planning import gallery_directory
from shardwright.cli.main import build_app
from shardwright.cli.settings import resolve
from shardwright.ds_configs.plan.out_of_memory import OutOfMemory, next_plans, out_of_memory_text
from shardwright.ds_configs.plan.plan import Plan, PlanDoesNotFitError, make_plan
from shardwright.ds_configs.plan.rendering import train_arguments
from shardwright.ds_configs.search.candidates import SearchContext
from shardwright.ds_configs.search.search import search
from shardwright.ds_configs.specs.errors import UsageError
from shardwright.ds_configs.specs.hardware import HardwareSpec, parse_hardware
from shardwright.ds_configs.specs.job import AXIS_FIELDS, MODEL_ROLES, JobSettings, TrainingJob, job_errors
from shardwright.ds_configs.specs.model import ModelSpec
from shardwright.ds_configs.specs.texts import flag_words
from shardwright.plugins.planning import checked_job, load_model_spec, read_hardware
from shardwright.trainers.distillation.settings import DistillSettings
from shardwright.trainers.qat.settings import QATSettings
from shardwright.trainers.runs.inputs import job_options, training_job
from shardwright.trainers.training.settings import TrainSettings

QWEN, LLAMA = str(CONFIGS / "Qwen--Qwen2.5-0.5B"), str(CONFIGS / "meta-llama--Llama-3.1-8B")
_TEXTS = {
    "optimizer": st.sampled_from(["adamw_torch_fused", "galore_adamw", "adafactor", "muon"]),
    "image_size": st.sampled_from(["1024x1024", "640x480"]),
    "optim_args": st.sampled_from(["", "rank=64,update_proj_gap=100", "momentum=0.9, ns_steps=6"]),
}


def _values(name: str, kind: Any) -> st.SearchStrategy[Any]:
    if name in _TEXTS:
        return _TEXTS[name]
    if get_origin(kind) is Literal:
        return st.sampled_from(get_args(kind))
    if get_origin(kind) in (Union, UnionType):
        return st.one_of([_values(name, part) for part in get_args(kind)])
    if kind is ModelSpec:
        return st.just(load_model_spec(QWEN).spec)
    if get_origin(kind) is tuple:
        return st.sampled_from(
            [("all-linear",), ("q_proj", "v_proj"), (r".*\.(q|k)_proj",), (r"q_(proj|a,b)", "o_proj")]
        )
    kinds = {int: st.integers(1, 99_999), float: st.floats(0.01, 0.99), bool: st.booleans(), type(None): st.none()}
    return kinds[kind]


_KINDS = get_type_hints(TrainingJob)
JOBS = st.builds(TrainingJob, **{field.name: _values(field.name, _KINDS[field.name]) for field in fields(TrainingJob)})
"""Jobs with any value of any field; a new field is drawn too."""


def _used(job: TrainingJob) -> TrainingJob:
    """The job with the defaults of fields that its other fields leave unused."""
    usual = TrainingJob()
    if job.method == "full":
        job = replace(job, lora_rank=usual.lora_rank, lora_targets=usual.lora_targets)
        job = replace(job, lora_variant=usual.lora_variant)
    if any(error.where in ("teacher", "reward", "value") and error.value is None for error in job_errors(job)):
        job = replace(job, task="sft")
    while errors := job_errors(job):
        job = replace(job, **{error.where: getattr(usual, error.where) for error in errors})
    unplaced = {f"{role}_placement": "auto" for role in MODEL_ROLES if not job.needs(role)}
    assert not job_errors(job)
    return replace(job, **unplaced)


_app = cache(build_app)


def _parsed(command: str, words: list[str]) -> Any:
    return resolve(_app(), [command, *words])[1].arguments["settings"]


def _planned_job(own: JobSettings) -> TrainingJob:
    return checked_job(None, own.job_fields())


DRAWN = settings(deadline=None, max_examples=25, phases=[Phase.generate], suppress_health_check=list(HealthCheck))


def _changed(words: list[str], change: list[str]) -> list[str]:
    """The words of a command with some options replaced."""
    options = {word.partition("=")[0] for word in change if word.startswith("--")}
    kept, skips = [], False
    for word in words:
        is_replaced = word.partition("=")[0] in options or f"--no-{word[2:]}" in options
        if not (is_replaced or (skips and not word.startswith("--"))):
            kept.append(word)
        skips = is_replaced and "=" not in word
    return [*kept, *change]


@given(job=JOBS, base=JOBS)
@DRAWN
def test_flags_make_the_same_job(job: TrainingJob, base: TrainingJob) -> None:
    job = _used(job)
    # No option removes a second model.
    base = _used(replace(base, task=job.task, **{role: getattr(job, role) for role in MODEL_ROLES}))
    words = shlex.split(shlex.join(["m", "--hardware", "8xH20", *job.flags()]))
    assert _planned_job(_parsed("plan", words)) == job
    if base.method == "full" or job.method != "full":
        assert _planned_job(_parsed("plan", _changed([*words[:3], *base.flags()], job.flags(base)))) == job


@pytest.mark.parametrize(
    ("written", "tokens"),
    [("16k", 16_384), ("1M", 1_048_576), ("1.5K", 1536), ("4096", 4096)],
)
def test_sequence_lengths_may_have_units(written: str, tokens: int, tmp_path: Path) -> None:
    assert _parsed("plan", ["m", "--seq-len", written]).seq_len == tokens
    for command in (["train", "m"], ["distill", "t", "s"], ["qat", "m"]):
        words = [*command[1:], "--dataset", "d", "--output-dir", "o", "--max-length", written]
        assert _parsed(command[0], words).seq_len == tokens
    file = tmp_path / "plan.yaml"
    file.write_text(f"seq_len: {written}\n")
    assert _parsed("plan", ["m", "--config", str(file)]).seq_len == tokens


@given(job=JOBS, kind=st.sampled_from([TrainSettings, DistillSettings, QATSettings]))
@DRAWN
def test_settings_of_training_commands_keep_every_field(job: TrainingJob, kind: Any) -> None:
    command = {TrainSettings: ["train", "m"], DistillSettings: ["distill", "t", "s"], QATSettings: ["qat", "m"]}[kind]
    if kind is not TrainSettings:
        job = replace(job, method="full" if job.method == "qlora" or kind is QATSettings else job.method)
        job = replace(job, precision="bf16" if job.precision == "fp8" else job.precision)
    job = replace(
        _used(job),
        loss="chunked" if job.loss == "auto" else job.loss,
        global_batch_size=64,
        seq_len_tokens=2 + job.seq_len_tokens,
    )
    words = [*command, "--dataset", "d", "--output-dir", "o", *job.flags(of=job_options(kind()))]
    own = _parsed(words[0], words[1:])
    made, names = training_job(own, parse_hardware("8xH20")), job_options(own)
    shared = {"seq_len", "precision", "optimizer", "optim_args", "weights_dtype", "offload_activations", "tiled_mlp"}
    assert shared | {"micro_batch_size", "method", "lora_targets", "offload", "strategy"} <= names
    unused = {"teacher_placement", *MODEL_ROLES}
    assert kind is not TrainSettings or names == TrainingJob().options().keys() - unused
    assert {name: made.options()[name] for name in names} == {name: job.options()[name] for name in names}


_MISFITS: list[tuple[str, str, dict[str, Any]]] = [
    (LLAMA, "1xA100-80GB", {"optimizer": "adamw_8bit", "seq_len_tokens": 2048, "offload": "none"}),
    (LLAMA, "2xRTX4080", {"precision": "fp16", "strategy": "ddp", "gradient_checkpointing": "off"}),
    (LLAMA, "8xA10G", {"seq_len_tokens": 30_000, "tiled_mlp": "off", "offload_activations": "off", "loss": "eager"}),
    (
        LLAMA,
        "1xL4",
        {"method": "lora", "lora_rank": 512, "seq_len_tokens": 65_536, "offload": "none"},
    ),
]


@pytest.mark.once
@pytest.mark.parametrize(("model", "gpus", "values"), _MISFITS)
def test_every_change_of_a_job_that_does_not_fit_plans_and_fits(model: str, gpus: str, values: dict[str, Any]) -> None:
    spec, hardware, job = load_model_spec(model).spec, parse_hardware(gpus, host_memory="64GB"), TrainingJob(**values)
    with pytest.raises(PlanDoesNotFitError) as caught:
        make_plan(spec, hardware, job)
    assert caught.value.suggestions
    for suggestion in caught.value.suggestions:
        made = _planned_by(spec, hardware, job, suggestion.change)
        gpu = made.chosen.memory.gpu
        assert (gpu.high_bytes, gpu.capacity_bytes) == (suggestion.high_bytes, suggestion.capacity_bytes)


_TASK_JOBS = st.fixed_dictionaries(
    {
        "task": st.sampled_from(["dpo", "kto", "orpo", "reward", "grpo", "rloo"]),
        "method": st.sampled_from(["full", "lora", "qlora"]),
        "seq_len_tokens": st.sampled_from([2048, 16_384, 131_072]),
        "offload": st.sampled_from(["auto", "none"]),
        "strategy": st.sampled_from(["auto", "zero2", "zero3"]),
    }
)


_TASKS_TO_PLAN = given(
    model=st.sampled_from([LLAMA, str(CONFIGS / "meta-llama--Llama-3.1-70B")]),
    gpus=st.sampled_from(["1xRTX4090", "2xA100-40GB", "4xA10G", "8xH100-80GB"]),
    values=_TASK_JOBS,
    placed=st.booleans(),
    generation=st.sampled_from(
        [
            {},
            {"generation": "vllm-server"},
            {"generation": "vllm", "vllm_tensor_parallel_size": 1},
            {"vllm_sleep": "off"},
        ]
    ),
)


@pytest.mark.full
@_TASKS_TO_PLAN
@settings(parent=DRAWN, max_examples=16, derandomize=True)
def test_every_change_of_a_task_that_does_not_fit_plans_and_fits(**drawn: Any) -> None:
    _changes_fit(**drawn)


def _changes_fit(model: str, gpus: str, values: dict[str, Any], placed: bool, generation: dict[str, Any]) -> None:
    if placed and values["task"] in ("dpo", "kto"):
        values = values | {"reference_placement": "replica"}
    if values["task"] in ("grpo", "rloo"):
        values = values | generation
    spec, hardware, job = load_model_spec(model).spec, parse_hardware(gpus, host_memory="128GB"), TrainingJob(**values)
    try:
        make_plan(spec, hardware, job)
    except PlanDoesNotFitError as error:
        for suggestion in error.suggestions:
            gpu = _planned_by(spec, hardware, job, suggestion.change).chosen.memory.gpu
            assert (gpu.high_bytes, gpu.capacity_bytes) == (suggestion.high_bytes, suggestion.capacity_bytes)
    except UsageError:
        pass


def _planned_by(spec: ModelSpec, hardware: HardwareSpec, job: TrainingJob, change: str) -> Plan:
    """The plan of the user's command with some more options."""
    words = _changed(["m", *flag_words(hardware.options()), *job.flags()], shlex.split(change))
    own = _parsed("plan", words)
    cluster = read_hardware(own.hardware, host_memory=own.host_memory, nvme=own.nvme)
    return make_plan(spec, cluster, _planned_job(own))


_OOM_JOBS: list[dict[str, Any]] = [
    {"weights_dtype": "bf16", "optimizer": "adamw_torch_8bit", "optim_args": "bf16_stochastic_round=true"},
    {"method": "lora", "lora_rank": 8, "lora_targets": ("q_proj",), "seq_len_tokens": 16_384, "micro_batch_size": 2},
    {"sequence_parallel_size": 4, "seq_len_tokens": 65_536, "offload_activations": "on", "loss": "chunked"},
]


@pytest.mark.parametrize("values", _OOM_JOBS)
@pytest.mark.parametrize("on_host", [False, True])
def test_every_command_after_an_out_of_memory_error_plans_and_fits(values: dict[str, Any], on_host: bool) -> None:
    hardware, spec = parse_hardware("8xA100-80GB", host_memory="2TB"), load_model_spec(LLAMA).spec
    plan = make_plan(spec, hardware, TrainingJob(**values))
    failure = OutOfMemory(phase="backward", error="out of memory", on_host=on_host)
    proposed = next_plans(plan, failure)
    lines = out_of_memory_text(plan, failure).splitlines()
    commands = [shlex.split(line)[2:] for line in lines if line.startswith("    shardwright plan ")]
    assert len(commands) == len(proposed)
    assert proposed or on_host
    for words, expected in zip(commands, proposed, strict=True):
        own = _parsed("plan", words)
        job = _planned_job(own)
        assert job == expected.job
        unchanged = ("weights_dtype", "optimizer", "optim_args", "method", "lora_rank", "lora_targets", "lora_variant")
        assert all(getattr(job, name) == getattr(plan.job, name) for name in (*unchanged, "seq_len_tokens"))
        cluster = read_hardware(own.hardware, host_memory=own.host_memory, nvme=own.nvme)
        assert cluster == hardware
        memory = search(SearchContext(model=spec, hardware=cluster, job=job), compare=False).chosen.memory
        if on_host:
            assert memory.host.peak_bytes_per_node < plan.chosen.memory.host.peak_bytes_per_node
        else:
            assert memory.gpu.allocated_bytes < plan.chosen.memory.gpu.allocated_bytes


def test_the_command_of_a_plan_with_a_teacher_distills_the_same_job() -> None:
    teacher, hardware = load_model_spec(LLAMA).spec, parse_hardware("4xA800", host_memory="1TB")
    job = TrainingJob(
        seq_len_tokens=1024, teacher=teacher, weights_dtype="bf16", strategy="fsdp2", teacher_placement="sharded"
    )
    plan = make_plan(load_model_spec(QWEN).spec, hardware, job)
    words = train_arguments(plan, directory="plan")
    own = _parsed("distill", words[2:])
    made, names = training_job(own, read_hardware(own.hardware, host_memory=own.host_memory)), job_options(own)
    expected = replace(plan.job, global_batch_size=plan.chosen.layout.global_batch_size).options()
    assert {name: made.options()[name] for name in names} == {name: expected[name] for name in names}
    assert words[:4] == ["shardwright", "distill", teacher.name, plan.model.name]


@pytest.mark.parametrize("has_plan", [False, True])
def test_commands_of_training_runs_keep_the_users_words(has_plan: bool) -> None:
    plan = Plan.load(gallery_directory())
    failure = OutOfMemory(phase="forward", error="out of memory")
    own_layout = "--plan=plans/a" if has_plan else "--per-device-train-batch-size=8 --tiled-mlp on"
    command = f"shardwright train /m/x --dataset 'a b.jsonl' {own_layout} --lr-scheduler-x 1 --output-dir /o"
    text = out_of_memory_text(plan, failure, command, job_options(TrainSettings()))
    commands = [shlex.split(line) for line in text.splitlines() if line.startswith("    shardwright train ")]
    assert commands
    for words, expected in zip(commands, next_plans(plan, failure), strict=True):
        assert words[:5] == ["shardwright", "train", "/m/x", "--dataset", "a b.jsonl"]
        assert words[5:9] == ["--lr-scheduler-x", "1", "--output-dir", "/o"]
        own = _parsed("train", [*words[2:5], *words[7:]])
        made = training_job(own, plan.hardware if own.hardware is None else read_hardware(own.hardware))
        layout = {"strategy", "micro_batch_size", "global_batch_size", "offload", "loss", "tiled_mlp", *AXIS_FIELDS}
        names = job_options(own) if has_plan else layout
        assert {name: made.options()[name] for name in names if name != "seq_len"} == {
            name: expected.job.options()[name] for name in names if name != "seq_len"
        }
        assert not has_plan or made.seq_len_tokens == plan.job.seq_len_tokens
