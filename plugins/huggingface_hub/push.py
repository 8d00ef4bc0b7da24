"""Uploads of finished directories to the Hub, and model cards.

Observed with huggingface_hub 1.33: `upload_folder` sends large files in several commits. A second call sends only what
is missing. `upload_large_folder` is deprecated in its favour.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from ...ds_configs.specs.errors import ConfigError, ShardwrightError, UsageError
from .hub import HUB_ID, hub_status, within_limit

_NAMES_PLACES = ("accelerate.yaml", "launch.*", "hostfile", "training_arguments.json")
LEFT_OUT = (
    "checkpoints/**",
    ".cache/**",
    "**/.DS_Store",
    "plan_measurement.json",
    *(f"plan/{name}" for name in _NAMES_PLACES),
)
"""Patterns of files that are not uploaded: checkpoints, and files that contain paths of this machine."""

logger = logging.getLogger(__name__)


def push_errors(repository: str | None) -> list[ConfigError]:
    """Return why a directory cannot be uploaded to a repository: its name, or a missing token.

    Sends no request: `pushed` creates the repository before the work, which proves write access.
    """
    from huggingface_hub import get_token

    if repository is None:
        return []
    if not HUB_ID.fullmatch(repository):
        rule, fix = "is not a name of a Hub repository", "write ORG/NAME"
    elif get_token() is None:
        rule, fix = "needs a Hub token, and there is none", "hf auth login, or set HF_TOKEN"
    else:
        return []
    return [ConfigError(where="push_to_hub", value=repository, rule=rule, fix=fix)]


@contextmanager
def pushed(directory: Path, repository: str | None, *, private: bool) -> Iterator[None]:
    """Create a model repository, check write access, and upload a directory without `LEFT_OUT` after the block.

    The block fills the directory. Without a repository nothing is done. Call `check_push` before.

    Raises:
        ShardwrightError: the Hub rejects the request, or the upload failed; a second upload sends the missing files.
    """
    if repository is None:
        yield
        return
    from huggingface_hub import HfApi

    def create() -> None:
        created = HfApi().create_repo(repository, private=private, exist_ok=True)
        # A repository that exists proves no access.
        HfApi().auth_check(created.repo_id, write=True)

    try:
        within_limit(create, f"repository {repository}")
    except Exception as error:
        raise ShardwrightError(f"push_to_hub = {repository!r}: the Hub rejected it ({_reason(error)})") from None
    yield
    try:
        commit = HfApi().upload_folder(
            repo_id=repository,
            folder_path=directory,
            ignore_patterns=list(LEFT_OUT),
            commit_message="Upload by Shardwright",
        )
    except Exception as error:
        raise ShardwrightError(
            f"push_to_hub = {repository!r}: the upload failed ({_reason(error)}); {directory} is complete: "
            f"`hf upload {repository} {directory}` uploads the missing files"
        ) from None
    logger.info(f"uploaded to {commit.repo_url}")


def check_push(repository: str | None) -> None:
    """Check that a repository can be written to.

    Raises:
        UsageError: the errors of `push_errors`.
    """
    if errors := push_errors(repository):
        raise UsageError(errors)


def _reason(error: Exception) -> str:
    status = hub_status(error)
    if status == 401:
        return "401: the Hub does not accept the token; `hf auth login` with a valid one"
    if status == 403:
        return "403: the token has no write access to it"
    return type(error).__name__ if status is None else f"{type(error).__name__}, {status}"


CARD_FILE = "README.md"
Relation = Literal["adapter", "finetune", "quantized"]
"""Relation of a model to its base model, in the Hub's terms."""


def model_card(
    text: str,
    *,
    base: str,
    relation: Relation,
    library: str,
    tags: Sequence[str],
    others: Sequence[str] = (),
    task: str | None = "text-generation",
) -> str:
    """Return a model card with its metadata.

    The card never contains a local path. For a local base model, the base of that model's own card is named instead. A
    licence is included only if the base and the other models have the same one.

    Args:
        text: Body in Markdown.
        base: Hub id or path of the model that the weights come from.
        relation: Relation of the model to its base.
        library: Such as `transformers`.
        tags: Tags on the Hub.
        others: Further models whose licence may apply, such as a second model.
        task: Pipeline tag on the Hub; `None` for none.
    """
    import yaml
    from huggingface_hub import ModelCardData

    stated = _metadata(base)
    bases = stated.get("base_model") if Path(base).exists() else base
    licensed = {name: stated[name] for name in ("license", "license_name", "license_link") if name in stated}
    agreed = isinstance(stated.get("license"), str) and all(
        _metadata(other).get("license") == stated["license"] for other in others
    )
    data = ModelCardData(
        base_model=bases,
        base_model_relation=relation if bases else None,
        library_name=library,
        pipeline_tag=task,
        tags=list(tags),
        **(licensed if agreed else {}),
    )
    # In ASCII: PyYAML 6.0.3 reads a line break U+0085 that it wrote itself as a space.
    metadata = yaml.safe_dump(data.to_dict(), sort_keys=False, allow_unicode=False)
    return f"---\n{metadata}---\n{text}"


def _metadata(model: str) -> dict[str, Any]:
    """Return the metadata of a local or cached model card, without a request to the Hub."""
    import yaml
    from huggingface_hub import metadata_load, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    path = Path(model)
    try:
        card = (path if path.is_dir() else path.parent) / CARD_FILE if path.exists() else None
        card = card or try_to_load_from_cache(model, CARD_FILE)
        metadata = metadata_load(card) if isinstance(card, str | Path) and Path(card).is_file() else None
    except (OSError, ValueError, HFValidationError, yaml.YAMLError):
        # The card may be invalid.
        return {}
    return metadata or {}


def license_of(model: str) -> str:
    """Return the licence in a model's card, or a reference to the card."""
    name = _metadata(model).get("license")
    return name if isinstance(name, str) else f"see the card of `{shown_name(model)}`"


def shown_name(model: str) -> str:
    """Return the name of a model for a published card: its Hub id, or the name of its directory without the path."""
    return title_of(model) if Path(model).exists() else model


def title_of(model: str) -> str:
    """Return the last part of a model's name or path; for a `config.json`, the name of its directory.

    >>> title_of("Qwen/Qwen3-0.6B"), title_of("students/half/config.json"), title_of("half.json")
    ('Qwen3-0.6B', 'half', 'half')
    """
    path = Path(model)
    if path.name == "config.json":
        return path.absolute().parent.name or path.stem
    if path.suffix == ".json":
        return path.stem
    return path.resolve().name if path.name in ("", "..") else path.name
