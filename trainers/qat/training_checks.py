"""Obstacles to a quantization-aware training that is about to begin."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...ds_configs.specs.errors import Fault
from ...plugins.accelerate.cpu_ranks import engine_from_environment

if TYPE_CHECKING:
    from .rounding.attachment import Attachment


def training_faults(attachment: Attachment, arguments: Any, steps: int, optimizer: Any) -> list[Fault]:
    """Return why training would not give what is to be exported; all at once.

    Args:
        attachment: What rounds.
        arguments: `TrainingArguments`.
        steps: Optimizer steps that training will have taken at its end.
        optimizer: The optimizer that training uses, wrapped or not.
    """
    return [
        *_range_faults(attachment),
        *step_faults(attachment, steps),
        *_optimizer_faults(attachment, optimizer),
        *_argument_faults(attachment, arguments),
    ]


def first_rank_loading_faults() -> list[Fault]:
    """Return the fault of a calibration on ranks whose weights have not come from the first one yet."""
    from ...plugins.transformers.whole_loading import loads_on_first_rank

    if not loads_on_first_rank():
        return []
    rule = "would see no weights on ranks but the first: fsdp_cpu_ram_efficient_loading fills them later"
    fix = "calibrate in a process of its own, save_ranges, and give the file; or turn that loading off"
    return [Fault(where="calibration", rule=rule, fix=fix)]


def foreign_optimizer_faults(attachment: Attachment) -> list[Fault]:
    """Return the fault of an optimizer that was made before the learned scales."""
    if not attachment.config.learns_scales:
        return []
    rule = "was made before the learned scales, and would never step them"
    fix = "let the Trainer make its optimizer, or call QATCallback.prepare(arguments, model) before making yours"
    return [Fault(where="optimizer", rule=rule, fix=fix)]


def _range_faults(attachment: Attachment) -> list[Fault]:
    if attachment.config.observes:
        return []
    empty = [name for name, found in attachment.ranges.items() if found.scale is None]
    if not empty:
        return []
    rule = f"{len(empty)} of {len(attachment.ranges)} layers have no range for their inputs, such as {empty[0]}"
    fix = "give QATCallback(calibration=batches), or let observers find them with ranges = moving_average"
    return [Fault(where="ranges", value=attachment.config.ranges, rule=rule, fix=fix)]


def step_faults(attachment: Attachment, steps: int) -> list[Fault]:
    """Return why a training of so many optimizer steps would end before it has trained what is exported."""
    config = attachment.config
    faults = []
    if config.start_step >= steps:
        rule = f"training ends at step {steps}, before anything is rounded"
        faults.append(Fault(where="start_step", value=config.start_step, rule=rule, fix="start earlier"))
    if config.bit_schedule and config.bit_schedule[-1][0] >= steps:
        last, bits = config.bit_schedule[-1]
        rule = f"training ends at step {steps}, before it reaches the {bits} bits of the checkpoint"
        faults.append(Fault(where="bit_schedule", value=f"{last}:{bits}", rule=rule, fix="reach them earlier"))
    return faults


def _optimizer_faults(attachment: Attachment, optimizer: Any) -> list[Fault]:
    learned = attachment.parameters
    if not learned or optimizer is None:
        return []
    groups = getattr(optimizer, "param_groups", [])
    known = {id(parameter) for group in groups for parameter in group["params"]}
    if not known or _is_flat(optimizer):
        return []
    return [] if all(id(parameter) in known for parameter in learned) else foreign_optimizer_faults(attachment)


def _is_flat(optimizer: Any) -> bool:
    """DeepSpeed's optimizers hold flat partitions in place of parameters; the Trainer made them of all parameters."""
    inner = getattr(optimizer, "optimizer", optimizer)
    return type(inner).__module__.startswith("deepspeed")


def _argument_faults(attachment: Attachment, arguments: Any) -> list[Fault]:
    config, faults = attachment.config, []
    follows = [
        name
        for name, used in (
            ("start_step", config.start_step),
            ("bit_schedule", config.bit_schedule),
            ("ranges", config.observes),
        )
        if used
    ]
    if arguments.load_best_model_at_end and follows:
        rule = f"may bring back weights of a step with other numbers than the last one's ({', '.join(follows)})"
        fix = "turn it off, and export the checkpoint that you want from a run of its own"
        faults.append(Fault(where="load_best_model_at_end", value=True, rule=rule, fix=fix))
    weights = {module.weight.dtype for module in attachment.modules.values() if hasattr(module, "weight")}
    for name, wanted in (("bf16_full_eval", "torch.bfloat16"), ("fp16_full_eval", "torch.float16")):
        if getattr(arguments, name) and any(str(dtype) != wanted for dtype in weights):
            rule = "changes the trained weights where they lie, and with them the codes that are exported"
            faults.append(Fault(where=name, value=True, rule=rule, fix="turn it off; bf16=True evaluates in bf16 too"))
    return faults + _unused_parameter_faults(attachment, arguments)


def _unused_parameter_faults(attachment: Attachment, arguments: Any) -> list[Fault]:
    """Return the fault of DDP that waits for gradients of scales which nothing uses before `start_step`."""
    other = arguments.deepspeed or arguments.fsdp or engine_from_environment() != "ddp"
    plain = arguments.parallel_mode.name == "DISTRIBUTED" and not other
    looks = arguments.ddp_find_unused_parameters
    if looks is None:
        looks = not arguments.gradient_checkpointing
    if looks or not plain or not attachment.parameters or not attachment.config.start_step:
        return []
    rule = "must be on where learned scales are not used before start_step"
    return [Fault(where="ddp_find_unused_parameters", value=looks, rule=rule, fix="set it, or use start_step 0")]
