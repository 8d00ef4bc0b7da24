"""Completions that the student samples, as training batches."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ...ds_configs.specs.errors import Fault, UsageError
from ..data.chat import IGNORED_LABEL
from .config import OnPolicy

if TYPE_CHECKING:
    import torch


def is_generated(config: OnPolicy, seed: int, step: int, index: int) -> bool:
    """Decide whether a micro-batch is generated; the same on all ranks, which must generate together."""
    return random.Random(f"{seed} {step} {index}").random() < config.fraction


@contextmanager
def own_randomness(*numbers: int) -> Iterator[None]:
    """Draw from a generator of its own inside the block: other numbers on every rank, the same after resuming."""
    import torch

    digest = hashlib.sha256(repr(numbers).encode()).digest()
    with torch.random.fork_rng():
        torch.manual_seed(int.from_bytes(digest[:7], "big"))
        yield


def prompts_of(batch: dict[str, Any], prompt_tokens: int | None) -> list[list[int]]:
    """Return the prompt of each sample: its first tokens, or those before the first label.

    Raises:
        UsageError: a sample has no prompt.
    """
    mask_BS = batch.get("attention_mask")
    prompts = []
    for row, ids_S in enumerate(batch["input_ids"]):
        labels_S = batch["labels"][row]
        valid = [True] * len(ids_S) if mask_BS is None else [bool(kept) for kept in mask_BS[row].tolist()]
        labelled = [position for position, label in enumerate(labels_S.tolist()) if label != IGNORED_LABEL]
        first_label = labelled[0] if labelled else len(valid)
        end = first_label if prompt_tokens is None else prompt_tokens
        prompt = [token for token, kept in zip(ids_S.tolist()[:end], valid[:end], strict=True) if kept]
        if not prompt:
            rule = "a sample is labelled from its first token on, so nothing of it is a prompt"
            raise UsageError(Fault(where="on_policy", rule=rule, fix="set on_policy.prompt_tokens"))
        prompts.append(prompt)
    return prompts


def completed_batch(prompts: list[list[int]], completions: list[list[int]], pad_token_id: int) -> dict[str, Any]:
    """Return right-padded `input_ids`, `attention_mask` and `labels` with the prompts masked, each [B, S]."""
    import torch

    longest = max(len(prompt) + len(completion) for prompt, completion in zip(prompts, completions, strict=True))
    ids_BS = torch.full((len(prompts), longest), pad_token_id)
    labels_BS = torch.full((len(prompts), longest), IGNORED_LABEL)
    mask_BS = torch.zeros(len(prompts), longest, dtype=torch.long)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        tokens = [*prompt, *completion]
        ids_BS[row, : len(tokens)] = torch.tensor(tokens)
        labels_BS[row, len(prompt) : len(tokens)] = torch.tensor(completion, dtype=torch.long)
        mask_BS[row, : len(tokens)] = 1
    return {"input_ids": ids_BS, "attention_mask": mask_BS, "labels": labels_BS}


def generate(
    model: Any, engine: Any, tokenizer: Any, prompts: list[list[int]], config: OnPolicy, *, synced: bool, device: Any
) -> list[list[int]]:
    """Sample one completion for each prompt, up to and with its first end-of-sequence token.

    Under DeepSpeed its own rollout generates (deepspeed 0.19.8, deepspeed/runtime/rollout), which keeps the number of
    ZeRO-3 gathers equal on all ranks; otherwise `generate` of Transformers does.
    """
    import torch

    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    longest = max(len(prompt) for prompt in prompts)
    ids_BS = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts], device=device)
    mask_BS = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            if engine is not None:
                output_BS = _rollout(engine, tokenizer, ids_BS, mask_BS, config)
            else:
                output_BS = model.generate(
                    input_ids=ids_BS,
                    attention_mask=mask_BS,
                    do_sample=True,
                    max_new_tokens=config.max_new_tokens,
                    temperature=config.temperature,
                    top_p=config.top_p,
                    top_k=config.top_k,
                    pad_token_id=pad,
                    eos_token_id=tokenizer.eos_token_id,
                    synced_gpus=synced,
                )
    finally:
        model.train(training)
    return [_until_end(row[longest:].tolist(), tokenizer.eos_token_id) for row in output_BS]


def _rollout(
    engine: Any, tokenizer: Any, ids_BS: torch.Tensor, mask_BS: torch.Tensor, config: OnPolicy
) -> torch.Tensor:
    from deepspeed.runtime.rollout import HybridEngineRollout, RolloutRequest, SamplingConfig

    request = RolloutRequest(prompt_ids=ids_BS, prompt_attention_mask=mask_BS)
    sampling = SamplingConfig(
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        n_samples_per_prompt=1,
    )
    batch = HybridEngineRollout(engine=engine, tokenizer=tokenizer).generate(request, sampling)
    output_BS: torch.Tensor = batch.input_ids
    return output_BS


def _until_end(tokens: list[int], end: int | None) -> list[int]:
    return tokens[: tokens.index(end) + 1] if end in tokens else tokens


def completed_by_student(trainer: Any, batch: dict[str, Any], own: OnPolicy, index: int) -> dict[str, Any]:
    """Return the prompts of a micro-batch, by its number in the step, with what the student makes of them."""
    tokenizer, arguments, step = trainer.processing_class, trainer.args, trainer.state.global_step
    engine = trainer.model_wrapped if trainer.is_deepspeed_enabled else None
    prompts = prompts_of(batch, own.prompt_tokens)
    with own_randomness(arguments.seed, step, index, arguments.process_index):
        completions = generate(
            trainer.model, engine, tokenizer, prompts, own, synced=trainer.is_fsdp_enabled, device=arguments.device
        )
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return completed_batch(prompts, completions, pad)
