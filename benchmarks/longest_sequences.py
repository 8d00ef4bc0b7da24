"""Memory and lengths of the longest sequences that trained with ALST, beside those that the planner predicts.

Both are from the recipes of snowflakedb/ArcticTraining (projects/sequence-parallelism; ALST, arXiv 2506.13996):
DeepSpeed ZeRO-3 with its default buffers, bf16, one sequence at a time, all layers recomputed by reentrant
checkpointing, gradients reduced in bf16, 1.9 TB of host memory per node, Liger's kernels where the loss is tiled.
The first part has the runs whose memory a recipe states, which nvmlDeviceGetMemoryInfo (version 1) counts with what the
driver reserves. The second has the lengths of `tables/alst_longest_sequences.csv`: a prediction is the longest sequence
whose memory fits, by the upper end of its interval and by its middle. Nothing is fitted to either.

    python benchmarks/longest_sequences.py [--tables DIRECTORY]
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from published_steps import TABLES, cluster, llama
from shardwright.ds_configs.memory import communication, layers
from shardwright.ds_configs.memory.activations import has_fused_loss
from shardwright.ds_configs.memory.estimate import MemoryEstimate, estimate_memory, shown_bytes
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
INDEXED_TOKENS = 2**31 // 4096
"""Tokens of width 4,096 per GPU that Liger's 32-bit indices reach: the recipes report an illegal memory access beyond,
so that runs within a tenth of it show no limit of memory."""
DEVICE_BYTES = {"H100-80GB": 81559 * 2**20, "H200": 143771 * 2**20}
"""The total of nvidia-smi; a process can allocate what the catalog has, and the driver reserves the rest."""

OFFLOADED, TILED = "offloaded_checkpoints", "tiled_mlp"
USED: tuple[tuple[str, int, str, int, tuple[str, ...], float], ...] = (
    ("H200", 1, "Llama-3.1-8B", 300_000, ("offload_param",), 134.96),
    ("H200", 1, "Llama-3.1-8B", 650_000, ("offload_param", OFFLOADED), 126.81),
    ("H200", 1, "Llama-3.1-8B", 1_200_000, ("offload_param", OFFLOADED, TILED), 136.15),
    ("H100-80GB", 32, "Llama-3.1-70B", 4_000_000, (OFFLOADED, TILED), 47.70),
    ("H100-80GB", 64, "Llama-3.1-70B", 10_000_000, (OFFLOADED, TILED), 53.83),
)
"""Accelerators, model, tokens and features of the recipes `run-h200-sp1-llama-8b-liger*`, `run-h100-sp32-llama-70b` and
`run-h100-sp64-llama-70b`, with the GiB that they state; all offload the optimizer."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of a recipe."""

    model: ModelSpec
    hardware: HardwareSpec
    layout: Layout
    loss: str
    label: str
    measured: int = 0

    def job(self, tokens: int) -> TrainingJob:
        chunked = self.loss == "chunked"
        return TrainingJob(seq_len_tokens=tokens, loss=self.loss, use_liger_kernel=chunked,  # type: ignore[arg-type]
                           gradient_checkpointing="reentrant")  # fmt: skip

    def memory(self, tokens: int) -> MemoryEstimate:
        return estimate_memory(self.layout, self.model, self.hardware, self.job(tokens))

    def used_bytes(self, tokens: int) -> int:
        """Return what the device has in use after a step, with what the driver reserves."""
        gpu = self.memory(tokens).gpu
        driver = DEVICE_BYTES[self.hardware.gpu] - gpu.capacity_bytes
        return driver + shown_bytes(gpu, self.layout, self.model, self.hardware, self.job(tokens))

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

    @property
    def is_lower_bound(self) -> bool:
        """Whether indices, not memory, ended the runs."""
        return self.loss == "chunked" and self.measured // self.layout.sp > 0.9 * INDEXED_TOKENS


