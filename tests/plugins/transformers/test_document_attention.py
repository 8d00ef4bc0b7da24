"""SDPA attention of packed, padded and windowed rows equals that with Transformers' masks, in memory that grows with S.

Shapes: B samples, S tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import pytest
import small_models
import torch
from shardwright.ds_configs.memory import activations
from shardwright.ds_configs.models.stored_shapes import model_spec_from_config
from shardwright.ds_configs.specs.job import TrainingJob
from shardwright.plugins.metering import ByteMeter
from shardwright.plugins.transformers import attention

S = 50
DOCUMENTS = [[*range(20), *range(9), 0, 0, 0, *range(18)], [*range(S - 1), 0]]
"""Positions of packed rows; padding has position 0."""


def mistral(window: int | None) -> Any:
    from transformers import MistralConfig, MistralForCausalLM, set_seed

    set_seed(0)
    return MistralForCausalLM(MistralConfig(**small_models._sizes({"sliding_window": window})))


def _rows(kind: str) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    ids_BS = torch.randint(3, 512, (2, S), generator=draw)
    rows = {"input_ids": ids_BS, "is_compared": torch.ones(2, S, dtype=torch.bool)}
    if kind == "packed":
        return rows | {"position_ids": torch.tensor(DOCUMENTS)}
    if kind in ("left", "right"):
        mask_BS = torch.ones(2, S, dtype=torch.int64)
        mask_BS[1, slice(0, 13) if kind == "left" else slice(S - 13, S)] = 0
        return rows | {"attention_mask": mask_BS, "is_compared": mask_BS.bool()}
    return rows


def _results(model: Any, rows: dict[str, torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    model.zero_grad()
    inputs = {name: value for name, value in rows.items() if name != "is_compared"}
    logits = model(**inputs, use_cache=False).logits[rows["is_compared"]]
    logits.square().mean().backward()
    return logits.detach(), [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("kind", "window"),
    [("packed", None), ("left", None), ("right", None), ("one document", 8), ("packed", 8), ("left", 8), ("packed", 7)],
)
def test_documents_and_windows_equal_masks_of_transformers(
    kind: str, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, rows = mistral(window), _rows(kind)
    logits, gradients = _results(model, rows)
    made: list[Any] = []
    parts_of = attention._parts_of
    monkeypatch.setattr(attention, "_SMALLEST_MASK", 1)
    monkeypatch.setattr(attention, "_parts_of", lambda *args: made.append(args) or parts_of(*args))
    attention.attend_by_document(model)
    own_logits, own_gradients = _results(model, rows)
    assert made, "the mask was not replaced"
    torch.testing.assert_close(own_logits, logits, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(own_gradients, gradients, rtol=1e-4, atol=1e-7)


def _peak_bytes(model: Any, tokens: int, documents: int) -> int:
    ids = torch.zeros(1, tokens, dtype=torch.int64)
    positions = torch.arange(tokens) % -(-tokens // documents)
    model.requires_grad_(False)
    with ByteMeter() as meter, torch.no_grad():
        meter.enter("forward")
        model.model(input_ids=ids, position_ids=positions[None], use_cache=False)
    return meter.reading().peaks["forward"]


@pytest.mark.parametrize("window", [128, 100])
def test_blocks_of_a_window_need_the_planned_bytes(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_SMALLEST_MASK", 1)
    monkeypatch.setattr(activations, "SMALLEST_MASK_TOKENS", 1)
    tokens = 512
    planned, metered = [], []
    for own_window in (None, window):
        model = mistral(own_window).train()
        attention.attend_by_document(model)
        kept = {}
        for is_recomputed in (False, True):
            if is_recomputed:
                model.gradient_checkpointing_enable({"use_reentrant": False})
            model.zero_grad()
            with ByteMeter() as meter:
                meter.enter("forward")
                hidden = model.model(input_ids=torch.zeros(1, tokens, dtype=torch.int64), use_cache=False)[0]
                kept[is_recomputed] = meter.reading().current_bytes
                meter.enter("backward")
                hidden.sum().backward()
                peak = meter.reading().peaks["backward"]
        metered.append((kept[False], kept[True], peak))
        spec = model_spec_from_config(model.config.to_dict(), name="mistral")
        job = TrainingJob(seq_len_tokens=tokens, precision="fp32")
        own = activations.activations_of(spec, job, 1, "fp32", unmasked="fused")
        layers, outside = spec.dimensions.num_layers, own.outside_layer_bytes
        recomputed = outside + own.recompute_backward_transient_bytes
        planned.append((outside + layers * own.saved_bytes_per_layer, outside, recomputed))
    for own, full, planned_own, planned_full in zip(*reversed(metered), *reversed(planned), strict=True):
        assert own - full == pytest.approx(planned_own - planned_full, rel=0.02)


def test_transformers_still_makes_masks_of_all_pairs() -> None:
    sizes = {"hidden_size": 16, "num_attention_heads": 1, "num_key_value_heads": 1, "num_hidden_layers": 1}
    model, tokens = small_models.llama(**sizes), 10_000
    plain = _peak_bytes(model, tokens, 1)
    assert _peak_bytes(model, tokens, 100) > tokens**2
    attention.attend_by_document(model)
    assert _peak_bytes(model, tokens, 100) < 1.5 * plain


def _models_with_other_attention() -> dict[str, tuple[Any, dict[str, torch.Tensor]]]:
    """Return models whose attention is not causal, or that pass the mask by name, with inputs."""
    import transformers as hf

    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = sizes | {"num_attention_heads": 4}
    draw = torch.Generator().manual_seed(2)
    ids = torch.randint(3, 80, (2, 12), generator=draw)
    padded = torch.ones_like(ids)
    padded[1, 9:] = 0
    pixels = torch.rand(2, 3, 16, 16, generator=draw)
    vision = heads | {"model_type": "clip_vision_model", "image_size": 16, "patch_size": 8, "projection_dim": 32}
    hf.set_seed(0)
    tower = hf.models.qwen2_vl.configuration_qwen2_vl.Qwen2VLVisionConfig(
        depth=2, embed_dim=32, hidden_size=32, num_heads=4, mlp_ratio=2, patch_size=4
    )
    qwen_tower = hf.models.qwen2_vl.modeling_qwen2_vl.Qwen2VisionTransformerPretrainedModel(tower)
    patches = torch.rand(16, 3 * 2 * 4 * 4, generator=draw)
    return {
        "qwen2_vl tower": (qwen_tower, {"hidden_states": patches, "grid_thw": torch.tensor([[1, 4, 4]])}),
        "clip tower": (hf.CLIPVisionModel(hf.CLIPVisionConfig(**vision)), {"pixel_values": pixels}),
        "bert": (hf.BertModel(hf.BertConfig(**heads, vocab_size=96)), {"input_ids": ids, "attention_mask": padded}),
    }


def test_other_models_of_the_process_keep_their_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions are replaced for the process, so that models with other calling conventions reach them too."""
    models = _models_with_other_attention()
    before = {name: model.eval()(**inputs)[0].detach() for name, (model, inputs) in models.items()}
    monkeypatch.setattr(attention, "_SMALLEST_MASK", 1)
    attention.attend_by_document(small_models.llama())
    for name, (model, inputs) in models.items():
        model.train()
        model(**inputs)[0].float().sum().backward()
        torch.testing.assert_close(model.eval()(**inputs)[0].detach(), before[name], msg=name)
