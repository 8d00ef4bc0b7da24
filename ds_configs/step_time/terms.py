"""Terms of a step's time: the meaning of each, and how it is computed."""

from __future__ import annotations

from collections.abc import Mapping

TIME_TERM_MEANINGS: Mapping[str, str] = {
    "matrix_products": "products of the layers' weights, forward and backward: FLOPs over the peak times an efficiency "
    "that falls with small products",
    "attention": "scores, softmax and values of all layers: fused kernels skip what a causal mask hides",
    "memory_operations": "norms, residuals, activation functions, rotary embeddings, added gradients: their bytes over "
    "the memory's bandwidth",
    "recomputation": "the forward pass of recomputed layers, once more",
    "head_and_loss": "embedding, final norm, output head and loss, forward and backward",
    "kernel_launches": "what the host takes longer to launch kernels, and to run the hooks of ZeRO-3, than the device "
    "to run them, and its own work for each micro-batch",
    "waiting_for_ranks": "ranks that wait for the last of them in collectives inside the layers",
    "tensor_parallel": "all-reduces of TP: four in each layer, six where it is recomputed",
    "sequence_parallel": "all-to-alls of SP: queries, keys, values and outputs, forth and back",
    "context_parallel": "keys and values of CP, gathered forward, passed round and reduced backward",
    "expert_parallel": "all-to-alls of EP: dispatch and combine, forward and backward",
    "pipeline_transfers": "hidden states between stages and their gradients back",
    "pipeline_bubble": "idle stages: before their first and after their last micro-batch, and while they wait for the "
    "slowest",
    "parameter_gathers": "gathers of sharded parameters and reductions in every micro-batch that computation does not "
    "hide",
    "gradient_reduction": "the reduction of gradients once in a step, where the last backward pass does not hide it",
    "overlap_slowdown": "computation slowed by the communication beside it, which uses memory bandwidth and processors",
    "optimizer": "the optimizer's update: bytes of gradients, states and weights over the memory's bandwidth",
    "parameter_updates": "the gather of updated parameters after the step (ZeRO 1 and 2), beside nothing",
    "host_optimizer": "CPU Adam over the bandwidth of host memory",
    "host_copies": "gradients and parameters over PCIe",
    "nvme": "optimizer states from NVMe and back",
    "teacher_forward": "the forward pass of a teacher in every micro-batch",
    "step_overhead": "data loader, scheduler and logging, once in a step",
}
"""One sentence for each term, by name."""

TIME_TERM_NAMES: Mapping[str, str] = {
    "memory_operations": "memory-bound operations",
    "parameter_gathers": "gathers and reductions that computation does not hide",
    "gradient_reduction": "the reduction of gradients that computation does not hide",
    "parameter_updates": "gathers of updated parameters",
    "tensor_parallel": "all-reduces of TP",
    "sequence_parallel": "all-to-alls of SP",
    "context_parallel": "keys and values of CP",
    "expert_parallel": "all-to-alls of EP",
    "pipeline_transfers": "transfers between stages",
    "pipeline_bubble": "idle stages",
    "overlap_slowdown": "computation slowed by communication beside it",
    "host_copies": "copies over PCIe",
    "host_optimizer": "the optimizer on the host",
}
"""What people call a term, where that is not its name."""


def time_term_name(term: str) -> str:
    """Return what people call a term.

    >>> time_term_name("pipeline_bubble"), time_term_name("head_and_loss")
    ('idle stages', 'head and loss')
    """
    return TIME_TERM_NAMES.get(term, term.replace("_", " "))