def run_of(gpu: str, gpus: int, model: str, sp: int, features: tuple[str, ...], loss: str, measured: int) -> Run:
    layout = Layout(
        engine="deepspeed",
        zero_stage=3,
        offload_optimizer="cpu",
        offload_param="cpu" if "offload_param" in features else "none",
        dp_shard=gpus // sp,
        sp=sp,
        gradient_checkpointing=True,
        tiled_mlp=TILED in features,
        offloaded_checkpoints=MODELS[model].dimensions.num_layers if OFFLOADED in features else 0,
        zero=ZERO,
    )
    names = [*(["tiled loss"] if loss == "chunked" else []), *(name.replace("_", " ") for name in features)]
    return Run(
        model=MODELS[model],
        hardware=parse_hardware(cluster(gpu, gpus).name, host_memory="1.9TB"),
        layout=layout,
        loss=loss,
        label=", ".join([f"{gpus} x {gpu}, {model}, sp {sp}", *names]),
        measured=measured,
    )


def longest_runs(directory: Path) -> Iterator[Run]:
    """Yield the rows of the table in their order."""
    text = (directory / "alst_longest_sequences.csv").read_text(encoding="utf-8")
    for row in csv.DictReader(line for line in text.splitlines() if not line.startswith("#")):
        features = tuple(name for name in ("offload_param", OFFLOADED, TILED) if row[name] == "1")
        loss = "chunked" if row["tiled_loss"] == "1" else "eager"
        sizes = int(row["accelerators"]), row["model"], int(row["sp"])
        yield run_of(row["accelerator"], *sizes, features, loss, int(row["max_tokens"]))


def as_the_recipes_do() -> None:
    """Plan what Shardwright does not run: `seq_parallel_communication_data_type: bf16`, and Liger's loss under sp.

    `SFTTrainer.loss` of ArcticTraining passes the shifted labels of a shard to Liger's fused head and loss.
    """
    communication._reduction_bytes = lambda layout, job: job.compute_bytes
    layers.has_fused_loss = lambda model, layout, job, *, gpu: has_fused_loss(model, layout.changed(sp=1), job, gpu=gpu)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=Path, default=TABLES, help="directory with alst_longest_sequences.csv")
    directory = parser.parse_args().tables
    as_the_recipes_do()
    print("used memory, GB")
    print(f"{'tokens':>12}{'stated':>9}{'shown':>9}{'error':>8}{'tensors':>9}")
    errors = []
    for gpu, gpus, model, tokens, features, gib in USED:
        run, stated = run_of(gpu, gpus, model, gpus, features, "chunked", tokens), gib * 2**30
        shown, gpu_memory = run.used_bytes(tokens), run.memory(tokens).gpu
        errors.append(shown / stated - 1)
        print(f"{tokens:>12,}{stated / 1e9:>9.1f}{shown / 1e9:>9.1f}{errors[-1]:>+8.1%}", end="")
        print(f"{gpu_memory.allocated_bytes / 1e9:>9.1f}  {run.label}")
    print(f"mean error {sum(map(abs, errors)) / len(errors):.1%}\n")
    print("lengths, tokens")
    print(f"{'measured':>12}{'predicted':>12}{'error':>9}{'expected':>12}{'error':>9}")
    lengths: list[tuple[float, float]] = []
    for run in longest_runs(directory):
        pair = run.predicted(), run.predicted(expected=True)
        bound = ">=" if run.is_lower_bound else ""
        safe, likely = (tokens / run.measured - 1 for tokens in pair)
        # A longer prediction does not contradict a lower bound.
        lengths.append((min(safe, 0.0), min(likely, 0.0)) if bound else (safe, likely))
        measured = f"{bound}{run.measured:,}"
        print(f"{measured:>12}{pair[0]:>12,}{safe:>+9.1%}{pair[1]:>12,}{likely:>+9.1%}", end="")
        print(f"  {run.label}")
    means = [sum(abs(pair[index]) for pair in lengths) / len(lengths) for index in (0, 1)]
    print(f"mean error {means[0]:.1%} with the interval's end, {means[1]:.1%} with its middle")


if __name__ == "__main__":
    main()
