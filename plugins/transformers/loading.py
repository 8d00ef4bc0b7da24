"""Load models: with checked files, tensors and numbers; on the first rank only; with the names of their checkpoints.

Observed with transformers 5.17.0: `from_pretrained` initialises tensors that a checkpoint lacks at random and logs a
table, follows an index out of the directory, turns integers into weights, and loads NaN. No code of a model runs.

Observed with accelerate 1.15.0 under FSDP2 with `fsdp_cpu_ram_efficient_loading`:

- `from_pretrained` reads and converts the checkpoint on every rank, and then replaces the weights of all but the first
  rank of each node by zeros in memory (5.24.0 keeps them).
- `fsdp2_prepare_model` converts the whole model to fp32 on every rank, before it distributes the first rank's weights.
- `fsdp2_load_full_state_dict` cannot distribute persistent buffers.

Under ZeRO-3 too, only the first rank's weights are used, but every rank fuses experts (5.24.0 does not).
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ...ds_configs.models.model_config import code_errors
from ...ds_configs.specs.errors import ConfigError, RefusedInputError, ShardwrightError
from .. import patches
from ..huggingface_hub import model_directory, read_config
from ..launching.background import is_first_rank
from ..launching.messages import note_on_first_rank
from ..safetensors import StoredTensor, read_checkpoint, read_headers

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.nn import Module
    from transformers import PreTrainedConfig, PreTrainedModel


def loads_on_first_rank() -> bool:
    """Return whether `from_pretrained` reads weights only on the first rank of a node."""
    from accelerate.utils import parse_flag_from_env

    return all(map(parse_flag_from_env, ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING")))


_ELEMENTS_AT_ONCE = 2**24
_SHOWN = 3
NONFINITE_FIX = "train it again, download a valid copy, or pass --allow-nonfinite if the command has it"


def nonfinite_weights(model: PreTrainedModel) -> list[str]:
    """Return the names of parameters and buffers with NaN or infinity in this rank's shard."""
    # bitsandbytes 0.50.2 packs 4-bit codes into tensors of any dtype, whose values are not numbers.
    codes = {f"{path}.weight" for path, module in model.named_modules() if type(module).__name__ == "Linear4bit"}
    # Masks contain infinities on purpose; they are not saved.
    unsaved = {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    tensors = (*model.named_parameters(), *model.named_buffers())
    return [
        name
        for name, tensor in tensors
        if name not in codes and name not in unsaved and not is_finite(local_part(tensor))
    ]


def nonfinite_gradients(model: PreTrainedModel) -> list[str]:
    """Return the names of parameters with NaN or infinity in this rank's gradient."""
    gradients = ((name, weight.grad) for name, weight in model.named_parameters() if weight.grad is not None)
    return [name for name, gradient in gradients if not is_finite(local_part(gradient))]


def local_part(tensor: torch.Tensor) -> Tensor:
    """Return this rank's shard of a tensor that ZeRO-3 or FSDP2 shards, otherwise the tensor."""
    partition: Tensor | None = getattr(tensor, "ds_tensor", None)
    if partition is not None:
        return partition.detach()
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def is_finite(tensor: Tensor) -> bool:
    """Return whether every element is finite; true for dtypes other than floating point and on the meta device."""
    import torch

    if not tensor.is_floating_point() or tensor.device.type == "meta":
        return True
    # `isfinite` does not support 8-bit formats.
    parts = (part.float() if part.element_size() == 1 else part for part in tensor.reshape(-1).split(_ELEMENTS_AT_ONCE))
    return all(bool(torch.isfinite(part).all()) for part in parts)


def refuse_nonfinite_weights(model: PreTrainedModel, *, what: str, allowed: bool = False) -> None:
    """Reject a model with NaN or infinite weights, on all ranks if one rank has some; every rank must call it.

    Raises:
        RefusedInputError: names up to three weights, and the ranks that hold them.
    """
    if allowed:
        return
    names_by_rank = {rank: names for rank, names in enumerate(gathered(nonfinite_weights(model))) if names}
    if not names_by_rank:
        return
    everywhere = sorted({name for names in names_by_rank.values() for name in names})
    ranks = ", ".join(str(rank) for rank in names_by_rank)
    rule = f"holds NaN or infinity in {shortened(everywhere)} (rank {ranks})"
    raise RefusedInputError(ConfigError(where=what, rule=rule, fix=NONFINITE_FIX))


def shortened(names: list[str]) -> str:
    """Join the first names, and count the others.

    >>> shortened(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def gathered(mine: Any) -> list[Any]:
    """Gather an object from every rank; every rank must call it."""
    import torch.distributed as distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        return [mine]
    everyone: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(everyone, mine)
    return everyone


_OTHER_FORMATS = (".bin", ".pt", ".pth", ".gguf")
_NUMBERS = frozenset({"F64", "F32", "F16", "BF16"})
_DOWNLOAD = "download it again, or save it again with save_pretrained"


def check_config(model: str) -> dict[str, Any]:
    """Return the configuration of a local model, which must be valid and name no code; empty without a local file.

    Raises:
        UsageError: it cannot be read.
        RefusedInputError: fields break a rule; names all of them.
    """
    path = Path(model).expanduser()
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        return {}
    config = read_config(file, source=str(file))
    refuse_code(config, str(file))
    return config


def refuse_code(config: Mapping[str, Any], source: str) -> None:
    """Check that a configuration names no kernel of the Hub, which the model would run.

    Raises:
        RefusedInputError: names the fields.
    """
    if errors := code_errors(config, source):
        raise RefusedInputError(errors)


def refuse_other_formats(directory: Path, *, where: str, fix: str = "convert them to safetensors") -> None:
    """Reject a directory whose only weights are in formats that can run code when they are loaded.

    Raises:
        RefusedInputError: names up to three of the files.
    """
    if any(directory.glob("*.safetensors")):
        return
    files = sorted(path.name for suffix in _OTHER_FORMATS for path in directory.glob(f"*{suffix}"))
    if files:
        rule = (
            f"weights are read only from safetensors, because other formats can run code; it has {', '.join(files[:3])}"
        )
        raise RefusedInputError(ConfigError(where=where, value=str(directory), rule=rule, fix=fix))


def check_weights(directory: Path, *, quantized: bool = False) -> None:
    """Check that weight files are complete, inside the directory, and of a dtype that weights can have.

    A `quantized` model, whose configuration has a `quantization_config`, may have integer weights.

    Raises:
        RefusedInputError: names file and tensor.
    """
    errors = []
    for name, tensor in read_checkpoint(directory).items():
        if not quantized and name.endswith((".weight", ".bias")) and tensor.dtype not in _NUMBERS:
            rule = f"is stored as {tensor.dtype}, without a quantization_config"
            errors.append(ConfigError(where=str(tensor.file), value=name, rule=rule, fix=_DOWNLOAD))
    if errors:
        raise RefusedInputError(errors[:3])


def stored_errors(
    stored: Mapping[str, StoredTensor], model: PreTrainedModel, where: str, *, base_prefix: str = ""
) -> list[ConfigError]:
    """Return errors for tensors that a model needs and a checkpoint lacks or has in another shape; tied tensors count
    once.

    Names in the checkpoint may lack `base_prefix`, such as `model.`.
    """
    tied = set(getattr(model, "_tied_weights_keys", None) or ()) if model.config.tie_word_embeddings else set()
    parameters = {name: weight for name, weight in model.named_parameters() if name not in tied}
    missing, other_shape = [], []
    for name, needed in checkpoint_tensors(model, parameters).items():
        tensor = stored.get(name) or stored.get(name.removeprefix(base_prefix))
        if tensor is None:
            missing.append(name)
        elif tensor.shape != tuple(needed.shape):
            other_shape.append(name)
    return loading_errors({"missing_keys": missing, "mismatched_keys": other_shape}, where)


@contextmanager
def refused_by_name(name: str) -> Iterator[None]:
    """Convert Transformers' loading errors to one line that names the model.

    Raises:
        RefusedInputError: the model is invalid or needs code.
        ShardwrightError: the system lacks something, such as memory.
    """
    from safetensors import SafetensorError

    try:
        yield
    except ShardwrightError:
        raise
    except (
        SafetensorError,
        OSError,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        RuntimeError,
        MemoryError,
    ) as error:
        text = " ".join(str(error).split())
        # Other runtime errors, such as out of memory, are not errors of the model.
        if isinstance(error, RuntimeError | MemoryError) and "mismatch" not in text:
            raise ShardwrightError(f"{name}: cannot be loaded ({type(error).__name__}: {text[:300]})") from error
        if "trust_remote_code" in text:
            fix = "use a model whose class is in Transformers; code of a repository is never run"
            raise RefusedInputError(ConfigError(where=name, rule="needs code from its repository", fix=fix)) from None
        rule = f"cannot be loaded ({type(error).__name__}: {text[:300]})"
        raise RefusedInputError(ConfigError(where=name, rule=rule)) from None


def loading_errors(info: Mapping[str, Any], where: str) -> list[ConfigError]:
    """Return errors for tensors that would be random according to `output_loading_info`."""
    errors = []
    for key, rule in (
        ("missing_keys", "are not in the checkpoint and would be random"),
        ("mismatched_keys", "have another shape in the checkpoint"),
    ):
        # Mismatched keys are tuples of the name and both shapes.
        names = sorted(item if isinstance(item, str) else item[0] for item in info.get(key) or ())
        if names:
            rule = f"{len(names)} tensors {rule}"
            errors.append(ConfigError(where=where, value=names[:3], rule=rule, fix=_DOWNLOAD))
    return errors


def nonfinite_errors(model: PreTrainedModel, where: str) -> list[ConfigError]:
    """Return an error that names this rank's NaN or infinite weights."""
    names = nonfinite_weights(model)
    rule = f"holds NaN or infinity in {shortened(names)}"
    return [ConfigError(where=where, rule=rule, fix=NONFINITE_FIX)] if names else []


SCORE_HEAD = "score.weight"
"""Weight that computes the score of a sequence in `ForSequenceClassification` classes."""


def auto_class(config: PreTrainedConfig, *, score_head: bool = False) -> Any:
    """Return the Auto class for a configuration: of sequence scores, of chats with images, or of text.

    A configuration of images whose `architectures` name the class of its type without images is one of text.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSequenceClassification

    if score_head:
        return AutoModelForSequenceClassification
    kinds = (AutoModelForImageTextToText, AutoModelForCausalLM)
    images, text = (kind._model_mapping.get(type(config), None) for kind in kinds)
    if images is None or (text is not None and not hasattr(config, "vision_config")):
        return AutoModelForCausalLM
    is_text = text is not None and text is not images and text.__name__ in (config.architectures or ())
    return AutoModelForCausalLM if is_text else AutoModelForImageTextToText


def text_classes() -> set[str]:
    """Return the names of the classes that write text, with or without images."""
    from transformers.models.auto import modeling_auto

    text = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    images = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    named = [*text.values(), *images.values()]
    return {name for names in named for name in ((names,) if isinstance(names, str) else names)}


def load_causal_lm(
    name: str,
    *,
    revision: str | None = None,
    allow_nonfinite: bool = False,
    score_head: Literal["none", "stored", "new"] = "none",
    **options: object,
) -> PreTrainedModel:
    """Load a model that writes text, with or without images; every weight must be in the checkpoint.

    With a `score_head` it returns one score per sequence instead of logits: a `stored` head, or a `new` random one.
    `options` are further arguments of `from_pretrained`.

    Raises:
        RefusedInputError: files are damaged or outside the directory, tensors are missing or of another shape or dtype,
            weights are not finite, or the configuration names code.
    """
    from transformers import AutoConfig

    directory = model_directory(name, revision=revision)
    config = check_config(str(directory))
    if score_head != "none":
        options = options if "config" in options else {"num_labels": 1, **options}
    if directory.is_dir():
        check_weights(directory, quantized=bool(config.get("quantization_config")))
    # The other ranks of a node get their weights later.
    later = loads_on_first_rank()
    with refused_by_name(name):
        loaded: Any = options.get("config") or AutoConfig.from_pretrained(str(directory), trust_remote_code=False)
        model, info = auto_class(loaded, score_head=score_head != "none").from_pretrained(
            str(directory),
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            # Reported with the tensors' names below; the error of Transformers names none.
            ignore_mismatched_sizes=not later,
            **options,
        )
    if score_head == "new":
        info["missing_keys"] = set(info["missing_keys"]) - {SCORE_HEAD}
        info["unexpected_keys"] = set(info["unexpected_keys"]) - {"lm_head.weight"}
    errors = [] if later else loading_errors(info, name)
    if not allow_nonfinite and not later:
        errors += nonfinite_errors(model, name)
    if errors:
        raise RefusedInputError(errors)
    # Adapters record the name of their base model, which must not be a directory of this machine's cache.
    model.name_or_path = model.config._name_or_path = name
    if unused := sorted(map(str, info.get("unexpected_keys") or ())):
        note_on_first_rank(f"{name}: the model ignores {len(unused)} tensors of the checkpoint: {shortened(unused)}")
    return model


def load_on_first_rank(engine: Literal["fsdp2", "deepspeed"]) -> None:
    """Make only the first rank read weights that FSDP2 or ZeRO-3 shards.

    Under FSDP2, other ranks get zeros without memory until `Accelerator.prepare`. Nothing changes without
    `fsdp_cpu_ram_efficient_loading`, nor for quantized weights, ignored modules and weights that are sharded already.
    """
    import torch
    from transformers.modeling_utils import is_fsdp_enabled

    if engine == "deepspeed":
        patches.apply("zero3-unread-weights", _unread_under_zero3)
        return

    def gets_weights_later(device_map: Any, device_mesh: Any, quantizer: Any) -> bool:
        placed = any(each is not None for each in (device_map, device_mesh, quantizer))
        return is_fsdp_enabled() and not is_first_rank() and not placed

    def unread(load: Callable[..., Any]) -> Any:
        """Load onto the meta device: the report has missing and mismatched tensors, but no tensor is read."""

        def loaded(
            model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, *rest: Any, **named: Any
        ) -> Any:
            if gets_weights_later(load_config.device_map, load_config.device_mesh, load_config.hf_quantizer):
                load_config = replace(load_config, device_map={"": "meta"})
            return load(model, state_dict, checkpoint_files, load_config, *rest, **named)

        return staticmethod(loaded)

    def zeros(like: Tensor) -> Tensor:
        """Return zeros that take no memory until they are written.

        Unlike tensors on the meta device they have addresses, by which Accelerate finds an optimizer's parameters, and
        scripts may compute with them, for example to add tokens.
        """
        if not like.numel():
            return torch.zeros_like(like, device="cpu")
        pages = mmap.mmap(-1, like.numel() * like.element_size(), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(pages, dtype=like.dtype).view(like.shape)

    def untouched(move: Callable[..., None]) -> Callable[..., None]:
        def moved(model: Any, missing_keys: Any, device_map: Any, device_mesh: Any, hf_quantizer: Any) -> None:
            if not gets_weights_later(device_map, device_mesh, hf_quantizer):
                move(model, missing_keys, device_map, device_mesh, hf_quantizer)
                return
            for module, key, _, parameter in _parameters(model):
                module._parameters[key] = torch.nn.Parameter(zeros(parameter), parameter.requires_grad)
            for module in model.modules():
                for key, buffer in module._buffers.items():
                    if buffer is not None:
                        module._buffers[key] = torch.zeros_like(buffer, device="cpu")

        return moved

    patches.apply("fsdp2-unread-weights", unread)
    patches.apply("fsdp2-untouched-weights", untouched)
    patches.apply("fsdp2-first-rank", lambda is_first: lambda: is_first() and is_first_rank())
    patches.apply("fsdp2-upcast", _distributed)


def _unread_under_zero3(load: Callable[..., Any]) -> Any:
    """Read only buffers, which are not partitioned."""

    def loaded(model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, *rest: Any, **named: Any) -> Any:
        from safetensors import safe_open
        from transformers.integrations import is_deepspeed_zero3_enabled

        is_later = is_deepspeed_zero3_enabled() and not is_first_rank() and load_config.hf_quantizer is None
        if is_later and state_dict is None and _are_safetensors(checkpoint_files):
            prefix = f"{model.base_model_prefix}."
            buffers = {name for name, _ in model.named_buffers()}
            buffers |= {name.removeprefix(prefix) for name in buffers}
            state_dict = {}
            for file in checkpoint_files:
                with safe_open(file, framework="pt") as tensors:
                    for name in tensors.keys():  # noqa: SIM118
                        tensor = tensors.get_tensor(name)
                        state_dict[name] = tensor if name in buffers else tensor.to("meta")
        return load(model, state_dict, checkpoint_files, load_config, *rest, **named)

    return staticmethod(loaded)


def _are_safetensors(files: Any) -> bool:
    return bool(files) and all(str(file).endswith(".safetensors") for file in files)


@contextmanager
def stored_precision() -> Iterator[None]:
    """Keep weights in the type of the checkpoint inside the block if the requested type is fp32.

    Every weight of a type of the checkpoint is exact in fp32, to which Accelerate converts trained weights anyway.
    Buffers have the requested type.
    """

    def keeping(load: Callable[..., Any]) -> Any:
        def loaded(model: Any, state_dict: Any, checkpoint_files: Any, *rest: Any, **named: Any) -> Any:
            import torch

            if _are_safetensors(checkpoint_files):
                stored = stored_types(checkpoint_files)
                names = model.state_dict().keys()
                # Matrices that are fused while loading, such as experts, have other names in the checkpoint.
                others = {dtype for name, (dtype, is_matrix) in stored.items() if is_matrix and name not in names}
                fused = (others.pop() if len(others) == 1 else None, True)
                for module, key, name, parameter in _parameters(model):
                    dtype, is_matrix = stored.get(name, fused)
                    if dtype is not None and parameter.dtype == torch.float32 and is_matrix == (parameter.dim() > 1):
                        module._parameters[key] = torch.nn.Parameter(parameter.to(dtype), parameter.requires_grad)
            return load(model, state_dict, checkpoint_files, *rest, **named)

        return staticmethod(loaded)

    with patches.applied("stored-precision", keeping):
        yield


def stored_types(files: Iterable[str]) -> dict[str, tuple[Any, bool]]:
    """Return each tensor's type, `None` unless it has 16 bits, and whether it is a matrix."""
    import torch

    types = {"BF16": torch.bfloat16, "F16": torch.float16}
    stored = read_headers(map(Path, files))
    return {name: (types.get(tensor.dtype), len(tensor.shape) > 1) for name, tensor in stored.items()}


def _parameters(model: Module) -> list[tuple[Module, str, str, Any]]:
    """Return each parameter with its module, its name there and its name in the model; tied ones with every name."""
    return [
        (module, key, f"{path}.{key}" if path else key, parameter)
        for path, module in model.named_modules()
        for key, parameter in module._parameters.items()
        if parameter is not None
    ]


class _ConvertedWhenRead(dict[str, Any]):
    """Weights of the first rank; reading one converts it to its new type and releases it."""

    def __init__(self, weights: Mapping[str, Tensor], converted: Mapping[str, Tensor]) -> None:
        super().__init__(weights)
        self._converted = converted

    def __getitem__(self, name: str) -> Tensor:
        return self.pop(name).to(self._converted[name].dtype)


def _distributed(prepare: Callable[[Any, Module], Module]) -> Callable[[Any, Module], Module]:
    """Move the model to the meta device before Accelerate converts it to fp32."""

    def prepared(accelerator: Any, model: Module) -> Module:
        import torch
        from torch import distributed

        plugin = accelerator.state.fsdp_plugin
        plain = all(type(parameter) is torch.nn.Parameter for parameter in model.parameters())
        if not plugin.cpu_ram_efficient_loading or plugin.ignored_modules is not None or not plain:
            return prepare(accelerator, model)
        # Accelerate keeps and restores the buffers that are not persistent.
        buffers = [
            (module, name)
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and name not in module._non_persistent_buffers_set
        ]
        for module, name in buffers:
            module._non_persistent_buffers_set.add(name)
        weights = model.state_dict() if accelerator.is_main_process else {}
        empty: dict[Any, Any] = {}
        for module, key, _, parameter in _parameters(model):
            if parameter not in empty:
                empty[parameter] = torch.nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
            module._parameters[key] = empty[parameter]
        empty.clear()

        def loading(load: Callable[..., Any]) -> Callable[..., Any]:
            def loaded(accelerator: Any, model: Module, full_sd: dict[str, Tensor], *rest: Any, **named: Any) -> Any:
                read = _ConvertedWhenRead(weights, full_sd) if weights else full_sd
                weights.clear()
                return load(accelerator, model, read, *rest, **named)

            return loaded

        with patches.applied("fsdp2-weights", loading):
            model = prepare(accelerator, model)
        for module, name in buffers:
            module._non_persistent_buffers_set.discard(name)
            distributed.broadcast(module._buffers[name], src=0)
        return model

    return prepared


def checkpoint_tensors(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return some tensors of a model, tied ones once, with the names and splits of its checkpoint."""
    from transformers.core_model_loading import revert_weight_conversion

    ignored = set(model._keys_to_ignore_on_save or ())
    saved = {name: tensor for name, tensor in tensors.items() if name not in ignored}
    return dict(revert_weight_conversion(model, saved))


def checkpoint_module_names(model: PreTrainedModel, names: Iterable[str]) -> dict[str, str]:
    """Return the names of modules in a checkpoint by their names in the model."""
    import torch

    stored_names = {}
    for name in names:
        renamed = checkpoint_tensors(model, {f"{name}.weight": torch.empty(0)})
        stored_names[name] = next(iter(renamed), f"{name}.weight").removesuffix(".weight")
    return stored_names


def load_renamed_weights(model: PreTrainedModel, directory: str) -> None:
    """Load the weights of a model whose checkpoints have other names, such as those of images and fused experts."""
    own = dict(model.named_parameters())
    if checkpoint_tensors(model, own).keys() <= own.keys():
        return
    with refused_by_name(directory):
        saved = model_class(model).from_pretrained(
            directory, config=model.config, dtype=model.dtype, use_safetensors=True
        )
    model.load_state_dict(saved.state_dict())


def stays_in_fp32(model: PreTrainedModel, name: str) -> bool:
    """Return whether a 16-bit checkpoint keeps a tensor in fp32, such as the bias of a router."""
    patterns = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    return any(re.search(rf"(^|\.){re.escape(pattern)}(\.|$)", name) for pattern in patterns)


def model_class(model: torch.nn.Module) -> type[Any]:
    """Return the class of a model without the class that FSDP2 adds."""
    from torch.distributed.fsdp import FSDPModule

    return next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))


def without_zero3() -> AbstractContextManager[None]:
    """Return a context in which models are built and loaded unsharded, as if no ZeRO-3 configuration existed.

    Transformers reads one configuration per process, the trained model's, for every model.
    """
    return patches.applied("zero3-while-loading", lambda _: None, resets=True)


def empty_model(made_by: type[Any], config: PreTrainedConfig, dtype: torch.dtype) -> Any:
    """Return an unsharded model of this rank, whose weights are not loaded yet.

    Mixtures run their experts one after the other: fused experts are summed in another order.
    """
    from transformers import initialization

    with without_zero3(), initialization.no_init_weights():
        return made_by._from_config(config, dtype=dtype, experts_implementation="eager").eval()


@contextmanager
def plain_linear() -> Iterator[None]:
    """Make linear layers compute as in a new process.

    Under `zero.Init`, deepspeed 0.19.8 replaces ``torch.nn.functional.linear`` by a function that adds the bias after
    rounding the product; `TrainingArguments(tf32=True)` rounds the factors of fp32 products.
    """
    import torch

    precision = torch.get_float32_matmul_precision()
    with patches.applied("plain-linear", lambda _: torch._C._nn.linear):
        torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(precision)


def share_with_zero3(modules: Iterable[Any]) -> None:
    """Make ZeRO-3 also gather the children's parameters of modules that use them without calling the children.

    DeepSpeed gathers only the parameters of modules whose forward runs (`register_external_parameter`).
    """
    for module in modules:
        own = {id(parameter) for parameter in module.parameters(recurse=False)}
        foreign = [weight for weight in module.parameters() if hasattr(weight, "ds_id") and id(weight) not in own]
        if foreign:
            # `zero` is an attribute of the package, not a module below it.
            import deepspeed

            for parameter in foreign:
                deepspeed.zero.register_external_parameter(module, parameter)


@contextmanager
def without_zero3_hooks(module: torch.nn.Module) -> Iterator[None]:
    """Call the children of a module whose parameters ZeRO-3 has gathered without its hooks, inside the block.

    ZeRO-3 prefetches in the order of modules in earlier steps. Ranks that call children different numbers of times
    would gather in different orders.
    """
    gathered_now = [hasattr(weight, "ds_shape") and weight.shape == weight.ds_shape for weight in module.parameters()]
    children = list(module.modules())[1:] if gathered_now and all(gathered_now) else []
    kinds = [hooks for child in children for hooks in (child._forward_pre_hooks, child._forward_hooks)]
    kept = [hooks.copy() for hooks in kinds]
    for hooks in kinds:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, own in zip(kinds, kept, strict=True):
            hooks.update(own)
