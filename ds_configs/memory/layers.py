"""Activations of the layers at each moment of a step, and copies of weights that a pass makes."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import ceil

from ..specs.job import TrainingJob
from ..specs.layout import Layout
from ..specs.model import ModelSpec, adapted_experts, targeted_linears
from ..specs.tasks import TASKS, in_sequences
from ..specs.terms import Term
from .activations import (
    SMALLEST_MASK_TOKENS,
    ActivationEstimate,
    Attention,
    activation_mode,
    activations_of,
    has_fused_loss,
    mlp_tiles,
    tiled_mlp_elements,
    with_attention,
    with_tiled_mlp,
)
from .loss import with_tiled_loss
from .rank_parameters import PHASES, Moment, RankShare, RankStep, Terms, at_moments, share_parameters

TERMS = (
    Term(
        "activations",
        "what layers keep for the backward pass: traced bytes of a layer times layers; with checkpointing their inputs",
        role="activations",
    ),
    Term(
        "checkpoint_staging",
        "inputs of recomputed layers on the accelerator while the others are in host memory: one in use and "
        "one that a side stream copies",
        role="activations",
    ),
    Term(
        "offloaded_checkpoints",
        "inputs of recomputed layers that wait for the backward pass in pinned host memory",
        role="activations",
        lives_on="host",
    ),
    Term(
        "activations_in_flight",
        "pipeline: activations of the other micro-batches that wait for their backward pass, "
        "min(m, p - stage) - 1 of them",
        role="activations",
    ),
    Term(
        "stage_borders",
        "pipeline: received and sent tensors that wait for their gradients, and the receive buffer",
        role="activations",
    ),
    Term(
        "autocast_weight_copies",
        "autocast keeps a 16-bit copy of each fp32 matrix until the backward pass has used it",
        role="activations",
    ),
    Term(
        "adapted_expert_copies",
        "LoRA on fused experts keeps each adapted expert matrix until the backward pass",
        role="activations",
    ),
    Term("adapted_expert_update", "the update that LoRA adds to an expert matrix, during the sum", role="activations"),
    Term(
        "dora_norms",
        "DoRA computes the norms of a weight with its update: an identity matrix, products with it, and the sum",
        role="activations",
    ),
    Term(
        "forward_transient",
        "temporaries of a checkpointed layer's forward pass; under CP those of ring attention",
        role="activations",
    ),
    Term(
        "backward_transient",
        "activation gradients inside one layer at its fullest moment; with checkpointing also its recomputed "
        "activations, and under CP the buffers of ring attention",
        role="activations",
    ),
    Term(
        "reentrant_output",
        "the output of a layer, which reentrant recomputation keeps until the layer's backward pass ends",
        role="activations",
    ),
    Term(
        "tile_gradients",
        "gradients of a tiled MLP's weights: the sum over tiles, and those of the next tile",
        role="gradients",
    ),
    Term("dequantized_weight", "the largest 4-bit weight, dequantized for one product", role="weights"),
)

_CASTING_NORMS = ("gemma2", "gemma3_text", "llama", "mistral", "mixtral", "phi3", "qwen2", "qwen3", "qwen3_moe")
"""Model types whose norms save a copy of their input in fp32 instead of the input."""

STAGING_BUFFERS = 2
"""Layer inputs on the accelerator while others are in host memory: one in use, and one that a side stream copies."""


def rank_step(
    layout: Layout, share: RankShare, job: TrainingJob, *, unmasked: Attention = "auto", gpu: bool = True
) -> RankStep:
    """Return a rank's micro-batch with the bytes of its activations."""
    size, engine = layout.micro_batch_size, layout.engine
    # Many candidates of a search differ in nothing else that a layer's bytes depend on.
    same = Layout(engine=engine, micro_batch_size=size, sp=layout.sp, cp=layout.cp, tiled_mlp=layout.tiled_mlp)
    traced = _layer_bytes(same, share.model, job, share.has_head, unmasked, gpu)
    return RankStep(layout=layout, share=share, job=job, traced=traced, mode=activation_mode(layout, job), on_gpu=gpu)


