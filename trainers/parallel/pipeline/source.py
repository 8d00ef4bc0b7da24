"""Source of a pipeline's stages: a live model or a checkpoint, and the cut that the planner would make."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ....ds_configs.memory.pipeline_stages import pipeline_stages
from ....ds_configs.specs.errors import Fault, UsageError
from ....ds_configs.specs.job import TrainingJob
from ....ds_configs.specs.stages import PipelineStage
from ....plugins.transformers.meta_model import model_spec_from_meta

LONGEST_SEQUENCE_TOKENS = 4096
"""Sequence that stages are balanced for, where the model takes as long a one."""


def source_of(model: Any, *, revision: str | None = None) -> Any:
    """Return the model itself, or for the directory or Hub id of a checkpoint its model without weights.

    Raises:
        UsageError: nothing is there, or it has no causal language model.
    """
    if not isinstance(model, str | Path):
        return model
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(model, revision=revision, trust_remote_code=False)
    except (OSError, ValueError) as error:
        rule = f"has no readable config ({str(error).partition(chr(10))[0]})"
        fix = "name the directory or Hub id of a checkpoint"
        raise UsageError(Fault(where="model", value=str(model), rule=rule, fix=fix)) from None
    if type(config) not in AutoModelForCausalLM._model_mapping:
        rule = "has no causal language model in transformers"
        raise UsageError(Fault(where="model_type", value=config.model_type, rule=rule))
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=False)


def balanced(
    model: Any, args: Any, ranks: int, *, dual_pipe: bool = False, tensor_parallel_size: int = 1
) -> tuple[PipelineStage, ...]:
    """Return the stages that the planner gives a model for such a training; with DualPipeV two for each rank.

    Args:
        model: A causal language model; only its configuration and class are read.
        args: `TrainingArguments`.
        ranks: Ranks of one pipeline.
        dual_pipe: Whether each of them holds two stages.
        tensor_parallel_size: Ranks that hold each stage together.
    """
    config = {**json.loads(model.config.to_json_string(use_diff=False)), "architectures": [type(model).__name__]}
    longest = getattr(model.config, "max_position_embeddings", LONGEST_SEQUENCE_TOKENS)
    job = TrainingJob(
        seq_len_tokens=min(longest, LONGEST_SEQUENCE_TOKENS),
        micro_batch_size=args.per_device_train_batch_size,
        precision="bf16" if args.bf16 else "fp32",
        gradient_checkpointing="on" if args.gradient_checkpointing else "off",
    )
    whole, stages = model_spec_from_meta(config, name="model"), ranks * (2 if dual_pipe else 1)
    return pipeline_stages(whole, job, stages, tensor_parallel_size=tensor_parallel_size)
