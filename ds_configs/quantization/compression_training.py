"""Commands in place of DeepSpeed's `compression_training` and `quantize_training`, which 0.19.8 refuses.

The blocks are read as DeepSpeed up to 0.19.6 read them (`compression/config.py`, `compression/constants.py`,
`runtime/quantize.py`): names, defaults, and what they did. They may hold anything, and reading them never raises. Each
row of the guide's table is a row of `_NO_EQUIVALENT` or one function here.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

REMOVED_BLOCKS = ("compression_training", "quantize_training")
"""Top-level keys that this module replaces."""
GUIDE = "docs/guides/migrate_compression_training.md"
_ROUNDING = (
    ("rounding", "stochastic", "codes are rounded to the nearest, as the checkpoint holds them"),
    ("fp16_mixed_quantize", True, "no blend of rounded and dense weights; delay with --start-step"),
    ("quantizer_kernel", True, "rounding needs no kernel of its own"),
)
_NO_EQUIVALENT: Mapping[str, tuple[tuple[str, Any, str], ...]] = {
    "weight_quantization": _ROUNDING,
    "quantize_training": (*_ROUNDING, ("eigenvalue", True, "all layers lose bits at the same steps")),
    "activation_quantization": (("quantization_type", "asymmetric", "inputs are rounded symmetrically"),),
}
"""Settings by block, the value that nothing takes the place of, and why; `True` also means a section that is on."""
_NO_SHARE = "is no share above 0, up to 1"
# Configurations of strangers: names and lists go into a line of output, which stays readable.
_LONGEST_NAME, _MOST_TARGETS, _MOST_GROUPS = 200, 16, 32


@dataclass(kw_only=True)
class Migration:
    """All that takes the place of a block."""

    student: list[str] = field(default_factory=list)
    """Arguments of `shardwright student`, to be run before; empty if nothing was cut."""
    command: list[str] = field(default_factory=list)
    """Arguments of `shardwright qat`, capitals to be filled in; empty if nothing was quantized."""
    callbacks: list[str] = field(default_factory=list)
    """Python expressions of callbacks for any Trainer."""
    dropped: dict[str, str] = field(default_factory=dict)
    """Settings without an equivalent, such as `weight_quantization.wq1.target_bits`, and why."""


@dataclass(kw_only=True)
class _Quantized:
    """Scheme and schedule that the groups of a block agree on; the first group decides."""

    scheme: tuple[int, bool] | None = None
    annealing: tuple[Any, ...] = ()
    rule: str = ""
    start_step: int = 0
    bit_schedule: list[tuple[int, int]] = field(default_factory=list)
    activations: tuple[int, bool] | None = None
    targets: list[str] = field(default_factory=list)


def migration(config: Mapping[str, Any]) -> Migration:
    """Return what takes the place of the removed blocks of a DeepSpeed configuration; never raises.

    >>> block = {"shared_parameters": {"enabled": True}, "different_groups": {"wq1": {"params": {"target_bits": 8}}}}
    >>> " ".join(migration({"compression_training": {"weight_quantization": block}}).command)
    'shardwright qat MODEL --scheme W8A16 --dataset DATASET --output-dir OUTPUT'
    """
    found, numbers = Migration(), _Quantized()
    block, mixed = _mapping(config.get("compression_training")), _mapping(config.get("quantize_training"))
    _weight_quantization(found, numbers, _mapping(block.get("weight_quantization")))
    _activation_quantization(found, numbers, _mapping(block.get("activation_quantization")))
    _sparse_pruning(found, _mapping(block.get("sparse_pruning")))
    _row_and_head_pruning(found, block)
    _layer_reduction(found, _mapping(block.get("layer_reduction")))
    if _is_on(mixed):
        _quantize_training(found, numbers, mixed)
    if found.student:
        found.student = ["shardwright", "student", "MODEL", *found.student, "--output-dir", "STUDENT"]
    found.command = _command(numbers, "STUDENT" if found.student else "MODEL")
    return found


def message(config: Mapping[str, Any]) -> str:
    """Return on one line what to run in place of the removed blocks, and what has no equivalent."""
    found = migration(config)
    commands = [shlex.join(command) for command in (found.student, found.command) if command]
    parts = ["use " + ", then ".join(commands)] if commands else []
    if found.callbacks:
        beside = ["QATCallback"] if found.command else []
        parts.append(f"in Python Trainer(callbacks=[{', '.join([*beside, *found.callbacks])}])")
    if found.dropped:
        parts.append("no equivalent: " + ", ".join(f"{key} ({why})" for key, why in found.dropped.items()))
    return "; ".join([*parts, f"see {GUIDE}"]) if parts else "remove it: nothing in it is enabled"


def _weight_quantization(found: Migration, numbers: _Quantized, block: Mapping[str, Any]) -> None:
    where, shared = "weight_quantization", _shared(block)
    if not _is_on(shared):
        return
    symmetric = shared.get("quantization_type", "symmetric") != "asymmetric"
    anneals = shared.get("quantize_weight_in_forward") is not True
    for name, params, modules in _groups(found, where, block):
        target = params.get("target_bits")
        start = params.get("start_bits", target) if anneals else target
        steps = _count(shared.get("schedule_offset"), 0), _count(params.get("quantization_period"), 1)
        if _weights(found, numbers, f"{where}.{name}", (start, target), steps, symmetric=symmetric):
            numbers.targets += modules
    _name_dropped(found, where, shared)


def _quantize_training(found: Migration, numbers: _Quantized, block: Mapping[str, Any]) -> None:
    where = "quantize_training"
    if numbers.scheme is not None:
        found.dropped[where] = "weight_quantization says the same"
        return
    bits, schedule = _mapping(block.get("quantize_bits")), _mapping(block.get("quantize_schedule"))
    algorithm = {**_mapping(block.get("quantize-algo")), **_mapping(block.get("quantize_algo"))}
    steps = _count(schedule.get("schedule_offset"), 1000), _count(schedule.get("quantize_period"), 1000)
    symmetric = "asymmetric" not in (algorithm.get("q_type"), block.get("quantize_type"))
    _weights(
        found, numbers, where, (bits.get("start_bits", 16), bits.get("target_bits", 8)), steps, symmetric=symmetric
    )
    _name_dropped(found, where, {**block, "rounding": algorithm.get("rounding")})


def _weights(
    found: Migration, numbers: _Quantized, key: str, bits: tuple[Any, Any], steps: tuple[int, int], *, symmetric: bool
) -> bool:
    """Take over the bits of one group at their steps; `False` if another group has set others."""
    (start, target), (offset, period) = bits, steps
    if not (_is_count(target) and 1 <= target <= 8):
        found.dropped[f"{key}.target_bits"] = "codes have 1 to 8 bits"
        return False
    # Three values and two are stored as 2-bit codes, which have no zero point.
    scheme, annealing = (max(target, 2), symmetric or target < 3), (start, target, period)
    if numbers.scheme is None:
        numbers.scheme, numbers.annealing, numbers.start_step = scheme, annealing, offset
        numbers.rule = {1: "binary", 2: "ternary"}.get(target, "")
        if _is_count(start) and target < start <= 32:
            if numbers.rule:
                found.dropped[f"{key}.start_bits"] = f"{numbers.rule} weights have no wider form to begin with"
            else:
                _anneal(numbers, start, target, offset, period)
    elif numbers.scheme != scheme:
        found.dropped[key] = "all layers of a checkpoint have one scheme; train with the bits that most layers need"
        return False
    elif numbers.annealing != annealing:
        found.dropped[f"{key}.start_bits"] = "all layers lose bits at the same steps, those of the first group"
    return True


def _anneal(numbers: _Quantized, start: int, target: int, offset: int, period: int) -> None:
    """One bit less after `period` steps, the next after twice as many, and so on (`runtime/quantize.py`)."""
    bits_from = {offset: start}
    for lost in range(1, start - target + 1):
        bits_from[offset + period * 2 ** (lost - 1)] = start - lost
    # Above 8 bits there are no codes: weights stay dense until then.
    trained = [(step, bits) for step, bits in sorted(bits_from.items()) if bits <= 8]
    numbers.start_step, numbers.bit_schedule = trained[0][0], trained if len(trained) > 1 else []


def _activation_quantization(found: Migration, numbers: _Quantized, block: Mapping[str, Any]) -> None:
    where, shared = "activation_quantization", _shared(block)
    if not _is_on(shared):
        return
    if numbers.scheme is None:
        found.dropped[where] = "inputs are rounded together with weights, 8 bits for both in W8A8"
        return
    static = shared.get("range_calibration", "dynamic") == "static"
    for name, params, _ in _groups(found, where, block):
        bits = params.get("bits")
        if numbers.activations not in (None, (bits, static)):
            found.dropped[f"{where}.{name}"] = "all layers have one scheme"
        elif bits == 8 or (bits == 4 and numbers.scheme[0] <= 4):
            numbers.activations = (bits, static)
        else:
            found.dropped[f"{where}.{name}.bits"] = "inputs have 8 bits, or 4 beside weights of up to 4"
    if numbers.activations is None:
        return
    if static and (numbers.activations[0], *numbers.scheme) != (8, 8, True):
        found.dropped[f"{where}.range_calibration"] = "stored ranges come with symmetric 8-bit weights (W8A8_STATIC)"
        numbers.activations = (numbers.activations[0], False)
    _name_dropped(found, where, shared)
    if _count(shared.get("schedule_offset"), 1000) != numbers.start_step:
        found.dropped[f"{where}.schedule_offset"] = f"inputs are rounded from the weights' step {numbers.start_step} on"


def _command(numbers: _Quantized, model: str) -> list[str]:
    if numbers.scheme is None:
        return []
    (bits, symmetric), (inputs, static) = numbers.scheme, numbers.activations or (16, False)
    name = f"W{bits}A{inputs}" + "_STATIC" * static
    command = ["shardwright", "qat", model, "--scheme", name, "--dataset", "DATASET", "--output-dir", "OUTPUT"]
    command += [] if symmetric else ["--asymmetric"]
    command += ["--weight-rule", numbers.rule] if numbers.rule else []
    command += ["--ranges", "moving_average"] if static else []
    command += ["--start-step", str(numbers.start_step)] if numbers.start_step else []
    if numbers.bit_schedule:
        command += ["--bit-schedule", ",".join(f"{step}:{width}" for step, width in numbers.bit_schedule)]
    targets = list(dict.fromkeys(numbers.targets))
    return command + (["--targets", ",".join(targets)] if targets and "Linear" not in targets else [])


def _sparse_pruning(found: Migration, block: Mapping[str, Any]) -> None:
    where, shared = "sparse_pruning", _shared(block)
    if not _is_on(shared):
        return
    offset, pattern = _count(shared.get("schedule_offset"), 1000), ""
    steps = f"start_step={offset}, end_step={offset}"
    groups: list[tuple[str, Mapping[str, Any], list[str]]] = list(_groups(found, where, block))
    if shared.get("method", "l1") == "snip_momentum":
        pattern = ', pattern="2:4"' if shared.get("block_pattern") == "2:4" else ""
        if not pattern:
            found.dropped[f"{where}.block_pattern"] = "zeros are single weights, or 2:4"
        end = max(_count(shared.get("schedule_offset_end"), offset), offset)
        every = max(_count(shared.get("schedule_offset_stride"), 1), 1)
        steps = f"start_step={offset}, end_step={end}, every={every}"
        excluded = _patterns(found, f"{where}.excluded_modules", shared.get("excluded_modules", []))
        if excluded:
            # The callback refuses patterns that no layer matches, and the model is not known here.
            ignore = ["lm_head", *excluded]
            found.dropped[f"{where}.excluded_modules"] = f"where the model has such layers, add ignore={ignore!r}"
        groups = [("shared_parameters", {"dense_ratio": 0.1, **shared}, ["Linear"])]
    for name, params, modules in groups:
        kept = _share(params.get("dense_ratio"))
        if kept is None or (pattern and kept != 0.5):
            found.dropped[f"{where}.{name}.dense_ratio"] = "2:4 keeps half of the weights" if kept else _NO_SHARE
            continue
        targets = "" if "Linear" in modules or not modules else f", targets={modules!r}"
        found.callbacks.append(f"MagnitudePruningCallback({round(1 - kept, 12):g}, {steps}{pattern}{targets})")


def _row_and_head_pruning(found: Migration, block: Mapping[str, Any]) -> None:
    for where in ("row_pruning", "head_pruning"):
        part = _mapping(block.get(where))
        for name, params, _ in _groups(found, where, part) if _is_on(_shared(part)) else ():
            key, kept = f"{where}.{name}", _share(params.get("dense_ratio"))
            heads = _shared(part).get("num_heads")
            if kept is None:
                found.dropped[f"{key}.dense_ratio"] = _NO_SHARE
            elif where == "row_pruning":
                if _mapping(_mapping(part.get("different_groups")).get(name)).get("related_modules"):
                    found.dropped[key] = "rows are cut before training: shardwright student --intermediate N"
                elif "--sparsity" in found.student:
                    found.dropped[key] = "rows of all layers become zero alike"
                else:
                    zeros = f"{round(1 - kept, 12):g}"
                    found.student += ["--sparsity", zeros, "--granularity", "row", "--prune", "l1"]
            elif not (_is_count(heads) and 1 <= heads <= 4096):
                found.dropped[f"{key}.num_heads"] = "heads are cut before training: shardwright student --heads N"
            elif "--heads" in found.student:
                found.dropped[key] = "all layers keep equally many heads"
            else:
                found.student += ["--heads", str(max(math.ceil(kept * heads), 1))]
    if _is_on(_shared(_mapping(block.get("channel_pruning")))):
        found.dropped["channel_pruning"] = "was for convolutions, which language models do not have"


def _layer_reduction(found: Migration, block: Mapping[str, Any]) -> None:
    if not _is_on(block):
        return
    chosen, count = block.get("teacher_layer"), block.get("keep_number_layer")
    if isinstance(chosen, list) and 0 < len(chosen) <= 1024 and all(_is_count(layer) for layer in chosen):
        found.student[:0] = ["--keep-layers", ",".join(str(layer) for layer in chosen)]
    elif _is_count(count) and count:
        found.student[:0] = ["--layers", str(count)]
    else:
        found.dropped["layer_reduction"] = "names no layers: shardwright student --layers N"


def _name_dropped(found: Migration, where: str, settings: Mapping[str, Any]) -> None:
    for name, value, why in _NO_EQUIVALENT[where]:
        stated = settings.get(name)
        if stated == value if isinstance(value, str) else stated is True or _is_on(_mapping(stated)):
            found.dropped[f"{where}.{name}"] = why


def _groups(
    found: Migration, where: str, block: Mapping[str, Any]
) -> Iterator[tuple[str, Mapping[str, Any], list[str]]]:
    """Yield name, parameters and targets of each group of modules."""
    for name, group in list(_mapping(block.get("different_groups")).items())[:_MOST_GROUPS]:
        text = str(name)[:_LONGEST_NAME]
        key = text if text.isprintable() else repr(text)
        modules = _patterns(found, f"{where}.{key}.modules", _mapping(group).get("modules", "*"))
        yield key, _mapping(_mapping(group).get("params")), modules


def _patterns(found: Migration, key: str, modules: Any) -> list[str]:
    """Return targets for patterns that DeepSpeed searched for anywhere in a module's name."""
    listed = [modules] if isinstance(modules, str) else modules if isinstance(modules, list) else []
    # Targets are separated by commas where commands take them.
    usable = [
        each
        for each in listed
        if isinstance(each, str) and each.isprintable() and len(each) <= _LONGEST_NAME and "," not in each
    ]
    if len(usable) < len(listed) or len(listed) > _MOST_TARGETS:
        found.dropped[key] = f"has entries that are no names, or have a comma, or are more than {_MOST_TARGETS}"
    return ["Linear" if each in ("*", "") else f"re:.*{each}" for each in usable[:_MOST_TARGETS]]


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _shared(block: Mapping[str, Any]) -> Mapping[str, Any]:
    return _mapping(block.get("shared_parameters"))


def _is_on(block: Mapping[str, Any]) -> bool:
    return block.get("enabled") is True


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _count(value: Any, otherwise: int) -> int:
    return value if _is_count(value) else otherwise


def _share(value: Any) -> float | None:
    """Return a share above 0, up to 1; `None` for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 < value <= 1 else None
