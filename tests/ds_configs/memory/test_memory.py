"""The memory model against the byte tables measured on DeepSpeed 0.19.8, and against hand-computed cases."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning import llama, public_model
from shardwright.ds_configs.memory.communication import buffer_terms, default_zero_options
from shardwright.ds_configs.memory.estimate import estimate_memory, share_moment_terms
from shardwright.ds_configs.memory.host import estimate_host_memory, offloaded_states
from shardwright.ds_configs.memory.model_states import model_state_terms, whole_tensors_of_partitions
from shardwright.ds_configs.memory.rank_parameters import (
    engine_parameters,
    fullest_by_phase,
    rank_parameters,
    rank_shares,
    share_parameters,
)
from shardwright.ds_configs.specs.hardware import parse_hardware
from shardwright.ds_configs.specs.job import TrainingJob
from shardwright.ds_configs.specs.layout import Layout, ZeroOptions
from shardwright.ds_configs.specs.model import lora_parameter_count

MODEL = llama(num_hidden_layers=8, hidden_size=512, intermediate_size=1536, vocab_size=4000)
PARAMETERS = MODEL.parameter_count
STRADDLING = 2 * MODEL.largest_parameter / PARAMETERS
"""Tensors on both borders of a partition keep whole gradients."""

# Bytes per parameter at rest, during backward and in the step, as a function of the ranks N, for a fused optimizer.
# Measured with real DeepSpeed engines at N = 2 and 4; the step includes the transient of flattening 16-bit gradients.
MEASURED = {
    ("zero0", "bf16", 1): (lambda n: 14, lambda n: 16, lambda n: 20),
    ("zero0", "fp32", 1): (lambda n: 12, lambda n: 16, lambda n: 16),
    ("zero1", "bf16", 1): (lambda n: 2 + 12 / n, lambda n: 4 + 12 / n, lambda n: 2 + 20 / n),
    ("zero2", "bf16", 1): (lambda n: 2 + 12 / n, lambda n: 2 + 14 / n, lambda n: 2 + 20 / n),
    ("zero2", "fp32", 1): (lambda n: 4 + 12 / n, lambda n: 4 + 16 / n, lambda n: 4 + 20 / n),
    ("zero1", "fp32", 1): (lambda n: 4 + 12 / n, lambda n: 8 + 12 / n, lambda n: 4 + 20 / n),
    ("zero3", "bf16", 1): (lambda n: 16 / n, lambda n: 16 / n, lambda n: 22 / n),
    ("zero3", "fp32", 1): (lambda n: 20 / n, lambda n: 20 / n, lambda n: 24 / n),
}


def layout_of(name: str, ranks: int, **changes) -> Layout:
    if name.startswith("zero"):
        stage = int(name[4])
        sharded = stage > 0
        return Layout(
            engine="deepspeed",
            zero_stage=stage,
            dp_shard=ranks if sharded else 1,
            dp_replicate=1 if sharded else ranks,
            **{"zero": ZeroOptions(reduce_bucket_size=PARAMETERS // 10), **changes},
        )
    if name == "fsdp2":
        return Layout(engine="fsdp2", dp_shard=ranks, **changes)
    return Layout(engine=name, dp_replicate=ranks, **changes)


def state_bytes(layout: Layout, job: TrainingJob, model=MODEL) -> dict[str, float]:
    """Bytes per trainable parameter by phase."""
    parameters = rank_parameters(model, job)
    phases = fullest_by_phase(model_state_terms(layout, model, job, parameters))
    return {phase: sum(terms.values()) / parameters.trainable for phase, terms in phases.items()}


@pytest.mark.parametrize(("name", "precision", "accumulation"), MEASURED)
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_states_equal_the_measured_table(name, precision, accumulation, ranks):
    rest, backward, step = MEASURED[name, precision, accumulation]
    found = state_bytes(layout_of(name, ranks), TrainingJob(precision=precision))
    if name != "zero0":
        assert found["loss"] == pytest.approx(rest(ranks), rel=1e-4)
    straddling = STRADDLING * (4 if precision == "fp32" else 2) if name in ("zero1", "zero2") else 0
    assert backward(ranks) * (1 - 1e-4) <= found["backward"] <= backward(ranks) * (1 + 1e-4) + straddling
    assert step(ranks) * (1 - 1e-4) <= found["step"] <= step(ranks) * (1 + 1e-4) + straddling


def test_complete_tensors_of_partitions_equal_a_count_of_elements():
    model = llama(num_hidden_layers=3, hidden_size=8, intermediate_size=20, vocab_size=11, num_key_value_heads=8)
    layer = [64, 64, 64, 64, 160, 160, 160]
    owner = [index for index, size in enumerate([88, *layer * 3, 88]) for _ in range(size)]
    sizes = Counter(owner)
    for ranks in (1, 2, 3, 5, 8):
        length = -(-len(owner) // ranks)
        partitions = [owner[rank * length : (rank + 1) * length] for rank in range(ranks)]
        expected = tuple(sum(sizes[tensor] for tensor in set(partition)) for partition in partitions)
        assert whole_tensors_of_partitions(model, ranks) == expected


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("stage", [2, 3])
def test_offloaded_states_on_the_host(stage, ranks):
    """DeepSpeed holds 18/N bytes per parameter on the host of each rank, 2/N more with parameter offload."""
    job = TrainingJob()
    hardware = parse_hardware(f"{ranks}xA100-80GB")
    layout = layout_of(f"zero{stage}", ranks, offload_optimizer="cpu")
    parameters = rank_parameters(MODEL, job)

    def offloaded(layout: Layout) -> float:
        terms = offloaded_states(layout, MODEL, job, parameters).host
        staging = 2 * parameters.largest_trainable if stage == 2 else 0
        return (sum(terms.values()) - terms["pinned_rounding"] - staging) * ranks / PARAMETERS

    assert offloaded(layout) == pytest.approx(18, rel=1e-3)
    if stage == 3:
        assert offloaded(replace(layout, offload_param="cpu")) == pytest.approx(20, rel=1e-3)
    host = estimate_host_memory(layout, MODEL, hardware, job)
    assert host.peak_bytes_per_node == sum(host.terms.values())


@pytest.mark.parametrize("layout", ["zero3", "fsdp2"])
def test_4_bit_weights_are_sharded_but_their_scales_are_not(layout):
    """A byte for 64 weights, an fp32 for each 256 of these and tables of each tensor stay on every rank."""
    model, job = public_model("meta-llama/Llama-3.1-70B"), TrainingJob(method="qlora")
    parameters = rank_parameters(model, job)
    linear = sum(parameter.total for parameter in model.packed_parameters)
    assert parameters.scale_bytes == round(linear / 64 + 4 * linear / (64 * 256)) + 80 * 7 * 4 * (256 + 16 + 1)
    shards = [parameters.frozen_shard_bytes(layout_of(layout, ranks)) - parameters.scale_bytes for ranks in (1, 2, 8)]
    assert shards[0] == pytest.approx(linear / 2 + 2 * (model.parameter_count - linear), rel=1e-6)
    assert shards == pytest.approx([shards[0], shards[0] / 2, shards[0] / 8], abs=1)
    memory = estimate_memory(layout_of(layout, 2), model, parse_hardware("2xRTX4090"), job).gpu
    # Loading adds an embedding or a layer to what a rank keeps, not the other half.
    assert memory.phases["init"] < 25e9


@pytest.mark.parametrize("name", ["zero3", "fsdp2"])
def test_4_bit_weights_are_gathered_packed_with_their_adapters(name):
    """A layer of Llama 70B has 428 MB of codes and 41 MB of adapters of rank 16; as 16-bit weights it has 1.7 GB."""
    model = public_model("meta-llama/Llama-3.1-70B")
    job = TrainingJob(method="qlora", lora_rank=16, lora_targets=("all-linear",))
    seen = engine_parameters(model, job)
    adapters = lora_parameter_count(model, rank=16, targets=["all-linear"])
    linear = sum(parameter.total for parameter in model.packed_parameters)
    assert seen.parameter_count == model.parameter_count - linear + linear // 4 + adapters
    live = 2 * seen.layer_parameter_count
    zero = default_zero_options(model, job, stage=3, lean=False)
    assert zero.stage3_max_live_parameters == live < model.layer_parameter_count
    layout = layout_of(name, 2, zero=zero)
    gathered = buffer_terms(layout, model, job, rank_parameters(model, job))["last_layer_backward"]
    assert gathered["gathered_parameters"] <= 2 * (live + zero.stage3_prefetch_bucket_size)


def test_autograd_keeps_gathered_experts_until_backward_under_stage3():
    """Views of released weights keep their storage; a layer that runs again saved none, nor do other engines' views."""
    mixtral = public_model("mistralai/Mixtral-8x7B-v0.1")
    job, layers, experts = TrainingJob(), 32, 3 * 8 * 4096 * 14336

    def loss(name: str, model=mixtral, **settings: object) -> int:
        layout = layout_of(name, 8, zero=default_zero_options(mixtral, job, stage=3), **settings)
        terms = buffer_terms(layout, model, job, rank_parameters(model, job, layout))
        return terms["forward_end"]["gathered_parameters"]

    again = loss("zero3", gradient_checkpointing=True)
    assert (loss("zero3") - again) // (2 * experts) in (layers - 1, layers)
    some = loss("zero3", gradient_checkpointing=True, checkpointed_layers=10)
    assert (some - again) // (2 * experts) in (layers - 11, layers - 10)
    as_stored = replace(mixtral, model_type="gpt_oss")
    assert loss("zero3", as_stored) < 3 * 2 * experts


