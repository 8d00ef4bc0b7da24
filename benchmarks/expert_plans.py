"""Jobs as people run them, with the plan of each: `python benchmarks/expert_plans.py [--write] [NAME ...]`.

Checks three rules and exits with 1 if one is broken. Every job has to fit. A plan with offload has to be at least 25 %
faster than the plan of the same job with `--offload none`, unless nothing fits without. A plan below 15 % MFU has to
name what takes the time. `--write` makes docs/measurements/expert_plans.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwright.ds_configs.plan.plan import Plan, PlanDoesNotFitError
from shardwright.ds_configs.search.reasons import OFFLOAD_GAIN, display_name
from shardwright.ds_configs.step_time.utilization import LOW_UTILIZATION, utilization
from shardwright.plugins.planning.from_names import plan

STORED = Path(__file__).parents[1] / "ds_configs" / "data" / "models"
PAGE = Path(__file__).parents[1] / "docs" / "measurements" / "expert_plans.md"
LLAMA = {"rms_norm_eps": 1e-5, "rope_theta": 500000.0}
MODELS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "SmolLM2-1.7B": (
        "llama",
        LLAMA
        | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24, "num_attention_heads": 32}
        | {"num_key_value_heads": 32, "vocab_size": 49152, "tie_word_embeddings": True},
    ),
    "gpt2-xl": ("gpt2", {"n_embd": 1600, "n_layer": 48, "n_head": 25}),
    "Llama-2-13B": (
        "llama",
        {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40}
        | {"num_key_value_heads": 40, "vocab_size": 32000, "max_position_embeddings": 4096},
    ),
    "gemma-2-27b": (
        "gemma2",
        {"hidden_size": 4608, "intermediate_size": 36864, "num_hidden_layers": 46, "num_attention_heads": 32}
        | {"num_key_value_heads": 16, "head_dim": 128, "vocab_size": 256000, "layer_types": None},
    ),
    "Qwen2.5-32B": (
        "qwen2",
        {"hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40}
        | {"num_key_value_heads": 8, "vocab_size": 152064, "layer_types": None},
    ),
    "Mixtral-8x22B": (
        "mixtral",
        {"hidden_size": 6144, "intermediate_size": 16384, "num_hidden_layers": 56, "num_attention_heads": 48}
        | {"num_key_value_heads": 8, "vocab_size": 32768},
    ),
    "Qwen3-235B-A22B": (
        "qwen3_moe",
        {"hidden_size": 4096, "moe_intermediate_size": 1536, "num_hidden_layers": 94, "num_attention_heads": 64}
        | {"num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8}
        | {"vocab_size": 151936},
    ),
    "gpt-oss-20b": ("gpt_oss", {"num_hidden_layers": 24, "num_local_experts": 32, "layer_types": None}),
    "gpt-oss-120b": ("gpt_oss", {}),
    "DeepSeek-V3": ("deepseek_v3", {}),
}
"""Model types with the sizes of their published configurations, where they are not the default ones."""


def _default_config(model_type: str) -> dict[str, Any]:
    """Return the default configuration of a family as a `config.json` would state it."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    values = json.loads(AutoConfig.for_model(model_type).to_json_string(use_diff=False))
    return values | {"model_type": model_type, "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]]}


@dataclass(frozen=True, kw_only=True)
class Job:
    """One line of the table."""

    model: str
    """A directory of ds_configs/data/models, or a key of `MODELS`."""
    hardware: str
    seq_len: int
    words: dict[str, Any] = field(default_factory=dict)
    """Other options of `shardwright plan`."""

    @property
    def name(self) -> str:
        named = {"method": "", "precision": "", "global_batch_size": "batch "}
        options = "".join(f", {named[name]}{value}" for name, value in self.words.items())
        return f"{self.model.rpartition('--')[2]} on {self.hardware}, {self.seq_len // 1024}k{options}"


JOBS = (
    Job(model="Qwen--Qwen2.5-0.5B", hardware="1xRTX4090", seq_len=2048, words={"global_batch_size": 64}),
    Job(model="Qwen--Qwen2.5-0.5B", hardware="2xRTX3090", seq_len=4096),
    Job(model="meta-llama--Llama-3.2-1B", hardware="8xA100-40GB", seq_len=4096, words={"global_batch_size": 128}),
    Job(model="gpt2-xl", hardware="2x8xV100-32GB", seq_len=1024, words={"precision": "fp16", "global_batch_size": 512}),
    Job(model="SmolLM2-1.7B", hardware="8x8xH100-80GB", seq_len=2048, words={"global_batch_size": 1024}),
    Job(
        model="meta-llama--Llama-2-7b-hf",
        hardware="8xV100-32GB",
        seq_len=2048,
        words={"method": "lora", "precision": "fp16"},
    ),
    Job(model="meta-llama--Llama-2-7b-hf", hardware="8xA100-80GB", seq_len=4096, words={"global_batch_size": 64}),
    Job(model="mistralai--Mistral-7B-v0.3", hardware="4xA100-80GB", seq_len=8192, words={"global_batch_size": 32}),
    Job(model="Qwen--Qwen2.5-7B", hardware="8xL40S", seq_len=4096),
    Job(model="meta-llama--Llama-3.1-8B", hardware="1xRTX4090", seq_len=2048, words={"method": "qlora"}),
    Job(model="meta-llama--Llama-3.1-8B", hardware="1xA100-80GB", seq_len=4096, words={"method": "lora"}),
    Job(model="meta-llama--Llama-3.1-8B", hardware="8xH100-80GB", seq_len=8192),
    Job(model="meta-llama--Llama-3.1-8B", hardware="8xH100-80GB", seq_len=131072),
    Job(model="meta-llama--Llama-3.1-8B", hardware="8x8xH100-80GB", seq_len=8192, words={"global_batch_size": 512}),
    Job(model="Qwen--Qwen3-8B", hardware="8xMI300X", seq_len=32768),
    Job(model="Llama-2-13B", hardware="8xA100-80GB", seq_len=4096, words={"global_batch_size": 128}),
    Job(model="gemma-2-27b", hardware="2x8xH100-80GB", seq_len=4096),
    Job(model="Qwen2.5-32B", hardware="8xH100-80GB", seq_len=4096),
    Job(model="Qwen2.5-32B", hardware="4x8xH100-80GB", seq_len=32768),
    Job(model="meta-llama--Llama-3.1-70B", hardware="2xRTX4090", seq_len=2048, words={"method": "qlora"}),
    Job(model="meta-llama--Llama-3.1-70B", hardware="8xH100-80GB", seq_len=4096, words={"method": "lora"}),
    Job(model="meta-llama--Llama-3.1-70B", hardware="8xH100-80GB", seq_len=4096),
    Job(model="meta-llama--Llama-3.1-70B", hardware="32x8xH100-80GB", seq_len=8192, words={"global_batch_size": 1024}),
    Job(model="meta-llama--Llama-3.1-405B", hardware="64x8xH100-80GB", seq_len=8192, words={"global_batch_size": 1024}),
    Job(model="meta-llama--Llama-3.1-405B", hardware="128x8xH100-80GB", seq_len=131072),
    Job(model="mistralai--Mixtral-8x7B-v0.1", hardware="4x8xA100-80GB", seq_len=4096, words={"global_batch_size": 256}),
    Job(model="Mixtral-8x22B", hardware="8xH200", seq_len=4096, words={"method": "lora"}),
    Job(model="Qwen--Qwen3-30B-A3B", hardware="2x8xH100-80GB", seq_len=4096),
    Job(model="Qwen3-235B-A22B", hardware="32x8xH100-80GB", seq_len=4096, words={"global_batch_size": 2048}),
    Job(model="gpt-oss-20b", hardware="8xH100-80GB", seq_len=4096, words={"method": "lora"}),
    Job(model="gpt-oss-120b", hardware="8x8xH100-80GB", seq_len=4096),
    Job(model="DeepSeek-V3", hardware="128x8xH100-80GB", seq_len=4096, words={"global_batch_size": 4096}),
)


def model_path(name: str, directory: Path) -> str:
    """Return the path of a model's configuration, written if it is not stored."""
    if name not in MODELS:
        return str(STORED / name)
    model_type, sizes = MODELS[name]
    values = {key: value for key, value in _default_config(model_type).items() if key not in sizes}
    path = directory / name
    path.mkdir(exist_ok=True)
    stated = {key: value for key, value in sizes.items() if value is not None}
    (path / "config.json").write_text(json.dumps(values | stated), encoding="utf-8")
    return str(path)


def planned(job: Job, directory: Path, **changes: Any) -> Plan | PlanDoesNotFitError:
    """Return the plan of a job, or why nothing fits."""
    words = {"seq_len": job.seq_len, **job.words, **changes}
    try:
        return plan(model_path(job.model, directory), job.hardware, calibration=None, **words)
    except PlanDoesNotFitError as error:
        return error


def broken_rules(made: Plan, without_offload: Plan | PlanDoesNotFitError | None) -> list[str]:
    """Return the rules that a plan breaks."""
    chosen, broken = made.chosen, []
    speed = chosen.time.tokens_per_second
    if chosen.strategy.offload_optimizer != "none" and isinstance(without_offload, Plan):
        gain = speed / without_offload.chosen.time.tokens_per_second
        if gain < OFFLOAD_GAIN:
            broken.append(f"offload is {gain:.2f} times as fast as {display_name(without_offload.chosen.strategy)}")
    reached = utilization(chosen.time, made.model, made.hardware, made.job)
    if reached < LOW_UTILIZATION and "Model FLOPs utilization" not in chosen.reason:
        broken.append(f"an MFU of {reached:.1%} without its reason")
    return broken


def row(job: Job, made: Plan) -> str:
    """Return a line of the table."""
    strategy, memory, time = made.chosen.strategy, made.chosen.memory.gpu, made.chosen.time
    layers = -(-made.model.dimensions.num_layers // strategy.pp)
    speed = time.tokens_per_second / made.hardware.world_size
    reached = utilization(time, made.model, made.hardware, made.job)
    low = made.chosen.reason.partition("a step is mostly ")[2].partition("%).")[0]
    cells = [
        job.name,
        display_name(strategy),
        f"{strategy.micro_batch_size} x {strategy.gradient_accumulation_steps}",
        f"{strategy.recomputed_layers(layers)}/{layers}",
        f"{memory.peak_bytes / 1e9:.0f} of {memory.capacity_bytes / 1e9:.0f}",
        f"{time.seconds:.2f} s",
        f"{speed:,.0f}",
        f"{reached:.0%}" + (f": {low}%)" if low else ""),
    ]
    return "| " + " | ".join(cells) + " |"


def page(lines: list[str], broken: list[str]) -> str:
    """Return docs/measurements/expert_plans.md."""
    rules = "\n".join(f"- {line}" for line in broken) or "none"
    table = "\n".join(lines)
    return f"""# Plans of {len(JOBS)} jobs

Plans for full training, LoRA and QLoRA of 0.5B to 671B parameters on 1 to 1,024 accelerators, to read and to check.
`python benchmarks/expert_plans.py --write` makes this page.

- Every job fits.
- A plan with offload is at least {OFFLOAD_GAIN - 1:.0%} faster than one without, unless nothing fits without.
- A plan below {LOW_UTILIZATION:.0%} MFU names what takes the time.

Broken rules:

{rules}

MFU counts the products and the attention that the model needs, without recomputation and masked scores, relative to
the peak of the accelerators. Nothing here was run: how true step times are is on [another page](step_time.md).

| job | layout | micro-batch | recomputed | GB | step | tokens/s per accelerator | MFU |
|---|---|--:|--:|--:|--:|--:|---|
{table}
"""


def main() -> int:
    """Plan every job, print the table and the broken rules."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of names of jobs (default: all)")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    options = parser.parse_args()
    lines, broken = [], []
    with tempfile.TemporaryDirectory() as directory:
        for job in JOBS:
            if options.names and not any(name in job.name for name in options.names):
                continue
            made = planned(job, Path(directory))
            if isinstance(made, PlanDoesNotFitError):
                why = str(made).splitlines()[0]
                lines.append(f"| {job.name} | {why} |  |  |  |  |  |  |")
                broken.append(f"{job.name}: {why}")
            else:
                offloads = made.chosen.strategy.offload_optimizer != "none"
                without = planned(job, Path(directory), offload="none") if offloads else None
                lines.append(row(job, made))
                broken += [f"{job.name}: {rule}" for rule in broken_rules(made, without)]
            print(lines[-1], flush=True)
    for line in broken:
        print("BROKEN", line)
    if options.write:
        PAGE.write_text(page(lines, broken), encoding="utf-8")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
