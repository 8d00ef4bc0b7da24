"""llm-compressor's modifiers for a scheme and a method, each followed by our progress and journal (seen with 0.14.0.1).

The `independent` pipeline gives every modifier a pass of its own over the model, and it must: in one shared pass,
Hessians and ranges of activations would be taken before SmoothQuant or AWQ has changed the weights. A modifier of ours
would get a pass of its own as well; therefore a subclass of each modifier hears the events of its pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import accumulate
from typing import Any, Literal

from ...ds_configs.quantization.config_json import config_group
from ...ds_configs.quantization.scheme import QuantizationScheme
from ...ds_configs.specs.errors import Fault, UsageError
from .journal import Journal, JournalEntry
from .progress import Steps
from .range_observers import observer_name

EngineMethod = Literal["rtn", "gptq", "awq", "smoothquant", "smoothquant-gptq"]

_OF_THE_SCHEME = ("config_groups", "targets", "ignore", "scheme", "kv_cache_scheme")
_OF_TRAINING = ("index", "group", "start", "end", "update")
_WITHOUT_EFFECT = ("requires_calibration_data", "num_calibration_steps", "calibration_function")
"""Set by the modifier itself, or accepted and never read (`modifiers/transform/smoothquant/base.py`)."""
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


@dataclass(kw_only=True)
class ModifierPass:
    """One modifier's pass over the model: what it is told to, and what it need not do again."""

    phase: int
    """Which pass it is, from 0."""
    steps: Steps
    """Numbers and reports what happens."""
    journal: Journal | None
    """Where finished parts are kept; `None` keeps nothing."""
    finished: tuple[JournalEntry, ...] = ()
    """Parts of this pass that the journal has."""
    before: tuple[JournalEntry, ...] = ()
    """Parts of earlier passes, which this run does not make again."""
    part: int = 0
    """Which part comes next."""
    names: dict[Any, str] = field(default_factory=dict)
    """Names of all modules, while the pass lasts."""

    def restored(self, entries: Sequence[JournalEntry], model: Any) -> set[str]:
        """Copy parts from the journal and return the names of the modules that they hold."""
        names: set[str] = set()
        for entry in entries:
            assert self.journal is not None
            names.update(self.journal.restore(entry, model))
        return names


class _FollowedModifier:
    """Hears the events of one pass; stands before a modifier class in a subclass of both."""

    def follow(self, own: ModifierPass) -> None:
        """Attach what hears of the pass."""
        self._own_pass = own

    def on_initialize(self, state: Any, **kwargs: Any) -> bool:
        """Take over earlier passes before anything looks at the weights."""
        own = self._own_pass
        own.restored(own.before, state.model)
        for entry in own.before:
            own.steps.tell(entry.phase, entry.part, "restored")
        return bool(super().on_initialize(state, **kwargs))  # type: ignore[misc]

    def on_calibration_start(self, state: Any, event: Any, **kwargs: Any) -> None:
        """Take over finished parts, and let nothing listen to them."""
        super().on_calibration_start(state, event, **kwargs)  # type: ignore[misc]
        own = self._own_pass
        own.names = {module: name for name, module in state.model.named_modules()}
        _stop_listening(self, state.model, own.restored(own.finished, state.model))
        if not own.finished:
            own.steps.tell(own.phase, 0, "calibrating")

    def on_sequential_epoch_end(self, state: Any, event: Any, modules: Sequence[Any], **kwargs: Any) -> None:
        """Let the modifier do its work on a part and keep the result."""
        own = self._own_pass
        part, own.part = own.part, own.part + 1
        if part < len(own.finished):
            own.steps.tell(own.phase, part, "restored")
            return
        named = tuple(own.names[module] for module in modules if hasattr(module, "quantization_scheme"))
        own.steps.tell(own.phase, part, "quantizing", named)
        super().on_sequential_epoch_end(state, event, modules=modules, **kwargs)  # type: ignore[misc]
        if own.journal is not None and self.requires_calibration_data:  # type: ignore[attr-defined]
            tensors = changed_tensors(self, {own.names[module]: module for module in modules}, state.model)
            own.journal.record(phase=own.phase, part=part, tensors=tensors)
        own.steps.tell(own.phase, part, "propagating", named)

    def on_calibration_end(self, state: Any, event: Any, **kwargs: Any) -> None:
        """Let go of the modules."""
        super().on_calibration_end(state, event, **kwargs)  # type: ignore[misc]
        self._own_pass.names = {}


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
    quantized: Counter[str] = Counter()
    finished: Counter[str] = Counter()
    for name, module in model.named_modules():
        if hasattr(module, "quantization_scheme"):
            around = ["", *accumulate(name.split("."), "{}.{}".format)]
            quantized.update(around)
            finished.update(around if name in restored else ())
    dictionaries = set()
    for name, module in model.named_modules():
        if name in restored or 0 < quantized[name] == finished[name]:
            dictionaries |= {id(module._forward_hooks), id(module._forward_pre_hooks)}
    handles = {handle for handle in modifier._hooks if id(handle.hooks_dict_ref()) in dictionaries}
    modifier.remove_hooks(handles)


def _followed(kind: type[Any]) -> type[Any]:
    from pydantic import PrivateAttr

    namespace = {"__module__": kind.__module__, "_own_pass": PrivateAttr(default=None)}
    return type(kind.__name__, (_FollowedModifier, kind), namespace)


def _is_option(name: str) -> bool:
    return name not in (*_OF_THE_SCHEME, *_OF_TRAINING, *_WITHOUT_EFFECT) and not name.endswith("_")


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
