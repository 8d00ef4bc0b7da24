"""Tiled MLPs, tiled losses and offloaded checkpoints leave losses and gradients of the stock Trainer unchanged."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from shardwright.ds_configs.quantization.scheme import changed, scheme_named
from shardwright.ds_configs.specs.errors import UsageError
from shardwright.plugins.metering import ByteMeter
from shardwright.plugins.transformers.gradient_checkpointing import offload_checkpoints
from shardwright.plugins.transformers.tiled_compute import in_tiles, tile_mlps, untile_mlps
from shardwright.trainers import LongSequenceCallback
from shardwright.trainers.parallel.long_sequences import TiledLoss
from shardwright.trainers.qat.attach import attach
from shardwright.trainers.qat.settings import QATConfig
from small_models import llama, mixtral

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.2,
}
FAMILIES = {
    "Llama": {},
    "Qwen3": {},
    "Gemma2": {"query_pre_attn_scalar": 8, "final_logit_softcapping": 5.0},
    "Mixtral": {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.5},
    "DeepseekV3": {
        **{"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "num_key_value_heads": 4},
        **{"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
        "first_k_dense_replace": 1,
    },
}
"""A head with a soft-cap, a balance loss, and shared experts beside a dense first layer."""


def model_of(family: str, **changes: Any) -> Any:
    import transformers

    transformers.set_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES | FAMILIES[family] | changes)
    return getattr(transformers, f"{family}ForCausalLM")(config).train()


def batch(samples: int = 3, length: int = 21, vocabulary: int = 96, *, padding: int = 5) -> dict[str, Any]:
    """Return a batch whose second sample is padded on the left, and some of whose tokens have no labels."""
    ids = torch.randint(1, vocabulary, (samples, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1:2, :padding] = 0
    labels = torch.where((ids % 3 == 0) | (mask == 0), -100, ids)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def gradients(model: Any, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    model.zero_grad()
    outputs = model(**inputs)
    outputs.loss.backward()
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {"loss": outputs.loss.detach(), **found}


def check_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 1e-6) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name] - value).abs().max() <= tolerance * value.abs().max(), name


@pytest.mark.parametrize("family", FAMILIES)
def test_tiles_and_offload_leave_loss_and_gradients_unchanged(family: str) -> None:
    has_experts = family in ("Mixtral", "DeepseekV3")
    # Products of experts have no fp64 kernel.
    model = model_of(family, tie_word_embeddings=family == "Gemma2").to(torch.float if has_experts else torch.double)
    # Gemma 2 returns NaN for padding on the left (transformers 5.24.0, windows under SDPA).
    inputs = batch(padding=0 if family == "Gemma2" else 5) | {"num_items_in_batch": torch.tensor(17)}
    plain = gradients(model, inputs)
    model.gradient_checkpointing_enable({"use_reentrant": family == "Qwen3"})
    model.enable_input_require_grads()
    recomputed = gradients(model, inputs)
    offload_checkpoints(model, 2)
    check_equal(gradients(model, inputs), recomputed, tolerance=0.0)
    tile_mlps(model, 5)
    TiledLoss(model, 4)
    check_equal(gradients(model, inputs), plain, tolerance=4e-6 if has_experts else 1e-6)
    # Without the count, the loss is the mean over this batch.
    labelled = (inputs["labels"][:, 1:] != -100).sum()
    with torch.no_grad():
        mean = model(**{name: value for name, value in inputs.items() if name != "num_items_in_batch"})
    balance = 0.5 * mean.aux_loss if family == "Mixtral" else 0.0
    assert float((mean.loss - balance) * labelled) == pytest.approx(float((plain["loss"] - balance) * 17), rel=1e-6)
    assert mean.logits is None


def test_buffers_on_the_host_are_used_again_for_other_lengths_but_not_while_a_pass_needs_them() -> None:
    model = model_of("Llama")
    model.gradient_checkpointing_enable()
    batches = [batch(length=length) for length in (21, 13, 30)]
    plain = [gradients(model, inputs) for inputs in batches]
    offload_checkpoints(model, 3)
    with ByteMeter() as meter:
        for inputs, expected in zip(batches, plain, strict=True):
            check_equal(gradients(model, inputs), expected, tolerance=0.0)
        assert meter.reading().host_peak_bytes == 3 * 4 * 32 * 3 * 30
        # Two forward passes before the backward passes.
        for inputs, expected in [(batches[0], plain[0]), (batches[2], plain[2])]:
            model.zero_grad()
            first, second = model(**inputs).loss, model(**batches[1]).loss
            first.backward()
            found = {name: weight.grad.clone() for name, weight in model.named_parameters()}
            assert all(torch.equal(found[name], expected[name]) for name in found)
            second.backward()


def test_adapters_of_four_bit_weights_get_the_same_gradients(tmp_path: Path) -> None:
    from shardwright.plugins.peft import add_lora, four_bit_loading
    from transformers import AutoModelForCausalLM

    model_of("Llama", hidden_size=64).save_pretrained(tmp_path)
    loading = four_bit_loading(torch.float)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=loading, dtype=torch.float)
    adapted = add_lora(model, rank=4, targets=None, fp32_adapters=True).train()
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    assert type(model.model.layers[0].mlp.down_proj.base_layer).__name__ == "Linear4bit"
    inputs = batch()
    adapted.gradient_checkpointing_enable()
    adapted.enable_input_require_grads()
    plain = gradients(adapted, inputs)
    assert len(plain) == 1 + 3 * 7 * 2
    offload_checkpoints(adapted, 2)
    check_equal(gradients(adapted, inputs), plain, tolerance=0.0)
    tile_mlps(model, 5)
    TiledLoss(model, 4)
    check_equal(gradients(adapted, inputs), plain)


def test_trainer_reports_the_same_losses_and_predictions(tmp_path: Path) -> None:
    from shardwright.plugins.peft import add_lora
    from transformers import Trainer, TrainingArguments

    rows = [{"input_ids": row, "labels": row} for row in batch(8)["input_ids"]]

    def run(callback: LongSequenceCallback | None) -> tuple[list[dict[str, float]], Any, Any]:
        adapted = add_lora(model_of("Llama"), rank=4, targets="q_proj,down_proj", fp32_adapters=True)
        settings = {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 1, "max_steps": 2}
        arguments = TrainingArguments(
            str(tmp_path), use_cpu=True, report_to="none", per_device_train_batch_size=2, bf16=True, logging_steps=1,
            learning_rate=1e-2, gradient_checkpointing=True, save_strategy="no", disable_tqdm=True, **settings,
        )  # fmt: skip
        trainer = Trainer(model=adapted, args=arguments, train_dataset=rows, eval_dataset=rows[:3])
        if callback is not None:
            callback.attach(trainer)
        trainer.train()
        names = ("loss", "grad_norm", "eval_loss")
        logs = [{name: entry[name] for name in names if name in entry} for entry in trainer.state.log_history]
        return logs, trainer.predict(rows[:2]).predictions, adapted

    plain, logits, _ = run(None)
    logs, tiled_logits, adapted = run(LongSequenceCallback(tiled_mlp=4, tiled_loss=3, offloaded_checkpoints=3))
    for entry, expected in zip(logs, plain, strict=True):
        # bf16 products of fewer rows round differently.
        assert entry == pytest.approx(expected, rel=2e-3)
    assert tiled_logits.shape == logits.shape
    assert adapted(**batch()).logits is None


def test_offloaded_inputs_live_in_host_memory() -> None:
    inputs = batch(1, 64, vocabulary=512)
    size = 64 * 64 * 4

    def metered(count: int) -> Any:
        model = llama(num_hidden_layers=8)
        model.gradient_checkpointing_enable()
        # Gradients of weights would hide the difference at the end of the backward pass.
        model.requires_grad_(False)
        model.enable_input_require_grads()
        offload_checkpoints(model, count)
        with ByteMeter() as meter:
            meter.enter("forward")
            loss = model.model(input_ids=inputs["input_ids"]).last_hidden_state.sum()
            kept = meter.reading().current_bytes
            meter.enter("backward")
            loss.backward()
        return kept, meter.reading()

    kept, plain = metered(0)
    kept_by_offload, offloaded = metered(6)
    assert plain.host_peak_bytes == 0
    assert offloaded.host_peak_bytes == 6 * size
    # Autograd keeps the embedding's output, the first layer's input, because it is a leaf where weights are frozen.
    assert kept - kept_by_offload == 5 * size
    assert plain.peaks["backward"] - offloaded.peaks["backward"] >= 3 * size


def test_gradients_of_one_tile_live_beside_their_sum() -> None:
    layer, x = torch.nn.Linear(256, 256, bias=False), torch.randn(16, 256)
    with ByteMeter() as meter:
        result = in_tiles(layer, [x], list(layer.parameters()), 4)
        kept = meter.reading().current_bytes
        meter.enter("backward")
        result.sum().backward()
    peak = meter.reading().peaks["backward"] - kept
    assert layer.weight.nbytes * 2 <= peak < layer.weight.nbytes * 2.5


def test_dropout_in_tiles_draws_the_same_numbers_again() -> None:
    layer = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5))
    x = torch.randn(10, 8, requires_grad=True)
    result = in_tiles(layer, [x], list(layer.parameters()), 3)
    gradient = torch.randn(10, 8)
    result.backward(gradient)
    dropped = (result == 0).float()
    expected = (gradient * 2 * (1 - dropped)) @ layer[0].weight
    assert torch.allclose(x.grad, expected, atol=1e-6)


@pytest.mark.parametrize("family", ["Llama", "Mixtral"])
def test_quantized_layers_round_alike_in_tiles(family: str) -> None:
    model = model_of(family)
    # QAT changes classes of modules whose forward is tiled already.
    tile_mlps(model, 5)
    TiledLoss(model, 4)
    scheme = changed(scheme_named("W4A16"), group_size=16)
    attach(model, QATConfig(scheme=scheme)).state.enabled = True
    tiled = gradients(model, batch())
    untile_mlps(model)
    check_equal(gradients(model, batch()), tiled, tolerance=4e-6)
    assert (tiled["loss"] - model_of(family)(**batch()).loss).abs() > 1e-3


def test_unsupported_runs_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import psutil
    from transformers import GPT2Config, GPT2ForSequenceClassification, Trainer, TrainingArguments

    class OwnLoss(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs)

    def message(model: Any, kind: type = Trainer, settings: dict[str, Any] | None = None, **switches: Any) -> str:
        arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
        # The Trainer itself would replace the model's modules.
        vars(arguments).update(settings or {})
        trainer = kind(model=model, args=TrainingArguments(str(tmp_path), use_cpu=True, report_to="none"))
        trainer.args = arguments
        with pytest.raises(UsageError) as error:
            LongSequenceCallback(**switches).attach(trainer)
        return str(error.value)

    model, classifier = llama(), GPT2ForSequenceClassification(GPT2Config(n_embd=8, n_head=2, n_layer=1, vocab_size=9))
    assert "gradient checkpointing, which is off" in message(model, offloaded_checkpoints=2)
    assert "another one from logits" in message(model, OwnLoss, tiled_loss=True)
    assert "label smoothing" in message(model, settings={"label_smoothing_factor": 0.1}, tiled_loss=True)
    assert "number of tiles above 1" in message(model, tiled_mlp=1)
    assert "both replace MLPs" in message(model, settings={"use_liger_kernel": True}, tiled_mlp=True)
    plugin = SimpleNamespace(deepspeed_config={"expert_parallel": {"enabled": True, "autoep_size": 2}})
    sharded = {"deepspeed_plugin": plugin}
    assert "is not supported with expert_parallel" in message(mixtral(), settings=sharded, tiled_mlp=True)
    assert "needs a causal language model" in message(classifier, tiled_loss=True)
    without_mlp = llama()
    for layer in without_mlp.model.layers:
        layer.mlp = torch.nn.Identity()
        layer.add_module("projection", layer._modules.pop("mlp"))
    assert "finds no MLP" in message(without_mlp, tiled_mlp=True)
    model.gradient_checkpointing_enable()
    with pytest.raises(UsageError, match="at most 2"):
        offload_checkpoints(model, 3)
    offload_checkpoints(model, 2)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("", (), {"available": 1000, "total": 1000}))
    with pytest.raises(UsageError, match=r"needs 0.000 GB of host memory for inputs \(3, 21, 64\)"):
        model.train()(**batch(vocabulary=512))
