"""Activation bytes by kind of layer: what is stored against real runs of fresh shapes, and what has the bound."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
from planning import RELEASE
from shardwright.ds_configs.memory.activations import (
    KINDS_FILE,
    Adapter,
    Mode,
    activations_are_stored,
    activations_of,
    bounded_activations,
    estimate_kinds,
    layer_counts,
)
from shardwright.ds_configs.specs.images import ImageSizes
from shardwright.ds_configs.specs.job import TrainingJob
from shardwright.ds_configs.specs.layout import Layout
from shardwright.ds_configs.specs.model import stored_facts
from shardwright.plugins.transformers.meta_model import model_spec_from_meta
from shardwright.tools.activations.image_sizes import Image
from shardwright.tools.activations.kind_families import KIND_FAMILIES
from shardwright.tools.activations.kind_models import KindShape, config_at, drawn_shapes, run_shape, with_images

STORED = sorted(stored_facts(KINDS_FILE, RELEASE)["families"])


FAMILIES = stored_facts(KINDS_FILE, RELEASE)["families"]
READS_IMAGES = [name for name in STORED if "without_images" in str(FAMILIES[name])]
IMAGES_OF_TWO_SEQUENCES = {"without images": (0, 0), "one each": (1, 1), "uneven": (2, 0), "two each": (2, 2)}


def fresh_shape(architecture: str, adapter: Adapter = "none", images: tuple[int, int] = (1, 1)) -> KindShape:
    shape = replace(drawn_shapes(architecture, 3, adapter=adapter, seed=77)[-1], seq_len_tokens=37)
    if KIND_FAMILIES[architecture].image is None:
        return shape
    drawn = next(image for sequence in shape.images for image in sequence)
    sizes = [drawn, drawn]
    if KIND_FAMILIES[architecture].inputs == "patches":
        # Another size, whose last windows have other numbers of patches, an even number as a sequence has half of them.
        merged = shape.values["vision_config"]["spatial_merge_size"]
        rows = drawn.rows + merged * (1 + merged * drawn.columns % 2)
        sizes[1] = Image(rows=rows, columns=drawn.columns, tokens=rows * drawn.columns // merged**2)
    return with_images(replace(shape, micro_batch_size=2), [sizes[:count] for count in images])


def images_of(shape: KindShape) -> ImageSizes:
    """Sizes of an average sequence."""
    totals = {name: shape.factors[name] // shape.micro_batch_size for name in ("image", "patch", "image_token")}
    return ImageSizes(images=totals["image"], patches=totals["patch"], tokens=totals["image_token"])


def asked(architecture: str, depths: dict[str, int], **settings: Any) -> Any:
    config = config_at(architecture, fresh_shape(architecture).values | settings, depths)
    return model_spec_from_meta(config, name=architecture)


def deep(architecture: str) -> dict[str, int]:
    """Depths that no trace had, another for each kind."""
    family = KIND_FAMILIES[architecture]
    return {kind: family.shallow_layers + 1 + number for number, kind in enumerate(family.kinds)}


def assert_run_matches(
    architecture: str,
    mode: Mode,
    adapter: Adapter,
    *,
    checkpointing: bool,
    images: tuple[int, int] = (1, 1),
    attention: str = "",
) -> None:
    family = KIND_FAMILIES[architecture]
    shape, depths = fresh_shape(architecture, adapter, images), deep(architecture)
    attention = attention or family.attentions[0]
    traced: dict[str, Any] = {"mode": mode, "adapter": adapter, "attention": attention}
    run = run_shape(architecture, shape, depths, checkpointing=checkpointing, **traced).phases()
    spec = model_spec_from_meta(config_at(architecture, shape.values, depths), name=architecture)
    estimated = estimate_kinds(
        spec,
        micro_batch_size=shape.micro_batch_size,
        seq_len_tokens=shape.seq_len_tokens,
        lora_rank=shape.lora_rank,
        images=images_of(shape),
        **traced,
    )
    per_layer = estimated.checkpointed_bytes_per_layer if checkpointing else estimated.saved_bytes_per_layer
    transient = estimated.recompute_backward_transient_bytes if checkpointing else estimated.backward_transient_bytes
    tower = estimated.tower_checkpointed_bytes if checkpointing else estimated.tower_saved_bytes
    base = spec.dimensions.num_layers * per_layer + tower + estimated.outside_layer_bytes
    # Layers of several kinds are spread evenly and rounded up; positions and masks that only checkpointing keeps count.
    slack = spec.dimensions.num_layers + 8 * shape.seq_len_tokens + 8 * shape.micro_batch_size * shape.seq_len_tokens**2
    if family.image and not checkpointing:
        # The Trainer turns the outer `use_cache` off alone: keys and values, in fp32 under autocast, live until the
        # forward pass ends.
        tokens = shape.micro_batch_size * shape.seq_len_tokens
        slack += 8 * tokens * spec.dimensions.key_value_size * sum(depths[kind] for kind in family.text_kinds)
    # Each traced shape has two images: a few numbers of each image and layer count as constants.
    numbers = 16 * sum(images) * sum(depths.values()) if family.image else 0
    for measured, expected in (
        (run.head_start, base),
        (max(run.loss_forward), base + estimated.loss_forward_peak_bytes),
        (max(run.loss_backward), base + estimated.loss_backward_peak_bytes),
    ):
        assert -numbers <= expected - measured <= slack + numbers
    assert base + transient >= max(run.backward) - numbers


@pytest.mark.trace
@pytest.mark.parametrize("architecture", STORED)
def test_measured_bytes_of_new_shapes_and_depths_match_estimate(architecture: str) -> None:
    assert_run_matches(architecture, "bf16", "none", checkpointing=False)


@pytest.mark.trace
@pytest.mark.parametrize(
    ("architecture", "mode", "adapter"),
    [
        ("BertForMaskedLM", "bf16_autocast", "none"),
        ("GptOssForCausalLM", "bf16", "lora_all_linear"),
        ("GptOssForCausalLM", "bf16", "lora_experts"),
        ("DeepseekV3ForCausalLM", "bf16", "lora_experts"),
        ("Ernie4_5_MoeForCausalLM", "bf16", "lora_all_linear"),
        ("Glm4MoeForCausalLM use_qk_norm", "bf16", "lora_all_linear"),
        ("Glm4MoeLiteForCausalLM", "bf16", "lora_all_linear"),
        ("Exaone4ForCausalLM", "bf16", "lora_all_linear"),
        ("GraniteMoeHybridForCausalLM mamba", "bf16", "lora_all_linear"),
        ("GraniteMoeHybridForCausalLM experts", "bf16", "lora_all_linear"),
        ("GraniteMoeHybridForCausalLM experts", "fp32", "none"),
        ("GraniteMoeHybridForCausalLM mamba", "fp32", "none"),
        ("Lfm2MoeForCausalLM", "bf16", "lora_all_linear"),
        ("Olmo3ForCausalLM", "bf16", "lora_all_linear"),
        ("Qwen3NextForCausalLM", "bf16_autocast", "none"),
        ("Qwen3_5ForCausalLM", "bf16", "lora_all_linear"),
    ],
)
def test_measured_bytes_of_checkpointed_runs_match_estimate(architecture: str, mode: Mode, adapter: Adapter) -> None:
    assert_run_matches(architecture, mode, adapter, checkpointing=True)


@pytest.mark.trace
@pytest.mark.parametrize("images", IMAGES_OF_TWO_SEQUENCES.values(), ids=IMAGES_OF_TWO_SEQUENCES)
@pytest.mark.parametrize(
    ("architecture", "adapter"),
    [
        (name, adapter)
        for name in READS_IMAGES
        for adapter in ("none", "frozen_tower", "none_liger", "lora_full_tower")
        if adapter in stored_facts(KINDS_FILE, RELEASE)["families"][name]["tables"]["bf16"]
    ],
)
def test_measured_bytes_with_images_match_estimate(
    architecture: str, adapter: Adapter, images: tuple[int, int]
) -> None:
    assert_run_matches(architecture, "bf16", adapter, checkpointing=False, images=images)


@pytest.mark.trace
@pytest.mark.parametrize("mode", get_args(Mode))
@pytest.mark.parametrize("architecture", READS_IMAGES)
def test_checkpointed_towers_match_estimate_in_every_precision(architecture: str, mode: Mode) -> None:
    tables = stored_facts(KINDS_FILE, RELEASE)["families"][architecture]["tables"].get(mode, {})
    for adapter in tables:
        for attention in tables[adapter]:
            assert_run_matches(architecture, mode, adapter, checkpointing=True, images=(2, 0), attention=attention)


@pytest.mark.parametrize("architecture", STORED)
def test_every_layer_is_of_one_kind_and_stays_below_the_bound(architecture: str) -> None:
    depths = deep(architecture)
    spec, job = asked(architecture, depths), TrainingJob(seq_len_tokens=48)
    family = stored_facts(KINDS_FILE, RELEASE)["families"][architecture]
    assert layer_counts(spec, family["kinds"]) == depths
    stored = activations_of(spec, job, 2, "bf16")
    assert not stored.is_bound
    bound = bounded_activations(spec, job, micro_batch_size=2, mode="bf16")
    assert 0 < stored.checkpointed_bytes_per_layer < stored.saved_bytes_per_layer <= bound.saved_bytes_per_layer


@pytest.mark.trace
@pytest.mark.parametrize("architecture", ["Exaone4ForCausalLM", "Olmo3ForCausalLM"])
def test_sliding_windows_shorter_than_a_sequence_match_estimate(architecture: str) -> None:
    assert_run_matches(architecture, "bf16", "none", checkpointing=False, attention="masked")


def test_full_layers_of_exaone_keep_rotated_queries_only_without_windows() -> None:
    job = TrainingJob(seq_len_tokens=48)
    everywhere = asked("Exaone4ForCausalLM full", {"layer": 4})
    windows = asked("Exaone4ForCausalLM", {"sliding": 2, "full": 2})
    other = asked("Exaone4ForCausalLM", {"sliding": 2, "full": 2}, sliding_window=2048)
    rotated, mixed, bound = (activations_of(spec, job, 2, "bf16") for spec in (everywhere, windows, other))
    assert bound.is_bound
    assert not rotated.is_bound
    assert not mixed.is_bound
    assert mixed.saved_bytes_per_layer < rotated.saved_bytes_per_layer


def test_images_and_frozen_parts_of_a_job_select_the_table() -> None:
    spec = asked("LlavaForConditionalGeneration", {"vision": 8, "text": 4})
    text = TrainingJob(seq_len_tokens=512)
    frozen = replace(text, images_per_sample=2, vision_tower="frozen", projector="frozen")
    trained = replace(frozen, vision_tower="trained", projector="trained")
    adapted = replace(frozen, method="lora")

    def kept(job: TrainingJob) -> int:
        traced = activations_of(spec, job, 1, "bf16")
        assert not traced.is_bound
        layers = traced.saved_bytes_per_layer * spec.dimensions.num_layers
        return layers + traced.outside_layer_bytes + traced.tower_saved_bytes

    assert kept(text) < kept(frozen) < kept(trained)
    assert activations_of(spec, frozen, 1, "bf16").tower_saved_bytes == 0
    assert kept(adapted) < kept(frozen)
    assert kept(replace(adapted, vision_tower="full", projector="full")) > kept(adapted)
    # With Liger's kernels, norms of the language model keep less.
    for job in (text, frozen, trained):
        assert kept(replace(job, use_liger_kernel=True)) < kept(job)


def test_linear_attention_keeps_what_its_kernels_keep() -> None:
    name = "Qwen3NextForCausalLM"
    text = drawn_shapes(name, 1, adapter="none")[0].values
    few, more = (layer_bytes(name, {"linear": count, "full": 1}) for count in (1, 2))
    keys, values = text["linear_num_key_heads"], text["linear_num_value_heads"]
    key, value = text["linear_key_head_dim"], text["linear_value_head_dim"]
    wide = 2 * keys * key + values * value
    # Convolution input and output, repeated and normalised queries and keys, contiguous values, and for each head
    # gates and a row of 64 of the triangular matrix.
    assert more - few > 48 * 2 * (2 * wide + 4 * values * key + values * value + 64 * values)


def layer_bytes(architecture: str, depths: dict[str, int]) -> int:
    config = config_at(architecture, drawn_shapes(architecture, 1, adapter="none")[0].values, depths)
    spec = model_spec_from_meta(config, name=architecture)
    traced = activations_of(spec, TrainingJob(seq_len_tokens=48), 1, "bf16")
    assert not traced.is_bound
    return traced.saved_bytes_per_layer * spec.dimensions.num_layers


def test_labels_of_a_saved_configuration_count() -> None:
    job, depths = TrainingJob(seq_len_tokens=48), {"layer": 3}
    drawn = asked("BertForTokenClassification", depths, num_labels=40)
    labels = {f"{number}": f"label {number}" for number in range(40)}
    values = fresh_shape("BertForTokenClassification").values | {"id2label": labels}
    config = config_at("BertForTokenClassification", values, depths)
    del config["num_labels"]
    saved = model_spec_from_meta(config, name="saved")
    of_few = asked("BertForTokenClassification", depths, num_labels=2)
    few, many, of_saved = (activations_of(spec, job, 2, "bf16") for spec in (of_few, drawn, saved))
    assert of_saved == many
    assert many.loss_backward_peak_bytes > few.loss_backward_peak_bytes


def test_untraced_operators_use_the_upper_bound() -> None:
    spec = asked("BertForMaskedLM", {"layer": 2}, hidden_act="gelu_new")
    assert not activations_are_stored(spec, TrainingJob(seq_len_tokens=48), Layout(engine="ddp"))
    assert activations_of(spec, TrainingJob(seq_len_tokens=48), 1, "bf16").is_bound