@lru_cache(maxsize=1024)
def _layer_bytes(
    layout: Layout, model: ModelSpec, job: TrainingJob, has_head: bool, unmasked: Attention, gpu: bool
) -> ActivationEstimate:
    mode = activation_mode(layout, job)
    if TASKS[job.task].pads and (layout.micro_batch_size > 1 or model.sliding_window):
        # Sequences of different lengths have a padding mask, with which windows do not run in blocks.
        unmasked = "masked"
    # Tiles of the loss are part of the eager one.
    tiles_loss = job.loss == "chunked" and not has_fused_loss(model, layout, job, gpu=gpu)
    counted = replace(job, loss="eager") if tiles_loss else job
    traced = activations_of(model, counted, layout.micro_batch_size, mode, unmasked=unmasked)
    if tiles_loss:
        traced = with_tiled_loss(layout, model, job, traced)
    if layout.tiled_mlp:
        traced = with_tiled_mlp(traced, 1 / mlp_tiles(model, ceil(job.seq_len_tokens / (layout.sp * layout.cp))))
    tokens = layout.micro_batch_size * job.seq_len_tokens
    if unmasked == "masked" and model.sliding_window and layout.micro_batch_size > 1:
        # Stored layers have the mask of their windows; padding adds that of full attention.
        mask = tokens * job.seq_len_tokens
        traced = replace(traced, outside_layer_bytes=traced.outside_layer_bytes + mask)
    traced = with_attention(traced, model.dimensions, tokens, layout=layout, element=job.compute_bytes, on_gpu=gpu)
    if layout.cp > 1 and job.seq_len_tokens // layout.cp < SMALLEST_MASK_TOKENS:
        # A rank has two parts of a sequence, which Transformers takes for packed documents and makes a boolean mask.
        mask = tokens * job.seq_len_tokens // layout.cp
        traced = replace(traced, outside_layer_bytes=traced.outside_layer_bytes + mask)
    if not has_head:
        # Without the final norm only rotary tables and masks are outside of layers.
        bare = replace(model, dimensions=replace(model.dimensions, hidden_size=0))
        rest = activations_of(bare, replace(job, loss="eager"), layout.micro_batch_size, mode)
        traced = replace(traced, outside_layer_bytes=rest.outside_layer_bytes)
    return traced


def checkpoint_bytes(layout: Layout, traced: ActivationEstimate) -> int:
    """Return the bytes of the input of one recomputed layer on a rank."""
    return traced.checkpointed_bytes_per_layer // (layout.sp * layout.cp)


def offloaded_inputs(
    layout: Layout, model: ModelSpec, job: TrainingJob, *, unmasked: Attention = "auto"
) -> tuple[int, int]:
    """Return how many inputs of recomputed layers wait in host memory for a rank, and the bytes of one."""
    if not (count := layout.offloaded_layers(model.dimensions.num_layers)):
        return 0, 0
    sequences = in_sequences(layout, job.task).micro_batch_size
    traced = activations_of(model, job, sequences, activation_mode(layout, job), unmasked=unmasked)
    return count, checkpoint_bytes(layout, traced)


def _mask_bytes(step: RankStep) -> int:
    """Return the bytes of the dropout masks of a layer, which its backward pass needs."""
    return step.model.residual_dropout_masks * step.tokens * step.model.dimensions.hidden_size


def _kept_bytes(step: RankStep, layers: int) -> int:
    """Return the bytes that the first `layers` keep until their backward passes; the first are the recomputed ones.

    A vision tower runs before them, and keeps its own.
    """
    total = step.model.dimensions.num_layers
    recomputed = min(layers, step.layout.recomputed_layers(total))
    kept = (layers - recomputed) * (step.traced.saved_bytes_per_layer + _mask_bytes(step))
    recomputes_tower = step.layout.gradient_checkpointing and step.job.vision_checkpointing == "auto"
    kept += step.traced.tower_checkpointed_bytes if recomputes_tower else step.traced.tower_saved_bytes
    if on_accelerator := max(0, recomputed - step.layout.offloaded_layers(total)):
        kept += on_accelerator * step.traced.checkpointed_bytes_per_layer
    return kept


