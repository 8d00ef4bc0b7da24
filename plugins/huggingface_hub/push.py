"""Uploads of finished directories to the Hub.

Seen with huggingface_hub 1.33: `upload_folder` sends large files in several commits and, asked again, only what is not
there yet; `upload_large_folder` is deprecated in its favour.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...ds_configs.specs.errors import Fault, ShardwrightError, UsageError
from ..launching.notes import Notify
from .time_limit import within_limit

_REPOSITORY = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*", re.ASCII)
_NAMES_PLACES = ("accelerate.yaml", "launch.*", "hostfile", "training_arguments.json")
LEFT_OUT = ("checkpoints/**", ".cache/**", "**/.DS_Store", *(f"plan/{name}" for name in _NAMES_PLACES))
"""Patterns of what no reader of a model needs: checkpoints, and what names places of the machine."""


def push_faults(repository: str | None) -> list[Fault]:
    """Return why a directory could not be uploaded to a repository: its name, no token, one that may not write there.

    Asks the Hub who the token belongs to, and changes nothing; without a repository nothing is asked.
    """
    if repository is None:
        return []

    def fault(rule: str, fix: str) -> list[Fault]:
        return [Fault(where="push_to_hub", value=repository, rule=rule, fix=fix)]

    from huggingface_hub import HfApi, get_token

    if not _REPOSITORY.fullmatch(repository):
        return fault("is no name of a Hub repository", "write ORG/NAME")
    if get_token() is None:
        return fault("needs a token of the Hub, and there is none", "hf auth login, or set HF_TOKEN")
    try:
        owner: dict[str, Any] = within_limit(HfApi().whoami, "who the token belongs to")
    except Exception as error:
        if _status(error) == 401:
            return fault("the Hub does not accept the token", "hf auth login with a valid one")
        return fault(f"the Hub cannot be asked ({type(error).__name__})", "try again later, or leave the option out")
    namespace, _, name = repository.rpartition("/")
    token = owner.get("auth", {}).get("accessToken", {})
    if token.get("role") == "read" or not _may_write(token, namespace or str(owner.get("name")), name):
        return fault("the token may only read", "make one with write access in the Hub's settings, then hf auth login")
    known = [owner.get("name"), *(group.get("name") for group in owner.get("orgs", []))]
    if namespace and namespace not in known:
        return fault(f"the token's owner is not a member of {namespace}", f"use {owner.get('name')}/{name}")
    return []


def _may_write(token: dict[str, Any], namespace: str, name: str) -> bool:
    """Tell whether a token writes to a repository: one with scopes, where a scope of it or of its owner says so."""
    scopes = token.get("fineGrained", {}).get("scoped")
    if token.get("role") != "fineGrained" or scopes is None:
        return True
    places = (namespace, f"{namespace}/{name}")
    return any(
        scope.get("entity", {}).get("name") in places and "repo.write" in scope.get("permissions", ())
        for scope in scopes
    )


def claim_repository(repository: str, *, private: bool) -> None:
    """Make a model repository where there is none, which proves that it may be written to.

    Raises:
        ShardwrightError: the Hub refuses.
    """
    from huggingface_hub import HfApi

    try:
        within_limit(
            lambda: HfApi().create_repo(repository, private=private, exist_ok=True), f"repository {repository}"
        )
    except Exception as error:
        raise ShardwrightError(f"push_to_hub = {repository!r}: the Hub refuses it ({_reason(error)})") from None


def push_directory(directory: Path, repository: str) -> str:
    """Upload what a directory holds, but for `LEFT_OUT`, and return the address of the repository.

    Raises:
        ShardwrightError: the upload failed; the directory is whole, and uploading again sends what is missing.
    """
    from huggingface_hub import HfApi

    try:
        return str(
            HfApi()
            .upload_folder(
                repo_id=repository,
                folder_path=directory,
                ignore_patterns=list(LEFT_OUT),
                commit_message="Upload by Shardwright",
            )
            .repo_url
        )
    except Exception as error:
        raise ShardwrightError(
            f"push_to_hub = {repository!r}: the upload failed ({_reason(error)}); {directory} is whole: "
            f"`hf upload {repository} {directory}` sends what is missing"
        ) from None


@contextmanager
def pushed(directory: Path, repository: str | None, *, private: bool, notify: Notify) -> Iterator[None]:
    """Upload a directory when the block that fills it has ended; without a repository do nothing.

    Raises:
        UsageError: it cannot be written to.
        ShardwrightError: the Hub refuses it, or the upload failed.
    """
    if repository is None:
        yield
        return
    check_push(repository)
    claim_repository(repository, private=private)
    yield
    notify(f"uploaded to {push_directory(directory, repository)}")


def check_push(repository: str | None) -> None:
    """Refuse a repository that cannot be written to, before anything heavy starts.

    Raises:
        UsageError: all that `push_faults` finds.
    """
    if faults := push_faults(repository):
        raise UsageError(faults)


def _status(error: Exception) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)


def _reason(error: Exception) -> str:
    status = _status(error)
    return f"{type(error).__name__}" if status is None else f"{type(error).__name__}, {status}"
