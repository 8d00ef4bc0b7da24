"""Runs on every rank: trains a case and writes the weights that came out, and DeepSpeed's fp32 copies of them."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from fresh_process import forget_last_run
from shardwright.plugins.accelerate.cpu_ranks import configure_cpu_ranks
from sparsity_cases import EVERY, SAVED_AT, Case, train


def run(case: Case, output: Path, world_size: int) -> None:
    from safetensors.torch import load_file, save_file

    trainer = train(case, output, world_size, configure_cpu_ranks(case.engine))  # type: ignore[arg-type]
    if case.resumed:
        checkpoint = Path(trainer.args.output_dir) / f"checkpoint-{SAVED_AT}"
        del trainer
        forget_last_run()
        overrides = configure_cpu_ranks(case.engine)  # type: ignore[arg-type]
        trainer = train(case, output, world_size, overrides, resume_from=str(checkpoint))
    if case.axis == "pp":
        trainer.save_model(str(output / f"{case.name}-stages"))
        files = sorted((output / f"{case.name}-stages").glob("*.safetensors"))
        state = {name: value for file in files for name, value in load_file(file).items()}
    else:
        # Under ZeRO-3 rank 0 alone gets it.
        state = trainer.accelerator.get_state_dict(trainer.model_wrapped) or {}
    found = {name: value.float().contiguous() for name, value in state.items()}
    if case.engine == "deepspeed" and not case.axis:
        found |= {f"master.{name}": value for name, value in masters(trainer).items()}
    if trainer.args.process_index == 0:
        save_file(found, output / f"{case.name}.safetensors")
        sparsity = [each.sparsity for each in trainer.callback_handler.callbacks if hasattr(each, "sparsity")]
        (output / f"{case.name}.json").write_text(json.dumps(sparsity))


def masters(trainer: Any) -> dict[str, Any]:
    from deepspeed.utils import safe_get_full_fp32_param

    return {name: safe_get_full_fp32_param(value).float().clone() for name, value in trainer.model.named_parameters()}


if __name__ == "__main__":
    chosen = next(case for case in EVERY if case.name == sys.argv[2])
    run(chosen, Path(sys.argv[1]), int(os.environ["WORLD_SIZE"]))
