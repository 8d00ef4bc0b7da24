"""Models whose rows decide which parameters run, and the layouts that train them."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as functional
from engine_settings import fsdp2_settings
from equivalence.cases import LAYOUTS, Case
from equivalence.records import logged, training_record, write_records
from shardwright.ds_configs.specs.layout import Layout
from shardwright.plugins.accelerate import configure_cpu_ranks
from shardwright.plugins.transformers import prepared_model
from shardwright.plugins.transformers.training_arguments import training_arguments
from shardwright.trainers.exact import exact_class
from shardwright.trainers.parallel.planned import parallelism_of
from transformers import LlamaConfig, LlamaForCausalLM, LlavaConfig, LlavaForConditionalGeneration, Trainer, set_seed
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import LlamaModel

STEPS, MICRO_BATCHES, MICRO_BATCH, TOKENS, IMAGE = 3, 4, 2, 24, 90
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 64,
}
KINDS = {
    # The kind of each rank's micro-batches: equal, exchanged, and in a step that uses one kind on each rank.
    "heads": (0, 1, 1, 1, 1, 0, 0, 0, 1, 0, 0, 1),
    "shifts": (0, 1, 1, 0, 1, 0, 0, 1, 0, 1, 0, 1),
    "images": (1, 0, 0, 0, 0, 1, 1, 1, 1, 0, 1, 0),
    "adapters": (0, 1, 2, 1, 1, 2, 0, 2, 0, 1, 1, 0),
}


@dataclass(frozen=True, kw_only=True)
class Unused:
    layout: str
    model: str
    checkpointing: str = ""
    """Empty, or how layers are recomputed: `reentrant` or `non-reentrant`."""
    is_stock: bool = False
    """Whether a script's own Trainer trains, instead of the one of `trainer_for`."""
    is_upstream: bool = False
    """Whether ZeRO reduces gradients in its own order."""

    @property
    def name(self) -> str:
        return "-".join(
            filter(
                None,
                (self.model, self.layout, self.checkpointing, "stock" * self.is_stock, "upstream" * self.is_upstream),
            )
        )

    @property
    def full_layout(self) -> Layout:
        layout = LAYOUTS[self.layout]
        accumulation = MICRO_BATCHES // layout.data_parallel_size
        return replace(layout, micro_batch_size=MICRO_BATCH, gradient_accumulation_steps=accumulation)

    def reference(self) -> Unused:
        return Unused(layout="single", model=self.model)

    def arguments(self, directory: Path) -> dict[str, Any]:
        arguments = Case(layout=self.layout).arguments(directory)
        arguments["per_device_train_batch_size"] = MICRO_BATCH
        arguments["gradient_accumulation_steps"] = self.full_layout.gradient_accumulation_steps
        if self.full_layout.engine == "fsdp2" and self.model == "images":
            arguments |= fsdp2_settings()
            arguments["fsdp_config"]["transformer_layer_cls_to_wrap"].append("CLIPEncoderLayer")
        if self.checkpointing:
            arguments["gradient_checkpointing"] = True
            arguments["gradient_checkpointing_kwargs"] = {"use_reentrant": self.checkpointing == "reentrant"}
        return arguments | {
            "max_steps": STEPS,
            "learning_rate": 1e-2,
            "max_grad_norm": 1.0,
            "remove_unused_columns": False,
            "per_device_eval_batch_size": MICRO_BATCH,
        }


class Heads(LlamaForCausalLM):  # type: ignore[misc]
    """Two heads, layers in front of the second, and a parameter for each task: the task of a row selects them."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.shift = torch.nn.Parameter(torch.zeros(config.hidden_size))
        self.scale = torch.nn.Parameter(torch.ones(config.hidden_size))
        self.later = LlamaModel(config)
        self.other = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: Any = None, labels: Any = None, task: Any = None) -> Any:
        hidden = self.model(input_ids=input_ids).last_hidden_state
        total: Any = 0.0
        for number in (0, 1):
            rows = (task == number).nonzero().flatten()
            if len(rows):
                own = hidden[rows]
                if number:
                    own = self.other(self.later(inputs_embeds=own * self.scale).last_hidden_state)
                else:
                    own = self.lm_head(own + self.shift)
                total = total + loss_of(own, labels[rows]) * len(rows)
        return CausalLMOutputWithPast(loss=total / len(task))


class Shifts(LlamaForCausalLM):  # type: ignore[misc]
    """The task of a row selects one of two parameters, but no module."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.shifts = torch.nn.ParameterList(torch.zeros(config.hidden_size) for _ in range(2))
        self.post_init()

    def forward(self, input_ids: Any = None, labels: Any = None, task: Any = None) -> Any:
        hidden = self.model(input_ids=input_ids).last_hidden_state
        hidden = torch.stack([row + self.shifts[kind] for row, kind in zip(hidden, task.tolist(), strict=True)])
        return CausalLMOutputWithPast(loss=loss_of(self.lm_head(hidden), labels))


