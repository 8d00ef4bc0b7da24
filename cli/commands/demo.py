"""`shardwright demo`: from a plan to a trained checkpoint, on any machine."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Any

from pydantic import Field

from ...ds_configs.plan.output import write_files
from ...ds_configs.specs.errors import ShardwrightError
from ...ds_configs.specs.job import TrainingJob
from ...ds_configs.specs.settings import settings_of
from ..options import Output
from ..settings import FILLED, Options

SMALL_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
"""A Llama with grouped-query attention that two CPU cores train in seconds."""


class Flags(Output):
    steps: int = Field(30, ge=1, description="Optimizer steps")
    force: bool = Field(False, description="Replace the files of an earlier demo")


def demo_command(output_dir: Path = Path("demo-output"), *, options: Options[Flags] = FILLED) -> int:
    """Plan a model for 8 GPUs, then plan and train a small Llama on two CPU ranks.

    The text is Python's help topics.

    Parameters
    ----------
    output_dir
        Directory for the small model, its plan and the trained checkpoint.
    """
    from ...ds_configs.plan.gallery import gallery_entry, gallery_plan
    from ...ds_configs.plan.plan import make_plan
    from ...plugins.planning import plan
    from ...trainers.runs.run import run_training
    from ...trainers.runs.settings import RunRequest
    from ...trainers.training.settings import TrainSettings
    from ...trainers.training.task import prepare_train
    from ..progress import progress_on_stderr
    from ..show import show_plan
    from .training import show_training

    # With --format json, stdout is for the JSON object only.
    with redirect_stdout(sys.stderr) if options.as_json else nullcontext():
        entry = gallery_plan(gallery_entry("llama-3.1-8b_8xA100-80GB"))
        print("1. Llama-3.1-8B on 8 x A100-80GB, planned from its config.json\n")
        show_plan(make_plan(entry.model, entry.hardware, entry.job), None, output_dir_hint=False)
        print("\n2. A small Llama on two CPU ranks\n")
        model, trained = output_dir / "small-llama" / "config.json", output_dir / "trained"
        write_files({model.name: json.dumps(SMALL_LLAMA, indent=2) + "\n"}, model.parent, force=options.force)
        job = TrainingJob(seq_len_tokens=128, micro_batch_size=4, global_batch_size=16, strategy="zero2")
        small = plan(str(model), "local", job)
        small.write(output_dir / "plan", force=options.force)
        show_plan(small, None, output_dir_hint=False)
        print(f"\n3. shardwright train with {output_dir / 'plan'}\n", flush=True)
        chosen = {"plan": str(output_dir / "plan"), "dataset": "python-help", "max_steps": options.steps}
        settings = settings_of(TrainSettings, chosen)
        with redirect_stdout(sys.stderr):
            prepared = prepare_train(settings, str(model), RunRequest(output_dir=trained, force=options.force))
            with progress_on_stderr("starting the ranks", plan=prepared.plan):
                outcome = run_training(prepared)
        before, after = outcome.result.before, outcome.result.after
        if before is None or after is None or not after < before:
            raise ShardwrightError(f"the loss on held-out text did not decrease: {before} to {after}")
        show_training(outcome, trained)
    if not options.as_json:
        return 0
    ran, result = outcome.plan, outcome.result
    shown = {"layout": ran.chosen.layout.label, "hardware": ran.hardware.name, "steps": result.steps}
    shown |= {"before": result.before, "after": result.after, "output_dir": str(output_dir / "trained")}
    print(json.dumps({"schema_version": 1} | shown))
    return 0
