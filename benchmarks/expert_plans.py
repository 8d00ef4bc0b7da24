"""Plans of jobs as people run them, to read and to check: `python benchmarks/expert_plans.py [--write] [NAME ...]`.

Exits with 1 if a plan breaks a rule: every job fits; what a layout adds without being asked (offload, context
parallelism) is needed or pays; a plan of low utilization names what takes the time.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from page_parts import with_part
from shardwright.ds_configs.plan.plan import Plan, PlanDoesNotFitError
from shardwright.ds_configs.search.reasons import OFFLOAD_GAIN, display_name
from shardwright.ds_configs.step_time.utilization import LOW_UTILIZATION, utilization
from shardwright.plugins.planning import plan

PAGE = Path(__file__).parents[1] / "docs" / "measurements" / "expert_plans.md"
GPT2_XL = {"model_type": "gpt2", "n_embd": 1600, "n_layer": 48, "n_head": 25}
QWEN_32B = {"hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40}
GEMMA_27B = {"hidden_size": 4608, "intermediate_size": 36864, "num_hidden_layers": 46, "num_attention_heads": 32}
MIXTRAL_8X22B = {"hidden_size": 6144, "intermediate_size": 16384, "num_hidden_layers": 56, "num_attention_heads": 48}
QWEN_235B = {"hidden_size": 4096, "moe_intermediate_size": 1536, "num_hidden_layers": 94, "num_attention_heads": 64}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2-xl": GPT2_XL,
    "gemma-2-27b": {"model_type": "gemma2", "num_key_value_heads": 16, "head_dim": 128} | GEMMA_27B,
    "Qwen2.5-32B": {"model_type": "qwen2", "num_key_value_heads": 8, "vocab_size": 152064} | QWEN_32B,
    "Mixtral-8x22B": {"model_type": "mixtral", "num_key_value_heads": 8, "vocab_size": 32768} | MIXTRAL_8X22B,
    "Qwen3-235B-A22B": {"model_type": "qwen3_moe", "num_key_value_heads": 4, "head_dim": 128} | QWEN_235B,
    "gpt-oss-20b": {"model_type": "gpt_oss", "num_hidden_layers": 24, "num_local_experts": 32},
    "gpt-oss-120b": {"model_type": "gpt_oss"},
    "DeepSeek-V3": {"model_type": "deepseek_v3"},
}
"""Published sizes of models that the package does not have; the rest are defaults of their configuration's class."""
JOBS: tuple[tuple[str, str, int, dict[str, Any]], ...] = (
    ("Qwen/Qwen2.5-0.5B", "1xRTX4090", 2048, {"global_batch_size": 64}),
    ("Qwen/Qwen2.5-0.5B", "2xRTX3090", 4096, {}),
    ("meta-llama/Llama-3.2-1B", "8xA100-40GB", 4096, {"global_batch_size": 128}),
    ("gpt2-xl", "2x8xV100-32GB", 1024, {"precision": "fp16", "global_batch_size": 512}),
    ("meta-llama/Llama-2-7b-hf", "8xV100-32GB", 2048, {"method": "lora", "precision": "fp16"}),
    ("meta-llama/Llama-2-7b-hf", "8xA100-80GB", 4096, {"global_batch_size": 64}),
    ("mistralai/Mistral-7B-v0.3", "4xA100-80GB", 8192, {"global_batch_size": 32}),
    ("Qwen/Qwen2.5-7B", "8xL40S", 4096, {}),
    ("meta-llama/Llama-3.1-8B", "1xRTX4090", 2048, {"method": "qlora"}),
    ("meta-llama/Llama-3.1-8B", "4xRTX3090", 4096, {"method": "lora"}),
    ("meta-llama/Llama-3.1-8B", "1xA100-80GB", 4096, {"method": "lora"}),
    ("meta-llama/Llama-3.1-8B", "8xH100-80GB", 8192, {}),
    ("meta-llama/Llama-3.1-8B", "8xH100-80GB", 131072, {}),
    ("meta-llama/Llama-3.1-8B", "8x8xH100-80GB", 8192, {"global_batch_size": 512}),
    ("Qwen/Qwen3-8B", "8xMI300X", 32768, {}),
    ("gemma-2-27b", "2x8xH100-80GB", 4096, {}),
    ("Qwen2.5-32B", "8xH100-80GB", 4096, {}),
    ("Qwen2.5-32B", "4x8xH100-80GB", 32768, {}),
    ("meta-llama/Llama-3.1-70B", "2xRTX4090", 2048, {"method": "qlora"}),
    ("meta-llama/Llama-3.1-70B", "8xH100-80GB", 4096, {"method": "lora"}),
    ("meta-llama/Llama-3.1-70B", "8xH100-80GB", 4096, {}),
    ("meta-llama/Llama-3.1-70B", "32x8xH100-80GB", 8192, {"global_batch_size": 1024}),
    ("meta-llama/Llama-3.1-405B", "64x8xH100-80GB", 8192, {"global_batch_size": 1024}),
    ("meta-llama/Llama-3.1-405B", "128x8xH100-80GB", 131072, {}),
    ("mistralai/Mixtral-8x7B-v0.1", "4x8xA100-80GB", 4096, {"global_batch_size": 256}),
    ("Mixtral-8x22B", "8xH200", 4096, {"method": "lora"}),
    ("Qwen/Qwen3-30B-A3B", "2x8xH100-80GB", 4096, {}),
    ("Qwen3-235B-A22B", "32x8xH100-80GB", 4096, {"global_batch_size": 2048}),
    ("gpt-oss-20b", "8xH100-80GB", 4096, {"method": "lora"}),
    ("gpt-oss-120b", "8x8xH100-80GB", 4096, {}),
    ("DeepSeek-V3", "128x8xH100-80GB", 4096, {"global_batch_size": 4096}),
)
"""Model, hardware, sequence length, and other fields of the job."""
HEADER = """| job | layout | micro-batch | recomputed | GB | step | tokens/s per accelerator | MFU |
|---|---|--:|--:|--:|--:|--:|---|"""


