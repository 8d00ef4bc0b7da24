"""What takes the place of DeepSpeed's `compression_training` and `quantize_training`, which 0.19.8 refuses.

The blocks are read as DeepSpeed up to 0.19.6 read them (`compression/config.py`, `compression/constants.py`,
`runtime/quantize.py`): names, defaults, and what they did. Module names were patterns found anywhere in a name.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .compression_pruning import replace_layer_reduction, replace_pruning
from .compression_reading import Difference, Replacement, count_of, groups_of, is_count, is_enabled, mapping_of

REMOVED_BLOCKS = ("compression_training", "quantize_training")
"""Top-level keys that this module replaces."""
GUIDE = "docs/guides/migrate_compression_training.md"


@dataclass(frozen=True, kw_only=True, slots=True)
class Migration:
    """What takes the place of a block."""

    command: tuple[str, ...] = ()
    """Arguments of `shardwright qat`, capitals to be filled in; empty if nothing was quantized."""
    student: tuple[str, ...] = ()
    """Arguments of `shardwright student`, to be run before; empty if nothing was cut."""
    callbacks: tuple[str, ...] = ()
    """Python expressions of callbacks for any Trainer."""
    equivalents: tuple[Difference, ...] = ()
    """Settings that are taken over, with what differs."""
    dropped: tuple[Difference, ...] = ()
    """Settings without an equivalent, and why."""


def migration(config: Mapping[str, Any]) -> Migration:
    """Return what takes the place of the removed blocks of a DeepSpeed configuration; never raises.

    >>> block = {"shared_parameters": {"enabled": True}, "different_groups": {"wq1": {"params": {"target_bits": 8}}}}
    >>> " ".join(migration({"compression_training": {"weight_quantization": block}}).command)
    'shardwright qat MODEL --scheme W8A16 --dataset DATASET --output-dir OUTPUT'
    """
    found = Replacement()
    block = mapping_of(config.get("compression_training"))
    _quantization(found, block)
    replace_pruning(found, block)
    replace_layer_reduction(found, mapping_of(block.get("layer_reduction")))
    mixed = mapping_of(config.get("quantize_training"))
    if is_enabled(mixed):
        _quantize_training(found, mixed)
    student: tuple[str, ...] = ()
    if found.student:
        student = ("shardwright", "student", "MODEL", *found.student, "--output-dir", "STUDENT")
    return Migration(
        command=_command(found, "STUDENT" if student else "MODEL"),
        student=student,
        callbacks=tuple(found.callbacks),
        equivalents=tuple(found.equivalents),
        dropped=tuple(found.dropped),
    )


def message(config: Mapping[str, Any]) -> str:
    """Return on one line what to run in place of the removed blocks, and what has no equivalent."""
    found = migration(config)
    commands = [shlex.join(command) for command in (found.student, found.command) if command]
    parts = ["use " + ", then ".join(commands)] if commands else []
    if found.callbacks:
        beside = ["QATCallback"] if found.command else []
        parts.append(f"in Python Trainer(callbacks=[{', '.join([*beside, *found.callbacks])}])")
    if found.dropped:
        parts.append("no equivalent: " + ", ".join(f"{each.key} ({each.note})" for each in found.dropped))
    if not parts:
        return "remove it: nothing in it is enabled"
    return "; ".join([*parts, f"see {GUIDE}"])


def _quantization(found: Replacement, block: Mapping[str, Any]) -> None:
    weights = mapping_of(block.get("weight_quantization"))
    shared = mapping_of(weights.get("shared_parameters"))
    where = "weight_quantization"
    if is_enabled(shared):
        offset = count_of(shared.get("schedule_offset"), 0)
        symmetric = shared.get("quantization_type", "symmetric") != "asymmetric"
        anneals = shared.get("quantize_weight_in_forward") is not True
        for name, params, modules in groups_of(found, where, weights):
            key = f"{where}.{name}"
            start = params.get("start_bits", params.get("target_bits")) if anneals else params.get("target_bits")
            period = count_of(params.get("quantization_period"), 1)
            if _weights(found, key, start, params.get("target_bits"), symmetric, offset, period):
                found.targets += modules
        _weight_remarks(found, where, shared, groups="quantize_groups")
    activations = mapping_of(block.get("activation_quantization"))
    if is_enabled(mapping_of(activations.get("shared_parameters"))):
        _activations(found, activations)


def _weights(found: Replacement, key: str, start: Any, target: Any, symmetric: bool, offset: int, period: int) -> bool:
    """Take over the bits of one group; `False` if another group has set others."""
    if not (is_count(target) and 1 <= target <= 8):
        found.drop(f"{key}.target_bits", "codes have 1 to 8 bits")
        return False
    bits, symmetric = max(target, 2), symmetric or target < 3
    if found.scheme not in (None, (bits, symmetric)):
        found.drop(key, "all layers of a checkpoint have one scheme; train with the bits that most layers need")
        return False
    if found.scheme is not None:
        if found.annealing != (start, target, period):
            found.drop(f"{key}.start_bits", "all layers lose bits at the same steps, those of the first group")
        return True
    found.scheme, found.annealing = (bits, symmetric), (start, target, period)
    found.start_step = offset
    if target < 3:
        found.rule = "binary" if target == 1 else "ternary"
        found.keep(f"{key}.target_bits", _ternary_note(target))
    else:
        found.keep(f"{key}.target_bits", _grid_note(target, symmetric=symmetric))
    if is_count(start) and target < start <= 32:
        _annealing(found, key, start, target, offset, period)
    return True


def _grid_note(bits: int, *, symmetric: bool) -> str:
    levels = 2**bits
    if symmetric:
        return f"another grid: scale absmax/{(levels - 1) / 2:g} where DeepSpeed had absmax/{levels // 2}"
    return f"another grid: scale (max - min)/{levels - 1}, 0 in the range, where DeepSpeed had (max - min)/{levels}"


def _ternary_note(target: int) -> str:
    if target == 1:
        return "signs and a mean magnitude, as before; stored as codes of 2 bits"
    return "three values by BitNet's rule, round(w / mean|w|), where DeepSpeed cut at 0.7 · mean|w|"


def _annealing(found: Replacement, key: str, start: int, target: int, offset: int, period: int) -> None:
    """One bit less after `period` steps, the next after twice as many, and so on (`runtime/quantize.py`)."""
    if found.rule:
        found.drop(f"{key}.start_bits", f"{found.rule} weights have no wider form to begin with")
        return
    bits_from = {offset: start}
    for lost in range(1, start - target + 1):
        bits_from[offset + period * 2 ** (lost - 1)] = start - lost
    trained = [(step, bits) for step, bits in sorted(bits_from.items()) if bits <= 8]
    found.start_step = trained[0][0]
    found.bit_schedule = trained if len(trained) > 1 else []
    found.keep(f"{key}.quantization_period", "one bit less after period, 2 · period, 4 · period … steps")
    if start > 8:
        found.keep(f"{key}.start_bits", f"above 8 bits weights stay as they are, until step {found.start_step}")


def _weight_remarks(found: Replacement, where: str, shared: Mapping[str, Any], *, groups: str) -> None:
    count = count_of(shared.get(groups), 1)
    note = "one scale for each 128 inputs of a row, or --group-size N; DeepSpeed cut the flattened matrix into "
    found.keep(f"{where}.{groups}", f"{note}{count} part{'s' * (count != 1)}")
    if shared.get("rounding", "nearest") == "stochastic":
        found.drop(f"{where}.rounding", "codes are rounded to the nearest, as the checkpoint holds them")
    if is_enabled(mapping_of(shared.get("fp16_mixed_quantize"))):
        found.drop(f"{where}.fp16_mixed_quantize", "no blend of rounded and dense weights; delay with --start-step")
    if shared.get("quantizer_kernel") is True:
        found.drop(f"{where}.quantizer_kernel", "rounding needs no kernel of its own")


def _activations(found: Replacement, block: Mapping[str, Any]) -> None:
    where, shared = "activation_quantization", mapping_of(block.get("shared_parameters"))
    if found.scheme is None:
        found.drop(where, "inputs are rounded together with weights, 8 bits for both in W8A8")
        return
    static = shared.get("range_calibration", "dynamic") == "static"
    for name, params, _ in groups_of(found, where, block):
        bits = params.get("bits")
        if found.activations not in (None, (bits, static)):
            found.drop(f"{where}.{name}", "all layers have one scheme")
        elif (bits == 8) or (bits == 4 and found.scheme[0] <= 4):
            found.activations = (bits, static)
        else:
            found.drop(f"{where}.{name}.bits", "inputs have 8 bits, or 4 beside weights of up to 4")
    if found.activations is None:
        return
    if static and (found.activations[0] != 8 or found.scheme[0] != 8 or not found.scheme[1]):
        found.drop(f"{where}.range_calibration", "stored ranges come with symmetric 8-bit weights (W8A8_STATIC)")
        found.activations = (found.activations[0], False)
    elif static:
        found.keep(f"{where}.range_calibration", "a moving average of minimum and maximum over the steps, as before")
    if shared.get("quantization_type", "symmetric") == "asymmetric":
        found.drop(f"{where}.quantization_type", "inputs are rounded symmetrically")
    offset = count_of(shared.get("schedule_offset"), 1000)
    if offset != found.start_step:
        found.drop(f"{where}.schedule_offset", f"inputs are rounded from the weights' step {found.start_step} on")
    found.keep(f"{where}.modules", "inputs of the layers whose weights are rounded")


def _command(found: Replacement, model: str) -> tuple[str, ...]:
    if found.scheme is None:
        return ()
    bits, symmetric = found.scheme
    inputs, static = found.activations or (16, False)
    name = f"W{bits}A{inputs}" + "_STATIC" * static
    command = ["shardwright", "qat", model, "--scheme", name, "--dataset", "DATASET", "--output-dir", "OUTPUT"]
    command += [] if symmetric else ["--asymmetric"]
    command += ["--weight-rule", found.rule] if found.rule else []
    command += ["--ranges", "moving_average"] if static else []
    command += ["--start-step", str(found.start_step)] if found.start_step else []
    if found.bit_schedule:
        command += ["--bit-schedule", ",".join(f"{step}:{width}" for step, width in found.bit_schedule)]
    targets = list(dict.fromkeys(found.targets))
    command += ["--targets", ",".join(targets)] if targets and "Linear" not in targets else []
    return tuple(command)


def _quantize_training(found: Replacement, block: Mapping[str, Any]) -> None:
    where = "quantize_training"
    if found.scheme is not None:
        found.drop(where, "weight_quantization says the same")
        return
    bits, schedule = mapping_of(block.get("quantize_bits")), mapping_of(block.get("quantize_schedule"))
    algorithm = {**mapping_of(block.get("quantize-algo")), **mapping_of(block.get("quantize_algo"))}
    symmetric = "asymmetric" not in (algorithm.get("q_type"), block.get("quantize_type"))
    _weights(
        found,
        where,
        bits.get("start_bits", 16),
        bits.get("target_bits", 8),
        symmetric,
        count_of(schedule.get("schedule_offset"), 1000),
        count_of(schedule.get("quantize_period"), 1000),
    )
    _weight_remarks(found, where, {**block, "rounding": algorithm.get("rounding", "nearest")}, groups="quantize_groups")
    if is_enabled(mapping_of(block.get("eigenvalue"))):
        found.drop(f"{where}.eigenvalue", "all layers lose bits at the same steps")
