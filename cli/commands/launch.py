"""`shardwright launch`: the user's own script under a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from ..options import ConfigOption
from ..progress import note
from ..settings import FILLED, Options, grouped

grouped(ConfigOption)


def launch_command(
    plan: Path,
    script: Path,
    *arguments: Annotated[str, Parameter(allow_leading_hyphen=True)],
    options: Annotated[ConfigOption, Options] = FILLED,
) -> int:
    """Run your own script under a plan, on this machine.

    The plan's directory may have moved since it was written. CPU ranks are made ready for the script.

    Examples: shardwright launch plan finetune.py --epochs 3 ;
    shardwright launch plan run_clm.py --output_dir out @plan ;
    shardwright launch plan finetune.py -- --config own.yaml

    Parameters
    ----------
    plan
        Directory that `plan` wrote.
    script
        Python file with a Trainer, an Accelerator or `deepspeed.initialize`.
    arguments
        Of the script; `@plan` stands for the plan's TrainingArguments as flags. Behind `--` where this command has one
        of the same name.
    """
    from ...trainers.training.script import launch_own_script

    launch_own_script(plan, script, arguments, on_line=lambda line: print(line, flush=True), notify=note)
    return 0