@pytest.mark.parametrize("model", ["meta-llama/Llama-3.2-1B", "Qwen/Qwen3-30B-A3B", "falcon"])
@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_states_and_buffers_of_a_batch_are_those_computed_for_exactly_it(model, method):
    """A search computes them once for many micro-batches and numbers of recomputed layers."""
    spec = replace(MODEL, model_type=model) if model == "falcon" else public_model(model)
    job = TrainingJob(method=method, seq_len_tokens=1024)
    layouts = [layout_of(name, 8) for name in ("ddp", "zero0", "zero1", "zero2", "zero3", "fsdp2")]
    layouts += [
        replace(layout_of("zero2", 8), offload_optimizer="cpu"),
        Layout(engine="deepspeed", zero_stage=1, pp=2),
    ]
    for layout in layouts:
        for micro_batch, steps in ((1, 1), (4, 1), (1, 2), (1, 7), (3, 4)):
            for switch, layers in ((False, None), (True, None), (True, 1), (True, 3)):
                zero = default_zero_options(spec, job, stage=layout.zero_stage or 0)
                changed = replace(
                    layout,
                    micro_batch_size=micro_batch,
                    gradient_accumulation_steps=steps,
                    gradient_checkpointing=switch,
                    checkpointed_layers=layers,
                    zero=zero,
                )
                share = rank_shares(changed, spec, job)[0]
                parameters = share_parameters(share.model, job, ep=changed.ep)
                found = share_moment_terms(changed, share, job)
                inputs = (changed, share.model, job, parameters)
                states = offloaded_states(*inputs).accelerator or model_state_terms(*inputs)
                for terms in (states, buffer_terms(*inputs)):
                    assert terms.keys() - found.keys() <= {"first_large_layer_backward"}
                    for moment in terms.keys() & found.keys():
                        assert {name: found[moment].get(name, 0) for name in terms[moment]} == terms[moment]


