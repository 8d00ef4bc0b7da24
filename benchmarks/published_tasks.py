"""Predicted beside published memory of preference and RL tasks: `python benchmarks/published_tasks.py [--write]`.

Sources: TRL's own measurements before and after its fused head (release notes of 1.15), and comments in ms-swift's
example scripts, which read nvidia-smi and do not state how long their sequences are: 1,024 tokens are assumed, or what
the script's limit says.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
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
    longest: int | None = None
    """Longest sequence that trained, in steps of 1,024 tokens on 79 GiB; `gib` is for 8,192 tokens."""
    fp32_reference: bool = False
    """Whether TRL loaded the reference in fp32, as `create_model_from_path` does without `dtype`: RLOO's figure is 3.72
    GiB above GRPO's, and a reference has 1.86 GiB in 16 bits."""
    fields: dict[str, Any] = field(default_factory=dict)


GEMMA, QWEN3, QWEN7 = gemma(), qwen("3B", 2048, 36, 16, 11008, 151936, 2), qwen("7B", 3584, 28, 28, 18944)
QWEN14 = qwen("14B", 5120, 48, 40, 13824, groups=8)
ONE = Layout(engine="single", gradient_checkpointing=True)
SHARDED = Layout(engine="deepspeed", zero_stage=3, dp_shard=4, gradient_checkpointing=True, micro_batch_size=4)


def of_trl(name: str, gib: float, longest: int, rows: int = 1, **fields: Any) -> Published:
    layout = ONE.changed(micro_batch_size=rows)
    fields = {"seq_len_tokens": 8192, "weights_dtype": "bf16", "vllm_sleep": "auto", **fields}
    task = fields.get("task")
    if task in ("grpo", "rloo"):
        # Two completions of a prompt, one per micro-batch; scoring alone was measured, without generation.
        layout = layout.changed(gradient_accumulation_steps=2)
        fields["generation"] = "vllm-server"
    return Published(
        name=f"TRL, {name}",
        model=GEMMA,
        hardware="1xH100-80GB",
        layout=layout,
        gib=gib,
        reserved=False,
        fields=fields,
        longest=longest,
        fp32_reference=task == "rloo",
    )


CASES = (
    of_trl("sft, complete logits", 30.33, 20480, loss="eager"),
    of_trl("sft, fused head", 8.87, 107520, loss="chunked"),
    of_trl("dpo, complete logits (1.14)", 48.97, 10240, task="dpo", loss="eager"),
    of_trl("dpo, fused head", 12.0, 59392, task="dpo"),
    of_trl("kto, complete logits (1.14)", 64.91, 9216, 2, task="kto", loss="eager"),
    of_trl("kto, fused head", 11.98, 63488, 2, task="kto"),
    of_trl("grpo, complete logits (1.14)", 24.15, 28672, task="grpo", loss="eager"),
    of_trl("grpo, fused head", 10.3, 114688, task="grpo"),
    of_trl("rloo, complete logits (1.14)", 29.28, 23552, task="rloo", loss="eager"),
    of_trl("rloo, fused head", 14.02, 100352, task="rloo"),
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


def predicted_gib(case: Published, seq_len_tokens: int | None = None, *, reserved: bool) -> float:
    """Return the predicted GiB per GPU: what the allocator reserves with its context, or what tensors take."""
    fields = case.fields if seq_len_tokens is None else case.fields | {"seq_len_tokens": seq_len_tokens}
    job = TrainingJob(**fields).completed(case.model)
    memory = estimate_memory(case.layout, case.model, parse_hardware(case.hardware), job).gpu
    reference = 2 * case.model.parameter_count if case.fp32_reference else 0
    return ((memory.peak_bytes if reserved else memory.allocated_bytes) + reference) / 2**30


def predicted_longest(case: Published) -> int:
    """Return the longest sequence whose reserved bytes fit 79 GiB, in steps of 1,024 tokens."""
    lengths = range(1024, 2**19, 1024)
    return lengths[bisect_right(lengths, 79, key=lambda tokens: predicted_gib(case, tokens, reserved=True)) - 1]


def table() -> str:
    """Return one markdown line for each published figure."""
    lines = [
        "| published | GiB | predicted GiB | error | longest | predicted | error |",
        "|---|---|---|---|---|---|---|",
    ]
    for case in CASES:
        predicted = predicted_gib(case, reserved=case.reserved)
        cells = [case.name, f"{case.gib:.2f}", f"{predicted:.2f}", f"{predicted / case.gib - 1:+.1%}", "", "", ""]
        if case.longest is not None:
            longest = predicted_longest(case)
            cells[4:] = f"{case.longest:,}", f"{longest:,}", f"{longest / case.longest - 1:+.1%}"
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    text = table()
    print(text)
    if "--write" in sys.argv:
        PAGE.write_text(with_part(PAGE.read_text(encoding="utf-8"), "published", text), encoding="utf-8")
