"""Run llm-compressor's `oneshot` on a model in memory and on tokenized samples (observed with 0.14.0.1)."""

from __future__ import annotations

import functools
import logging
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from ..ds_configs.quantization.layers import config_group
from ..ds_configs.quantization.scheme import ActivationQuantization, QuantizationScheme
from ..ds_configs.specs.errors import ConfigError, RefusedInputError, UsageError
from ..ds_configs.specs.synonyms import suggested
from . import patches
from .activation_ranges import ActivationHistogram, activation_range
from .compressed_tensors import CompressedModel
from .launching.messages import log_progress
from .transformers.loading import auto_class, load_causal_lm, nonfinite_errors, refused_by_name
from .transformers.meta_model import QuantizationSource

if TYPE_CHECKING:
    import torch
    from torch.utils.data import DataLoader
    from transformers import PreTrainedModel

_LOG = logging.getLogger(__name__)
_PACKAGES = ("llmcompressor", "compressed_tensors")
_EXPECTED = ("No accelerator available", "Disabling tokenizer parallelism", "Exception during finalizing modifier")
"""Warnings about what always occurs here, and about a modifier of an interrupted run."""


@functools.cache
def import_upstream() -> None:
    """Import llm-compressor once, with its warnings forwarded to `logging`.

    llmcompressor 0.14.0.1 `logger.py` removes every handler of loguru, including the application's, and prints INFO
    messages to stdout, unless its log is disabled.
    """
    from accelerate.utils import patch_environment

    with patch_environment(LLM_COMPRESSOR_LOG_DISABLED="true"):
        import llmcompressor.modifiers.gptq
        import llmcompressor.modifiers.quantization
        import llmcompressor.modifiers.transform.awq
        import llmcompressor.modifiers.transform.smoothquant  # noqa: F401  (they warn if there is no GPU)
    from loguru import logger

    def forward(message: Any) -> None:
        record = message.record
        # llm-compressor's level METRIC is above WARNING and reports the duration of each layer.
        if record["level"].name != "METRIC" and not record["message"].startswith(_EXPECTED):
            _LOG.log(record["level"].no, "%s: %s", record["name"].partition(".")[0], record["message"])

    patches.assign("enabled-log", False)
    logger.enable("llmcompressor")
    # Its own level, which it defines together with its handlers; GPTQ fails without it. Both fail if they are done.
    with suppress(ValueError):
        logger.level("METRIC", no=38)
    # loguru's default handler, which prints all messages to stderr.
    with suppress(ValueError):
        logger.remove(0)
    logger.add(forward, level="WARNING", filter=lambda record: (record["name"] or "").startswith(_PACKAGES))
    # torch 2.13 warns about `is_fx_tracing`, which Transformers calls, when a model is traced.
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)


@contextmanager
def without_bars() -> Iterator[None]:
    """Disable the progress bars that libraries draw with tqdm."""

    def disabled(original: Callable[..., None]) -> Callable[..., None]:
        return lambda bar, *arguments, **named: original(bar, *arguments, **(named | {"disable": True}))

    with patches.applied("no-bars", disabled):
        yield


@contextmanager
def all_fixes() -> Iterator[None]:
    """Let AWQ run without CUDA, and without the attention scores of all samples.

    llmcompressor 0.14.0.1 (`modifiers/transform/awq/base.py`): `_apply_smoothing` pins memory on every host.
    `_run_samples` keeps all outputs of a module until all samples have run, and eager attention returns its scores: 512
    samples of 2048 tokens on Llama-3.1-8B are 137 GB. Only the first output is used.
    """
    import torch
    from llmcompressor.core import active_session

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def run_samples(modifier: Any, module: torch.nn.Module) -> list[Any]:
        cache = modifier._parent_args_cache[module]
        outputs = []
        for batch in cache.iter_prefetch() if active_session().state.sequential_prefetch else cache:
            output = module(**batch)
            outputs.append(output[0] if isinstance(output, tuple) else output)
        return outputs

    with ExitStack() as stack:
        stack.enter_context(patches.applied("dropped-attention-scores", lambda _: run_samples))
        if not torch.cuda.is_available():
            stack.enter_context(patches.applied("pageable-memory", lambda _: lambda *_, **__: None))
        yield


@contextmanager
def torchvision_is_not_needed() -> Iterator[None]:
    """Load mixtures of experts without torchvision.

    llmcompressor 0.14.0.1 with transformers 5.17.0: linearising experts registers patches, and
    `transformers/monkey_patching.py` `apply_patches` then calls `dir()` on every loaded module of Transformers. Aliases
    of renamed image modules import these, which fails with `ModuleNotFoundError: torchvision`. The aliases are removed
    from `sys.modules` inside the block.
    """
    hidden: dict[str, ModuleType] = {}
    for name, module in list(sys.modules.items()):
        if name.startswith("transformers.") and "__dir__" in vars(module):
            try:
                dir(module)
            except ImportError:
                hidden[name] = sys.modules.pop(name)
    try:
        yield
    finally:
        sys.modules.update(hidden)


