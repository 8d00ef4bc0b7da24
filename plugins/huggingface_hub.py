"""Model files of a Hub repository or a local path.

Model files are `config.json`, safetensors headers, or a whole directory; no code. Checked with huggingface_hub 1.33 and
2.4: `model_info` distinguishes gated, missing and private repositories. A file downloaded by branch name is cached
under its commit, where offline mode finds it again and which a plan pins.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from json import JSONDecodeError
from pathlib import Path
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

from ..ds_configs.models.model_config import LARGEST_CONFIG_BYTES, parse_config_json
from ..ds_configs.specs.errors import ConfigError, RefusedInputError, ShardwrightError, UsageError
from .launching.background import BackgroundTask
from .safetensors import StoredTensor, check_names, checkpoint_files, read_checkpoint

Result = TypeVar("Result")
_LIMIT_FACTOR = 6
_NOTICE_SECONDS = 5.0

logger = logging.getLogger(__name__)


def within_limit(work: Callable[[], Result], what: str) -> Result:
    """Return the response of a request to the Hub within six times `HF_HUB_DOWNLOAD_TIMEOUT` (10 s by default).

    Requests for files have time limits in huggingface_hub; those for information about repositories have none there.
    After the limit, which is a `ShardwrightError`, `work` continues in a thread that ends with the process.
    """
    from huggingface_hub import constants

    limit = _LIMIT_FACTOR * constants.HF_HUB_DOWNLOAD_TIMEOUT
    # A daemon, so that the process can exit without it.
    request = BackgroundTask(work, "hub", daemon=True)
    if not request.ended(min(_NOTICE_SECONDS, limit)):
        logger.warning(f"waiting for the Hub: {what}")
        if not request.ended(max(0, limit - _NOTICE_SECONDS)):
            fix = "try again later, increase HF_HUB_DOWNLOAD_TIMEOUT, or pass a local directory"
            raise ShardwrightError(f"{what}: the Hub did not answer within {limit:g} s; {fix}")
    return cast("Result", request.result())


HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?", re.ASCII)
COMMIT = re.compile(r"[0-9a-f]{40}")
"""Commit of a Hub repository."""
_ADAPTER_CONFIG = "adapter_config.json"
"""File of a PEFT adapter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSource:
    """A validated model configuration and its source."""

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
        UsageError: the model does not exist.
        RefusedInputError: the configuration or a safetensors header is corrupt, absurd or unsafe.
        ShardwrightError: the Hub cannot be reached or denies access.
    """
    path = None
    try:
        # A `~` without a home directory and characters that no path contains raise RuntimeError or ValueError.
        with suppress(RuntimeError, ValueError):
            path = Path(model).expanduser() if model and Path(model).expanduser().exists() else None
    except OSError as error:
        raise UsageError(ConfigError(where="model", value=model, rule=f"cannot be read ({error.strerror})")) from None
    if path is None:
        refuse_no_hub_id(model)
        return _read_hub(model, revision)
    if revision is not None:
        rule, fix = "only a Hub model has revisions", "omit it for a local path"
        raise UsageError(ConfigError(where="revision", value=revision, rule=rule, fix=fix))
    file = path / "config.json" if path.is_dir() else path
    if file.suffix in WEIGHT_SUFFIXES:
        fix = f"pass its directory, {file.parent}"
        raise UsageError(ConfigError(where="model", value=str(path), rule="is a file of weights", fix=fix))
    if not file.is_file():
        adapter = path.is_dir() and (path / _ADAPTER_CONFIG).is_file()
        fix = (
            "it is an adapter: merge it with shardwright merge, or pass its base model"
            if adapter
            else f"pass {inner[0].parent}"
            if (inner := sorted(path.glob("*/config.json")))
            else "pass a model directory or a config.json"
        )
        raise UsageError(ConfigError(where="model", value=str(path), rule="has no config.json", fix=fix))
    config, count = read_config(file, source=str(path)), None
    if path.is_dir() and checkpoint_files(path):
        count = sum(tensor.elements for tensor in read_checkpoint(path).values())
    return ModelSource(name=str(path.resolve()), revision=None, config=config, checkpoint_parameters=count)


def read_hub_source(model: str, *, revision: str | None = None) -> ModelSource:
    """Return the configuration of a Hub id; ignore local paths of that name.

    Raises:
        UsageError: it is not a Hub id, or the model does not exist.
        RefusedInputError: the configuration or a safetensors header is corrupt, absurd or unsafe.
        ShardwrightError: the Hub cannot be reached or denies access.
    """
    if not HUB_ID.fullmatch(model):
        raise UsageError(ConfigError(where="model", value=model, rule="is not a Hub id", fix="write ORG/NAME"))
    return _read_hub(model, revision)


def split_revision(model: str, revision: str | None = None) -> tuple[str, str | None]:
    """Split `ORG/NAME@REVISION`; return local paths, names without `@` and `revision` unchanged.

    >>> split_revision("org/name@v1"), split_revision("org/name", "main")
    (('org/name', 'v1'), ('org/name', 'main'))

    Raises:
        UsageError: `revision` is another one.
    """
    name, sign, named = model.partition("@")
    if not sign or not named or not HUB_ID.fullmatch(name) or Path(model).exists():
        return model, revision
    if revision not in (None, named):
        rule, fix = f"is {named} in {model}", "set it once"
        raise UsageError(ConfigError(where="revision", value=revision, rule=rule, fix=fix))
    return name, named


def refuse_no_hub_id(model: str) -> None:
    """Raise a `UsageError` for a name that is not a local path and cannot be a Hub id."""
    if model.endswith(".json") or model.startswith((".", "/", "~")) or not HUB_ID.fullmatch(model):
        from ..ds_configs.specs.texts import near_path

        near = near_path(model)
        rule, fix = "no such file or directory, and not a Hub id", f"did you mean {near}?" if near else "write ORG/NAME"
        raise UsageError(ConfigError(where="model", value=model, rule=rule, fix=fix))


def read_config(file: Path, *, source: str) -> dict[str, Any]:
    """Return a `config.json`.

    Raises:
        UsageError: it cannot be read.
        RefusedInputError: it is not a configuration.
    """
    try:
        with file.open("rb") as stream:
            content = stream.read(LARGEST_CONFIG_BYTES + 1)
    except OSError as error:
        raise UsageError(ConfigError(where=str(file), rule=f"cannot be read ({error.strerror})")) from None
    return parse_config_json(content, source=source)


def _read_hub(model: str, revision: str | None) -> ModelSource:
    from huggingface_hub import HfApi, hf_hub_download, is_offline_mode

    def request() -> tuple[Path, str | None, int | None]:
        sha = HfApi().model_info(model, revision=revision).sha
        file = Path(hf_hub_download(model, "config.json", revision=revision))
        commit = commit_of(file) or sha
        tensors = _hub_tensors(model, commit)
        return file, commit, None if tensors is None else sum(tensor.elements for tensor in tensors.values())

    try:
        if is_offline_mode():
            file = Path(hf_hub_download(model, "config.json", revision=revision, local_files_only=True))
            commit, count = commit_of(file), None
        else:
            file, commit, count = within_limit(request, f"model {model}")
        config = read_config(file, source=model)
    except ShardwrightError:
        raise
    except hub_errors() as error:
        raise explain_hub_error(model, revision, error) from None
    return ModelSource(name=model, revision=commit, config=config, checkpoint_parameters=count)


def commit_of(cached: Path) -> str | None:
    """Return the commit of a file or directory in the cache of the Hub."""
    return next((part for part in cached.parts if COMMIT.fullmatch(part)), None)


def read_hub_tensors(model: str, commit: str | None) -> dict[str, StoredTensor]:
    """Return the tensors of a Hub repository from its safetensors headers; empty without such files, or offline.

    Raises:
        RefusedInputError: a header is corrupt.
        ShardwrightError: the Hub does not answer.
    """
    from huggingface_hub import is_offline_mode

    if is_offline_mode():
        return {}
    try:
        return within_limit(lambda: _hub_tensors(model, commit), f"headers of {model}") or {}
    except ShardwrightError:
        raise
    except hub_errors() as error:
        raise explain_hub_error(model, commit, error) from None


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
        # huggingface_hub 1.33 checks that a header is JSON, but not its content, and does not check the index.
        raise RefusedInputError(
            ConfigError(where=model, rule=f"has a corrupt safetensors header ({error!r})")
        ) from None


def hub_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that huggingface_hub raises for failed requests.

    Its own errors are `OSError` or `ValueError`; it also raises those of its HTTP client.
    """
    from huggingface_hub.errors import HfHubHTTPError

    # huggingface_hub uses httpx in 1.x and httpx2 in 2.x, and exports the module only since 1.31; its errors derive
    # from the client's in every release. `datasets` uses httpx itself.
    names = {HfHubHTTPError.__bases__[0].__module__, "httpx", "httpx2"}
    clients = [module for name in names if (module := sys.modules.get(name))]
    return (*(kind for client in clients for kind in (client.HTTPError, client.InvalidURL)), OSError, ValueError)


