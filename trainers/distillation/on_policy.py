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
    from transformers import Trainer


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


def completed_by_student(trainer: Trainer, batch: dict[str, Any], own: OnPolicy, index: int) -> dict[str, Any]:
    """Return a micro-batch, by its index in the step, with one completion by the student of each of its prompts.

    Completions end with their first end-of-sequence token, and only they have labels. All ranks generate until the last
    one has finished, because each token gathers sharded weights.
    """
    import torch

    model, tokenizer, arguments = trainer.model, trainer.processing_class, trainer.args
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    stated = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ends = {tokenizer.eos_token_id, *(stated if isinstance(stated, list) else [stated])} - {None}
    prompts = prompts_of(batch, own.prompt_tokens)
    longest = max(len(prompt) for prompt in prompts)
    ids = [[pad] * (longest - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    randomness = own_randomness(arguments.seed, trainer.state.global_step, index, arguments.process_index)
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), randomness:
            output_BS = model.generate(
                input_ids=torch.tensor(ids, device=arguments.device),
                attention_mask=torch.tensor(mask, device=arguments.device),
                max_new_tokens=own.max_new_tokens,
                do_sample=True,
                temperature=1.0,
                top_p=1.0,
                top_k=0,
                pad_token_id=pad,
                eos_token_id=sorted(ends) or None,
                synced_gpus=trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled,
            )
    finally:
        model.train(training)
    samples = []
    for prompt, row in zip(prompts, output_BS, strict=True):
        tokens = row[longest:].tolist()
        length = next((at + 1 for at, token in enumerate(tokens) if token in ends), None)
        completion = tokens[:length]
        samples.append({"input_ids": [*prompt, *completion], "labels": [IGNORED_LABEL] * len(prompt) + completion})
    return collate(samples, pad_token_id=pad)
