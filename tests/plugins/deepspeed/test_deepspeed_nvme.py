"""DeepSpeed still loses the optimizer of NVMe runs on resuming; the rehearsal of such a plan shows it restored."""

from __future__ import annotations

import inspect


def test_deepspeed_still_skips_the_optimizer_file_of_nvme_runs() -> None:
    """When this fails, try the NVMe rehearsal without `plugins/deepspeed/engine.py`: it may no longer be needed."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    load = inspect.unwrap(DeepSpeedEngine.load_checkpoint)
    assert "if load_zero_checkpoint and not self.zero_nvme_offload_optimizer():" in inspect.getsource(load)
