"""Network that machines measured: what plans count on then, what stays, and files that are none."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planning import public_model
from shardwright.ds_configs.plan.plan import make_plan
from shardwright.ds_configs.specs.errors import RefusedInputError
from shardwright.ds_configs.specs.hardware import parse_hardware
from shardwright.ds_configs.specs.job import TrainingJob
from shardwright.ds_configs.step_time.rates import (
    MeasuredNetwork,
    constants_of,
    group_of,
    network_from_text,
    network_text,
    with_measured_network,
)

SLOW = MeasuredNetwork(gpu="A100-80GB", gpus_per_node=8, nodes=2, bytes_per_s=1.5e9)


def test_collective_between_nodes_uses_measured_rate() -> None:
    hardware, warning = with_measured_network(parse_hardware("4x8xA100-80GB"), [replace(SLOW, bytes_per_s=9e9), SLOW])
    assert warning is not None and "measured on 2 such nodes: 1.50 GB/s" in warning
    assert "network_bytes_per_s" not in hardware.assumed
    # One rank of each node, as the comparison measures.
    found = group_of(hardware, constants_of(hardware.gpu), ranks=4, stride=8)
    assert found.bytes_per_s == pytest.approx(1.5e9)
    model, job = public_model("meta-llama--Llama-3.1-8B"), TrainingJob(strategy="zero3", global_batch_size=32)
    times = [make_plan(model, each, job).chosen.time.seconds for each in (parse_hardware("4x8xA100-80GB"), hardware)]
    assert times[1] > 2 * times[0]


def test_other_nodes_and_user_values_are_unchanged() -> None:
    for name in ("2x4xA100-80GB", "2x8xH100-80GB", "8xA100-80GB"):
        hardware = parse_hardware(name)
        assert with_measured_network(hardware, [SLOW]) == (hardware, None)
    stated = replace(parse_hardware("2x8xA100-80GB"), assumed=())
    assert with_measured_network(stated, [SLOW]) == (stated, None)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", network_text(replace(SLOW, bytes_per_s=-1.0)), network_text(replace(SLOW, nodes=1))]
)
def test_invalid_network_files_are_rejected(text: str) -> None:
    assert network_from_text(network_text(SLOW), source="network.json") == SLOW
    with pytest.raises(RefusedInputError, match=r"network\.json: is no"):
        network_from_text(text, source="network.json")
