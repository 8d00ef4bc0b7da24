"""Stored tensor shapes of model classes: `python tools/parameter_shapes.py CLASS ... [--write]`.

Builds each class on the meta device under random sizes and switches of its configuration, solves for an expression of
configuration values for each dimension, count and derived field, and compares what they evaluate to with models under
other random configurations. What is written is `ds_configs/data/parameter_shapes.json`. A class that does not fit is
refused, and is built on the meta device at each plan. `--change '>=5.19'` writes what differs in the installed
Transformers as a change for those releases.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from shardwright.ds_configs.models.stored_shapes import NO_SHAPE, SHAPES_FILE, evaluated, spec_of, value_kind
from shardwright.ds_configs.specs.errors import RefusedInputError
from shardwright.ds_configs.specs.model import ModelSpec
from shardwright.tools.class_on_meta import ClassOnMeta, Draws, Sample, ShapesError, is_stored_setting
from shardwright.tools.release_changes import CHANGE_HELP, facts_in, with_facts
from shardwright.tools.shape_expressions import monomials, solved

DATA = Path(__file__).resolve().parents[1] / "ds_configs" / "data" / SHAPES_FILE
SAMPLES, SWITCHED_SAMPLES, CHECKS = 32, 10, 16
HIDDEN_UNIT = 48
"""Multiples of it are divided by every number of heads that is drawn."""
OTHER_KINDS: Mapping[str, dict[str, list[Any]]] = {"t5": {"feed_forward_proj": ["gated-gelu"]}}
"""Names that choose modules, as published models have them."""
APART: Mapping[str, tuple[str, ...]] = {
    "falcon": ("multi_query", "new_decoder_architecture", "bias"),
    "smollm3": ("sliding_window", "use_sliding_window"),
}
"""Switches of which one alone is ever turned."""
PART_TYPES: Mapping[str, Mapping[str, str]] = {"llava": {"text_config": "llama", "vision_config": "clip_vision_model"}}
"""Model types of the parts of classes that combine others."""
FIXED: Mapping[str, tuple[str, ...]] = {
    "gemma3": ("text_config.use_bidirectional_attention",),
    "gemma3_text": ("use_bidirectional_attention",),
    "deberta-v2": ("relative_attention", "share_att_key"),
    "ernie4_5_moe": ("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval"),
    "qwen2_moe": ("sliding_window", "use_sliding_window"),
    "stablelm": ("qk_layernorm",),
}
"""Fields that stay as they are: they change what no tensor shows (Gemma-3 halves its window without a word), make a
variant of the class, or count layers and modules by rules that are no expressions."""


def drawn_sizes(defaults: Mapping[str, Any], varied: list[str], choose: random.Random) -> Draws:
    """Draw sizes: hidden sizes that every number of heads divides, and layers of every kind."""
    drawn: Draws = {}
    for field in varied:
        leaf = field.rpartition(".")[2]
        small = isinstance(defaults[field], int) and 0 < defaults[field] <= 16
        if re.search(r"(key_value|kv)_heads$|^n_group$|^num_key_heads|linear_num_key_heads", leaf):
            drawn[field] = choose.choice([2, 4])
        elif re.search(r"heads?$", leaf) and "dim" not in leaf:
            drawn[field] = choose.choice([4, 8, 12, 16])
        elif re.search(r"first_k_dense|topk_group|per_tok$", leaf):
            drawn[field] = choose.choice([1, 2, 3])
        elif leaf.endswith(("_interval", "_pattern")):
            drawn[field] = choose.choice([2, 3, 4])
        elif re.search(r"layers?$|^n_layer|^depth$", leaf):
            drawn[field] = choose.randint(6, 14)
        elif re.search(r"^(hidden_size|d_model|n_embd|dim|word_embed_proj_dim)$", leaf):
            drawn[field] = HIDDEN_UNIT * choose.randint(4, 40)
        elif leaf == "image_size":
            drawn[field] = 16 * choose.randint(3, 20)
        elif leaf == "patch_size":
            drawn[field] = choose.choice([2, 4, 8, 16])
        elif leaf == "vocab_size":
            # More than the default padding token of Phi-3.
            drawn[field] = choose.randint(33_000, 36_000)
        elif leaf.endswith(("vocab_size", "positions", "position_embeddings")):
            drawn[field] = choose.randint(300, 3000)
        elif small:
            drawn[field] = choose.randint(2, 7)
        else:
            # Distinct, so that no field stands for another.
            free = [8 * size for size in range(3, 90) if 8 * size not in drawn.values()]
            drawn[field] = choose.choice(free)
    for field in varied:
        # One stack's widths are those of another in several classes.
        if field.endswith("word_embed_proj_dim"):
            drawn[field] = drawn.get("hidden_size", drawn[field])
    return drawn


def varied_fields(on_meta: ClassOnMeta) -> list[str]:
    """Return the integer fields that can be changed alone without another set of tensors."""
    base = small_base(on_meta)
    related = [name for name in on_meta.defaults if _goes_with_heads(name) and type(on_meta.defaults[name]) is int]
    base |= drawn_sizes(on_meta.defaults, related, random.Random(0))
    names = {key for key in on_meta.sample(base, {}).outputs if len(key) > 2}
    found = []
    for field, value in on_meta.defaults.items():
        is_size = (type(value) is int and value > 0) or (value is None and _may_be_size(field))
        if not is_size or field in FIXED.get(on_meta.model_type, ()):
            continue
        for seed in range(3):
            changed = base | drawn_sizes(on_meta.defaults, [field], random.Random(seed))
            try:
                outputs = on_meta.sample(changed, {}).outputs
            except RefusedInputError:
                continue
            if {key for key in outputs if len(key) > 2} == names:
                found.append(field)
                break
    return found


def _goes_with_heads(field: str) -> bool:
    return bool(re.search(r"(heads?|hidden_size|d_model|n_embd|dim)$", field))


def _may_be_size(field: str) -> bool:
    return bool(
        re.search(
            r"(head_dim|heads|_layers|intermediate_size|ffn_hidden_size|n_inner|_rank|_dim|window|chunk_size|hidden_size)$",
            field,
        )
    )


def small_base(on_meta: ClassOnMeta) -> Draws:
    """Return few layers, so that models are built in milliseconds."""
    found: Draws = {}
    for field, value in on_meta.defaults.items():
        if type(value) is int and re.search(
            r"(num_hidden_layers|n_layers?|num_layers|(en|de)coder_layers|depth)$", field
        ):
            found[field] = 8
    return found


def switches_of(on_meta: ClassOnMeta, varied: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield other kinds of values that fields may have."""
    for field, value in on_meta.defaults.items():
        if field in FIXED.get(on_meta.model_type, ()):
            continue
        if isinstance(value, bool) and not NO_SHAPE.search(field) and not field.endswith("is_encoder_decoder"):
            yield field, not value
        elif value is None and field in varied:
            yield field, "size"
            if field in on_meta.resolved_nulls:
                yield field, None
        elif type(value) is int and field in varied and _may_be_size(field):
            yield field, None
        elif value == "auto" or (type(value) is int and value == 0):
            yield field, "size"
    for field, others in OTHER_KINDS.get(on_meta.model_type, {}).items():
        yield from ((field, other) for other in others)


