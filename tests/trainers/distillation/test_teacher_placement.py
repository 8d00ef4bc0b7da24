"""Placement of teachers: planned memory and reasons, and placement in one process."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from paths import CONFIGS
from planning import llama, public_model
from shardwright.cli.main import run
from shardwright.ds_configs.memory.communication import forward_gathered_elements
from shardwright.ds_configs.memory.host import second_model_host_terms
from shardwright.ds_configs.memory.loss import distillation_loss_terms
from shardwright.ds_configs.memory.second_models import SHARDED_ZERO, frozen_model_terms
from shardwright.ds_configs.plan.plan import Plan, make_plan
from shardwright.ds_configs.specs.errors import UsageError
from shardwright.ds_configs.specs.hardware import parse_hardware
from shardwright.ds_configs.specs.job import TrainingJob
from shardwright.ds_configs.specs.layout import Layout

LLAMA_1B = public_model("meta-llama/Llama-3.2-1B")
LLAMA_8B = public_model("meta-llama/Llama-3.1-8B")
LLAMA_70B = public_model("meta-llama/Llama-3.1-70B")
MODELS = CONFIGS
ZERO2 = Layout(engine="deepspeed", zero_stage=2, dp_shard=8)


def placed(placement: str, **changes: Any) -> TrainingJob:
    return TrainingJob(teacher=LLAMA_8B, teacher_placement=placement, **changes)  # type: ignore[arg-type]


def terms_of(layout: Layout, job: TrainingJob) -> Any:
    return frozen_model_terms(job.second_models[0], layout, job)


class TestChoice:
    @pytest.mark.parametrize(
        ("student", "teacher", "hardware", "expected"),
        [
            (LLAMA_1B, LLAMA_8B, "8xH100-80GB", "replica"),
            (LLAMA_8B, LLAMA_8B, "8xH100-80GB", "replica"),
            (LLAMA_8B, LLAMA_70B, "8xH100-80GB", "sharded"),
            (LLAMA_1B, LLAMA_70B, "1xH100-80GB", "offloaded"),
        ],
    )
    def test_first_placement_that_fits_is_selected(self, student, teacher, hardware, expected):
        chosen = make_plan(student, parse_hardware(hardware), TrainingJob(teacher=teacher)).chosen
        assert chosen.placements["teacher"].placement == expected
        assert chosen.memory.fits
        order = ("replica", "sharded", "offloaded")
        reason = chosen.placements["teacher"].reason
        # One accelerator has no others to shard over.
        larger = [name for name in order[: order.index(expected)] if name != "sharded" or hardware[0] != "1"]
        assert all(f"{name} needs " in reason for name in larger)

    def test_placements_that_do_not_fit_are_named(self):
        job = TrainingJob(teacher=LLAMA_70B, strategy="zero3")
        choice = make_plan(LLAMA_8B, parse_hardware("8xH100-80GB"), job).chosen.placements["teacher"]
        needed = re.search(r"Rejected: replica needs up to (\S+) of 84.9 GB", choice.reason)
        # Its weights alone are 141 GB.
        assert needed is not None and float(needed[1]) > 141, choice.reason

    def test_requested_placement_is_the_only_candidate(self):
        chosen = make_plan(LLAMA_1B, parse_hardware("8xH100-80GB"), placed("quantized")).chosen
        assert (
            chosen.placements["teacher"].placement == "quantized"
            and "was requested" in chosen.placements["teacher"].reason
        )
        with pytest.raises(UsageError, match="teacher_placement = 'sharded': requires at least two ranks"):
            make_plan(LLAMA_1B, parse_hardware("1xH100-80GB"), placed("sharded"))

    def test_command_prints_and_stores_the_placement(self, tmp_path, capsys):
        student, teacher = (str(MODELS / f"meta-llama--Llama-3.{name}") for name in ("2-1B", "1-8B"))
        line = ["plan", student, "--hardware", "8xH100-80GB", "--teacher", teacher, "--teacher-placement", "sharded"]
        assert run([*line, "--output-dir", str(tmp_path / "plan")]) == 0
        assert "sharded" in capsys.readouterr().out
        data = json.loads((tmp_path / "plan" / "plan.json").read_text())
        assert data["job"]["teacher_placement"] == "sharded"
        chosen = data["chosen"]["teacher"]
        assert chosen.keys() == {"placement", "reason", "gpu_bytes", "host_bytes"}
        assert json.loads(json.dumps(Plan.load(tmp_path / "plan").to_dict())) == data
        assert "shardwright distill" in (tmp_path / "plan" / "launch.sh").read_text()


class TestMemory:
    def test_zero3_gathers_within_its_window(self):
        """Of a forward pass only: the prefetched parameters, and one tensor beyond the limit."""
        live = SHARDED_ZERO.stage3_max_live_parameters
        gathered = forward_gathered_elements("deepspeed", LLAMA_70B, SHARDED_ZERO)
        assert 8192 * 28672 < gathered < live + 128256 * 8192
        small = llama(num_hidden_layers=2)
        assert forward_gathered_elements("deepspeed", small, SHARDED_ZERO) <= small.parameter_count

    def test_the_teacher_runs_before_the_student(self):
        terms = terms_of(ZERO2, placed("sharded"))
        assert terms["second_models_forward"].keys() >= {"teacher_activations", "teacher_gathered"}
        for moment, found in terms.items():
            if moment != "second_models_forward":
                assert not found.keys() & {"teacher_activations", "teacher_gathered"}, moment
        kept = {moment for moment, found in terms.items() if "teacher_hidden_states" in found}
        assert kept == {"last_layer_forward", "forward_end"}


class TestFusedLoss:
    """The plan's formula against the loss."""

    @pytest.mark.parametrize("precision", ["bf16", "fp32"])
    @pytest.mark.parametrize("method", ["full", "lora"])
    @pytest.mark.parametrize(("vocab", "hidden", "tokens"), [(128_256, 4096, 8192), (32_000, 512, 300), (1000, 64, 7)])
    def test_planned_bytes_equal_the_loss_formula(self, precision, method, vocab, hidden, tokens):
        from kd_memory import fused_peak_bytes

        student = llama(hidden_size=hidden, vocab_size=vocab)
        job = TrainingJob(teacher=student, precision=precision, method=method, seq_len_tokens=tokens)
        loss = distillation_loss_terms(ZERO2, student, student, job)
        hidden_gradient = job.compute_bytes * tokens * hidden
        backward = hidden_gradient + 32 * tokens + loss["loss_backward"].get("head_gradient", 0)
        expected = fused_peak_bytes(
            rows=tokens,
            hidden_width=hidden,
            columns=vocab,
            element_bytes=job.compute_bytes,
            teacher_element_bytes=job.compute_bytes,
            trains_head=method == "full",
            soft_cap=True,
        )
        assert max(sum(loss["forward_end"].values()), backward) == pytest.approx(expected, rel=0.03)

    @pytest.mark.parametrize("divergence", ["forward_kl", "jsd"])
    @pytest.mark.parametrize("precision", ["bf16", "fp32"])
    def test_metered_bytes_equal_planned_bytes(self, divergence: Any, precision: Any) -> None:
        import torch
        from shardwright.plugins.metering import ByteMeter
        from shardwright.plugins.transformers.output_heads import OutputHead
        from shardwright.trainers.losses.fused_loss import fused_token_loss
        from shardwright.trainers.losses.objective import HiddenTargets, TokenObjective

        tokens, hidden, taught_hidden, vocab = 96, 32, 48, 20_000
        dtype = torch.float32 if precision == "fp32" else torch.bfloat16
        objective = TokenObjective(alpha=0.5, temperature=2.0, divergence=divergence, mixture=0.5)
        with ByteMeter() as meter:
            states = torch.randn(tokens, hidden, dtype=dtype, requires_grad=True)
            weight = torch.randn(vocab, hidden, dtype=dtype, requires_grad=True)
            taught = torch.randn(tokens, taught_hidden, dtype=dtype)
            head = OutputHead(weight_VH=torch.randn(vocab, taught_hidden, dtype=dtype))
            labels = torch.randint(0, vocab, (tokens,))
            before = meter.reading().current_bytes
            meter.enter("loss")
            targets = HiddenTargets(hidden_NH=taught, head=head)
            sums = fused_token_loss(states, OutputHead(weight_VH=weight), labels, targets, objective)
            meter.enter("backward")
            sums.loss.backward()
        student = llama(hidden_size=hidden, vocab_size=vocab)
        job = TrainingJob(teacher=llama(hidden_size=taught_hidden, vocab_size=vocab), precision=precision)
        job = replace(job, seq_len_tokens=tokens)
        assert job.teacher is not None
        terms = distillation_loss_terms(ZERO2, student, job.teacher, job, on_gpu=False)
        planned = sum(terms["forward_end"].values())
        assert 0.8 * planned < meter.reading().peaks["loss"] - before <= planned * 1.01
        assert meter.reading().peaks["backward"] - before <= sum(terms["loss_backward"].values()) * 1.01


