"""Predicted beside published memory of preference and RL tasks: `python benchmarks/published_tasks.py [--write]`.

Sources: TRL's own measurements before and after its fused head (release notes of 1.15), and comments in ms-swift's
example scripts, which read nvidia-smi and do not state how long their sequences are: 1,024 tokens are assumed, or what
the script's limit says.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from page_parts import with_part
from shardwright.ds_configs.memory.estimate import (
    CONTEXT_BYTES,
    RESERVED_OVER_PREDICTED,
    estimate_memory,
    share_moment_terms,
    shown_bytes,
)
from shardwright.ds_configs.memory.rank_parameters import Moment, Terms, rank_shares
from shardwright.ds_configs.models.stored_shapes import model_spec_from_config
from shardwright.ds_configs.specs.hardware import parse_hardware
from shardwright.ds_configs.specs.job import TrainingJob
from shardwright.ds_configs.specs.layout import Layout
from shardwright.ds_configs.specs.model import FIRST_RELEASE, ModelSpec
from shardwright.ds_configs.specs.tasks import in_sequences

PAGE = Path(__file__).parents[1] / "docs" / "measurements" / "tasks.md"


_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")


def model_of(name: str, kind: str, sizes: tuple[int, ...], vocab: int, *, tied: bool = False, **more: Any) -> ModelSpec:
    """Return a dense decoder whose sizes are in the order of `_SIZES`."""
    family = kind.removesuffix("_text")
    config = {
        "architectures": [f"{family.title()}ForCausalLM"],
        "model_type": kind,
        **dict(zip(_SIZES, sizes, strict=True)),
        "vocab_size": vocab,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": tied,
        **more,
    }
    spec = model_spec_from_config(config, name=name, release=FIRST_RELEASE)
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
    longest: int = 0
    """Tokens of the longest sequence that trains, in steps of 1,024; 0 where none is published."""
    reserved: bool = True
    """Whether nvidia-smi was read; else the allocator's peak of tensors, of TRL with its own attention masks."""
    row_by_row: bool = False
    """Whether the log-softmax of complete logits is computed row by row in the type of the model, as ms-swift does
    (`selective_log_softmax` of TRL without Triton). `eager` plans the logits of TRL 1.14."""
    preferred_loss: bool = False
    """Whether DPO adds the cross-entropy of preferred answers (`rpo_alpha`)."""
    fp32_reference: bool = False
    """Whether TRL made the reference in fp32, as RLOO of TRL before 1.16 does beside a model that is passed to it."""
    fields: dict[str, Any] = field(default_factory=dict)

    def predicted_bytes(self) -> int:
        """Return the bytes that the row's own reading counts."""
        job = TrainingJob(**self.fields).completed(self.model)
        (share,) = rank_shares(self.layout, self.model, job)
        moments = share_moment_terms(self.layout, share, job, unmasked="auto" if self.reserved else "masked")
        if self.row_by_row:
            moments |= with_logits_by_row(self, job, moments)
        # Autocast copies the matrices of an fp32 model for each of its forward passes.
        extra = 2 * self.model.parameter_count if self.fp32_reference else 0
        copied = {"score": 2 * self.model.linear_parameters if extra else 0}
        tensors = max(extra + copied.get(moment, 0) + sum(terms.values()) for moment, terms in moments.items())
        if not self.reserved:
            return tensors
        hardware = parse_hardware(self.hardware)
        gpu = estimate_memory(self.layout, self.model, hardware, job).gpu
        return tensors + shown_bytes(gpu, self.layout, self.model, hardware, job) - gpu.allocated_bytes


def with_logits_by_row(row: Published, job: TrainingJob, moments: dict[Moment, Terms]) -> dict[Moment, Terms]:
    """Return the moments of DPO with complete logits in 16 bit, whose log-softmax is computed row by row.

    The logits and the log-softmax of all rows are kept, a reference has the log-softmax of one row, and the backward
    pass has three tensors of that size. The cross-entropy of preferred answers adds half of one.
    """
    rows = in_sequences(row.layout, job.task).micro_batch_size
    one_row = 2 * job.seq_len_tokens * row.model.dimensions.vocab_size
    preferred = rows * one_row // 2 if row.preferred_loss else 0
    of_reference = {"reference_activations": (rows + 1) * one_row}
    return {
        "forward_end": moments["forward_end"] | {"loss": 2 * rows * one_row + preferred} | of_reference,
        "loss_backward": moments["loss_backward"] | {"loss": 3 * rows * one_row + preferred},
    }


GEMMA = model_of(
    "gemma-3-1b", "gemma3_text", (1152, 26, 4, 1, 6912), 262144, tied=True, head_dim=256, sliding_window=512
)
QWEN3 = model_of("3B", "qwen2", (2048, 36, 16, 2, 11008), 151936, tied=True)
QWEN7 = model_of("7B", "qwen2", (3584, 28, 28, 4, 18944), 152064)
QWEN14 = model_of("14B", "qwen2", (5120, 48, 40, 8, 13824), 152064)
LLAMA = model_of("Llama-3.1-8B", "llama", (4096, 32, 32, 8, 14336), 128256, max_position_embeddings=131072)
ONE = Layout(engine="single", gradient_checkpointing=True)
# A group has two completions or more, which with one sequence per micro-batch accumulate.
GROUPS = ONE.changed(gradient_accumulation_steps=2)
SHARDED = Layout(engine="deepspeed", zero_stage=3, dp_shard=4, gradient_checkpointing=True, micro_batch_size=4)


