"""DeepSpeed's removed compression blocks become commands that run, and nothing of them is dropped without a word."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shardwright.ds_configs.check import check_text
from shardwright.ds_configs.quantization.combinations import changed
from shardwright.ds_configs.quantization.compression_training import Migration, message, migration
from shardwright.ds_configs.quantization.scheme import scheme_named

_WEIGHTS = {
    "shared_parameters": {
        "enabled": True,
        "quantizer_kernel": False,
        "schedule_offset": 0,
        "quantize_groups": 1,
        "quantize_verbose": False,
        "quantization_type": "symmetric",
        "rounding": "nearest",
        "fp16_mixed_quantize": {"enabled": False, "quantize_change_ratio": 0.001},
    },
    "different_groups": {
        "wq1": {
            "params": {"start_bits": 8, "target_bits": 8, "quantization_period": 50},
            "modules": ["attention.self", "intermediate"],
        }
    },
}


def weights(params: dict[str, Any] | None = None, **shared: Any) -> dict[str, Any]:
    block = json.loads(json.dumps(_WEIGHTS))
    block["shared_parameters"] |= shared
    block["different_groups"]["wq1"]["params"] |= params or {}
    return block


def activations(bits: int = 8, **shared: Any) -> dict[str, Any]:
    wanted = {"enabled": True, "quantization_type": "symmetric", "range_calibration": "dynamic", "schedule_offset": 0}
    group = {"params": {"bits": bits}, "modules": ["attention.output"]}
    return {"shared_parameters": wanted | shared, "different_groups": {"aq1": group}}


def pruning(groups: dict[str, Any], **shared: Any) -> dict[str, Any]:
    return {"shared_parameters": {"enabled": True, **shared}, "different_groups": groups}


def found(**block: Any) -> Migration:
    return migration({"compression_training": block})


def options(command: Sequence[str]) -> dict[str, str]:
    """Return flags with their values."""
    flags: dict[str, str] = {}
    for index, word in enumerate(command):
        if word.startswith("--"):
            following = command[index + 1] if index + 1 < len(command) else "--"
            flags[word] = "" if following.startswith("--") else following
    return flags


def faults_of(command: Sequence[str]) -> list[Any]:
    """Return what quantization-aware training has against a command."""
    from shardwright.trainers.qat.rounding.config import QATConfig

    flags = options(command)
    scheme = scheme_named(flags["--scheme"])
    if "--asymmetric" in flags:
        scheme = changed(scheme, symmetric=False)
    schedule = [pair.split(":") for pair in flags.get("--bit-schedule", "").split(",") if pair]
    config = QATConfig(
        scheme=scheme,
        weight_rule=flags.get("--weight-rule", "minmax"),  # type: ignore[arg-type]
        ranges=flags.get("--ranges", "calibrated"),  # type: ignore[arg-type]
        start_step=int(flags.get("--start-step", 0)),
        bit_schedule=tuple((int(step), int(bits)) for step, bits in schedule),
    )
    return config.faults()


def dropped(result: Migration) -> list[str]:
    return list(result.dropped)


def test_eight_bit_weights_of_some_modules() -> None:
    result = found(weight_quantization=weights())
    assert shlex.join(result.command) == (
        "shardwright qat MODEL --scheme W8A16 --dataset DATASET --output-dir OUTPUT "
        "--targets 're:.*attention.self,re:.*intermediate'"
    )
    assert not result.dropped and not result.student and not result.callbacks


def test_bits_are_lost_after_periods_that_double() -> None:
    """The reference is the counting loop of DeepSpeed's quantizer: one bit less when its step reaches the period."""
    offset, period = 100, 30
    params = {"start_bits": 8, "target_bits": 4, "quantization_period": period}
    result = found(weight_quantization=weights(params, schedule_offset=offset))
    flags = options(result.command)
    steps = [tuple(map(int, pair.split(":"))) for pair in flags["--bit-schedule"].split(",")]
    bits, wait, expected = 8, period, [(offset, 8)]
    for taken in range(1, 2000):
        if bits != 4 and taken >= wait:
            wait, bits = 2 * wait, bits - 1
            expected.append((offset + taken, bits))
    assert steps == expected == [(100, 8), (130, 7), (160, 6), (220, 5), (340, 4)]
    assert flags["--start-step"] == "100" and flags["--scheme"] == "W4A16"
    assert not faults_of(result.command)


def test_bits_above_eight_are_full_precision() -> None:
    params = {"start_bits": 12, "target_bits": 6, "quantization_period": 10}
    flags = options(found(weight_quantization=weights(params)).command)
    assert flags["--start-step"] == "80" and flags["--bit-schedule"] == "80:8,160:7,320:6"
    at_once = weights({"start_bits": 12, "target_bits": 6}, quantize_weight_in_forward=True)
    flags = options(found(weight_quantization=at_once).command)
    assert "--start-step" not in flags and "--bit-schedule" not in flags


