"""Longest sequences that trained with ALST on H100, beside those that the planner predicts to fit.

`tables/alst_longest_sequences.csv` has the recipes of snowflakedb/ArcticTraining (projects/sequence-parallelism; ALST,
arXiv 2506.13996): DeepSpeed ZeRO-3 with its default buffers, bf16, one sequence at a time, all layers recomputed,
expandable segments, 1.9 TB of host memory per node. A prediction is the longest sequence whose memory fits, by the
upper end of its interval, as for `shardwright plan`. Nothing is fitted to the table. Recipes with a tiled loss load
their models with Liger's kernels; the first table has plain layers in all rows, the second one Liger's in those.

    python benchmarks/longest_sequences.py [--tables DIRECTORY]
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from published_steps import TABLES, cluster, llama
from shardwright.ds_configs.memory.estimate import MemoryEstimate, estimate_memory
from shardwright.ds_configs.specs.hardware import HardwareSpec, parse_hardware
from shardwright.ds_configs.specs.job import TrainingJob
from shardwright.ds_configs.specs.layout import Layout, ZeroOptions
from shardwright.ds_configs.specs.model import ModelSpec

MODELS = {
    "Llama-3.1-8B": llama(4096, 32, 32, inner=14336, vocab=128256, positions=131072, kv_heads=8),
    "Llama-3.1-70B": llama(8192, 80, 64, inner=28672, vocab=128256, positions=131072, kv_heads=8),
}
ZERO = ZeroOptions(
    reduce_bucket_size=500_000_000,
    stage3_prefetch_bucket_size=50_000_000,
    stage3_param_persistence_threshold=100_000,
    stage3_max_live_parameters=1_000_000_000,
    stage3_max_reuse_distance=1_000_000_000,
    sub_group_size=1_000_000_000,
)
"""Defaults of DeepSpeed (runtime/zero/config.py), which the recipes keep."""
STEP_TOKENS = 256


@dataclass(frozen=True, kw_only=True)
class LongestRun:
    """One row of the table."""

    model: ModelSpec
    hardware: HardwareSpec
    layout: Layout
    loss: str
    liger: bool
    measured: int
    label: str

    def memory(self, tokens: int) -> MemoryEstimate:
        liger = self.liger and self.loss == "chunked"
        job = TrainingJob(seq_len_tokens=tokens, loss=self.loss, use_liger_kernel=liger)  # type: ignore[arg-type]
        return estimate_memory(self.layout, self.model, self.hardware, job)

    def predicted(self, *, expected: bool = False) -> int:
        """Return the longest multiple of 256 tokens per rank that fits, or that is expected to."""
        unit = STEP_TOKENS * self.layout.sp

        def fits(count: int) -> bool:
            memory = self.memory(count * unit)
            host = memory.host.peak_bytes_per_node <= memory.host.capacity_bytes_per_node
            return host and memory.gpu.peak_bytes <= memory.gpu.capacity_bytes if expected else memory.fits

        low, high = 0, 1
        while fits(high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low * unit


def longest_runs(directory: Path = TABLES, *, liger: bool = False) -> Iterator[LongestRun]:
    """Yield the rows whose model is known, in the order of the table; `liger` where the loss is tiled."""
    text = (directory / "alst_longest_sequences.csv").read_text(encoding="utf-8")
    for row in csv.DictReader(line for line in text.splitlines() if not line.startswith("#")):
        gpus, sp = int(row["accelerators"]), int(row["sp"])
        model = MODELS.get(row["model"])
        if model is None:
            continue
        hardware = cluster(row["accelerator"], gpus)
        hardware = parse_hardware(hardware.name, host_memory="1.9TB")
        on = {name: row[name] == "1" for name in row if name.startswith(("tiled", "offload"))}
        layout = Layout(
            engine="deepspeed",
            zero_stage=3,
            offload_optimizer="cpu" if on["offload_optimizer"] else "none",
            offload_param="cpu" if on["offload_param"] else "none",
            dp_shard=gpus // sp,
            sp=sp,
            gradient_checkpointing=True,
            tiled_mlp=on["tiled_mlp"],
            offloaded_checkpoints=model.dimensions.num_layers if on["offloaded_checkpoints"] else 0,
            zero=ZERO,
        )
        features = [name.replace("_", " ") for name in ("tiled_loss", "tiled_mlp", "offloaded_checkpoints") if on[name]]
        yield LongestRun(
            model=model,
            hardware=hardware,
            layout=layout,
            loss="chunked" if on["tiled_loss"] else "eager",
            liger=liger,
            measured=int(row["max_tokens"]),
            label=f"{gpus} x {row['accelerator']}, sp {sp}" + "".join(f", {name}" for name in features),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=Path, default=TABLES, help="directory with alst_longest_sequences.csv")
    directory = parser.parse_args().tables
    for liger in (False, True):
        print("Liger's layers where the loss is tiled" if liger else "plain layers")
        report(longest_runs(directory, liger=liger))


def report(runs: Iterable[LongestRun]) -> None:
    """Print a line for each row, and the mean error."""
    errors = []
    print(f"{'measured':>12}{'predicted':>12}{'error':>9}{'expected':>12}{'error':>9}  at the measured length, GB")
    for run in runs:
        predicted = run.predicted()
        errors.append(predicted / run.measured - 1)
        likely = run.predicted(expected=True)
        gpu = run.memory(run.measured).gpu
        sizes = f"{gpu.low_bytes / 1e9:.1f} to {gpu.high_bytes / 1e9:.1f} of {gpu.capacity_bytes / 1e9:.1f}"
        likely_error = likely / run.measured - 1
        print(f"{run.measured:>12,}{predicted:>12,}{errors[-1]:>+9.1%}", end="")
        print(f"{likely:>12,}{likely_error:>+9.1%}  {sizes:<24}{run.label}")
    mean = sum(map(abs, errors)) / len(errors)
    print(f"mean error {mean:.1%}, longest over-prediction {max(errors):+.1%}")


if __name__ == "__main__":
    main()
