"""Commands reject their own sources, an unwritable disk and a second run; programs rely on the keys of JSON answers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from commands import Shell, every_command, shell_in
from paths import CONFIGS, ROOT
from shardwright.ds_configs.plan.output import reserved
from small_models import llama

LOGS = ROOT / "tests" / "data" / "failed_runs"
DATA = ("--dataset", "text.txt", "--seq-len", "32")
TRAINING = (*DATA, "--hardware", "2xCPU", "--max-steps", "1", "--evaluation-samples", "2")
COMMANDS = {
    "train": ("train", "model", *TRAINING),
    "distill": ("distill", "model", "student", *TRAINING),
    "qat": ("qat", "model", "--scheme", "W4A16", "--group-size", "32", *TRAINING),
    "cache-teacher": ("cache-teacher", "model", *DATA),
    "student": ("student", "model", "--layers", "1"),
    "quantize": ("quantize", "model", "--scheme", "NF4", "--force"),
    "evaluate": ("evaluate", "model", "--dataset", "text.txt", "--seq-len", "32", "--force"),
    "rehearse": ("rehearse", "plan", "--steps", "4", "--force"),
    "tune": ("tune", "plan", "--trials", "1", "--force"),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from shardwright.ds_configs.specs.job import TrainingJob
    from shardwright.plugins.planning import plan
    from shardwright.plugins.transformers.training_arguments import byte_tokenizer

    root = tmp_path_factory.mktemp("outputs")
    for name in ("model", "student"):
        llama(hidden_size=32, vocab_size=384).save_pretrained(root / name)
        byte_tokenizer(384).save_pretrained(root / name)
    (root / "text.txt").write_text(" ".join(f"{number} squared is {number * number}." for number in range(300)))
    (root / "link").symlink_to(root / "model")
    plan(str(root / "model"), "2xCPU", TrainingJob(seq_len_tokens=32, precision="fp32")).write(root / "plan")
    return root


@pytest.fixture
def run(directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    def no_weights(*_: object, **__: object) -> None:
        raise AssertionError("the work began")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", no_weights)
    monkeypatch.setattr("shardwright.plugins.safetensors.safe_open", no_weights, raising=False)
    monkeypatch.setattr("shardwright.trainers.runs.run.launch_ranks", no_weights)

    def call(name: str, output: object) -> tuple[int, str]:
        arguments = [*COMMANDS[name], "--output-dir", str(output)]
        done = shell_in(directory, arguments[0], capsys, monkeypatch)(*arguments[1:])
        return done.code, done.err

    return call


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("output", ["model", "link", "link/inside", "/proc/nowhere/out"])
def test_an_unwritable_directory_is_rejected_before_the_work(name: str, output: str, run: Shell) -> None:
    code, reported = run(name, output)
    assert code == 2 and "Traceback" not in reported
    part = "the teacher" if name in ("distill", "cache-teacher", "student") else "the model"
    rules = {"link/inside": f"is inside {part}", "/proc/nowhere/out": "cannot be written ("}
    assert rules.get(output, f"is {part} itself") in reported


@pytest.mark.parametrize("name", COMMANDS)
def test_a_second_run_into_a_directory_is_rejected(name: str, directory: Path, run: Shell) -> None:
    with reserved(directory / "out", force=False):
        code, reported = run(name, "out")
    assert code == 2
    assert f"process {os.getpid()} is writing to it; wait until it ends" in reported
    assert not (directory / "out").exists()


PLAN_KEYS = "schema_version model hardware job chosen global_batch rejected doubts files versions"
DRY_RUN = "schema_version settings dataset plan files"
DRY_DATA = "--dataset text.txt --seq-len 32 --output-dir out --dry-run"
DRY = f"{DRY_DATA} --hardware 2xCPU"
CHOSEN = "layout reason gpu_memory host_memory nvme_bytes_per_node step_time loss"
KEYS = {
    "plan LLAMA --hardware 8xA100-80GB --tokens 1e9 --explain-tensor-parallel": f"{PLAN_KEYS} run tensor_layouts",
    "check plan": "schema_version files errors findings",
    "explain plan": "schema_version model layout reason phases terms host_terms step_time rejected",
    "explain names": "schema_version names",
    "explain optimizer_states": "schema_version name meaning",
    "calibrate --list": "schema_version runs steps database",
    "calibrate --forget all": "schema_version forgotten database",
    f"train model {DRY}": DRY_RUN,
    f"distill model student {DRY}": DRY_RUN,
    f"qat model --scheme W4A16 --group-size 32 {DRY}": f"{DRY_RUN} scheme layers",
    f"cache-teacher model {DRY_DATA}": "schema_version teacher samples tokens bytes_per_token bytes top_k temperatures "
    "vocab_size output_dir",
    "student model --layers 1 --dry-run": "schema_version teacher revision request kept_layers widths teacher_widths "
    "teacher_parameters student_parameters output_dir",
    "quantize model --scheme NF4 --dry-run": "schema_version model scheme method method_reason settings layers "
    "calibration_samples memory dense_bytes checkpoint_bytes bits_per_weight",
    "evaluate model --dataset text.txt --seq-len 32 --num-samples 2": "schema_version text model baseline comparison "
    "window_losses_nats_per_token settings versions seconds output_dir",
    "report plan": "schema_version file runs",
    "serve model --hardware 1xA100-80GB --dry-run": "schema_version model hardware tensor_parallel_size memory "
    "token_bytes kv_cache_dtype block_tokens block_bytes blocks max_model_len blocks_per_sequence longest_that_fits "
    "sequences max_num_seqs max_num_batched_tokens draft line notes engine_versions",
    "configs ls llama": "schema_version configs",
    "env": "schema_version python platform shardwright versions tested release_problems accelerators cpu_cores "
    "host_memory_gib cxx_compiler libaio accelerate_default_config",
    "explain --error LOGS/dtype.log": "schema_version cause meaning evidence fix command others plans",
    "explain --error LOGS/collectives": "schema_version collectives",
    "schema check-answer": "$defs description properties required title type",
    "schema settings": "additionalProperties description properties title type",
}


@pytest.mark.slow
@pytest.mark.parametrize("line", KEYS)
def test_the_answer_of_a_command_keeps_its_keys(
    line: str, directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(directory)
    shell: Shell = every_command(capsys, monkeypatch)
    words = line.replace("LLAMA", str(CONFIGS / "meta-llama--Llama-3.1-8B")).replace("LOGS", str(LOGS)).split()
    done = shell(*words, "--format", "json")
    answer: dict[str, Any] = json.loads(done.out)
    assert done.code == 0 and answer.keys() == set(KEYS[line].split()), done.err
    for layout in (answer.get("chosen"), *answer.get("rejected", ())) if line.startswith("plan") else ():
        assert layout.keys() - {"teacher", "reference", "reward", "value"} == set(CHOSEN.split())


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("plan-answer", "plan LLAMA --hardware 8xA100-80GB"),
        ("plan-answer", "plan LLAMA --hardware 1xL4"),
        ("check-answer", "check wrong.json"),
        ("error-answer", "explain --error LOGS/dtype.log"),
    ],
)
def test_an_answer_has_the_schema_that_is_printed(
    name: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from jsonschema import Draft202012Validator, ValidationError

    monkeypatch.chdir(tmp_path)
    (tmp_path / "wrong.json").write_text('{"train_micro_batch_size_per_gpu": 0}')
    shell = every_command(capsys, monkeypatch)
    schema = Draft202012Validator(json.loads(shell("schema", name).out))
    words = line.replace("LLAMA", str(CONFIGS / "meta-llama--Llama-3.1-8B")).replace("LOGS", str(LOGS)).split()
    answer = json.loads(shell(*words, "--format", "json").out)
    schema.validate(answer)
    for key in schema.schema["required"]:
        with pytest.raises(ValidationError):
            schema.validate({other: value for other, value in answer.items() if other != key})
