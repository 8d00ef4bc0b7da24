"""Evaluating models: windows and errors by hand, losses and KL against fp64, sizes, rejected models."""

from __future__ import annotations

import json
import logging
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import shardwright
import torch
from commands import shell_in
from shardwright.ds_configs.specs.errors import RefusedInputError, UsageError
from shardwright.plugins.transformers.training_arguments import byte_tokenizer
from shardwright.trainers.counting.counts import Estimate, exponential, token_mean
from shardwright.trainers.data.samples import collate
from shardwright.trainers.evaluation import measures
from shardwright.trainers.evaluation.evaluate import evaluate_model
from shardwright.trainers.evaluation.measures import TextRequest, text_windows
from shardwright.trainers.losses import fused_loss
from small_models import llama
from transformers import AutoModelForCausalLM, LlamaForCausalLM

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def noisy_llama(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("noisy")
    model = LlamaForCausalLM.from_pretrained(tiny_llama)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "proj" in name:
                parameter += 0.05 * torch.randn_like(parameter)
        model.lm_head.weight *= 20
    model.save_pretrained(directory)
    return directory


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_text("".join(f"Line {number} of a book that says {number * number}.\n" for number in range(60)))
    return path


def test_standard_errors_by_hand():
    # Means 1, 2 and 6 over equal windows: mean 3, standard deviation √7, over √3.
    equal = token_mean([4.0, 8.0, 24.0], [4, 4, 4])
    assert equal.value == pytest.approx(3.0)
    assert equal.standard_error == pytest.approx(math.sqrt(7 / 3))
    assert equal.is_significant is False
    assert token_mean([4.0, 0.0, 8.0, 24.0], [4, 0, 4, 4]) == equal, "a window without labels is no sample"
    # Unequal windows: residuals 1 - 1.5·1 and 5 - 1.5·3 are ∓0.5.
    unequal = token_mean([1.0, 5.0], [1, 3])
    assert unequal.value == pytest.approx(1.5)
    assert unequal.standard_error == pytest.approx(math.sqrt(2 * 0.5) / 4)
    assert unequal.is_significant is True
    single = token_mean([6.0], [3])
    assert single.standard_error is None and single.is_significant is None
    grown = exponential(Estimate(value=math.log(8), standard_error=0.01))
    assert grown.value == pytest.approx(8) and grown.standard_error == pytest.approx(0.08)


def logits64(directory: Path, ids: torch.Tensor) -> torch.Tensor:
    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float64)
    with torch.no_grad():
        return model(ids).logits


def test_against_fp64(tiny_llama, noisy_llama, book, monkeypatch, tmp_path):
    """Perplexity, KL and agreement with their errors, recomputed from whole logits in fp64.

    The baseline's head is 8 rows wider: they count for its loss, but not for the comparison.
    """
    monkeypatch.setattr(measures, "CHUNK_ELEMENTS", 512 * 7)
    wider = LlamaForCausalLM.from_pretrained(tiny_llama)
    wider.resize_token_embeddings(520)
    with torch.no_grad():
        wider.lm_head.weight[512:] = 3 * wider.lm_head.weight[:8]
    wider.save_pretrained(tmp_path / "wider")
    asked = TextRequest(dataset=str(book), num_samples=9)
    options: dict[str, Any] = {"baseline": str(tmp_path / "wider"), "text": asked, "seq_len": 32}
    found = evaluate_model(str(noisy_llama), batch_size=4, **options)

    tokens = byte_tokenizer(512)(book.read_text())["input_ids"]
    ids = torch.tensor(tokens[: 9 * 32]).reshape(9, 32)
    assert found.text.predicted_tokens == 9 * 31
    logits = [logits64(directory, ids)[:, :-1] for directory in (noisy_llama, tmp_path / "wider")]
    own, other = (-values.log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2) for values in logits)
    log_q, log_p = (values[..., :512].log_softmax(-1) for values in logits)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    same = (log_p.argmax(-1) == log_q.argmax(-1)).double()

    assert found.model.loss_nats_per_token.value == pytest.approx(float(own.mean()), rel=1e-5)
    assert found.model.perplexity.value == pytest.approx(math.exp(float(own.mean())), rel=1e-4)
    assert found.baseline.loss_nats_per_token.value == pytest.approx(float(other.mean()), rel=1e-5)
    compared = found.comparison
    assert compared.kl_nats_per_token.value == pytest.approx(float(kl.mean()), rel=1e-4)
    assert compared.top1_agreement.value == pytest.approx(float(same.mean()), abs=1e-9)
    assert compared.kl_nats_at_share["1"] == pytest.approx(float(kl.max()), rel=1e-4)
    assert compared.kl_nats_at_share["0.5"] == pytest.approx(float(kl.flatten().sort().values[139]), rel=1e-4)
    paired = token_mean((own - other).sum(1).tolist(), [31] * 9)
    assert compared.loss_difference_nats_per_token.value == pytest.approx(paired.value, rel=1e-4)
    assert compared.loss_difference_nats_per_token.standard_error == pytest.approx(paired.standard_error, rel=1e-4)
    assert compared.loss_difference_is_significant is True
    assert compared.compared_vocabulary == 512

    other_batches = evaluate_model(str(noisy_llama), batch_size=9, **options)
    assert other_batches.comparison.kl_nats_per_token.value == pytest.approx(compared.kl_nats_per_token.value, rel=1e-5)
    assert other_batches.model.perplexity.value == pytest.approx(found.model.perplexity.value, rel=1e-5)


