"""Activation bytes: stored coefficients against hand counts, real CPU runs, public hooks and fake traces."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from planning import RELEASE, public_model
from saved_tensors import saved_storages
from shardwright.ds_configs.memory.activations import (
    KERNELS_FILE,
    ActivationEstimate,
    Adapter,
    Kernels,
    Mode,
    attention_path,
    chunked_loss_tokens,
    estimate_activations,
    load_coefficients,
)
from shardwright.ds_configs.specs.model import stored_facts
from shardwright.tools.activations.families import (
    FAMILIES,
    FIRST,
    Shape,
    build_inputs,
    build_subject,
    has_sdpa,
    sample_shapes,
)
from shardwright.tools.activations.run import run_training_step

LLAMA_8B = public_model("meta-llama/Llama-3.1-8B").dimensions


def estimate(family: str, shape: Shape, mode: Mode, adapter: Adapter = "none", **options: Any) -> ActivationEstimate:
    return estimate_activations(
        family=family,
        release=RELEASE,
        dimensions=shape.dimensions,
        micro_batch_size=shape.micro_batch_size,
        seq_len_tokens=shape.seq_len_tokens,
        mode=mode,
        adapter=adapter,
        lora_rank=shape.lora_rank,
        **options,
    )


def fresh_shape(family: str, adapter: Adapter = "none") -> Shape:
    """A shape that the derivation does not use, deeper and longer than any of its shapes."""
    shape = sample_shapes(family, 3, adapter=adapter, seed=77)[-1]
    return replace(shape, dimensions=replace(shape.dimensions, num_layers=5), seq_len_tokens=37)


def test_llama_layer_equals_the_hand_count() -> None:
    """Two RMSNorms (float32 input, bf16 normed, bf16 scaled, rsqrt), q k v out and log-sum-exp, four MLP tensors."""
    size, tokens = LLAMA_8B, 2 * 4096
    norms = 2 * (4 + 2 + 2) * size.hidden_size + 2 * 4
    attention = 2 * (2 * size.query_size + 2 * size.key_value_size) + 4 * size.num_attention_heads
    mlp = 4 * 2 * size.intermediate_size
    result = estimate_activations(
        family="llama", release=RELEASE, dimensions=size, micro_batch_size=2, seq_len_tokens=4096, mode="bf16"
    )
    assert result.saved_bytes_per_layer == tokens * (norms + attention + mlp)
    assert result.checkpointed_bytes_per_layer == tokens * 2 * size.hidden_size


def test_loss_takes_twelve_bytes_per_logit_at_its_peak() -> None:
    """Logits 2 + float32 copy 4 + log-probabilities 4 forward; log-probabilities and two gradients of 4 backward."""
    result = estimate_activations(
        family="llama", release=RELEASE, dimensions=LLAMA_8B, micro_batch_size=1, seq_len_tokens=4096, mode="bf16"
    )
    logits = 4096 * LLAMA_8B.vocab_size
    assert result.loss_forward_peak_bytes == pytest.approx(10 * logits, rel=1e-3)
    assert result.loss_backward_peak_bytes == pytest.approx(12 * logits, rel=1e-3)


def test_chunked_loss_no_longer_grows_with_logits() -> None:
    whole, chunked = (
        estimate_activations(
            family="llama",
            release=RELEASE,
            dimensions=LLAMA_8B,
            micro_batch_size=4,
            seq_len_tokens=8192,
            mode="bf16",
            chunked_loss=chunked,
        )
        for chunked in (False, True)
    )
    hidden_gradient = 4 * 8192 * 4096 * 2
    chunk_tokens = chunked_loss_tokens(4 * 8192, LLAMA_8B.vocab_size, LLAMA_8B.hidden_size)
    assert chunk_tokens == 1024  # 32,768 tokens over 32 chunks
    chunk_logits = chunk_tokens * LLAMA_8B.vocab_size
    assert chunked.loss_forward_peak_bytes == pytest.approx(12 * chunk_logits + hidden_gradient, rel=1e-3)
    assert chunked.saved_bytes_per_layer == whole.saved_bytes_per_layer


def test_float32_with_grouped_heads_uses_math_attention() -> None:
    multi_head = replace(LLAMA_8B, num_key_value_heads=32)
    assert attention_path(LLAMA_8B, "fp32", "auto") == "math"
    assert attention_path(multi_head, "fp32", "auto") == "fused"
    assert attention_path(LLAMA_8B, "bf16", "auto") == "fused"
    assert attention_path(LLAMA_8B, "bf16", "masked") == "masked"


@pytest.mark.trace
def test_stored_coefficients_are_those_of_the_installed_libraries() -> None:
    """The derivation of one table; what all of them say is compared with real runs below.

    GPT-2's last layer differs from the others, which a derivation from too few layers does not survive.
    """
    from shardwright.tools.activations.fit import derive_table

    derived = derive_table("gpt2", mode="bf16", adapter="none", attention="fused")
    assert derived == load_coefficients(RELEASE)["tables"]["gpt2"]["bf16"]["none"]["fused"]


def own_attention(family: str) -> str:
    """What an unpadded batch runs in the installed Transformers: Gemma-2 has eager attention alone since 5.21."""
    return "fused" if has_sdpa(family) else "eager"


def assert_run_matches(family: str, mode: Mode, adapter: Adapter, attention: str, *, checkpointing: bool) -> None:
    shape = fresh_shape(family, adapter)
    size = shape.dimensions
    subject = build_subject(
        family,
        size,
        mode=mode,
        adapter=adapter,
        lora_rank=shape.lora_rank,
        checkpointing=checkpointing,
        implementation="eager" if attention == "eager" else "sdpa",
    )
    inputs = build_inputs(shape, attention=attention)
    run = run_training_step(subject.model, inputs, mode=mode, layers=subject.layers, head=subject.head)
    estimated = estimate(family, shape, mode, adapter, attention=attention)
    per_layer = estimated.checkpointed_bytes_per_layer if checkpointing else estimated.saved_bytes_per_layer
    transient = estimated.recompute_backward_transient_bytes if checkpointing else estimated.backward_transient_bytes
    base = size.num_layers * per_layer + estimated.outside_layer_bytes
    # The estimate always counts what only checkpointing keeps: position numbers and masks: truth values, or numbers of
    # the weights' type for each of at most two kinds of layers.
    length = shape.seq_len_tokens
    mask_bytes = {"masked": 1, "eager": 2 * (4 if mode == "fp32" else 2)}.get(attention, 0)
    slack = 8 * length + mask_bytes * shape.micro_batch_size * length * length
    for measured, expected in (
        (run.head_start, base),
        (max(run.loss_forward), base + estimated.loss_forward_peak_bytes),
        (max(run.loss_backward), base + estimated.loss_backward_peak_bytes),
    ):
        assert 0 <= expected - measured <= slack
    # A backward that never exceeds the forward's end has a transient of zero.
    assert 0 <= base + transient - max(run.backward) <= (slack if transient else base)


@pytest.mark.trace
@pytest.mark.parametrize(("mode", "checkpointing"), [("bf16", False), ("fp32", False), ("bf16_autocast", True)])
@pytest.mark.parametrize("family", FIRST)
def test_measured_bytes_of_new_shapes_match_estimate(family: str, mode: Mode, checkpointing: bool) -> None:
    assert_run_matches(family, mode, "none", own_attention(family), checkpointing=checkpointing)


@pytest.mark.trace
@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - FIRST.keys()))
def test_measured_bytes_of_added_families_match_estimate(family: str) -> None:
    assert_run_matches(family, "bf16", "none", own_attention(family), checkpointing=True)


@pytest.mark.trace
@pytest.mark.parametrize("adapter", ["lora_all_linear", "lora_attention"])
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_measured_bytes_of_lora_runs_match_estimate(family: str, adapter: Adapter) -> None:
    assert_run_matches(family, "bf16", adapter, "fused", checkpointing=True)


@pytest.mark.trace
def test_measured_bytes_of_adapted_experts_match_estimate() -> None:
    assert_run_matches("mixtral", "bf16", "lora_experts", "fused", checkpointing=False)


@pytest.mark.trace
def test_padding_expands_heads_and_keeps_a_mask_per_layer() -> None:
    assert_run_matches("llama", "bf16", "none", "masked", checkpointing=False)
    shape = fresh_shape("llama")
    size, tokens = shape.dimensions, shape.micro_batch_size * shape.seq_len_tokens
    fused = estimate("llama", shape, "bf16", attention="fused")
    masked = estimate("llama", shape, "bf16", attention="masked")
    expanded = 2 * 2 * (size.query_size - size.key_value_size)
    assert masked.saved_bytes_per_layer - fused.saved_bytes_per_layer == tokens * (expanded + 2 * shape.seq_len_tokens)


@pytest.mark.trace
@pytest.mark.parametrize(("family", "checkpointing"), [("llama", False), ("gpt2", True), ("gemma2", False)])
def test_eager_attention_keeps_every_score(family: str, checkpointing: bool) -> None:
    assert_run_matches(family, "bf16", "none", "eager", checkpointing=checkpointing)


@pytest.mark.trace
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_moe"])
def test_public_hooks_count_the_same_saved_storages(family: str) -> None:
    shape = fresh_shape(family)
    subject = build_subject(family, shape.dimensions, mode="bf16", adapter="none", lora_rank=0, checkpointing=False)
    inputs = build_inputs(shape, attention="fused")
    with saved_storages([*subject.model.parameters(), *subject.model.buffers(), *inputs.values()]) as sizes:
        loss = subject.model(**inputs).loss
    assert loss.requires_grad
    estimated = estimate(family, shape, "bf16")
    layers = shape.dimensions.num_layers * estimated.saved_bytes_per_layer
    # The loss keeps log-probabilities and labels.
    tokens = shape.micro_batch_size * shape.seq_len_tokens
    loss = tokens * (4 * shape.dimensions.vocab_size + 8) + 8
    assert sum(sizes.values()) == pytest.approx(layers + estimated.outside_layer_bytes + loss, rel=2e-3)


def test_liger_and_compiled_layers_keep_what_their_code_saves() -> None:
    def saved(kernels: Kernels, mode: Mode = "bf16", family: str = "llama", **changes: Any) -> ActivationEstimate:
        return estimate_activations(
            family=family,
            release=RELEASE,
            dimensions=LLAMA_8B,
            micro_batch_size=2,
            seq_len_tokens=1024,
            mode=mode,
            kernels=kernels,
            **changes,
        )

    tokens, hidden, query, key_value, inner = 2048, 4096, 4096, 1024, 14336
    heads = 4 * 32 + 8
    # Norms keep their input and output, MLPs gate, up and product (liger-kernel 0.8.5, ops/rms_norm.py, ops/swiglu.py).
    liger = tokens * (8 * hidden + 4 * query + 4 * key_value + 6 * inner + heads)
    assert saved("liger").saved_bytes_per_layer == liger < saved("eager").saved_bytes_per_layer
    # fp32 residuals, of which norms have no copy.
    autocast = tokens * (18 * hidden + 4 * query + 4 * key_value + 6 * inner + heads)
    assert saved("liger", "bf16_autocast").saved_bytes_per_layer == autocast
    # Keys and values are repeated, because a compiled model has a mask.
    compiled = saved("compiled")
    assert compiled.saved_bytes_per_layer == tokens * (8 * hidden + 8 * query + 6 * inner + heads)
    # Cross-entropy in fp32 with its gradient; the eager loss holds a third tensor.
    assert compiled.loss_backward_peak_bytes == pytest.approx(8 * tokens * LLAMA_8B.vocab_size, rel=1e-2)
    # A last layer is counted with an eager one's transients.
    eager = saved("eager")
    peak = compiled.saved_bytes_per_layer + compiled.backward_transient_bytes
    assert peak <= eager.saved_bytes_per_layer + eager.backward_transient_bytes
    # Without stored layers of the kernels, those of eager ones are an upper bound.
    assert saved("compiled", family="granite") == saved("eager", family="granite")
    adapted = saved("liger", adapter="lora_all_linear", lora_rank=16)
    assert adapted.saved_bytes_per_layer > liger


def test_the_compilers_partition_keeps_the_stored_bytes() -> None:
    from shardwright.tools.activations.compiled import kept_by_compiled

    document = stored_facts(KERNELS_FILE, RELEASE)
    if document["versions"]["transformers"] != RELEASE:
        pytest.skip("other releases may compile another graph")
    table = document["tables"]["compiled"]["llama"]["bf16"]["fused"]
    layer, outside = (
        dict(zip(table["features"], table[name][0], strict=True)) for name in ("saved_per_layer", "outside_layers")
    )
    kept = kept_by_compiled("llama", "bf16", 2)
    assert kept["token*vocab_size"] == 2
    del layer["token*vocab_size"], outside["token*vocab_size"]
    assert {name: kept[name] for name in layer} == {name: 2 * layer[name] + outside[name] for name in layer}
