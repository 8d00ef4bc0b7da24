"""`shardwright demo`: from a plan to a trained checkpoint, on any machine."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from ...ds_configs.plan.output import write_files
from ...ds_configs.plan.plan import Plan
from ...ds_configs.specs.errors import ShardwrightError
from ...ds_configs.specs.job import TrainingJob
from ..options import FormatOptions
from ..settings import FILLED, Options, grouped

TIME_LIMIT_SECONDS = 900
"""Of the training; DeepSpeed's operators are compiled before."""

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


@grouped
class DemoOptions(FormatOptions):
    steps: int = Field(30, ge=1, description="Optimizer steps")
    force: bool = Field(False, description="Replace the files of an earlier demo")


def demo_command(output_dir: Path = Path("demo-output"), *, options: Annotated[DemoOptions, Options] = FILLED) -> int:
    """Plan a model for 8 GPUs, then plan, launch and train a small Llama on two CPU ranks.

    The text is Python's help topics. The launch uses the files of the plan.

    Parameters
    ----------
    output_dir
        Directory for the small model, its plan and the trained checkpoint.
    """
    if options.as_json:
        # stdout is for the JSON object only.
        with redirect_stdout(sys.stderr):
            small, losses = _demo(output_dir, options)
        result = {"strategy": small.chosen.strategy.label, "hardware": small.hardware.name, "losses": losses}
        print(json.dumps({"schema_version": 1, **result, "output_dir": str(output_dir / "plan" / "model")}))
    else:
        _demo(output_dir, options)
    return 0


def _demo(output_dir: Path, options: DemoOptions) -> tuple[Plan, list[float]]:
    from ...plugins.planning.from_names import plan
    from ..gallery import load_entry
    from ..show import show_plan

    entry = load_entry("llama-3.1-8b_8xA100-80GB")
    print("1. Llama-3.1-8B on 8 x A100-80GB, planned from its config.json\n")
    show_plan(plan_again(entry), None, output_dir_hint=False)
    print("\n2. A small Llama on two CPU ranks, planned the same way\n")
    write_files(
        {"config.json": json.dumps(SMALL_LLAMA, indent=2) + "\n"}, output_dir / "small-llama", force=options.force
    )
    job = TrainingJob(seq_len_tokens=128, micro_batch_size=4, global_batch_size=16, strategy="zero2")
    small = plan(str(output_dir / "small-llama"), "2xCPU", job)
    small.write(output_dir / "plan", force=options.force)
    show_plan(small, output_dir / "plan")
    print("\n3. Training under this plan\n", flush=True)
    losses = train_demo(small, output_dir, options.steps, force=options.force)
    if not losses[-1] < losses[0]:
        raise ShardwrightError(f"the loss did not decrease: {losses[0]:.3f} to {losses[-1]:.3f}")
    print(f"\nloss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps of ZeRO-2 on two ranks")
    print(f"trained model in {output_dir / 'plan' / 'model'}")
    print(f"Next: shardwright evaluate {output_dir / 'plan' / 'model'} --text YOUR_TEXT, or plan your own model")
    return small, losses


def plan_again(entry: Plan) -> Plan:
    from ...ds_configs.plan.plan import make_plan

    return make_plan(entry.model, entry.hardware, entry.job)


def train_demo(plan: Plan, output_dir: Path, steps: int, *, force: bool = False) -> list[float]:
    """Run the training of the plan for some steps and return the losses.

    Raises:
        ShardwrightError: the launch fails or exceeds its time limit.
    """
    from ...trainers.data.sources import PYTHON_HELP
    from ...trainers.training.script import launch_plan

    losses = output_dir / "losses.json"
    losses.unlink(missing_ok=True)
    words = [
        "--text",
        PYTHON_HELP,
        "--random-weights",
        "--max-steps",
        str(steps),
        "--losses-json",
        str(losses.absolute()),
    ]
    launch_plan(
        output_dir / "plan",
        None,
        [*words, *(["--force"] if force else [])],
        timeout_seconds=TIME_LIMIT_SECONDS,
        on_line=lambda line: print(line, flush=True),
    )
    record: dict[str, Any] = json.loads(losses.read_text(encoding="utf-8"))
    if record["world_size"] != plan.hardware.world_size:
        raise ShardwrightError(f"{record['world_size']} ranks trained, but the plan has {plan.hardware.world_size}")
    return list(record["losses"])
