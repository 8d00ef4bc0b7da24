"""What each `--strategy` does, and what plans assume about kernels."""

from __future__ import annotations

from collections.abc import Mapping

KERNEL_MEANINGS: Mapping[str, str] = {
    "torch_compile": "torch.compile: layers keep what the compiler's partition saves, traced on CPU tensors (eager "
    "bytes, an upper bound, where no trace is stored); time from counted kernels, with an interval that reaches to "
    "eager layers. torchtitan measured 1.16 times the speed of eager layers (8B, 8 H100)",
    "use_liger_kernel": "Liger's kernels: kept bytes and memory traffic are derived from the code of liger-kernel "
    "0.8.5, which was not run; the interval of the time reaches to eager layers",
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
