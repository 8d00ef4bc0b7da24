"""Meaning and formula of each memory term, and what each strategy does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from .estimate import COMMUNICATOR_BYTES, CONTEXT_BYTES, PROCESS_BYTES, RESERVED_OVER_PREDICTED, Interval


def _gigabytes(interval: Interval, each: str = "") -> str:
    low, middle, high = (f"{count / 1e9:g}" for count in (interval.low, interval.middle, interval.high))
    return f"{middle} GB {each}expected, {low} to {high} GB in the interval"


_LEAST, _EXPECTED, _MOST = (f"{100 * (factor - 1):.1f} %" for factor in RESERVED_OVER_PREDICTED)

Role = Literal["weights", "gradients", "optimizer", "activations", "buckets", "other"]

TERM_MEANINGS: Mapping[str, str] = {
    "weights": "parameters in the dtype that the engine keeps: 4 B under autocast and FSDP2, 2 B in 16-bit DeepSpeed, "
    "sharded over the ranks in stage 3 and FSDP2; frozen weights in compute precision or 4 bit",
    "secondary_weights": "ZeRO++ hpZ keeps a second shard within the node: 16-bit weights / hpz_partition_size",
    "master_weights": "fp32 copy that the DeepSpeed optimizer updates: 4 B per trainable element / ranks",
    "gradients": "gradients in that phase, complete or sharded over the ranks",
    "fp32_gradients": "fp32 copy of 16-bit gradients during the step; in stage 3 one sub-group at a time",
    "gradient_buckets": "DDP's reduction buckets, as large as all gradients and in addition to them",
    "optimizer_states": "Adam: 8 B per trainable element (fp32 moments), sharded over the ranks from stage 1 on",
    "flat_gradients": "stages 1 and 2 flatten their partition's 16-bit gradients while the originals exist; a "
    "16-bit pipeline without ZeRO adds every micro-batch's gradients to persistent flat ones",
    "norm_copy": "stages 1 and 2 compute the norm of each gradient in fp64: 8 B of the largest tensor in a partition",
    "optimizer_transient": "temporaries of the step: foreach kernels hold one fp32 copy; in stage 3 the flattened "
    "16-bit gradients of a sub-group",
    "selected_columns": "ZenFlow: gradients and copies of the columns that every rank updates in each micro-batch",
    "offload_staging": "buffer of the largest tensor, through which gradients are copied to the host",
    "reduce_buckets": "reduce_bucket_size elements in gradient dtype, twice with overlap_comm (stages 1 and 2)",
    "reduce_bucket": "the persistent bucket of stage 3: reduce_bucket_size elements",
    "reduce_copy": "the flattened copy of a bucket during its reduction, in a pipeline without ZeRO of all gradients; "
    "with offload in stages 1 and 2 the clone of a gradient larger than the bucket, or the fp64 copy for its norm",
    "gathered_parameters": "parameters gathered for use: the current unit and prefetched ones (ZeRO-3: simulation of "
    "DeepSpeed's fetch queue; FSDP2: the unit in use, the next one's buffer, and the last unit)",
    "prefetch_copies": "a coalesced gather holds its flat buffer and a copy of each tensor; with ZeRO++ qwZ also the "
    "gathered int8 values",
    "persistent_parameters": "tensors of at most stage3_param_persistence_threshold elements, on every rank",
    "module_gradients": "complete gradients that are not reduced yet: of the module in use, and of tensors larger than "
    "the bucket",
    "unit_gradients": "FSDP2: unsharded gradients of a unit and their reduce-scatter input",
    "activations": "number of layers * traced bytes kept per layer; with checkpointing the inputs of the layers",
    "checkpoint_staging": "inputs of recomputed layers on the accelerator while the others are in host memory: one in "
    "use and one that a side stream copies",
    "activations_in_flight": "pipeline: activations of the other micro-batches that wait for their backward pass, "
    "min(m, p - stage) - 1 of them",
    "stage_borders": "pipeline: received and sent tensors that wait for their gradients, and the receive buffer",
    "autocast_weight_copies": "autocast keeps a 16-bit copy of each fp32 matrix until the backward pass has used it",
    "adapted_expert_copies": "LoRA on fused experts keeps each adapted expert matrix until the backward pass",
    "forward_transient": "temporaries of a checkpointed layer's forward pass; under CP those of ring attention",
    "adapted_expert_update": "the update that LoRA adds to an expert matrix, during the sum",
    "backward_transient": "activation gradients inside one layer at its fullest moment; with checkpointing also its "
    "recomputed activations, and under CP the buffers of ring attention",
    "loss": "logits, their fp32 copy and the gradients of head and loss at their joint peak; with a teacher "
    "those of a chunk of rows, and with a chunked loss those of a chunk or tile",
    "tile_gradients": "gradients of a tiled MLP's weights: the sum over tiles, and those of the next tile",
    "head_gradient": "gradient of the output head, which a chunked loss computes early; in fp32 with a teacher",
    "dequantized_weight": "the largest 4-bit weight, dequantized for one product",
    "teacher_weights": "the frozen teacher: in compute precision, complete or sharded over all ranks, or in 4 bit",
    "teacher_gathered": "the teacher's parameters in use: gathered, copied from the host, or dequantized from 4 bit",
    "teacher_activations": "temporaries of one teacher layer; the teacher runs before the student",
    "teacher_hidden_states": "the input of the teacher's output head for all tokens, until the loss has read it",
    "teacher_head": "the weight of the teacher's output head, gathered until the loss has read it",
    "teacher_targets": "ids and log-probabilities of a cached teacher's likeliest tokens",
    "model_buffers": "rotary tables and other fp32 buffers, on every rank",
    "allocator_fragmentation": f"memory that the allocator reserves beyond tensors: {_EXPECTED} expected, {_LEAST} to "
    f"{_MOST} in the interval; measured runs change these values, which are negative if a run needed less than "
    "predicted",
    "runtime_context": f"CUDA context, kernels and workspaces: {_gigabytes(CONTEXT_BYTES)}",
    "communicators": f"NCCL buffers: {_gigabytes(COMMUNICATOR_BYTES, 'for each communicator ')}",
    "processes": f"resident memory of the Python processes of a node: {PROCESS_BYTES / 1e9:g} GB each",
    "checkpoint_loading": "host memory of from_pretrained on the first node; FSDP2 and ZeRO-3 read weights on one rank",
    "offloaded_master_weights": "fp32 master weights in host memory: 4 B per trainable element / ranks",
    "offloaded_optimizer_states": "optimizer states in host memory",
    "offloaded_gradients": "gradients copied to the host and in the CPU optimizer",
    "offloaded_parameters": "parameter shards in host memory",
    "offloaded_teacher": "the frozen teacher in host memory, sharded over the ranks, in pinned blocks",
    "offloaded_checkpoints": "inputs of recomputed layers that wait for the backward pass in pinned host memory",
    "teacher_cache_reads": "cached teacher outputs of one micro-batch",
    "pinned_rounding": "torch rounds each pinned block up to a power of two",
    "nvme_optimizer_buffers": "pinned buffers: buffer_count * 4 B * the largest sub-group shard",
    "nvme_parameter_buffers": "pinned buffers: buffer_count * buffer_size in compute precision",
}
"""One sentence for each term, by name."""

TERM_ROLES: Mapping[str, Role] = {
    "weights": "weights",
    "secondary_weights": "weights",
    "teacher_weights": "weights",
    "offloaded_teacher": "weights",
    "offloaded_parameters": "weights",
    "dequantized_weight": "weights",
    "master_weights": "optimizer",
    "optimizer_states": "optimizer",
    "optimizer_transient": "optimizer",
    "offloaded_master_weights": "optimizer",
    "offloaded_optimizer_states": "optimizer",
    "gradients": "gradients",
    "fp32_gradients": "optimizer",
    "flat_gradients": "optimizer",
    "norm_copy": "optimizer",
    "module_gradients": "gradients",
    "unit_gradients": "gradients",
    "tile_gradients": "gradients",
    "head_gradient": "gradients",
    "offloaded_gradients": "gradients",
    "gradient_buckets": "buckets",
    "reduce_buckets": "buckets",
    "reduce_bucket": "buckets",
    "reduce_copy": "buckets",
    "offload_staging": "buckets",
    "gathered_parameters": "buckets",
    "prefetch_copies": "buckets",
    "persistent_parameters": "buckets",
    "activations": "activations",
    "activations_in_flight": "activations",
    "checkpoint_staging": "activations",
    "offloaded_checkpoints": "activations",
    "stage_borders": "activations",
    "autocast_weight_copies": "activations",
    "adapted_expert_copies": "activations",
    "adapted_expert_update": "activations",
    "forward_transient": "activations",
    "backward_transient": "activations",
    "loss": "activations",
    "teacher_gathered": "buckets",
    "teacher_head": "buckets",
    "teacher_activations": "activations",
    "teacher_hidden_states": "activations",
    "teacher_targets": "activations",
}
"""Role of each tensor term, as the byte meter distinguishes them; every other term is `other`.

