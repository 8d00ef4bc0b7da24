"""One rank's shares of a model under tensor, pipeline and expert parallelism, as smaller models."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from ..specs.job import TrainingJob
from ..specs.model import ModelSpec, ParameterShape
from ..specs.stages import PipelineStage
from ..specs.strategy import Strategy
from .pipeline_stages import pipeline_stages
from .tensor_share import tensor_parallel_share


@dataclass(frozen=True, kw_only=True, slots=True)
class RankShare:
    """The part of a model on one rank, before ZeRO divides it over the data-parallel ranks."""

    model: ModelSpec
    """What the rank holds, as if it were the whole model."""
    stage: PipelineStage | None = None
    """The stage of a pipeline; `None` without one."""
    micro_batches_in_flight: int = 1
    """Micro-batches whose activations live at once."""

    @property
    def has_head(self) -> bool:
        """Whether head and loss are computed here."""
        return self.stage is None or self.stage.has_head


def rank_shares(strategy: Strategy, model: ModelSpec, job: TrainingJob) -> tuple[RankShare, ...]:
    """Return the shares among which the fullest rank is; a single one without a pipeline.

    A stage in the middle that holds no more layers than an earlier one in the middle is left out: with fewer
    micro-batches in flight it cannot be fuller.

    Raises:
        UsageError: there are fewer layers than stages.
    """
    return _rank_shares(model, job, strategy.tp, strategy.ep, strategy.pp, strategy.gradient_accumulation_steps)


@lru_cache(maxsize=1024)
def _rank_shares(
    model: ModelSpec, job: TrainingJob, tp: int, ep: int, pp: int, micro_batches: int
) -> tuple[RankShare, ...]:
    whole = model
    if tp > 1:
        model = tensor_parallel_share(model, tp, divides_head=pp == 1)
    if ep > 1:
        model = expert_parallel_share(model, ep)
    if pp == 1:
        return (RankShare(model=model),)
    shares, most_in_the_middle = [], 0
    for stage in pipeline_stages(whole, job, pp, tensor_parallel_size=tp):
        if not stage.has_embedding and not stage.has_head:
            if stage.num_layers <= most_in_the_middle:
                continue
            most_in_the_middle = stage.num_layers
        shares.append(
            RankShare(
                model=stage_share(model, stage),
                stage=stage,
                micro_batches_in_flight=micro_batches_in_flight(pp, stage.index, micro_batches),
            )
        )
    return tuple(shares)


def micro_batches_in_flight(stages: int, stage: int, micro_batches: int) -> int:
    """Return the micro-batches whose activations a stage of 1F1B keeps at once, `min(m, p - stage)`.

    As `TrainSchedule` orders them (deepspeed/runtime/pipe/schedule.py); Megatron-LM, arXiv 2104.04473, section 2.2.

    >>> [micro_batches_in_flight(4, stage, 3) for stage in range(4)]
    [3, 3, 2, 1]
    """
    return min(micro_batches, stages - stage)


def expert_parallel_share(model: ModelSpec, ep: int) -> ModelSpec:
    """Return what a rank holds when AutoEP gives it `1 / ep` of the experts of each layer.

    AutoEP keeps gate and up projections apart (deepspeed/module_inject/auto_ep_layer.py, `GroupedExperts`); everything
    else is whole, and routing still chooses among all experts.
    """
    parameters: list[ParameterShape] = []
    for parameter in model.parameters:
        if parameter.kind != "experts":
            parameters.append(parameter)
            continue
        shape = (-(-parameter.shape[0] // ep), *parameter.shape[1:])
        if not parameter.name.endswith("gate_up_proj"):
            parameters.append(replace(parameter, shape=shape))
            continue
        half = (shape[0], shape[1] // 2, *shape[2:])
        stem = parameter.name.removesuffix("gate_up_proj")
        parameters += [replace(parameter, name=f"{stem}{name}", shape=half) for name in ("gate_proj", "up_proj")]
    return replace(model, parameters=tuple(parameters))


def stage_share(model: ModelSpec, stage: PipelineStage) -> ModelSpec:
    """Return what a pipeline stage holds: its layers, the embedding on the first, final norm and head on the last.

    A tied embedding is on both (deepspeed/runtime/pipe/module.py, `TiedLayerSpec`).
    """
    tied = model.tied_embeddings and stage.has_head
    parameters = []
    for parameter in model.parameters:
        if parameter.in_layer:
            count = min(parameter.count, stage.end_layer) - min(parameter.count, stage.first_layer)
            if count:
                parameters.append(replace(parameter, count=count))
        elif parameter.group == "embedding":
            is_shared = tied and parameter.shape[0] == model.dimensions.vocab_size
            if stage.has_embedding or is_shared:
                parameters.append(parameter)
        elif stage.has_head:
            parameters.append(parameter)
    return replace(
        model,
        dimensions=replace(model.dimensions, num_layers=stage.num_layers),
        parameters=tuple(parameters),
        tied_embeddings=tied,
    )
