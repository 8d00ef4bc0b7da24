"""Rules of expert parallelism with DeepSpeed AutoEP, on plain numbers and names.

Sources: deepspeed 0.19.8, ``module_inject/auto_ep_config.py``, ``auto_ep_folding.py``, ``auto_ep_presets/`` and
``runtime/engine.py`` (``_validate_zero3_moe_compatibility``, ``_save_moe_checkpoint``).
"""

from __future__ import annotations

from math import gcd

from ..specs.errors import Fault
from .candidate import divides, nearest_divisors

AUTO_EP_MODEL_TYPES = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3")
"""`model_type` of `config.json` for which AutoEP has a preset that was trained here and compared with one process."""


def expert_faults(
    *,
    ep: int,
    model_type: str,
    num_experts: int | None,
    data_parallel_size: int,
    engine: str = "deepspeed",
    zero_stage: int | None = None,
    tp: int = 1,
    pp: int = 1,
    sp: int = 1,
    cp: int = 1,
    hpz_partition_size: int = 1,
    quantized_gradients: bool = False,
    offload_optimizer: str = "none",
    offload_param: str = "none",
    method: str = "full",
    precision: str = "fp32",
) -> list[Fault]:
    """Return why a model's experts cannot be divided over `ep` ranks; empty when they can, or when `ep` is 1.

    Args:
        ep: Ranks that share the experts of a layer.
        model_type: Of `config.json`, that of the text model where there are several.
        num_experts: Routed experts of a layer; `None` or 0 for a dense model.
        data_parallel_size: Ranks that see different samples, those of `ep` among them.
        engine: `deepspeed`, `fsdp2`, `ddp` or `single`.
        zero_stage: With DeepSpeed; `None` counts as 0.
        tp: Ranks of tensor parallelism.
        pp: Pipeline stages.
        sp: Ranks that share a sequence (Ulysses).
        cp: Ranks that share a sequence (torch context parallelism).
        hpz_partition_size: ZeRO++ secondary partition.
        quantized_gradients: ZeRO++ quantized gradients.
        offload_optimizer: `none`, `cpu` or `nvme`.
        offload_param: Likewise.
        method: `full`, `lora` or `qlora`.
        precision: Of the computation: `fp32`, or a 16-bit one.

    >>> [str(fault) for fault in expert_faults(ep=3, model_type="mixtral", num_experts=8, data_parallel_size=6)]
    ['ep = 3: must divide the experts (8 % 3 = 2); nearest legal values: 2']
    """
    if ep == 1:
        return []
    faults = _size_faults(ep, num_experts, data_parallel_size)
    faults += _model_faults(model_type, num_experts)
    if engine != "deepspeed":
        fix = "use a ZeRO stage"
        faults.append(Fault(where="ep", value=ep, rule=f"runs on DeepSpeed (AutoEP), not on {engine}", fix=fix))
    faults += _training_faults(ep, engine, zero_stage, method, precision)
    faults += _axis_faults(ep, tp=tp, pp=pp, sp=sp, cp=cp)
    if (zero_stage or 0) == 3:
        faults += _zero3_faults(ep, hpz_partition_size, quantized_gradients)
    faults += _offload_faults(ep, offload_optimizer, offload_param)
    return faults


def _size_faults(ep: int, num_experts: int | None, data_parallel_size: int) -> list[Fault]:
    if ep < 1:
        return [Fault(where="ep", value=ep, rule="must be at least 1")]
    if not num_experts:
        return [
            Fault(where="ep", value=ep, rule="needs a mixture of experts, and the model is dense", fix="use ep = 1")
        ]
    found = [
        divides("ep", ep, number, what)
        for number, what in ((num_experts, "the experts"), (data_parallel_size, "the data-parallel ranks"))
    ]
    faults = [fault for fault in found if fault is not None]
    legal = nearest_divisors(gcd(num_experts, data_parallel_size), ep)
    return [Fault(where=f.where, value=f.value, rule=f.rule, fix=f"nearest legal values: {legal}") for f in faults]


def _model_faults(model_type: str, num_experts: int | None) -> list[Fault]:
    if model_type in AUTO_EP_MODEL_TYPES or not num_experts:
        return []
    rule = "AutoEP's routing has not been proven equal to this model's"
    return [Fault(where="model_type", value=model_type, rule=rule, fix=f"works with {', '.join(AUTO_EP_MODEL_TYPES)}")]


def _training_faults(ep: int, engine: str, zero_stage: int | None, method: str, precision: str) -> list[Fault]:
    faults = []
    if method != "full":
        rule = f"does not go with {method}: AutoEP takes over experts that train, and with adapters they are frozen"
        faults.append(Fault(where="ep", value=ep, rule=rule, fix="train all weights, or use ep = 1"))
    if engine == "deepspeed" and not zero_stage and precision != "fp32":
        rule = "without ZeRO trains experts in fp32 only: DeepSpeed's 16-bit optimizer starts with a step on zeros"
        faults.append(Fault(where="zero_optimization.stage", value=0, rule=rule, fix="use ZeRO stage 1, 2 or 3"))
    return faults


def _axis_faults(ep: int, *, tp: int, pp: int, sp: int, cp: int) -> list[Fault]:
    reasons = {
        "tp": (tp, "AutoTP refuses the plans of mixtures of experts"),
        "pp": (pp, "AutoEP looks for the layers of a whole model, and a pipeline stage names them otherwise"),
        "sp": (sp, "AutoEP refuses it in ZeRO-3, and in other stages it has not been proven equal"),
        "cp": (cp, "it runs on FSDP2 and AutoEP on DeepSpeed"),
    }
    return [
        Fault(where="ep", value=ep, rule=f"excludes {name} = {size}: {reason}", fix=f"use {name} = 1 or ep = 1")
        for name, (size, reason) in reasons.items()
        if size > 1
    ]


def _zero3_faults(ep: int, hpz_partition_size: int, quantized_gradients: bool) -> list[Fault]:
    clashes = {
        f"hpz_partition_size = {hpz_partition_size}": hpz_partition_size > 1,
        "quantized_gradients": quantized_gradients,
    }
    return [
        Fault(where="ep", value=ep, rule=f"excludes {name} in ZeRO-3", fix="leave it out, or use stage 2")
        for name, present in clashes.items()
        if present
    ]


def _offload_faults(ep: int, offload_optimizer: str, offload_param: str) -> list[Fault]:
    found = {"offload_optimizer": offload_optimizer, "offload_param": offload_param}
    rule = "excludes NVMe: DeepSpeed cannot save the optimizer states of experts from there"
    return [
        Fault(where="ep", value=ep, rule=f"{rule} ({name})", fix="offload to cpu")
        for name, device in found.items()
        if device == "nvme"
    ]