@contextmanager
def kept_conversion_mappings() -> Iterator[None]:
    """Restore Transformers' conversion mappings, so that other mixtures of this process load their weights.

    llmcompressor 0.14.0.1 (`modeling/moe/linearize.py` `load_quantizable_moe`) registers how one model's experts are
    written for all models of its type. A later `from_pretrained` of that type in the same process renames no expert,
    finds none, and runs with random ones after a warning. The model keeps its own copy of the mapping for saving.
    """
    from transformers import conversion_mapping

    # Builds the table, if nothing was loaded yet.
    conversion_mapping.get_checkpoint_conversion_mapping("mixtral")
    mappings, registered = (
        conversion_mapping._checkpoint_conversion_mapping_cache,
        conversion_mapping.USER_REGISTERED_MAPPINGS,
    )
    saved_mappings, saved_registered = dict(mappings), set(registered)
    try:
        yield
    finally:
        for current, saved in ((mappings, saved_mappings), (registered, saved_registered)):
            current.clear()
            current.update(saved)


_OBSERVER = "shardwright_searched"
VisitLayer = Callable[[str, Any, Any], Any]
"""Takes a layer's name, weight and mean of `x xᵀ` (`None` for a layer without input), and returns its new weight."""


@functools.cache
def register_range_observer() -> str:
    """Register the observer of searched ranges with llm-compressor, once, and return its name."""
    import torch
    from llmcompressor.observers import Observer

    class HistogramObserver(Observer):
        """Collects a histogram, and finds the range when llm-compressor requests the scale."""

        _stats_attrs = ["histogram"]  # noqa: RUF012

        def update_statistics_from_observed(self, observed: Any) -> None:
            if not self.has_statistics:
                self.histogram = ActivationHistogram()
            self.histogram.add(observed)
            self.device = observed.device

        def get_qparams(self) -> Any:
            quantization = ActivationQuantization(
                bits=self.args.num_bits, symmetric=self.args.symmetric, dynamic=False, **self.args.observer_kwargs
            )
            low, high = activation_range(self.histogram, quantization)
            self.min_vals = torch.tensor([low], dtype=torch.float32, device=self.device)
            self.max_vals = torch.tensor([high], dtype=torch.float32, device=self.device)
            return super().get_qparams()

        def sync_activation_stats(self) -> list[Any]:
            raise RuntimeError("searched ranges support one process; start it without torchrun")

    Observer.register_value(HistogramObserver, name=_OBSERVER)
    return _OBSERVER


def forget_range_observer(model: PreTrainedModel) -> None:
    """Replace our observer's name in a model's schemes, so that the saved config needs no Shardwright.

    compressed-tensors 0.19.0 accepts any text as `observer` and does not look it up at loading, but llm-compressor
    raises `KeyError` for an unknown one, for example when such a checkpoint is quantized again.
    """
    for module in model.modules():
        scheme = getattr(module, "quantization_scheme", None)
        arguments = getattr(scheme, "input_activations", None)
        if arguments is not None and arguments.observer == _OBSERVER:
            arguments.observer = "static_minmax"
            arguments.observer_kwargs = {}


class Steps:
    """Counts and logs the steps of modifiers, which run one after another over the parts of the model."""

    def __init__(self, model: PreTrainedModel, passes: Sequence[bool]) -> None:
        """`passes[k]` is whether modifier k reads data, so that it runs on one decoder layer after another."""
        from llmcompressor.utils.pytorch.module import infer_sequential_targets

        wanted = infer_sequential_targets(model, None)
        targets = {wanted} if isinstance(wanted, str) else set(wanted)
        # The decoder layers, and the head.
        parts = sum(type(module).__name__ in targets for module in model.modules()) + 1
        self._count, self._done = sum(parts if reads else 1 for reads in passes), 0

    def report(self, stage: str) -> None:
        """Log a stage of the current step: `calibrating` or `quantizing`."""
        log_progress(stage, self._done + 1, max(self._count, self._done + 1))

    def finish(self) -> None:
        """Go on to the next step."""
        self._done += 1


EngineMethod = Literal["rtn", "gptq", "awq", "smoothquant", "smoothquant-gptq"]