class TestOnOneProcess:
    @pytest.fixture
    def directory(self, tiny_llama: Path) -> str:
        return str(tiny_llama)

    @pytest.mark.parametrize("placement", ["replica", "sharded", "offloaded", "quantized"])
    def test_placed_teacher_answers_equal_the_model(self, directory: str, placement: Any) -> None:
        import torch
        from accelerate import Accelerator
        from shardwright.plugins.transformers.second_model import gathered_head, load_second_model, place_second_model
        from transformers import AutoModelForCausalLM

        whole = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        loaded = load_second_model(directory, placement=placement, dtype=torch.float32)
        placed = place_second_model(loaded, placement, accelerator=Accelerator(cpu=True))
        ids = torch.arange(2, 18).reshape(2, 8)
        with torch.no_grad():
            expected = whole(input_ids=ids).logits
        logits = placed(input_ids=ids).logits
        assert not logits.requires_grad
        assert not any(module.training for module in placed.model.modules())
        if placement == "quantized":
            assert 0 < float((logits - expected).norm() / expected.norm()) < 0.3
        else:
            assert float((logits - expected).abs().max()) < 1e-5
        with gathered_head(placed.model) as head:
            assert torch.equal(head.weight_VH, whole.lm_head.weight)


HEAD, COUNT, TOKENS = 128_256 * 4096, 8_030_261_248, 2 * 4096
LAYER = 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336) + 2 * 4096
FOUR_BIT = 2 * COUNT - round((2 - 0.5 - 1 / 64 - 4 / (64 * 256)) * 32 * (LAYER - 2 * 4096))


