"""Runs on every rank: one optimizer step of CLIP distillation on sixteen pairs, however many ranks share them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from paths import TESTS
from shardwright.plugins.accelerate.cpu_ranks import configure_cpu_ranks


def main(directory: Path) -> None:
    from safetensors.torch import save_file

    sys.path.insert(0, str(TESTS / "trainers" / "distillation"))
    from test_distillation_clip import one_step

    trainer = one_step(directory, int(os.environ["WORLD_SIZE"]), **configure_cpu_ranks("ddp"))
    trainer.train()
    if trainer.args.process_index == 0:
        save_file(trainer.model.state_dict(), directory / "weights.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
