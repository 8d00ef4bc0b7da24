"""Hardware from names, mappings and this machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shardwright.ds_configs.specs.errors import UsageError
from shardwright.ds_configs.specs.hardware import (
    find_gpu,
    gpu_catalog,
    hardware_from_mapping,
    parse_hardware,
    parse_overrides,
    with_gpus,
)
from shardwright.plugins.planning import detect_hardware, read_hardware

GIB = 2**30
NUMBERS = ("memory_gib", "usable_gib", "bf16_flops", "memory_bytes_per_s", "link_bytes_per_s", "network_bytes_per_s")


@pytest.mark.parametrize("name", gpu_catalog())
def test_every_catalog_entry_is_complete(name: str) -> None:
    entry = gpu_catalog()[name]
    assert all(isinstance(entry[field], int | float) and entry[field] > 0 for field in NUMBERS)
    assert 0.8 * entry["memory_gib"] < entry["usable_gib"] <= entry["memory_gib"] or name == "CPU"
    assert isinstance(entry["host_gib_per_gpu"], int) and entry["host_gib_per_gpu"] > 0
    assert len(entry["source"]) > 10
    assert entry.keys() <= {*NUMBERS, "host_gib_per_gpu", "source", "bf16", "compute_capability", "aliases"}
    # NVIDIA's alone have one: 70 is Volta.
    assert 70 <= entry.get("compute_capability", 70) < 200
    hardware = parse_hardware(f"2x4x{name}")
    assert (hardware.nodes, hardware.gpus_per_node, hardware.world_size, hardware.gpu) == (2, 4, 8, name)
    assert hardware.gpu_bytes == int(entry["usable_gib"] * GIB)
    assert hardware.assumed == ("host_bytes_per_node", "network_bytes_per_s")


@given(
    nodes=st.none() | st.integers(1, 100_000),
    gpus=st.integers(1, 100_000),
    gpu=st.sampled_from(sorted(gpu_catalog())),
    lower=st.booleans(),
)
def test_names_round_trip(nodes: int | None, gpus: int, gpu: str, lower: bool) -> None:
    text = f"{gpus}x{gpu.lower() if lower else gpu}"
    hardware = parse_hardware(text if nodes is None else f"{nodes}x{text}")
    assert (hardware.nodes, hardware.gpus_per_node, hardware.gpu) == (nodes or 1, gpus, gpu)
    assert hardware.supports_bf16 is gpu_catalog()[gpu].get("bf16", True)
    assert parse_hardware(f"{nodes or 1} x {gpus} × {gpu}").world_size == hardware.world_size


@given(text=st.text(max_size=40))
def test_any_text_is_hardware_or_a_usage_error(text: str) -> None:
    try:
        assert parse_hardware(text).world_size >= 1
    except UsageError as error:
        assert all(config_error.where.startswith("hardware") for config_error in error.errors)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("H100", "H100-80GB"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("A100_80G", "A100-80GB"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIe-80GB"),
        ("GeForce 3080", "RTX3080"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTXPRO6000"),
        ("AMD Instinct MI355X", "MI355X"),
    ],
)
def test_aliases_mean_one_entry(written: str, meant: str) -> None:
    assert find_gpu(written) == meant


@pytest.mark.parametrize("name", ["B20", "L4S", "H100-96GB", "RTX4070Ti", "Gaudi"])
def test_unknown_devices_are_errors_with_candidates(name: str) -> None:
    with pytest.raises(UsageError, match=r"is not in the catalog of accelerators; nearest: .*YAML file"):
        parse_hardware(f"8x{name}")


def test_reports_all_errors_of_a_name_together() -> None:
    with pytest.raises(UsageError) as caught:
        parse_hardware("0x0xA10080", host_memory="lots", nvme="disk:1TB")
    assert [config_error.where for config_error in caught.value.errors] == [
        "hardware nodes",
        "hardware gpus_per_node",
        "host_memory",
        "nvme",
    ]
    with pytest.raises(UsageError, match="must have the form"):
        parse_hardware("9" * 5000 + "xT4")


def test_overrides_set_memory_and_nvme() -> None:
    hardware = parse_hardware("8xA100-80GB", host_memory="2TB", nvme="/mnt/a:b:3.5TB")
    assert hardware.host_bytes_per_node == 2 * 10**12
    assert (hardware.nvme_path, hardware.nvme_bytes_per_node) == ("/mnt/a:b", 3_500_000_000_000)
    assert hardware.assumed == ()
    for bad in ("/x:", "/x", "x:1TB", "/x:0B"):
        with pytest.raises(UsageError, match="nvme"):
            parse_overrides(nvme=bad)
    with pytest.raises(UsageError, match="at least one byte"):
        parse_overrides(host_memory="0GB")
    with pytest.raises(UsageError, match="host_memory = '80': has no unit; write 80GB"):
        parse_overrides(host_memory="80", nvme="/nvme:1TB")


def test_reports_all_errors_of_a_mapping_together() -> None:
    data: dict[Any, Any] = {
        "gpu": "A100",
        "nodes": 0,
        "gpus_per_nod": 8,
        "gpu_bytes": -1,
        "link_bytes_per_s": "fast",
        "flops_per_s": float("nan"),
        "supports_bf16": "yes",
        "name": ["x"],
        "source": "a\nrm -rf",
        "nvme_path": "/nvme",
        7: 8,
    }
    with pytest.raises(UsageError) as caught:
        hardware_from_mapping(data, name="h.yaml")
    text = str(caught.value)
    assert "gpus_per_nod: is not a hardware field; did you mean gpus_per_node?" in text
    for part in ("nodes = 0", "gpu_bytes = -1", "'fast'", "nan", "'yes'", "name = ", "source = ", "nvme_path", "7: is"):
        assert part in text
    assert "A100-40GB, A100-80GB" in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- 1", "must be a mapping"),
        ("!!python/object/apply:os.getcwd []", "is not valid YAML"),
        ("gpu: [A100-80GB]", "must be a single value"),
        ("a: &a [x, x]\nb: &b [*a, *a]\ngpu: [*b, *b]", "must be a single value"),
        ("gpu: A100-80GB\n# " + "x" * 2**20, "must be at most 65536 bytes"),
    ],
)
def test_rejects_invalid_hardware_yaml(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "h.yaml"
    file.write_text(text)
    with pytest.raises(UsageError, match=message):
        read_hardware(str(file))


def test_reads_hardware_yaml(tmp_path: Path) -> None:
    file = tmp_path / "h.yaml"
    file.write_text("gpu: H100-80GB\ngpus_per_node: 8\nflops_per_s: 9e14\n")
    hardware = read_hardware(str(file), host_memory="1TiB", nvme="/nvme:2TB")
    assert (hardware.gpu, hardware.host_bytes_per_node, hardware.flops_per_s) == ("H100-80GB", 2**40, 9e14)
    assert (hardware.nvme_path, hardware.nvme_bytes_per_node) == ("/nvme", 2 * 10**12)
    for missing in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(UsageError, match="cannot be read"):
            read_hardware(str(missing) if missing.suffix else f"{missing.rename(tmp_path.with_suffix('.yaml'))}")


@pytest.mark.parametrize(
    ("driver_name", "gib", "gpu"),
    [
        ("NVIDIA A100-SXM4-80GB", 79.2, "A100-80GB"),
        ("NVIDIA A100-PCIE-40GB", 39.4, "A100-PCIe-40GB"),
        ("AMD Instinct MI300X", 191.7, "MI300X"),
    ],
)
def test_detection_uses_the_memory_of_the_driver(
    monkeypatch: pytest.MonkeyPatch, driver_name: str, gib: float, gpu: str
) -> None:
    memory = [int((gib + 1) * GIB), int(gib * GIB), *[int((gib + 1) * GIB)] * 2]
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setattr(
        "torch.cuda.get_device_properties", lambda i: SimpleNamespace(name=driver_name, total_memory=memory[i])
    )
    hardware = detect_hardware(host_memory="1TB")
    assert (hardware.gpu, hardware.gpus_per_node, hardware.nodes) == (gpu, 4, 1)
    assert hardware.gpu_bytes == int(gib * GIB)
    assert hardware.host_bytes_per_node == 10**12
    assert hardware.assumed == ()
    assert 2**20 < detect_hardware().host_bytes_per_node < 2**50
    # The limit of a container, far below the memory of its machine.
    monkeypatch.setattr(Path, "read_text", lambda _: "1048576\n")
    assert detect_hardware().host_bytes_per_node == 2**20


@pytest.mark.parametrize(("nodes", "gpus"), [(1, 4), (2, 4), (3, 8)])
@pytest.mark.parametrize("host_memory", [None, "1TB"])
def test_a_cluster_of_another_size_is_the_one_of_its_name(nodes: int, gpus: int, host_memory: str | None) -> None:
    resized = with_gpus(parse_hardware("8xA100-80GB", host_memory=host_memory), nodes=nodes, gpus_per_node=gpus)
    assert replace(parse_hardware(resized.name, host_memory=host_memory), assumed=resized.assumed) == resized


@pytest.mark.parametrize("name", ["4xT4", "2x8xH20", "3xCPU", "FILE"])
@pytest.mark.parametrize(("host_memory", "nvme"), [(None, None), ("1TB", "/x:2TB"), ("3GiB", None)])
def test_options_make_the_same_hardware(name: str, host_memory: str | None, nvme: str | None, tmp_path: Path) -> None:
    (tmp_path / "h.yaml").write_text("gpu: H100-80GB\ngpus_per_node: 4\nflops_per_s: 9e14\n")
    name = name.replace("FILE", str(tmp_path / "h.yaml"))
    hardware = read_hardware(name, host_memory=host_memory, nvme=nvme)
    options = hardware.options()
    assert read_hardware(options.pop("hardware"), **options) == hardware
