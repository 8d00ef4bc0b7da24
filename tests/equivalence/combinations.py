"""Settings of a training run that layouts meet: how each is switched on, on a dense model or on a mixture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from engine_settings import fsdp2_settings
from equivalence.cases import (
    ADAM_EPSILON,
    FURTHER,
    LAYOUTS,
    LOSS_TOLERANCE,
    MICRO_STEP_SAMPLES,
    OFFLOADED,
    Case,
    padded,
    samples,
)
from shardwright.ds_configs.legality.combinations import columns_of, incompatibility_errors
from shardwright.ds_configs.specs.layout import Layout

STEPS = 3
LEARNING_RATES: Mapping[str, float] = {"sgd": 0.2, "adagrad": 1e-2, "adafactor": 1e-2}
ALL_LAYOUTS: dict[str, Layout] = (
    LAYOUTS
    | FURTHER
    | OFFLOADED
    | {"fsdp2-offload": Layout(engine="fsdp2", dp_shard=2, offload_optimizer="cpu", offload_param="cpu")}
)


@dataclass
class Run:
    """What a setting may change before the trainer is made."""

    arguments: dict[str, Any]
    """Keys of `TrainingArguments`."""
    sizes: dict[str, Any] = field(default_factory=dict)
    """Keys of the model's configuration."""
    callbacks: list[Callable[[], Any]] = field(default_factory=list)
    """What makes callbacks."""
    change_model: list[Callable[[Any], Any]] = field(default_factory=list)
    """Applied to the loaded model, in order."""
    distillation: dict[str, Any] | None = None
    """Fields of `DistillationConfig`; `None` without a teacher."""
    data: list[dict[str, Any]] | None = None
    """Samples in place of the usual ones."""
    streams: bool = False
    """Whether the data set is iterable."""
    family: str = "llama"
    """What is trained."""


def _quantized(scheme: str, **options: Any) -> Callable[[Run], None]:
    def change(run: Run) -> None:
        def make() -> Any:
            from shardwright.ds_configs.quantization.scheme import changed, scheme_named
            from shardwright.trainers.qat.callback import QATCallback

            means = run.family == "mixtral" and scheme == "W4A16" and not options
            found = scheme_named("W2A16" if means else scheme)
            # Symmetric ranges put the extreme of every group on the edge of two codes, where the last bit decides.
            # Means of groups do not, and mixtures cannot have zero points.
            if found.weights.group_size:
                found = changed(found, group_size=16, symmetric=means)
            return QATCallback(found, **(options | ({"weight_rule": "ternary"} if means else {})))

        run.callbacks.append(make)

    return change


def _pruned(**options: Any) -> Callable[[Run], None]:
    def change(run: Run) -> None:
        def make() -> Any:
            from shardwright.trainers.sparsity.magnitude_pruning_callback import MagnitudePruningCallback

            return MagnitudePruningCallback(0.5, end_step=1, start_step=0, every=1, **options)

        run.callbacks.append(make)

    return change


def _l1() -> Any:
    from shardwright.trainers.sparsity.l1_sparsity_callback import L1SparsityCallback

    return L1SparsityCallback(0.05)


def _lora(model: Any) -> Any:
    from shardwright.plugins.peft import add_lora
    from transformers import set_seed

    set_seed(4)
    return add_lora(model, rank=4, targets=None, fp32_adapters=True)


def _frozen(model: Any) -> Any:
    model.get_input_embeddings().requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    return model


def _distilled(term: str = "", **options: Any) -> Callable[[Run], None]:
    """Distill with the options of a term of `DistillationConfig`, or without a term with its own."""

    def change(run: Run) -> None:
        from shardwright.trainers import distillation

        own = {term: distillation.HiddenStateTerm(**options)} if term else options
        run.distillation = {"alpha": 0.5, **own}

    return change


