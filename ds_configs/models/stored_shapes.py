"""`ModelSpec` of the classes whose tensors are stored as expressions of configuration values, without building them.

`python tools/parameter_shapes.py CLASS ...` derives them from models on the meta device. A configuration that differs
from the derived ones in more than its sizes and known switches is left to transformers.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from importlib import resources
from typing import Any

from ..specs.model import ModelSpec, ParameterShape
from .described import OTHER_SETTINGS, described_spec

SHAPES_FILE = "parameter_shapes.json"
Values = dict[str, Any]
"""Values of a configuration by dotted name."""

_CODE_FIELDS = frozenset({"auto_map", "attn_implementation", "experts_implementation", "quantization_config"})
_PLAIN_ACTIVATIONS = frozenset(
    {"gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "quick_gelu", "relu", "relu2", "silu", "swish", "tanh"}
)
"""Activation functions without parameters (transformers/activations.py)."""
_ACTIVATION_FIELDS = ("_act", "activation", "activation_function")
NO_SHAPE = re.compile(
    r"dropout|drop|_eps$|epsilon|_std$|_range$|theta$|dtype$|_coef$|token|version|label|problem_type|softcapping$"
    r"|use_cache$|return_dict$|output_|residual_in_fp32$|norm_topk_prob$|(n|topk)_group$|topk_method$|scoring_func$|experts_per_tok$|max_window_layers$|rope_interleave$|scaling_factor$|_scale$|_multiplier$|architectures$|task_specific_params$"
    r"|initializer|^temperature$|^top_|^bias_logits|generation|^max_length$|^prefix$|_loss"
)
"""Names of fields that no tensor's shape depends on."""
_ROTARY_FIELDS = ("rope_parameters", "rope_scaling")
_RATIOS = (
    *(("hidden_size", "num_attention_heads"), ("n_embd", "n_head"), ("n_embd", "num_heads"), ("d_model", "n_heads")),
    ("image_size", "patch_size"),
)
_FACTOR = re.compile(r"(?P<rounding>ceil |round )?(?P<number>.+?)//(?P<divisor>.+)")


@lru_cache(maxsize=1)
def load_shapes() -> Mapping[str, Any]:
    """Read the stored classes: `versions`, and `classes` by name.

    A class has `model_type`, `values` (the defaults of its configuration), `names` (of the standard fields), `varied`
    (fields with the kinds of values that were traced), `required`, `implied` (by others, where they
    are not stated), `derived` and `computed` fields (which it never reads),
    `rotary_factor` (the share of a head that is rotated), switches
    of which one alone may be turned (`apart`), others
    that its code looks for (`read`), `parameters`, `buffers` and `tied` as
    expressions with the kinds of values (`when`) under which they hold.
    """
    data = resources.files(__package__.rpartition(".")[0]).joinpath("data", SHAPES_FILE)
    found: Mapping[str, Any] = json.loads(data.read_text(encoding="utf-8"))
    return found


def model_spec_from_shapes(config: Mapping[str, Any], *, name: str, revision: str | None = None) -> ModelSpec | None:
    """Return the `ModelSpec` of a validated `config.json`, or `None` when only transformers can tell."""
    architecture = (config.get("architectures") or [None])[0]
    stored = load_shapes()["classes"].get(architecture)
    if stored is None or config["model_type"] != stored["model_type"]:
        return None
    return spec_of(stored, config, architecture=architecture, name=name, revision=revision)


def spec_of(
    stored: Mapping[str, Any], config: Mapping[str, Any], *, architecture: str, name: str, revision: str | None = None
) -> ModelSpec | None:
    """Return the specification that a stored class has under a configuration; `None` for one that it does not cover."""
    stated = _stated(config, stored)
    if stated is None:
        return None
    if not stated.keys() >= set(stored["required"]):
        return None
    values = stored["values"] | stated
    kinds = {field: value_kind(values[field]) for field in stored["varied"]}
    if sum(kinds[field] != value_kind(stored["values"][field]) for field in stored["apart"]) > 1:
        return None
    sizes = countable_sizes(values)
    found = {
        field: evaluated(how, sizes) if isinstance(how, str) else how["literal"]
        for field, how, when in stored["derived"]
        if _holds(when, kinds) and ("=" not in field or field.partition("=")[0] not in stated)
    }
    sizes |= {field: value for field, value in found.items() if type(value) is int}
    values |= {field: size for field, size in found.items() if "=" not in field}
    for field in stored["layer_types"]:
        values[field] = [kind for kind in stored["layer_types"][field] for _ in range(sizes.get(f"{field}={kind}", 0))]
        if len(set(values[field])) < len(stored["layer_types"][field]):
            return None
    parameters = _parameters(stored["parameters"], kinds, sizes)
    if any(p.count < 0 or min(p.shape, default=1) < 1 for p in parameters):
        return None
    buffer_bytes, tied = (_one_of(stored[field], kinds, sizes) for field in ("buffers", "tied"))
    if buffer_bytes is None or tied is None:
        return None
    top, text = (_Fields(values, stored, part) for part in ("", stored["text"]))
    if not getattr(text, "head_dim", 0) and getattr(text, "hidden_size", 0) % getattr(text, "num_attention_heads", 1):
        return None

    return described_spec(
        config=top,
        text=text,
        values=_nested(values),
        name=name,
        revision=revision,
        model_type=stored["model_type"],
        architecture=architecture,
        parameters=parameters,
        buffer_bytes=buffer_bytes,
        layer_classes=tuple(stored["layer_classes"]),
        tied_embeddings=bool(tied),
        attention=stored["attention"],
        source="config",
    )


