"""Time of a complete run, what strategies do, and warnings about what a plan assumes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil

from ..memory.activations import activations_are_stored
from ..models.images import RULES, image_tokens
from ..specs.hardware import HardwareSpec
from ..specs.job import TrainingJob
from ..specs.layout import Layout
from ..specs.model import ModelSpec
from ..step_time.estimate import StepTime, estimate_step_time
from ..step_time.rates import constants_of


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEstimate:
    """Time of training on a number of tokens, without interruptions."""

    tokens: float
    steps: int
    seconds: float
    low_seconds: float
    high_seconds: float
    gpu_hours: float

    def __str__(self) -> str:
        hours, low, high = (seconds / 3600 for seconds in (self.seconds, self.low_seconds, self.high_seconds))
        return (
            f"{self.tokens:,.0f} tokens take {self.steps:,} steps, {hours:,.1f} hours ({low:,.1f} to {high:,.1f}), "
            f"{self.gpu_hours:,.0f} GPU hours"
        )


def run_estimate(time: StepTime, hardware: HardwareSpec, *, tokens: float) -> RunEstimate:
    """Return the time of training on `tokens` with a predicted step time."""
    steps = ceil(tokens / (time.tokens_per_second * time.seconds))
    return RunEstimate(
        tokens=tokens,
        steps=steps,
        seconds=steps * time.seconds,
        low_seconds=steps * time.low_seconds,
        high_seconds=steps * time.high_seconds,
        gpu_hours=steps * time.seconds * hardware.world_size / 3600,
    )


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

_TRUSTED_RANKS = 3360
"""Accelerators of the largest published step used to fit the constants (MT-NLG)."""

_TRUSTED_TOKENS = 262_144
"""Tokens of the longest published sequence used to fit them (torchtitan)."""


def doubts(layout: Layout, model: ModelSpec, hardware: HardwareSpec, job: TrainingJob) -> tuple[str, ...]:
    """Return warnings about inputs of a plan that are assumed, or outside the range checked against measurements."""
    sentences = []
    if model.source == "structure":
        sentences.append(
            f"{model.architecture} has custom code, which was not run; memory and time are derived from its structure"
        )
    if lender := constants_of(hardware.gpu).borrowed_from:
        sentences.append(f"no step times of {hardware.gpu} were available; the constants of {lender} are used")
    if hardware.world_size > _TRUSTED_RANKS:
        sentences.append(f"{hardware.world_size:,} ranks: predictions were checked on up to {_TRUSTED_RANKS:,}")
    if job.seq_len_tokens > _TRUSTED_TOKENS:
        longest = f"predictions were checked on up to {_TRUSTED_TOKENS:,}"
        sentences.append(f"sequences of {job.seq_len_tokens:,} tokens: {longest}")
    images = image_tokens(model, job)
    if images is not None:
        size = "" if images.has_fixed_size else f" of {job.image_size} pixels"
        what = f"a video of {job.frames} frames" if job.frames else "an image"
        sentences.append(
            f"{what}{size} becomes {images.features} tokens ({images.formula}) of {images.patches:,} patches, and a "
            f"sequence has {job.images_per_sample}; more or larger ones need more memory"
        )
    elif model.reads_images:
        known = "pass --images-per-sample and --image-size for data with some"
        unknown = f"how many tokens an image becomes in {model.model_type} is unknown"
        sentences.append(f"samples are planned without images: {known if model.model_type in RULES else unknown}")
    if model.dimensions.num_experts:
        sentences.append("the one published step of a mixture of experts took twice its prediction")
    scans = any(parameter.name.endswith(".conv1d.weight") for parameter in model.parameters)
    if scans and activations_are_stored(model, job, layout):
        sentences.append(
            "linear attention is planned with the kernels of causal-conv1d and flash-linear-attention or mamba-ssm; "
            "without these packages its layers keep more, and are slower"
        )
    if job.method == "qlora":
        packed = frozenset(model.packed_parameters)
        kept = [p for p in model.parameters if p.kind in ("linear", "experts") and p.group != "head"]
        kept = [p for p in kept if p not in packed]
        for kind, what, packs in (
            ("experts", "the fused experts", "Linear modules only"),
            ("linear", "some Linear modules", "no modules that their class excludes"),
        ):
            if total := sum(p.total for p in kept if p.kind == kind):
                share = f"{total / model.parameter_count:.0%} of the parameters"
                sentences.append(f"{what} ({share}) stay in 16 bit: bitsandbytes 0.50 packs {packs}")
    used = {
        "torch_compile": job.torch_compile,
        "use_liger_kernel": job.use_liger_kernel,
        "fp8": job.precision == "fp8",
    }
    sentences += [meaning for name, meaning in KERNEL_MEANINGS.items() if used[name]]
    if "network_bytes_per_s" in hardware.assumed:
        half = replace(hardware, network_bytes_per_s=hardware.network_bytes_per_s / 2)
        times = [estimate_step_time(layout, model, cluster, job).seconds for cluster in (half, hardware)]
        sentences.append(
            f"the network is assumed to provide {hardware.network_bytes_per_s / 1e9:g} GB/s per accelerator; with "
            f"half of that a step of this layout takes {times[0] / times[1]:.2f} times as long"
        )
    return tuple(sentences)
