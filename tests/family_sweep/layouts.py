"""Families under engines, axes and trainers on two ranks: equal to one process, or refused."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from equivalence.records import Record, each_record, training_record, write_records
from family_sweep.checks import Finding, arguments_in, compared, samples
from family_sweep.tiny_configs import VOCAB_SIZE, small_config, small_values, tiny_model
from shardwright.ds_configs.specs.layout import Layout

RANKS, SAMPLES_OF_A_STEP, SEQ_LEN = 2, 4, 16
Training = Literal["full", "lora", "distillation", "qat"]

HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3NextForCausalLM": (
        "linear attention, attention, experts beside a shared one",
        {"layer_types": ["linear_attention", "full_attention"]},
    ),
    "MambaForCausalLM": ("state spaces alone", {}),
    "JambaForCausalLM": (
        "Mamba, attention, experts",
        {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    ),
    "BambaForCausalLM": ("Mamba-2 and attention", {"attn_layer_indices": [1]}),
    "Zamba2ForCausalLM": (
        "Mamba-2, and one attention layer that several places share",
        {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
    ),
    "Lfm2ForCausalLM": ("short convolutions and attention", {"layer_types": ["conv", "full_attention"]}),
    "GptOssForCausalLM": ("sliding and full attention with sinks, experts", {"sliding_window": 8}),
    "Gemma3ForCausalLM": (
        "sliding and full attention",
        {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "Gemma3ForConditionalGeneration": ("a frozen vision tower, sliding and full attention", {}),
    "DeepseekV2ForCausalLM": ("latent attention, a dense layer, experts beside a shared one", {}),
    "DeepseekV3ForCausalLM": ("latent attention, a dense layer, experts beside a shared one", {"n_group": 2}),
}
"""Classes, what their layers are, and what the smallest configuration needs to have a layer of each kind."""
_IMAGE_TOKENS = ("boi_token_index", "image_token_index", "eoi_token_index")
_BEGIN_IMAGE, _IMAGE, _END_IMAGE = VOCAB_SIZE - 3, VOCAB_SIZE - 1, VOCAB_SIZE - 2
_IMAGE_LENGTH = 4


@dataclass(frozen=True, kw_only=True)
class SweptLayout:
    layout: Layout
    training: Training = "full"


def _zero(stage: int, **axes: int) -> Layout:
    return Layout(engine="deepspeed", zero_stage=stage, dp_shard=RANKS if set(axes) <= {"ep"} else 1, **axes)


_FSDP2 = Layout(engine="fsdp2", dp_shard=RANKS)
LAYOUTS: dict[str, SweptLayout] = {
    "zero2": SweptLayout(layout=_zero(2)),
    "zero3": SweptLayout(layout=_zero(3)),
    "fsdp2": SweptLayout(layout=_FSDP2),
    "sp": SweptLayout(layout=_zero(1, sp=2)),
    "cp": SweptLayout(layout=Layout(engine="fsdp2", cp=2)),
    "tp": SweptLayout(layout=_zero(1, tp=2)),
    "ep": SweptLayout(layout=_zero(2, ep=2)),
    "pp": SweptLayout(layout=Layout(engine="deepspeed", zero_stage=0, pp=2)),
    "zero2 lora": SweptLayout(layout=_zero(2), training="lora"),
    "zero3 lora": SweptLayout(layout=_zero(3), training="lora"),
    "fsdp2 lora": SweptLayout(layout=_FSDP2, training="lora"),
    "zero2 distillation": SweptLayout(layout=_zero(2), training="distillation"),
    "zero3 qat": SweptLayout(layout=_zero(3), training="qat"),
}


def hybrid_config(class_name: str) -> Any:
    """Return the smallest configuration of a class of `HYBRIDS` that has layers of all its kinds."""
    import transformers

    config_class = getattr(transformers, class_name).config_class
    if "vision_config" not in config_class.sub_configs:
        return config_class(**{**small_values(config_class), **HYBRIDS[class_name][1]})
    whole = config_class()
    # A part may be declared as `AutoConfig`, which has no sizes.
    parts = {name: small_config(type(getattr(whole, name))).to_dict() for name in config_class.sub_configs}
    parts["text_config"] |= HYBRIDS["Gemma3ForCausalLM"][1]
    parts["vision_config"] |= {"image_size": 16, "patch_size": 8, "num_channels": 3, "vision_use_head": False}
    tokens = dict(zip(_IMAGE_TOKENS, (_BEGIN_IMAGE, _IMAGE, _END_IMAGE), strict=True))
    return config_class(**parts, **tokens, mm_tokens_per_image=_IMAGE_LENGTH)


@cache
def verdict(class_name: str, layout: str) -> tuple[str, ...]:
    """Return what the planner has against a layout of a class; nothing where it is offered."""
    from shardwright.ds_configs.legality.rules import legality_errors
    from shardwright.ds_configs.models.stored_shapes import model_spec_from_config
    from shardwright.ds_configs.specs.hardware import parse_hardware
    from shardwright.ds_configs.specs.job import TrainingJob
    from shardwright.plugins.releases import transformers_release
    from shardwright.plugins.transformers.meta_model import model_spec_from_meta

    config = json.loads(hybrid_config(class_name).to_json_string()) | {"architectures": [class_name]}
    spec = model_spec_from_config(config, name=class_name, release=transformers_release())
    spec = spec or model_spec_from_meta(config, name=class_name)
    asked = LAYOUTS[layout]
    job = TrainingJob(
        seq_len_tokens=SEQ_LEN,
        precision="fp32",
        optimizer="sgd",
        method="lora" if asked.training == "lora" else "full",
        lora_targets=("all-linear",),
    )
    hardware = parse_hardware(f"{RANKS}xCPU")
    return tuple(str(error) for error in legality_errors(spec, asked.layout, job, hardware))


def make_trainer(class_name: str, swept: SweptLayout, directory: str, *, alone: bool) -> Any:
    import transformers
    from equivalence.cases import deepspeed_config
    from shardwright.plugins.accelerate import configure_cpu_ranks
    from shardwright.plugins.peft import add_lora
    from shardwright.trainers.parallel.planned import parallelism_of

    layout = Layout(engine="single") if alone else swept.layout
    model_class = getattr(transformers, class_name)
    changes: dict[str, Any] = {
        "per_device_train_batch_size": SAMPLES_OF_A_STEP // layout.data_parallel_size,
        # A weight that one layout rounds up and another down, for a difference of 1e-7, changes the next loss by 1e-3.
        "learning_rate": 0.01 if swept.training == "qat" else 0.05,
    }
    if layout.engine != "single":
        changes |= configure_cpu_ranks(layout.engine)
    if layout.engine == "deepspeed":
        changes["deepspeed"] = deepspeed_config(layout)
    if layout.engine == "fsdp2":
        wrapped = sorted(model_class._no_split_modules or [])
        changes |= {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": wrapped}}
    arguments = arguments_in(directory, **changes)
    transformers.set_seed(0)
    model = model_class(hybrid_config(class_name)).float() if class_name in HYBRIDS else tiny_model(class_name)
    tower = getattr(model.base_model, "vision_tower", None)
    if tower is not None:
        tower.requires_grad_(requires_grad=False)
    settings: dict[str, Any] = {}
    if swept.training == "lora":
        transformers.set_seed(7)
        model = add_lora(model, rank=4, targets=None, fp32_adapters=True)
    if swept.training == "qat":
        from shardwright.ds_configs.quantization.scheme import changed, scheme_named
        from shardwright.trainers.qat.callback import QATCallback

        callback = QATCallback(changed(scheme_named("W4A16"), group_size=16))
        callback.prepare(arguments, model)
        settings["callbacks"] = [callback]
    if swept.training == "distillation":
        from shardwright.trainers.distillation import DistillationConfig, DistillationTrainer

        transformers.set_seed(9)
        settings |= {
            "trainer_class": DistillationTrainer,
            "teacher": model_class(hybrid_config(class_name)).float(),
            "distillation": DistillationConfig(alpha=0.5, temperature=2.0),
        }
    rows = samples() if tower is None else _with_images(samples())
    return parallelism_of(layout).make_trainer(model=model, args=arguments, train_dataset=rows, **settings)


def _with_images(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put an image of four tokens at the start of each sample."""
    import torch

    draw = torch.Generator().manual_seed(4)
    found = []
    for row in rows:
        image = [_BEGIN_IMAGE, *[_IMAGE] * _IMAGE_LENGTH, _END_IMAGE]
        text = row["input_ids"][len(image) :]
        ids, labels = [*image, *text], [-100] * len(image) + text
        kinds = [int(token == _IMAGE) for token in ids]
        pixels = torch.randn(3, 16, 16, generator=draw)
        found.append(row | {"input_ids": ids, "labels": labels, "token_type_ids": kinds, "pixel_values": pixels})
    return found


@dataclass(frozen=True, kw_only=True)
class Cell:
    class_name: str
    layout: str

    @property
    def name(self) -> str:
        return f"{self.class_name}.{self.layout}"

    @property
    def full_layout(self) -> Layout:
        return LAYOUTS[self.layout].layout


def record(cell: Cell, output: Path, *, alone: bool = False) -> Record:
    directory = str(output / ("alone" if alone else f"{cell.class_name}-{cell.layout}"))
    return training_record(lambda: make_trainer(cell.class_name, LAYOUTS[cell.layout], directory, alone=alone))


def findings(asked: Sequence[tuple[str, str]], directory: Path) -> Iterator[tuple[str, str, Finding]]:
    references: dict[tuple[str, str], Record] = {}
    cells = [Cell(class_name=class_name, layout=layout) for class_name, layout in asked]
    for cell, own in each_record(cells, directory, Path(__file__)):
        key = (cell.class_name, LAYOUTS[cell.layout].training)
        if "losses" in own and key not in references:
            references[key] = record(cell, directory, alone=True)
        yield cell.class_name, cell.layout, compared(own, references.get(key, {}))


if __name__ == "__main__":
    write_records(Cell, record)
