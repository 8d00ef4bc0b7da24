"""DeepSpeed still loses the optimizer of NVMe runs on resuming; the rehearsal of such a plan shows it restored."""

from __future__ import annotations

import inspect

import pytest


def test_deepspeed_still_skips_the_optimizer_file_of_nvme_runs() -> None:
    """When this fails, try the NVMe rehearsal without `plugins/deepspeed/engine.py`: it may no longer be needed."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    load = inspect.unwrap(DeepSpeedEngine.load_checkpoint)
    assert "if load_zero_checkpoint and not self.zero_nvme_offload_optimizer():" in inspect.getsource(load)


@pytest.mark.parametrize(
    ("nvme", "asked"),
    [
        (False, {"load_module_strict": False}),
        (True, {"load_optimizer_states": False}),
        (True, {"load_module_only": True}),
    ],
)
def test_loads_that_ask_for_no_nvme_optimizer_are_as_before(
    monkeypatch: pytest.MonkeyPatch, nvme: bool, asked: dict[str, bool]
) -> None:
    from deepspeed.runtime.engine import DeepSpeedEngine
    from shardwright.plugins.deepspeed.engine import restore_optimizer_states_from_nvme

    calls = []

    def load(
        self: object,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_module_only: bool = False,
    ) -> tuple[str, dict[str, int]]:
        calls.append((load_dir, tag, load_module_strict, load_optimizer_states, load_module_only))
        return "path", {}

    class Engine:
        def zero_nvme_offload_optimizer(self) -> bool:
            return nvme

    monkeypatch.setattr(DeepSpeedEngine, "load_checkpoint", load)
    restore_optimizer_states_from_nvme()
    found = DeepSpeedEngine.load_checkpoint(Engine(), "directory", "tag", **asked)
    assert found == ("path", {})
    expected = {"load_module_strict": True, "load_optimizer_states": True, "load_module_only": False} | asked
    assert calls == [("directory", "tag", *expected.values())]
