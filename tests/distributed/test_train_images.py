"""`shardwright train` on chats with images, on two CPU ranks: losses of one process, a checkpoint with a processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from image_models import processor, save_image_model, write_colours
from PIL import Image
from safetensors.torch import load_file
from shardwright.cli.main import run
from shardwright.ds_configs.specs.images import IMAGE_PARTS, image_part
from shardwright.plugins.transformers.loading import load_causal_lm
from shardwright.trainers.evaluation.evaluate import evaluate_model
from training_runs import resumed, trained

pytestmark = pytest.mark.distributed
_WHOLE = "--vision-tower full --projector full"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images")
    save_image_model(root / "llava")
    write_colours(root / "data", 40)
    return root


@pytest.mark.parametrize(
    ("strategy", "method"),
    [
        ("zero3", ""),
        *(pytest.param(name, "", marks=pytest.mark.full) for name in ("ddp", "zero1", "zero2", "fsdp2")),
        pytest.param("fsdp2", "--method lora --lora-rank 2", marks=pytest.mark.full),
        *(
            pytest.param(name, f"--method lora --lora-rank 2 {_WHOLE}", marks=pytest.mark.full)
            for name in ("ddp", "zero2", "fsdp2")
        ),
        # Under ZeRO-3 random adapters start otherwise than in one process; singular vectors do not.
        pytest.param("zero3", f"--method lora --lora-rank 2 --lora-variant pissa {_WHOLE}", marks=pytest.mark.full),
    ],
)
def test_images_train_as_one_process_and_the_checkpoint_reads_them(
    strategy: str, method: str, inputs: Path, tmp_path: Path, deepspeed_cpu_ops: None
) -> None:
    settings: dict[str, Any] = {"dataset": str(inputs / "data" / "rows.jsonl"), "seq-len": 64, "max_steps": 3}
    flags = f"--hardware 2xCPU --strategy {strategy} {method}"
    losses, shown = trained(inputs, "llava", tmp_path / "ranks", flags, save_steps=2, **settings)
    expected, alone = trained(inputs, "llava", tmp_path / "alone", f"--hardware 1xCPU {method}", **settings)
    assert losses == pytest.approx(expected, abs=1e-5)
    assert shown["dataset"]["image_rows"] == 30
    for when in ("before", "after"):
        assert shown["cross_entropy"][when] == pytest.approx(alone["cross_entropy"][when], abs=1e-5)
    again, _ = resumed(inputs, "llava", tmp_path / "ranks", flags, **settings)
    assert again == pytest.approx(losses, abs=1e-6)
    out = tmp_path / "ranks" / "out"
    if method:
        stored = any("vision_tower" in name for name in load_file(out / "adapter_model.safetensors"))
        assert stored == (_WHOLE in method)
        assert run(["merge", str(out), "--output-dir", str(tmp_path / "merged")]) == 0
        out = tmp_path / "merged"
    start, end = (dict(load_causal_lm(str(each)).named_parameters()) for each in (inputs / "llava", out))
    changed = {name for name, weight in start.items() if not torch.equal(weight, end[name])}
    expected_parts = {None, *IMAGE_PARTS} if _WHOLE in method else {None}
    assert {image_part(name) for name in changed} == expected_parts
    _check_answer(out)
    evaluation = evaluate_model(str(out), dataset=settings["dataset"], seq_len=64, device="cpu")
    assert evaluation.text.windows == 40 and 4 < evaluation.model.loss_nats_per_token.value < 6


def _check_answer(directory: Path) -> None:
    """Load a model with Transformers alone, and generate an answer about an image."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    model, made = AutoModelForImageTextToText.from_pretrained(directory), AutoProcessor.from_pretrained(directory)
    assert made.chat_template == processor("llava").chat_template
    image = {"type": "image", "image": Image.new("RGB", (20, 20), "red")}
    chat = [{"role": "user", "content": [image, {"type": "text", "text": "Colour?"}]}]
    inputs = made.apply_chat_template(
        chat, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    # A model that has learned little may write the token of an image.
    written = model.generate(**inputs, max_new_tokens=3, do_sample=False, suppress_tokens=[made.image_token_id])
    assert written.shape[1] > inputs["input_ids"].shape[1]


@pytest.mark.parametrize("axis", ["tensor", "sequence", "context", "pipeline"])
def test_axes_that_do_not_read_images_are_rejected_before_ranks_start(
    axis: str, inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", str(inputs / "llava"), "--dataset", str(inputs / "data" / "rows.jsonl"), "--hardware", "2xCPU"]
    words += [f"--{axis}-parallel-size", "2", "--seq-len", "64", "--output-dir", str(tmp_path / "out")]
    assert run(words) == 2
    assert "is not supported with images" in capsys.readouterr().err
