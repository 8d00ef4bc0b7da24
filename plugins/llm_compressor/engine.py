"""Run llm-compressor's `oneshot` on a model in memory and on tokenized samples (observed with 0.14.0.1)."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ...ds_configs.quantization.layers import config_group
from ...ds_configs.quantization.scheme import KNOWN_RANGES, ActivationQuantization, QuantizationScheme, RangeMethod
from ...ds_configs.specs.errors import ConfigError, RefusedInputError, UsageError
from ..activation_ranges import ActivationHistogram, activation_range
from ..compressed_tensors.layout import state_dequantize
from ..safetensors.writing import rename_tensors
from ..transformers.quantized_model import EXPERT_WEIGHT, LayerProgress, QuantizationSource, ReportProgress
from ..transformers.sound_model import check_config, loading_errors, nonfinite_weights, refused_by_name
from .journal import Journal, JournalEntry, run_identity
from .quiet import (
    all_fixes,
    import_upstream,
    kept_conversion_mappings,
    named_by_directory,
    quiet_upstream,
    torchvision_is_not_needed,
    without_hub_name,
)

if TYPE_CHECKING:
    from torch.utils.data import DataLoader
    from transformers import PreTrainedModel

_PREFIX = "shardwright_"


def observer_name(activations: ActivationQuantization) -> tuple[str, dict[str, Any]]:
    """Register the observers, and return the name and the `observer_kwargs` for a static range.

    MinMax is llm-compressor's own `static_minmax`; its default, `minmax`, is a moving average over batches.
    """
    if activations.range_method == "minmax":
        return "static_minmax", {}
    register_range_observers()
    options = {"percentile": activations.percentile} if activations.range_method == "percentile" else {}
    return f"{_PREFIX}{activations.range_method}", options


@functools.cache
def register_range_observers() -> tuple[str, ...]:
    """Register the observers with llm-compressor, once, and return their names."""
    methods = [method for method in KNOWN_RANGES if method != "minmax"]
    for method in methods:
        _register(method)
    return tuple(f"{_PREFIX}{method}" for method in methods)


def forget_range_observers(model: PreTrainedModel) -> None:
    """Replace our observers' names in a model's schemes, so that the saved config needs no Shardwright.

    compressed-tensors 0.19.0 accepts any text as `observer` and does not look it up at loading, but llm-compressor
    raises `KeyError` for an unknown one, for example when such a checkpoint is quantized again.
    """
    for module in model.modules():
        scheme = getattr(module, "quantization_scheme", None)
        arguments = getattr(scheme, "input_activations", None)
        if arguments is not None and str(arguments.observer or "").startswith(_PREFIX):
            arguments.observer = "static_minmax"
            arguments.observer_kwargs = {}


def quantization_of(arguments: Any, method: RangeMethod) -> ActivationQuantization:
    """Convert compressed-tensors' `QuantizationArgs` of an activation.

    Raises:
        ValueError: the arguments do not describe one static range per tensor.
    """
    strategy = str(getattr(arguments.strategy, "value", arguments.strategy))
    if strategy != "tensor" or arguments.dynamic:
        kind = "dynamic" if arguments.dynamic else strategy
        raise ValueError(f"range method {method} finds one static range per tensor; the scheme has {kind} ranges")
    plain = ActivationQuantization(
        bits=arguments.num_bits,
        number_type="float" if getattr(arguments.type, "value", arguments.type) == "float" else "int",
        symmetric=arguments.symmetric,
        dynamic=False,
        range_method=method,
    )
    percentile = (arguments.observer_kwargs or {}).get("percentile")
    return plain if percentile is None else replace(plain, percentile=float(percentile))


def _register(method: RangeMethod) -> None:
    import torch
    from llmcompressor.observers import Observer

    class HistogramObserver(Observer):
        """Collects a histogram, and finds the range when llm-compressor requests the scale."""

        _stats_attrs = ["histogram"]  # noqa: RUF012

        def __init__(self, base_name: str, args: Any, **options: object) -> None:
            super().__init__(base_name, args, **options)
            self.quantization = quantization_of(self.args, method)

        def update_statistics_from_observed(self, observed: Any) -> None:
            if not self.has_statistics:
                self.histogram = ActivationHistogram()
            self.histogram.add(observed)
            self.device = observed.device

        def get_qparams(self) -> Any:
            low, high = activation_range(self.histogram, self.quantization)
            self.min_vals = torch.tensor([low], dtype=torch.float32, device=self.device)
            self.max_vals = torch.tensor([high], dtype=torch.float32, device=self.device)
            return super().get_qparams()

        def sync_activation_stats(self) -> list[Any]:
            raise RuntimeError(f"range method {method} supports one process; start it without torchrun")

    Observer.register_value(HistogramObserver, name=f"{_PREFIX}{method}")


def count_parts(model: PreTrainedModel) -> int:
    """Return the number of parts of the sequential pipeline: one for each decoder layer, and the head."""
    from llmcompressor.utils.pytorch.module import infer_sequential_targets

    wanted = infer_sequential_targets(model, None)
    targets = {wanted} if isinstance(wanted, str) else set(wanted)
    return sum(type(module).__name__ in targets for module in model.modules()) + 1


class Steps:
    """Numbers the steps of all phases and reports them."""

    def __init__(self, parts: tuple[int, ...], report: ReportProgress) -> None:
        """`parts[k]` is the number of parts of phase k."""
        self._parts = parts
        self._report = report

    def tell(self, phase: int, part: int, stage: str, names: tuple[str, ...] = ()) -> None:
        """Report one step of one part in one phase."""
        index, count = sum(self._parts[:phase]) + part, sum(self._parts)
        self._report(LayerProgress(index=index, count=max(count, index + 1), stage=stage, names=names))

    def done(self) -> None:
        """Report the end."""
        count = sum(self._parts)
        self._report(LayerProgress(index=count - 1, count=count, stage="done"))


EngineMethod = Literal["rtn", "gptq", "awq", "smoothquant", "smoothquant-gptq"]

_OF_THE_SCHEME = ("config_groups", "targets", "ignore", "scheme", "kv_cache_scheme")
_OF_TRAINING = ("index", "group", "start", "end", "update")
_WITHOUT_EFFECT = ("requires_calibration_data", "num_calibration_steps", "calibration_function")
"""Set by the modifier itself, or accepted and not used (`modifiers/transform/smoothquant/base.py`)."""
_QUANTIZATION_SUFFIXES = ("_scale", "_zero_point", "_g_idx")


def modifier_kinds(method: EngineMethod) -> tuple[type[Any], ...]:
    """Return the modifier classes of a method, in the order in which they run."""
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
    """Return the modifiers of a method, with progress and journal hooks.

    Raises:
        UsageError: options that the method's modifiers do not have, or whose values they reject; lists all.
    """
    from pydantic import PrivateAttr, ValidationError

    kinds = modifier_kinds(method)
    excluded = (*_OF_THE_SCHEME, *_OF_TRAINING, *_WITHOUT_EFFECT)
    known = {
        name: kind for kind in kinds for name in kind.model_fields if name not in excluded and not name.endswith("_")
    }
    errors = []
    for name in options:
        if name not in known:
            near = get_close_matches(name, known, n=1, cutoff=0.5)
            fix = f"did you mean {near[0]}?" if near else f"it has {', '.join(sorted(known))}"
            rule = f"is not an option of {method}"
            errors.append(ConfigError(where="method_options", value=name, rule=rule, fix=fix))
    modifiers = []
    for kind in kinds:
        own = {name: value for name, value in options.items() if known.get(name) is kind}
        namespace = {"__module__": kind.__module__, "_own_pass": PrivateAttr(default=None)}
        followed: Any = type(kind.__name__, (_FollowedModifier, kind), namespace)
        try:
            modifiers.append(followed(**_scheme_fields(kind, scheme), **own))
        except ValidationError as error:
            for detail in error.errors():
                name = str(detail["loc"][0]) if detail["loc"] else "method_options"
                where, rule = f"method_options.{name}", str(detail["msg"])
                errors.append(ConfigError(where=where, value=own.get(name), rule=rule))
    if errors:
        raise UsageError(errors)
    return modifiers


@dataclass(kw_only=True)
class ModifierPass:
    """One modifier's pass over the model, with the parts that the journal already has."""

    phase: int
    """Index of the pass, from 0."""
    steps: Steps
    """Counts and reports steps."""
    journal: Journal | None
    """Stores finished parts; `None` stores nothing."""
    finished: tuple[JournalEntry, ...] = ()
    """Parts of this pass in the journal."""
    before: tuple[JournalEntry, ...] = ()
    """Parts of earlier passes, which this run skips."""
    part: int = 0
    """Index of the next part."""
    names: dict[Any, str] = field(default_factory=dict)
    """Names of all modules, during the pass."""

    def restored(self, entries: Sequence[JournalEntry], model: PreTrainedModel) -> set[str]:
        """Copy parts from the journal and return the names of their modules."""
        names: set[str] = set()
        for entry in entries:
            assert self.journal is not None
            names.update(self.journal.restore(entry, model))
        return names