def set_fields(
    on_meta: ClassOnMeta, varied: list[str], switches: Mapping[str, Any], choose: random.Random
) -> list[str]:
    """Return the fields that a configuration sets: those that are null unless switched, or that the class derives."""

    def is_set(field: str) -> bool:
        if on_meta.defaults[field] is not None or field in switches:
            return switches.get(field, "size") is not None
        return field in on_meta.resolved_nulls and choose.random() < 0.5

    sized = [field for field, other in switches.items() if other == "size" and field not in varied]
    return [field for field in varied if is_set(field)] + sized


def drawn_samples(
    on_meta: ClassOnMeta, varied: list[str], switches: Mapping[str, Any], count: int, choose: random.Random
) -> list[Sample]:
    """Return models of random sizes under some switches; fewer if transformers rejects many."""
    found: list[Sample] = []
    base = small_base(on_meta)
    for _ in range(3 * count):
        drawn = base | drawn_sizes(on_meta.defaults, set_fields(on_meta, varied, switches, choose), choose)
        stated = {
            field: value
            for field, value in switches.items()
            if value != "size" and (value is not None or field not in on_meta.implied)
        }
        try:
            found.append(on_meta.sample(drawn, stated))
        except RefusedInputError as error:
            refused = error
        if len(found) == count:
            return found
    raise ShapesError(f"{on_meta.architecture} {dict(switches)}: cannot be built: {refused}")


