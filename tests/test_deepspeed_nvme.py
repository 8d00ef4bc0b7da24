"""DeepSpeed still loses the optimizer of NVMe runs on resuming; the rehearsal of such a plan shows it restored."""

from __future__ import annotations

import inspect


def test_deepspeed_still_skips_the_optimizer_file_of_nvme_runs() -> None:
    """When this fails, try the NVMe rehearsal without `plugins/deepspeed_nvme.py`: it may no longer be needed."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    load = inspect.unwrap(DeepSpeedEngine.load_checkpoint)
    assert "if load_zero_checkpoint and not self.zero_nvme_offload_optimizer():" in inspect.getsource(load)


def test_other_runs_load_as_before(monkeypatch) -> None:
    from deepspeed.runtime.engine import DeepSpeedEngine
    from shardwright.plugins.deepspeed_nvme import restore_optimizer_states_from_nvme

    calls = []

    def load(engine: object, *args: object, **kwargs: object) -> tuple[str, dict[str, int]]:
        calls.append((args, kwargs))
        return "path", {}

    class Engine:
        def zero_nvme_offload_optimizer(self) -> bool:
            return False

    monkeypatch.setattr(DeepSpeedEngine, "load_checkpoint", load)
    restore_optimizer_states_from_nvme.cache_clear()
    restore_optimizer_states_from_nvme()
    found = DeepSpeedEngine.load_checkpoint(Engine(), "directory", "tag", load_module_strict=False)
    assert found == ("path", {})
    assert calls == [(("directory", "tag"), {"load_module_strict": False})]
    restore_optimizer_states_from_nvme.cache_clear()
