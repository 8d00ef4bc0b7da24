"""From bytes to a tree: decoding, choice of syntax, and the one clear finding for a file that has neither."""

from __future__ import annotations

from pathlib import PurePath
from typing import Literal

from .json_parser import parse_json
from .tree import Node, Parsed, Problem
from .yaml_parser import parse_yaml

MAXIMUM_BYTES = 1 << 20
"""Files beyond 1 MiB are refused unread."""
_JSON_SUFFIXES = {".json", ".hjson"}
_YAML_SUFFIXES = {".yaml", ".yml"}
_ACCELERATE_KEYS = {
    "compute_environment",
    "distributed_type",
    "num_processes",
    "num_machines",
    "machine_rank",
    "mixed_precision",
    "deepspeed_config",
    "fsdp_config",
    "parallelism_config",
    "megatron_lm_config",
    "fp8_config",
    "dynamo_config",
    "mpirun_config",
    "main_training_function",
    "main_process_ip",
    "main_process_port",
    "rdzv_backend",
    "same_network",
    "downcast_bf16",
    "use_cpu",
    "gpu_ids",
}
_DEEPSPEED_KEYS = {
    "zero_optimization",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "bf16",
    "optimizer",
    "scheduler",
    "steps_per_print",
    "wall_clock_breakdown",
    "aio",
    "activation_checkpointing",
    "tensor_parallel",
    "expert_parallel",
    "data_types",
    "flops_profiler",
    "zero_optimisation",
}


def parse(text: str | bytes, filename: str) -> Parsed:
    """Decode and parse a configuration; JSON by suffix or by its opening brace, YAML otherwise."""
    problems: list[Problem] = []
    size = len(text) if isinstance(text, bytes) else len(text.encode("utf-8", "surrogatepass"))
    if size > MAXIMUM_BYTES:
        return _unreadable(f"the file has {size} bytes; a configuration has at most {MAXIMUM_BYTES}")
    if isinstance(text, bytes):
        content = text
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError as error:
            line = content.count(b"\n", 0, error.start) + 1
            return _unreadable(f"byte {error.start} is not UTF-8", "save the file as UTF-8", line)
    as_json = is_json(text, filename)
    if text.startswith("\ufeff"):
        text = text[1:]
        rule = "the file starts with a byte order mark" + (", which `json.load` refuses" if as_json else "")
        problems.append(Problem(line=1, rule=rule, fix="save the file as UTF-8 without it", warning=not as_json))
    parsed = parse_json(text) if as_json else parse_yaml(text)
    return Parsed(root=parsed.root, problems=(*problems, *parsed.problems))


def is_json(text: str, filename: str) -> bool:
    """Say whether the upstream loaders would read this file as JSON."""
    suffix = PurePath(filename).suffix.lower()
    if suffix in _JSON_SUFFIXES or suffix in _YAML_SUFFIXES:
        return suffix in _JSON_SUFFIXES
    return text.lstrip("\ufeff \t\r\n").startswith(("{", "["))


def detect_kind(tree: Node, filename: str = "") -> Literal["deepspeed", "accelerate"]:
    """Tell the two formats apart by their keys; the suffix decides a tie."""
    keys = {entry.key for entry in tree.entries}
    accelerate, deepspeed = len(keys & _ACCELERATE_KEYS), len(keys & _DEEPSPEED_KEYS)
    if accelerate != deepspeed:
        return "accelerate" if accelerate > deepspeed else "deepspeed"
    return "accelerate" if PurePath(filename).suffix.lower() in _YAML_SUFFIXES else "deepspeed"


def _unreadable(rule: str, fix: str = "", line: int = 1) -> Parsed:
    return Parsed(root=None, problems=(Problem(line=line, rule=rule, fix=fix),))
