"""`--hardware local` on a CPU host: real ranks measure it once, and later plans and other commands use the rates."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import Result, shell_in
from shardwright.ds_configs.specs.errors import UsageError
from shardwright.ds_configs.specs.job import TrainingJob
from shardwright.ds_configs.step_time.cpu_ranks import MeasuredCpu, cpu_hardware
from shardwright.ds_configs.step_time.model_work import device_of, product_seconds
from shardwright.ds_configs.step_time.rates import TRANSFORMERS, constants_of, group_of, reduction_seconds
from shardwright.plugins.planning import cpu_host
from shardwright.plugins.planning.calibration_store import CalibrationStore
from shardwright.plugins.planning.cpu_host import local_cpu_hardware
from small_models import llama

GIB = 2**30
CPU = MeasuredCpu(
    cpu="Some CPU",
    cores=2,
    ranks=2,
    threads=1,
    torch="2.13.0",
    fp32_flops_per_s=80e9,
    bf16_flops_per_s=160e9,
    fp32_attention_flops_per_s=20e9,
    bf16_attention_flops_per_s=6e9,
    memory_bytes_per_s=10e9,
    link_bytes_per_s=2e9,
    spread=0.05,
)
RATES = {name: getattr(CPU, name) for name in MeasuredCpu.__slots__ if name.endswith("_per_s")} | {"spread": 0.05}

Plan = Callable[..., Result]


@pytest.fixture
def plan(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Plan:
    """Return a function that runs `shardwright plan` for a small Llama on this machine, without accelerators."""
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("SHARDWRIGHT_DATA_DIR", str(tmp_path / "data"))
    llama(hidden_size=64, vocab_size=512).config.save_pretrained(tmp_path / "model")
    shell = shell_in(tmp_path, "plan", capsys, monkeypatch)
    words = ("model", "--hardware", "local", "--seq-len", "32", "--global-batch-size", "4", "--precision", "fp32")
    return lambda *flags: shell(*words, "--format", "json", *flags)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Replace the measurement by known rates, and return the numbers of ranks that were measured."""
    calls: list[int] = []

    def rates(ranks: int) -> dict[str, float]:
        calls.append(ranks)
        return RATES

    monkeypatch.setattr(cpu_host, "_measured_rates", rates)
    return calls


@pytest.mark.distributed
def test_real_ranks_are_measured_once(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    first = plan()
    assert first.code == 0, first.err
    assert "note: measured 2 CPU ranks of 1 thread on " in first.err
    hardware = json.loads(first.out)["hardware"]
    assert (hardware["name"], hardware["gpu"], hardware["gpus_per_node"]) == ("2xCPU (local)", "CPU", 2)
    assert hardware["source"].startswith("measured: 2 CPU ranks") and hardware["assumed"] == []
    (cpu,) = CalibrationStore().cpus()
    # The slowest machine and the fastest differ by less than this, and a wrong unit by more.
    assert 1e8 < cpu.fp32_flops_per_s < 1e13 and 1e7 < cpu.bf16_flops_per_s < 1e14
    assert 1e7 < cpu.fp32_attention_flops_per_s < 1e13 and 1e7 < cpu.bf16_attention_flops_per_s < 1e14
    assert 1e8 < cpu.memory_bytes_per_s < 1e12 and 1e6 < cpu.link_bytes_per_s < 1e12 and cpu.spread >= 0
    assert hardware["fp32_flops_per_s"] == pytest.approx(cpu.fp32_flops_per_s / constants_of("CPU").fp32_efficiency)

    monkeypatch.setattr(cpu_host, "launch_ranks", lambda *_, **__: pytest.fail("measured again"))
    second = plan()
    assert second.code == 0 and "note: using stored rates of 2 CPU ranks" in second.err
    assert json.loads(second.out)["hardware"] == hardware


def test_rates_are_predicted_back() -> None:
    """A product and an all-reduce take the time in which they were measured."""
    hardware = cpu_hardware(CPU, host_bytes=24 * GIB)
    constants = constants_of("CPU")
    for precision, rate, attention in (("fp32", 80e9, 20e9), ("bf16", 160e9, 6e9)):
        device = device_of(hardware, TrainingJob(precision=precision), TRANSFORMERS, constants)
        border, depth = constants.product_border, constants.product_depth
        flops = 2 * (512 + border) ** 2 * (512 + depth)
        assert product_seconds(device, 512, 512, 512) == pytest.approx(flops / rate)
        assert device.attention_flops_per_s == attention
        assert device.memory_bytes_per_s == pytest.approx(CPU.memory_bytes_per_s)
    group = group_of(hardware, constants, ranks=2)
    assert reduction_seconds(group, 64e6, calls=0) == pytest.approx(64e6 / CPU.link_bytes_per_s)
    # Tensors of ranks and host memory are never the same bytes.
    assert hardware.gpu_bytes * 2 + hardware.host_bytes_per_node == 24 * GIB


def test_rates_belong_to_ranks_threads_and_release(
    plan: Plan, measured: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert plan().code == 0 and plan().code == 0 and measured == [2]
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert "2 CPU ranks of 2 threads" in plan().err
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    one = json.loads(plan("--num-processes", "1").out)["hardware"]
    assert (one["name"], measured) == ("1xCPU (local)", [2, 2, 1])
    known = cpu_host.metadata.version
    monkeypatch.setattr(cpu_host.metadata, "version", lambda name: "99.0" if name == "torch" else known(name))
    other = plan()
    assert other.code == 0 and "the stored rates of CPU ranks are of another release of torch" in other.err
    # What was measured is kept.
    assert measured == [2, 2, 1, 2] and len(CalibrationStore().cpus()) == 4


@pytest.mark.parametrize("ranks", [0, 10_000])
def test_more_ranks_than_cores_are_rejected(ranks: int, measured: list[int]) -> None:
    with pytest.raises(UsageError, match=f"num_processes = {ranks}: must be from 1 to .*--hardware {ranks}xCPU"):
        local_cpu_hardware(ranks)
    assert not measured
