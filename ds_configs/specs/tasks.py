"""The table of training tasks: what a step of each computes, with which second models, and which trainer runs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from .layout import Layout
from .second_models import SecondModelRole

TaskName = Literal["sft", "dpo", "kto", "orpo", "cpo", "reward", "grpo", "rloo", "ppo", "gkd"]

TrlTask = Literal["sft", "dpo", "kto", "orpo", "cpo", "reward", "grpo", "rloo", "gkd", "distillation"]
"""Tasks with a configuration class of TRL 1.16.0."""

Head = Literal["model", "fused", "logits", "divergence", "score"]
"""How a loss reads the model's output. `model`: the loss of the model's own forward pass, or a chunked one; `fused`:
log-probabilities of labels from tiles of the head, as TRL computes them since 1.15; `logits`: log-probabilities from
complete logits; `divergence`: between the complete distributions of two models; `score`: one number per sequence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A training objective. Trainer and configuration are classes of TRL 1.16.0, except for `sft`."""

    name: TaskName
    meaning: str
    sequences_per_sample: int = 1
    """Sequences of the forward pass per sample of a batch: a pair has two."""
    second_models: tuple[SecondModelRole, ...] = ()
    """Second models that a step runs. A reference is the trained model before training, unless another is named; all
    others must be named."""
    head: Head = "model"
    generates: bool = False
    """Whether a step generates completions and scores them before the update."""
    beta: float = 0.0
    """Default weight of the divergence from the reference; without any, no reference is needed."""
    num_generations: int = 1
    least_micro_batch: int = 1
    mismatched_passes: int = 0
    """Forward passes per micro-batch over prompts with answers of other rows, without gradients: of the trained model,
    and of a reference that is not precomputed."""
    pads: bool = True
    """Whether sequences of a batch are padded to the longest, instead of packed or cut to one length."""
    trainer: str | None = None
    """Trainer class by its full name; `None`: no installed library has one."""
    config: str | None = None


TASKS: Mapping[TaskName, Task] = {
    task.name: task
    for task in (
        Task(
            name="sft",
            meaning="cross-entropy of the next token",
            pads=False,
            trainer="transformers.Trainer",
            config="transformers.TrainingArguments",
        ),
        Task(
            name="dpo",
            meaning="preferred against rejected answers, by log-probabilities relative to a reference",
            sequences_per_sample=2,
            second_models=("reference",),
            head="fused",
            beta=0.1,
            trainer="trl.DPOTrainer",
            config="trl.DPOConfig",
        ),
        Task(
            name="kto",
            meaning="desirable and undesirable answers without pairs, relative to a reference",
            second_models=("reference",),
            head="fused",
            beta=0.1,
            # The divergence is estimated from answers of other rows (trl 1.16.0, kto_trainer.py:845 and :1364).
            least_micro_batch=2,
            mismatched_passes=1,
            trainer="trl.KTOTrainer",
            config="trl.KTOConfig",
        ),
        Task(
            name="orpo",
            meaning="cross-entropy of preferred answers and their odds against rejected ones, without a reference",
            sequences_per_sample=2,
            head="logits",
            trainer="trl.experimental.orpo.ORPOTrainer",
            config="trl.experimental.orpo.ORPOConfig",
        ),
        Task(
            name="cpo",
            meaning="preferred against rejected answers by their log-probabilities alone (CPO, SimPO)",
            sequences_per_sample=2,
            head="logits",
            trainer="trl.experimental.cpo.CPOTrainer",
            config="trl.experimental.cpo.CPOConfig",
        ),
        Task(
            name="reward",
            meaning="a score per sequence, higher for preferred answers",
            sequences_per_sample=2,
            head="score",
            trainer="trl.RewardTrainer",
            config="trl.RewardConfig",
        ),
        Task(
            name="grpo",
            meaning="policy gradient with advantages relative to the other completions of a prompt",
            second_models=("reference", "reward"),
            head="fused",
            generates=True,
            num_generations=8,
            trainer="trl.GRPOTrainer",
            config="trl.GRPOConfig",
        ),
        Task(
            name="rloo",
            meaning="policy gradient with the mean reward of a prompt's other completions as baseline",
            second_models=("reference", "reward"),
            head="fused",
            generates=True,
            beta=0.05,
            num_generations=2,
            trainer="trl.RLOOTrainer",
            config="trl.RLOOConfig",
        ),
        Task(
            name="ppo",
            meaning="clipped policy gradient with advantages from a trained value model",
            second_models=("reference", "reward", "value"),
            head="logits",
            generates=True,
            beta=0.05,
        ),
        Task(
            name="gkd",
            meaning="divergence from a teacher on completions of the student",
            second_models=("teacher",),
            head="divergence",
            generates=True,
            trainer="trl.experimental.gkd.GKDTrainer",
            config="trl.experimental.gkd.GKDConfig",
        ),
    )
}


def in_sequences(layout: Layout, task: TaskName) -> Layout:
    """Return a layout whose micro-batch counts the sequences of a forward pass instead of samples.

    >>> in_sequences(Layout(engine="ddp", dp_replicate=2, micro_batch_size=3), "dpo").micro_batch_size
    6
    """
    count = TASKS[task].sequences_per_sample
    return layout if count == 1 else layout.changed(micro_batch_size=count * layout.micro_batch_size)