class _FollowedModifier:
    """Mixin placed before a modifier class: reports progress, and skips parts that the journal has."""

    def follow(self, own: ModifierPass) -> None:
        """Set the pass of this modifier."""
        self._own_pass = own

    def on_initialize(self, state: Any, **kwargs: object) -> bool:
        """Restore the parts of earlier passes before the modifier reads weights."""
        own = self._own_pass
        own.restored(own.before, state.model)
        for entry in own.before:
            own.steps.tell(entry.phase, entry.part, "restored")
        return bool(super().on_initialize(state, **kwargs))  # type: ignore[misc]

    def on_calibration_start(self, state: Any, event: Any, **kwargs: object) -> None:
        """Restore finished parts, and remove the hooks that would calibrate them."""
        super().on_calibration_start(state, event, **kwargs)  # type: ignore[misc]
        own = self._own_pass
        own.names = {module: name for name, module in state.model.named_modules()}
        if restored := own.restored(own.finished, state.model):
            _remove_calibration_hooks(self, state.model, restored)
        if not own.finished:
            own.steps.tell(own.phase, 0, "calibrating")

    def on_sequential_epoch_end(self, state: Any, event: Any, modules: Sequence[Any], **kwargs: object) -> None:
        """Run the modifier on a part and store the result in the journal."""
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

    def on_calibration_end(self, state: Any, event: Any, **kwargs: object) -> None:
        """Drop the references to modules."""
        super().on_calibration_end(state, event, **kwargs)  # type: ignore[misc]
        self._own_pass.names = {}