def of_trl(name: str, gib: float, longest: int, layout: Layout = ONE, **fields: Any) -> Published:
    fp32_reference = fields.pop("fp32_reference", False)
    fields = {"seq_len_tokens": 8192, "weights_dtype": "bf16", **fields}
    return Published(
        name=f"TRL, {name}",
        model=GEMMA,
        hardware="1xH100-80GB",
        layout=layout,
        gib=gib,
        longest=longest,
        reserved=False,
        fp32_reference=fp32_reference,
        fields=fields,
    )


TWO_ROWS = ONE.changed(micro_batch_size=2)
GROUPED: dict[str, Any] = {"generation": "transformers"}
CASES = (
    of_trl("sft, complete logits", 30.33, 20480, loss="eager"),
    of_trl("sft, fused head", 8.87, 107520, loss="chunked"),
    of_trl("dpo, complete logits (1.14.2)", 48.97, 10240, task="dpo", loss="eager"),
    of_trl("dpo, fused head", 12.0, 59392, task="dpo"),
    of_trl("kto, complete logits (1.14.2)", 64.91, 9216, TWO_ROWS, task="kto", loss="eager"),
    of_trl("kto, fused head", 11.98, 63488, TWO_ROWS, task="kto"),
    of_trl("grpo, complete logits (1.14.2)", 24.15, 28672, GROUPS, task="grpo", loss="eager", **GROUPED),
    of_trl("grpo, fused head", 10.3, 114688, GROUPS, task="grpo", **GROUPED),
    of_trl(
        "rloo, complete logits (1.14.2)",
        29.28,
        23552,
        GROUPS,
        task="rloo",
        loss="eager",
        fp32_reference=True,
        **GROUPED,
    ),
    of_trl("rloo, fused head", 14.02, 100352, GROUPS, task="rloo", fp32_reference=True, **GROUPED),
    Published(
        name="ms-swift, dpo 7B, ZeRO-3, padded",
        model=QWEN7,
        hardware="4xA100-80GB",
        layout=SHARDED,
        gib=57,
        row_by_row=True,
        preferred_loss=True,
        fields={"task": "dpo", "seq_len_tokens": 1024, "reference_placement": "sharded"},
    ),
    Published(
        name="ms-swift, dpo 7B, LoRA",
        model=QWEN7,
        hardware="1xA100-80GB",
        layout=ONE,
        gib=24,
        row_by_row=True,
        fields={"task": "dpo", "method": "lora", "seq_len_tokens": 2048, "reference_placement": "shared"},
    ),
    Published(
        name="ms-swift, simpo 3B, ZeRO-2",
        model=QWEN3,
        hardware="2xA100-80GB",
        layout=Layout(
            engine="deepspeed", zero_stage=2, dp_shard=2, gradient_checkpointing=True, gradient_accumulation_steps=8
        ),
        gib=50,
        fields={"task": "cpo", "seq_len_tokens": 2048},
    ),
    Published(
        name="ms-swift, ppo 8B with 8B reward and value models",
        model=LLAMA,
        hardware="8xA100-80GB",
        layout=Layout(
            engine="deepspeed", zero_stage=3, dp_shard=8, gradient_checkpointing=True, gradient_accumulation_steps=2
        ),
        gib=65,
        fields={
            "task": "ppo",
            "reward": LLAMA,
            "value": LLAMA,
            "reference_placement": "sharded",
            "reward_placement": "sharded",
            "seq_len_tokens": 1024,
            "completion_tokens": 512,
        },
    ),
    Published(
        name="ms-swift, gkd 7B from 14B, offline",
        model=QWEN7,
        hardware="4xA100-80GB",
        layout=SHARDED,
        gib=56,
        fields={"task": "gkd", "teacher": QWEN14, "teacher_placement": "sharded", "seq_len_tokens": 1024},
    ),
)


def table() -> str:
    """Return one markdown line for each published figure."""
    lines = ["| published | GiB | predicted GiB | error |", "|---|---|---|---|"]
    for case in CASES:
        predicted = case.predicted_bytes() / 2**30
        lines.append(f"| {case.name} | {case.gib:.2f} | {predicted:.2f} | {predicted / case.gib - 1:+.1%} |")
    return "\n".join(lines)


def longest_sequence(row: Published) -> int:
    """Return the longest sequence whose interval fits, as plans decide, without the expandable segments of a launch."""
    capacity = parse_hardware(row.hardware).gpu_bytes

    def fits(tokens: int) -> bool:
        tensors = replace(row, fields=row.fields | {"seq_len_tokens": tokens}).predicted_bytes()
        return tensors * RESERVED_OVER_PREDICTED[2] + CONTEXT_BYTES[2] <= capacity

    return 1024 * (bisect_left(range(1, 256), True, key=lambda count: not fits(1024 * count)))


def longest_table() -> str:
    """Return one markdown line for each published longest sequence."""
    lines = ["| published | tokens | predicted | error |", "|---|---|---|---|"]
    for case in CASES:
        if case.longest:
            tokens = longest_sequence(case)
            lines.append(f"| {case.name} | {case.longest:,} | {tokens:,} | {tokens / case.longest - 1:+.1%} |")
    return "\n".join(lines)


if __name__ == "__main__":
    tables = {"published": table(), "longest": longest_table()}
    for name, text in tables.items():
        print(text, end="\n\n")
        if "--write" in sys.argv:
            PAGE.write_text(with_part(PAGE.read_text(encoding="utf-8"), name, text), encoding="utf-8")
