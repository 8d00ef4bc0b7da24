"""Keys of `--format json` of every command that answers in seconds; programs that read them rely on each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commands import Shell, every_command
from paths import CONFIGS
from shardwright.ds_configs.specs.job import TrainingJob
from shardwright.plugins.planning.from_names import plan
from small_models import llama

PLAN = "schema_version model hardware job chosen global_batch rejected doubts files versions"
DRY_RUN = "schema_version settings dataset plan files"
DATA = "--dataset text.txt --seq-len 32 --output-dir out --dry-run"
TRAINING = f"{DATA} --hardware 2xCPU"
CHOSEN = "layout reason gpu_memory host_memory nvme_bytes_per_node step_time loss"
KEYS = {
    "plan LLAMA --hardware 8xA100-80GB --tokens 1e9 --explain-tensor-parallel": f"{PLAN} run tensor_layouts",
    "check plan": "schema_version files errors findings",
    "explain plan": "schema_version model layout reason phases terms host_terms step_time rejected",
    "explain names": "schema_version names",
    "explain optimizer_states": "schema_version name meaning",
    "calibrate --list": "schema_version runs steps database",
    "calibrate --forget all": "schema_version forgotten database",
    f"train model {TRAINING}": DRY_RUN,
    f"distill model model {TRAINING}": DRY_RUN,
    f"qat model --scheme W4A16 --group-size 32 {TRAINING}": f"{DRY_RUN} scheme layers",
    f"cache-teacher model {DATA}": "schema_version teacher samples tokens bytes_per_token bytes top_k temperatures "
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
    "env --patches": "schema_version patches",
    "schema settings": "additionalProperties description properties title type",
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from shardwright.plugins.transformers.training_arguments import byte_tokenizer

    root = tmp_path_factory.mktemp("answers")
    llama(hidden_size=32, vocab_size=384).save_pretrained(root / "model")
    byte_tokenizer(384).save_pretrained(root / "model")
    (root / "text.txt").write_text(" ".join(f"{number} squared is {number * number}." for number in range(300)))
    plan(str(root / "model"), "2xCPU", TrainingJob(seq_len_tokens=32, precision="fp32")).write(root / "plan")
    return root


@pytest.mark.slow
@pytest.mark.parametrize("line", KEYS)
def test_the_answer_of_a_command_keeps_its_keys(
    line: str, directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(directory)
    shell: Shell = every_command(capsys, monkeypatch)
    words = line.replace("LLAMA", str(CONFIGS / "meta-llama--Llama-3.1-8B")).split()
    done = shell(*words, "--format", "json")
    answer: dict[str, Any] = json.loads(done.out)
    assert done.code == 0 and answer.keys() == set(KEYS[line].split()), done.err
    for layout in (answer.get("chosen"), *answer.get("rejected", ())) if line.startswith("plan") else ():
        assert layout.keys() - {"teacher"} == set(CHOSEN.split())