def _set(**fields: Any) -> Callable[[Run], None]:
    """Replace fields of a run; add to those that are collections."""

    def change(run: Run) -> None:
        for name, value in fields.items():
            known = getattr(run, name)
            if isinstance(known, dict):
                value = known | value
            setattr(run, name, [*known, value] if name in ("callbacks", "change_model") else value)

    return change


def _arguments(**changes: Any) -> Callable[[Run], None]:
    return lambda run: run.arguments.update(changes)


def _optimizer(name: str) -> Callable[[Run], None]:
    return _arguments(optim=name, learning_rate=LEARNING_RATES.get(name, 1e-3))


def _muon(run: Run) -> None:
    # DeepSpeed clips the orthogonalized updates, so that plans do not clip.
    # The decay would show if norms had it, too.
    run.arguments |= {"optim": "muon", "learning_rate": 1e-3, "max_grad_norm": 0.0, "weight_decay": 10.0}
    if "deepspeed" in run.arguments:
        from shardwright.ds_configs.plan.rendering import muon_parameters
        from shardwright.ds_configs.specs.job import TrainingJob

        run.arguments["deepspeed"] |= {"optimizer": {"type": "Muon", "params": muon_parameters(TrainingJob())}}
        if run.arguments["deepspeed"]["zero_optimization"]["stage"] == 3:
            run.arguments["deepspeed"]["zero_optimization"]["reduce_scatter"] = False


def _packed(run: Run) -> None:
    rows = samples()
    joined = []
    for first in range(0, len(rows) - 1, 2):
        ids = [row["input_ids"].tolist() for row in rows[first : first + 2]]
        labels = [[-100, *one[1:]] for one in ids]
        joined.append(
            {
                "input_ids": [*ids[0], *ids[1]],
                "labels": [*labels[0], *labels[1]],
                "position_ids": [*range(len(ids[0])), *range(len(ids[1]))],
            }
        )
    run.data = joined


def _uneven(run: Run) -> None:
    # Two full micro-steps, and a third of one sample.
    run.data = samples()[: 2 * MICRO_STEP_SAMPLES + 1]


SETTINGS: dict[str, Callable[[Run], None]] = {
    "qat": _quantized("W4A16"),
    "qat_inputs": _quantized("W8A8"),
    "qat_ranges": _quantized("W8A8_STATIC", ranges="moving_average", freeze_step=2),
    "learned_scales": _quantized("W4A16", weight_rule="learned"),
    "pruning": _pruned(),
    "global_pruning": _pruned(scope="global"),
    "l1": _set(callbacks=_l1),
    "lora": _set(change_model=_lora),
    "frozen": _set(change_model=_frozen),
    "distillation": _distilled(temperature=2.0),
    "distilled_features": _distilled("hidden_states", weight=0.5),
    "balance_loss": _set(family="mixtral", sizes={"output_router_logits": True, "router_aux_loss_coef": 0.5}),
    "gradient_checkpointing": _arguments(gradient_checkpointing=True),
    "label_smoothing": _arguments(label_smoothing_factor=0.1),
    "packing": _packed,
    "streams": _set(streams=True),
    "compile": _arguments(torch_compile=True, torch_compile_backend="eager"),
    "bf16": _arguments(bf16=True),
    "dropout": _set(sizes={"attention_dropout": 0.1}),
    "split_batches": _arguments(
        accelerator_config={"split_batches": True}, per_device_train_batch_size=MICRO_STEP_SAMPLES
    ),
    "last_batch": _uneven,
    "adamw_torch": _optimizer("adamw_torch"),
    "adamw_torch_fused": _optimizer("adamw_torch_fused"),
    "sgd": _optimizer("sgd"),
    "adagrad": _optimizer("adagrad"),
    "rmsprop": _optimizer("rmsprop"),
    "adafactor": _optimizer("adafactor"),
    "muon": _muon,
}
"""What a run may have besides its layout, by the names of the table of combinations."""
OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop", "adafactor", "muon")
SWITCHES = (
    *("balance_loss", "gradient_checkpointing", "label_smoothing", "packing", "streams", "split_batches", "compile"),
    *("bf16", "dropout", "last_batch"),
)
METHODS = tuple(name for name in SETTINGS if name not in (*OPTIMIZERS, *SWITCHES))
"""A run has at most one of each group."""
TOLERANCES: Mapping[str, float] = {"bf16": 3e-2, "dropout": 0.3, "muon": 1e-3}
"""In nats for each token: 16-bit numbers are rounded in another order, also in Muon, and dropout draws other masks."""
FIRST_STEP_ON_ZEROS = 0.2
"""Likewise, for AdamW in 16 bit without ZeRO (deepspeed 0.19.8)."""