def _parameters(
    stored: Sequence[Any], kinds: Mapping[str, str], sizes: Mapping[str, int]
) -> tuple[ParameterShape, ...]:
    found = []
    for pattern, shape, count, group, kind, when in stored:
        held = evaluated(count, sizes) if _holds(when, kinds) else 0
        if held:
            dims = tuple(evaluated(size, sizes) for size in shape)
            found.append(ParameterShape(name=pattern, shape=dims, count=held, group=group, kind=kind))
    return tuple(found)


def value_kind(value: Any) -> str:
    """Return what tells expressions apart: `null`, `true`, `false`, `number` or `zero`, else the value itself."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int):
        return "number" if value > 0 else "zero"
    return str(value)


def countable_sizes(values: Mapping[str, Any]) -> dict[str, int]:
    """Return the integers of flat values, quotients such as the width of a head, and the layers of each kind."""
    sizes = {name: value for name, value in values.items() if isinstance(value, int) and not isinstance(value, bool)}
    for number, divisor in _RATIOS:
        for name in [name for name in sizes if name == number or name.endswith(f".{number}")]:
            if each := sizes.get(name.removesuffix(number) + divisor):
                sizes[f"{name} per {divisor}"] = sizes[name] // each
    for name, value in values.items():
        if name.endswith("layer_types") and isinstance(value, list):
            sizes |= {f"{name}={kind}": count for kind, count in Counter(value).items()}
    return sizes


def evaluated(expression: str, sizes: Mapping[str, int]) -> int:
    """Return the value of a sum of products, such as `2*head_dim*num_key_value_heads + hidden_size//2`.

    A quotient is rounded down, up after `ceil`, and half up after `round`.
    """
    return sum(_product(term, sizes) for term in expression.split(" + "))


def _product(term: str, sizes: Mapping[str, int]) -> int:
    value = 1
    for factor in term.split("*"):
        if quotient := _FACTOR.fullmatch(factor):
            number, divisor = _size(quotient["number"], sizes), _size(quotient["divisor"], sizes)
            up = {"ceil ": divisor - 1, "round ": divisor // 2}.get(quotient["rounding"], 0)
            value *= (number + up) // divisor
        else:
            value *= _size(factor, sizes)
    return value


def _size(name: str, sizes: Mapping[str, int]) -> int:
    return int(name) if name.lstrip("-").isdigit() else sizes.get(name, 0)


def flattened(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the fields of a configuration and of its parts by dotted name."""
    for name, value in config.items():
        if isinstance(value, dict) and name.endswith("_config") and name not in _CODE_FIELDS:
            yield from flattened(value, f"{prefix}{name}.")
        elif not name.startswith("_") and name not in _CODE_FIELDS:
            yield prefix + name, value


def _stated(config: Mapping[str, Any], stored: Mapping[str, Any]) -> Values | None:
    """Return what a configuration states by the class's own names; `None` where that is not covered."""
    stated: Values = {}
    parts = {field.rpartition(".")[0] for field in stored["values"]}
    for field, value in flattened(config):
        part, _, name = field.rpartition(".")
        own = f"{part}." * bool(part) + stored["names"].get(part, {}).get(name, name)
        if part not in parts or own in stated or not _is_covered(own, value, config, stored):
            return None
        if not name.endswith(_ROTARY_FIELDS):
            stated[own] = value
    return stated


def _is_covered(field: str, value: Any, config: Mapping[str, Any], stored: Mapping[str, Any]) -> bool:
    name = field.rpartition(".")[2]
    if field in stored["computed"]:
        return True
    if field in stored["varied"]:
        return value_kind(value) in stored["varied"][field] and (value is not None or field not in stored["implied"])
    if name in _ROTARY_FIELDS:
        return _rotary_factor(value) in (None, stored["rotary_factor"])
    if name.endswith("layer_types"):
        known = stored["layer_types"].get(field, [])
        return value is None or (isinstance(value, list) and len(value) > 0 and set(value) <= set(known))
    if name.endswith(_ACTIVATION_FIELDS) and value in _PLAIN_ACTIVATIONS:
        return True
    if NO_SHAPE.search(name) or name.endswith(OTHER_SETTINGS):
        return not isinstance(value, dict) or name in ("id2label", "label2id")
    if name == "no_rope_layers" and "layer_types" in config:
        return True
    if field not in stored["values"]:
        return name not in stored["read"]
    return bool(stored["values"][field] == (None if value == [] else value))


def _rotary_factor(section: Any) -> Any:
    return section.get("partial_rotary_factor") if isinstance(section, dict) else None


def _one_of(branches: Sequence[Any], kinds: Mapping[str, str], sizes: Mapping[str, int]) -> int | None:
    """Return what the branch that holds says; `None` under switches that were never turned together."""
    return next((evaluated(how, sizes) for how, when in branches if _holds(when, kinds)), None)


def _holds(when: Mapping[str, str], kinds: Mapping[str, str]) -> bool:
    return all(kinds.get(field) == kind for field, kind in when.items())


def _nested(values: Values) -> Values:
    nested: Values = {}
    for field, value in values.items():
        *parts, name = field.split(".")
        level = nested
        for part in parts:
            level = level.setdefault(part, {})
        level[name] = value
    return nested


class _Fields:
    """Values of one part of a configuration as attributes, under standard names as well."""

    def __init__(self, values: Values, stored: Mapping[str, Any], part: str) -> None:
        self._values, self._prefix = values, f"{part}." * bool(part)
        self._names: Mapping[str, str] = stored["names"].get(part, {})

    def __getattr__(self, name: str) -> Any:
        try:
            return self._values[self._prefix + self._names.get(name, name)]
        except KeyError:
            raise AttributeError(name) from None