_OF_THE_SCHEME = ("config_groups", "targets", "ignore", "scheme", "kv_cache_scheme")
_OF_TRAINING = ("index", "group", "start", "end", "update")
_WITHOUT_EFFECT = ("requires_calibration_data", "num_calibration_steps", "calibration_function")
"""Set by the modifier itself, or accepted and not used (`modifiers/transform/smoothquant/base.py`)."""


def build_modifiers(scheme: QuantizationScheme, method: EngineMethod, options: Mapping[str, Any]) -> list[Any]:
    """Return the modifiers of a method, which log their progress.

    Raises:
        UsageError: options that the method's modifiers do not have, or whose values they reject; lists all.
    """
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.quantization.quantization import QuantizationMixin
    from llmcompressor.modifiers.transform.awq import AWQModifier
    from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier
    from pydantic import PrivateAttr, ValidationError

    # In the order in which they run.
    classes: Mapping[str, tuple[type[Any], ...]] = {
        "rtn": (QuantizationModifier,),
        "gptq": (GPTQModifier,),
        "awq": (AWQModifier, QuantizationModifier),
        "smoothquant": (SmoothQuantModifier, QuantizationModifier),
        "smoothquant-gptq": (SmoothQuantModifier, GPTQModifier),
    }
    kinds = classes[method]
    excluded = {*_OF_THE_SCHEME, *_OF_TRAINING, *_WITHOUT_EFFECT}
    known = {
        name: kind for kind in kinds for name in kind.model_fields if name not in excluded and not name.endswith("_")
    }
    errors = []
    for name in options:
        if name not in known:
            fix = suggested(name, known) or f"it has {', '.join(sorted(known))}"
            rule = f"is not an option of {method}"
            errors.append(ConfigError(where="method_options", value=name, rule=rule, fix=fix))
    group, activations = config_group(scheme), scheme.activations
    if activations is not None and group["input_activations"]["dynamic"] is False:
        # llm-compressor's default, `minmax`, is a moving average over batches.
        searched = {"range_method": activations.range_method, "percentile": activations.percentile}
        group["input_activations"] |= (
            {"observer": "static_minmax", "observer_kwargs": {}}
            if activations.range_method == "minmax"
            else {"observer": register_range_observer(), "observer_kwargs": searched}
        )
    of_scheme: dict[str, Any] = {"config_groups": {"group_0": group}, "ignore": list(scheme.ignore)}
    modifiers = []
    for kind in kinds:
        own = {name: value for name, value in options.items() if known.get(name) is kind}
        namespace = {"__module__": kind.__module__, "_steps": PrivateAttr(default=None)}
        reporting: Any = type(kind.__name__, (_ReportingModifier, kind), namespace)
        try:
            modifiers.append(reporting(**(of_scheme if issubclass(kind, QuantizationMixin) else {}), **own))
        except ValidationError as error:
            for detail in error.errors():
                name = str(detail["loc"][0]) if detail["loc"] else "method_options"
                where, rule = f"method_options.{name}", str(detail["msg"])
                errors.append(ConfigError(where=where, value=own.get(name), rule=rule))
    if errors:
        raise UsageError(errors)
    return modifiers


class _ReportingModifier:
    """Mixin placed before a modifier class: logs its progress by `_steps`."""

    _steps: Any

    def on_calibration_start(self, state: Any, event: Any, **kwargs: object) -> None:
        super().on_calibration_start(state, event, **kwargs)  # type: ignore[misc]
        self._steps.report("calibrating")

    def on_sequential_epoch_end(self, state: Any, event: Any, modules: Sequence[Any], **kwargs: object) -> None:
        self._steps.report("quantizing")
        super().on_sequential_epoch_end(state, event, modules=modules, **kwargs)  # type: ignore[misc]
        self._steps.finish()


def quantize_with_llm_compressor(
    model: Any,
    scheme: QuantizationScheme,
    method: EngineMethod,
    *,
    calibration: Sequence[Mapping[str, Sequence[int]]] = (),
    batch_size: int = 1,
    method_options: Mapping[str, Any] | None = None,
    seed: int = 0,
    stored_names: Collection[str] = (),
) -> CompressedModel:
    """Quantize a model in memory, one decoder layer after another; also a run that fails changes it.

    RTN without static activations needs no `calibration`. The samples of one batch have equal length. `stored_names`
    are the tensor names of the original checkpoint, to restore the names of experts.

    Raises:
        UsageError: options that the method does not have, missing samples, or layers that it does not support.
    """
    import torch

    import_upstream()
    modifiers = build_modifiers(scheme, method, method_options or {})
    reads = [modifier.requires_calibration_data for modifier in modifiers]
    if any(reads) and not calibration:
        rule = f"{method} with {scheme.name} needs text for calibration"
        raise UsageError(ConfigError(where="dataset", rule=rule, fix="pass --dataset, such as python-help"))
    steps = Steps(model, reads)
    for modifier in modifiers:
        modifier._steps = steps
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        run_oneshot(model, modifiers, calibration if any(reads) else (), batch_size)
    forget_range_observer(model)
    return CompressedModel(model=model, stored_names=stored_names)


