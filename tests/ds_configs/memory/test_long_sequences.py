"""Tests of the memory and time of tiled MLPs, tiled losses and layer inputs in host memory, and of their search."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planning import public_model
from shardwright.ds_configs.memory.activations import estimate_activations, mlp_tiles, with_tiled_mlp
from shardwright.ds_configs.memory.estimate import (
    cpu_rank_terms,
    estimate_memory,
    exchange_buffer_bytes,
    expands_segments,
    share_moment_terms,
    shown_bytes,
    side_stream_pools,
)
from shardwright.ds_configs.memory.rank_parameters import rank_shares
from shardwright.ds_configs.plan.plan import make_plan, plan_from_dict, plan_to_dict
from shardwright.ds_configs.plan.rendering import trainer_line
from shardwright.ds_configs.search.candidates import SearchContext
from shardwright.ds_configs.search.search import anything_fits, search
from shardwright.ds_configs.specs.errors import UsageError
from shardwright.ds_configs.specs.hardware import parse_hardware
from shardwright.ds_configs.specs.job import TrainingJob
from shardwright.ds_configs.specs.layout import Layout

MODEL = public_model("meta-llama/Llama-3.1-8B")
H100 = parse_hardware("8xH100-80GB", host_memory="1.9TB")
LAYOUT = Layout(engine="deepspeed", zero_stage=3, offload_optimizer="cpu", dp_shard=8, gradient_checkpointing=True)
SP = replace(LAYOUT, dp_shard=1, sp=8)
JOB = TrainingJob(seq_len_tokens=131_072, loss="chunked")
GIB = 2**30


def moments(layout, job=JOB, **options):
    (share,) = rank_shares(layout, MODEL, job)
    return share_moment_terms(layout, share, job, **options)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "mixtral", "qwen3_moe"])
def test_tiles_hold_the_inner_tensors_of_one_tile(family):
    experts = {"num_experts": 8, "experts_per_token": 2, "expert_intermediate_size": 14336, "intermediate_size": 0}
    sizes = replace(MODEL.dimensions, **(experts if "mix" in family or "moe" in family else {}))
    narrow = replace(sizes, intermediate_size=0, expert_intermediate_size=0)
    settings = {"family": family, "release": MODEL.release, "micro_batch_size": 1, "mode": "bf16"}
    whole, none = (
        estimate_activations(dimensions=size, seq_len_tokens=131_072, **settings) for size in (sizes, narrow)
    )
    assert with_tiled_mlp(whole, 1.0) == whole

    def totals(traced):
        saved, checkpointed = traced.saved_bytes_per_layer, traced.checkpointed_bytes_per_layer
        backward, again = traced.backward_transient_bytes, traced.recompute_backward_transient_bytes
        return saved, saved + backward, checkpointed + again, checkpointed + traced.forward_transient_bytes

    tiled, finer = with_tiled_mlp(whole, 1 / 32), with_tiled_mlp(whole, 1 / 64)
    assert totals(tiled)[0] <= totals(none)[0]
    # A layer without inner tensors is a lower bound; tiles add the gradient of their input, and one tile.
    added, inner = whole.mlp.input_gradient_bytes, 16 * 2 * 14336 * 131_072
    for least, fine, coarse, most in zip(*map(totals, (none, finer, tiled, whole)), strict=True):
        assert fine <= coarse <= most + added
        assert coarse <= max(least, most) + added
        assert coarse < least + added + inner / 32 + 2 * added


def test_a_tiled_mlp_needs_less_and_no_more_than_it_computes():
    plain, tiled = moments(LAYOUT), moments(replace(LAYOUT, tiled_mlp=True))
    moment = "last_layer_backward"
    inner = 12 * 14336 * JOB.seq_len_tokens  # Three tensors and three gradients of the inner width, in 16 bit.
    assert plain[moment]["backward_transient"] > inner
    assert tiled[moment]["backward_transient"] < plain[moment]["backward_transient"] - inner / 3
    assert tiled[moment]["activations"] == plain[moment]["activations"]
    assert {"reduce_copy", "prefetch_copies"} < set(tiled[moment]), "the norm's backward pass needs more than a tile"
    # The sum over tiles, and the gradient of the last matrix; ZeRO-3 copies and reduces nothing meanwhile.
    in_tile = moments(replace(LAYOUT, tiled_mlp=True), replace(JOB, seq_len_tokens=8192))[moment]
    assert in_tile["tile_gradients"] == 2 * 4 * 14336 * 4096
    assert {"module_gradients", "reduce_copy", "prefetch_copies"} & set(in_tile) == set()
    assert mlp_tiles(MODEL, 131_072) == 32
    assert mlp_tiles(MODEL, 4096) == 1
    short = replace(JOB, seq_len_tokens=4096)
    assert moments(replace(LAYOUT, tiled_mlp=True), short) == moments(LAYOUT, short)


def test_a_tiled_loss_holds_one_tile_of_logits():
    long, longer = (moments(SP, replace(JOB, seq_len_tokens=count)) for count in (1_048_576, 4_194_304))
    for terms in (long, longer):
        # Logits in 16 and 32 bit, and their log-probabilities.
        assert terms["forward_end"]["loss"] <= 2.5 * 1.01 * GIB
        assert "head_gradient" not in terms["forward_end"]
        # The sum over tiles in 16 bit: a tile's own gradient appears when its logits are gone.
        assert terms["loss_backward"]["head_gradient"] == 2 * 128256 * 4096
    fused = moments(LAYOUT)
    assert "head_gradient" in fused["forward_end"]
    # On CPU ranks there is no Liger kernel.
    assert moments(LAYOUT, gpu=False)["forward_end"]["loss"] <= 2.5 * 1.01 * GIB
    eager = moments(LAYOUT, replace(JOB, loss="eager"))
    assert eager["loss_backward"]["loss"] > 12 * 128256 * JOB.seq_len_tokens


def test_offloaded_inputs_leave_one_or_two_on_the_accelerator():
    each = 2 * 4096 * JOB.seq_len_tokens
    plain, half, everything = (moments(replace(LAYOUT, offloaded_checkpoints=count)) for count in (0, 16, 32))
    moment = "last_layer_backward"
    assert plain[moment]["activations"] - half[moment]["activations"] == 16 * each
    assert plain[moment]["activations"] - everything[moment]["activations"] == 32 * each
    # The layer's own is freed after the recomputation, because norms save it in fp32; the next one is copied meanwhile.
    assert half[moment]["checkpoint_staging"] == everything[moment]["checkpoint_staging"] == each
    assert "checkpoint_staging" not in plain[moment]
    assert everything["last_layer_forward"]["checkpoint_staging"] == each
    assert everything["first_layer_backward"].get("checkpoint_staging", 0) == 0
    liger = moments(replace(LAYOUT, offloaded_checkpoints=32), replace(JOB, use_liger_kernel=True))
    assert liger[moment]["checkpoint_staging"] == 2 * each, "Liger's norms save their input"
    host = estimate_memory(replace(LAYOUT, offloaded_checkpoints=32), MODEL, H100, JOB).host
    assert host.terms["offloaded_checkpoints"] == 8 * 32 * each
    split = estimate_memory(replace(SP, offloaded_checkpoints=32), MODEL, H100, JOB).host
    assert split.terms["offloaded_checkpoints"] == 32 * each
    on_host = cpu_rank_terms(replace(LAYOUT, offloaded_checkpoints=16), MODEL, JOB)
    assert on_host["backward"]["offloaded_checkpoints"] == 16 * each


def test_attention_on_gpus_needs_a_workspace_in_the_backward_pass():
    layout = replace(LAYOUT, tiled_mlp=True)
    job = replace(JOB, use_liger_kernel=True, loss="chunked")

    def transient(**options):
        return moments(layout, job, **options)["last_layer_backward"]["backward_transient"]

    # Queries, outputs and their gradients, keys, values and theirs; gradients summed in fp32, and those of keys and
    # values for all 32 query heads; sums of scores before and after the products with outputs.
    tokens, hidden, shared, heads = JOB.seq_len_tokens, 4096, 1024, 32
    assert transient(gpu=True) == tokens * (16 * hidden + 8 * shared + 8 * heads) + 8
    assert transient(gpu=False) < transient(gpu=True)


def test_long_sequences_expand_segments_on_cuda_only():
    assert expands_segments(JOB, H100)
    assert not expands_segments(replace(JOB, seq_len_tokens=32_767), H100)
    assert not expands_segments(JOB, parse_hardware("8xMI300X"))
    assert not expands_segments(JOB, parse_hardware("2xCPU"))


def context(hardware="8xH100-80GB", **job):
    return SearchContext(model=MODEL, hardware=parse_hardware(hardware, host_memory="1.9TB"), job=TrainingJob(**job))


def test_search_uses_the_mechanisms_only_where_they_are_needed():
    short = search(context(seq_len_tokens=4096)).chosen
    assert (short.layout.tiled_mlp, short.layout.offloaded_checkpoints) == (False, 0)
    long = search(context(seq_len_tokens=1_750_000)).chosen
    assert long.layout.tiled_mlp
    count = long.layout.offloaded_checkpoints
    assert 0 < count < 32
    assert f"{count} of 32 layer inputs in host memory" in long.reason
    # As few as fit.
    fewer = replace(long.layout, offloaded_checkpoints=count - 1)
    job = TrainingJob(seq_len_tokens=1_750_000, loss=long.loss)
    assert not estimate_memory(fewer, MODEL, H100, job).fits
    assert not anything_fits(
        context(seq_len_tokens=1_750_000, tiled_mlp="off", offload_activations="off", offload="none")
    )


def test_side_streams_keep_their_largest_blocks():
    embedding = 128_256 * 4096
    pools = side_stream_pools(replace(LAYOUT, dp_shard=1), MODEL, JOB)
    # A copy of the largest gradient in 16 bit and one in fp32 beside a smaller reduction at the fullest moment.
    fullest = max(moments(replace(LAYOUT, dp_shard=1)).values(), key=lambda terms: sum(terms.values()))
    assert pools["reduce_pool"] == 6 * embedding - fullest.get("reduce_copy", 0)
    # On 8 ranks each converts an eighth of it, in fp64 for the norm.
    eighth = side_stream_pools(LAYOUT, MODEL, JOB)["reduce_pool"]
    assert 0 <= eighth <= 10 * embedding // 8
    assert pools["gather_pool"] >= 0
    assert not side_stream_pools(replace(LAYOUT, zero=replace(LAYOUT.zero, overlap_comm=False)), MODEL, JOB)
    assert not side_stream_pools(Layout(engine="fsdp2", dp_shard=8), MODEL, JOB)


@pytest.mark.parametrize(
    ("hardware", "ranks", "channels"),
    [
        ("8xH100-80GB", 8, 32),
        ("8xA100-80GB", 2, 32),
        ("8xH800-80GB", 8, 16),
        ("8xV100-32GB", 8, 2),
        ("8xL40S", 4, 2),
        ("4x8xH100-80GB", 32, 2),
        ("2x8xL40S", 16, 2),
        ("8xMI300X", 8, 0),
    ],
)
def test_exchanges_have_buffers_for_each_rank_of_the_node(hardware, ranks, channels):
    cluster = parse_hardware(hardware)
    expected = channels * (min(ranks, 8) - 1) * (10 + 2) * 2**20
    if ranks > 8:
        # Sent for eight ranks of the node, or for itself, and received, by 16 channels.
        expected += (8 + 1 if "H100" in hardware else 2) * 16 * 16 * 128 * 2**10
    sp = replace(LAYOUT, sp=ranks, dp_shard=cluster.world_size // ranks)
    assert exchange_buffer_bytes(sp, cluster) == expected
    assert exchange_buffer_bytes(replace(LAYOUT, ep=ranks), cluster) == expected
    assert exchange_buffer_bytes(replace(sp, sp=1), cluster) == 0
    ring = exchange_buffer_bytes(Layout(engine="fsdp2", cp=ranks, dp_shard=cluster.world_size // ranks), cluster)
    shared = 0 if ranks <= 8 else 2 * 16 * 16 * 128 * 2**10
    assert ring == channels * (10 + 2) * 2**20 + shared
    memory = estimate_memory(sp, MODEL, cluster, JOB).gpu
    assert memory.terms.get("exchange_buffers", 0) == expected
    assert memory.peak_bytes == sum(memory.terms.values())
    assert memory.low_bytes < memory.peak_bytes < memory.high_bytes


def test_nvidia_smi_shows_free_blocks_until_memory_is_short():
    def shown(job, layout=LAYOUT, hardware=H100):
        memory = estimate_memory(layout, MODEL, hardware, job).gpu
        return memory, shown_bytes(memory, layout, MODEL, hardware, job)

    some = replace(JOB, seq_len_tokens=65_536)
    short, in_use = shown(some)
    pools = sum(side_stream_pools(LAYOUT, MODEL, some).values())
    assert in_use == short.peak_bytes - short.terms["allocator_fragmentation"] + 5_200_000_000 + pools
    # A process cannot show more than there is, nor less than it needs.
    full, in_use = shown(replace(JOB, seq_len_tokens=300_000))
    assert in_use == max(full.peak_bytes, full.capacity_bytes)
    # A small run kept at most 38 % of its tensors.
    lora = replace(LAYOUT, offload_optimizer="none", zero_stage=2)
    small, in_use = shown(TrainingJob(method="lora", seq_len_tokens=256), replace(lora, dp_shard=8))
    assert small.peak_bytes < in_use < small.peak_bytes + 5_200_000_000
    calibrated = replace(short, calibrated_runs=3)
    assert shown_bytes(calibrated, LAYOUT, MODEL, H100, some) == short.peak_bytes + pools
    other, in_use = shown(some, hardware=parse_hardware("8xGaudi2"))
    assert in_use == other.peak_bytes


def test_reentrant_recomputation_keeps_the_output_of_a_layer():
    layout = replace(LAYOUT, tiled_mlp=True)
    terms = {
        kind: estimate_memory(
            layout, MODEL, H100, TrainingJob(seq_len_tokens=32_768, loss="chunked", gradient_checkpointing=kind)
        ).gpu
        for kind in ("on", "reentrant")
    }
    output = 2 * 32_768 * MODEL.dimensions.hidden_size
    assert terms["reentrant"].phases["backward"] - terms["on"].phases["backward"] == output
    assert terms["reentrant"].terms["reentrant_output"] == output


def test_offload_of_transformers_needs_its_release_and_stages_one_input():
    older, newer = (replace(MODEL, release=release) for release in ("5.17.0", "5.24.0"))
    job = TrainingJob(seq_len_tokens=32_768, offload_activations="transformers")
    with pytest.raises(UsageError, match=r"requires Transformers 5.24 or newer, not 5.17.0"):
        make_plan(older, H100, job)
    plan = make_plan(newer, H100, job)
    assert plan.training_arguments("out")["gradient_checkpointing_kwargs"] == {"offload": True}
    assert "checkpoints in host memory" not in trainer_line(plan)
    layout = plan.chosen.layout
    assert layout.offloaded_checkpoints == layout.recomputed_layers(32)
    job = replace(plan.job, offload_activations="on")
    own = estimate_memory(layout, newer, H100, job)
    upstream = estimate_memory(layout, newer, H100, plan.job)
    on_gpu = [moments(layout, each)["last_layer_backward"].get("checkpoint_staging", 0) for each in (job, plan.job)]
    assert on_gpu[0] - on_gpu[1] == 2 * 32_768 * 4096
    assert own.host == upstream.host
    reentrant = make_plan(MODEL, H100, TrainingJob(seq_len_tokens=4096, gradient_checkpointing="reentrant"))
    assert reentrant.chosen.layout.gradient_checkpointing
    assert reentrant.training_arguments("out")["gradient_checkpointing_kwargs"] == {"use_reentrant": True}


def test_plans_carry_the_mechanisms():
    plan = make_plan(MODEL, H100, TrainingJob(seq_len_tokens=2_000_000))
    pinned = "pinned_max_round_threshold_mb:64,pinned_max_cached_size_mb:64"
    assert plan.environment == {"PYTORCH_ALLOC_CONF": f"expandable_segments:True,{pinned}"}
    assert make_plan(MODEL, H100, TrainingJob(seq_len_tokens=4096)).environment == {}
    offloaded = make_plan(MODEL, H100, TrainingJob(seq_len_tokens=4096, offload="cpu"))
    assert offloaded.environment == {"PYTORCH_ALLOC_CONF": pinned}
    data = plan_to_dict(plan)
    again = plan_from_dict(data, source="test")
    assert again.chosen.layout == plan.chosen.layout
    # Plans of earlier versions have neither field.
    for name in ("tiled_mlp", "offloaded_checkpoints"):
        del data["chosen"]["layout"][name]
    del data["job"]["tiled_mlp"], data["job"]["offload_activations"]
    old = plan_from_dict(data, source="test").chosen.layout
    assert (old.tiled_mlp, old.offloaded_checkpoints) == (False, 0)
