"""Predicted beside published memory of preference and RL tasks: `python benchmarks/published_tasks.py [--write]`.

Sources: TRL's own measurements before and after its fused head (release notes of 1.15), and comments in ms-swift's
example scripts, which read nvidia-smi and do not state how long their sequences are: 1,024 tokens are assumed, or what
the script's limit says.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from page_parts import with_part
from shardwright.ds_configs.memory.estimate import estimate_memory
from shardwright.ds_configs.models.families import model_spec_from_config
from shardwright.ds_configs.specs.hardware import parse_hardware
from shardwright.ds_configs.specs.job import TrainingJob
from shardwright.ds_configs.specs.layout import Layout
from shardwright.ds_configs.specs.model import FIRST_RELEASE, ModelSpec

PAGE = Path(__file__).parents[1] / "docs" / "measurements" / "tasks.md"


def qwen(
    name: str, hidden: int, layers: int, heads: int, inner: int, vocab: int = 152064, groups: int = 4
) -> ModelSpec:
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "intermediate_size": inner,
        "vocab_size": vocab,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": vocab == 151936,
    }
    spec = model_spec_from_config(config, name=name, release=FIRST_RELEASE)
    assert spec is not None
    return spec


def gemma() -> ModelSpec:
    config = {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_size": 1152,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "intermediate_size": 6912,
        "vocab_size": 262144,
        "sliding_window": 512,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    }
    spec = model_spec_from_config(config, name="gemma-3-1b", release=FIRST_RELEASE)
    assert spec is not None
    return spec


@dataclass(frozen=True, kw_only=True)
class Published:
    """One published figure."""

    name: str
    model: ModelSpec
    hardware: str
    layout: Layout
    gib: float
    reserved: bool
    """Whether nvidia-smi was read; else the allocator's peak of tensors."""
    fields: dict[str, Any] = field(default_factory=dict)


GEMMA, QWEN3, QWEN7 = gemma(), qwen("3B", 2048, 36, 16, 11008, 151936, 2), qwen("7B", 3584, 28, 28, 18944)
QWEN14 = qwen("14B", 5120, 48, 40, 13824, groups=8)
ONE = Layout(engine="single", gradient_checkpointing=True)
SHARDED = Layout(engine="deepspeed", zero_stage=3, dp_shard=4, gradient_checkpointing=True, micro_batch_size=4)


def of_trl(name: str, gib: float, rows: int = 1, **fields: Any) -> Published:
    layout = ONE.changed(micro_batch_size=rows)
    fields = {"seq_len_tokens": 8192, "weights_dtype": "bf16", "vllm_sleep": "auto", **fields}
    return Published(
        name=f"TRL, {name}", model=GEMMA, hardware="1xH100-80GB", layout=layout, gib=gib, reserved=False, fields=fields
    )


CASES = (
    of_trl("sft, complete logits", 30.33, loss="eager"),
    of_trl("sft, fused head", 8.87, loss="chunked"),
    of_trl("dpo, fused head", 12.0, task="dpo"),
    of_trl("dpo, complete logits (1.14)", 48.97, task="dpo", loss="eager"),
    of_trl("kto, fused head", 11.98, 2, task="kto"),
    of_trl("kto, complete logits (1.14)", 64.91, 2, task="kto", loss="eager"),
    of_trl("grpo update, fused head", 10.3, task="grpo", generation="vllm-server"),
    of_trl("rloo update, fused head", 14.02, task="rloo", generation="vllm-server"),
    Published(
        name="ms-swift, dpo 7B, ZeRO-3, padded",
        model=QWEN7,
        hardware="4xA100-80GB",
        layout=SHARDED,
        gib=57,
        reserved=True,
        fields={"task": "dpo", "loss": "eager", "seq_len_tokens": 1024, "reference_placement": "sharded"},
    ),
    Published(
        name="ms-swift, dpo 7B, LoRA",
        model=QWEN7,
        hardware="1xA100-80GB",
        layout=ONE,
        gib=24,
        reserved=True,
        fields={
            "task": "dpo",
            "loss": "eager",
            "method": "lora",
            "seq_len_tokens": 2048,
            "reference_placement": "shared",
        },
    ),
    Published(
        name="ms-swift, simpo 3B, ZeRO-2",
        model=QWEN3,
        hardware="2xA100-80GB",
        layout=Layout(engine="deepspeed", zero_stage=2, dp_shard=2, gradient_checkpointing=True),
        gib=50,
        reserved=True,
        fields={"task": "cpo", "seq_len_tokens": 2048},
    ),
    Published(
        name="ms-swift, gkd 7B from 14B, offline",
        model=QWEN7,
        hardware="4xA100-80GB",
        layout=SHARDED,
        gib=56,
        reserved=True,
        fields={"task": "gkd", "teacher": QWEN14, "teacher_placement": "sharded", "seq_len_tokens": 1024},
    ),
)


def table() -> str:
    """Return one markdown line for each published figure."""
    lines = ["| published | GiB | predicted GiB | error |", "|---|---|---|---|"]
    for case in CASES:
        job = TrainingJob(**case.fields).completed(case.model)
        memory = estimate_memory(case.layout, case.model, parse_hardware(case.hardware), job).gpu
        predicted = (memory.peak_bytes if case.reserved else memory.allocated_bytes) / 2**30
        lines.append(f"| {case.name} | {case.gib:.2f} | {predicted:.2f} | {predicted / case.gib - 1:+.1%} |")
    return "\n".join(lines)


if __name__ == "__main__":
    text = table()
    print(text)
    if "--write" in sys.argv:
        PAGE.write_text(with_part(PAGE.read_text(encoding="utf-8"), "published", text), encoding="utf-8")
