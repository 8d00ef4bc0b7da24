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

import shardwright
from page_parts import with_part
from shardwright.ds_configs.memory.estimate import (
    CONTEXT_BYTES,
    RESERVED_OVER_PREDICTED,
    estimate_memory,
    share_moment_terms,
)
from shardwright.ds_configs.memory.rank_parameters import Moment, Terms, rank_shares
from shardwright.ds_configs.models.stored_shapes import model_spec_from_config
from shardwright.ds_configs.plan.plan import PlanDoesNotFitError, make_plan
from shardwright.ds_configs.specs.hardware import parse_hardware
from shardwright.ds_configs.specs.job import TrainingJob
from shardwright.ds_configs.specs.layout import Layout
from shardwright.ds_configs.specs.model import FIRST_RELEASE, ModelSpec
from shardwright.ds_configs.specs.tasks import TASKS, in_sequences
from shardwright.plugins.planning import load_model_spec

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


def llama() -> ModelSpec:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    }
    spec = model_spec_from_config(config, name="Llama-3.1-8B", release=FIRST_RELEASE)
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
        gpu = estimate_memory(self.layout, self.model, parse_hardware(self.hardware), job).gpu
        return round(tensors * gpu.peak_bytes / gpu.allocated_bytes)


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


GEMMA, QWEN3, QWEN7 = gemma(), qwen("3B", 2048, 36, 16, 11008, 151936, 2), qwen("7B", 3584, 28, 28, 18944)
QWEN14, LLAMA = qwen("14B", 5120, 48, 40, 13824, groups=8), llama()
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


def packaged(name: str) -> ModelSpec:
    return load_model_spec(str(Path(shardwright.__file__).parent / "ds_configs" / "data" / "models" / name)).spec


def plans_table() -> str:
    """Return one markdown line for each plan that `shardwright plan` chooses by default."""
    qwen7, llama8 = packaged("Qwen--Qwen2.5-7B"), packaged("meta-llama--Llama-3.1-8B")
    qwen32 = qwen("32B", 5120, 64, 40, 27648, groups=8)
    long = {"completion_tokens": 3072, "global_batch_size": 256}
    jobs: list[tuple[str, ModelSpec, str, dict[str, Any]]] = [
        ("dpo Qwen2.5-7B", qwen7, "1xRTX4090", {"seq_len_tokens": 2048, "method": "qlora"}),
        ("dpo Qwen2.5-7B", qwen7, "1xRTX4090", {"seq_len_tokens": 2048}),
        ("dpo Qwen2.5-7B", qwen7, "8xA100-80GB", {"seq_len_tokens": 2048}),
        ("dpo Llama-3.1-70B", packaged("meta-llama--Llama-3.1-70B"), "8xH100-80GB", {"method": "lora"}),
        ("kto Qwen2.5-7B", qwen7, "8xA100-80GB", {}),
        ("orpo Llama-3.1-8B", llama8, "8xA100-80GB", {"seq_len_tokens": 2048}),
        ("reward Llama-3.1-8B", llama8, "8xA100-80GB", {}),
        ("grpo Qwen2.5-7B", qwen7, "8xH100-80GB", long),
        ("grpo Qwen2.5-7B", qwen7, "8xH100-80GB", long | {"generation": "vllm-server"}),
        (
            "grpo Qwen2.5-32B",
            qwen32,
            "4x8xH100-80GB",
            {"seq_len_tokens": 8192, "completion_tokens": 6144, "global_batch_size": 256},
        ),
        ("grpo Qwen2.5-32B", qwen32, "8xA100-40GB", {"completion_tokens": 2048, "global_batch_size": 128}),
        (
            "grpo Qwen2.5-0.5B",
            packaged("Qwen--Qwen2.5-0.5B"),
            "1xA100-80GB",
            {"seq_len_tokens": 2048, "completion_tokens": 1024, "global_batch_size": 64},
        ),
        (
            "ppo Llama-3.1-8B",
            llama8,
            "8xA100-80GB",
            {"seq_len_tokens": 1024, "completion_tokens": 512, "reward": llama8, "value": llama8},
        ),
        (
            "gkd Qwen2.5-7B",
            qwen7,
            "8xA100-80GB",
            {"seq_len_tokens": 2048, "completion_tokens": 512, "teacher": QWEN14},
        ),
    ]
    lines = ["| task, model, hardware | options | chosen | GB | seconds |", "|---|---|---|---|---|"]
    for name, model, hardware, fields in jobs:
        shown = {key: Path(getattr(value, "name", str(value))).name for key, value in fields.items()}
        options = " ".join(
            f"{key.removesuffix('_tokens') if key[:3] == 'seq' else key} {value}" for key, value in shown.items()
        )
        start = f"| {name}, {hardware} | {options.replace('_', '-')}"
        try:
            plan = make_plan(model, parse_hardware(hardware), TrainingJob(task=name.split()[0], **fields))  # type: ignore[arg-type]
        except PlanDoesNotFitError as error:
            lines.append(f"{start} | does not fit; would fit: {error.suggestions[0].change} | | |")
            continue
        chosen, job = plan.chosen, plan.job
        layout, gpu, time = chosen.layout, chosen.memory.gpu, chosen.time
        parts = [f"{layout.label}, {layout.micro_batch_size} x {layout.gradient_accumulation_steps}"]
        layers = layout.checkpointed_layers or model.dimensions.num_layers
        parts[0] += (
            f", {layers} of {model.dimensions.num_layers} layers recomputed" if layout.gradient_checkpointing else ""
        )
        parts += [f"{role} {choice.placement}" for role, choice in chosen.placements.items()]
        if job.generation == "vllm-server":
            parts.append(f"server on {job.vllm_gpus}, training on {plan.hardware.world_size}")
        elif job.generation == "vllm":
            share = plan.training_arguments("out")["vllm_gpu_memory_utilization"]
            parts.append(f"vLLM over {job.vllm_tensor_parallel_size}, sleep {job.vllm_sleep}, share {share}")
        elif TASKS[job.task].generates:
            parts.append("`generate`")
        most = max(time.terms, key=lambda term: time.terms[term]).replace("_", " ")
        seconds = f"{time.seconds:.1f} ({time.low_seconds:.0f} to {time.high_seconds:.0f}), {most}"
        lines.append(f"{start} | {'; '.join(parts)} | {gpu.peak_bytes / 1e9:.1f} ({gpu.phase}) | {seconds} |")
    return "\n".join(lines)


if __name__ == "__main__":
    tables = {"published": table(), "longest": longest_table(), "plans": plans_table()}
    for name, text in tables.items():
        print(text, end="\n\n")
        if "--write" in sys.argv:
            PAGE.write_text(with_part(PAGE.read_text(encoding="utf-8"), name, text), encoding="utf-8")