def changed_tensors(modifier: Any, modules: Mapping[str, Any], model: PreTrainedModel) -> dict[str, Any]:
    """Return the tensors of a part that a modifier may have changed.

    Rounding to nearest adds scales and does not change weights. GPTQ writes both, SmoothQuant and AWQ rescale weights
    and biases. Embeddings and the head, which are large and belong to the first and the last part, are omitted unless
    they are quantized.
    """
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier

    kept_dense = {id(model.get_input_embeddings()), id(model.get_output_embeddings())}
    tensors = {}
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
                tensors[f"{module_name}.{name}"] = getattr(module, name)
    return tensors


def _remove_calibration_hooks(modifier: Any, model: PreTrainedModel, restored: set[str]) -> None:
    """Remove a modifier's hooks on restored modules, and on modules that contain only restored ones."""
    quantized: Counter[str] = Counter()
    finished: Counter[str] = Counter()
    for name, module in model.named_modules():
        if hasattr(module, "quantization_scheme"):
            parents = ["", *accumulate(name.split("."), "{}.{}".format)]
            quantized.update(parents)
            finished.update(parents if name in restored else ())
    dictionaries = set()
    for name, module in model.named_modules():
        if name in restored or 0 < quantized[name] == finished[name]:
            dictionaries |= {id(module._forward_hooks), id(module._forward_pre_hooks)}
    handles = {handle for handle in modifier._hooks if id(handle.hooks_dict_ref()) in dictionaries}
    modifier.remove_hooks(handles)


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


_WRITTEN_EXPERT = re.compile(r"(.+\.experts\.\d+)\.(gate_proj|down_proj|up_proj)\.(\w+)")
_MIXTRAL_NAMES = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


