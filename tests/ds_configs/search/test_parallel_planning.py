"""What the planner chooses beyond data parallelism, against volumes and schedules counted out here."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import yaml
from commands import Shell, shell_in
from hypothesis import given
from hypothesis import strategies as st
from paths import CONFIGS
from planning import public_model, step_inputs
from shardwright.ds_configs.plan.plan import PlanDoesNotFitError, make_plan, plan_to_dict, render_files
from shardwright.ds_configs.search.candidates import (
    global_batch_reason,
    planned_global_batch,
)
from shardwright.ds_configs.search.reasons import AS_FAST, display_name
from shardwright.ds_configs.specs.hardware import parse_hardware
from shardwright.ds_configs.specs.job import AXIS_FIELDS, TrainingJob
from shardwright.ds_configs.specs.layout import Layout
from shardwright.ds_configs.specs.model import ModelSpec
from shardwright.ds_configs.step_time.estimate import exchanges
from shardwright.ds_configs.step_time.rates import constants_of

LLAMA_8B = public_model("meta-llama/Llama-3.1-8B")
QWEN_MOE = public_model("Qwen/Qwen3-30B-A3B")
ZERO1 = Layout(engine="deepspeed", zero_stage=1, dp_shard=8)
FSDP2 = Layout(engine="fsdp2", dp_shard=8)


def plan(model, hardware, **job):
    cluster = parse_hardware(hardware) if isinstance(hardware, str) else hardware
    return make_plan(model, cluster, TrainingJob(**job))


def other(made, prefix):
    """The first layout of another name that was not taken."""
    return next(candidate for candidate in made.rejected if display_name(candidate.layout).startswith(prefix))


# --- volumes, counted message by message ---


def ring_all_reduce_bytes(ranks: int, size: float) -> float:
    """What each rank of a ring sends: one chunk in each of 2 (n - 1) rounds."""
    return sum(size / ranks for _ in range(2 * (ranks - 1)))


def all_to_all_bytes(ranks: int, own: float) -> float:
    """What a rank sends to every other one of what it holds."""
    return sum(own / ranks for peer in range(ranks) if peer != 0)


def moved_bytes(layout: Layout, model: ModelSpec, *, tokens: float, with_head: bool = False) -> float:
    """What a rank moves for one micro-batch of one layer: seconds on links of one byte per second, without latency."""
    hardware = replace(parse_hardware("32xH100-80GB"), link_bytes_per_s=1.0)
    ideal = replace(constants_of(hardware.gpu), link_efficiency=1.0, link_latency_seconds=0.0)
    step = replace(step_inputs(layout, model, hardware), constants=ideal, tokens=tokens)
    terms, _ = exchanges(step, layers=1, recomputed=0, with_head=with_head)
    (found,) = terms.values()
    return found


@given(tp=st.integers(2, 32), tokens=st.integers(1, 5000))
def test_tensor_parallel_volume_is_that_of_four_ring_all_reduces(tp, tokens):
    each = ring_all_reduce_bytes(tp, tokens * 4096 * 2)
    assert moved_bytes(replace(ZERO1, tp=tp), LLAMA_8B, tokens=tokens) == pytest.approx(4 * each)
    with_head = moved_bytes(replace(ZERO1, tp=tp), LLAMA_8B, tokens=tokens, with_head=True)
    assert with_head == pytest.approx(5 * each), "the gradient of a divided head's input"


@given(power=st.integers(1, 5), tokens=st.integers(1, 5000))
def test_sequence_parallel_volume_is_that_of_eight_all_to_alls(power, tokens):
    sp, heads, kv_heads, head_dim = 2**power, 32, 8, 128
    # Before attention each rank holds its tokens of every head; fewer key/value heads than ranks are repeated.
    kv_width = head_dim * max(kv_heads, sp)
    widths = (heads * head_dim, kv_width, kv_width, heads * head_dim)
    counted = 2 * sum(all_to_all_bytes(sp, tokens * width * 2) for width in widths)
    assert moved_bytes(replace(ZERO1, sp=sp), LLAMA_8B, tokens=tokens) == pytest.approx(counted)


@given(cp=st.integers(2, 32))
def test_context_parallel_volume_is_keys_and_values_twice_and_their_gradients(cp):
    shard = 2 * 1000 * 8 * 128 * 2
    # Gradients in fp32 take each step of the ring, back to the rank that they belong to.
    counted = sum(shard for _ in range(2) for peer in range(cp) if peer != 0) + sum(2 * shard for _ in range(cp))
    assert moved_bytes(replace(FSDP2, cp=cp), LLAMA_8B, tokens=1000) == pytest.approx(counted)


@given(ep=st.integers(2, 32))
def test_expert_parallel_volume_is_that_of_four_all_to_alls_of_routed_tokens(ep):
    counted = sum(all_to_all_bytes(ep, 1000 * 8 * 2048 * 2) for _ in range(4))
    assert moved_bytes(replace(ZERO1, ep=ep), QWEN_MOE, tokens=1000) == pytest.approx(counted)


# --- the decision rules of practice, as results ---


def test_long_sequences_select_sequence_or_context_parallelism():
    made = plan(LLAMA_8B, "8xH100-80GB", seq_len_tokens=131_072)
    layout = made.chosen.layout
    assert layout.sp * layout.cp > 1
    assert made.chosen.memory.fits
    axis = "SP" if layout.sp > 1 else "CP"
    assert f"{axis} {layout.sp * layout.cp} splits sequences of 131,072 tokens" in made.chosen.reason
    assert "Too large: " in made.chosen.reason
    faster = made.chosen.time.tokens_per_second / AS_FAST
    assert not any(one.memory.fits and one.time.tokens_per_second > faster for one in made.rejected)


# --- the search ---


def exactly(layout: Layout) -> dict[str, object]:
    """The options that allow no other layout."""
    base = layout.label.split("+")[0]
    offloads = {("none", "none"): "none", ("cpu", "none"): "cpu", ("cpu", "cpu"): "cpu-all"}
    axes = {field: getattr(layout, axis) for field, axis in AXIS_FIELDS.items()}
    return {"strategy": base, "offload": offloads[layout.offload_optimizer, layout.offload_param], **axes}


@pytest.mark.parametrize(
    ("model", "hardware", "job"),
    [
        ("openai-community/gpt2", "2xT4", {"precision": "fp16", "seq_len_tokens": 1024}),
        ("meta-llama/Llama-3.1-8B", "2x8xH100-80GB", {"global_batch_size": 64}),
        ("meta-llama/Llama-2-7b-hf", "8xV100-32GB", {"method": "lora", "precision": "fp16"}),
        pytest.param("Qwen/Qwen3-30B-A3B", "8xH200", {}, marks=pytest.mark.full),
    ],
)
def test_listed_layouts_have_the_numbers_of_a_plan_for_exactly_them(model, hardware, job):
    spec, cluster = public_model(model), parse_hardware(hardware)
    # A plan for exactly a layout that does not fit would also try mechanisms for long sequences.
    job = job | {"tiled_mlp": "off", "offload_activations": "off"}
    made = make_plan(spec, cluster, TrainingJob(**job))
    job = job | {"global_batch_size": made.chosen.layout.global_batch_size}
    assert made.rejected
    for candidate in made.rejected:
        requested = TrainingJob(**job | exactly(candidate.layout))
        try:
            answer = make_plan(spec, cluster, requested).chosen
        except PlanDoesNotFitError as error:
            (answer,) = error.tried
        assert answer.layout == candidate.layout
        assert (answer.time, answer.memory, answer.loss) == (candidate.time, candidate.memory, candidate.loss)


@pytest.mark.parametrize(
    ("hardware", "job"),
    [
        ("1xA100-80GB", {}),
        ("8xA100-80GB", {"seq_len_tokens": 32_768}),
        ("8xA100-80GB", {"global_batch_size": 96}),
        ("4x8xH100-80GB", {"micro_batch_size": 2}),
    ],
)
def test_all_layouts_are_compared_at_one_global_batch(hardware, job):
    made = plan(LLAMA_8B, hardware, method="lora", **job)
    layouts = [made.chosen, *made.rejected]
    (sequences,) = {candidate.layout.global_batch_size for candidate in layouts}
    values = plan_to_dict(made)["global_batch"]
    reason = global_batch_reason(made.job, made.hardware.world_size, sequences)
    assert values == {"sequences": sequences, "tokens": sequences * made.job.seq_len_tokens, "reason": reason}
    assert sequences == planned_global_batch(made.job, made.hardware.world_size)
    assert f"Global batch {sequences:,} sequence" in made.chosen.reason
    assert reason in made.chosen.reason
    assert ("--global-batch-size" in made.chosen.reason) == ("global_batch_size" not in job)


def test_a_pipeline_is_chosen_if_nothing_else_fits_or_if_it_was_requested():
    assert plan(LLAMA_8B, "4x8xH100-80GB", pipeline_parallel_size=4).chosen.layout.pp == 4
    assert plan(LLAMA_8B, "4x8xH100-80GB").chosen.layout.pp == 1
    # Three sequences of a prime length on four nodes: neither data nor sequence parallelism divides them.
    odd = plan(public_model("meta-llama/Llama-3.2-1B"), "4x1xH100-80GB", global_batch_size=3, seq_len_tokens=8191)
    assert odd.chosen.layout.pp == 4
    assert "Only pipelines fit. A stock Trainer cannot run one: PipelineTrainer does." in odd.chosen.reason


# --- what is written ---


def made_with(**axes):
    return plan(QWEN_MOE if "expert_parallel_size" in axes else LLAMA_8B, "8xH200", **axes)


CASES = {
    "tp": {"tensor_parallel_size": 2},
    "pp": {"pipeline_parallel_size": 2},
    "sp": {"sequence_parallel_size": 4},
    "cp": {"context_parallel_size": 4},
    "ep": {"expert_parallel_size": 4},
}


@pytest.mark.parametrize("axis", CASES)
def test_files_carry_the_axis_and_pass_our_check(axis, tmp_path):
    from shardwright.ds_configs.check.files import check

    made = made_with(**CASES[axis])
    made.write(tmp_path / "plan")
    texts = render_files(made, directory=str(tmp_path / "plan"))
    names = [name for name in ("accelerate.yaml", "ds_config.json") if name in texts]
    findings = check(*(tmp_path / "plan" / name for name in names), num_processes=8).findings
    assert findings == (), [str(finding.error) for finding in findings]
    launch = yaml.safe_load(texts["accelerate.yaml"])
    parallel = launch.get("parallelism_config", {})
    config = json.loads(texts.get("ds_config.json", "{}"))
    assert config.get("tensor_parallel", {}).get("autotp_size", 1) == made.chosen.layout.tp
    assert config.get("expert_parallel", {}).get("autoep_size", 1) == made.chosen.layout.ep
    assert parallel.get("parallelism_config_sp_size", 1) == made.chosen.layout.sp
    assert parallel.get("parallelism_config_cp_size", 1) == made.chosen.layout.cp
    if axis == "pp":
        assert config["zero_optimization"]["stage"] in (0, 1)
    assert "Trainer: " in texts["launch.sh"]


def test_accelerate_reads_the_parallelism(tmp_path, monkeypatch):
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.parallelism_config import ParallelismConfig

    for axis, name in (("sp", "sp_size"), ("cp", "cp_size")):
        texts = render_files(made_with(**CASES[axis]))
        (tmp_path / "accelerate.yaml").write_text(texts["accelerate.yaml"])
        cluster = load_config_from_file(str(tmp_path / "accelerate.yaml"))
        section = {key.removeprefix("parallelism_config_"): value for key, value in cluster.parallelism_config.items()}
        sizes = {key: value for key, value in section.items() if key.endswith("_size")}
        for key, value in section.items():
            monkeypatch.setenv(f"PARALLELISM_CONFIG_{key.upper()}", str(value))
        read = ParallelismConfig()
        assert {key: getattr(read, key) for key in sizes} == sizes
        assert read.total_size == 8
        assert getattr(read, name) == 4
        for key in section:
            monkeypatch.delenv(f"PARALLELISM_CONFIG_{key.upper()}")


# --- the command ---

CONFIG = CONFIGS / "meta-llama--Llama-3.1-8B" / "config.json"


@pytest.fixture
def shell(tmp_path, capsys, monkeypatch) -> Shell:
    return shell_in(tmp_path, "plan", capsys, monkeypatch)


def test_tensor_parallelism_in_more_dimensions_is_explained_as_analysis_only(shell):
    flags = ("--hardware", "8xH100-80GB", "--explain-tensor-parallel")
    found = json.loads(shell(CONFIG, *flags, "--format", "json").out)["tensor_layouts"]
    assert {layout["name"] for layout in found} == {"1D", "2D", "2.5D", "3D"}
    shown = " ".join(shell(CONFIG, *flags).out.split())
    assert "all but 1D are analysis only" in shown and "3D 4 x 4 x 4 64" in shown