def test_terms_add_up_and_the_interval_holds_the_peak():
    memory = estimate_memory(layout_of("zero3", 8), MODEL, parse_hardware("8xA100-80GB"), TrainingJob()).gpu
    assert sum(memory.terms.values()) == memory.peak_bytes
    assert memory.low_bytes <= memory.peak_bytes <= memory.high_bytes
    assert memory.allocated_bytes == max(memory.phases.values()) == memory.phases[memory.phase]


@given(
    sequence=st.integers(64, 8192),
    micro_batch=st.integers(1, 8),
    checkpointing=st.booleans(),
    name=st.sampled_from(["ddp", "zero1", "zero2", "zero3", "fsdp2"]),
)
@settings(max_examples=60, deadline=None)
def test_memory_rises_with_sequence_and_micro_batch(sequence, micro_batch, checkpointing, name):
    hardware = parse_hardware("8xA100-80GB")
    layout = layout_of(name, 8, micro_batch_size=micro_batch, gradient_checkpointing=checkpointing)

    def peak(layout: Layout, sequence: int) -> int:
        return estimate_memory(layout, MODEL, hardware, TrainingJob(seq_len_tokens=sequence)).gpu.high_bytes

    here = peak(layout, sequence)
    assert peak(layout, 2 * sequence) >= here
    assert peak(replace(layout, micro_batch_size=micro_batch + 1), sequence) >= here


