"""Memory of the phases before an update of a task that generates: completions, and their scores.

Phases follow each other on the same ranks: each has what is always resident and its own peak, and a plan is the largest
phase, never a sum.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from ..serving import RUNTIME_BYTES, CachedLayer, key_value_cache, workspace_bytes
from ..specs.job import TrainingJob
from ..specs.layout import Layout
from ..specs.model import ModelSpec
from ..specs.terms import Term
from .communication import forward_gathered_elements
from .layers import weight_copies
from .rank_parameters import Moment, RankStep, Terms, summed
from .second_models import forward_bytes, head_pass, running_terms

TERMS = (
    Term("kv_cache", "keys and values of all completions that `generate` makes together", role="activations"),
    Term(
        "generation_weights",
        "all parameters, gathered while `generate` runs under ZeRO-3 (ds3_gather_for_generation); PPO also gathers "
        "those of the value model",
        role="buckets",
    ),
    Term(
        "generation_activations",
        "one layer of the prompts, or logits of the next tokens with their fp32 copies while they are sampled; PPO "
        "keeps the scores of all tokens",
        role="activations",
    ),
    Term(
        "vllm_engine",
        "colocated vLLM: weights, workspace, CUDA graphs and cache blocks; with sleep only while it generates",
    ),
    Term(
        "vllm_synchronization",
        "parameters on their way to vLLM: the largest one, or with adapters all of them",
        role="buckets",
    ),
    Term("scoring_gathered", "parameters that a forward pass without gradients gathers", role="buckets"),
    Term(
        "scoring_activations",
        "one layer, and the output head, of a forward pass without gradients over completions",
        role="activations",
    ),
)

VLLM_BATCHED_TOKENS = 4096
"""Tokens per step of a colocated engine (trl 1.16.0, generation/vllm_generation.py:359)."""

_SAMPLED_LOGIT_BYTES = 4 + 4 + 4
"""fp32 bytes per logit while `generate` samples: the copy, scaled by the temperature, and probabilities (transformers
5.17.0, generation/utils.py `_sample`)."""


def generated_sequences(layout: Layout, job: TrainingJob) -> int:
    """Return the completions that a rank generates together.

    GRPO and RLOO generate for several micro-batches ahead, by default for those of an optimizer step
    (`steps_per_generation`, trl 1.16.0), PPO for those of an optimizer step, GKD for one.
    """
    if job.task == "gkd":
        return layout.micro_batch_size
    return layout.micro_batch_size * (job.steps_per_generation or layout.gradient_accumulation_steps)


def cache_bytes(model: ModelSpec, sequences: int, tokens: int, element: int) -> int:
    """Return the bytes of keys and values of all layers; layers with a window keep its tokens (`DynamicCache`)."""
    sizes = model.dimensions
    windowed = windowed_layers(model)
    window = min(tokens, model.sliding_window or tokens)
    kept = (sizes.num_layers - windowed) * tokens + windowed * window
    return 2 * element * sequences * kept * sizes.key_value_size


def windowed_layers(model: ModelSpec) -> int:
    """Return the layers whose attention has a window; of families that mix both kinds, by their usual pattern."""
    layers = model.dimensions.num_layers
    if not model.sliding_window:
        return 0
    every = {"gemma2": 2, "gemma3_text": 6, "gpt_oss": 2}.get(model.model_type)
    return layers - layers // every if every else layers


def vllm_bytes(layout: Layout, model: ModelSpec, job: TrainingJob) -> int:
    """Return the bytes on a GPU that a colocated engine needs for all completions of its ranks together.

    Weights in 16 bits over its ranks, the workspace of a step, CUDA graphs, and cache blocks of 16 tokens.
    """
    size = job.vllm_tensor_parallel_size or 1
    sizes = model.dimensions
    heads = max(1, sizes.num_key_value_heads // size)
    windowed = windowed_layers(model)
    per_head = 2 * sizes.key_value_size // max(1, sizes.num_key_value_heads)
    full = CachedLayer(heads=heads, numbers_per_head=per_head)
    layers = [full] * (sizes.num_layers - windowed)
    layers += [replace(full, window=model.sliding_window)] * windowed
    cache = key_value_cache(tuple(layers), number_bytes=2, block_tokens=16)
    sequences = size * generated_sequences(layout, job)
    blocks = sequences * cache.sequence_blocks(job.seq_len_tokens, tokens_in_flight=VLLM_BATCHED_TOKENS) + 1
    work = workspace_bytes(sizes, tensor_parallel_size=size, batched_tokens=VLLM_BATCHED_TOKENS, sequences=sequences)
    weights = 2 * model.parameter_count // size
    return weights + max(work.values()) + RUNTIME_BYTES + blocks * cache.block_bytes


def vllm_share(layout: Layout, model: ModelSpec, job: TrainingJob, device_bytes: int) -> float:
    """Return the share of a GPU for a colocated engine: as requested, or as much as `vllm_bytes`, in percent."""
    return job.vllm_memory_share or ceil(100 * vllm_bytes(layout, model, job) / device_bytes) / 100


def generation_moments(step: RankStep, resident: Terms, *, engine_bytes: int) -> dict[Moment, Terms]:
    """Return the named bytes of a rank while it generates and while it scores.

    `resident` is what every moment of a step has, and `engine_bytes` what a colocated vLLM uses.
    """
    job, model = step.job, step.model
    if job.generation in ("vllm", "vllm-server"):
        own, sent = engine_bytes if job.generation == "vllm" else 0, 0
        if step.layout.shards_parameters:
            # Parameters are gathered while they are sent (trl 1.16.0, `_iter_named_params`): of adapters all together.
            sends_all = job.method != "full" and step.layout.zero_stage == 3
            sent = job.compute_bytes * (model.parameter_count if sends_all else model.largest_parameter)
        generating = summed(resident, {"vllm_engine": own, "vllm_synchronization": sent})
    else:
        generating = summed(resident, _generate_terms(step))
    # FSDP2 keeps the unit of norm and head gathered from a forward pass without gradients to the next backward pass.
    root = {"scoring_gathered": job.compute_bytes * model.tail_parameters} if step.layout.engine == "fsdp2" else {}
    scoring = [root]
    if scores_completions(step.layout, job):
        # The trained model's forward pass over a micro-batch of completions, without gradients.
        gathered = 0
        if step.layout.shards_parameters:
            gathered = job.compute_bytes * forward_gathered_elements(step.layout.engine, model, step.layout.zero)
        layers = forward_bytes(step.layout, model, job), gathered
        head = head_pass(step.layout, model, job, is_divided=gathered > 0, gpu=step.on_gpu)
        activations, gathered = max(layers, head, key=sum)
        terms = {"scoring_gathered": gathered, "scoring_activations": activations}
        scoring = [terms | autocast_copies(step)]
    for second in job.second_models:
        if not second.trained and second.planned_placement != "cached" and not second.is_imitated:
            # A reward model reads all completions together (`_calculate_rewards`).
            together = step.layout.changed(micro_batch_size=generated_sequences(step.layout, job))
            layout = together if second.role == "reward" else step.layout
            scoring.append(summed(root, running_terms(second, layout, job, gpu=step.on_gpu)))
    largest = max(scoring, key=lambda terms: sum(terms.values()))
    awake = {"vllm_engine": engine_bytes} if job.generation == "vllm" and job.vllm_sleep != "on" else {}
    return {"generate": generating, "score": summed(resident, awake, largest)}


def _generate_terms(step: RankStep) -> Terms:
    layout, model, job = step.layout, step.model, step.job
    sizes, width = model.dimensions, job.compute_bytes
    sequences, tokens = generated_sequences(layout, job), job.seq_len_tokens
    cache = cache_bytes(model, sequences, tokens, width)
    # The cache of a layer grows in a copy (`DynamicLayer.update`).
    cache += width * sequences * tokens * sizes.key_value_size
    prompts = replace(job, seq_len_tokens=max(1, tokens - job.generated_tokens))
    prefill = forward_bytes(layout.changed(micro_batch_size=sequences), model, prompts)
    sampling = sequences * sizes.vocab_size * (width + _SAMPLED_LOGIT_BYTES)
    together = model.parameter_count
    if job.task == "ppo":
        # It keeps and stacks the fp32 scores of every token, and has policy and value model in one module, which is
        # gathered (trl 1.9.0, experimental/ppo/ppo_trainer.py, `generate` and `PolicyAndValueWrapper`).
        sampling = max(sampling, 2 * 4 * sequences * job.generated_tokens * sizes.vocab_size)
        together += sum(second.spec.parameter_count for second in job.second_models if second.trained)
    activations, gathered = max(prefill, sampling), width * together if layout.zero_stage == 3 else 0
    if layout.engine == "fsdp2":
        # Layers are gathered again for every token, as metered beside embedding and head from the second one on.
        outside, layers = width * model.parameters_outside_layers, 2 * width * model.layer_parameter_count
        activations, gathered = max((prefill, layers), (0, outside + layers), (sampling, outside), key=sum)
    terms = {"kv_cache": cache, "generation_activations": activations, **autocast_copies(step)}
    return terms | ({"generation_weights": gathered} if gathered else {})


def scores_completions(layout: Layout, job: TrainingJob) -> bool:
    """Return whether the trained model computes log-probabilities of completions before the update.

    RLOO always does; GRPO to correct those of vLLM, and if an update uses completions of several generations
    (trl 1.16.0, grpo_trainer.py, `_generate_and_score_completions`); PPO does.
    """
    if job.task == "grpo":
        steps = job.steps_per_generation or layout.gradient_accumulation_steps
        return job.generation in ("vllm", "vllm-server") or layout.gradient_accumulation_steps % steps != 0
    return job.task in ("rloo", "ppo")


def autocast_copies(step: RankStep) -> Terms:
    """Return the 16-bit copies of all trained matrices that autocast keeps during a forward pass."""
    copies = weight_copies(step)["forward_end"].get("autocast_weight_copies", 0)
    return {"autocast_weight_copies": copies}