@pytest.mark.parametrize(("bits", "rule"), [(2, "ternary"), (1, "binary")])
def test_one_and_two_bits_were_binary_and_ternary(bits: int, rule: str) -> None:
    result = found(weight_quantization=weights({"start_bits": 8, "target_bits": bits}))
    flags = options(result.command)
    assert flags["--scheme"] == "W2A16" and flags["--weight-rule"] == rule
    assert dropped(result) == ["weight_quantization.wq1.start_bits"]
    assert not faults_of(result.command)


def test_activations() -> None:
    both = found(weight_quantization=weights(), activation_quantization=activations())
    assert options(both.command)["--scheme"] == "W8A8" and not both.dropped
    static = found(weight_quantization=weights(), activation_quantization=activations(range_calibration="static"))
    assert options(static.command)["--scheme"] == "W8A8_STATIC"
    assert options(static.command)["--ranges"] == "moving_average"
    narrow = weights({"target_bits": 4, "start_bits": 4})
    four = found(weight_quantization=narrow, activation_quantization=activations(4))
    assert options(four.command)["--scheme"] == "W4A4"
    late = activations(8, quantization_type="asymmetric", schedule_offset=50, range_calibration="static")
    mixed = found(weight_quantization=narrow, activation_quantization=late)
    assert options(mixed.command)["--scheme"] == "W4A8"
    assert dropped(mixed) == [
        f"activation_quantization.{key}" for key in ("range_calibration", "quantization_type", "schedule_offset")
    ]
    alone = found(activation_quantization=activations())
    assert not alone.command and dropped(alone) == ["activation_quantization"]
    for result in (both, static, four, mixed):
        assert not faults_of(result.command)


def test_groups_of_different_bits_and_settings_of_their_kernel_are_named() -> None:
    block = weights(rounding="stochastic", quantizer_kernel=True, quantize_groups=64, quantization_type="asymmetric")
    block["shared_parameters"]["fp16_mixed_quantize"]["enabled"] = True
    block["different_groups"]["wq2"] = {"params": {"start_bits": 4, "target_bits": 4}, "modules": ["output"]}
    block["different_groups"]["wq3"] = {"params": {"target_bits": 16}}
    result = found(weight_quantization=block)
    assert options(result.command)["--asymmetric"] == ""
    assert "output" not in " ".join(result.command[9:])
    assert dropped(result) == [
        f"weight_quantization.{key}"
        for key in ("wq2", "wq3.target_bits", "rounding", "fp16_mixed_quantize", "quantizer_kernel")
    ]
    assert not faults_of(result.command)


def test_pruning_becomes_callbacks_that_can_be_made() -> None:
    from shardwright.trainers.sparsity.magnitude_pruning_callback import MagnitudePruningCallback

    groups = {"sp1": {"params": {"dense_ratio": 0.3}, "modules": ["self_attn", "mlp"]}}
    result = found(sparse_pruning=pruning(groups, schedule_offset=30, method="topk"))
    expected = "MagnitudePruningCallback(0.7, start_step=30, end_step=30, targets=['re:.*self_attn', 're:.*mlp'])"
    assert result.callbacks == [expected] and not result.dropped
    shared = {"method": "snip_momentum", "schedule_offset": 10, "schedule_offset_end": 50, "schedule_offset_stride": 5}
    snip = found(sparse_pruning=pruning({}, **shared, dense_ratio=0.5, block_pattern="2:4", excluded_modules=["head"]))
    assert snip.callbacks == ['MagnitudePruningCallback(0.5, start_step=10, end_step=50, every=5, pattern="2:4")']
    assert dropped(snip) == ["sparse_pruning.excluded_modules"]
    assert "add ignore=['lm_head', 're:.*head']" in snip.dropped["sparse_pruning.excluded_modules"], (
        "a model may have no such layers"
    )
    for text in (*result.callbacks, *snip.callbacks):
        made = eval(text, {"MagnitudePruningCallback": MagnitudePruningCallback})  # noqa: S307 - our own text
        assert made.schedule.end_step in (30, 50)
    blocks = found(sparse_pruning=pruning({}, **shared, dense_ratio=0.4))
    assert dropped(blocks) == ["sparse_pruning.block_pattern"] and "0.6" in blocks.callbacks[0]
    wrong = found(sparse_pruning=pruning({"sp1": {"params": {"dense_ratio": 3}}}))
    assert dropped(wrong) == ["sparse_pruning.sp1.dense_ratio"] and not wrong.callbacks


