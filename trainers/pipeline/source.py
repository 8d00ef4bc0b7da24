"""Where the stages of a pipeline come from: a live model or a checkpoint, and the cut that the planner would make."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...ds_configs.job import TrainingJob
from ...ds_configs.parallelism.pipeline_stages import pipeline_stages
from ...ds_configs.parallelism.stages import PipelineStage
from ...plugins.meta_model import model_spec_from_meta

LONGEST_SEQUENCE_TOKENS = 4096
"""Sequence that stages are balanced for, where the model takes as long a one."""


def source_of(model: Any, *, revision: str | None = None) -> Any:
    """Return the model itself, or for the directory or Hub id of a checkpoint its model without weights."""
    if not isinstance(model, str | Path):
        return model
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model, revision=revision, trust_remote_code=False)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=False)


def balanced(model: Any, args: Any, ranks: int, dual_pipe: bool) -> tuple[PipelineStage, ...]:
    """Return the stages that the planner gives a model for such a training; with DualPipeV two for each rank.

    Args:
        model: A causal language model; only its configuration and class are read.
        args: `TrainingArguments`.
        ranks: Ranks of one pipeline.
        dual_pipe: Whether each of them holds two stages.
    """
    config = {**json.loads(model.config.to_json_string(use_diff=False)), "architectures": [type(model).__name__]}
    longest = getattr(model.config, "max_position_embeddings", LONGEST_SEQUENCE_TOKENS)
    job = TrainingJob(
        seq_len_tokens=min(longest, LONGEST_SEQUENCE_TOKENS),
        micro_batch_size=args.per_device_train_batch_size,
        precision="bf16" if args.bf16 else "fp32",
        gradient_checkpointing="on" if args.gradient_checkpointing else "off",
    )
    return pipeline_stages(model_spec_from_meta(config, name="model"), job, ranks * (2 if dual_pipe else 1))
