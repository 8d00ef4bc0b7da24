"""`launch` and `rehearse --script`: scripts that do not import Shardwright, under plans whose directory has moved."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import shardwright
from image_models import save_image_model
from session import warm_command, warm_path
from shardwright.plugins.transformers.training_arguments import byte_tokenizer

pytestmark = pytest.mark.distributed

EXAMPLES = Path(__file__).parents[2] / "examples"
CLM = "--block_size 32 --max_steps 3 --save_strategy no --report_to none --output_dir out @plan"
SCRIPTS = {
    "own_trainer": ("full", "MODEL ARGUMENTS"),
    "own_deepspeed_loop": ("full", "MODEL PLAN"),
    "own_peft": ("lora", "MODEL ARGUMENTS"),
    "own_run_clm": ("full", f"--model_name_or_path MODEL --train_file TEXT {CLM}"),
    "own_sft": ("full", "MODEL ARGUMENTS"),
    "own_dpo": ("full", "MODEL ARGUMENTS"),
    "own_grpo": ("full", "MODEL ARGUMENTS"),
}
"""Method and arguments of each example."""
TASKS = {"own_dpo": {"task": "dpo"}, "own_grpo": {"task": "grpo", "num_generations": 4, "beta": 0.0}}


@pytest.fixture(scope="module")
def model(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("scripts") / "model"
    shutil.copytree(tiny_llama, directory)
    byte_tokenizer(512).save_pretrained(directory)
    (directory.parent / "notes.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 100)
    return directory


def planned(model: Path, place: Path, strategy: str, **words: Any) -> Path:
    stated: dict[str, Any] = {"seq_len": 32, "micro_batch_size": 2, "precision": "fp32", "strategy": strategy} | words
    shardwright.plan(str(model), "2xCPU", **stated).write(place)
    return place


def ran(*command: object, cwd: Path, code: int = 0) -> str:
    environment = os.environ | {"PATH": warm_path()}
    words = list(map(str, command))
    done = subprocess.run(words, capture_output=True, text=True, cwd=cwd, timeout=300, env=environment)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def arguments(words: str, model: Path, plan: Path) -> list[object]:
    places = {"MODEL": model, "PLAN": plan, "ARGUMENTS": plan / "training_arguments.json"}
    return [({"TEXT": model.parent / "notes.txt"} | places).get(word, word) for word in words.split()]


@pytest.mark.parametrize(
    "script",
    [
        *("own_trainer", "own_deepspeed_loop"),
        pytest.param("own_sft", marks=pytest.mark.needs("trl")),
        pytest.param("own_run_clm", marks=pytest.mark.full),
        pytest.param("own_peft", marks=pytest.mark.full),
        pytest.param("own_dpo", marks=[pytest.mark.needs("trl"), pytest.mark.full]),
        pytest.param("own_grpo", marks=[pytest.mark.needs("trl"), pytest.mark.full]),
    ],
)
def test_a_script_loses_the_same_under_plans_that_moved(
    model: Path, deepspeed_cpu_ops: None, tmp_path: Path, script: str
) -> None:
    method, words = SCRIPTS[script]
    losses = []
    for strategy in ("zero2", "zero3") if script == "own_deepspeed_loop" else ("zero3", "fsdp2"):
        task: dict[str, Any] = TASKS.get(script, {})
        written = planned(model, tmp_path / "written", strategy, method=method, **task)
        moved = tmp_path / "moved" / strategy
        moved.parent.mkdir(exist_ok=True)
        written.rename(moved)
        launch = [*warm_command("shardwright"), "launch", moved, EXAMPLES / f"{script}.py"]
        shown = ran(*launch, *arguments(words, model, moved), cwd=moved.parent)
        assert "trained on 2 ranks" in shown and "but the plan has" not in shown
        losses.append(float(re.findall(r"ranks, loss (\S+)", shown)[0]))
    assert losses == pytest.approx([losses[0]] * len(losses), abs=1e-5)
    if script in ("own_trainer", "own_peft", *TASKS):
        return
    # The last of them in small, with paths as a user types them.
    rehearse = [*warm_command("shardwright"), "rehearse", moved.name, "--steps", 4, "--script"]
    typed = arguments(words, model, Path(moved.name))
    shown = ran(*rehearse, EXAMPLES / f"{script}.py", "--", *typed, cwd=moved.parent)
    assert f"2 ranks ran {script}.py to its end" in " ".join(shown.split())


@pytest.mark.needs("trl")
def test_a_script_of_another_task_ends_with_its_name(model: Path, tmp_path: Path) -> None:
    """Under a plan without a task it runs, and is reported: memory and time were predicted for another training."""
    launch = [*warm_command("shardwright"), "launch", tmp_path / "plan", EXAMPLES / "own_dpo.py"]
    typed = arguments("MODEL ARGUMENTS", model, tmp_path / "plan")
    planned(model, tmp_path / "plan", "ddp", task="kto")
    shown = ran(*launch, *typed, cwd=tmp_path, code=2)
    rule = "args = 'DPOConfig': is of task dpo, and the plan is for kto; plan with --task dpo"
    assert rule in shown and "Traceback" not in shown
    shutil.rmtree(tmp_path / "plan")
    planned(model, tmp_path / "plan", "ddp")
    shown = ran(*launch, *typed, cwd=tmp_path)
    assert "DPOConfig is of task dpo, and the plan is for sft (plan with --task dpo)" in shown
    assert "trained on 2 ranks" in shown


_READS_AND_WRITES = """
import json
from pathlib import Path
import torch
import own_module
words = Path("data/notes.txt").read_text().split()
steps = json.loads(Path("plan/training_arguments.json").read_text())
assert Path("plan/plan.json").stat().st_size and "per_device_train_batch_size" in steps
Path("result.json").write_text(json.dumps(len(words)))
Path("code/weights.pt").absolute().unlink(missing_ok=True)
torch.save(torch.ones(1), "weights.pt")
Path(__file__).with_name("beside.txt").write_text("x")
Path(own_module.__file__).write_text("# changed")
"""


REPORTS = ("rehearsal.json", "report.html")


def files_of(directory: Path) -> dict[Path, int]:
    """When each file was written, but for the reports of rehearsals."""
    written = {path: path.stat().st_mtime_ns for path in directory.rglob("*") if path.is_file()}
    return {path: time for path, time in written.items() if path.name not in REPORTS}


def test_a_rehearsed_script_reads_its_directory_and_changes_nothing_there(model: Path, tmp_path: Path) -> None:
    here = tmp_path / "here"
    planned(model, here / "plan", "ddp")
    (here / "data").mkdir()
    shutil.copy(model.parent / "notes.txt", here / "data")
    texts = {"own.py": _READS_AND_WRITES, "own_module.py": "", "result.json": "mine", "weights.pt": "mine"}
    for directory in (here, here / "code", tmp_path / "apart"):
        directory.mkdir(exist_ok=True)
        for name, text in texts.items():
            (directory / name).write_text(text)
    before = files_of(tmp_path)
    rehearse = [*warm_command("shardwright"), "rehearse", "plan", "--force", "--script"]
    for script in ("code/own.py", "../apart/own.py"):
        assert "2 ranks ran own.py to its end" in " ".join(ran(*rehearse, script, cwd=here).split())
        assert files_of(tmp_path) == before


def test_a_loop_with_accelerate(model: Path, tmp_path: Path) -> None:
    plan = planned(model, tmp_path / "plan", "ddp")
    shown = ran(*warm_command("shardwright"), "launch", plan, EXAMPLES / "own_accelerate_loop.py", model, cwd=tmp_path)
    assert "trained on 2 ranks" in shown
    first, *_, last = map(float, re.findall(r"^loss (\S+)", shown, re.MULTILINE))
    assert last < first


def test_a_script_that_leaves_the_plan_is_reported_by_its_ranks(
    model: Path, deepspeed_cpu_ops: None, tmp_path: Path
) -> None:
    plan = planned(model, tmp_path / "plan", "zero2")
    launch = [*warm_command("shardwright"), "launch", plan]
    other = json.loads((plan / "training_arguments.json").read_text()) | {"per_device_train_batch_size": 3}
    (tmp_path / "other.json").write_text(json.dumps(other))
    shown = ran(*launch, EXAMPLES / "own_trainer.py", model, tmp_path / "other.json", cwd=tmp_path)
    assert shown.count("per_device_train_batch_size was 3, but the plan has 2: predicted memory and time") == 1
    assert shown.count("Accelerate fills the last batch of each epoch by repeating its first 2 samples") == 1


_OWN_OPTIMIZER = """
import sys
import torch
from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments

