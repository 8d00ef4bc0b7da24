"""The examples run as their docstrings say."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent


def test_compare_layouts():
    config = ROOT / "ds_configs" / "data" / "models" / "meta-llama--Llama-3.1-8B" / "config.json"
    shown = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "compare_layouts.py"), str(config), "8xA100-80GB"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "chosen      zero2" in shown
    assert "too large   ddp" in shown


def test_the_notebook_runs_from_top_to_bottom(tmp_path):
    """Cells become one script, in which what a cell ends with is kept as Jupyter would show it."""
    cells = json.loads((ROOT / "examples" / "quickstart.ipynb").read_text())["cells"]
    bodies = [ast.parse("".join(cell["source"])).body for cell in cells if cell["cell_type"] == "code"]
    for body in bodies:
        if isinstance(body[-1], ast.Expr):
            body[-1] = ast.parse(f"shown.append({ast.unparse(body[-1])})").body[0]
    script, values = tmp_path / "notebook.py", []
    script.write_text("\n".join(ast.unparse(statement) for body in bodies for statement in body))
    runpy.run_path(str(script), init_globals={"shown": values})
    shown = [value._repr_html_() if hasattr(value, "_repr_html_") else repr(value) for value in values]
    assert "2xRTX4090" in shown[1] and "<table" in shown[2]
    assert "of 25.4 GB" in shown[3] and "max_steps" in shown[4]
    assert shown[5].startswith("CheckedFiles(findings=(), files=(")


SHOWN = {
    "distill_then_quantize": "student in 4 bit",
    "qat": "differ by 0.0 in weights and 0.0 in logits",
}


def with_less(function, changes):
    """Return a function of which some arguments are always these."""
    signature = inspect.signature(function)

    def briefly(*arguments, **named):
        bound = signature.bind(*arguments, **named)
        bound.arguments |= changes
        return function(*bound.args, **bound.kwargs)

    return briefly


@pytest.mark.needs("llmcompressor")
@pytest.mark.parametrize("name", SHOWN)
def test_examples_that_train_run_with_few_steps(name, monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    less = {"train": {"steps": 2}, "quantize": {"num_samples": 8}, "TextRequest": {"num_samples": 8}}
    for part, changes in less.items():
        if hasattr(example, part):
            monkeypatch.setattr(example, part, with_less(getattr(example, part), changes))
    example.main()
    assert SHOWN[name] in capsys.readouterr().out


@pytest.mark.distributed
def test_finetune_with_plan(tiny_llama, deepspeed_cpu_ops, tmp_path):
    from shardwright.ds_configs.specs.job import TrainingJob
    from shardwright.plugins.launching.launch import Launch, launch_ranks
    from shardwright.plugins.planning import plan
    from shardwright.plugins.transformers.training_arguments import byte_tokenizer

    model = tmp_path / "model"
    shutil.copytree(tiny_llama, model)
    byte_tokenizer(512).save_pretrained(model)
    job = TrainingJob(seq_len_tokens=128, micro_batch_size=2, strategy="zero3")
    plan(str(model), "2xCPU", job).write(tmp_path / "plan")
    command = ["-m", "accelerate.commands.launch", "--config_file", str(tmp_path / "plan" / "accelerate.yaml")]
    script = [str(ROOT / "examples" / "finetune_with_plan.py"), str(model), str(tmp_path / "plan")]
    shown = launch_ranks(Launch(arguments=(*command, *script)), timeout_seconds=240)
    assert "trained on 2 ranks" in shown


def test_colours_makes_chats_with_images_and_asks_the_model_about_new_ones(tmp_path, capsys):
    from shardwright.trainers.data.models import StartingModel, load_config, load_processor, load_tokenizer
    from shardwright.trainers.data.samples import load_samples

    example = runpy.run_path(str(ROOT / "examples" / "colours.py"))
    example["make"](tmp_path)
    source = StartingModel(model=str(tmp_path / "model"))
    config, tokenizer = load_config(source), load_tokenizer(source, 258)
    processor = load_processor(source, config, tokenizer)
    samples = load_samples(str(tmp_path / "chats.jsonl"), tokenizer, seq_len=64, processor=processor)
    assert samples.statistics.image_rows == 400 and not samples.statistics.cut_rows
    example["ask"](tmp_path / "model")
    assert capsys.readouterr().out.endswith("0 of 40 answers are right\n")