def activation_terms(step: RankStep) -> dict[Moment, Terms]:
    """Return the named bytes of activations at each moment, without those of the loss, also of a pipeline stage.

    The activations of all layers exist until the last layer's backward pass; the first layer's is the last to run.
    """
    layout, model, job, traced, ranks = step.layout, step.model, step.job, step.traced, step.ranks
    layers = model.dimensions.num_layers
    recomputed = layout.recomputed_layers(layers)
    offloaded, checkpoint = layout.offloaded_layers(layers), checkpoint_bytes(layout, traced)
    tile_gradients = 0
    if in_tiles := tiled_mlp_elements(layout, model, job) if job.method == "full" else 0:
        # The sum over tiles, which the engine gets, and a tile's own. Inner tensors are at their peak when only the
        # gradient of the last matrix exists. Experts have many more weights than inner tensors in a tile, so that their
        # fullest moment has all gradients.
        matrices = [p for p in model.parameters if p.group == "mlp" and p.in_layer]
        own = in_tiles if any(p.kind == "experts" for p in matrices) else max(p.numel for p in matrices)
        tile_gradients = step.element_bytes * (in_tiles + own)

    def saved(count: int) -> Terms:
        terms: Terms = {"activations": (_kept_bytes(step, count) + traced.outside_layer_bytes) // ranks}
        # The first layer has none before it, whose input would be copied meanwhile.
        buffers = 1 if job.offload_activations == "transformers" else STAGING_BUFFERS
        staging = min(buffers, offloaded, count) * checkpoint
        return terms | {"checkpoint_staging": staging} if staging else terms

    large = model.first_large_layer
    kept = {count: saved(count) for count in {0, 1, large + 1, layers - 1, layers}}
    # The input of the last layer is on the host at its end, and comes back for its backward pass.
    waiting = {name: count for name, count in kept[layers].items() if name != "checkpoint_staging"}
    dequantized: Terms = {}
    if job.method == "qlora":
        dequantized["dequantized_weight"] = job.compute_bytes * model.largest_layer_matrix
    # In 16 bits, norms of these families save a copy of their input in fp32, so that the input itself is freed.
    casts = step.mode == "bf16" and not job.use_liger_kernel
    frees_input = casts and model.model_type in _CASTING_NORMS

    def backward(count: int) -> Terms:
        again = recomputed >= count
        recomputed_bytes = traced.recompute_backward_transient_bytes + _mask_bytes(step)
        transient = recomputed_bytes if again else traced.backward_transient_bytes
        if count == 1 and large:
            transient += traced.recompute_first_layer_bytes if again else traced.first_layer_bytes
        terms = kept[count] | {"backward_transient": transient // ranks} | dequantized
        if again and job.gradient_checkpointing == "reentrant":
            terms["reentrant_output"] = checkpoint
        elif frees_input and "checkpoint_staging" in terms:
            terms["checkpoint_staging"] -= checkpoint
        return terms | {"tile_gradients": tile_gradients} if tile_gradients else terms

    # In the forward pass, a layer's input is on the accelerator until the layer ends.
    forward = kept[layers] | ({"checkpoint_staging": checkpoint} if offloaded else {})
    if recomputed == layers or layout.cp > 1:
        # Most is kept at the last layer, which is recomputed only if all layers are.
        forward |= {"forward_transient": traced.forward_transient_bytes // ranks}
    at_step: Terms = {}
    if layout.engine == "deepspeed" and layout.gradient_checkpointing and job.method != "full":
        # The loss exists during DeepSpeed's step, and with it the embedding's output and its gradient, which
        # checkpointing requires (transformers 5.17.0, `enable_input_require_grads`).
        at_step["activations"] = 2 * job.compute_bytes * step.tokens * model.dimensions.hidden_size // ranks
    moments = at_moments(
        {},
        last_layer_forward=forward,
        forward_end=waiting | dequantized,
        loss_backward=waiting | dequantized,
        head_backward=waiting,
        after_head=waiting,
        last_layer_backward=backward(layers),
        after_last_layer=kept[layers - 1],
        first_large_layer_backward=backward(large + 1),
        first_layer_backward=backward(1),
        after_first_layer=kept[0],
        step=at_step,
    )
    if (stage := step.share.stage) is None:
        return moments
    # A pipeline stage keeps a received tensor until its gradient is sent, clones it for the forward pass, keeps a sent
    # tensor until its backward pass, and has one persistent receive buffer (DeepSpeed 0.19.8, runtime/pipe/engine.py).
    border = job.compute_bytes * step.tokens * model.dimensions.hidden_size
    borders = (0 if stage.has_embedding else border) + (0 if stage.has_head else border)
    # 1F1B keeps the activations of as many micro-batches (`TrainSchedule`, deepspeed/runtime/pipe/schedule.py).
    in_flight = min(layout.gradient_accumulation_steps, layout.pp - stage.index)
    of_others = (in_flight - 1) * (_kept_bytes(step, layers) + traced.outside_layer_bytes + borders)
    in_passes = {"stage_borders": border + borders, "activations_in_flight": of_others}
    return {
        moment: terms | (in_passes if PHASES[moment] in ("loss", "backward") else {"stage_borders": border})
        for moment, terms in moments.items()
    }


def in_tiles_or_between_modules(step: RankStep, terms: Terms, *, again: bool) -> Terms:
    """Return the terms of a layer's backward pass under ZeRO-3, in the tiles of its MLP or in the norm before it.

    A tiled MLP is one module, inside of which ZeRO-3 copies and reduces nothing. ZeRO-3's hook on the norm's input
    (`PostBackwardFunctionModule`) keeps a second gradient of the residual until the norm's backward pass ends. In 16
    bit the norm's cast keeps one too.
    """
    mlp, traced, model, job = step.traced.mlp, step.traced, step.model, step.job
    if mlp is None:
        return terms
    transient = traced.recompute_backward_transient_bytes if again else traced.backward_transient_bytes
    parts = mlp.recompute_backward_transient if again else mlp.backward_transient
    inside = (transient - mlp.tiled(parts, 0, backward=True)) // step.ranks
    # The gradient of a tied head waits for that of the embedding.
    waits = model.tied_embeddings and job.method == "full"
    waiting = job.compute_bytes * model.embedding_parameters if waits else 0
    between = {name: terms.get(name, 0) for name in ("module_gradients", "reduce_copy", "prefetch_copies")}
    residual = checkpoint_bytes(step.layout, traced) if step.mode == "fp32" else 0
    if inside + terms.get("tile_gradients", 0) < residual + sum(between.values()) - waiting:
        changed = {"tile_gradients": 0, "backward_transient": terms["backward_transient"] - inside + residual}
    else:
        changed = dict.fromkeys(between, 0) | {"module_gradients": waiting}
    return {name: count for name, count in (terms | changed).items() if count}


def weight_copies(step: RankStep) -> dict[Moment, Terms]:
    """Return the bytes of copies of weights that the forward pass makes and the backward pass needs.

    Autocast copies fp32 matrices; with adapters only theirs, because frozen weights are in 16 bit. PEFT computes the
    weight of an adapted expert as base + update and keeps the sum. With checkpointing, sums are freed after their
    layer's forward pass and autocast copies after the complete forward pass; the backward pass makes both again.
    """
    model, job, copy_bytes = step.model, step.job, step.traced.autocast_weight_copy_bytes_per_parameter
    adapted = [] if job.method == "full" else adapted_experts(model, job.lora_targets)
    normed = targeted_linears(model, job.lora_targets) if job.method != "full" and job.lora_variant == "dora" else []
    if not copy_bytes and not adapted and not normed:
        return at_moments({})
    if job.method == "full":
        matrices = model.trained_part.linear_parameters
        matrices += model.embedding_parameters if model.tied_embeddings else 0
    else:
        matrices = share_parameters(model, job, ep=step.layout.ep).trainable
    summed = [parameter for parameter in adapted if parameter.kind == "experts"]
    experts = [job.compute_bytes * parameter.numel for parameter in summed]
    layers = max(1, model.dimensions.num_layers)
    # The first layers of some families have no experts.
    every = job.compute_bytes * sum(parameter.total for parameter in summed)
    all_layers = {"autocast_weight_copies": copy_bytes * matrices, "adapted_expert_copies": every}
    one_layer = {"autocast_weight_copies": copy_bytes * matrices // layers, "adapted_expert_copies": sum(experts)}
    # PEFT makes the sums of a layer one after the other, each with a temporary update.
    fullest = max((sum(experts[: index + 1]) + count for index, count in enumerate(experts)), default=0)
    making = {"adapted_expert_update": fullest - sum(experts)}
    if normed:
        inside = 4 if copy_bytes else job.compute_bytes
        making["dora_norms"] = max(
            inside * p.shape[1] ** 2 + job.compute_bytes * (p.shape[1] * job.lora_rank + 3 * p.numel) for p in normed
        )
    recomputed = step.layout.recomputed_layers(layers)
    if not recomputed:
        return at_moments(
            {},
            last_layer_forward={**all_layers, **making},
            **dict.fromkeys(("forward_end", "loss_backward", "head_backward", "after_head"), all_layers),
            **dict.fromkeys(("last_layer_backward", "after_last_layer", "first_large_layer_backward"), all_layers),
            **dict.fromkeys(("first_layer_backward", "after_first_layer"), one_layer),
        )
    again = one_layer | making
    # Layers that are not recomputed keep their copies for the backward pass.
    held = {name: count * (layers - recomputed) // layers for name, count in all_layers.items()}
    autocast = held | {"autocast_weight_copies": all_layers["autocast_weight_copies"]}
    # Autograd needs that of the head.
    head = model.embedding_parameters if model.tied_embeddings else model.tail_parameters
    of_head = copy_bytes * head if job.method == "full" else 0
    of_loss = held | {"autocast_weight_copies": held["autocast_weight_copies"] + of_head}
    return at_moments(
        {},
        last_layer_forward={**again, **autocast} if recomputed == layers else {**making, **autocast},
        forward_end=autocast,
        **dict.fromkeys(("loss_backward", "head_backward"), of_loss),
        after_head=held,
        last_layer_backward=again if recomputed == layers else held,
        after_last_layer={name: max(0, count - one_layer[name]) for name, count in held.items()},
        **dict.fromkeys(("first_large_layer_backward", "first_layer_backward"), again),
    )
