"""The reason of a plan agrees with its table of other layouts."""

from __future__ import annotations

import re
from dataclasses import replace

from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from paths import CONFIGS
from shardwright.ds_configs.search.candidates import SearchContext
from shardwright.ds_configs.search.reasons import display_name
from shardwright.ds_configs.search.search import search
from shardwright.ds_configs.specs.errors import UsageError
from shardwright.ds_configs.specs.hardware import parse_hardware
from shardwright.ds_configs.specs.job import TrainingJob
from shardwright.plugins.planning import load_model_spec

MODELS = {path.name: load_model_spec(str(path)).spec for path in sorted(CONFIGS.glob("*--*"))}
NAMES = ("Qwen--Qwen2.5-0.5B", "Qwen--Qwen3-30B-A3B", "meta-llama--Llama-3.1-8B", "openai-community--gpt2")


@given(
    model=st.sampled_from(NAMES),
    gpus=st.sampled_from(["8xA100-80GB", "8xH800", "4xRTX4090", "2x8xA10G", "8xMI325X", "8xH20"]),
    job=st.builds(
        TrainingJob,
        seq_len_tokens=st.sampled_from([1024, 4096, 16_384]),
        global_batch_size=st.sampled_from([None, 64, 96]),
        method=st.sampled_from(["full", "lora"]),
        optimizer=st.sampled_from(["adamw_torch_fused", "adamw_8bit", "adafactor"]),
        gradient_checkpointing=st.sampled_from(["auto", "on"]),
    ),
)
@settings(
    deadline=None, max_examples=20, phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck)
)
def test_reason_and_table_name_the_same_fastest_layout(model: str, gpus: str, job: TrainingJob) -> None:
    assume(job.seq_len_tokens <= (MODELS[model].learned_positions or 10**9))
    try:
        outcome = search(SearchContext(model=MODELS[model], hardware=parse_hardware(gpus), job=job))
    except UsageError:
        return
    chosen = outcome.chosen
    if chosen is None:
        return
    rows = [row for row in outcome.rejected if row.memory.fits]
    speeds = [row.time.tokens_per_second for row in rows]
    assert speeds == sorted(speeds, reverse=True)
    first = chosen.reason.partition(". It reaches")[0]
    own = chosen.time.tokens_per_second
    gains = {display_name(row.layout): f"{100 * (row.time.tokens_per_second / own - 1):.1f}" for row in reversed(rows)}
    if stated := re.search(r"within ([\d.]+) % of the fastest (.*) \((.+)\) and ", first):
        gain, layouts, name = stated.groups()
        assert gains[name] == gain or (gain == "0.1" and gains[name] == "0.0")
        faster = [row for row in rows if row.time.tokens_per_second > own]
        skipped = [
            row
            for row in faster
            if (row.layout.pp > 1 and "that a stock Trainer runs" in layouts)
            or (row.layout.offload_optimizer != "none" and "without offload" in layouts)
        ]
        assert display_name(next(row for row in faster if row not in skipped).layout) == name
    elif "is the fastest layout that fits" in first:
        assert all(speed <= own for speed in speeds)


def test_layouts_that_lack_memory_say_which() -> None:
    hardware = parse_hardware("2xH200", host_memory="40GB")
    context = SearchContext(model=MODELS["meta-llama--Llama-3.1-8B"], hardware=hardware, job=TrainingJob())
    outcome = search(context)
    lacking = {row.memory.lacks: row for row in outcome.rejected if not row.memory.fits}
    assert "host" in lacking
    assert "GB host memory per node: " in lacking["host"].reason
    on_gpu = search(replace(context, hardware=parse_hardware("2xRTX3080"))).rejected
    assert any(row.memory.lacks == "GPU" and "lacks GPU memory" in row.reason for row in on_gpu)
