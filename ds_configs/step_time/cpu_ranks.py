"""Measured rates of CPU ranks on one host, and the hardware that plans get from them."""

from __future__ import annotations

from dataclasses import dataclass

from ..specs.hardware import HardwareSpec, hardware_from_mapping
from .rates import constants_of

NOISY_RATES = 0.25
"""Spread of repeated measurements from which on another job probably uses the machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredCpu:
    """What a rank of this host reaches while all other ranks do the same, and what that depends on."""

    cpu: str
    """Model of the processor."""
    cores: int
    ranks: int
    threads: int
    """Threads of each rank."""
    torch: str
    """Release of torch."""
    fp32_flops_per_s: float
    """Of large matrix products."""
    bf16_flops_per_s: float
    fp32_attention_flops_per_s: float
    """Of fused attention, forward and backward."""
    bf16_attention_flops_per_s: float
    memory_bytes_per_s: float
    """Bytes that a copy reads and writes."""
    link_bytes_per_s: float
    """Bus bandwidth of a large gloo all-reduce; 0 with one rank."""
    spread: float
    """Median time of the rounds divided by the fastest, less 1, of the rate that varied the most."""

    @property
    def key(self) -> tuple[str, int, int, int, str]:
        """What the rates depend on."""
        return self.cpu, self.cores, self.ranks, self.threads, self.torch

    def __str__(self) -> str:
        threads = f"{self.threads} thread{'' if self.threads == 1 else 's'}"
        link = f", {self.link_bytes_per_s / 1e9:.2f} GB/s of gloo all-reduces" if self.ranks > 1 else ""
        return (
            f"{self.ranks} CPU rank{'' if self.ranks == 1 else 's'} of {threads} on {self.cpu}, torch {self.torch}: "
            f"{self.fp32_flops_per_s / 1e9:.0f} GFLOP/s in fp32 and {self.bf16_flops_per_s / 1e9:.0f} in bf16 "
            f"(attention {self.fp32_attention_flops_per_s / 1e9:.1f} and {self.bf16_attention_flops_per_s / 1e9:.1f}), "
            f"{self.memory_bytes_per_s / 1e9:.1f} GB/s of memory{link} per rank"
        )


def cpu_hardware(measured: MeasuredCpu, *, host_bytes: int, **overrides: object) -> HardwareSpec:
    """Return the hardware of measured CPU ranks.

    Ranks and their processes share the host's memory: half of it is for the tensors of ranks, half is host memory.
    The step time model multiplies rates by the shares of a datasheet that are reached, so they are divided by them.
    """
    constants = constants_of("CPU")
    rank_bytes = host_bytes // (2 * measured.ranks)
    values: dict[str, object] = {
        "name": f"{measured.ranks}xCPU (local)",
        "gpu": "CPU",
        "gpus_per_node": measured.ranks,
        "gpu_bytes": rank_bytes,
        "host_bytes_per_node": host_bytes - measured.ranks * rank_bytes,
        "flops_per_s": measured.bf16_flops_per_s / constants.matrix_efficiency,
        "fp32_flops_per_s": measured.fp32_flops_per_s / constants.fp32_efficiency,
        "attention_flops_per_s": measured.bf16_attention_flops_per_s,
        "fp32_attention_flops_per_s": measured.fp32_attention_flops_per_s,
        "memory_bytes_per_s": measured.memory_bytes_per_s / constants.memory_efficiency,
        "source": f"measured: {measured}",
    }
    if measured.ranks > 1:
        values["link_bytes_per_s"] = measured.link_bytes_per_s / constants.link_efficiency
    return hardware_from_mapping(values | overrides, name="local")