def derive(name: str) -> dict[str, Any]:
    """Return what is stored of a class or, after a space, of its variant.

    Raises:
        ShapesError: a size of some tensor is no simple expression.
    """
    on_meta, choose = ClassOnMeta(name), random.Random(0)
    varied = varied_fields(on_meta)
    base = drawn_samples(on_meta, varied, {}, SAMPLES, choose)
    groups: list[tuple[str, str, list[Sample]]] = []
    kinds = {field: {value_kind(on_meta.defaults[field])} for field in varied}
    for field, other in switches_of(on_meta, varied):
        try:
            samples = drawn_samples(on_meta, varied, {field: other}, SWITCHED_SAMPLES, choose)
        except ShapesError:
            # Not a value that the class takes: such configurations are left to transformers.
            continue
        kinds.setdefault(field, {value_kind(on_meta.defaults[field])}).add(samples[0].kinds[field])
        groups.append((field, samples[0].kinds[field], samples))
    if on_meta.layer_kinds and "num_hidden_layers" in varied:
        # Stacks of one type of layer lack the others.
        for field, found in on_meta.layer_kinds.items():
            for only in sorted(found):
                stack = {"num_hidden_layers": 1, field: [only]}
                samples = drawn_samples(on_meta, varied, stack, SWITCHED_SAMPLES, choose)
                groups += [(f"{field}={kind}", "zero", samples) for kind in sorted(found - {only})]
    stored = _stored(on_meta, base, groups)
    stored["varied"] = {field: sorted(found) for field, found in kinds.items()}
    return _checked(on_meta, stored, varied, choose)