(arguments,) = HfArgumentParser(TrainingArguments).parse_json_file(sys.argv[2])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
Trainer(model=model, args=arguments, optimizers=(optimizer, None))
print("made")
"""


def test_an_own_optimizer_that_deepspeed_would_replace_is_rejected(
    model: Path, deepspeed_cpu_ops: None, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(_OWN_OPTIMIZER)
    for strategy, code in {"zero2": 2, "ddp": 0}.items():
        plan = planned(model, tmp_path / strategy, strategy)
        launch = [*warm_command("shardwright"), "launch", plan, tmp_path / "own.py", model]
        shown = ran(*launch, plan / "training_arguments.json", cwd=tmp_path, code=code)
        assert ("made" in shown) == (code == 0)
        assert ("optimizers = 'SGD': is silently replaced by the optimizer of optim" in shown) == (code == 2)


_RECOMPUTED_LAYERS = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, Trainer, TrainingArguments

(arguments,) = HfArgumentParser(TrainingArguments).parse_json_file(sys.argv[2])
arguments.max_steps, arguments.report_to = 1, []
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
# Transformers 5.24 recomputes what is inside a layer without the layer's own hooks.
inside = [layer.mlp for layer in model.model.layers]
passes = dict.fromkeys([model, *inside], 0)

def count(module, inputs):
    passes[module] += 1

for module in passes:
    module.register_forward_pre_hook(count)
rows = [{"input_ids": [1, 2, 3, 4], "labels": [1, 2, 3, 4]}] * 8
Trainer(model=model, args=arguments, train_dataset=rows).train()
recomputed = [passes[module] > passes[model] for module in inside]
tiled = "forward" in vars(inside[0])
print("recomputed:", recomputed)
print("tiled:", tiled)
# A tokenizer that stands in for the plan's pads too.
assert AutoTokenizer.from_pretrained(sys.argv[1]).pad_token or not sys.argv[3:]
if expected := sys.argv[3:]:
    assert [str(recomputed), str(tiled)] == expected, (recomputed, tiled)
"""


