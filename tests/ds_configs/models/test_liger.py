"""Kernels of liger-kernel: read from its source, stored for the tested release, and what plans make of them."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from dataclasses import replace

import pytest
from planning import public_model
from shardwright.ds_configs.plan.plan import make_plan
from shardwright.ds_configs.plan.rendering import FUSED_LOSS_ONLY, planned_training_arguments
from shardwright.ds_configs.specs import model as facts
from shardwright.ds_configs.specs.hardware import parse_hardware
from shardwright.ds_configs.specs.job import TrainingJob
from shardwright.ds_configs.specs.model import has_liger_loss, stored_facts
from shardwright.tools.liger_kernels import SOURCE_FILE, kernels_in

LLAMA = public_model("meta-llama/Llama-3.1-8B")
NODE = parse_hardware("8xH200")
STORED = stored_facts(facts.LIGER_FILE, "0")


@pytest.mark.install
def test_stored_kernels_are_those_of_the_tested_release(tmp_path):
    wanted = f"liger-kernel=={STORED['versions']['liger-kernel']}"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(tmp_path), wanted]
    subprocess.run(pip, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert kernels_in(zipfile.ZipFile(wheel).read(SOURCE_FILE).decode()) == STORED["kernels"]


def test_every_kernel_can_be_disabled_beside_the_fused_loss():
    names = {name for kernels in STORED["kernels"].values() for name in kernels} - {facts.TEXT_MODEL}
    assert names == set(FUSED_LOSS_ONLY)
    # The kernels of a text model would come too.
    seeing = [name for name, kernels in STORED["kernels"].items() if facts.TEXT_MODEL in kernels]
    assert seeing and not any(has_liger_loss(name, alone=True) for name in seeing)
    assert has_liger_loss("llama", alone=True) and not has_liger_loss("other", alone=False)


@pytest.mark.parametrize(
    ("model_type", "job", "fused"),
    [
        ("llama", {}, True),
        ("olmo2", {}, True),
        ("deepseek_v3", {}, True),
        ("qwen2_5_vl", {}, True),
        ("llava", {}, True),
        ("llama", {"loss": "eager"}, False),
        ("llama", {"teacher": LLAMA}, False),
        # Liger has layers of Granite, but not its loss.
        ("granite", {}, False),
    ],
)
def test_liger_computes_the_loss_as_in_transformers_unless_another_is_chosen(model_type, job, fused):
    same = {"seq_len_tokens": 16384, "micro_batch_size": 1, "strategy": "zero3", "gradient_checkpointing": "on"}
    job = TrainingJob(use_liger_kernel=True, **same, **job)
    model = replace(LLAMA, model_type=model_type)
    plan = make_plan(model, NODE, job)
    arguments = planned_training_arguments(plan)
    assert arguments["use_liger_kernel"] is True
    assert arguments["liger_kernel_config"]["fused_linear_cross_entropy"] is fused
    assert plan.job.loss == ("chunked" if fused else job.loss if job.loss != "auto" else "eager")
    if fused:
        # The eager loss holds 12 to 16 bytes for each logit, of which chunks are a small part.
        eager = make_plan(model, NODE, replace(job, loss="eager"))
        loss, eager_loss = (each.chosen.memory.gpu.phases["loss"] for each in (plan, eager))
        assert eager_loss - loss > 8 * 16384 * model.dimensions.vocab_size