def _stored(on_meta: ClassOnMeta, base: list[Sample], groups: list[tuple[str, str, list[Sample]]]) -> dict[str, Any]:
    assert on_meta.spec is not None
    cache: dict[tuple[int, bool], tuple[list[str], Any]] = {}
    samples = [*base, *(sample for _, _, group in groups for sample in group)]

    def candidates(samples: list[Sample], stated: bool) -> tuple[list[str], Any]:
        key = (id(samples), stated)
        if key not in cache:
            cache[key] = monomials([sample.stated if stated else sample.sizes for sample in samples])
        return cache[key]

    def fit(key: tuple[Any, ...], samples: list[Sample], *, stated: bool) -> Any:
        found = [sample.outputs[key] for sample in samples]
        if not all(type(value) is int for value in found):
            if any(value != found[0] for value in found):
                raise ShapesError(f"{key}: {found[:4]} is no number")
            return {"literal": found[0]}
        names, points = candidates(samples, stated)
        expression = solved(found, names, points)
        if expression is None:
            raise ShapesError(f"{on_meta.architecture}: {key}: {found[:6]} is no expression of its sizes")
        return expression

    def branches(keys: list[tuple[Any, ...]], *, stated: bool) -> list[tuple[list[Any], dict[str, str]]]:
        """Return the expressions of some outputs that go together, with the kinds under which they hold."""
        found: list[tuple[list[Any], dict[str, str]]] = []
        if keys == [("buffers",)]:
            # Rotary tables round up the widths of heads, which few samples show.
            with suppress(ShapesError):
                return [([fit(key, samples, stated=stated) for key in keys], {})]
        usual: list[Any] | None = None
        unless: dict[str, str] = {}
        if all(keys[0] in sample.outputs for sample in base):
            usual = [fit(key, base, stated=stated) for key in keys]
        for field, kind, switched in groups:
            if stated and "=" in field:
                continue
            present = all(keys[0] in sample.outputs for sample in switched)
            if (
                usual is not None
                and present
                and all(_explains(how, key, switched, stated=stated) for how, key in zip(usual, keys, strict=True))
            ):
                continue
            if present:
                found.append(([fit(key, switched, stated=stated) for key in keys], {field: kind}))
            if usual is not None:
                unless[field] = value_kind(on_meta.defaults.get(field, 1))
        return ([(usual, unless)] if usual is not None else []) + found

    every = dict.fromkeys(key for sample in samples for key in sample.outputs)
    kinds = [key for key in every if key[0] == "derived" and "=" in key[1]]
    for sample in samples:
        # A short stack has no layer of some kinds.
        fields = {key[1].partition("=")[0] for key in sample.outputs if key in kinds}
        sample.outputs.update({key: 0 for key in kinds if key[1].partition("=")[0] in fields} | sample.outputs)
    derived = [
        [key[1], hows[0], when] for key in every if key[0] == "derived" for hows, when in branches([key], stated=True)
    ]
    parameters = []
    for key in every:
        if key[-1] != "count":
            continue
        pattern, group, kind, axes, _, _ = key
        keys = [key, *((*key[:-1], axis) for axis in range(axes))]
        for (count, *shape), when in branches(keys, stated=False):
            parameters.append([pattern, shape, count, group, kind, when])
    # A router runs before its experts, whatever their order in the class.
    first = next((index for index, row in enumerate(parameters) if row[4] == "experts"), 0)
    routers = [row for row in parameters[first:] if row[0].endswith(".mlp.gate.weight")]
    parameters = [*parameters[:first], *routers, *(row for row in parameters[first:] if row not in routers)]
    return {
        "model_type": on_meta.model_type,
        "text": on_meta.text,
        "layer_classes": sorted(set(on_meta.spec.layer_classes) - on_meta.text_layer_classes),
        "attention": on_meta.spec.attention,
        "names": on_meta.names,
        "layer_types": {field: sorted(found) for field, found in on_meta.layer_kinds.items()},
        "sometimes": sorted({key[1] for sample in samples for key in kinds if not sample.sizes.get(key[1])}),
        "values": on_meta.defaults,
        "read": sorted(on_meta.read),
        "apart": list(APART.get(on_meta.model_type, ())),
        "rotary_factor": on_meta.rotary_factor,
        "computed": on_meta.computed,
        "implied": on_meta.implied,
        "required": sorted(on_meta.required),
        "derived": derived,
        "parameters": parameters,
        "buffers": [[hows[0], when] for hows, when in branches([("buffers",)], stated=False)],
        "tied": [[hows[0], when] for hows, when in branches([("tied",)], stated=False)],
        **({"part_types": PART_TYPES[on_meta.model_type]} if on_meta.model_type in PART_TYPES else {}),
        **({"texts": on_meta.texts} if on_meta.texts else {}),
        **({"unnamed": True} if on_meta.is_built_unnamed() else {}),
    }


def _explains(how: Any, key: tuple[Any, ...], samples: list[Sample], *, stated: bool) -> bool:
    for sample in samples:
        wanted = sample.outputs.get(key)
        found = evaluated(how, sample.stated if stated else sample.sizes) if isinstance(how, str) else how["literal"]
        if found != wanted:
            return False
    return True


