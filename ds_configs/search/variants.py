"""A layout with every micro-batch, recomputation, buffer size and loss that it may run with, each with its time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

from ..legality.candidate import Candidate
from ..legality.rules import BATCH_RULES, LAYOUT_RULES, SIZE_RULES, broken_rules, legality_faults
from ..memory.activation_source import ActivationSource
from ..memory.calibration import Calibration
from ..memory.estimate import MemoryEstimate, estimate_memory
from ..specs.errors import Fault
from ..specs.hardware import HardwareSpec
from ..specs.job import CHUNKED_LOSS_FAMILIES, LossImplementation, TrainingJob
from ..specs.model import ModelSpec
from ..specs.strategy import Strategy
from ..step_time.estimate import StepTime, estimate_step_time
from .levels import lean_variant
from .simplicity import complexity

STEP_TOKENS = 16_384
"""Tokens that each accelerator processes at most in a step whose global batch is open: a micro-batch of that size keeps
every product large (Megatron-LM, arXiv 2104.04473), and what trains well is the user's to say."""

LARGEST_MICRO_BATCH_TOKENS = 65_536
"""Tokens of one micro-batch beyond which nothing grows faster."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """Question that a plan answers."""

    model: ModelSpec
    hardware: HardwareSpec
    job: TrainingJob
    activations: ActivationSource | None = None
    """Traced activation bytes, for models without stored coefficients."""
    calibration: Calibration | None = None
    """Measured runs to learn from."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Variant:
    """A layout with its micro-batch, and the job with the loss and the placement of its teacher."""

    strategy: Strategy
    question: Question
    level: int
    """Position of the layout among all."""
    lean: bool = False
    """Whether its buffers are smaller than DeepSpeed's defaults."""

    @property
    def job(self) -> TrainingJob:
        """The job with everything resolved."""
        return self.question.job

    @cached_property
    def time(self) -> StepTime:
        """Predicted time of its step, estimated when it is asked for."""
        asked = self.question
        return estimate_step_time(self.strategy, asked.model, asked.hardware, asked.job)

    @cached_property
    def memory(self) -> MemoryEstimate:
        """Predicted memory, estimated when it is asked for."""
        asked = self.question
        return estimate_memory(
            self.strategy,
            asked.model,
            asked.hardware,
            asked.job,
            activations=asked.activations,
            calibration=asked.calibration,
        )

    @property
    def tokens_per_second(self) -> float:
        """Nine digits, so that equal times summed in another order stay equal."""
        return float(f"{self.time.tokens_per_second:.9g}")

    @cached_property
    def complexity(self) -> tuple[int, int, bool, bool]:
        """Number of mechanisms that the layout uses; buffers below DeepSpeed's defaults come last."""
        return *complexity(self.strategy, chunked_loss=self.job.loss == "chunked"), self.lean

    def with_recomputed(self, layers: int | None) -> Variant:
        """Return the same layout that recomputes its first `layers` (of each stage); `None` for all."""
        strategy = replace(self.strategy, gradient_checkpointing=True, checkpointed_layers=layers)
        return replace(self, strategy=strategy)


def losses(question: Question) -> list[Question]:
    """Return the question with each loss to try; a chunked one needs Triton and a family that Liger knows."""
    job = question.job
    if job.loss != "auto":
        return [question]
    chunked = job.teacher is None and question.hardware.gpu != "CPU"
    tried: list[LossImplementation] = ["eager"]
    if chunked and question.model.model_type in CHUNKED_LOSS_FAMILIES:
        tried.append("chunked")
    return [replace(question, job=replace(job, loss=loss)) for loss in tried]


def variants(
    level: Strategy, questions: list[Question], index: int, faults: list[Fault] | None, *, sizes_only: bool = False
) -> Iterator[Variant]:
    """Yield every legal variant of a layout, without partial recomputation.

    Args:
        level: The layout.
        questions: What is asked, with each loss to try.
        index: Position of the layout among all.
        faults: Takes what makes variants of the first question illegal; `None` where nobody asks.
        sizes_only: Whether sizes alone must be right, for layouts that nothing runs.
    """
    job = questions[0].job
    switches = {"auto": (False, True), "off": (False,)}.get(job.gradient_checkpointing, (True,))
    level = replace(level, keeps_products=job.gradient_checkpointing == "selective")
    lean = lean_variant(level, questions[0].model, job)
    layouts = (level,) if lean is None else (level, lean)
    layout_rules, batch_rules = ((), SIZE_RULES) if sizes_only else (LAYOUT_RULES, BATCH_RULES)
    for question in questions:
        # Most rules do not read the batch, of which there are many.
        legal = {
            switch: not any(broken_rules(layout_rules, _candidate(level, question, gradient_checkpointing=switch)))
            for switch in switches
        }
        wanted = faults is not None and question is questions[0]
        if not wanted and not any(legal.values()):
            continue
        for (micro_batch, accumulation), layout, switch in product(micro_batches(level, job), layouts, switches):
            if not wanted and not legal[switch]:
                continue
            candidate = _candidate(
                layout,
                question,
                micro_batch_size=micro_batch,
                gradient_accumulation_steps=accumulation,
                gradient_checkpointing=switch,
            )
            if legal[switch] and not any(broken_rules(batch_rules, candidate)):
                yield Variant(strategy=candidate.strategy, question=question, level=index, lean=layout == lean)
            elif wanted and faults is not None:
                faults += legality_faults(candidate)


def _candidate(layout: Strategy, question: Question, **changes: Any) -> Candidate:
    strategy = replace(layout, **changes)
    return Candidate(strategy=strategy, model=question.model, hardware=question.hardware, job=question.job)


def micro_batches(level: Strategy, job: TrainingJob) -> list[tuple[int, int]]:
    """Return the micro-batch sizes to try with their accumulation steps, smallest first.

    With a global batch the product meets it. Without, a step holds `STEP_TOKENS` for each accelerator at most: one
    micro-batch, or in a pipeline as many as that holds, at least one for each stage.
    """
    ranks = level.data_parallel_size
    replica_ranks = level.world_size // ranks
    if job.global_batch_size is None:
        most = max(1, STEP_TOKENS * level.sp * level.cp // job.seq_len_tokens)
        sizes = [1 << power for power in range(most.bit_length())]
        if job.micro_batch_size is not None:
            sizes = [job.micro_batch_size]
        if level.pp == 1:
            return [(size, 1) for size in sizes]
        tokens = STEP_TOKENS * replica_ranks
        return [(size, max(level.pp, tokens // (size * job.seq_len_tokens))) for size in sizes]
    per_rank = max(1, job.global_batch_size // ranks)
    if job.micro_batch_size is not None:
        return [(job.micro_batch_size, max(1, per_rank // job.micro_batch_size))]
    most = max(1, min(per_rank, LARGEST_MICRO_BATCH_TOKENS * level.sp * level.cp // job.seq_len_tokens))
    return [(size, per_rank // size) for size in range(1, most + 1) if per_rank % size == 0]
