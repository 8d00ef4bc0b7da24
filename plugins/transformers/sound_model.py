"""Loader of causal language models that checks files, tensors and numbers, and runs no code of the model.

Observed with transformers 5.17.0: `from_pretrained` initialises tensors that a checkpoint lacks at random and logs a
table, follows an index out of the directory, turns integers into weights, and loads NaN.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ...ds_configs.models.model_config import code_errors
from ...ds_configs.specs.errors import ConfigError, RefusedInputError, ShardwrightError
from ..huggingface_hub import model_directory, read_config
from ..launching.messages import note_on_first_rank
from ..safetensors import StoredTensor, read_checkpoint
from .checkpoint_tensors import checkpoint_tensors

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel

_ON = ("1", "true", "yes", "on", "y", "t")


def loads_on_first_rank() -> bool:
    """Return whether `from_pretrained` reads weights only on the first rank of a node."""
    return all(
        os.environ.get(name, "").lower() in _ON for name in ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING")
    )


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
    """Return errors for tensors that a model needs and a checkpoint lacks or has in another shape.

    Args:
        stored: Tensors of the checkpoint by name, from its headers.
        model: The model, which may be on the meta device; tied tensors count once.
        where: Name of the model in the errors.
        base_prefix: Prefix that names in the checkpoint may lack, such as `model.`.
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
    except (SafetensorError, OSError, ValueError, KeyError, RuntimeError) as error:
        text = " ".join(str(error).split())
        # Other runtime errors, such as out of memory, are not errors of the model.
        if isinstance(error, RuntimeError) and "mismatch" not in text:
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


def load_causal_lm(
    name: str,
    *,
    revision: str | None = None,
    allow_nonfinite: bool = False,
    score_head: Literal["none", "stored", "new"] = "none",
    **options: object,
) -> PreTrainedModel:
    """Load a causal language model from a directory or the Hub; every weight must be in the checkpoint.

    With a `score_head` it returns one score per sequence instead of logits: a `stored` head, or a `new` random one.
    `options` are further arguments of `from_pretrained`.

    Raises:
        RefusedInputError: files are damaged or outside the directory, tensors are missing or of another shape or dtype,
            weights are not finite, or the configuration names code.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    directory = model_directory(name, revision=revision)
    config = check_config(str(directory))
    kind: Any = AutoModelForCausalLM
    if score_head != "none":
        kind = AutoModelForSequenceClassification
        options = options if "config" in options else {"num_labels": 1, **options}
    if directory.is_dir():
        check_weights(directory, quantized=bool(config.get("quantization_config")))
    # The other ranks of a node get their weights later.
    later = loads_on_first_rank()
    with refused_by_name(name):
        model, info = kind.from_pretrained(
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