def test_complete_logits_give_the_same_values(tiny_llama, noisy_llama, book, monkeypatch, caplog):
    """A model whose head cannot run on its own stays in memory and answers with logits."""
    options: dict[str, Any] = {
        "baseline": str(tiny_llama),
        "text": TextRequest(dataset=str(book), num_samples=4),
        "seq_len": 48,
    }
    caplog.set_level(logging.INFO, "shardwright")
    separate = evaluate_model(str(noisy_llama), **options)
    assert "in memory" not in caplog.text
    # What a family that rescales its logits without a setting for it looks like.
    monkeypatch.setattr(fused_loss, "logit_shape", lambda model: (2.0, None))
    whole = evaluate_model(str(noisy_llama), **options)
    assert caplog.text.count("both models stay in memory") == 1
    assert whole.comparison.kl_nats_per_token.value == pytest.approx(
        separate.comparison.kl_nats_per_token.value, rel=1e-5
    )
    assert whole.model.perplexity.value == pytest.approx(separate.model.perplexity.value, rel=1e-5)


def test_chat_is_judged_where_the_assistant_speaks(tiny_llama, tmp_path):
    rows = tmp_path / "chat.jsonl"
    lines = [{"prompt": "2 + 2 = ", "completion": "4"}, {"prompt": "say hello", "completion": "hello, world"}]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    windows = text_windows(TextRequest(dataset=str(rows)), byte_tokenizer(512), seq_len=64)
    assert windows.predicted_tokens == len("4") + 1 + len("hello, world") + 1
    options: dict[str, Any] = {"seq_len": 64}
    together = shardwright.evaluate(str(tiny_llama), batch_size=2, dataset=str(rows), **options)
    apart = evaluate_model(str(tiny_llama), batch_size=1, text=TextRequest(dataset=str(rows)), **options)
    assert together.text == apart.text
    assert together.text.predicted_tokens == windows.predicted_tokens
    assert together.model.perplexity.value == pytest.approx(apart.model.perplexity.value, rel=1e-5)


def test_a_chat_template_renders_chats_for_a_base_model(tiny_llama, tmp_path, capsys, monkeypatch):
    evaluate = shell_in(tmp_path, "evaluate", capsys, monkeypatch)
    turns = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "four"}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": turns}))
    words = (tiny_llama, "--seq-len", 64, "--format", "json", "--dataset")
    found = evaluate(*words, "chats.jsonl", "--chat-template", "alpaca")
    assert found.code == 0, found.err
    assert json.loads(found.out)["text"]["predicted_tokens"] == len("four") + 1
    found = evaluate(*words, "chats.jsonl")
    assert found.code == 2 and "need a chat template, which the tokenizer does not have" in found.err
    found = evaluate(*words, "python-help", "--chat-template", "alpaca")
    assert found.code == 2 and "has plain text, which no template renders" in found.err


def test_sizes_are_those_of_the_files_and_of_the_dense_model(tiny_llama, book, tmp_path):
    """Plain, NF4 and SpQR weights: all tensors count as stored, and parameters as those of the dense model."""
    from shardwright.trainers.formats.spqr import SpQROptions, save_small_format, spqr_quantize
    from transformers import BitsAndBytesConfig

    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    packed = AutoModelForCausalLM.from_pretrained(tiny_llama, quantization_config=nf4, device_map={"": "cpu"})
    packed.save_pretrained(tmp_path / "nf4")
    model = LlamaForCausalLM.from_pretrained(tiny_llama)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    name = "model.layers.0.mlp.up_proj"
    weight = model.get_submodule(name).weight.detach()
    matrix = spqr_quantize(weight, torch.eye(weight.shape[1]), SpQROptions(bits=4))
    save_small_format(model, {name: matrix}, tmp_path / "spqr")
    for kind, method, file in (
        (tmp_path / "nf4", "bitsandbytes", "model.safetensors"),
        (tmp_path / "spqr", "shardwright_small", "small.safetensors"),
    ):
        found = small_run(kind, book, baseline=str(tiny_llama))
        assert found.model.quantization == method and found.baseline.quantization is None
        assert 0 < found.comparison.kl_nats_per_token.value < 0.01
        own, plain = found.model.sizes, found.baseline.sizes
        assert own.parameters == plain.parameters == parameters and plain.bits_per_parameter == 32
        assert own.file_bytes == (kind / file).stat().st_size
        # The header of a file is small.
        assert own.bits_per_parameter * parameters / 8 == pytest.approx(own.file_bytes, rel=0.03)