def _checked(on_meta: ClassOnMeta, stored: dict[str, Any], varied: list[str], choose: random.Random) -> dict[str, Any]:
    """Compare with models under random sizes and switches together."""
    switches = list(switches_of(on_meta, varied))
    for number in range(CHECKS):
        picked = dict(choose.sample(switches, min(3, len(switches))))
        drawn = small_base(on_meta)
        drawn |= drawn_sizes(on_meta.defaults, set_fields(on_meta, varied, picked, choose), choose)
        if number % 2:
            # Fields that a config.json omits have defaults, some of which the class derives from others.
            drawn = {field: value for field, value in drawn.items() if choose.random() < 0.7}
        drawn |= {
            field: value
            for field, value in picked.items()
            if value != "size" and (value is not None or field not in on_meta.implied)
        }
        config = on_meta.config(drawn)
        try:
            built = on_meta.build(drawn)
        except RefusedInputError:
            continue
        found = spec_of(stored, config, architecture=on_meta.architecture, name="m", release=built.release)
        if found is not None and (errors := differences(found, built)):
            raise ShapesError(f"{on_meta.architecture} with {picked}: {'; '.join(errors)}"[:1500])
    return stored


def differences(found: ModelSpec, built: ModelSpec) -> list[str]:
    """Return what two specifications differ in but their source."""
    errors = []
    for field in (each.name for each in dataclasses.fields(ModelSpec)):
        one, other = getattr(found, field), getattr(built, field)
        if field == "source":
            continue
        if field == "parameters":
            one, other = {p.name: p for p in one}, {p.name: p for p in other}
            errors += [
                f"{name}: {one.get(name)} for {other.get(name)}"
                for name in one | other
                if one.get(name) != other.get(name)
            ]
        elif field == "settings":
            one, other = dict(one), dict(other)
            for name in other:
                if is_stored_setting(name, other[name]) and one.get(name) != other.get(name):
                    errors.append(f"settings: {name} is {one.get(name)} for {other.get(name)}")
        elif one != other:
            errors.append(f"{field} is {one} for {other}")
    return errors


def rendered(data: Mapping[str, Any]) -> str:
    """Return the file's text, a line for each class."""
    classes = [
        f"{json.dumps(name)}:{json.dumps(data['classes'][name], sort_keys=True)}" for name in sorted(data["classes"])
    ]
    text = '{"versions":' + json.dumps(data["versions"]) + ',"classes":{\n' + ",\n".join(classes) + "\n}"
    changes = [
        f"{json.dumps(releases)}:{json.dumps(patch, sort_keys=True)}"
        for releases, patch in data.get("changes", {}).items()
    ]
    return text + (',"changes":{\n' + ",\n".join(changes) + "\n}" if changes else "") + "}\n"


def main() -> int:
    """Derive classes and print or write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("classes", nargs="*", metavar="CLASS")
    parser.add_argument("--write", action="store_true", help=f"write {SHAPES_FILE}")
    parser.add_argument("--change", metavar="RELEASES", help=CHANGE_HELP)
    arguments = parser.parse_args()
    from transformers.utils import logging

    logging.set_verbosity_error()
    data = json.loads(DATA.read_text(encoding="utf-8")) if DATA.exists() else {"versions": {}, "classes": {}}
    failed, release = False, version("transformers")
    for architecture in arguments.classes or list(data["classes"]):
        facts = facts_in(data, release)
        facts["versions"] = {name: version(name) for name in ("torch", "transformers")}
        try:
            facts["classes"] = facts["classes"] | {architecture: derive(architecture)}
            print(architecture, len(facts["classes"][architecture]["parameters"]), "tensors")
        except (ShapesError, RefusedInputError) as error:
            print(architecture, error, file=sys.stderr)
            failed = True
        if arguments.write:
            data = with_facts(data, facts, release=release, change=arguments.change)
            written = DATA.with_suffix(".new")
            written.write_text(rendered(data), encoding="utf-8")
            written.replace(DATA)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