Terms that exist only during the optimizer step count as optimizer."""

KERNEL_MEANINGS: Mapping[str, str] = {
    "torch_compile": "torch.compile: layers keep what the compiler's partition saves, traced on CPU tensors (eager "
    "bytes, an upper bound, where no trace is stored); time from counted kernels, with an interval that reaches to "
    "eager layers. torchtitan measured 1.16 times the speed of eager layers (8B, 8 H100)",
    "use_liger_kernel": "Liger's kernels: kept bytes and memory traffic are derived from the code of liger-kernel "
    "0.8.5, which was not run; the interval of the time reaches to eager layers",
    "zenflow": "ZenFlow: every micro-batch updates a tenth of the columns on the accelerators, each step the rest on "
    "the host from older gradients, which is other arithmetic than AdamW; time with the host's step hidden by the next "
    "one, with an interval that reaches to plain offload (its paper, arXiv 2505.12242: up to 5 times the speed)",
    "superoffload": "SuperOffload: time of plain offload, because it overlaps only without gradient clipping; the "
    "interval begins at the overlapped step of max_grad_norm 0 (its paper, arXiv 2509.21271: up to 2.5 times the speed "
    "on GH200)",
    "fp8": "fp8 (torchao): the memory of bf16, because layers keep 16-bit inputs; products of layers at twice the "
    "FLOP/s, and casts, with an interval that reaches to bf16. torchtitan measured 1.28 times the speed of compiled "
    "bf16 layers and the same memory (8B, 8 H100)",
}
"""What plans assume about kernels that are not eager 16-bit ones, by option or precision."""

STRATEGY_MEANINGS: Mapping[str, str] = {
    "single": "one process on one accelerator: fp32 weights under autocast, nothing sharded",
    "ddp": "a complete replica on every rank; gradients are averaged in fp32 buckets "
    "(communicates 2 x parameters per step)",
    "zero0": "DeepSpeed without sharding; in 16 bit its Adam starts at step 2 (0.19.8), so prefer ddp or zero1",
    "zero1": "DeepSpeed shards master weights and optimizer states over the ranks "
    "(communicates 2 x parameters per step)",
    "zero2": "like zero1; gradients are also sharded, during the backward pass (communicates 2 x parameters per step)",
    "zero3": "like zero2; parameters are also sharded, and gathered module by module "
    "(communicates 3 x parameters per step)",
    "zero3-hpz": "zero3 with a second shard of the weights inside each node, so that the backward pass gathers locally",
    "fsdp2": "PyTorch shards fp32 parameters, gradients and states and gathers them layer by layer in 16 bit "
    "(communicates 3 x parameters per step)",
    "fsdp2-hybrid": "fsdp2 within each node, replicas across nodes",
}
"""One sentence for each `--strategy`, by name."""