def restore_expert_names(directory: Path, stored: Collection[str]) -> int:
    """Restore the original names of experts in a written checkpoint, and return the number of renamed tensors.

    llmcompressor 0.14.0.1 writes the experts of Mixtral as `gate_proj`, `down_proj` and `up_proj`. Transformers 5.17.0
    and vLLM expect `w1`, `w2` and `w3`; Transformers only warns and runs with random experts.

    Args:
        directory: The checkpoint, changed in place.
        stored: Names of the tensors of the original checkpoint.
    """
    endings = {match[1].rpartition(".")[2] for match in map(EXPERT_WEIGHT.fullmatch, stored) if match}
    if endings != set(_MIXTRAL_NAMES.values()):
        return 0

    def original_name(name: str) -> str:
        match = _WRITTEN_EXPERT.fullmatch(name)
        return name if match is None else f"{match[1]}.{_MIXTRAL_NAMES[match[2]]}.{match[3]}"

    return rename_tensors(directory, original_name)


@dataclass(frozen=True, kw_only=True)
class EngineRequest:
    """One run of llm-compressor."""

    model: Any
    """Transformers model with its full weights; changed in place, also by a run that fails."""
    tokenizer: Any
    """Required by `oneshot`, but not used for tokenized samples; may be `None`."""
    scheme: QuantizationScheme
    """Targets and formats; stored as compressed-tensors."""
    method: EngineMethod
    """Method that finds codes and scales."""
    calibration: Sequence[Mapping[str, Sequence[int]]] = ()
    """Samples with `input_ids`; may be empty for RTN without static activations."""
    batch_size: int = 1
    """Samples per forward pass; samples of one batch have equal length."""
    method_options: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the method's modifiers."""
    journal: Path | None = None
    """Directory that stores finished layers, to resume an interrupted run; `None` stores none."""
    run_key: str = ""
    """Identifies model, text and settings of the run, to distinguish the journals of other runs."""
    seed: int = 0
    """Random seed."""
    stored_names: Collection[str] = ()
    """Tensor names of the original checkpoint, to restore the names of experts."""


@dataclass(kw_only=True)
class CompressedModel:
    """A model whose forward pass rounds like its checkpoint."""

    model: Any
    """The same object as in the request."""
    quantized_layers: tuple[str, ...]
    """Names of the linear layers that were quantized."""
    stored_names: Collection[str] = ()
    """As in the request."""

    def save(self, directory: Path) -> None:
        """Compress the model in memory and write config and weights; can be called once."""
        from llmcompressor.transformers.compression.compressed_tensors_utils import modify_save_pretrained

        with quiet_upstream(), all_fixes(), without_hub_name(self.model):
            modify_save_pretrained(self.model)
            try:
                self.model.save_pretrained(str(directory), save_compressed=True)
            finally:
                vars(self.model).pop("save_pretrained", None)
        # llm-compressor adds this file, which contains paths of this machine.
        (directory / "recipe.yaml").unlink(missing_ok=True)
        restore_expert_names(directory, self.stored_names)
        state_dequantize(directory)


def quantize_with_llm_compressor(request: EngineRequest, report: ReportProgress) -> CompressedModel:
    """Quantize a model in memory, one decoder layer after another.

    Layers that an interrupted run finished are restored from the journal; data only pass through them.

    Raises:
        UsageError: options that the method does not have, missing samples, or the journal of another run.
    """
    import torch

    import_upstream()
    from llmcompressor import oneshot
    from llmcompressor.core import reset_session

    modifiers = build_modifiers(request.scheme, request.method, request.method_options)
    needs_samples = any(modifier.requires_calibration_data for modifier in modifiers)
    if needs_samples and not request.calibration:
        rule = f"{request.method} with {request.scheme.name} needs text for calibration"
        raise UsageError(ConfigError(where="dataset", rule=rule, fix="pass --dataset, such as python-help"))
    steps = Steps(tuple(count_parts(request.model) if m.requires_calibration_data else 1 for m in modifiers), report)
    remaining = _follow(modifiers, request, steps)
    with quiet_upstream(), all_fixes(), named_by_directory(request.model), torch.random.fork_rng():
        torch.manual_seed(request.seed)
        reset_session()
        try:
            oneshot(
                model=request.model,
                processor=request.tokenizer or _NoTokenizer(),
                recipe=remaining,
                dataset=calibration_loader(request.calibration, request.batch_size) if needs_samples else None,
            )
            forget_range_observers(request.model)
        finally:
            for modifier in remaining:
                modifier.remove_hooks()
            reset_session()
            vars(request.model).pop("save_pretrained", None)
    request.model.eval()
    steps.done()
    names = tuple(
        name
        for name, module in request.model.named_modules()
        if getattr(getattr(module, "quantization_scheme", None), "weights", None) is not None
        and getattr(module, "weight", None) is not None
    )
    return CompressedModel(model=request.model, quantized_layers=names, stored_names=request.stored_names)


