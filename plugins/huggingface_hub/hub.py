"""Reads `config.json` and safetensors headers from a Hub repository or a local path; never weights, never code.

Seen with huggingface_hub 1.33: `model_info` tells a gated, a missing and a private repository apart; a download by
branch name lies under its commit in the cache, where offline mode finds it again, and that commit is what a plan pins.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from json import JSONDecodeError
from pathlib import Path
from typing import Any

from ...ds_configs.models.model_config import LARGEST_CONFIG_BYTES, parse_config_json
from ...ds_configs.specs.errors import Fault, RefusedInputError, ShardwrightError, UsageError
from ..safetensors.reading import StoredTensor, check_names, checkpoint_files, read_checkpoint
from .time_limit import within_limit

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?", re.ASCII)
COMMIT = re.compile(r"[0-9a-f]{40}")
"""Of a Hub repository."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSource:
    """A validated model configuration and where it came from."""

    name: str
    """Hub id, or the absolute path of a local directory or file."""
    revision: str | None
    """Commit of a Hub repository; `None` for local paths."""
    config: dict[str, Any]
    """Contents of `config.json`."""
    checkpoint_parameters: int | None
    """Elements of all tensors in the safetensors headers; `None` when there are none to read."""


def read_model_source(model: str, *, revision: str | None = None) -> ModelSource:
    """Return the configuration of a Hub id, a local directory or a `config.json`.

    Raises:
        UsageError: nothing of that name exists.
        RefusedInputError: the configuration or a safetensors header is corrupt, absurd or unsafe.
        ShardwrightError: the Hub cannot be reached or denies access.
    """
    path = _existing_path(model)
    if path is not None:
        if revision is not None:
            raise UsageError(Fault(where="revision", value=revision, rule="only a Hub model has revisions"))
        return _read_local(path)
    refuse_no_hub_id(model)
    return _read_hub(model, revision)


def read_hub_source(model: str, *, revision: str | None = None) -> ModelSource:
    """Return the configuration of a Hub id, whatever lies on this machine under that name.

    Raises:
        UsageError: it is no Hub id, or nothing of that name exists.
        RefusedInputError: the configuration or a safetensors header is corrupt, absurd or unsafe.
        ShardwrightError: the Hub cannot be reached or denies access.
    """
    if not _HUB_ID.fullmatch(model):
        raise UsageError(Fault(where="model", value=model, rule="is not a Hub id", fix="write ORG/NAME"))
    return _read_hub(model, revision)


def search_models(words: str, *, most: int = 20) -> tuple[str, ...]:
    """Return the ids of models that generate text and that the Hub finds by these words, most downloaded first.

    Raises:
        ShardwrightError: the Hub cannot be reached, does not answer in time, or refuses.
    """
    import httpx
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    def ask() -> tuple[str, ...]:
        found = HfApi().list_models(search=words, pipeline_tag="text-generation", sort="downloads", limit=most)
        return tuple(model.id for model in found)

    try:
        return within_limit(ask, "a search for models")
    except OfflineModeIsEnabled:
        raise ShardwrightError("offline mode is on (HF_HUB_OFFLINE): the Hub cannot be searched") from None
    except HfHubHTTPError as error:
        raise ShardwrightError(
            f"the Hub answered {error.response.status_code} to the search; try again later"
        ) from None
    except (httpx.HTTPError, OSError, ValueError) as error:
        if isinstance(error, ShardwrightError):
            raise
        raise ShardwrightError(f"the Hub cannot be searched ({type(error).__name__}); write ORG/NAME") from None


def refuse_no_hub_id(model: str) -> None:
    """Raise a `UsageError` for a name that is no path on this machine, and that no repository can have."""
    if model.endswith(".json") or model.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(model):
        rule = "no such file or directory, and not a Hub id"
        raise UsageError(Fault(where="model", value=model, rule=rule, fix="write ORG/NAME"))


def _existing_path(model: str) -> Path | None:
    """Return the local path that `model` names; `None` when there is none."""
    if not model:
        return None
    try:
        path = Path(model).expanduser()
        return path if path.exists() else None
    except OSError as error:
        raise UsageError(Fault(where="model", value=model, rule=f"cannot be read ({error.strerror})")) from None
    except (RuntimeError, ValueError):
        # No home directory for `~`, or a character that no path holds.
        return None


def _read_local(path: Path) -> ModelSource:
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        adapter = path.is_dir() and (path / "adapter_config.json").is_file()
        fix = "it holds an adapter: give the base model" if adapter else "give a model directory or a config.json"
        raise UsageError(Fault(where="model", value=str(path), rule="has no config.json", fix=fix))
    try:
        config = parse_config_json(_read_config(file), source=str(path))
        count = None
        if path.is_dir() and checkpoint_files(path):
            count = sum(tensor.elements for tensor in read_checkpoint(path).values())
    except OSError as error:
        where = error.filename or str(file)
        raise UsageError(Fault(where=str(where), rule=f"cannot be read ({error.strerror})")) from None
    return ModelSource(name=str(path.resolve()), revision=None, config=config, checkpoint_parameters=count)


def _read_config(file: Path) -> bytes:
    with file.open("rb") as stream:
        return stream.read(LARGEST_CONFIG_BYTES + 1)