class Adapted(torch.nn.Module):
    """Two adapters behind a layer's MLP; a row uses one of them or none."""

    def __init__(self, mlp: Any, width: int) -> None:
        super().__init__()
        self.mlp = mlp
        self.adapters = torch.nn.ModuleList(torch.nn.Linear(width, width, bias=False) for _ in range(2))
        self.task: Any = None

    def forward(self, hidden: Any) -> Any:
        output = self.mlp(hidden)
        for number, adapter in enumerate(self.adapters):
            rows = (self.task == number).nonzero().flatten()
            if len(rows):
                output = output.index_add(0, rows, adapter(hidden[rows]))
        return output


class Adapters(LlamaForCausalLM):  # type: ignore[misc]
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = Adapted(layer.mlp, config.hidden_size)
        self.post_init()

    def forward(self, input_ids: Any = None, labels: Any = None, task: Any = None) -> Any:
        for layer in self.model.layers:
            layer.mlp.task = task
        hidden = self.model(input_ids=input_ids).last_hidden_state
        return CausalLMOutputWithPast(loss=loss_of(self.lm_head(hidden), labels))


def loss_of(logits: Any, labels: Any) -> Any:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())


def make_model(name: str) -> Any:
    set_seed(3)
    text = LlamaConfig(**SIZES)
    if name == "images":
        vision = {"model_type": "clip_vision_model", "num_hidden_layers": 3, "image_size": 16, "patch_size": 8}
        vision |= {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "projection_dim": 32}
        return LlavaForConditionalGeneration(
            LlavaConfig(text_config=text, vision_config=vision, image_token_index=IMAGE)
        )
    return {"heads": Heads, "shifts": Shifts, "adapters": Adapters}[name](text)


def rows_of(name: str) -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(0)
    rows = []
    for kind in KINDS[name]:
        for _ in range(MICRO_BATCH):
            ids = torch.randint(0, IMAGE, (TOKENS,), generator=draw)
            row = {"input_ids": ids, "labels": ids.clone()}
            row["labels"][2:6] = -100
            if name != "images":
                row["task"] = torch.tensor(kind)
            elif kind:
                row["input_ids"][2:6] = IMAGE
                row["pixel_values"] = torch.randn(3, 16, 16, generator=draw)
            rows.append(row)
    return rows


def collated(rows: list[dict[str, Any]]) -> dict[str, Any]:
    keys = dict.fromkeys(key for row in rows for key in row)
    return {key: torch.stack([row[key] for row in rows if key in row]) for key in keys}


class InOrder(Trainer):  # type: ignore[misc]
    def _get_train_sampler(self, *_: Any, **__: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


def make_trainer(case: Unused, directory: Path) -> Any:
    engine = case.full_layout.engine
    # Under the arguments of ZeRO-3, Transformers initializes parts of a model with other random numbers.
    model = make_model(case.model)
    overrides = {"use_cpu": True} if engine == "single" else configure_cpu_ranks(engine)
    arguments = training_arguments(case.arguments(directory), overrides)
    rows = rows_of(case.model)
    settings = {"model": model, "args": arguments, "train_dataset": rows, "data_collator": collated}
    settings["eval_dataset"] = rows[:8]
    if engine == "single" or case.is_stock:
        return exact_class(InOrder)(**settings)
    return parallelism_of(case.full_layout).make_trainer(trainer_class=InOrder, **settings)


def result(trainer: Any) -> dict[str, Any]:
    record = {"loss": logged(trainer), "grad_norm": [float(norm) for norm in logged(trainer, "grad_norm")]}
    return record | {"eval_loss": [trainer.evaluate()["eval_loss"]]}


def record(case: Unused, output: Path) -> dict[str, Any]:
    with ExitStack() as stack:
        if case.is_upstream:
            stack.enter_context(patch.object(prepared_model, "GradientOrder", lambda zero: None))
        return training_record(lambda: make_trainer(case, output / case.name), result)


if __name__ == "__main__":
    write_records(Unused, record)
