"""Flags of the commands that plan, launch and report a training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from ..ds_configs.specs.job import OffloadName, StrategyName, Switch
from ..ds_configs.specs.teacher_placement import TeacherPlacementChoice
from ..trainers.losses.objective import Divergence

ENVIRONMENT = ("hardware", "host_memory", "nvme", "teacher_placement", "teacher_cache", "seed")
"""Settings that the environment may state where a command has them; others would collide with those of `plan`."""
_Flag = Parameter(negative="")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class TrainingFlags:
    """What every launched training can be told; `None` was not given."""

    output_dir: Path
    """Where the model goes, with README.md, REPORT.md, metrics.jsonl, a chart and the plan."""
    dataset: str | None = None
    """ID[:config][#N] of the Hub, a .jsonl, .json, .parquet or .txt file, a directory of them, or python-help.
    Columns: text; messages or conversations; or prompt and completion."""
    dataset_split: str | None = None
    """Split of a Hub dataset. Default train."""
    dataset_revision: str | None = None
    """Branch, tag or commit of a Hub dataset."""
    seq_len: int | None = None
    """Tokens of one sample. Default 512."""
    packing: bool | None = None
    """Join plain text to samples of equal length. Default yes."""
    evaluation_fraction: float | None = None
    """Share of the rows that is held out. Default 0.05."""
    evaluation_samples: int | None = None
    """Held-out samples to evaluate on, at most. Default 256."""
    hardware: str | None = None
    """As for plan. Default: this machine's accelerators, or two CPU ranks."""
    host_memory: str | None = None
    """Memory of one node, such as 1TB."""
    nvme: str | None = None
    """NVMe of one node as PATH:SIZE."""
    loss: Divergence | None = None
    """Distance between teacher and trained model. Default forward_kl."""
    mixture: float | None = None
    """Teacher's weight in JSD, lambda of the skewed divergences. Default 0.5."""
    alpha: float | None = None
    """Weight of the distance, 0 to 1; the labels have the rest. Default: distill 0.5, qat 1."""
    temperature: float | None = None
    """Softens both distributions. Default 1."""
    max_steps: int | None = None
    """Optimizer steps. Default: as many as the epochs need."""
    epochs: float | None = None
    """Passes over the data. Default 1."""
    learning_rate: float | None = None
    """Default 2e-5, with LoRA 2e-4."""
    micro_batch_size: int | Literal["auto"] | None = None
    """Samples of one forward pass on one rank, or auto. Default auto."""
    global_batch_size: int | None = None
    """Samples of one optimizer step. Default about 32."""
    precision: Literal["auto", "bf16", "fp16", "fp32"] | None = None
    """Default bf16, and fp32 without an accelerator."""
    optimizer: str | None = None
    """A name of the Trainer's optim. Default adamw_torch_fused."""
    method: Literal["full", "lora"] | None = None
    """Full training or LoRA. Default full."""
    lora_rank: int | None = None
    """Rank of the LoRA matrices. Default 16."""
    lora_targets: str | None = None
    """Module names separated by commas, or all-linear. Default all-linear."""
    gradient_checkpointing: Switch | None = None
    """Recompute each layer in the backward pass. Default auto."""
    strategy: StrategyName | None = None
    """Engine and stage. Default auto."""
    offload: OffloadName | None = None
    """none, cpu (optimizer), cpu-all (and parameters) or nvme. Default auto."""
    teacher_placement: TeacherPlacementChoice | None = None
    """replica, sharded, offloaded, quantized or cached. Default auto."""
    revision: str | None = None
    """Branch, tag or commit of the Hub model that is trained."""
    teacher_revision: str | None = None
    """Branch, tag or commit of a Hub teacher."""
    logging_steps: int | None = None
    """Optimizer steps between two lines of metrics.jsonl. Default 10."""
    save_steps: int | None = None
    """Optimizer steps between checkpoints. Default: none."""
    seed: int | None = None
    """Of data order, held-out rows and sampling. Default 0."""
    config: Path | None = None
    """YAML file with any of these settings; flags win."""
    resume: Annotated[bool, _Flag] = False
    """Go on from the last checkpoint in the output directory."""
    force: Annotated[bool, _Flag] = False
    """Write into an output directory that holds other files."""
    dry_run: Annotated[bool, _Flag] = False
    """Show the data, the plan and the files, launch and write nothing."""
    format: Literal["human", "json"] = "human"
    """human or json; json prints one object on stdout."""

    @property
    def how(self) -> dict[str, bool]:
        """What decides how a run begins."""
        return {"dry_run": self.dry_run, "force": self.force, "resume": self.resume}
