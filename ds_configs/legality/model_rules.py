"""Rules of what a model allows: its parameters, its constructor, its positions, its loss and the code behind it."""

from __future__ import annotations

from ..specs.errors import Fault
from ..specs.job import CHUNKED_LOSS_FAMILIES
from ..specs.model import MAMBA_TYPES, NOT_ADAPTED_IN_MAMBA, ModelSpec, ParameterShape, targeted_linears
from .candidate import Candidate, Rule

_SHARED_LAYERS = frozenset({"zamba", "zamba2"})
"""`model_type`s of transformers 5.17.0 in which several layers hold the same parameters."""


def sharded_parameters_have_dimensions(candidate: Candidate) -> Fault | None:
    """DeepSpeed and FSDP2 take no parameter without dimensions, such as CLIP's `logit_scale`.

    DeepSpeed 0.19.8 broadcasts each as bytes, which torch refuses (`_broadcast_model`, runtime/engine.py:2059); torch's
    `fully_shard` refuses them by name (torch 2.13, distributed/fsdp/_fully_shard/_fsdp_init.py:336).
    """
    if candidate.strategy.engine not in ("deepspeed", "fsdp2"):
        return None
    scalars = [parameter.name for parameter in candidate.model.parameters if not parameter.shape]
    if not scalars:
        return None
    return Fault(
        where="engine",
        value=candidate.strategy.engine,
        rule=f"takes no parameters without dimensions, such as {scalars[0]}",
        fix="use ddp, or a parameter of one element in the model's code",
    )


def zero3_builds_the_model(candidate: Candidate) -> Fault | None:
    """ZeRO-3 divides parameters while a model is built, and also while it is loaded.

    Whisper's initialisation takes the positions' shape for two numbers, and finds one (transformers 5.17.0,
    models/whisper/modeling_whisper.py:528).
    """
    if candidate.strategy.zero_stage != 3 or candidate.model.model_type != "whisper":
        return None
    return Fault(
        where="zero_stage",
        value=3,
        rule="divides parameters while the model is built, and Whisper reads their shapes there",
        fix="use ZeRO-2 or FSDP2",
    )


def fsdp2_units_share_nothing(candidate: Candidate) -> Fault | None:
    """FSDP2 divides layer by layer, and takes no parameter that several layers hold, as Zamba's attention.

    torch 2.13 refuses it by name when the second layer is wrapped.
    """
    if candidate.strategy.engine != "fsdp2" or candidate.model.model_type not in _SHARED_LAYERS:
        return None
    return Fault(
        where="engine",
        value="fsdp2",
        rule=f"divides each layer alone, and layers of {candidate.model.model_type} share parameters",
        fix="use a ZeRO stage",
    )


def sequence_fits_the_positions(candidate: Candidate) -> Fault | None:
    """Learned position embeddings end; rotary ones do not."""
    limit = candidate.model.learned_positions
    if limit is None or candidate.job.seq_len_tokens <= limit:
        return None
    return Fault(
        where="seq_len",
        value=candidate.job.seq_len_tokens,
        rule=f"cannot exceed the {limit} learned positions of {candidate.model.architecture}",
        fix=f"use --seq-len {limit}",
    )


def chunked_loss_is_supported(candidate: Candidate) -> Fault | None:
    """Liger patches the families it knows and leaves others silently (liger_kernel/transformers/monkey_patch.py)."""
    if candidate.job.loss != "chunked" or candidate.model.model_type in CHUNKED_LOSS_FAMILIES:
        return None
    return Fault(
        where="loss",
        value="chunked",
        rule=f"has no kernel for {candidate.model.model_type}",
        fix=f"use --loss eager; supported: {', '.join(CHUNKED_LOSS_FAMILIES)}",
    )


def lora_targets_exist(candidate: Candidate) -> Fault | None:
    """Each LoRA target names a Linear module of the candidate.model."""
    if candidate.job.method == "full":
        return None
    missing = [target for target in candidate.job.lora_targets if not targeted_linears(candidate.model, (target,))]
    if not missing:
        return None
    names = ", ".join(_adaptable_names(candidate.model))
    fix = f"use all-linear or names among {names}" if names else "use --method full"
    return Fault(where="lora_targets", value=",".join(missing), rule="match no Linear module", fix=fix)


def lora_targets_can_be_adapted(candidate: Candidate) -> Fault | None:
    """PEFT takes what is made from Linear for one, whatever it returns, and refuses some modules of Mamba layers.

    Llama 4's router returns scores and logits, and the adapter's addition fails on the pair (PEFT 0.21,
    tuners/lora/layer.py).
    """
    if candidate.job.method == "full":
        return None
    model, targets = candidate.model, candidate.job.lora_targets
    everything = "all-linear" in targets
    routers = [p for p in model.parameters if p.kind == "router" and p.name.endswith(".weight")]
    routers = [p for p in routers if everything or p.module.rpartition(".")[2] in targets]
    refused = [p for p in targeted_linears(model, targets) if _is_refused(p, model)]
    if routers:
        rule = f"include {routers[0].module}, which returns more than a product, and PEFT adds to one alone"
    elif refused:
        rule = f"include {refused[0].module}, which PEFT refuses in Mamba layers: their kernels read its weight"
    else:
        return None
    fix = f"use names among {', '.join(_adaptable_names(model))}"
    return Fault(where="lora_targets", value=",".join(targets), rule=rule, fix=fix)


def _adaptable_names(model: ModelSpec) -> list[str]:
    linears = targeted_linears(model, ("all-linear",))
    return sorted({linear.module.rpartition(".")[2] for linear in linears if not _is_refused(linear, model)})


def _is_refused(linear: ParameterShape, model: ModelSpec) -> bool:
    return model.model_type in MAMBA_TYPES and linear.module.rpartition(".")[2] in NOT_ADAPTED_IN_MAMBA


def unseen_code_is_trained_whole(candidate: Candidate) -> Fault | None:
    """A model of remote code is divided by ZeRO alone: FSDP2 and the axes name its modules, which nobody has seen."""
    strategy = candidate.strategy
    if candidate.model.source != "structure" or (strategy.engine != "fsdp2" and not strategy.axes):
        return None
    return Fault(
        where="model",
        value=candidate.model.architecture,
        rule="is code of its repository, whose modules FSDP2 and parallel axes would have to name",
        fix="use a ZeRO stage",
    )


def shared_sequences_are_causal(candidate: Candidate) -> Fault | None:
    """Ranks share a sequence of a causal language model alone: no other model was shown to train equally on parts."""
    strategy = candidate.strategy
    if candidate.model.task == "causal_lm" or strategy.sp * strategy.cp == 1:
        return None
    return Fault(
        where="model",
        value=candidate.model.architecture,
        rule="is no causal language model, and only those share sequences (sp, cp)",
        fix="use sp = cp = 1",
    )


MODEL_RULES: tuple[Rule, ...] = (
    sequence_fits_the_positions,
    chunked_loss_is_supported,
    lora_targets_exist,
    lora_targets_can_be_adapted,
    unseen_code_is_trained_whole,
    shared_sequences_are_causal,
    sharded_parameters_have_dimensions,
    zero3_builds_the_model,
    fsdp2_units_share_nothing,
)
"""All rules of models, in the order in which they are checked."""