_DENIED = (401, 403)


def hub_status(error: Exception) -> int | None:
    """Return the HTTP status of a failed request, or 401 or 403 of the request that caused it; else `None`.

    Seen with huggingface_hub 1.33 and datasets 5.2: a download that is denied ends as a file that is not cached.
    """
    from huggingface_hub.errors import HfHubHTTPError

    cause: BaseException | None = error
    while cause is not None:
        response = getattr(cause, "response", None) if isinstance(cause, HfHubHTTPError) else None
        if response is not None and (cause is error or response.status_code in _DENIED):
            return int(response.status_code)
        cause = cause.__cause__ or cause.__context__
    return None


def hub_failure(error: Exception) -> str:
    """Return what a failed request means and how to fix it, as one line."""
    from huggingface_hub import get_token

    status = hub_status(error)
    if status is None:
        return f"the Hub cannot be reached ({type(error).__name__})"
    if status == 401:
        if get_token() is None:
            return "the Hub requires a token (401); `hf auth login`, or set HF_TOKEN"
        return "the Hub does not accept the token (401); `hf auth login` with a valid one, or unset HF_TOKEN"
    if status == 403:
        return (
            "the Hub denies access (403); accept the terms of a gated repository on its page, "
            "or `hf auth login` with a token that has access to it"
        )
    return f"the Hub answered {status}; try again later"


