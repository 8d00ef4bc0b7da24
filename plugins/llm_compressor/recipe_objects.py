"""llm-compressor's modifiers for a scheme and a method, each followed by our progress and journal (seen with 0.14.0.1).

The `independent` pipeline gives every modifier a pass of its own over the model, and it must: in one shared pass,
Hessians and ranges of activations would be taken before SmoothQuant or AWQ has changed the weights. A modifier of ours
would get a pass of its own as well; therefore a subclass of each modifier hears the events of its pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

from ...ds_configs.errors import Fault, UsageError
from ...ds_configs.quantization.config_json import config_group
from ...ds_configs.quantization.scheme import QuantizationScheme
from .journal import Journal, JournalEntry
from .progress import Steps
from .range_observers import observer_name

EngineMethod = Literal["rtn", "gptq", "awq", "smoothquant", "smoothquant-gptq"]

_NOT_OPTIONS = frozenset(
    # What the scheme says, and what belongs to training, which llm-compressor no longer does.
    ("config_groups", "targets", "ignore", "scheme", "kv_cache_scheme", "index", "group", "start", "end", "update")
    # Set by the modifier itself; accepted and never read (`modifiers/transform/smoothquant/base.py`).
    + ("requires_calibration_data", "num_calibration_steps", "calibration_function")
)
_QUANTIZATION_SUFFIXES = ("_scale", "_zero_point", "_g_idx")


def modifier_kinds(method: EngineMethod) -> tuple[type[Any], ...]:
    """Return the modifier classes of a method, in the order in which they pass over the model."""
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier
    from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier

    return {
        "rtn": (QuantizationModifier,),
        "gptq": (GPTQModifier,),
        "awq": (AWQModifier, QuantizationModifier),
        "smoothquant": (SmoothQuantModifier, QuantizationModifier),
        "smoothquant-gptq": (SmoothQuantModifier, GPTQModifier),
    }[method]


def build_modifiers(scheme: QuantizationScheme, method: EngineMethod, options: Mapping[str, Any]) -> list[Any]:
    """Return the modifiers of a method, ready to run and to be followed.

    Raises:
        UsageError: all options that the method's modifiers do not have, or whose values they refuse.
    """
    from pydantic import ValidationError

    kinds = modifier_kinds(method)
    known = {name: kind for kind in kinds for name in kind.model_fields if _is_option(name)}
    faults = [_unknown_option(name, method, known) for name in options if name not in known]
    modifiers = []
    for kind in kinds:
        chosen = {name: value for name, value in options.items() if known.get(name) is kind}
        try:
            modifiers.append(_followed(kind)(**_scheme_fields(kind, scheme), **chosen))
        except ValidationError as error:
            faults += [_refused_value(detail, chosen) for detail in error.errors()]
    if faults:
        raise UsageError(faults)
    return modifiers


@dataclass(frozen=True, kw_only=True)
class Following:
    """What a modifier's pass is told to and taken from."""

    phase: int
    """Which pass it is, from 0."""
    steps: Steps
    """Numbers and reports what happens."""
    journal: Journal | None
    """Where finished parts are kept; `None` keeps nothing."""
    finished: tuple[JournalEntry, ...]
    """Parts of this pass that the journal has."""
    before: tuple[JournalEntry, ...]
    """Parts of earlier passes, which this run does not make again."""