class _NoTokenizer:
    """Placeholder: `oneshot` 0.14.0.1 requires a processor for any data, or loads one by the model's name."""


def _follow(modifiers: Sequence[Any], request: EngineRequest, steps: Steps) -> list[Any]:
    """Attach progress and journal to the modifiers, and return those whose pass is not finished."""
    journal = None
    if request.journal is not None:
        identity = run_identity(
            run_key=request.run_key,
            scheme=request.scheme,
            method=request.method,
            method_options=request.method_options,
            calibration=request.calibration,
            batch_size=request.batch_size,
            seed=request.seed,
        )
        journal = Journal(request.journal, identity)
    current = max((entry.phase for entry in journal.entries), default=0) if journal is not None else 0
    parts = count_parts(request.model)
    if journal is not None and len(journal.of_phase(current)) >= parts and current + 1 < len(modifiers):
        current += 1
    remaining = list(modifiers[current:])
    for phase, modifier in enumerate(remaining, start=current):
        entries = () if journal is None else journal.entries
        modifier.follow(
            ModifierPass(
                phase=phase,
                steps=steps,
                journal=journal,
                finished=tuple(entry for entry in entries if entry.phase == phase),
                before=tuple(entry for entry in entries if entry.phase < phase) if phase == current else (),
            )
        )
    return remaining


def calibration_loader(calibration: Sequence[Mapping[str, Sequence[int]]], batch_size: int) -> DataLoader:
    """Return a DataLoader over batches of equal length, because padding would count as text in Hessians and ranges."""
    import torch
    from torch.utils.data import DataLoader

    by_length: dict[int, list[Any]] = {}
    for sample in calibration:
        by_length.setdefault(len(sample["input_ids"]), []).append(torch.tensor(list(sample["input_ids"])))
    batches = []
    for rows in by_length.values():
        for start in range(0, len(rows), batch_size):
            ids_BS = torch.stack(rows[start : start + batch_size])
            batches.append({"input_ids": ids_BS, "attention_mask": torch.ones_like(ids_BS)})
    return DataLoader(batches, batch_size=None)


def load_for_quantization(source: QuantizationSource) -> Any:
    """Load the weights and return the model, with the experts of mixtures as linear layers.

    Raises:
        RefusedInputError: tensors are missing, of another shape, or hold NaN or infinity.
        ShardwrightError: Transformers cannot load it.
    """
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"dtype": "auto", "trust_remote_code": False, "use_safetensors": True}
    directory, info = str(source.directory), {}
    check_config(directory)
    with refused_by_name(source.name):
        if any(layer.is_expert for layer in source.layers):
            from llmcompressor.utils import load_context

            # llmcompressor 0.14.0.1 does not support `output_loading_info` (AttributeError on the pair).
            with torchvision_is_not_needed(), kept_conversion_mappings(), load_context(AutoModelForCausalLM):
                model = AutoModelForCausalLM.from_pretrained(directory, **options)
        else:
            options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
            model, info = AutoModelForCausalLM.from_pretrained(directory, **options)
    fix = "train it again, or download a valid copy"
    errors = loading_errors(info, source.name)
    errors += [
        ConfigError(where=source.name, value=name, rule="holds NaN or infinity", fix=fix)
        for name in nonfinite_weights(model)
    ]
    if errors:
        raise RefusedInputError(errors)
    return model.eval()