def uncaught_hub_failure(error: Exception) -> str | None:
    """Return `hub_failure` for an error of the Hub or its HTTP client; `None` for every other error."""
    if "huggingface_hub.errors" not in sys.modules:
        return None
    from huggingface_hub.errors import HfHubHTTPError

    others = (OSError, ValueError)
    kinds = (HfHubHTTPError, *(kind for kind in hub_errors() if kind not in others))
    return hub_failure(error) if isinstance(error, kinds) else None


def explain_hub_error(model: str, revision: str | None, error: Exception) -> ShardwrightError:
    """Convert an error of the Hub to one for the user who passed a model."""
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    where = f"model = {model!r}"
    if isinstance(error, GatedRepoError):
        return ShardwrightError(f"{where}: the repository is gated; accept its terms on the Hub, then `hf auth login`")
    if isinstance(error, LocalEntryNotFoundError) and hub_status(error) in _DENIED:
        return ShardwrightError(f"{where}: {hub_failure(error)}")
    if isinstance(error, LocalEntryNotFoundError) or "offline" in type(error).__name__.lower():
        mode = "offline mode is on (HF_HUB_OFFLINE)" if os.environ.get("HF_HUB_OFFLINE") else "no connection to the Hub"
        return ShardwrightError(
            f"{where}: no such local path, {mode} and config.json is not cached; pass a local directory or config.json"
        )
    if isinstance(error, RevisionNotFoundError):
        return UsageError(ConfigError(where="revision", value=revision, rule=f"does not exist in {model}"))
    if isinstance(error, EntryNotFoundError):
        fix = "pass a model; an adapter needs shardwright merge first, or pass its base model"
        return UsageError(ConfigError(where="model", value=model, rule="the repository has no config.json", fix=fix))
    if isinstance(error, RepositoryNotFoundError):
        rule, fix = "no such local path or Hub repository", "check the spelling; `hf auth login` for a private one"
        return UsageError(ConfigError(where="model", value=model, rule=rule, fix=fix))
    if hub_status(error) is not None:
        return ShardwrightError(f"{where}: {hub_failure(error)}")
    return ShardwrightError(
        f"{where}: no such local path, and {hub_failure(error)}; pass a local directory or config.json"
    )


WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")
_SMALL_FILES = ("*.json", "*.model", "*.txt", "*.jinja")
_FILES = (*_SMALL_FILES, "*.safetensors")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


def model_directory(model: str, *, revision: str | None = None, weights: bool = True) -> Path:
    """Return a local path, or the cache directory of a Hub model's files; download files that are not in the cache.

    A cached commit needs no request. Without `weights`, only configuration and tokenizer are downloaded.

    Raises:
        UsageError: there is no such path, repository or revision.
        ShardwrightError: the Hub does not send the files, or not in time.
    """
    if (local := Path(model).expanduser()).exists():
        return local
    if (cached := _cached(model, revision, weights=weights)) is not None:
        return cached
    refuse_no_hub_id(model)
    from huggingface_hub import snapshot_download

    try:
        patterns = list(_FILES if weights else _SMALL_FILES)
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns))
    except ShardwrightError:
        raise
    except Exception as error:
        # Any error of the connection, the cache or the disk.
        raise explain_hub_error(model, revision, error) from None


def _cached(model: str, revision: str | None, *, weights: bool) -> Path | None:
    """Return the cache directory of a commit, whose files never change, if all of them are there.

    Planning caches `config.json` alone, so only a tokenizer shows that all small files were fetched.
    """
    from huggingface_hub import try_to_load_from_cache

    if revision is None or not COMMIT.fullmatch(revision):
        return None
    config = try_to_load_from_cache(model, "config.json", revision=revision)
    if not isinstance(config, str):
        return None
    directory = Path(config).parent
    if not any((directory / name).is_file() for name in TOKENIZER_FILES):
        return None
    try:
        return directory if not weights or checkpoint_files(directory) else None
    except RefusedInputError:
        # The index is cached, but a shard is missing.
        return None


def check_endpoint() -> None:
    """Check `HF_ENDPOINT`, which huggingface_hub reads when it is imported.

    Raises:
        UsageError: it is not a URL.
    """
    address = os.environ.get("HF_ENDPOINT", "")
    try:
        parts = urlsplit(address)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        is_valid = False
    if address and not is_valid:
        rule, fix = "is not a URL of a Hub", "set it to a URL such as https://huggingface.co, or unset it"
        raise UsageError(ConfigError(where="HF_ENDPOINT", value=address, rule=rule, fix=fix))
