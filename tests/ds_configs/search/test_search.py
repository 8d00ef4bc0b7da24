"""What the search chooses, in which order, and why."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning import llama, public_model
from shardwright.ds_configs.legality.rules import BATCH_RULES, LAYOUT_RULES, broken_rules, legality_errors
from shardwright.ds_configs.memory.estimate import estimate_memory
from shardwright.ds_configs.plan.plan import make_plan
from shardwright.ds_configs.search import candidates
from shardwright.ds_configs.search.candidates import SearchContext
from shardwright.ds_configs.search.reasons import AS_FAST
from shardwright.ds_configs.search.search import anything_fits, search
from shardwright.ds_configs.specs.errors import UsageError
from shardwright.ds_configs.specs.hardware import parse_hardware, with_gpus
from shardwright.ds_configs.specs.job import TrainingJob
from shardwright.ds_configs.specs.layout import Layout
from shardwright.ds_configs.step_time.estimate import estimate_step_time

LLAMA_1B = public_model("meta-llama/Llama-3.2-1B")
LLAMA_8B = public_model("meta-llama/Llama-3.1-8B")
LLAMA_70B = public_model("meta-llama/Llama-3.1-70B")


@pytest.mark.parametrize("hardware", ["8xA100-40GB", "8xH100-80GB", "2x8xH100-80GB"])
def test_no_fitting_layout_that_a_trainer_runs_is_more_than_five_percent_faster(hardware):
    outcome = search(
        SearchContext(model=LLAMA_8B, hardware=parse_hardware(hardware), job=TrainingJob(global_batch_size=64))
    )
    assert outcome.chosen is not None
    best = outcome.chosen.time.tokens_per_second
    others = [one for one in outcome.rejected if one.memory.fits and one.layout.pp == one.layout.cp == 1]
    assert all(one.time.tokens_per_second * AS_FAST <= best for one in others)


@pytest.mark.parametrize(("gain", "is_chosen"), [(1.0, False), (1.2, False), (10.0, True)])
def test_context_parallelism_is_chosen_only_if_certainly_faster(gain, is_chosen, monkeypatch):
    """LoRA of 70B with 4,096 tokens, whatever the price of context parallelism."""
    exact = estimate_step_time

    def favored(layout, *arguments, **words):
        time = exact(layout, *arguments, **words)
        faster = gain if layout.cp > 1 else 1.0
        scaled = {name: getattr(time, name) / faster for name in ("seconds", "low_seconds", "high_seconds")}
        return replace(time, **scaled, tokens_per_second=faster * time.tokens_per_second)

    monkeypatch.setattr(candidates, "estimate_step_time", favored)
    job = TrainingJob(method="lora", seq_len_tokens=4096)
    outcome = search(SearchContext(model=LLAMA_70B, hardware=parse_hardware("8xH100-80GB"), job=job))
    assert outcome.chosen is not None
    assert (outcome.chosen.layout.cp > 1) == is_chosen
    least = outcome.chosen.time.tokens_per_second / AS_FAST
    faster = [one for one in outcome.rejected if one.time.tokens_per_second > least]
    faster = [one for one in faster if one.memory.fits]
    assert all("--context-parallel-size" in one.reason for one in faster)
    assert ("without context parallelism" in outcome.chosen.reason) == (gain == 1.2)


def test_sharded_parameters_are_not_simpler_than_a_chunked_loss():
    """ZeRO-1 and ZeRO-3 within 5 %: QLoRA of 8B on four cards of 24 GB, where only ZeRO-1 needs the chunked loss."""
    hardware, job = parse_hardware("4xRTX3090"), TrainingJob(method="qlora", seq_len_tokens=2048)
    chosen = search(SearchContext(model=LLAMA_8B, hardware=hardware, job=job)).chosen
    assert chosen is not None
    assert not chosen.layout.shards_parameters


def test_fewest_layers_that_fit_are_recomputed():
    job = TrainingJob(strategy="zero3", loss="eager", sequence_parallel_size=1)
    outcome = search(SearchContext(model=LLAMA_8B, hardware=parse_hardware("8xA100-40GB"), job=job))
    assert outcome.chosen is not None
    layout = outcome.chosen.layout
    assert layout.gradient_checkpointing
    assert layout.checkpointed_layers is not None
    one_less = replace(layout, checkpointed_layers=layout.checkpointed_layers - 1)
    memory = estimate_memory(one_less, LLAMA_8B, parse_hardware("8xA100-40GB"), outcome.job)
    assert not memory.fits
    assert f"the first {layout.checkpointed_layers} of 32 layers" in outcome.chosen.reason


def test_all_errors_of_a_job_come_together():
    with pytest.raises(UsageError) as caught:
        TrainingJob(seq_len_tokens=-1, lora_rank=0, strategy="zero9")
    assert {error.where for error in caught.value.errors} == {"seq_len", "lora_rank", "strategy"}
    with pytest.raises(UsageError) as caught:
        wrong = TrainingJob(optimizer="x", image_size="1x")
        make_plan(LLAMA_8B, parse_hardware("8xH100-80GB"), wrong)
    assert {error.where for error in caught.value.errors} == {"optimizer", "image_size"}


@given(
    layers=st.integers(2, 60),
    width=st.sampled_from([512, 1024, 4096]),
    gpu_gib=st.integers(8, 120),
    more_gib=st.integers(0, 80),
    gpus=st.sampled_from([1, 2, 8]),
    nodes=st.sampled_from([1, 4]),
    sequence=st.sampled_from([512, 4096]),
)
@settings(max_examples=6, deadline=None)
@pytest.mark.slow
def test_more_memory_never_makes_the_step_slower(layers, width, gpu_gib, more_gib, gpus, nodes, sequence):
    """Up to the hundredth that simplicity may cost."""
    model = llama(num_hidden_layers=layers, hidden_size=width, intermediate_size=3 * width, vocab_size=32000)
    job = TrainingJob(seq_len_tokens=sequence)
    base = parse_hardware(f"{nodes}x{gpus}xA100-80GB", host_memory="4TB", nvme="/nvme:20TB")
    small = search(SearchContext(model=model, hardware=replace(base, gpu_bytes=gpu_gib * 2**30), job=job)).chosen
    large = search(
        SearchContext(model=model, hardware=replace(base, gpu_bytes=(gpu_gib + more_gib) * 2**30), job=job)
    ).chosen
    if small is not None:
        assert large is not None
        assert large.time.tokens_per_second >= 0.99 * small.time.tokens_per_second


@given(
    engine=st.sampled_from([("ddp", None), ("deepspeed", 0), ("deepspeed", 1), ("deepspeed", 3), ("fsdp2", None)]),
    axes=st.sampled_from([{}, {"tp": 2}, {"pp": 2}, {"sp": 2}, {"cp": 2}, {"ep": 2}, {"tp": 3}]),
    batch=st.integers(1, 64),
    accumulation=st.integers(1, 64),
    wanted=st.sampled_from([None, 7, 64]),
    recomputes=st.booleans(),
)
def test_layout_rules_do_not_depend_on_batch(engine, axes, batch, accumulation, wanted, recomputes):
    layout = Layout(engine=engine[0], zero_stage=engine[1], dp_shard=4, gradient_checkpointing=recomputes, **axes)
    job, hardware = TrainingJob(global_batch_size=wanted), parse_hardware("8xH100-80GB")
    other = replace(layout, micro_batch_size=batch, gradient_accumulation_steps=accumulation)
    of_layout = list(broken_rules(LAYOUT_RULES, LLAMA_8B, layout, job, hardware))
    assert of_layout == list(broken_rules(LAYOUT_RULES, LLAMA_8B, other, job, hardware))
    of_batch = broken_rules(BATCH_RULES, LLAMA_8B, other, job, hardware)
    assert {*of_layout, *of_batch} == set(legality_errors(LLAMA_8B, other, job, hardware))


@pytest.mark.parametrize(
    ("hardware", "job"),
    [("2xRTX4090", TrainingJob(offload="none")), ("1xT4", TrainingJob(precision="fp16", seq_len_tokens=1024))],
)
def test_anything_fits_agrees_with_search(hardware, job):
    """What suggestions ask of many clusters is what the search would find there."""
    for nodes in (1, 2, 8):
        cluster = with_gpus(parse_hardware(hardware), nodes=nodes, gpus_per_node=8)
        assert anything_fits(SearchContext(model=LLAMA_8B, hardware=cluster, job=job)) == (
            search(SearchContext(model=LLAMA_8B, hardware=cluster, job=job)).chosen is not None
        )


@pytest.mark.parametrize("host_bytes", [3 * 10**10, 8 * 10**10, 10**11])
def test_unloadable_model_is_detected_before_candidates_are_built(host_bytes):
    """The first rank holds the experts of a whole mixture while they are fused: 61 GB, and processes need 24 GB."""
    model = public_model("Qwen/Qwen3-30B-A3B")
    cluster = replace(parse_hardware("2x8xA100-40GB"), host_bytes_per_node=host_bytes)
    fits = host_bytes == 10**11
    assert anything_fits(SearchContext(model=model, hardware=cluster, job=TrainingJob())) == fits
    assert (search(SearchContext(model=model, hardware=cluster, job=TrainingJob())).chosen is not None) == fits