def test_smaller_students_are_made_before() -> None:
    from shardwright.trainers.distillation.student.request import StudentRequest

    reduction = {"enabled": True, "keep_number_layer": 5, "module_name_prefix": "bert.encoder.layer"}
    heads = pruning({"hp1": {"params": {"dense_ratio": 0.5}, "related_modules": [["q"]]}}, num_heads=12, method="topk")
    result = found(
        layer_reduction=reduction | {"teacher_layer": [1, 3, 5, 7, 9], "other_module_name": ["bert.pooler"]},
        head_pruning=heads,
        row_pruning=pruning({"rp1": {"params": {"dense_ratio": 0.25}}}),
        channel_pruning=pruning({"cp1": {"params": {"dense_ratio": 0.25}}}),
        weight_quantization=weights(),
    )
    assert shlex.join(result.student) == (
        "shardwright student MODEL --keep-layers 1,3,5,7,9 --sparsity 0.75 --granularity row --prune l1 --heads 6 "
        "--output-dir STUDENT"
    )
    assert result.command[2] == "STUDENT"
    assert dropped(result) == ["channel_pruning"]
    flags = options(result.student)
    request = StudentRequest(
        keep_layers=tuple(map(int, flags["--keep-layers"].split(","))),
        heads=int(flags["--heads"]),
        sparsity=float(flags["--sparsity"]),
        granularity="row",
        prune="l1",
    )
    assert request.heads == 6
    assert "--layers 5" in shlex.join(found(layer_reduction=reduction).student)
    related = pruning({"rp1": {"params": {"dense_ratio": 0.25}, "related_modules": [["dense"]]}})
    assert dropped(found(row_pruning=related)) == ["row_pruning.rp1"]


def test_mixed_quantization_of_training() -> None:
    block = {
        "enabled": True,
        "quantizer_kernel": True,
        "quantize-algo": {"q_type": "symmetric"},
        "quantize_bits": {"start_bits": 16, "target_bits": 8},
        "quantize_schedule": {"quantize_period": 400, "schedule_offset": 0},
        "quantize_groups": 8,
        "eigenvalue": {"enabled": True},
    }
    result = migration({"quantize_training": block})
    # From 16 bits: 15 after 400 steps, 14 after 800, ..., 8 after 400 · 2^7.
    assert options(result.command)["--start-step"] == str(400 * 2**7)
    assert "--bit-schedule" not in result.command
    assert dropped(result) == ["quantize_training.quantizer_kernel", "quantize_training.eigenvalue"]
    other = block | {"quantize-algo": {}, "quantize_type": "asymmetric", "quantize_bits": {"target_bits": 4}}
    assert "--asymmetric" in migration({"quantize_training": other}).command
    assert not faults_of(migration({"quantize_training": other}).command)
    assert not migration({"quantize_training": block | {"enabled": False}}).command


def test_the_check_prints_what_to_run() -> None:
    text = json.dumps({"train_batch_size": 8, "compression_training": {"weight_quantization": weights()}}, indent=1)
    findings = [each for each in check_text(text, filename="old.json") if "compression_training" in each.fault.where]
    assert len(findings) == 1 and findings[0].kind == "error" and ":3 " in findings[0].fault.where
    assert "use shardwright qat MODEL --scheme W8A16" in findings[0].fault.fix
    assert "docs/guides/migrate_compression_training.md" in findings[0].fault.fix
    empty = check_text('{"compression_training": {"weight_quantization": {}}}', filename="old.json")
    assert any(each.fault.fix == "remove it: nothing in it is enabled" for each in empty)
    moq = check_text('{"quantize_training": {"enabled": true}}', filename="old.json")
    assert any("shardwright qat" in each.fault.fix for each in moq)


_KEYS = st.sampled_from(
    [
        *("weight_quantization", "activation_quantization", "sparse_pruning", "row_pruning", "head_pruning"),
        *("channel_pruning", "layer_reduction", "shared_parameters", "different_groups", "enabled", "params"),
        *("modules", "related_modules", "start_bits", "target_bits", "quantization_period", "bits", "dense_ratio"),
        *("num_heads", "method", "schedule_offset", "teacher_layer", "keep_number_layer", "quantize_bits"),
        *("quantize_schedule", "quantize_period", "wq1"),
    ]
)
_VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-5, 40),
        st.integers(),
        st.floats(),
        st.text(max_size=8),
        st.sampled_from(["l1", "topk", "snip_momentum", "asymmetric", "static", "2:4", "*"]),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(_KEYS, inner, max_size=6)),
    max_leaves=25,
)


@given(compression=_VALUES, mixed=_VALUES)
def test_whatever_the_blocks_hold_the_answer_is_a_line_and_a_legal_command(compression: Any, mixed: Any) -> None:
    config = {"compression_training": compression, "quantize_training": mixed}
    text = message(config)
    assert "\n" not in text and text.isprintable()
    result = migration(config)
    if result.command:
        assert not faults_of(result.command)


@given(
    target=st.integers(1, 8),
    start=st.integers(1, 16),
    offset=st.integers(0, 10**6),
    period=st.integers(0, 10**6),
    kind=st.sampled_from(["symmetric", "asymmetric"]),
    inputs=st.sampled_from([None, 4, 8, 16]),
    calibration=st.sampled_from(["dynamic", "static"]),
)
def test_every_combination_gives_a_command_without_faults(
    target: int, start: int, offset: int, period: int, kind: str, inputs: int | None, calibration: str
) -> None:
    params = {"start_bits": start, "target_bits": target, "quantization_period": period}
    block = {"weight_quantization": weights(params, schedule_offset=offset, quantization_type=kind)}
    if inputs is not None:
        block["activation_quantization"] = activations(inputs, range_calibration=calibration)
    result = found(**block)
    assert result.command and not faults_of(result.command)