class _FollowedModifier:
    """Hears the events of one pass; stands before a modifier class in a subclass of both."""

    following: Following
    part: int
    names: dict[Any, str]

    def follow(self, following: Following) -> None:
        """Attach what hears of the pass."""
        # Around pydantic, which knows the modifier's own fields alone.
        object.__setattr__(self, "following", following)
        object.__setattr__(self, "part", 0)

    def on_initialize(self, state: Any, **kwargs: Any) -> bool:
        """Take over earlier passes before anything looks at the weights."""
        following = self.following
        for entry in following.before:
            assert following.journal is not None
            following.journal.restore(entry, state.model)
            following.steps.tell(entry.phase, entry.part, "restored")
        return bool(super().on_initialize(state, **kwargs))  # type: ignore[misc]

    def on_calibration_start(self, state: Any, event: Any, **kwargs: Any) -> None:
        """Take over finished parts, and let nothing listen to them."""
        super().on_calibration_start(state, event, **kwargs)  # type: ignore[misc]
        following = self.following
        object.__setattr__(self, "names", {module: name for name, module in state.model.named_modules()})
        restored: set[str] = set()
        for entry in following.finished:
            assert following.journal is not None
            restored.update(following.journal.restore(entry, state.model))
        _stop_listening(self, state.model, restored)
        if not following.finished:
            following.steps.tell(following.phase, 0, "calibrating")

    def on_sequential_epoch_end(self, state: Any, event: Any, modules: Sequence[Any], **kwargs: Any) -> None:
        """Let the modifier do its work on a part and keep the result."""
        following, part = self.following, self.part
        object.__setattr__(self, "part", part + 1)
        if part < len(following.finished):
            following.steps.tell(following.phase, part, "restored")
            return
        named = tuple(self.names[module] for module in modules if hasattr(module, "quantization_scheme"))
        following.steps.tell(following.phase, part, "quantizing", named)
        super().on_sequential_epoch_end(state, event, modules=modules, **kwargs)  # type: ignore[misc]
        if following.journal is not None and self.requires_calibration_data:  # type: ignore[attr-defined]
            tensors = changed_tensors(self, {self.names[module]: module for module in modules}, state.model)
            following.journal.record(phase=following.phase, part=part, tensors=tensors)
        following.steps.tell(following.phase, part, "propagating", named)


def changed_tensors(modifier: Any, modules: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """Return the tensors of a part that a modifier may have changed.

    Rounding to nearest leaves weights as they are and adds scales, GPTQ writes both, SmoothQuant and AWQ rescale
    weights and biases. Embeddings and the head are large and belong to the first and the last part, so they are left
    out where they are not quantized.
    """
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier

    kept_dense = {id(model.get_input_embeddings()), id(model.get_output_embeddings())}
    found = {}
    for module_name, module in modules.items():
        quantized = hasattr(module, "quantization_scheme")
        for name, _ in module.named_parameters(recurse=False):
            is_scale = name.endswith(_QUANTIZATION_SUFFIXES)
            if isinstance(modifier, QuantizationModifier):
                wanted = quantized and is_scale
            elif isinstance(modifier, GPTQModifier):
                wanted = quantized
            else:
                wanted = not is_scale and id(module) not in kept_dense
            if wanted:
                found[f"{module_name}.{name}"] = getattr(module, name)
    return found


def _stop_listening(modifier: Any, model: Any, restored: set[str]) -> None:
    """Remove the hooks that calibrate parts which are finished."""
    if not restored:
        return
    dictionaries = set()
    for name, module in model.named_modules():
        inside = [
            inner
            for inner, child in model.named_modules()
            if (inner == name or inner.startswith(f"{name}.")) and hasattr(child, "quantization_scheme")
        ]
        if inside and restored.issuperset(inside):
            dictionaries |= {id(module._forward_hooks), id(module._forward_pre_hooks)}
    handles = {handle for handle in modifier._hooks if id(handle.hooks_dict_ref()) in dictionaries}
    modifier.remove_hooks(handles)


def _followed(kind: type[Any]) -> type[Any]:
    return type(kind.__name__, (_FollowedModifier, kind), {"__module__": kind.__module__})


def _is_option(name: str) -> bool:
    return name not in _NOT_OPTIONS and not name.endswith("_")


def _scheme_fields(kind: type[Any], scheme: QuantizationScheme) -> dict[str, Any]:
    from llmcompressor.modifiers.quantization.quantization import QuantizationMixin

    if not issubclass(kind, QuantizationMixin):
        return {}
    group = config_group(scheme)
    activations = scheme.activations
    if activations is not None and group["input_activations"]["dynamic"] is False:
        name, options = observer_name(activations)
        group["input_activations"] |= {"observer": name, "observer_kwargs": options}
    return {"config_groups": {"group_0": group}, "ignore": list(scheme.ignore)}


def _unknown_option(name: str, method: str, known: Iterable[str]) -> Fault:
    near = get_close_matches(name, known, n=1, cutoff=0.5)
    fix = f"did you mean {near[0]}?" if near else f"it has {', '.join(sorted(known))}"
    return Fault(where="method_options", value=name, rule=f"is no option of {method}", fix=fix)


def _refused_value(detail: Any, options: Mapping[str, Any]) -> Fault:
    name = str(detail["loc"][0]) if detail["loc"] else "method_options"
    return Fault(where=f"method_options.{name}", value=options.get(name), rule=str(detail["msg"]))
