"""The command line in this process: bad input, precedence, output shapes and what is written."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paths import CONFIGS
from shardwright.cli.main import run
from shardwright.ds_configs.plan.plan import Plan, make_plan
from shardwright.ds_configs.specs.errors import ShardwrightError
from shardwright.ds_configs.specs.hardware import parse_hardware
from shardwright.ds_configs.specs.job import TrainingJob
from shardwright.plugins.planning.models import load_model_spec

MODELS = CONFIGS
LLAMA = str(MODELS / "meta-llama--Llama-3.1-8B")
CONFIG: dict[str, Any] = json.loads((MODELS / "meta-llama--Llama-3.1-8B" / "config.json").read_text())
GPU = ("--hardware", "8xA100-80GB")


class Result(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def errors(self) -> list[str]:
        lines = self.err.splitlines()
        assert all(line.startswith(("error: ", "note: ")) for line in lines), self.err
        return [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]


Shell = Callable[..., Result]


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    for name in list(os.environ):
        if name.startswith("SHARDWRIGHT_") and name != "SHARDWRIGHT_DATA_DIR":
            monkeypatch.delenv(name)

    def call(*arguments: str) -> Result:
        capsys.readouterr()
        code = run(arguments)
        return Result(code, *capsys.readouterr())

    return call


def model_directory(tmp_path: Path, text: str | None = None, **changes: Any) -> str:
    directory = tmp_path / "model"
    directory.mkdir(exist_ok=True)
    kept = {name: value for name, value in (CONFIG | changes).items() if value != "MISSING"}
    (directory / "config.json").write_text(json.dumps(kept) if text is None else text)
    return str(directory)


@pytest.mark.parametrize(
    ("changes", "messages"),
    [
        (
            {"num_hidden_layers": -1, "num_key_value_heads": 5, "vocab_size": True},
            ["num_hidden_layers = -1", "(32 % 5 = 2); nearest legal values: 2, 4", "vocab_size = True"],
        ),
        ({"num_hidden_layers": 10**18}, [f"num_hidden_layers = {10**18}: must be an integer from 1 to 10,000"]),
        ({"num_hidden_layers": "MISSING", "hidden_size": None}, ["num_hidden_layers: is missing", "hidden_size"]),
        ({"hidden_size": float("nan")}, ["is not valid JSON (a number is NaN)"]),
        ({"hidden_size": 4095}, ["must be divisible by num_attention_heads (4095 % 32 = 31); add head_dim"]),
        ({"num_attention_heads": [32]}, ["num_attention_heads = [32]"]),
        ({"head_dim": 0}, ["head_dim = 0"]),
        ({"intermediate_size": "14336"}, ["intermediate_size = '14336'"]),
        ({"architectures": {"a": 1}}, ["architectures = {'a': 1}: must be a list of class names"]),
        ({"architectures": 5, "quantization_config": [1]}, ["architectures = 5", "quantization_config = [1]"]),
        ({"sliding_window": "x", "partial_rotary_factor": 1e9}, ["sliding_window = 'x'", "partial_rotary_factor"]),
        ({"tie_word_embeddings": "false"}, ["tie_word_embeddings = 'false': must be true or false"]),
        ({"model_type": "bart", "encoder_layers": 10**9}, ["encoder_layers = 1000000000: must be at most 1,000"]),
        ({"model_type": "swin", "depths": [2, 10**9]}, ["depths"]),
        ({"model_type": "../../x"}, ["model_type = '../../x'"]),
        ({"model_type": "MISSING", "peft_type": "LORA"}, ["this is an adapter"]),
        ({"model_type": "unheard_of"}, ["model_type = 'unheard_of': is unknown to transformers"]),
        ({"text_config": {"num_hidden_layers": 0}}, ["text_config: num_hidden_layers = 0"]),
    ],
)
def test_an_impossible_config_is_rejected_with_all_its_errors(
    shell: Shell, tmp_path: Path, changes: dict[str, Any], messages: list[str]
) -> None:
    head_dim = {"head_dim": None} if "hidden_size" in changes else {}
    result = shell("plan", model_directory(tmp_path, **{**head_dim, **changes}), *GPU)
    assert (result.code, result.out) == (4, "")
    assert len(result.errors) == len(messages)
    assert all(message in result.err for message in messages)


@pytest.mark.parametrize("text", ["", "[1]", "{", '"x"', "[" * 100_000, '{"model_type": ' + "9" * 5000 + "}", "\0"])
def test_a_config_that_is_not_a_json_object_is_rejected(shell: Shell, tmp_path: Path, text: str) -> None:
    result = shell("plan", model_directory(tmp_path, text=text), *GPU)
    assert (result.code, result.out, len(result.errors)) == (4, "", 1)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["plan", LLAMA], 2, "hardware: is missing; pass --hardware"),
        (["plan", LLAMA, "--hardware", "8xA100"], 2, "write one of A100-40GB, A100-80GB"),
        (["plan", LLAMA, "--hardware", "8xH1000"], 2, "is not in the catalog of accelerators; nearest: H100-80GB"),
        (["plan", LLAMA, "--hardware", "0xA100-80GB"], 2, "gpus_per_node = 0"),
        (["plan", LLAMA, "--hardware", "none.yaml"], 2, "cannot be read"),
        (["plan", LLAMA, *GPU, "--precison", "fp16"], 2, "--precison: is not an option; did you mean --precision?"),
        (["plan", LLAMA, *GPU, "--precision", "fp8"], 2, "needs an NVIDIA GPU of compute capability 8.9"),
        (["plan", LLAMA, *GPU, "--precision", "fp4"], 2, "must be 'bf16', 'fp16', 'fp32' or 'fp8'"),
        (["plan", LLAMA, *GPU, "--seq-len", "many"], 2, "seq_len = 'many': must be an integer"),
        (["plan", LLAMA, *GPU, "--optimizer", "adamw_tosch"], 2, "did you mean adamw_torch?"),
        (["plan", LLAMA, *GPU, "--method", "lora", "--lora-targets", "q_prj"], 2, "match no Linear module"),
        (["plan", LLAMA, *GPU, "--revision", "main"], 2, "only a Hub model has revisions"),
        (["plan", LLAMA, *GPU, "--num-processes", "0"], 2, "num_processes = 0: must be greater than or equal to 1"),
        (["plan", LLAMA, *GPU, "--num-processes", "4"], 2, "must equal the 8 accelerators"),
        (["plan", LLAMA, *GPU, "extra"], 2, "extra"),
        (["plan", LLAMA, "--hardware", "1xT4"], 2, "precision = 'bf16': is not supported by T4"),
        (["plan", "/no/such/model", *GPU], 2, "no such file or directory"),
        (["plan", "~nobody-has-this-name/model", *GPU], 2, "no such file or directory"),
        (["plan", "", *GPU], 2, "no such file or directory"),
        (["plan", "x" * 5000, *GPU], 2, "File name too long"),
        (["plan"], 2, "model: is missing; pass it after the command"),
        (["plan", LLAMA, "--lora-rank", "8", *GPU], 2, "lora_rank = 8: requires --method lora or qlora"),
        (["pln"], 2, "did you mean plan?"),
        (
            ["plan", LLAMA, *GPU, "--torch-compile", "--strategy", "zero3"],
            2,
            "reads parameters that ZeRO-3 has released",
        ),
        (["explain", "gathered_parametres"], 2, "did you mean gathered_parameters"),
        (["explain", "x" * 5000], 2, "is not a path, strategy, term or rule; shardwright explain names"),
        (["explain", LLAMA], 2, "has no plan.json"),
        (["configs", "cp", "../secret", "out"], 2, "is not in the gallery"),
        (["schema", "nothing"], 2, '"settings", "hardware", "plan"'),
        (["check", "ds_config.json", "--num-processes", "0"], 2, "num_processes = 0"),
    ],
)
def test_bad_usage_is_one_line_with_a_fix(shell: Shell, arguments: list[str], code: int, message: str) -> None:
    result = shell(*arguments)
    assert (result.code, result.out) == (code, "")
    assert len(result.errors) == 1
    assert message in result.errors[0]


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ('seq_len: "x"\nprecison: bf16\nlora_rank: 1.5', ["seq_len (from file) = 'x'", "mean precision?", "= 1.5"]),
        ("micro_batch_size: [1]", ["micro_batch_size (from file) = '[\"1\"]': must be an integer or 'auto'"]),
        ("micro_batch_size: some", ["micro_batch_size (from file) = 'some'"]),
        ("seq_len: true", ["seq_len (from file) = 'true': must be an integer"]),
        ("seq_len: 0x" + "f" * 5000, ["seq_len"]),
    ],
)
def test_every_error_of_a_settings_file_is_reported(
    shell: Shell, tmp_path: Path, text: str, messages: list[str]
) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text(text)
    result = shell("plan", LLAMA, *GPU, "--config", str(file))
    assert (result.code, result.out, len(result.errors)) == (2, "", len(messages))
    assert all(message in result.err for message in messages)


def test_flags_override_environment_overrides_file_overrides_defaults(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text("hardware: 8xA100-80GB\nseq-len: 1024\nmicro_batch_size: 2\nlora_rank: 8\nmethod: lora\n")
    monkeypatch.setenv("SHARDWRIGHT_PLAN_MICRO_BATCH_SIZE", "4")
    monkeypatch.setenv("SHARDWRIGHT_PLAN_LORA_RANK", "9")
    monkeypatch.setenv("SHARDWRIGHT_PLAN_LORA_TARGETS", "q_proj")
    output = tmp_path / "plan"
    shown = shell("plan", LLAMA, "--config", str(file), "--lora_rank", "10", "--dry-run", "--output-dir", str(output))
    assert shown.code == 0, shown.err
    rows = {line.split()[0]: line.split()[1:] for line in shown.out.splitlines() if len(line.split()) == 3}
    assert rows["hardware"] == ["8xA100-80GB", "file"]
    assert rows["seq_len"] == ["1024", "file"]
    assert rows["micro_batch_size"] == ["4", "environment"]
    assert rows["lora_targets"] == ["q_proj", "environment"]
    assert rows["lora_rank"] == ["10", "flag"]
    assert rows["precision"] == ["bf16", "default"]
    assert not output.exists()
    answer = json.loads(shell("plan", LLAMA, "--config", str(file), "--format", "json").out)
    assert (answer["job"]["seq_len"], answer["job"]["micro_batch_size"]) == (1024, 4)
    for name, value in (("SEQ_LEN", "9" * 5000), ("SEQ_LEN", "-4"), ("NVMEE", "1")):
        monkeypatch.setenv(f"SHARDWRIGHT_PLAN_{name}", value)
        result = shell("plan", LLAMA, "--method", "lora", *GPU)
        assert (result.code, len(result.errors)) == (2, 1)
        monkeypatch.delenv(f"SHARDWRIGHT_PLAN_{name}")


def test_both_spellings_of_a_flag_give_the_same_bytes(shell: Shell) -> None:
    hyphen = shell("plan", LLAMA, *GPU, "--seq-len", "512", "--micro-batch-size", "2", "--format", "json")
    underscore = shell("plan", LLAMA, *GPU, "--seq_len", "512", "--micro_batch_size", "2", "--format=json")
    assert hyphen.code == 0
    assert hyphen == underscore


def test_json_of_a_plan_has_the_documented_shape(shell: Shell, tmp_path: Path) -> None:
    output = tmp_path / "plan"
    result = shell("plan", LLAMA, *GPU, "--output-dir", str(output), "--format", "json")
    assert (result.code, result.err) == (0, "")
    answer = json.loads(result.out)
    assert answer.keys() >= {"schema_version", "model", "hardware", "job", "chosen", "rejected", "files"}
    assert answer["schema_version"] == 1
    assert answer["model"].keys() >= {"name", "parameters", "trainable_parameters", "architecture"}
    assert answer["hardware"].keys() >= {"name", "nodes", "gpus_per_node", "gpu_bytes"}
    assert answer["job"].keys() >= {"seq_len", "precision", "optimizer", "method"}
    chosen = answer["chosen"]
    expected = {
        "strategy",
        "gpu_memory",
        "host_memory",
        "nvme_bytes_per_node",
        "step_time",
        "loss",
        "reason",
        "teacher",
    }
    assert chosen.keys() == expected
    places = {"offload_optimizer", "offload_param", "tp", "pp", "sp", "cp", "ep"}
    sizes = {"micro_batch_size", "gradient_accumulation_steps", "gradient_checkpointing"}
    assert chosen["strategy"].keys() >= {"engine", "zero_stage"} | places | sizes
    memory = {"peak_bytes", "low_bytes", "high_bytes", "allocated_bytes", "capacity_bytes", "phase", "terms"}
    assert chosen["gpu_memory"].keys() >= memory
    assert chosen["gpu_memory"]["phase"] in ("loss", "backward", "step", "init")
    assert chosen["host_memory"].keys() >= {"peak_bytes_per_node", "capacity_bytes_per_node", "terms"}
    assert all(other.keys() >= {"strategy", "reason", "gpu_memory"} for other in answer["rejected"])
    assert sorted(answer["files"]) == sorted(str(path) for path in output.iterdir())


def test_json_of_a_failure_is_one_object(shell: Shell) -> None:
    misfit = shell("plan", LLAMA, "--hardware", "1xA10", "--strategy", "single", "--format", "json")
    answer = json.loads(misfit.out)
    assert misfit.code == answer["error"]["exit_code"] == 3
    assert misfit.errors[0] == answer["error"]["message"]
    assert answer["chosen"] is None and answer["rejected"]
    assert answer["would_fit"][0].keys() == {"change", "strategy", "high_bytes", "capacity_bytes"}
    human = shell("plan", LLAMA, "--hardware", "1xA10", "--strategy", "single")
    assert (human.code, human.out, human.errors) == (3, "", misfit.errors)
    for arguments, code in ((["--hardware", "8xA100"], 2), (["--nope"], 2), ([], 2)):
        result = shell("plan", LLAMA, *arguments, "--format", "json")
        answer = json.loads(result.out)
        assert answer.keys() == {"schema_version", "error"}
        assert answer["error"].keys() == {"exit_code", "message", "errors"}
        assert result.code == answer["error"]["exit_code"] == code
        assert all(error.keys() == {"where", "value", "rule", "fix"} for error in answer["error"]["errors"])


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_an_existing_directory_is_replaced_only_by_force(shell: Shell, tmp_path: Path) -> None:
    output = tmp_path / "päth with [spaces] and 'quotes'"
    command = ["plan", LLAMA, *GPU, "--output-dir", str(output)]
    assert shell(*command).code == 0
    (output / "mine.txt").write_text("kept")
    before = contents(output)
    refused = shell(*command, "--seq-len", "512")
    assert refused.code == 2 and "--force" in refused.errors[0]
    assert contents(output) == before
    assert shell(*command, "--seq-len", "512", "--force").code == 0
    after = contents(output)
    assert after.keys() == before.keys() and after["plan.json"] != before["plan.json"]
    assert after["mine.txt"] == b"kept"
    assert shell("explain", str(output)).code == 0


def test_the_slowest_of_unequal_nodes_limits_the_plan(shell: Shell) -> None:
    reported = shell("plan", LLAMA, "--hardware", "4xA100-40GB+2x4xH100-80GB", "--format", "json")
    hardware = json.loads(reported.out)["hardware"]
    assert (hardware["gpu"], hardware["nodes"], hardware["gpus_per_node"]) == ("A100-40GB", 3, 4)
    assert "note: flops_per_s: limited to 3.12e+14 by A100-40GB" in reported.err
    reported = shell("plan", LLAMA, "--hardware", "2x8xH100-80GB+6xH100-80GB", "--format", "json")
    assert json.loads(reported.out)["chosen"]["strategy"]["dp_shard"] == 18
    assert "4 accelerators stay idle" in reported.err


@pytest.mark.parametrize(
    ("name", "text"),
    [("torch.compile", "the compiler's partition"), ("fp8", "the memory of bf16"), ("torchtitan", "not covered: ")],
)
def test_assumptions_about_kernels_are_explained(shell: Shell, name: str, text: str) -> None:
    reported = shell("explain", name)
    assert reported.code == 0 and text in " ".join(reported.out.split())


def test_existing_files_are_reported_and_kept(shell: Shell, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    for place, code in ((file, 2), (file / "under", 1), (tmp_path / ("x" * 300), 1)):
        result = shell("plan", LLAMA, *GPU, "--output-dir", str(place))
        assert (result.code, result.out, len(result.errors)) == (code, "", 1)
    blocked = tmp_path / "plan" / "plan.json"
    blocked.mkdir(parents=True)
    result = shell("plan", LLAMA, *GPU, "--output-dir", str(blocked.parent), "--force")
    assert result.code == 2 and "is a directory, but a file must be written there" in result.errors[0]
    assert list(blocked.parent.iterdir()) == [blocked] and file.read_text() == "x"


@pytest.mark.parametrize(("owner", "method"), [(Path, "replace"), (os, "fsync"), (Path, "mkdir"), (Path, "chmod")])
def test_a_failing_write_changes_nothing(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, method: str
) -> None:
    output = tmp_path / "plan"
    shell("plan", LLAMA, *GPU, "--output-dir", str(output))
    before = contents(tmp_path)
    calls = []

    def fail(*_: object, **__: object) -> None:
        calls.append(method)
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(owner, method, fail)
    place = str(tmp_path / "other" if method == "mkdir" else output)
    result = shell("plan", LLAMA, *GPU, "--seq-len", "512", "--output-dir", place, "--force")
    assert calls and (result.code, result.out) == (1, "")
    assert result.errors == [f"output_dir = {place!r}: cannot be written (Read-only file system)"]
    assert contents(tmp_path) == before


@pytest.mark.slow
@settings(max_examples=4, deadline=None)
@given(
    name=st.sampled_from(["meta-llama--Llama-3.2-1B", "meta-llama--Llama-3.1-70B"]),
    hardware=st.sampled_from(["8xA100-80GB", "4x8xH100-80GB", "2xCPU"]),
    seq_len=st.sampled_from([512, 2048]),
    method=st.sampled_from(["full", "lora"]),
    distil=st.booleans(),
)
def test_a_loaded_plan_equals_the_written_plan(
    tmp_path_factory: pytest.TempPathFactory, name: str, hardware: str, seq_len: int, method: Any, distil: bool
) -> None:
    directory = tmp_path_factory.mktemp("plan")
    teacher = load_model_spec(LLAMA).spec if distil else None
    precision: Any = "fp32" if "CPU" in hardware else "bf16"
    job = TrainingJob(seq_len_tokens=seq_len, method=method, teacher=teacher, precision=precision)
    cluster = parse_hardware(hardware, host_memory="4TB")
    try:
        plan = make_plan(load_model_spec(str(MODELS / name)).spec, cluster, job, versions=(("shardwright", "0"),))
    except ShardwrightError:
        return
    plan.write(directory)
    assert Plan.load(directory) == plan == Plan.load(directory / "plan.json")
