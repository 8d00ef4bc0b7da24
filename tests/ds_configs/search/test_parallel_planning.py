"""What the planner chooses beyond data parallelism, against volumes and schedules counted out here."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import product

import pytest
import yaml
from commands import Shell, shell_in
from hypothesis import given, settings
from hypothesis import strategies as st
from planning import MODELS, llama, public_model
from shardwright.ds_configs.memory.pipeline_stages import pipeline_stages
from shardwright.ds_configs.plan.files import render_files
from shardwright.ds_configs.plan.plan import PlanDoesNotFitError, make_plan
from shardwright.ds_configs.plan.plan_json import plan_from_dict, plan_to_dict
from shardwright.ds_configs.search.axis_levels import axes_to_try
from shardwright.ds_configs.search.choice import search
from shardwright.ds_configs.search.reasons import display_name
from shardwright.ds_configs.search.variants import micro_batches
from shardwright.ds_configs.specs.hardware import parse_hardware
from shardwright.ds_configs.specs.job import TrainingJob
from shardwright.ds_configs.specs.strategy import Strategy, ZeroOptions
from shardwright.ds_configs.step_time import collectives
from shardwright.ds_configs.step_time.step_cost import data_parallel_seconds, step_cost, training_flops_per_token

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
ZERO1 = Strategy(engine="deepspeed", zero_stage=1, dp_shard=8)
ZERO3 = Strategy(engine="deepspeed", zero_stage=3, dp_shard=8)


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


@given(tp=st.integers(2, 16), tokens=st.integers(1, 5000), layers=st.integers(1, 100))
def test_tensor_parallel_volume_is_that_of_four_ring_all_reduces_in_each_layer(tp, tokens, layers):
    counted = sum(ring_all_reduce_bytes(tp, tokens * 64 * 2) for _ in range(4)) * layers
    found = collectives.tensor_parallel_bytes(tp=tp, tokens=tokens, hidden_size=64, layers=layers, element_bytes=2)
    assert found == pytest.approx(counted)


@given(power=st.integers(1, 5), tokens=st.integers(1, 5000))
def test_sequence_parallel_volume_is_that_of_eight_all_to_alls(power, tokens):
    sp, heads, kv_heads, head_dim = 2**power, 32, 8, 16
    # Before attention each rank holds its tokens of every head; fewer key/value heads than ranks are repeated.
    kv_width = head_dim * max(kv_heads, sp if sp > kv_heads else kv_heads)
    widths = (heads * head_dim, kv_width, kv_width, heads * head_dim)
    counted = 2 * sum(all_to_all_bytes(sp, tokens / sp * width * 2) for width in widths)
    found = collectives.sequence_parallel_bytes(
        sp=sp,
        tokens=tokens,
        query_size=heads * head_dim,
        key_value_size=kv_heads * head_dim,
        key_value_heads=kv_heads,
        layers=1,
        element_bytes=2,
    )
    assert found == pytest.approx(counted)


@given(cp=st.integers(2, 16))
def test_context_parallel_volume_is_keys_and_values_twice_and_their_gradients(cp):
    shard = 2 * 1000 / cp * 128 * 2
    counted = sum(shard for _ in range(3) for peer in range(cp) if peer != 0)
    found = collectives.context_parallel_bytes(cp=cp, tokens=1000, key_value_size=128, layers=1, element_bytes=2)
    assert found == pytest.approx(counted)


@given(ep=st.integers(2, 16))
def test_expert_parallel_volume_is_that_of_four_all_to_alls_of_routed_tokens(ep):
    counted = sum(all_to_all_bytes(ep, 1000 * 8 * 64 * 2) for _ in range(4))
    found = collectives.expert_parallel_bytes(
        ep=ep, tokens=1000, experts_per_token=8, hidden_size=64, layers=1, element_bytes=2
    )
    assert found == pytest.approx(counted)


def one_f_one_b_seconds(stages: int, micro_batches: int, forward: float, backward: float) -> float:
    """The end of a 1F1B step, each stage doing its work in order as soon as what it needs has come."""
    orders = []
    for stage in range(stages):
        warm = min(stages - stage - 1, micro_batches)
        order = [("f", m) for m in range(warm)]
        for m in range(micro_batches - warm):
            order += [("f", warm + m), ("b", m)]
        orders.append(order + [("b", m) for m in range(micro_batches - warm, micro_batches)])
    done: dict[tuple[str, int, int], float] = {}
    free = [0.0] * stages
    while any(orders):
        for stage, order in enumerate(orders):
            if not order:
                continue
            kind, m = order[0]
            source = (kind, stage - 1, m) if kind == "f" else (kind, stage + 1, m)
            first = stage == 0 if kind == "f" else stage == stages - 1
            if not first and source not in done:
                continue
            start = max(free[stage], 0.0 if first else done[source])
            free[stage] = done[(kind, stage, m)] = start + (forward if kind == "f" else backward)
            order.pop(0)
    return max(free)


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 2), (2, 8), (4, 4), (4, 16), (8, 8)])
def test_bubble_is_that_of_a_replayed_schedule(stages, micro_batches):
    model = llama(num_hidden_layers=16, vocab_size=16, hidden_size=512)
    cluster = replace(parse_hardware(f"{stages}xA100-80GB"), link_bytes_per_s=1e30)
    job = TrainingJob(seq_len_tokens=512, micro_batch_size=1, global_batch_size=micro_batches)
    cost = step_cost(Strategy(engine="deepspeed", zero_stage=1, pp=stages), model, cluster, job)
    assert cost.micro_batches == micro_batches
    each = cost.compute_seconds / micro_batches
    replayed = one_f_one_b_seconds(stages, micro_batches, each / 3, 2 * each / 3)
    assert cost.compute_seconds + cost.bubble_seconds == pytest.approx(replayed, rel=2e-3)


@pytest.mark.parametrize("tp", [1, 4])
def test_the_slowest_stage_of_a_pipeline_divides_its_layers_and_computes_the_whole_head(tp):
    cluster = replace(parse_hardware(f"{4 * tp}xA100-80GB"), link_bytes_per_s=1e30, gpus_per_node=4 * tp)
    job = TrainingJob(seq_len_tokens=512, micro_batch_size=1, global_batch_size=16)
    cost = step_cost(Strategy(engine="deepspeed", zero_stage=1, pp=4, tp=tp), LLAMA_8B, cluster, job)
    layer = 2 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 2 * 512 * 4096
    stages = pipeline_stages(LLAMA_8B, job, 4, tensor_parallel_size=tp)
    counts = [stage.num_layers for stage in stages]
    slowest = max(max(counts) * layer / tp, counts[-1] * layer / tp + 2 * 4096 * 128256)
    replayed = (16 + 3) * 3 * 512 * slowest / (cluster.flops_per_s * 0.5)
    assert cost.compute_seconds + cost.bubble_seconds == pytest.approx(replayed, rel=1e-3)


def test_a_pipeline_of_a_fixed_batch_takes_micro_batches_that_fill_its_stages():
    cluster, layout = parse_hardware("4xA100-80GB"), Strategy(engine="deepspeed", zero_stage=1, pp=4)
    job = TrainingJob(seq_len_tokens=512, global_batch_size=32)
    assert micro_batches(layout, job) == [(1, 32), (2, 16)]
    assert step_cost(layout, LLAMA_8B, cluster, job).micro_batches == 16
    few = replace(job, global_batch_size=8)
    assert micro_batches(layout, few) == [(1, 8)]
    assert step_cost(layout, LLAMA_8B, cluster, few).micro_batches == 8
    lost = {
        size: step_cost(layout, LLAMA_8B, cluster, replace(job, micro_batch_size=size)).lost_seconds for size in (2, 8)
    }
    assert step_cost(layout, LLAMA_8B, cluster, job).lost_seconds == lost[2] < lost[8] / 3


def test_a_divided_head_gathers_its_logits_and_reduces_the_gradient_of_its_input():
    sizes = {"tp": 4, "tokens": 100, "hidden_size": 64, "layers": 2, "element_bytes": 2}
    gathered = sum(100 * 1000 / 4 * 2 for peer in range(4) if peer != 0)
    reduced = ring_all_reduce_bytes(4, 100 * 64 * 2)
    more = collectives.tensor_parallel_bytes(**sizes, vocab_size=1000) - collectives.tensor_parallel_bytes(**sizes)
    assert more == pytest.approx(gathered + reduced)


@pytest.mark.parametrize(("stage", "widths"), [(0, (4, 4)), (1, (4, 2)), (2, (4, 2)), (3, (4, 4))])
def test_sequence_parallelism_reduces_gradients_in_fp32(stage, widths):
    """Bytes of an element in the reduction, and in what is gathered (ZeRO-3: twice 16 bit)."""
    cluster, job = parse_hardware("8xA100-80GB"), TrainingJob()
    base = replace(ZERO1, zero_stage=stage, dp_shard=1 if stage == 0 else 4, dp_replicate=4 if stage == 0 else 1, sp=2)
    found = sum(data_parallel_seconds(base, LLAMA_8B, cluster, job))
    assert found == pytest.approx(sum(widths) * 7 / 8 * LLAMA_8B.parameter_count / cluster.link_bytes_per_s)


def test_training_flops_are_those_of_matrices_and_causal_attention():
    model = llama(num_hidden_layers=3, hidden_size=64, intermediate_size=96, num_attention_heads=4, vocab_size=50)
    kv = model.dimensions.key_value_size
    layer = 64 * 64 * 2 + 2 * 64 * kv + 3 * 64 * 96
    seen = sum(position + 1 for position in range(1000)) / 1000
    forward = 2 * (3 * layer + 64 * 50) + 3 * 4 * seen * 64
    found = training_flops_per_token(model, TrainingJob(seq_len_tokens=1000))
    assert found == pytest.approx(3 * forward, rel=1e-3)


def test_quantized_collectives_move_half_and_a_quarter():
    cluster, job = parse_hardware("2x8xA100-80GB"), TrainingJob(seq_len_tokens=128, micro_batch_size=1)
    base = replace(ZERO3, dp_shard=16)
    switched = replace(base, zero=ZeroOptions(quantized_weights=True, quantized_gradients=True))
    hpz = replace(base, zero=replace(switched.zero, hpz_partition_size=8))
    compute = step_cost(base, LLAMA_8B, cluster, job)
    volume = 15 / 16 * 2 * LLAMA_8B.parameter_count
    seconds = compute.data_seconds + compute.compute_seconds
    steps = compute.micro_batches
    across = min(cluster.link_bytes_per_s, 8 * cluster.network_bytes_per_s)
    assert seconds == pytest.approx(steps * 3 * volume / across)
    quantized = step_cost(switched, LLAMA_8B, cluster, job)
    assert quantized.data_seconds + quantized.compute_seconds == pytest.approx(steps * 1.25 * volume / across)
    within = step_cost(hpz, LLAMA_8B, cluster, job)
    expected = steps * (0.75 * volume / across + 0.5 * volume / cluster.link_bytes_per_s)
    assert within.data_seconds + within.compute_seconds == pytest.approx(expected)


# --- the decision rules of practice, as results ---


@pytest.mark.parametrize(("model", "expected"), [(public_model("meta-llama/Llama-3.2-1B"), "ddp"), (LLAMA_8B, "zero1")])
def test_one_node_and_the_model_fits_takes_ddp_or_zero_1(model, expected):
    assert plan(model, "8xA100-80GB").chosen.strategy.label == expected


def test_with_nvlink_a_model_that_does_not_fit_takes_zero_3_where_a_step_has_tokens_to_hide_it():
    made = plan(THIRTEEN_B, "8xA100-40GB")
    assert made.chosen.strategy.label == "zero3"
    assert step_cost(made.chosen.strategy, made.model, made.hardware, made.job).lost_seconds == 0


def test_with_nvlink_a_model_that_does_not_fit_takes_tp_where_a_step_has_few_tokens():
    made = plan(THIRTEEN_B, "8xH100-80GB", seq_len_tokens=512, global_batch_size=8, micro_batch_size=1)
    assert made.chosen.strategy.tp > 1
    costs = {
        name: step_cost(layout, made.model, made.hardware, made.job).lost_seconds
        for name, layout in {"tp": made.chosen.strategy, "zero3": other(made, "ZeRO-3").strategy}.items()
    }
    assert costs["tp"] < costs["zero3"]
    assert "all-reduces of TP" in made.chosen.reason


@pytest.mark.parametrize(
    ("model", "hardware", "job", "expected"),
    [
        (THIRTEEN_B, "8xL40S", {}, "zero3"),
        (LLAMA_8B, "8xRTX4090", {}, "fsdp2"),
        (LLAMA_8B, "8xL40S", {"seq_len_tokens": 1024, "micro_batch_size": 1}, "zero1+pp4"),
    ],
)
def test_without_nvlink_sharding_or_pp_comes_before_tp(model, hardware, job, expected):
    made = plan(model, hardware, **job)
    assert made.chosen.strategy.label == expected
    assert ("it loses" in made.chosen.reason) == (hardware == "8xL40S")
    lost = [
        step_cost(layout, model, made.hardware, made.job).lost_seconds
        for layout in (made.chosen.strategy, *(replace(ZERO1, tp=tp, dp_shard=8 // tp) for tp in (2, 4, 8)))
    ]
    assert lost[0] == min(lost)


def test_several_nodes_with_fast_links_take_tp_inside_pp_across_and_dp_outside():
    """With few tokens for each accelerator; with many, the gathers of ZeRO-3 hide behind the computation."""
    made = plan(LLAMA_70B, "64x8xA100-80GB", global_batch_size=16)
    strategy = made.chosen.strategy
    assert strategy.tp == made.hardware.gpus_per_node
    assert strategy.pp > 1
    assert strategy.data_parallel_size == 16
    assert "TP 8 divides the matrices of each layer (64 heads); PP 4 divides the 80 layers" in made.chosen.reason
    assert plan(LLAMA_70B, "64x8xA100-80GB", global_batch_size=512).chosen.strategy.label == "zero3"
    assert plan(LLAMA_405B, "128x8xH100-80GB").chosen.strategy.label == "zero3"


def test_three_dimensions_that_nothing_runs_are_shown_and_not_taken():
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "vocab_size": 32000}
    heads = {"num_attention_heads": 64, "num_key_value_heads": 8}
    model = llama(model_type="phi3", architectures=["Phi3ForCausalLM"], **sizes, **heads)
    made = plan(model, "64x8xA100-80GB", global_batch_size=16)
    assert not {"tp", "pp"} <= made.chosen.strategy.axes.keys()
    best = made.rejected[0]
    assert best.analysis_only
    assert {"tp", "pp"} <= best.strategy.axes.keys()
    assert re.search(r"would lose \d\.\d\d s .* the chosen layout \d\.\d\d s", best.reason)
    assert "Analysis only, it cannot run with DeepSpeed 0.19.8: " in best.reason
    assert not any(candidate.analysis_only for candidate in made.rejected[1:])


@pytest.mark.parametrize("gpu", ["L40S", "RTX4090"])
def test_slow_links_between_nodes_take_pipelines_with_zero_1(gpu):
    cluster = replace(parse_hardware(f"4x8x{gpu}"), network_bytes_per_s=1.25e9)
    made = plan(THIRTEEN_B, cluster)
    assert (made.chosen.strategy.label, made.chosen.strategy.data_parallel_size) == ("zero1+pp4", 8)
    zero3 = other(made, "ZeRO-3")
    assert zero3.memory.fits
    assert re.search(r"loses \d+\.\d\d s \(gathers and reductions", zero3.reason)


def test_slow_links_beside_fast_ones_add_tp_inside_the_nodes():
    made = plan(LLAMA_70B, replace(parse_hardware("4x8xH100-80GB"), network_bytes_per_s=1.25e9))
    assert made.chosen.strategy.label == "zero1+tp4+pp4"
    assert "of stage 0" in made.chosen.reason
    assert plan(LLAMA_70B, "4x8xH100-80GB").chosen.strategy.label == "zero3"


def test_few_accelerators_take_zero_3():
    model = replace(THIRTEEN_B, name="thirteen")
    assert plan(model, "4xA100-80GB").chosen.strategy.label == "zero3"


def test_long_sequences_take_sequence_parallelism_of_the_right_size_and_say_why():
    made = plan(LLAMA_8B, "8xH100-80GB", seq_len_tokens=131_072)
    strategy = made.chosen.strategy
    assert (strategy.sp, strategy.cp) == (8, 1)
    assert made.chosen.memory.fits
    assert "SP 8 divides sequences of 131,072 tokens" in made.chosen.reason
    assert re.search(r"Too large: ZeRO-3 \+ SP 4 needs up to \d+\.\d GB: loss", made.chosen.reason)
    without = [candidate for candidate in made.rejected if not candidate.strategy.axes]
    assert without
    assert not any(candidate.memory.fits for candidate in without)
    assert not other(made, "ZeRO-3 + SP 4").memory.fits
    assert not other(made, "FSDP2 + CP 2").memory.fits


def test_a_sequence_that_nothing_divides_is_suggested_shorter_by_a_few_tokens():
    with pytest.raises(PlanDoesNotFitError) as refused:
        plan(LLAMA_8B, "8xH100-80GB", seq_len_tokens=100_003, offload="none", method="full")
    found = {suggestion.change: suggestion.strategy for suggestion in refused.value.suggestions}
    assert "CP" in found["--seq-len 100000"] or "SP" in found["--seq-len 100000"]


def test_adapters_of_a_mixture_are_never_suggested_or_planned_with_expert_parallelism():
    for hardware in ("8xH100-80GB", "8xH200"):
        for method in ("lora", "qlora"):
            made = plan(QWEN_MOE, hardware, method=method)
            assert all(layout.strategy.ep == 1 for layout in (made.chosen, *made.rejected))


def test_a_chunked_loss_needs_fewer_ranks_for_a_long_sequence():
    made = plan(LLAMA_8B, "8xH100-80GB", seq_len_tokens=131_072, loss="chunked")
    strategy = made.chosen.strategy
    assert 1 < max(strategy.sp, strategy.cp) < 8


def test_a_mixture_of_experts_takes_expert_parallelism():
    made = plan(QWEN_MOE, "8xH200")
    assert made.chosen.strategy.ep == 2
    assert "EP 2 divides the 128 experts of each layer" in made.chosen.reason
    zero3 = other(made, "ZeRO-3")
    assert zero3.memory.fits
    assert "gathers and reductions beyond" in zero3.reason


# --- the search ---


@given(
    layers=st.integers(2, 40),
    width=st.sampled_from([1024, 4096]),
    gpu_gib=st.integers(8, 80),
    more_gib=st.integers(0, 80),
    sequence=st.sampled_from([512, 16384]),
)
@settings(max_examples=12, deadline=None)
def test_more_memory_never_loses_more_of_a_step(layers, width, gpu_gib, more_gib, sequence):
    model = llama(num_hidden_layers=layers, hidden_size=width, intermediate_size=3 * width, vocab_size=32000)
    job = TrainingJob(seq_len_tokens=sequence, offload="none")
    base = replace(parse_hardware("2x4xA100-80GB", host_memory="8TB"), network_bytes_per_s=2e9)
    found = []
    for size in (gpu_gib, gpu_gib + more_gib):
        cluster = replace(base, gpu_bytes=size * 2**30)
        chosen = search(model, cluster, job).chosen
        cost = None if chosen is None else step_cost(chosen.strategy, model, cluster, job).lost_seconds
        found.append(float("inf") if cost is None else cost)
    assert found[1] <= found[0]


def test_a_fixed_size_is_kept_and_one_forbids_an_axis():
    made = plan(LLAMA_8B, "8xA100-80GB", tensor_parallel_size=4)
    assert "with the sizes you asked for" in made.chosen.reason
    assert (made.chosen.strategy.tp, made.chosen.strategy.data_parallel_size) == (4, 2)
    made = plan(QWEN_MOE, "8xH200", expert_parallel_size=1)
    assert made.chosen.strategy.ep == 1
    assert not any(candidate.strategy.ep > 1 for candidate in made.rejected)


def test_a_fixed_size_of_tensor_parallelism_leaves_pipelines_open_and_the_other_way_round():
    cluster = parse_hardware("16xA100-80GB")
    beside = list(axes_to_try(LLAMA_8B, cluster, TrainingJob(tensor_parallel_size=4), "none"))
    assert beside == [{"tp": 4}, {"tp": 4, "pp": 2}, {"tp": 4, "pp": 4}]
    beside = list(axes_to_try(LLAMA_8B, cluster, TrainingJob(pipeline_parallel_size=8), "none"))
    assert beside == [{"pp": 8}, {"tp": 2, "pp": 8}]
    both = TrainingJob(tensor_parallel_size=4, pipeline_parallel_size=1)
    assert list(axes_to_try(LLAMA_8B, cluster, both, "none")) == [{"tp": 4}]
    assert list(axes_to_try(LLAMA_8B, cluster, TrainingJob(tensor_parallel_size=4), "cpu")) == [{"tp": 4}]
    slow = replace(parse_hardware("4x8xH100-80GB"), network_bytes_per_s=1.25e9)
    assert plan(LLAMA_70B, slow, tensor_parallel_size=4).chosen.strategy.axes == {"tp": 4, "pp": 4}


def test_a_pipeline_of_open_batch_gets_enough_micro_batches():
    made = plan(LLAMA_8B, "8xA100-80GB", pipeline_parallel_size=4, tensor_parallel_size=1)
    strategy = made.chosen.strategy
    assert strategy.gradient_accumulation_steps * strategy.micro_batch_size * 4096 * 2 == 16_384 * 8


def test_a_batch_smaller_than_the_ranks_is_divided_by_further_axes():
    made = plan(LLAMA_8B, "8xH100-80GB", global_batch_size=2, seq_len_tokens=8192)
    assert made.chosen.strategy.global_batch_size == 2
    assert "data parallelism alone cannot divide a global batch of 2 over 8 ranks" in made.chosen.reason
    assert made.chosen.strategy.axes


def test_the_largest_model_is_planned_quickly():
    from time import process_time

    start = process_time()
    plan(LLAMA_405B, "4x8xH100-80GB")
    assert process_time() - start < 2


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
def test_a_plan_with_axes_survives_its_json(axis):
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
    findings = run_check([tmp_path / "plan" / name for name in names], world_size=8, uses_transformers=True)
    assert findings == (), [str(finding.fault) for finding in findings]
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


@given(
    tp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2]),
    tokens=st.sampled_from([512, 4096]),
)
@settings(max_examples=12, deadline=None)
def test_costs_are_finite_and_grow_with_slower_links(tp, pp, tokens):
    job = TrainingJob(seq_len_tokens=tokens)
    fast = parse_hardware("2x8xA100-80GB")
    slow = replace(fast, link_bytes_per_s=fast.link_bytes_per_s / 8, network_bytes_per_s=fast.network_bytes_per_s / 8)
    strategy = replace(ZERO1, tp=tp, pp=pp, dp_shard=16 // tp // pp)
    costs = [step_cost(strategy, LLAMA_8B, cluster, job) for cluster in (fast, slow)]
    assert 0 <= costs[0].lost_seconds <= costs[1].lost_seconds < float("inf")
    assert costs[0].compute_seconds == costs[1].compute_seconds
    assert sum(costs[0].parts.values()) == pytest.approx(costs[0].lost_seconds)


def test_group_bandwidths_follow_where_members_lie():
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

CONFIG = MODELS / "meta-llama--Llama-3.1-8B" / "config.json"


@pytest.fixture
def shell(tmp_path, capsys, monkeypatch) -> Shell:
    return shell_in(tmp_path, "plan", capsys, monkeypatch)


def test_the_command_takes_sizes_from_flags_files_and_the_environment(shell, tmp_path, monkeypatch):
    (tmp_path / "settings.yaml").write_text("tensor_parallel_size: 4\nhardware: 8xA100-80GB\n")
    result = shell(CONFIG, "--config", "settings.yaml", "--format", "json")
    assert json.loads(result.out)["chosen"]["strategy"]["tp"] == 4
    monkeypatch.setenv("SHARDWRIGHT_TENSOR_PARALLEL_SIZE", "2")
    result = shell(CONFIG, "--config", "settings.yaml", "--format", "json")
    assert json.loads(result.out)["chosen"]["strategy"]["tp"] == 2
    flags = ("--tensor-parallel-size", "auto", "--format", "json")
    result = shell(CONFIG, "--config", "settings.yaml", *flags)
    assert json.loads(result.out)["chosen"]["strategy"]["label"] == "zero1"


def test_the_command_refuses_a_size_with_its_neighbours(shell):
    result = shell(CONFIG, "--hardware", "8xH100-80GB", "--tensor-parallel-size", 3)
    assert result.code == 2
    assert any("tp = 3: must divide the attention heads (32 % 3 = 2)" in line for line in result.errors)


def test_quantized_collectives_come_from_the_environment_too(shell, monkeypatch):
    monkeypatch.setenv("SHARDWRIGHT_ZERO_QUANTIZED_WEIGHTS", "true")
    result = shell(CONFIG, "--hardware", "8xH100-80GB", "--format", "json")
    assert json.loads(result.out)["chosen"]["strategy"]["zero"]["quantized_weights"] is True


def test_tensor_parallelism_in_more_dimensions_is_explained_as_analysis_only(shell):
    flags = ("--hardware", "8xH100-80GB", "--explain-tensor-parallel")
    found = json.loads(shell(CONFIG, *flags, "--format", "json").out)["tensor_layouts"]
    assert {layout["name"] for layout in found["layouts"]} == {"1D", "2D", "2.5D", "3D"}
    assert all(layout["analysis_only"] is (layout["name"] != "1D") for layout in found["layouts"])
    shown = " ".join(shell(CONFIG, *flags).out.split())
    assert " ".join(found["reason"].split()) in shown
    assert "analysis only" in shown
    assert "AutoTP divides it over up to 8 ranks here" in shown
    labels = {layout["ranks"]: layout["label"] for layout in found["layouts"] if layout["name"] == "1D"}
    assert labels == {4: "AutoTP", 8: "AutoTP", 16: "not planned here", 64: "not planned here"}


def test_the_comparison_is_shown_where_nothing_fits_and_left_out_for_experts(shell):
    flags = ("--hardware", "1xL40S", "--offload", "none", "--explain-tensor-parallel")
    result = shell(CONFIG, *flags)
    assert result.code == 3
    assert "AutoTP does not divide it here" in " ".join(result.out.split())
    result = shell(CONFIG, *flags, "--format", "json")
    assert (result.code, len(json.loads(result.out)["tensor_layouts"]["layouts"])) == (3, 11)
    experts = MODELS / "mistralai--Mixtral-8x7B-v0.1" / "config.json"
    result = shell(experts, "--hardware", "8xH200", "--explain-tensor-parallel", "--format", "json")
    assert result.code == 0
    assert "tensor_layouts" not in json.loads(result.out)