@dataclass(frozen=True, kw_only=True)
class Combination:
    layout: str
    settings: tuple[str, ...]
    accumulation: int = 1

    @property
    def name(self) -> str:
        return "-".join((self.layout, *self.settings, f"x{self.accumulation}"))

    @property
    def strategy(self) -> Layout:
        strategy = ALL_LAYOUTS[self.layout]
        return replace(
            strategy,
            micro_batch_size=MICRO_STEP_SAMPLES // strategy.data_parallel_size,
            gradient_accumulation_steps=self.accumulation,
        )

    @property
    def family(self) -> str:
        if self.layout.startswith("single-"):
            return self.layout.removeprefix("single-")
        return "mixtral" if self.strategy.ep > 1 or "balance_loss" in self.settings else "llama"

    @property
    def columns(self) -> tuple[str, ...]:
        return columns_of(self.strategy)

    @property
    def is_proven(self) -> bool:
        used = self.settings if set(self.settings) & set(OPTIMIZERS) else (*self.settings, "adamw_torch")
        return not incompatibility_errors(used, self.columns)

    @property
    def tolerance(self) -> float:
        """Largest difference of a loss from the one of one process."""
        if "bf16" in self.settings and "zero0" in self.columns:
            return FIRST_STEP_ON_ZEROS
        return max((TOLERANCES.get(name, LOSS_TOLERANCE) for name in self.settings), default=LOSS_TOLERANCE)

    def reference(self) -> Combination:
        return replace(self, layout=f"single-{self.family}")


ALL_LAYOUTS |= {f"single-{family}": Layout(engine="single") for family in ("llama", "mixtral")}


def prepared_run(combination: Combination, directory: Path) -> Run:
    strategy = combination.strategy
    case = Case(layout=combination.layout, strategy=strategy, optimizer="adamw_torch")
    arguments = case.training_arguments(directory) | {"max_steps": STEPS, "adam_epsilon": ADAM_EPSILON}
    if strategy.engine == "fsdp2":
        family = "Mixtral" if combination.family == "mixtral" else "Llama"
        offload = {"offload_params": True} if strategy.offload_param == "cpu" else {}
        arguments |= fsdp2_settings(f"{family}DecoderLayer", **offload)
    run = Run(arguments=arguments, family=combination.family)
    for name in combination.settings:
        SETTINGS[name](run)
    if strategy.engine == "deepspeed":
        arguments["deepspeed"]["bf16"] = {"enabled": "auto"}
    return run


def collated(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Collate as `padded` does; packed samples keep their positions."""
    import torch

    if "position_ids" not in rows[0]:
        return padded(rows)
    tensors = [{name: torch.as_tensor(value) for name, value in row.items()} for row in rows]
    batch = padded([{"input_ids": row["input_ids"], "labels": row["labels"]} for row in tensors])
    positions = torch.zeros_like(batch["input_ids"])
    for index, row in enumerate(tensors):
        length = len(row["position_ids"])
        positions[index, :length] = row["position_ids"]
        positions[index, length:] = torch.arange(positions.shape[1] - length)
    del batch["attention_mask"]
    return batch | {"position_ids": positions}
