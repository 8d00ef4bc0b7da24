"""Metered memory and time of a compiled 4-layer Llama on this CPU, beside the plan's.

Run `python benchmarks/compiled_layers.py`.

Inductor allocates without the dispatcher, which Shardwright's meter watches, so that the allocator's own events are
counted instead. One process trains in fp32 with fused AdamW. The first steps compile.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from shardwright.ds_configs.memory.estimate import cpu_rank_terms
from shardwright.ds_configs.specs.hardware import parse_hardware
from shardwright.ds_configs.specs.job import TrainingJob
from shardwright.ds_configs.specs.layout import Layout
from shardwright.ds_configs.specs.model import ModelSpec
from shardwright.ds_configs.step_time.estimate import estimate_step_time

SEQUENCES, TOKENS = 2, 512
SIZES = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": TOKENS,
    "tie_word_embeddings": False,
}


def measured(*, compiled: bool, steps: int = 3) -> tuple[int, float]:
    """Return the peak of the allocator's live bytes in a step after the first ones, and the seconds of the fastest."""
    from torch.profiler import ProfilerActivity, profile
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    times = []
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        model: Any = LlamaForCausalLM(LlamaConfig(**SIZES, use_cache=False)).train()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        forward = torch.compile(model) if compiled else model
        ids = torch.randint(0, SIZES["vocab_size"], (SEQUENCES, TOKENS))
        for _ in range(steps):
            began = time.perf_counter()
            forward(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            times.append(time.perf_counter() - began)
    events = profiler.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    # The last step: compilation allocates for its own trials.
    live, peak, begins = 0, 0, changes[-1][0] - int(1e9 * times[-1])
    for moment, change in changes:
        live += change
        if moment >= begins:
            peak = max(peak, live)
    return peak, min(times[1:])


def predicted(model: ModelSpec, *, compiled: bool) -> tuple[int, float]:
    """Return the plan's peak of live tensor bytes on a CPU rank, and its seconds of a step."""
    layout = Layout(engine="single", micro_batch_size=SEQUENCES)
    job = TrainingJob(seq_len_tokens=TOKENS, precision="fp32", torch_compile=compiled, loss="eager")
    phases = cpu_rank_terms(layout, model, job)
    peak = max(sum(terms.values()) for name, terms in phases.items() if name != "init")
    return peak, estimate_step_time(layout, model, parse_hardware("1xCPU"), job).seconds


def main() -> None:
    from shardwright.ds_configs.models.families import model_spec_from_config

    config = {**SIZES, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    model = model_spec_from_config(config, name="llama-4-layers")
    print("| layers | predicted MB | metered MB | error | planned s | measured s |")
    print("|---|---|---|---|---|---|")
    for compiled in (False, True):
        bytes_planned, planned = predicted(model, compiled=compiled)
        bytes_metered, seconds = measured(compiled=compiled)
        error = bytes_planned / bytes_metered - 1
        print(
            f"| {'compiled' if compiled else 'eager'} | {bytes_planned / 1e6:.1f} | {bytes_metered / 1e6:.1f} | "
            f"{error:+.1%} | {planned:.2f} | {seconds:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