def _read_hub(model: str, revision: str | None) -> ModelSource:
    import httpx
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.constants import HF_HUB_OFFLINE
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    def ask() -> ModelSource:
        sha = HfApi().model_info(model, revision=revision).sha
        file = hf_hub_download(model, "config.json", revision=revision)
        commit = _commit_of(Path(file)) or sha
        return _hub_source(model, commit, Path(file), _hub_checkpoint_parameters(model, commit))

    try:
        if HF_HUB_OFFLINE:
            file = hf_hub_download(model, "config.json", revision=revision, local_files_only=True)
            return _hub_source(model, _commit_of(Path(file)), Path(file), None)
        return within_limit(ask, f"model {model}")
    except (HfHubHTTPError, LocalEntryNotFoundError, httpx.HTTPError, OSError, ValueError) as error:
        if isinstance(error, ShardwrightError):
            raise
        raise explain_hub_error(model, revision, error) from None


def _hub_source(model: str, commit: str | None, file: Path, count: int | None) -> ModelSource:
    config = parse_config_json(_read_config(file), source=model)
    return ModelSource(name=model, revision=commit, config=config, checkpoint_parameters=count)


def _commit_of(cached: Path) -> str | None:
    return next((part for part in cached.parts if COMMIT.fullmatch(part)), None)


def _hub_checkpoint_parameters(model: str, commit: str | None) -> int | None:
    tensors = _hub_tensors(model, commit)
    return None if tensors is None else sum(tensor.elements for tensor in tensors.values())


def read_hub_tensors(model: str, commit: str | None) -> dict[str, StoredTensor]:
    """Return the tensors of a Hub repository from its safetensors headers; none without such files, or offline.

    Raises:
        RefusedInputError: a header is corrupt.
        ShardwrightError: the Hub does not answer.
    """
    import httpx
    from huggingface_hub.constants import HF_HUB_OFFLINE
    from huggingface_hub.errors import HfHubHTTPError

    if HF_HUB_OFFLINE:
        return {}
    try:
        return within_limit(lambda: _hub_tensors(model, commit), f"headers of {model}") or {}
    except (HfHubHTTPError, httpx.HTTPError) as error:
        raise explain_hub_error(model, commit, error) from None


def stored_shapes(source: ModelSource) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors in a model's safetensors headers; none without such files.

    Raises:
        RefusedInputError: a header is corrupt.
        ShardwrightError: the Hub does not answer.
    """
    if not source.checkpoint_parameters:
        return {}
    if source.revision is not None:
        tensors = read_hub_tensors(source.name, source.revision)
    else:
        tensors = read_checkpoint(Path(source.name))
    return {name: tensor.shape for name, tensor in tensors.items()}


def _hub_tensors(model: str, commit: str | None) -> dict[str, StoredTensor] | None:
    from huggingface_hub import get_safetensors_metadata
    from huggingface_hub.errors import NotASafetensorsRepoError, SafetensorsParsingError

    try:
        metadata = get_safetensors_metadata(model, revision=commit)
        check_names(model, metadata.files_metadata)
        return {
            name: StoredTensor(dtype=str(tensor.dtype), shape=tuple(int(size) for size in tensor.shape))
            for file in metadata.files_metadata.values()
            for name, tensor in file.tensors.items()
        }
    except NotASafetensorsRepoError:
        return None
    except (SafetensorsParsingError, KeyError, TypeError, AttributeError, JSONDecodeError) as error:
        # huggingface_hub 1.33 checks that a header is JSON, but not what is in it, and its index not at all.
        raise RefusedInputError(Fault(where=model, rule=f"has a corrupt safetensors header ({error!r})")) from None


def explain_hub_error(model: str, revision: str | None, error: Exception) -> ShardwrightError:
    """Return what the Hub's answer means for whoever named a model."""
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    where = f"model = {model!r}"
    if isinstance(error, GatedRepoError):
        return ShardwrightError(f"{where}: the repository is gated; accept its terms on the Hub, then `hf auth login`")
    if isinstance(error, LocalEntryNotFoundError) or "offline" in type(error).__name__.lower():
        mode = "offline mode is on (HF_HUB_OFFLINE)" if os.environ.get("HF_HUB_OFFLINE") else "no connection to the Hub"
        return ShardwrightError(
            f"{where}: no such path here, {mode} and config.json is not cached; give a local directory or config.json"
        )
    if isinstance(error, RevisionNotFoundError):
        return UsageError(Fault(where="revision", value=revision, rule=f"does not exist in {model}"))
    if isinstance(error, EntryNotFoundError):
        return UsageError(Fault(where="model", value=model, rule="the repository has no config.json"))
    if isinstance(error, RepositoryNotFoundError):
        return UsageError(
            Fault(where="model", value=model, rule="no such path, and the Hub knows no such repository",
                  fix="check the spelling; for a private one `hf auth login`")
        )  # fmt: skip
    if isinstance(error, HfHubHTTPError) and error.response is not None:
        return ShardwrightError(f"{where}: the Hub answered {error.response.status_code}; try again later")
    return ShardwrightError(
        f"{where}: no such path here, and the Hub cannot be reached ({type(error).__name__}); "
        "give a local directory or config.json"
    )