def test_a_plain_script_recomputes_what_the_plan_says_with_launch_and_rehearse_and_all_layers_without(
    model: Path, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(_RECOMPUTED_LAYERS)
    words = {"precision": "fp32", "strategy": "ddp", "gradient_checkpointing": "on"}
    whole = shardwright.plan(str(model), "2xCPU", seq_len=32, **words)
    layout = replace(whole.chosen.layout, checkpointed_layers=1, tiled_mlp=True, offloaded_checkpoints=1)
    replace(whole, chosen=replace(whole.chosen, layout=layout)).write(tmp_path / "plan")
    script = ["own.py", model, "plan/training_arguments.json"]
    shown = ran(*warm_command("shardwright"), "launch", "plan", *script, cwd=tmp_path)
    assert "recomputed: [True, False]" in shown and "tiled: True" in shown
    rehearse = [*warm_command("shardwright"), "rehearse", "plan", "--steps", 4, "--script"]
    assert "Passed" in ran(*rehearse, *script, "[True, False]", "True", cwd=tmp_path)
    shown = ran("accelerate", "launch", "--config_file", "plan/accelerate.yaml", *script, cwd=tmp_path)
    assert "recomputed: [True, True]" in shown
    assert (
        "trainer_for (CPU ranks, partial recomputation, tiled MLPs"
        in (tmp_path / "plan" / "accelerate.yaml").read_text()
    )


def test_axes_are_carried_by_the_trainer_of_a_plain_script(
    model: Path, deepspeed_cpu_ops: None, tmp_path: Path
) -> None:
    losses = []
    for name, words in {"whole": {}, "shared": {"sequence_parallel_size": 2}}.items():
        plan = planned(model, tmp_path / name, "zero1", global_batch_size=4, **words)
        launch = [*warm_command("shardwright"), "launch", plan, EXAMPLES / "own_trainer.py", model]
        shown = ran(*launch, plan / "training_arguments.json", cwd=tmp_path)
        losses.append(float(re.findall(r"ranks, loss (\S+)", shown)[0]))
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
    plan = planned(model, tmp_path / "stages", "auto", pipeline_parallel_size=2)
    launch = [*warm_command("shardwright"), "launch", plan, EXAMPLES / "own_trainer.py", model]
    shown = ran(*launch, plan / "training_arguments.json", cwd=tmp_path, code=2)
    assert "use shardwright.trainer_for" in shown


def test_accelerate_launches_a_plan_of_cpu_ranks_that_moved_with_a_plain_script(
    model: Path, deepspeed_cpu_ops: None, tmp_path: Path
) -> None:
    """FSDP2 is rejected, because Accelerate 1.15.0 would silently replace it with plain DDP."""

    def launched(*launcher: object, strategy: str, code: int = 0) -> str:
        plan = (tmp_path / strategy).with_suffix(".moved")
        if not plan.exists():
            planned(model, tmp_path / strategy, strategy, precision="bf16").rename(plan)
        place = [plan / "accelerate.yaml"] if launcher[0] == "accelerate" else [plan]
        script = [EXAMPLES / "own_trainer.py", model, plan / "training_arguments.json"]
        return ran(*launcher, *place, *script, cwd=elsewhere, code=code)

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    accelerate = ["accelerate", "launch", "--config_file"]
    shown = [launched(*words, strategy="zero3") for words in (accelerate, [*warm_command("shardwright"), "launch"])]
    losses = [re.findall(r"trained on 2 ranks, loss (\S+)", text) for text in shown]
    assert losses[0] == losses[1] and len(losses[0]) == 1
    assert "requires a pre-configured" in launched(*accelerate, strategy="fsdp2", code=1)


def test_a_script_is_rehearsed(model: Path, deepspeed_cpu_ops: None, tmp_path: Path) -> None:
    plan, script = tmp_path / "plan", EXAMPLES / "own_trainer.py"
    # Planned for GPUs that are not here, in a precision and for a loss that CPU ranks do without.
    words: dict[str, Any] = {"seq_len": 64, "strategy": "zero3", "micro_batch_size": 4, "loss": "chunked"}
    shardwright.plan(str(model), "4xA100-80GB", **words).write(plan)
    rehearse = [*warm_command("shardwright"), "rehearse", plan, "--steps", 4, "--script", script, "--format", "json"]
    found = json.loads(ran(*rehearse, model, plan / "training_arguments.json", cwd=tmp_path).splitlines()[0])
    checks = {check["name"]: check["detail"] for check in found["checks"]}
    assert checks["launch"] == "2 ranks ran own_trainer.py to its end"
    assert checks["script"] == "its TrainingArguments are the plan's" and len(found["losses"]) == 4
    (tmp_path / "other.json").write_text('{"per_device_train_batch_size": 3, "bf16": true}')
    shown = ran(*rehearse[:-2], "--force", model, tmp_path / "other.json", cwd=tmp_path, code=1)
    assert "error: script: per_device_train_batch_size is 3, but the plan has 4" in shown
    assert "Not rehearsed: liger-kernel, which use_liger_kernel needs on GPUs" in shown


IMAGE_SCRIPT = """
import json, sys
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, Trainer, TrainingArguments

model, processor = (kind.from_pretrained(sys.argv[1]) for kind in (AutoModelForImageTextToText, AutoProcessor))
arguments = json.load(open(sys.argv[2])) | {"output_dir": "out", "remove_unused_columns": False}
PARTS = [{"type": "image"}, {"type": "text", "text": "Colour?"}]
CHAT = [{"role": "user", "content": PARTS}, {"role": "assistant", "content": [{"type": "text", "text": "red"}]}]


def collate(rows):
    chats = [processor.apply_chat_template(CHAT if row["has_image"] else CHAT[1:]) for row in rows]
    images = [[Image.new("RGB", (20, 20), "red")] for row in rows if row["has_image"]]
    batch = dict(processor(text=chats, images=images or None, padding=True, return_tensors="pt"))
    return batch | {"labels": batch["input_ids"].clone()}


rows = [{"has_image": index // 2 % 2 == 0} for index in range(64)]
Trainer(model, TrainingArguments(**arguments), train_dataset=rows, data_collator=collate).train()
"""


def test_a_script_with_a_processor_of_images_is_rehearsed(deepspeed_cpu_ops: None, tmp_path: Path) -> None:
    model, plan, script = save_image_model(tmp_path / "llava"), tmp_path / "plan", tmp_path / "images.py"
    script.write_text(IMAGE_SCRIPT)
    words: dict[str, Any] = {"vision_tower": "trained", "projector": "trained", "images_per_sample": 1}
    shardwright.plan(str(model), "4xA100-80GB", seq_len=64, strategy="zero3", micro_batch_size=4, **words).write(plan)
    rehearse = [*warm_command("shardwright"), "rehearse", plan, "--steps", 4, "--script", script, "--format", "json"]
    found = json.loads(ran(*rehearse, model, plan / "training_arguments.json", cwd=tmp_path).splitlines()[0])
    checks = {check["name"]: check["detail"] for check in found["checks"]}
    assert checks["launch"] == "2 ranks ran images.py to its end" and len(found["losses"]) == 4