def run_oneshot(
    model: PreTrainedModel,
    modifiers: Sequence[Any],
    calibration: Sequence[Mapping[str, Sequence[int]]],
    batch_size: int,
) -> None:
    """Run modifiers over a model, and leave no hooks and no session, also if they fail."""
    import_upstream()
    from llmcompressor import oneshot
    from llmcompressor.core import reset_session

    name = model.config._name_or_path
    with all_fixes(), tempfile.TemporaryDirectory(prefix="shardwright-") as directory:
        # `oneshot` reads the config again by its name, which is empty or on the Hub for some models.
        model.config.save_pretrained(directory)
        model.config._name_or_path = directory
        reset_session()
        try:
            oneshot(
                model=model,
                # `oneshot` requires a processor for any data, and does not use it for tokens.
                processor=object(),
                recipe=list(modifiers),
                dataset=calibration_loader(calibration, batch_size) if calibration else None,
            )
        finally:
            for modifier in modifiers:
                modifier.remove_hooks()
            reset_session()
            model.config._name_or_path = name
            vars(model).pop("save_pretrained", None)
    model.eval()


def visit_layers(
    model: PreTrainedModel,
    names: Collection[str],
    *,
    calibration: Sequence[Mapping[str, Sequence[int]]],
    batch_size: int,
    visit: VisitLayer,
) -> None:
    """Replace the weights of linear layers in place, one decoder layer after another; inputs come from changed layers.

    `oneshot` accepts a modifier of any class, runs the model one decoder layer at a time, calls
    `on_sequential_epoch_end` when a layer has seen all samples, and then passes the samples through the changed layer.
    """
    import_upstream()
    import torch
    from compressed_tensors.utils import get_execution_device, update_offload_parameter
    from llmcompressor.modifiers import Modifier

    layers = {name: model.get_submodule(name) for name in names}
    sums: dict[str, torch.Tensor] = {}
    counts: dict[str, int] = {}
    steps = Steps(model, [True])

    def summing(name: str) -> Callable[..., None]:
        def hook(module: torch.nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
            inputs_TI = arguments[0].detach().flatten(0, -2).float()
            if name not in sums:
                size, device = inputs_TI.shape[-1], get_execution_device(module)
                sums[name], counts[name] = torch.zeros(size, size, device=device), 0
            sums[name].addmm_(inputs_TI.t(), inputs_TI)
            counts[name] += len(inputs_TI)

        return hook

    class VisitModifier(Modifier):
        requires_calibration_data: bool = True

        def on_initialize(self, state: Any, **kwargs: object) -> bool:
            return True

        def on_calibration_start(self, state: Any, event: Any, **kwargs: object) -> None:
            for name, module in layers.items():
                self.register_hook(module, summing(name), "forward")
            steps.report("calibrating")

        def on_sequential_epoch_end(self, state: Any, event: Any, modules: Sequence[Any], **kwargs: object) -> None:
            here = {id(module) for module in modules}
            visited = tuple(name for name, module in layers.items() if id(module) in here)
            steps.report("quantizing")
            for name in visited:
                module, count = layers[name], counts.pop(name, 0)
                hessian_II = sums.pop(name).div_(count) if count else None
                update_offload_parameter(module, "weight", visit(name, module.weight.detach(), hessian_II))
            steps.finish()

        def on_calibration_end(self, state: Any, event: Any, **kwargs: object) -> None:
            self.remove_hooks()

    run_oneshot(model, [VisitModifier()], calibration, batch_size)


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
    from transformers import AutoConfig

    if not any(layer.is_expert for layer in source.layers):
        return load_causal_lm(source.name, revision=source.revision, dtype="auto").eval()
    import_upstream()
    from llmcompressor.utils import load_context

    # llmcompressor 0.14.0.1 does not support `output_loading_info` (AttributeError on the pair).
    options: dict[str, Any] = {"dtype": "auto", "trust_remote_code": False, "use_safetensors": True}
    with refused_by_name(source.name):
        kind = auto_class(AutoConfig.from_pretrained(str(source.directory), trust_remote_code=False))
    with refused_by_name(source.name), torchvision_is_not_needed(), kept_conversion_mappings(), load_context(kind):
        model = kind.from_pretrained(str(source.directory), **options)
    if errors := nonfinite_errors(model, source.name):
        raise RefusedInputError(errors)
    return model.eval()
