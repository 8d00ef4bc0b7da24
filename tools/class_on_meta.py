"""A model class under random configurations, built on the meta device, as `parameter_shapes.py` reads it."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from shardwright.ds_configs.models.stored_shapes import (
    LABELS,
    NO_SHAPE,
    OTHER_SETTINGS,
    countable_sizes,
    flattened,
    text_parameters,
    text_spec,
    value_kind,
)
from shardwright.ds_configs.specs.errors import RefusedInputError
from shardwright.ds_configs.specs.model import ModelSpec

NOT_KEPT = {"transformers_version", "architectures", "_name_or_path", "dtype", "model_type"}
MORE_FIELDS: Mapping[str, dict[str, Any]] = {
    "qwen3_next": {"full_attention_interval": 4},
    "gemma3": {"text_config.sliding_window_pattern": 6, "vision_config.vision_use_head": True},
    "gemma3_text": {"sliding_window_pattern": 6},
    **{name: {"head_dim": None} for name in ("phi3", "qwen2", "qwen3_moe")},
    "deberta-v2": {"conv_kernel_size": 0},
}
"""Fields that a configuration reads and does not keep."""
REQUIRED: Mapping[str, dict[str, Any]] = {
    **{name: {"head_dim": 128} for name in ("glm4_moe", "hunyuan_v1_dense")},
    "gemma3 headless": {"vision_config.vision_use_head": False},
    "deberta-v2 relative": {
        "relative_attention": True,
        "position_buckets": 256,
        "share_att_key": True,
        "norm_rel_ebd": "layer_norm",
        "pos_att_type": "p2c|c2p",
    },
}
"""Fields without which a class cannot be built; after a space the name of a variant, and the fields that make it."""
READ = re.compile(r"config\.(\w+)|getattr\(\s*[\w.]*config,\s*\"(\w+)\"|kwargs\.(?:pop|get)\(\s*\"(\w+)\"")
"""How code names a field of a configuration."""


COMBINED = (
    *("Idefics3ForConditionalGeneration", "InternVLForConditionalGeneration"),
    *("Llama4ForConditionalGeneration", "LlavaForConditionalGeneration", "LlavaNextForConditionalGeneration"),
    *("LlavaOnevisionForConditionalGeneration", "Mistral3ForConditionalGeneration"),
    *("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"),
    *("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration", "SmolVLMForConditionalGeneration"),
)
"""Classes whose text part is that of another class."""
TEXT_FAMILIES: Mapping[str, tuple[str, str]] = {
    "qwen2_vl_text": ("qwen2", "Qwen2ForCausalLM"),
    "qwen2_5_vl_text": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3_vl_text": ("qwen3", "Qwen3ForCausalLM"),
    "qwen3_vl_moe_text": ("qwen3_moe", "Qwen3MoeForCausalLM"),
}
"""Text parts with the tensors of another class; the others have those of the causal language model of their type."""
TEXT_TYPES: Mapping[str, tuple[str, ...]] = {
    "llava": ("mistral", "qwen2"),
    "llava_next": ("mistral", "qwen2"),
    "internvl": ("llama", "qwen3", "qwen3_moe"),
}
"""Other types of the text part, as published models have them."""
TEXT_KEPT = ("hidden_size", "tie_word_embeddings")
"""Fields of a text part on which the rest of the model depends."""
TEXT_SIZES = {
    **{"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96},
    **{"moe_intermediate_size": 32, "num_experts": 4, "num_local_experts": 4},
}
"""Small sizes of a text part."""


Draws = dict[str, Any]
Outputs = dict[tuple[Any, ...], Any]


class ShapesError(Exception):
    """A class whose tensors are no expressions of its configuration."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """One model: what its configuration stated, the sizes it came to, and what was found."""

    kinds: dict[str, str]
    stated: dict[str, int]
    sizes: dict[str, int]
    outputs: Outputs


class ClassOnMeta:
    """A model class, its default configuration and the models that it builds."""

    def __init__(self, name: str) -> None:
        import transformers

        architecture, *variant = name.split()
        config_class = getattr(transformers, architecture).config_class
        self.architecture, self.model_type = architecture, config_class.model_type
        self.more = MORE_FIELDS.get(self.model_type, {})
        if architecture.endswith("Classification"):
            self.more = self.more | {LABELS: 2}
        config = config_class()
        self.resolved = dict(flattened(config.to_dict()))
        self.defaults = {**self.resolved, **_unresolved(config), **self.more}
        self.required = REQUIRED.get(" ".join([self.model_type, *variant]), {})
        self.defaults |= self.required
        kept = {name: value for name, value in self.defaults.items() if is_kept(name, value)}
        self.defaults = {name: None if value == [] else value for name, value in kept.items()}
        rotary = config.get_text_config().to_dict().get("rope_parameters") or {}
        self.rotary_factor = rotary.get("partial_rotary_factor")
        self.names = {"": dict(config_class.attribute_map)}
        self.text = ""
        self.texts: dict[str, Any] = {}
        self.text_layer_classes: set[str] = set()
        text = config.get_text_config()
        for part in {name.rpartition(".")[0] for name in self.defaults} - {""}:
            section = config
            for step in part.split("."):
                section = getattr(section, step)
            self.names[part] = dict(type(section).attribute_map)
            self.text = part if section is text else self.text
        for name in [name for name in self.defaults if self._is_alias(name)]:
            del self.defaults[name]
        declared = {self.names[""].get(name, name) for name in (*_unresolved(config), *self.more, *self.required)}
        self.computed = sorted(name for name in self.defaults if name not in declared and not self._is_read(name))
        for name in self.computed:
            del self.defaults[name]
        self.implied = sorted(
            name for name in self.defaults if name not in declared and type(self.defaults[name]) is int
        )
        self.defaults |= dict.fromkeys(self.implied)
        self.resolved_nulls = {
            name for name in self.defaults if self.defaults[name] is None and self.resolved.get(name)
        }
        if architecture in COMBINED:
            self._describe_text_part(config)
        self.read = self._read_names()
        self.spec: ModelSpec | None = None
        self.layer_kinds: dict[str, set[str]] = {}

    def _describe_text_part(self, config: Any) -> None:
        """Leave the tensors of the text part to their own class."""
        import transformers
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        usual = config.get_text_config().model_type
        dropped = [name for name in self.defaults if name.startswith(f"{self.text}.")]
        for name in dropped:
            if name.removeprefix(f"{self.text}.") not in TEXT_KEPT:
                del self.defaults[name]
        self.computed = [name for name in self.computed if not name.startswith(f"{self.text}.")]
        self.implied = [name for name in self.implied if name in self.defaults]
        self.resolved_nulls &= self.defaults.keys()
        types = {}
        for kind in (usual, *TEXT_TYPES.get(self.model_type, ())):
            family, architecture = TEXT_FAMILIES.get(kind, (kind, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)))
            part = transformers.CONFIG_MAPPING[kind]()
            values = dict(flattened(part.to_dict())) | _unresolved(part)
            values = {name: value for name, value in values.items() if is_kept(name, value)}
            if "layer_types" in part.to_dict():
                values["layer_types"] = None
            types[kind] = [family, architecture, values]
        self.texts = {"types": types, "usual": usual}
        small = self.config({f"{self.text}.hidden_size": 96})
        spec = self._built(small)
        if usual not in TEXT_FAMILIES and (text := text_spec(self.texts, small, self.text, release=spec.release)):
            self.text_layer_classes = set(text.layer_classes)
        (embedding,) = (p.name for p in spec.parameters if p.name.endswith("embed_tokens.weight"))
        head = next((p.name for p in spec.parameters if p.group == "head"), "lm_head.weight")
        flat = {"hidden_size": 96, **{name: size for name, size in TEXT_SIZES.items() if name in types[usual][2]}}
        older = {"model_type": self.model_type, "architectures": [self.architecture], **flat}
        self.texts |= {"prefix": embedding.removesuffix(".embed_tokens.weight"), "head": head, "flat": False}
        with suppress(RefusedInputError):
            self.texts["flat"] = self._built(older).dimensions.hidden_size == 96

    def _is_alias(self, field: str) -> bool:
        part, _, name = field.rpartition(".")
        return name in self.names.get(part, {})

    def _is_read(self, field: str) -> bool:
        """Whether the class keeps another value of a field that it does not declare."""
        import transformers

        value = self.defaults[field]
        if isinstance(value, list | str):
            return isinstance(value, list)
        other = not value if isinstance(value, bool) else (value or 0) + 8
        config = self.config({field: other})
        try:
            built = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
        except Exception:
            # Configurations raise whatever they meet; the field was read.
            return True
        return bool(dict(flattened(built.to_dict())).get(field) == other)

    def _read_names(self) -> set[str]:
        """Return the fields that the classes of the model read and their configurations do not declare."""
        from shardwright.plugins.transformers.meta_model import build_meta_model

        model = build_meta_model(self.config({}), source="m")
        modules = {type(each).__module__ for each in model.modules()}
        modules |= {module.replace(".modeling_", ".configuration_") for module in modules}
        text = "".join(
            inspect.getsource(sys.modules[name])
            for name in modules
            if name.startswith("transformers.") and name in sys.modules
        )
        found = {name for names in READ.findall(text) for name in names if name}
        declared = {name.rpartition(".")[2] for name in self.defaults} | {
            name for names in self.names.values() for name in names
        }
        return {name for name in found if not name.startswith("_")} - declared

    def config(self, drawn: Draws) -> dict[str, Any]:
        """Return `config.json` with some fields changed; all others are left to the class."""
        config: dict[str, Any] = {"model_type": self.model_type, "architectures": [self.architecture]}
        for part in self.names:
            if part:
                config[part] = {"model_type": self.resolved[f"{part}.model_type"]}
            if part == self.text and self.texts:
                known = self.texts["types"][self.texts["usual"]][2]
                config[part] |= {name: size for name, size in TEXT_SIZES.items() if name in known}
        for field, value in (self.required | drawn).items():
            part, _, name = field.rpartition(".")
            (config[part] if part else config)[name] = value
        return config

    def is_built_unnamed(self) -> bool:
        """Whether this class is built for a configuration without `architectures`."""
        from shardwright.plugins.transformers.meta_model import build_meta_model

        unnamed = self.config({}) | {"architectures": None}
        return type(build_meta_model(unnamed, source="m")).__name__ == self.architecture

    def build(self, drawn: Draws) -> ModelSpec:
        """Return the specification of one model; raises `RefusedInputError`."""
        return self._built(self.config(drawn))

    def _built(self, config: dict[str, Any]) -> ModelSpec:
        from shardwright.plugins.transformers.meta_model import model_spec_from_meta

        return model_spec_from_meta(config, name="m")

    def sample(self, drawn: Draws, switches: Mapping[str, Any]) -> Sample:
        """Return one model with what its expressions are solved from."""
        stated = self.defaults | drawn | dict(switches)
        spec = self.build(drawn | dict(switches))
        if self.texts:
            spec = self._without_text(spec, self.config(drawn | dict(switches)))
        after = dict(spec.settings)
        derived = {name: after[name] for name in after if name not in stated or not _same(stated[name], after[name])}
        outputs: Outputs = {
            ("derived", name): value for name, value in derived.items() if is_stored_setting(name, value)
        }
        outputs |= {("buffers",): spec.buffer_bytes, ("tied",): int(spec.tied_embeddings)}
        for parameter in spec.parameters:
            key = (parameter.name, parameter.group, parameter.kind, len(parameter.shape), 0)
            while (*key, "count") in outputs:
                # Modules of a list may have different shapes.
                key = (*key[:-1], key[-1] + 1)
            outputs[(*key, "count")] = parameter.count
            outputs |= {(*key, axis): size for axis, size in enumerate(parameter.shape)}
        sizes = countable_sizes(stated)
        now = sizes | {name: value for name, value in derived.items() if type(value) is int}
        for name, count in after.items():
            if "=" in name:
                field, _, kind = name.partition("=")
                self.layer_kinds.setdefault(field, set()).add(kind)
                now[name] = int(count)
        self.spec = spec
        return Sample(
            kinds={name: value_kind(value) for name, value in stated.items()}, stated=sizes, sizes=now, outputs=outputs
        )

    def _without_text(self, spec: ModelSpec, config: dict[str, Any]) -> ModelSpec:
        """Return a specification without what its text part has."""
        text = text_spec(self.texts, config, self.text, release=spec.release)
        if text is None:
            raise ShapesError(f"{self.architecture}: its text part is not covered")
        own = {p.name: p for p in text_parameters(text, self.texts, tied=spec.tied_embeddings)}
        found = {p.name: p for p in spec.parameters if p.name in own}
        if found != own:
            raise ShapesError(f"{self.architecture}: its text part has other tensors: {own.items() ^ found.items()}")
        return dataclasses.replace(
            spec,
            parameters=tuple(p for p in spec.parameters if p.name not in own),
            buffer_bytes=spec.buffer_bytes - text.buffer_bytes,
            settings=tuple(
                (name, value)
                for name, value in spec.settings
                if not name.startswith(f"{self.text}.") or name.removeprefix(f"{self.text}.") in TEXT_KEPT
            ),
        )


def _same(stated: Any, after: Any) -> bool:
    return bool(stated == after and type(stated) is type(after))


def is_kept(name: str, value: Any) -> bool:
    leaf = name.rpartition(".")[2]
    if leaf in NOT_KEPT or leaf.endswith(OTHER_SETTINGS) or leaf.startswith("_name") or leaf.endswith("layer_types"):
        return False
    is_plain = value is None or isinstance(value, bool | int | float | str)
    return is_plain or (isinstance(value, list) and all(type(item) is int for item in value))


def is_stored_setting(name: str, value: Any) -> bool:
    """Whether a setting is compared: not the scale of an initialization, which some classes derive from their depth."""
    return is_kept(name, value) and not (isinstance(value, float) and NO_SHAPE.search(name.rpartition(".")[2]))


def _unresolved(config: Any, prefix: str = "") -> dict[str, Any]:
    """Return the defaults that a configuration class declares, before it derives one from another."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name, None)
        if dataclasses.is_dataclass(value) and field.name.endswith("_config"):
            found |= _unresolved(value, f"{prefix}{field.name}.")
        elif field.default is None or isinstance(field.default, bool | int | float | str):
            found[prefix + field.name] = field.default
    return found
