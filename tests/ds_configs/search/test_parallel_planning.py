"""What the planner chooses beyond data parallelism, against volumes and schedules counted out here."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import product

import pytest
import yaml
from commands import Shell, shell_in
from hypothesis import given
from hypothesis import strategies as st
from paths import CONFIGS
from planning import llama, public_model
from shardwright.ds_configs.memory.model_states import default_zero_options
from shardwright.ds_configs.plan.plan import PlanDoesNotFitError, make_plan, plan_from_dict, plan_to_dict, render_files
from shardwright.ds_configs.search.candidates import (
    SearchContext,
    axes_to_try,
    candidates,
    global_batch_reason,
    planned_global_batch,
    three_dimensional,
)
from shardwright.ds_configs.search.reasons import AS_FAST, display_name
from shardwright.ds_configs.search.search import search
from shardwright.ds_configs.specs.hardware import parse_hardware
from shardwright.ds_configs.specs.job import AXIS_FIELDS, TrainingJob
from shardwright.ds_configs.specs.layout import Layout
from shardwright.ds_configs.specs.model import ModelSpec
from shardwright.ds_configs.step_time import rates as collectives
from shardwright.ds_configs.step_time.estimate import exchanges
from shardwright.ds_configs.step_time.model_work import model_work
from shardwright.ds_configs.step_time.rates import constants_of

LLAMA_8B = public_model("meta-llama/Llama-3.1-8B")
LLAMA_70B = public_model("meta-llama/Llama-3.1-70B")
LLAMA_405B = public_model("meta-llama/Llama-3.1-405B")
QWEN_MOE = public_model("Qwen/Qwen3-30B-A3B")
THIRTEEN_B = llama(
    hidden_size=5120,
    intermediate_size=13824,
    num_hidden_layers=40,
    num_attention_heads=40,
    num_key_value_heads=8,
    vocab_size=32000,
)
PHI_70B = llama(
    model_type="phi3",
    architectures=["Phi3ForCausalLM"],
    hidden_size=8192,
    intermediate_size=28672,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
    vocab_size=32000,
)
ZERO1 = Layout(engine="deepspeed", zero_stage=1, dp_shard=8)
ZERO3 = Layout(engine="deepspeed", zero_stage=3, dp_shard=8)
FSDP2 = Layout(engine="fsdp2", dp_shard=8)


def plan(model, hardware, **job):
    cluster = parse_hardware(hardware) if isinstance(hardware, str) else hardware
    return make_plan(model, cluster, TrainingJob(**job))


def other(made, prefix):
    """The first layout of another name that was not taken."""
    return next(candidate for candidate in made.rejected if display_name(candidate.strategy).startswith(prefix))


# --- volumes, counted message by message ---


def ring_all_reduce_bytes(ranks: int, size: float) -> float:
    """What each rank of a ring sends: one chunk in each of 2 (n - 1) rounds."""
    return sum(size / ranks for _ in range(2 * (ranks - 1)))


def all_to_all_bytes(ranks: int, own: float) -> float:
    """What a rank sends to every other one of what it holds."""
    return sum(own / ranks for peer in range(ranks) if peer != 0)


def moved_bytes(strategy: Layout, model: ModelSpec, *, tokens: float, with_head: bool = False) -> float:
    """What a rank moves for one micro-batch of one layer: seconds on links of one byte per second, without latency."""
    hardware = replace(parse_hardware("32xH100-80GB"), link_bytes_per_s=1.0)
    ideal = replace(constants_of(hardware.gpu), link_efficiency=1.0, link_latency_seconds=0.0)
    given_once = {"layers": 1, "recomputed": 0, "with_head": with_head, "element_bytes": 2}
    terms, _ = exchanges(strategy, model_work(model), hardware, ideal, tokens=tokens, **given_once)
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


def test_another_accelerator_costs_less_than_recomputation():
    """ZeRO-2 without recomputation fits, and the batch leaves time to hide what it reduces."""
    strategy = plan(LLAMA_8B, "8xH100-80GB", global_batch_size=1024).chosen.strategy
    assert (strategy.label, strategy.gradient_checkpointing) == ("zero2", False)


def test_small_model_on_many_accelerators_is_sharded_without_recomputation():
    sizes = {"num_attention_heads": 24, "num_key_value_heads": 24, "vocab_size": 50304}
    model = llama(hidden_size=3072, intermediate_size=8192, num_hidden_layers=30, **sizes)
    chosen = plan(model, "32x8xH100-80GB", global_batch_size=256).chosen
    assert chosen.strategy.engine != "ddp"
    assert not chosen.strategy.gradient_checkpointing
    assert chosen.memory.gpu.high_bytes < 0.6 * chosen.memory.gpu.capacity_bytes


def test_chunked_loss_is_preferred_to_offload_on_a_desktop_gpu():
    made = plan(public_model("meta-llama/Llama-3.2-1B"), "1xRTX4090")
    assert (made.chosen.strategy.offload_optimizer, made.chosen.loss, made.job.loss) == ("none", "chunked", "chunked")
    assert "one sequence per accelerator, because 4 do not fit without offload" in made.chosen.reason
    assert "chunked loss" in made.chosen.reason


def test_sixteen_thousand_accelerators_are_not_one_ring():
    made = plan(LLAMA_405B, "2048x8xH100-80GB", global_batch_size=16384)
    fastest = made.rejected[0]
    assert {"tp", "pp"} <= fastest.strategy.axes.keys()
    # Nothing without pipelines fits except over all accelerators.
    one_ring = made.chosen
    assert one_ring.strategy.label == "fsdp2"
    assert one_ring.time.tokens_per_second < fastest.time.tokens_per_second / 1.5
    assert max(one_ring.time.terms, key=one_ring.time.terms.__getitem__) == "parameter_gathers"
    axes = {field: fastest.strategy.axes[axis] for field, axis in AXIS_FIELDS.items() if axis in fastest.strategy.axes}
    requested = plan(LLAMA_405B, "2048x8xH100-80GB", global_batch_size=16384, **axes).chosen
    assert (requested.time, requested.memory) == (fastest.time, fastest.memory)


def test_small_steps_use_more_than_data_parallelism():
    made = plan(LLAMA_70B, "64x8xA100-80GB", global_batch_size=16)
    ((axis, size),) = made.chosen.strategy.axes.items()
    assert axis in ("sp", "cp")
    assert "Data parallelism alone cannot divide a global batch of 16 over 512 ranks" in made.chosen.reason
    assert f"{axis.upper()} {size} splits sequences of 4,096 tokens" in made.chosen.reason
    fastest = made.rejected[0]
    assert fastest.strategy.tp > 1 and fastest.strategy.pp > 1
    assert fastest.time.tokens_per_second > made.chosen.time.tokens_per_second
    axes = {"tensor_parallel_size": fastest.strategy.tp, "pipeline_parallel_size": fastest.strategy.pp}
    requested = plan(LLAMA_70B, "64x8xA100-80GB", global_batch_size=16, **axes).chosen
    assert (requested.time, requested.memory) == (fastest.time, fastest.memory)
    assert f"TP {fastest.strategy.tp} splits the matrices of each layer (64 heads)" in requested.reason
    many = plan(LLAMA_70B, "64x8xA100-80GB", global_batch_size=512)
    assert many.chosen.strategy.data_parallel_size > made.chosen.strategy.data_parallel_size


def test_unsupported_3d_layouts_are_listed_but_not_chosen():
    made = plan(PHI_70B, "64x8xA100-80GB", global_batch_size=16)
    assert not {"tp", "pp"} <= made.chosen.strategy.axes.keys()
    best = made.rejected[0]
    assert best.analysis_only
    assert {"tp", "pp"} <= best.strategy.axes.keys()
    assert re.search(r"would be \d\.\d\d times as fast as the chosen layout and need up to", best.reason)
    assert "Analysis only, it cannot run with DeepSpeed 0.19.8: " in best.reason
    assert not any(candidate.analysis_only for candidate in made.rejected[1:])


@pytest.mark.parametrize("gpu", ["A100-80GB", "RTX4090"])
def test_a_3d_layout_has_the_numbers_of_its_best_candidate(gpu):
    """Compared with every micro-batch and every number of recomputed layers."""
    hardware, job = parse_hardware(f"64x8x{gpu}"), TrainingJob(global_batch_size=16)
    listed = plan(PHI_70B, hardware, global_batch_size=16).rejected[0]
    assert listed.analysis_only
    zero = default_zero_options(PHI_70B, job, stage=1)
    base = Layout(engine="deepspeed", zero_stage=1, dp_shard=hardware.world_size, zero=zero)
    contexts = [SearchContext(model=PHI_70B, hardware=hardware, job=replace(job, loss="eager"))]
    for layout, _ in three_dimensional(base, PHI_70B, hardware, job):
        legal = list(candidates(layout, contexts, 0, None, sizes_only=True))
        if layout.axes != listed.strategy.axes:
            speeds = [candidate.tokens_per_second for candidate in legal if candidate.memory.fits]
            assert AS_FAST * max(speeds, default=0.0) <= listed.time.tokens_per_second
            continue
        layers = range(1, -(-PHI_70B.dimensions.num_layers // layout.pp))
        legal += [one.with_recomputed(n) for one in legal if not one.strategy.gradient_checkpointing for n in layers]
        fitting = [candidate for candidate in legal if candidate.memory.fits]
        least = AS_FAST * max(candidate.tokens_per_second for candidate in fitting)
        best = min(
            (candidate for candidate in fitting if candidate.tokens_per_second >= least),
            key=lambda candidate: (candidate.complexity, -candidate.tokens_per_second),
        )
        assert (listed.strategy, listed.time, listed.memory) == (best.strategy, best.time, best.memory)


@pytest.mark.parametrize("gpu", ["L40S", "RTX4090"])
def test_a_faster_pipeline_is_listed_with_the_flags_that_request_it(gpu):
    hardware = replace(parse_hardware(f"4x8x{gpu}"), network_bytes_per_s=0.3e9)
    made = plan(THIRTEEN_B, hardware)
    assert made.chosen.strategy.pp == 1
    fastest = made.rejected[0]
    assert fastest.strategy.pp > 1
    assert fastest.time.tokens_per_second > made.chosen.time.tokens_per_second / AS_FAST
    zero3 = next(layout for layout in made.rejected if layout.strategy.label == "zero3")
    assert zero3.memory.fits
    assert "gathers and reductions not hidden by computation" in zero3.reason
    sizes = fastest.strategy.axes
    flags = {field: sizes[axis] for field, axis in AXIS_FIELDS.items() if axis in sizes}
    shown = " ".join(f"--{field.replace('_', '-')} {size}" for field, size in flags.items())
    assert fastest.reason.endswith(
        f"a stock Trainer cannot run a pipeline: PipelineTrainer does. Request it with {shown}."
    )
    batch = made.chosen.strategy.global_batch_size
    requested = plan(THIRTEEN_B, hardware, **flags, global_batch_size=batch).chosen
    assert requested.time == fastest.time
    assert requested.memory == fastest.memory


@pytest.mark.slow
def test_slow_links_between_nodes_keep_gathers_inside_nodes():
    fast = plan(LLAMA_70B, "4x8xH100-80GB")
    slow = plan(LLAMA_70B, replace(parse_hardware("4x8xH100-80GB"), network_bytes_per_s=1.25e9))
    assert slow.chosen.time.tokens_per_second < fast.chosen.time.tokens_per_second
    zero3 = other(slow, "ZeRO-3")
    assert zero3.time.tokens_per_second < slow.chosen.time.tokens_per_second


def test_long_sequences_select_sequence_or_context_parallelism():
    made = plan(LLAMA_8B, "8xH100-80GB", seq_len_tokens=131_072)
    strategy = made.chosen.strategy
    assert strategy.sp * strategy.cp > 1
    assert made.chosen.memory.fits
    axis = "SP" if strategy.sp > 1 else "CP"
    assert f"{axis} {strategy.sp * strategy.cp} splits sequences of 131,072 tokens" in made.chosen.reason
    assert "Too large: " in made.chosen.reason
    faster = made.chosen.time.tokens_per_second / AS_FAST
    assert not any(one.memory.fits and one.time.tokens_per_second > faster for one in made.rejected)


def test_indivisible_sequence_length_gets_a_shorter_suggestion():
    with pytest.raises(PlanDoesNotFitError) as refused:
        plan(LLAMA_8B, "8xH100-80GB", seq_len_tokens=100_003, offload="none", loss="eager")
    found = {suggestion.change: suggestion.strategy for suggestion in refused.value.suggestions}
    assert "CP" in found["--seq-len 100000"] or "SP" in found["--seq-len 100000"]


@pytest.mark.slow
def test_adapters_of_a_mixture_are_never_suggested_or_planned_with_expert_parallelism():
    for hardware, method in (("8xH100-80GB", "lora"), ("8xH200", "qlora")):
        made = plan(QWEN_MOE, hardware, method=method)
        assert all(layout.strategy.ep == 1 for layout in (made.chosen, *made.rejected))


def test_mixture_of_experts_tries_expert_parallelism():
    made = plan(QWEN_MOE, "8xH200")
    assert any(candidate.strategy.ep > 1 for candidate in (made.chosen, *made.rejected))
    assert plan(QWEN_MOE, "8xH200", expert_parallel_size=2).chosen.strategy.ep == 2


# --- the search ---


def test_a_fixed_size_is_kept_and_one_forbids_an_axis():
    made = plan(LLAMA_8B, "8xA100-80GB", tensor_parallel_size=4)
    assert "with the requested sizes" in made.chosen.reason
    assert (made.chosen.strategy.tp, made.chosen.strategy.data_parallel_size) == (4, 2)
    made = plan(QWEN_MOE, "8xH200", expert_parallel_size=1)
    assert made.chosen.strategy.ep == 1
    assert not any(candidate.strategy.ep > 1 for candidate in made.rejected)


def test_fixed_tensor_parallelism_is_combined_with_pipelines_and_vice_versa():
    cluster = parse_hardware("16xA100-80GB")
    beside = list(axes_to_try(LLAMA_8B, cluster, TrainingJob(tensor_parallel_size=4), "none"))
    assert beside == [{"tp": 4}, {"tp": 4, "pp": 2}, {"tp": 4, "pp": 4}]
    beside = list(axes_to_try(LLAMA_8B, cluster, TrainingJob(pipeline_parallel_size=8), "none"))
    assert beside == [{"pp": 8}, {"tp": 2, "pp": 8}]
    both = TrainingJob(tensor_parallel_size=4, pipeline_parallel_size=1)
    assert list(axes_to_try(LLAMA_8B, cluster, both, "none")) == [{"tp": 4}]
    assert list(axes_to_try(LLAMA_8B, cluster, TrainingJob(tensor_parallel_size=4), "cpu")) == [{"tp": 4}]
    slow = replace(parse_hardware("4x8xH100-80GB"), network_bytes_per_s=1.25e9)
    assert plan(LLAMA_70B, slow, tensor_parallel_size=4).chosen.strategy.tp == 4


def test_pipeline_without_global_batch_gets_enough_micro_batches():
    made = plan(LLAMA_8B, "8xA100-80GB", pipeline_parallel_size=4, tensor_parallel_size=1)
    strategy = made.chosen.strategy
    assert strategy.gradient_accumulation_steps * strategy.micro_batch_size * 4096 * 2 == 16_384 * 8


def test_batch_smaller_than_ranks_selects_other_axes():
    made = plan(LLAMA_8B, "8xH100-80GB", global_batch_size=2, seq_len_tokens=8192)
    assert made.chosen.strategy.global_batch_size == 2
    assert "Data parallelism alone cannot divide a global batch of 2 over 8 ranks" in made.chosen.reason
    assert made.chosen.strategy.axes


def test_the_largest_model_needs_few_memory_estimates():
    """Bounds exclude layouts that cannot fit or be the fastest before memory is estimated."""

    def share(hardware: str, *, compare: bool) -> float:
        context = SearchContext(model=LLAMA_405B, hardware=parse_hardware(hardware), job=TrainingJob())
        found = search(context, compare=compare)
        assert found.candidates > 500
        return found.estimated / found.candidates

    assert share("128x8xH100-80GB", compare=True) < 1 / 3
    assert share("128x8xH100-80GB", compare=False) < 1 / 3
    # Nothing fits, which one or two candidates of each layout show.
    assert share("4x8xH100-80GB", compare=True) < 2 / 5


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
        ("Qwen/Qwen2.5-0.5B", "2xRTX4090", {}),
        ("meta-llama/Llama-3.2-1B", "8xA100-40GB", {}),
        ("meta-llama/Llama-3.1-8B", "8xA100-80GB", {}),
        ("meta-llama/Llama-3.1-8B", "2x8xH100-80GB", {"global_batch_size": 64}),
        ("meta-llama/Llama-3.1-8B", "8xH100-80GB", {"objective": "memory"}),
        ("meta-llama/Llama-2-7b-hf", "8xV100-32GB", {"method": "lora", "precision": "fp16"}),
        ("Qwen/Qwen3-8B", "8xA100-80GB", {}),
        ("Qwen/Qwen3-30B-A3B", "8xH200", {}),
        ("meta-llama/Llama-3.1-70B", "4x8xH100-80GB", {}),
    ],
)
def test_listed_layouts_have_the_numbers_of_a_plan_for_exactly_them(model, hardware, job):
    spec, cluster = public_model(model), parse_hardware(hardware)
    # A plan for exactly a layout that does not fit would also try mechanisms for long sequences.
    job = job | {"tiled_mlp": "off", "offload_activations": "off"}
    made = make_plan(spec, cluster, TrainingJob(**job), offers=False)
    job = job | {"global_batch_size": made.chosen.strategy.global_batch_size}
    listed = [candidate for candidate in made.rejected if not candidate.analysis_only]
    assert listed
    for candidate in listed:
        requested = TrainingJob(**job | exactly(candidate.strategy))
        try:
            answer = make_plan(spec, cluster, requested, offers=False).chosen
        except PlanDoesNotFitError as error:
            (answer,) = error.tried
        assert answer.strategy == candidate.strategy
        assert (answer.time, answer.memory, answer.loss) == (candidate.time, candidate.memory, candidate.loss)


@pytest.mark.parametrize("hardware", ["1xA100-80GB", "8xA100-80GB", "4x8xH100-80GB"])
@pytest.mark.parametrize("job", [{}, {"micro_batch_size": 2}, {"seq_len_tokens": 32_768}, {"global_batch_size": 96}])
def test_all_layouts_are_compared_at_one_global_batch(hardware, job):
    made = plan(LLAMA_8B, hardware, method="lora", **job)
    layouts = [made.chosen, *made.rejected]
    (sequences,) = {layout.strategy.global_batch_size for layout in layouts}
    values = plan_to_dict(made)["global_batch"]
    reason = global_batch_reason(made.job, made.hardware.world_size, sequences)
    assert values == {"sequences": sequences, "tokens": sequences * made.job.seq_len_tokens, "reason": reason}
    assert sequences == planned_global_batch(made.job, made.hardware.world_size)
    assert f"Global batch {sequences:,} sequence" in made.chosen.reason
    assert reason in made.chosen.reason
    assert ("--global-batch-size" in made.chosen.reason) == ("global_batch_size" not in job)


@pytest.mark.parametrize(("model", "hardware"), [("openai-community/gpt2", "4xT4"), ("Qwen/Qwen2.5-0.5B", "2xRTX3090")])
def test_no_sharding_of_parameters_for_a_gain_within_the_error_of_the_prediction(model, hardware):
    job = {"precision": "fp16", "seq_len_tokens": 1024} if "T4" in hardware else {}
    made = plan(public_model(model), hardware, **job)
    assert made.chosen.strategy.zero_stage != 3
    assert made.chosen.strategy.engine != "fsdp2"
    fastest = max([made.chosen, *made.rejected], key=lambda layout: layout.time.tokens_per_second * layout.memory.fits)
    assert made.chosen.time.tokens_per_second >= AS_FAST * fastest.time.tokens_per_second


def test_a_pipeline_is_chosen_if_nothing_else_fits_or_if_it_was_requested():
    assert plan(LLAMA_8B, "4x8xH100-80GB", pipeline_parallel_size=4).chosen.strategy.pp == 4
    assert plan(LLAMA_8B, "4x8xH100-80GB").chosen.strategy.pp == 1
    # Three sequences of a prime length on four nodes: neither data nor sequence parallelism divides them.
    odd = plan(public_model("meta-llama/Llama-3.2-1B"), "4x1xH100-80GB", global_batch_size=3, seq_len_tokens=8191)
    assert odd.chosen.strategy.pp == 4
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
def test_plan_with_axes_round_trips_through_json(axis):
    made = made_with(**CASES[axis])
    read = plan_from_dict(json.loads(json.dumps(plan_to_dict(made))), source="test")
    assert (read.chosen, read.rejected, read.job) == (made.chosen, made.rejected, made.job)


@pytest.mark.parametrize("axis", CASES)
def test_names_state_the_axes(axis):
    strategy = made_with(**CASES[axis]).chosen.strategy
    size = next(iter(CASES[axis].values()))
    assert strategy.axes == {axis: size}
    assert f"+{axis}{size}" in strategy.label
    assert f"+ {axis.upper()} {size}" in display_name(strategy)
    offloaded = replace(ZERO1, tp=2, pp=4, offload_optimizer="cpu")
    assert display_name(offloaded) == "ZeRO-1 + TP 2 + PP 4 + CPU offload of optimizer"


@pytest.mark.parametrize("axis", CASES)
def test_files_carry_the_axis_and_pass_our_check(axis, tmp_path):
    from shardwright.ds_configs.check.files import run_check

    made = made_with(**CASES[axis])
    made.write(tmp_path / "plan")
    texts = render_files(made, directory=str(tmp_path / "plan"))
    names = [name for name in ("accelerate.yaml", "ds_config.json") if name in texts]
    findings = run_check([tmp_path / "plan" / name for name in names], world_size=8, uses_transformers=True).findings
    assert findings == (), [str(finding.error) for finding in findings]
    launch = yaml.safe_load(texts["accelerate.yaml"])
    parallel = launch.get("parallelism_config", {})
    config = json.loads(texts.get("ds_config.json", "{}"))
    assert config.get("tensor_parallel", {}).get("autotp_size", 1) == made.chosen.strategy.tp
    assert config.get("expert_parallel", {}).get("autoep_size", 1) == made.chosen.strategy.ep
    assert parallel.get("parallelism_config_sp_size", 1) == made.chosen.strategy.sp
    assert parallel.get("parallelism_config_cp_size", 1) == made.chosen.strategy.cp
    if axis == "pp":
        assert config["zero_optimization"]["stage"] in (0, 1)
    assert f"{axis.upper()} {made.chosen.strategy.axes[axis]}: " in texts["launch.sh"]


@pytest.mark.parametrize("axis", ["tp", "pp", "ep"])
def test_deepspeed_reads_the_sections(axis):
    from deepspeed.runtime.config import DeepSpeedConfig

    made = made_with(**CASES[axis])
    config = json.loads(render_files(made)["ds_config.json"])
    strategy = made.chosen.strategy
    config |= {
        "train_batch_size": strategy.micro_batch_size * strategy.gradient_accumulation_steps,
        "train_micro_batch_size_per_gpu": strategy.micro_batch_size,
        "gradient_accumulation_steps": strategy.gradient_accumulation_steps,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
    }
    # AutoTP divides the ranks, of which a test has one.
    config.pop("tensor_parallel", None)
    loaded = DeepSpeedConfig(config)
    assert loaded.zero_optimization_stage == strategy.zero_stage
    if axis == "ep":
        assert loaded.expert_parallel_config.autoep_size == 4


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


def test_quantized_collectives_are_planned_with_zero_3_and_written():
    made = plan(LLAMA_8B, "2x8xH100-80GB", zero_quantized_weights=True, zero_quantized_gradients=True)
    assert made.chosen.strategy.zero_stage == 3
    config = json.loads(render_files(made)["ds_config.json"])["zero_optimization"]
    assert (config["zero_quantized_weights"], config["zero_quantized_gradients"]) == (True, True)


def test_group_bandwidth_depends_on_placement_of_members():
    cluster = parse_hardware("4x8xH100-80GB")
    link, network = cluster.link_bytes_per_s, cluster.network_bytes_per_s
    for (ranks, stride), expected in {
        (8, 1): link,
        (4, 2): link,
        (4, 8): network,
        (8, 4): 2 * network,
        (16, 1): min(link, 8 * network),
        (2, 16): network,
    }.items():
        assert collectives.group_bytes_per_s(cluster, ranks=ranks, stride=stride) == expected
    three = parse_hardware("3x8xH100-80GB")
    assert collectives.group_bytes_per_s(three, ranks=6) == min(link, 2 * network), "ranks 6 to 11 lie as 2 and 4"
    assert collectives.group_bytes_per_s(parse_hardware("8xH100-80GB"), ranks=6) == link
    for ranks, stride in product((1, 2, 4), (1, 2)):
        assert collectives.group_bytes_per_s(cluster, ranks=ranks, stride=stride) == link


# --- the command ---

CONFIG = CONFIGS / "meta-llama--Llama-3.1-8B" / "config.json"


@pytest.fixture
def shell(tmp_path, capsys, monkeypatch) -> Shell:
    return shell_in(tmp_path, "plan", capsys, monkeypatch)


def test_the_command_takes_sizes_from_flags_files_and_the_environment(shell, tmp_path, monkeypatch):
    (tmp_path / "settings.yaml").write_text("tensor_parallel_size: 4\nhardware: 8xA100-80GB\n")
    result = shell(CONFIG, "--config", "settings.yaml", "--format", "json")
    assert json.loads(result.out)["chosen"]["strategy"]["tp"] == 4
    monkeypatch.setenv("SHARDWRIGHT_PLAN_TENSOR_PARALLEL_SIZE", "2")
    result = shell(CONFIG, "--config", "settings.yaml", "--format", "json")
    assert json.loads(result.out)["chosen"]["strategy"]["tp"] == 2
    flags = ("--tensor-parallel-size", "auto", "--format", "json")
    result = shell(CONFIG, "--config", "settings.yaml", *flags)
    assert json.loads(result.out)["chosen"]["strategy"]["tp"] == 1


def test_illegal_size_error_names_nearest_legal_sizes(shell):
    result = shell(CONFIG, "--hardware", "8xH100-80GB", "--tensor-parallel-size", 3)
    assert result.code == 2
    assert any("tp = 3: must divide the attention heads (32 % 3 = 2)" in line for line in result.errors)


def test_quantized_collectives_come_from_the_environment_too(shell, monkeypatch):
    monkeypatch.setenv("SHARDWRIGHT_PLAN_ZERO_QUANTIZED_WEIGHTS", "true")
    result = shell(CONFIG, "--hardware", "8xH100-80GB", "--format", "json")
    assert json.loads(result.out)["chosen"]["strategy"]["zero"]["quantized_weights"] is True


def test_tensor_parallelism_in_more_dimensions_is_explained_as_analysis_only(shell):
    flags = ("--hardware", "8xH100-80GB", "--explain-tensor-parallel")
    found = json.loads(shell(CONFIG, *flags, "--format", "json").out)["tensor_layouts"]
    assert {layout["name"] for layout in found} == {"1D", "2D", "2.5D", "3D"}
    shown = " ".join(shell(CONFIG, *flags).out.split())
    assert "all but 1D are analysis only" in shown and "64 3D 4 x 4 x 4" in shown


@pytest.mark.slow
def test_comparison_is_shown_if_nothing_fits_but_not_for_experts(shell):
    flags = ("--hardware", "1xL40S", "--offload", "none", "--explain-tensor-parallel")
    result = shell(CONFIG, *flags)
    assert result.code == 3 and "3D 4 x 4 x 4" in result.out
    result = shell(CONFIG, *flags, "--format", "json")
    assert (result.code, len(json.loads(result.out)["tensor_layouts"])) == (3, 11)
    experts = CONFIGS / "mistralai--Mixtral-8x7B-v0.1" / "config.json"
    result = shell(experts, "--hardware", "8xH200", "--explain-tensor-parallel", "--format", "json")
    assert result.code == 0
    assert "tensor_layouts" not in json.loads(result.out)