def speed_of(model: str, hardware: str, **job: Any) -> float:
    """Return tokens per second of the plan of a job; 0 if nothing fits."""
    try:
        return plan(model, hardware, calibration=None, **job).chosen.time.tokens_per_second
    except PlanDoesNotFitError:
        return 0.0


def broken_rules(made: Plan, model: str, hardware: str, **job: Any) -> Iterator[str]:
    """Yield what an expert would object to in a plan."""
    chosen, speed = made.chosen, made.chosen.time.tokens_per_second
    if chosen.layout.offload_optimizer != "none":
        without = speed_of(model, hardware, offload="none", **job)
        if speed < OFFLOAD_GAIN * without:
            yield f"offload is {speed / without:.2f} times as fast as without"
    if chosen.layout.cp > 1:
        without = speed_of(model, hardware, context_parallel_size=1, **job)
        certain = speed * chosen.time.seconds / chosen.time.high_seconds
        if certain < without:
            yield f"context parallelism is not certainly faster: {certain:,.0f} and {without:,.0f} tokens/s"
    reached = utilization(chosen.time, made.model, made.hardware, made.job)
    if reached < LOW_UTILIZATION and "MFU is" not in chosen.reason:
        yield f"an MFU of {reached:.1%} without its reason"


def row(name: str, made: Plan) -> str:
    layout, memory, time = made.chosen.layout, made.chosen.memory.gpu, made.chosen.time
    layers = -(-made.model.dimensions.num_layers // layout.pp)
    low = made.chosen.reason.partition("a step is mostly ")[2].partition("%).")[0]
    cells = (
        name,
        display_name(layout),
        f"{layout.micro_batch_size} x {layout.gradient_accumulation_steps}",
        f"{layout.recomputed_layers(layers)}/{layers}",
        f"{memory.peak_bytes / 1e9:.0f} of {memory.capacity_bytes / 1e9:.0f}",
        f"{time.seconds:.2f} s",
        f"{time.tokens_per_second / made.hardware.world_size:,.0f}",
        f"{utilization(time, made.model, made.hardware, made.job):.0%}" + (f": {low}%)" if low else ""),
    )
    return "| " + " | ".join(cells) + " |"


def config_of(name: str, directory: Path) -> str:
    """Return the name of a model of the package, or the path of a configuration written for it."""
    if name not in CONFIGS:
        return name
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config = AutoConfig.for_model(**CONFIGS[name])
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    config.save_pretrained(directory / name)
    return str(directory / name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of names of jobs (default: all)")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    options = parser.parse_args()
    lines, broken = [HEADER], []
    with tempfile.TemporaryDirectory() as directory:
        for model, hardware, seq_len, fields in JOBS:
            named = ", ".join(f"batch {value}" if isinstance(value, int) else value for value in fields.values())
            name = f"{model.rpartition('/')[2]} on {hardware}, {seq_len // 1024}k" + (f", {named}" if named else "")
            if options.names and not any(part in name for part in options.names):
                continue
            job = fields | {"seq_len": seq_len}
            config = config_of(model, Path(directory))
            try:
                made = plan(config, hardware, calibration=None, **job)
            except PlanDoesNotFitError as error:
                broken.append(f"{name}: {str(error).splitlines()[0]}")
                continue
            lines.append(row(name, made))
            broken += [f"{name}: {rule}" for rule in broken_rules(made, config, hardware, **job)]
            print(lines[-1], flush=True)
    print("\n".join(broken) or "No rule is broken.")
    if options.write:
        rules = "\n".join(f"- {line}" for line in broken) or "No rule is broken."
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(with_part(page, "plans", f"{rules}\n\n" + "\n".join(lines)), encoding="utf-8")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
