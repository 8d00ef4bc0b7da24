"""Help of a command."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cyclopts.help import HelpPanel
    from rich.console import Console, ConsoleOptions

_EMPTY_DEFAULTS = frozenset({"False", '""', "()", "{}", "[]"})
"""Defaults of options without effect unless set."""


def short_help(console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
    """Print a group of options without environment variables, and without `--no-` of a switch that is off.

    With cyclopts 5.4 the variables made the help of `train` longer by half; the end of each help states the rule.
    """
    from cyclopts.help import DefaultFormatter

    entries = [
        entry.copy(
            env_var=None,
            default=None if entry.default in _EMPTY_DEFAULTS else entry.default,
            negative_names=() if entry.default == "False" else entry.negative_names,
        )
        for entry in panel.entries
    ]
    DefaultFormatter()(console, options, panel.copy(entries=entries))


EXAMPLES = {
    "plan": (
        "meta-llama/Llama-3.1-8B --hardware 8xA100-80GB --output-dir plan",
        "MODEL --hardware 1xRTX4090 --method qlora --seq-len 2048",
    ),
    "check": ("plan", "ds_config.json --num-processes 8", "grpo.yaml --hardware 8xH100-80GB"),
    "explain": ("plan", "gathered_parameters"),
    "calibrate": ("plan/model", "--list"),
    "rehearse": ("plan", "plan --script finetune.py -- --epochs 1"),
    "tune": ("plan", "plan --trials 8 --steps 10"),
    "launch": ("plan finetune.py --epochs 3", "plan --on slurm -- --dataset chats.jsonl --output-dir tuned"),
    "train": (
        "MODEL --dataset chats.jsonl --method lora --output-dir tuned",
        "MODEL --plan plan --dataset chats.jsonl --output-dir tuned",
    ),
    "distill": (
        "TEACHER STUDENT --dataset chats.jsonl --output-dir taught",
        "TEACHER STUDENT --dataset chats.jsonl --teacher-cache answers --output-dir taught",
        "STUDENT --teacher-url http://localhost:8000 --dataset chats.jsonl --output-dir taught",
    ),
    "cache-teacher": (
        "TEACHER --dataset chats.jsonl --output-dir answers",
        "TEACHER --dataset chats.jsonl --temperature 2 --output-dir answers",
    ),
    "merge": ("tuned --output-dir merged", "tuned --base MODEL --output-dir merged"),
    "student": (
        "TEACHER --layers 16 --output-dir student",
        "TEACHER --layers 16 --intermediate 8192 --output-dir student",
    ),
    "qat": (
        "MODEL --scheme W4A16 --dataset chats.jsonl --output-dir trained-w4",
        "MODEL --scheme W4A16 --teacher self --dataset chats.jsonl --output-dir trained-w4",
    ),
    "quantize": (
        "MODEL --scheme W4A16 --method gptq --dataset chats.jsonl --output-dir model-w4",
        "MODEL --scheme NF4 --output-dir model-nf4",
    ),
    "evaluate": ("model-w4 --baseline MODEL --dataset book.txt", "MODEL --dataset python-help --output-dir judged"),
    "report": ("tuned", "tuned --output other.html"),
    "serve": ("model-w4 --hardware 1xRTX4090", "MODEL --hardware 1xL40S --draft STUDENT --port 9000"),
    "ui": ("", "--port 8080"),
    "configs": ("ls llama", "cp llama-3.1-8b_8xA100-80GB plan"),
    "schema": ("settings", "hardware"),
    "env": ("", "--patches"),
    "demo": ("", "my-demo --steps 10"),
}
"""Arguments after `shardwright COMMAND`."""


def shown_examples(command: str) -> str:
    """Return the end of a command's help: examples, and the other sources of its options."""
    lines = [f"shardwright {command} {rest}".rstrip() for rest in EXAMPLES[command]]
    variable = f"SHARDWRIGHT_{command.upper().replace('-', '_')}_"
    rule = f"Each option is also a key of the --config YAML file and an environment variable {variable}NAME."
    return "\n\n".join(["Examples:", *lines, rule])