@pytest.mark.parametrize("tied", [False, True])
def test_gradient_of_a_tied_embedding_is_added_to_that_of_the_head(tied):
    model = llama(hidden_size=2048, vocab_size=128256, tie_word_embeddings=tied)
    (share,) = rank_shares(Layout(engine="single"), model, TrainingJob())
    for gpu, copies in ((True, 1), (False, 2)):
        moments = share_moment_terms(Layout(engine="single"), share, TrainingJob(), gpu=gpu)
        terms = moments["embedding_backward"]
        assert terms["gradients"] == 4 * model.parameter_count
        assert terms.get("module_gradients", 0) == (copies * 4 * 128256 * 2048 if tied else 0)
        accumulating = Layout(engine="single", gradient_accumulation_steps=2)
        again = share_moment_terms(accumulating, share, TrainingJob(), gpu=gpu)["embedding_backward"]
        assert again["gradients"] == 4 * model.parameter_count, "those of the micro-batches before, once"
        assert again["module_gradients"] == (1 + copies * tied) * 4 * 128256 * 2048
        layerwise = share_moment_terms(Layout(engine="single"), share, TrainingJob(optimizer="lomo"), gpu=gpu)
        found = layerwise["embedding_backward"]
        assert found["gradients"] + found.get("module_gradients", 0) == (1 + copies * tied) * 4 * 128256 * 2048


@pytest.mark.parametrize("name", ["meta-llama/Llama-3.1-70B", "mistralai/Mixtral-8x7B-v0.1", "Qwen/Qwen3-30B-A3B"])
@pytest.mark.parametrize("engine", ["single", "ddp", "zero1", "zero2", "zero3", "fsdp2"])
def test_qlora_holds_one_tensor_at_a_time_unless_an_engine_shards_the_weights(name, engine):
    model, job = public_model(name), TrainingJob(method="qlora")
    cluster = parse_hardware("1xH200" if engine == "single" else "8xH200")
    parameters = rank_parameters(model, job)
    host = estimate_host_memory(layout_of(engine, cluster.world_size), model, cluster, job)
    per_rank = host.terms["checkpoint_loading"] / cluster.world_size
    # The embedding, or one expert's matrix: the checkpoint does not fuse experts.
    one_tensor = 2 * model.dimensions.vocab_size * model.dimensions.hidden_size
    if engine in ("zero3", "fsdp2"):
        assert parameters.frozen_bytes < per_rank <= parameters.frozen_bytes + one_tensor
    else:
        assert per_rank == one_tensor < 0.2 * parameters.frozen_bytes


def test_a_bucket_of_all_gradients_is_not_counted_beside_them():
    """ZeRO-1 reduces it after the last backward pass, and keeps views of it instead of a copy of its partition."""
    phases = {}
    for name, size in (("all", PARAMETERS), ("parts", PARAMETERS // 10)):
        layout = layout_of("zero1", 4, gradient_accumulation_steps=4, zero=ZeroOptions(reduce_bucket_size=size))
        phases[name] = model_state_terms(layout, MODEL, TrainingJob(), rank_parameters(MODEL, TrainingJob()))
    assert phases["all"]["first_layer_backward"]["gradients"] == 2 * PARAMETERS
    assert phases["parts"]["first_layer_backward"]["gradients"] >= 2.5 * PARAMETERS


def test_fp32_gradients_of_zero3_are_pinned_by_sub_group():
    """Blocks of 4 MiB need no rounding; that of the rest and that of all 16-bit gradients do."""
    job, size = TrainingJob(), 2**20
    layout = layout_of("zero3", 2, offload_optimizer="cpu", zero=ZeroOptions(sub_group_size=size))
    parameters = rank_parameters(MODEL, job)
    shard = parameters.shard(layout)
    assert shard > 2 * size
    rounded = [2 * shard, 4 * (shard % size)]
    rounding = sum(2 ** (block - 1).bit_length() - block for block in rounded)
    assert offloaded_states(layout, MODEL, job, parameters).host["pinned_rounding"] == rounding


@pytest.mark.parametrize("stage", [2, 3])
def test_buckets_are_no_larger_than_what_is_trained(stage):
    job = TrainingJob(method="lora", lora_rank=8)
    trainable = rank_parameters(MODEL, job).trainable
    assert default_zero_options(MODEL, job, stage=stage).reduce_bucket_size <= trainable + 1
