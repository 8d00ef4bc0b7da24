"""Single tensors of a Hugging Face checkpoint, and models without ZeRO-3's influence."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...ds_configs.specs.errors import ConfigError, UsageError
from .. import patches
from ..safetensors.reading import INDEX, SINGLE, opened, read_header, read_index

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedModel


class CheckpointTensors:
    """Tensors of a checkpoint by name; a file is opened, or downloaded, when one of its tensors is read.

    Args:
        source: Directory or Hub id.
        revision: Revision of a Hub id.

    Raises:
        UsageError: There are no safetensors.
        RefusedInputError: The index or the file is corrupt, or names files of other directories.
    """

    def __init__(self, source: str, *, revision: str | None = None) -> None:
        from transformers.utils.hub import extract_commit_hash

        self._source, self._revision = source, revision
        self._paths: dict[str, str] = {}
        index, single = self._file(INDEX), None
        if index is not None:
            self._files = read_index(Path(index))
        elif (single := self._file(SINGLE)) is not None:
            self._files = dict.fromkeys(read_header(Path(single)).tensors, SINGLE)
        else:
            rule, fix = f"contains neither {SINGLE} nor {INDEX}", "pass a checkpoint with safetensors"
            raise UsageError(ConfigError(where="model", value=source, rule=rule, fix=fix))
        # A branch may change while files are read: all come from the commit of the first.
        self._revision = extract_commit_hash(index or single, None) or revision

    def _file(self, name: str) -> str | None:
        if name in self._paths:
            return self._paths[name]
        from transformers.utils import cached_file

        path: str | None = cached_file(
            self._source,
            name,
            revision=self._revision,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_gated_repo=True,
        )
        if path is not None:
            self._paths[name] = path
        return path

    def read(self, name: str, *, shape: Sequence[int]) -> Tensor:
        """Return a tensor by its name in the model with its head; names in a base model's checkpoint lack the first
        part.

        Raises:
            UsageError: The checkpoint lacks it, or has it in another shape.
            RefusedInputError: Its file is corrupt.
        """
        stored = next((candidate for candidate in (name, name.partition(".")[2]) if candidate in self._files), None)
        if stored is None:
            raise UsageError(ConfigError(where=self._source, value=name, rule="is missing in the checkpoint"))
        path = self._file(self._files[stored])
        if path is None:
            raise UsageError(ConfigError(where=self._source, value=self._files[stored], rule="this file is missing"))
        with opened(Path(path)) as file:
            tensor: Tensor = file.get_tensor(stored)
        if tuple(tensor.shape) != tuple(shape):
            rule = f"has shape {tuple(tensor.shape)}, but the config requires {tuple(shape)}"
            raise UsageError(ConfigError(where=self._source, value=name, rule=rule))
        return tensor


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
