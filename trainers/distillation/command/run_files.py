"""Settings of a distillation, and the file through which its ranks learn them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from ....ds_configs.specs.errors import Fault
from ....ds_configs.specs.settings import adapter_faults
from ...runs.settings import LaunchedJob, LaunchedSettings, ObjectiveSettings, launched_faults

if TYPE_CHECKING:
    from ..config import DistillationConfig

TEACHER_TOKENIZER = "teacher_tokenizer"


class DistillSettings(ObjectiveSettings, LaunchedSettings):
    """Every setting of `shardwright distill`."""

    group = "Distillation"

    method: Literal["full", "lora"] = Field("full", description="Full training or LoRA")
    hidden_states: float = Field(0.0, ge=0, description="Weight of matched hidden states; 0: none")
    attention: float = Field(0.0, ge=0, description="Weight of matched attention relations; 0: none")
    on_policy: float = Field(0.0, description="Share of micro-batches that the student completes itself")
    max_new_tokens: int = Field(128, ge=1, description="Longest completion of the student")
    prompt_tokens: int | None = Field(
        None,
        ge=1,
        description="Tokens of a sample that the student completes. Default: those before its first label, of plain "
        "text half",
    )
    cross_tokenizer: bool = Field(False, description="Compare models of different tokenizers")
    teacher_cache: str | None = Field(
        None, description="Directory that cache-teacher wrote; no teacher runs while the student trains"
    )


class WorkerJob(LaunchedJob):
    """Job of every rank, as it stands in `job.json`."""

    settings: DistillSettings = Field(description="what the user asked for")
    teacher: str = Field(description="Hub id or directory")
    student: str = Field(description="Hub id, directory or config.json")
    vocab_size: int | None = Field(description="tokens that both tokenizers have; None across tokenizers")


def distillation_config(settings: DistillSettings, vocab_size: int | None) -> DistillationConfig:
    """Return the terms that the settings ask for.

    Raises:
        UsageError: all values out of range.
    """
    from ..config import DistillationConfig, OnPolicy
    from ..feature_matching import AttentionTerm, HiddenStateTerm

    own = settings
    on_policy = OnPolicy(fraction=own.on_policy, max_new_tokens=own.max_new_tokens, prompt_tokens=own.prompt_tokens)
    return DistillationConfig(
        alpha=own.alpha,
        temperature=own.temperature,
        divergence=own.loss,
        mixture=own.mixture,
        vocab_size=vocab_size,
        hidden_states=HiddenStateTerm(weight=own.hidden_states) if own.hidden_states else None,
        attention=AttentionTerm(weight=own.attention) if own.attention else None,
        on_policy=on_policy if own.on_policy else None,
        cross_tokenizer="aligned" if own.cross_tokenizer else None,
    )


def distill_settings_faults(settings: DistillSettings) -> list[Fault]:
    """Return what does not go together before anything is read."""
    faults = []
    cached = settings.teacher_placement == "cached"
    if settings.cross_tokenizer:
        rule = "positions differ between tokenizers"
        faults += [
            Fault(where=name, value=getattr(settings, name), rule=rule, fix="drop it or --cross-tokenizer")
            for name in ("hidden_states", "attention", "on_policy")
            if getattr(settings, name)
        ]
    faults += launched_faults(settings) + adapter_faults(settings.stated(), settings.method)
    if cached and settings.teacher_cache is None:
        fix = "give --teacher-cache, a directory that cache-teacher wrote"
        faults.append(Fault(where="teacher_placement", value="cached", rule="needs a cache", fix=fix))
    if settings.teacher_cache is not None:
        if settings.teacher_placement not in ("auto", "cached"):
            value, rule = settings.teacher_placement, "contradicts the teacher's cache"
            faults.append(Fault(where="teacher_placement", value=value, rule=rule, fix="drop one of both"))
        if not Path(settings.teacher_cache).is_dir():
            rule = "no such directory"
            faults.append(Fault(where="teacher_cache", value=settings.teacher_cache, rule=rule))
    if settings.method == "lora" and settings.hidden_states:
        rule = "trains projectors, which an adapter directory cannot hold"
        faults.append(Fault(where="hidden_states", value=settings.hidden_states, rule=rule, fix="use --method full"))
    if cached or settings.teacher_cache is not None:
        faults += [
            Fault(where=name, value=getattr(settings, name), rule="needs a live teacher", fix="drop --teacher-cache")
            for name in ("hidden_states", "attention", "on_policy", "cross_tokenizer")
            if getattr(settings, name)
        ]
    return faults
