"""Completions sampled from the student, as training batches."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ...ds_configs.specs.errors import ConfigError, UsageError
from ..data.chat import IGNORED_LABEL
from ..data.samples import collate
from .config import OnPolicy

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer


def is_generated(config: OnPolicy, seed: int, step: int, index: int) -> bool:
    """Return whether a micro-batch is generated; equal on all ranks, which must generate together."""
    return random.Random(f"{seed} {step} {index}").random() < config.fraction


@contextmanager
def own_randomness(*numbers: int) -> Iterator[None]:
    """Seed random numbers by `numbers` inside the block, e.g. step and rank, so that resuming repeats them."""
    import torch

    digest = hashlib.sha256(repr(numbers).encode()).digest()
    with torch.random.fork_rng():
        torch.manual_seed(int.from_bytes(digest[:7], "big"))
        yield


def prompts_of(batch: dict[str, Any], prompt_tokens: int | None) -> list[list[int]]:
    """Return the prompt of each sample: its first tokens, or the tokens before the first label.

    Raises:
        UsageError: a sample has no prompt.
    """
    mask_BS = batch.get("attention_mask")
    prompts = []
    for row, ids_S in enumerate(batch["input_ids"]):
        labels_S = batch["labels"][row]
        is_token = [1] * len(ids_S) if mask_BS is None else mask_BS[row].tolist()
        labelled = (position for position, label in enumerate(labels_S.tolist()) if label != IGNORED_LABEL)
        end = next(labelled, len(ids_S)) if prompt_tokens is None else prompt_tokens
        prompt = [token for token, counts in zip(ids_S.tolist()[:end], is_token[:end], strict=True) if counts]
        if not prompt:
            rule = "a sample has no prompt, because its first token is labelled"
            raise UsageError(ConfigError(where="on_policy", rule=rule, fix="set on_policy.prompt_tokens"))
        prompts.append(prompt)
    return prompts


def completed_batch(prompts: list[list[int]], completions: list[list[int]], pad_token_id: int) -> dict[str, Any]:
    """Return right-padded `input_ids`, `attention_mask` and `labels` with the prompts masked, each [B, S]."""
    samples = [
        {"input_ids": [*prompt, *completion], "labels": [IGNORED_LABEL] * len(prompt) + completion}
        for prompt, completion in zip(prompts, completions, strict=True)
    ]
    return collate(samples, pad_token_id=pad_token_id)


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[list[int]],
    config: OnPolicy,
    *,
    synced: bool,
    device: torch.device,
) -> list[list[int]]:
    """Sample one completion for each prompt, up to and including its first end-of-sequence token.

    With `synced`, all ranks generate until the last one has finished, because each token gathers sharded weights.
    """
    import torch

    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    own = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ends = {tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])} - {None}
    longest = max(len(prompt) for prompt in prompts)
    ids_BS = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts], device=device)
    mask_BS = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            output_BS = model.generate(
                input_ids=ids_BS,
                attention_mask=mask_BS,
                max_new_tokens=config.max_new_tokens,
                do_sample=True,
                temperature=1.0,
                top_p=1.0,
                top_k=0,
                pad_token_id=pad,
                eos_token_id=sorted(ends) or None,
                synced_gpus=synced,
            )
    finally:
        model.train(training)
    completions = [row[longest:].tolist() for row in output_BS]
    lengths = [next((at + 1 for at, token in enumerate(tokens) if token in ends), None) for tokens in completions]
    return [tokens[:length] for tokens, length in zip(completions, lengths, strict=True)]


def completed_by_student(trainer: Trainer, batch: dict[str, Any], own: OnPolicy, index: int) -> dict[str, Any]:
    """Return a micro-batch, by its index in the step, with the student's completions of its prompts."""
    tokenizer, arguments, step = trainer.processing_class, trainer.args, trainer.state.global_step
    synced = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    prompts = prompts_of(batch, own.prompt_tokens)
    with own_randomness(arguments.seed, step, index, arguments.process_index):
        completions = generate(trainer.model, tokenizer, prompts, own, synced=synced, device=arguments.device)
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return completed_batch(prompts, completions, pad)
