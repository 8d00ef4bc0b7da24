"""Examples that `--help` of each command ends with."""

from __future__ import annotations

EXAMPLES: dict[str, tuple[str, str, str]] = {
    "plan": (
        "meta-llama/Llama-3.1-8B --hardware 8xA100-80GB --output-dir plan",
        "MODEL --hardware 1xRTX4090 --method qlora --seq-len 2048",
        "MODEL --hardware 4x8xH100-80GB --strategy zero3 --format json",
    ),
    "check": ("plan", "ds_config.json --num-processes 8", "ds_config.json accelerate.yaml --format json"),
    "explain": ("plan", "gathered_parameters", "names"),
    "calibrate": ("plan/model", "--list", "plan/model --format json"),
    "rehearse": ("plan", "plan --ranks 4 --steps 12", "plan --script finetune.py -- --epochs 1"),
    "launch": (
        "plan finetune.py --epochs 3",
        "plan run_clm.py --output_dir out @plan",
        "plan finetune.py -- --config own.yaml",
    ),
    "train": (
        "MODEL --dataset chats.jsonl --method lora --output-dir tuned",
        "MODEL --plan plan --dataset chats.jsonl --output-dir tuned",
        "MODEL --dataset notes.csv --text-column body --max-steps 100 --output-dir tuned",
    ),
    "distill": (
        "TEACHER STUDENT --dataset chats.jsonl --output-dir taught",
        "TEACHER STUDENT --dataset chats.jsonl --loss reverse_kl --temperature 2 --output-dir taught",
        "TEACHER STUDENT --dataset chats.jsonl --teacher-cache answers --output-dir taught",
    ),
    "cache-teacher": (
        "TEACHER --dataset chats.jsonl --output-dir answers",
        "TEACHER --dataset chats.jsonl --temperature 2 --output-dir answers",
        "TEACHER --dataset chats.jsonl --seq-len 1024 --output-dir answers",
    ),
    "student": (
        "TEACHER --layers 16 --output-dir student",
        "TEACHER --layers 16 --intermediate 8192 --output-dir student",
        "TEACHER --layers 16 --dry-run",
    ),
    "qat": (
        "MODEL --scheme W4A16 --dataset chats.jsonl --output-dir trained-w4",
        "MODEL --scheme W4A16 --teacher self --dataset chats.jsonl --output-dir trained-w4",
        "MODEL --scheme W8A8 --dataset chats.jsonl --max-steps 200 --output-dir trained-w8",
    ),
    "quantize": (
        "MODEL --scheme W4A16 --method gptq --dataset chats.jsonl --output-dir model-w4",
        "MODEL --scheme NF4 --output-dir model-nf4",
        "MODEL --scheme W4A16 --dry-run",
    ),
    "evaluate": (
        "model-w4 --baseline MODEL --text book.txt",
        "MODEL --dataset python-help --output-dir judged",
        "MODEL --text book.txt --format json",
    ),
    "report": ("tuned", "tuned tuned-lora --output both.html", "plan --output plan.html --force"),
    "serve": (
        "model-w4 --hardware 1xRTX4090",
        "MODEL --hardware 2xA100-80GB --max-model-len 32768 --dry-run",
        "MODEL --hardware 1xL40S --engine sglang --port 9000",
    ),
    "ui": ("", "--port 8080", "--host 0.0.0.0"),
    "configs": ("ls", "ls quantize", "cp llama-3.1-8b_8xA100-80GB plan"),
    "schema": ("settings", "hardware", "plan --format json"),
    "env": ("", "create quantize", "create quantize --path quantize-env --dry-run"),
    "demo": ("", "my-demo --steps 10", "--format json --force"),
}
"""What stands behind `shardwright COMMAND`."""


def shown_examples(command: str) -> str:
    """Return the last part of a command's help: its examples, and where its options can be stated too."""
    lines = [f"shardwright {command} {rest}".rstrip() for rest in EXAMPLES[command]]
    variable = f"SHARDWRIGHT_{command.upper().replace('-', '_')}_"
    rule = f"Each option is also a key of the YAML file of --config, and a variable that begins with {variable}."
    return "\n\n".join(["Examples:", *lines, rule])
