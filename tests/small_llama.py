"""A Llama of two million parameters that learns real text within a minute, for tests of quantization quality.

Perplexities are of tokens, on text that was not trained on.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

VOCAB_SIZE = 512
HIDDEN_SIZE = 256
INTERMEDIATE_SIZE = 768
LAYERS = 2
SEQ_LEN = 128
BATCH_SIZE = 4
STEPS = 450
STEPS_OF_TESTS = 200
"""Tests take a model that knows less, for which every order of methods holds as well."""
LEARNING_RATE = 4e-3
EVALUATION_ROWS = 96
"""Rows of `SEQ_LEN` tokens that are held out."""
ROWS_FILE = "rows.safetensors"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedLlama:
    directory: Path
    """Checkpoint with tokenizer, of the same numbers as `model`."""
    model: Any
    """In evaluation mode; its weights are bf16 numbers stored in fp32, because CPUs are slow at bf16."""
    tokenizer: Any
    """Bytes merged into `VOCAB_SIZE` tokens."""
    train_NS: torch.Tensor
    """Token ids that were trained on; calibration takes from here."""
    evaluation_NS: torch.Tensor
    """Token ids that were held out."""

    def copy(self) -> Any:
        from transformers import LlamaForCausalLM

        return LlamaForCausalLM.from_pretrained(self.directory, dtype=torch.float32).eval().requires_grad_(False)


def _merged_tokenizer(documents: list[str]) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    end = "<|endoftext|>"
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=[end], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(documents, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, pad_token=end)


def _blocks(documents: list[str]) -> tuple[Any, torch.Tensor]:
    tokenizer = _merged_tokenizer(documents)
    encoded = tokenizer(documents, add_special_tokens=False)["input_ids"]
    tokens = [token for document in encoded for token in [*document, tokenizer.eos_token_id]]
    count = len(tokens) // SEQ_LEN
    blocks_NS = torch.tensor(tokens[: count * SEQ_LEN]).view(count, SEQ_LEN)
    return tokenizer, blocks_NS


def _untrained(seed: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM, set_seed

    set_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=INTERMEDIATE_SIZE,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=SEQ_LEN,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=0,
    )
    return LlamaForCausalLM(config)


def shared_llama(tmp_path_factory: Any) -> TrainedLlama:
    """Return the model for a fixture; test processes that run side by side train it once between them."""
    base = tmp_path_factory.getbasetemp()
    return trained_llama(base.parent if "PYTEST_XDIST_WORKER" in os.environ else base, steps=STEPS_OF_TESTS)


@functools.cache
def trained_llama(parent: Path, *, steps: int = STEPS) -> TrainedLlama:
    """Train on the help topics that ship with Python, below `parent`, or load what lies there already."""
    from filelock import FileLock
    from safetensors.torch import load_file
    from transformers import AutoTokenizer, LlamaForCausalLM

    directory = parent / "small-llama"
    with FileLock(parent / "small-llama.lock"):
        if not (directory / ROWS_FILE).exists():
            _train(directory, steps)
    rows = load_file(directory / ROWS_FILE)
    return TrainedLlama(
        directory=directory,
        model=LlamaForCausalLM.from_pretrained(directory).eval().requires_grad_(False),
        tokenizer=AutoTokenizer.from_pretrained(directory),
        train_NS=rows["train"],
        evaluation_NS=rows["evaluation"],
    )


def _train(directory: Path, steps: int, seed: int = 0) -> None:
    from pydoc_data.topics import topics

    from safetensors.torch import save_file

    directory.mkdir(exist_ok=True)
    tokenizer, blocks_NS = _blocks([topics[name] for name in sorted(topics)])
    draw = torch.Generator().manual_seed(seed)
    blocks_NS = blocks_NS[torch.randperm(len(blocks_NS), generator=draw)]
    evaluation_NS, train_NS = blocks_NS[:EVALUATION_ROWS], blocks_NS[EVALUATION_ROWS:]
    model = _untrained(seed).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    order = torch.cat([torch.randperm(len(train_NS), generator=draw) for _ in range(8)])
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min((step + 1) / 20, 1 - step / steps)
        batch_BS = train_NS[order[step * BATCH_SIZE : (step + 1) * BATCH_SIZE]]
        loss = model(input_ids=batch_BS, labels=batch_BS).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    # Written last: its presence says that the rest is there.
    save_file({"train": train_NS.contiguous(), "evaluation": evaluation_NS.contiguous()}, directory / ROWS_FILE)


@torch.no_grad()
def row_losses(model: Any, rows_NS: torch.Tensor, *, batch_size: int = 16) -> torch.Tensor:
    """Return each row's mean cross-entropy in nats per token, [N] in fp64."""
    losses = []
    for batch_BS in rows_NS.split(batch_size):
        logits_BSV = model(input_ids=batch_BS).logits.float()[:, :-1]
        loss_BS = torch.nn.functional.cross_entropy(logits_BSV.transpose(1, 2), batch_BS[:, 1:], reduction="none")
        losses.append(loss_BS.double().mean(dim=1))
    return torch.cat(losses)


def row_divergences(model: Any, dense: Any, rows_NS: torch.Tensor, *, batch_size: int = 16) -> torch.Tensor:
    """Return KL(dense | model) in nats per token, one value for each row.

    Differences of losses are mostly chance on a text this short; how far the distributions lie apart is not.
    """
    found = []
    with torch.inference_mode():
        for ids_BS in rows_NS.split(batch_size):
            both = (each(input_ids=ids_BS).logits[:, :-1].float().log_softmax(-1) for each in (dense, model))
            log_dense, log_model = both
            found.append((log_dense.exp() * (log_dense - log_model)).sum(-1).mean(1))
    return torch.cat(found).double()


@torch.no_grad()
def inject_outliers(model: Any, channels: Iterable[int], *, factor: float = 50.0) -> Any:
    """Scale hidden channels behind every norm and take the factor out of the weights that read them, in place.

    With `h = norm(x)·g`, `W·h = (W·diag(1/s))·(diag(s)·h)`: the function is the same up to rounding, and the inputs of
    the query, key, value, gate and up projections have `factor` times larger values in these channels.
    """
    index = torch.tensor(sorted(channels))
    for layer in model.model.layers:
        attention, feed_forward = layer.self_attn, layer.mlp
        for norm, readers in (
            (layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
            (layer.post_attention_layernorm, (feed_forward.gate_proj, feed_forward.up_proj)),
        ):
            norm.weight[index] *= factor
            for reader in readers:
                reader.weight[:, index] /= factor
    return model
