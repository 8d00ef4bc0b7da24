"""Model cards through `huggingface_hub.ModelCard`: what the Hub reads of a model, and what others say."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

CARD_FILE = "README.md"
Relation = Literal["adapter", "finetune", "quantized"]
"""How a model came from its base, in the words of the Hub."""


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
    """Return a card with its metadata.

    A base model that lies on this machine is not named: the card is published, and its place is nobody's business. What
    it was made from itself, by its own card, is named instead. A licence is stated where base and others agree on it.

    Args:
        text: Body in Markdown.
        base: Hub id or path of the model that the weights come from.
        relation: How they came from it.
        library: Such as `transformers`.
        tags: What the Hub finds it by.
        others: Further models whose licence may bind, such as a teacher.
        task: What the Hub offers the model for; `None` for nothing.
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
    # In ASCII: PyYAML 6.0.3 reads the line break U+0085 of a string that it wrote itself as a space.
    metadata = yaml.safe_dump(data.to_dict(), sort_keys=False, allow_unicode=False)
    return f"---\n{metadata}---\n{text}"


def _metadata(model: str) -> dict[str, Any]:
    """Return the metadata of a card that lies beside a local model or in the cache of the Hub; nobody is asked."""
    import yaml
    from huggingface_hub import metadata_load, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    path = Path(model)
    try:
        card = (path if path.is_dir() else path.parent) / CARD_FILE if path.exists() else None
        card = card or try_to_load_from_cache(model, CARD_FILE)
        found = metadata_load(card) if isinstance(card, str | Path) and Path(card).is_file() else None
    except (OSError, ValueError, HFValidationError, yaml.YAMLError):
        # Somebody else's card may hold anything.
        return {}
    return found or {}


def license_of(model: str) -> str:
    """Return the licence that the card of a model states, or where to look."""
    found = _metadata(model).get("license")
    return found if isinstance(found, str) else f"see the card of `{shown_name(model)}`"


def shown_name(model: str) -> str:
    """Return what a published card calls a model: its Hub id, or the name of its directory without the place."""
    return title_of(model) if Path(model).exists() else model


def title_of(model: str) -> str:
    """Return the name of a model without what stands before it; of a `config.json` that of its directory.

    >>> title_of("Qwen/Qwen3-0.6B"), title_of("students/half/config.json"), title_of("half.json")
    ('Qwen3-0.6B', 'half', 'half')
    """
    path = Path(model)
    if path.name == "config.json":
        return path.absolute().parent.name or path.stem
    if path.suffix == ".json":
        return path.stem
    return path.resolve().name if path.name in ("", "..") else path.name
