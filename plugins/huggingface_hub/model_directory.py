"""`model_directory`: the files of a model on this machine, those of a Hub repository fetched under the time limit.

Weights are read from the directory that it returns, so that no library asks the Hub by itself: `from_pretrained` of
transformers 5.17.0 knows no limit of time for all of its questions, and every rank would ask them.
"""

from __future__ import annotations

from pathlib import Path

from ...ds_configs.specs.errors import RefusedInputError, ShardwrightError
from ..safetensors.reading import checkpoint_files
from .hub import COMMIT, explain_hub_error, refuse_no_hub_id
from .time_limit import fetch_snapshot

_SMALL_FILES = ("*.json", "*.model", "*.txt", "*.jinja")
_FILES = (*_SMALL_FILES, "*.safetensors")


def model_directory(model: str, *, revision: str | None = None, weights: bool = True) -> Path:
    """Return a local model's own path, or the directory of a Hub model's files in the cache, fetched where they lack.

    Args:
        model: Hub id, local directory, or a file in one.
        revision: Branch, tag or commit of a Hub model; nothing is asked for a commit that is here already.
        weights: Whether safetensors are wanted beside configuration and tokenizer.

    Raises:
        UsageError: there is no such path, repository or revision.
        ShardwrightError: the Hub does not give the files, or not in time.
    """
    if (local := Path(model).expanduser()).exists():
        return local
    if (found := _cached(model, revision, weights=weights)) is not None:
        return found
    refuse_no_hub_id(model)
    try:
        return fetch_snapshot(model, revision=revision, patterns=_FILES if weights else _SMALL_FILES)
    except ShardwrightError:
        raise
    except Exception as error:
        # Whatever the connection, the cache or the disk raises.
        raise explain_hub_error(model, revision, error) from None


def _cached(model: str, revision: str | None, *, weights: bool) -> Path | None:
    """Return the files of a commit, which never change, where all of them are in the cache."""
    from huggingface_hub import try_to_load_from_cache

    if revision is None or not COMMIT.fullmatch(revision):
        return None
    config = try_to_load_from_cache(model, "config.json", revision=revision)
    if not isinstance(config, str):
        return None
    directory = Path(config).parent
    try:
        return directory if not weights or checkpoint_files(directory) else None
    except RefusedInputError:
        # The index is here and a shard is not.
        return None