def changed(directory: Path, target: Path, **changes: Any) -> Path:
    """Copy a model with other values in its configuration; `None` removes one."""
    shutil.copytree(directory, target)
    config = json.loads((target / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return target


def small_run(source: Path, book: Path, **options: Any) -> Any:
    text = options.pop("text", TextRequest(dataset=str(book), num_samples=2))
    options = {"seq_len": 32} | options
    return evaluate_model(str(source), text=text, **options)


def test_requests_that_cannot_be_met_are_reported_together(tiny_llama, book, tmp_path):
    with pytest.raises(UsageError) as caught:
        small_run(
            tmp_path / "nowhere", book, baseline=str(tiny_llama), seq_len=1000, batch_size=0, device="gpu7",
            dataset="rows.jsonl", text=TextRequest(dataset=str(book), num_samples=0),
        )  # fmt: skip
    text = str(caught.value)
    for part in ("nowhere", "128 positions", "--batch-size = 0", "--device = 'gpu7'",
                 "dataset = 'rows.jsonl': cannot be combined with text",
                 "--num-samples = 0"):  # fmt: skip
        assert part in text


def test_models_that_cannot_be_judged(tiny_llama, book, tmp_path):
    from safetensors.torch import load_file, save_file

    bert = changed(tiny_llama, tmp_path / "bert", architectures=["BertForMaskedLM"], model_type="bert")
    with pytest.raises(UsageError, match="BertForMaskedLM is not a causal language model"):
        small_run(bert, book)
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(tiny_llama / "config.json", bare)
    with pytest.raises(UsageError, match="has no weights"):
        small_run(bare, book)
    (bare / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(RefusedInputError, match=r"only from safetensors.*pytorch_model.bin"):
        small_run(bare, book)

    weights = load_file(tiny_llama / "model.safetensors")
    lost = changed(tiny_llama, tmp_path / "lost")
    save_file({k: v for k, v in weights.items() if "q_proj" not in k}, lost / "model.safetensors", {"format": "pt"})
    with pytest.raises(RefusedInputError, match=r"model\.layers\.0\.self_attn\.q_proj.*2 tensors are not in the check"):
        small_run(lost, book)
    broken = changed(tiny_llama, tmp_path / "broken")
    name = "model.layers.1.mlp.up_proj.weight"
    save_file(weights | {name: weights[name] * float("nan")}, broken / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        RefusedInputError, match=r"model .*broken: gives NaN or infinity for the token at position 2 of windo"
    ):
        small_run(broken, book)
    with pytest.raises(RefusedInputError, match=r"baseline .*broken: gives NaN or infinity"):
        small_run(tiny_llama, book, baseline=str(broken))
    (broken / "model.safetensors").write_bytes((tiny_llama / "model.safetensors").read_bytes()[:-10])
    with pytest.raises(RefusedInputError, match="is not a complete safetensors file"):
        small_run(broken, book)


def test_baselines_with_other_tokens(tiny_llama, book, tmp_path, caplog):
    model, baseline = changed(tiny_llama, tmp_path / "model"), changed(tiny_llama, tmp_path / "baseline")
    tokenizer = byte_tokenizer(512)
    tokenizer.save_pretrained(model)
    tokenizer.add_tokens(["<extra>"])
    tokenizer.save_pretrained(baseline)
    with pytest.raises(UsageError, match=r"token 257 is None for the model and '<extra>' for the baseline; compare"):
        small_run(model, book, baseline=str(baseline))
    narrow = tmp_path / "narrow"
    llama(vocab_size=256, max_position_embeddings=128).save_pretrained(narrow)
    with pytest.raises(UsageError, match="narrow has 256 tokens, but the tokenizer's largest id is 256"):
        small_run(model, book, baseline=str(narrow))
    caplog.set_level(logging.INFO, "shardwright")
    found = small_run(changed(tiny_llama, tmp_path / "none"), book, baseline=str(model), seq_len=None)
    assert "using the baseline's" in caplog.text
    assert found.text.seq_len_tokens == 128, "the positions of the models"


def test_a_loss_that_is_no_number_is_found_in_its_window() -> None:
    """Second of the third batch of two: the first window is not labelled at its start."""
    rows = [{"input_ids": [1, 2, 3, 4], "labels": [-100, -100, 3, 4]}, {"input_ids": [1, 2, 3], "labels": [1, 2, 3]}]
    losses = torch.tensor([1.0, 1.0, 1.0, math.inf])
    with pytest.raises(RefusedInputError, match=r"token at position 3 of window 6 \(1 of 4 tokens of its batch\)"):
        measures.check_finite("model", losses, collate(rows), first_window=4)


def test_a_head_that_runs_twice_answers_with_logits(tiny_llama: Path) -> None:
    class Twice(LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            self.lm_head(torch.zeros(1, 1, self.config.hidden_size))
            return super().forward(*args, **kwargs)

    batch = collate([{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}])
    read = []
    for kind in (LlamaForCausalLM, Twice):
        reader = measures.ModelReader(kind.from_pretrained(tiny_llama).eval(), name="model")
        rows, head = reader.answers(batch, measures.judged(batch))
        with torch.inference_mode():
            read.append((reader.head is None, head(rows)))
    assert [used for used, _ in read] == [False, True]
    torch.testing.assert_close(read[1][1], read[0][1])