@pytest.mark.parametrize(
    ("placement", "engine", "ranks", "accelerator", "loading", "training"),
    [
        ("replica", "ddp", 8, {"weights": 2 * COUNT + 512, "gathered": 0, "head": 0}, 8 * 2 * COUNT, 0),
        ("sharded", "deepspeed", 8, {"weights": COUNT // 4 + 512, "head": 2 * HEAD}, 0, 0),
        ("sharded", "fsdp2", 8, {"gathered": 4 * HEAD + 2 * 4096 + 4 * LAYER, "head": 2 * HEAD}, 8 * 2 * COUNT, 0),
        ("offloaded", "deepspeed", 8, {"weights": 512, "head": 2 * HEAD}, 0, None),
        ("offloaded", "single", 1, {"weights": 512, "gathered": 2 * HEAD, "head": 2 * HEAD}, 2 * COUNT, 2 * COUNT),
        ("quantized", "ddp", 8, {"weights": FOUR_BIT + 512, "gathered": 2 * 4096 * 14336}, 8 * FOUR_BIT, 0),
        ("cached", "ddp", 8, {"weights": 0, "targets": 50 * 12 * TOKENS}, 0, 8 * 302 * TOKENS),
    ],
)
def test_bytes_of_a_placement_by_hand(
    placement: str, engine: Any, ranks: int, accelerator: dict[str, int], loading: int, training: int | None
) -> None:
    sizes = {"dp_shard": ranks} if engine in ("deepspeed", "fsdp2") else {"dp_replicate": ranks}
    layout = Layout(engine=engine, zero_stage=2 if engine == "deepspeed" else None, micro_batch_size=2, **sizes)
    job = placed(placement)
    terms = terms_of(layout, job)
    found: dict[str, int] = {}
    for moment in terms.values():
        found |= moment
    for name, count in accelerator.items():
        assert found.get(f"teacher_{name}", 0) == pytest.approx(count, abs=8), name
    if placement != "cached":
        assert found["teacher_hidden_states"] == 2 * TOKENS * 4096
        shared = replace(layout, dp_shard=4, sp=2) if engine == "deepspeed" else layout
        assert terms_of(shared, job)["second_models_forward"]["teacher_activations"] == found["teacher_activations"]
    host = second_model_host_terms(job.second_models[0], layout, parse_hardware(f"{ranks}xH100-80GB"), job)
    assert host[0] == pytest.approx(loading, abs=8)
    if training is None:
        # Pinned blocks of up to 64 MiB have the sizes of powers of two: shards of matrices and norms, not those of the
        # vocabulary.
        shapes = {4096 * 4096: 64, 1024 * 4096: 64, 14336 * 4096: 96, 4096: 65, HEAD: 2}
        blocks = {2 * size // 8: 8 * many for size, many in shapes.items()}
        training = sum(
            many * (size if size > 2**26 else 2 ** math.ceil(math.log2(size))) for size, many in blocks.items()
        )
    assert sum(host[1].values()) == training
