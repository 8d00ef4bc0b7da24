"""State of the page as the query of its address, so that a plan can be shared."""

from __future__ import annotations

import base64
import json
import shlex
import zlib
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl, urlencode

from pydantic import Field

from ...ds_configs.models.model_config import LARGEST_CONFIG_BYTES, parse_config_json
from ...ds_configs.specs.errors import ConfigError, RefusedInputError, UsageError
from ...ds_configs.specs.settings import settings_of
from ..plan_settings import PlanSettings
from ..settings import grouped

CONFIG_FILE, HARDWARE_FILE = "config.json", "hardware.yaml"
LONGEST_PACKED = 8_000
"""Longest uploaded configuration in an address, in characters; servers reject lines of about 64 kB."""
_MOST_SETTINGS = 100


@grouped
class PageSettings(PlanSettings):
    """Settings of a plan, and those that are files or arguments on the command line."""

    group = "Model"

    model: str = Field("", description="ORG/NAME of a model on the Hub")
    link_bytes_per_s: str | None = Field(
        None, description="Per accelerator and direction within a node, such as 300GB/s"
    )
    network_bytes_per_s: str | None = Field(
        None, description="Per accelerator and direction between nodes, such as 25GB/s"
    )
    config: str | None = Field(None, description="An uploaded config.json, packed")

    @property
    def states_links(self) -> bool:
        """Whether the command line needs a hardware file."""
        return self.link_bytes_per_s is not None or self.network_bytes_per_s is not None


EXAMPLE = settings_of(PageSettings, {"model": "meta-llama/Llama-3.1-8B", "hardware": "8xA100-80GB"})
"""Settings of the page for an address without a query."""
_FIRST = ("model", "hardware")
_OWN = {"hardware", *(PageSettings.model_fields.keys() - PlanSettings.model_fields.keys())}


def settings_from_query(query: str) -> PageSettings:
    """Return the settings of an address, or `EXAMPLE` without any.

    Names that begin with two underscores belong to Gradio and Spaces.

    Raises:
        UsageError: unknown or duplicate names, and invalid values, all together.
    """
    try:
        pairs = parse_qsl(query, keep_blank_values=True, max_num_fields=_MOST_SETTINGS)
    except ValueError:
        raise UsageError(ConfigError(where="address", rule=f"has more than {_MOST_SETTINGS} settings")) from None
    pairs = [(name.replace("-", "_"), value) for name, value in pairs if not name.startswith("__")]
    names = [name for name, _ in pairs]
    if twice := {name for name in names if names.count(name) > 1}:
        raise UsageError([ConfigError(where=name, rule="occurs twice in the address") for name in sorted(twice)])
    return settings_of(PageSettings, dict(pairs)) if pairs else EXAMPLE


def settings_from_form(values: Mapping[str, Any]) -> PageSettings:
    """Return the settings of the fields that are not empty and differ from the default.

    Raises:
        UsageError: invalid values, all together.
    """
    defaults = {name: field.default for name, field in PageSettings.model_fields.items()}
    filled = {
        name: value.strip() if isinstance(value, str) else value
        for name, value in values.items()
        if value is not None and str(value).strip() not in ("", str(defaults[name]))
    }
    return settings_of(PageSettings, filled)


def query_of(settings: PageSettings) -> str:
    """Return the query that `settings_from_query` reads, without a configuration longer than `LONGEST_PACKED`."""
    return urlencode({name: text for name, text in _texts(settings).items() if name != "config" or _is_short(text)})


def is_shared_by(settings: PageSettings) -> bool:
    """Return whether the address contains all settings."""
    return settings.config is None or _is_short(settings.config)


def _is_short(packed: str) -> bool:
    return len(packed) <= LONGEST_PACKED


def _texts(settings: PageSettings) -> dict[str, str]:
    """Return the settings that differ from their defaults, as text: model and hardware first, an upload last."""
    texts, stated = {}, settings.stated()
    for name in (*_FIRST, *(other for other in PageSettings.model_fields if other not in _FIRST)):
        if name not in stated or (value := stated[name]) == PageSettings.model_fields[name].default:
            continue
        texts[name] = str(value).lower() if isinstance(value, bool) else str(value)
        if isinstance(value, float):
            texts[name] = f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return texts


def pack_config(content: bytes) -> str:
    """Return an uploaded `config.json` as text for an address.

    Raises:
        RefusedInputError: it is not the configuration of a model, or has impossible values.
    """
    config = parse_config_json(content, source=CONFIG_FILE)
    compact = json.dumps(config, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")
    return base64.urlsafe_b64encode(zlib.compress(compact, 9)).decode().rstrip("=")


def unpack_config(packed: str) -> dict[str, Any]:
    """Return the validated configuration that `pack_config` packed.

    Raises:
        RefusedInputError: the text is truncated or was not packed, or the configuration is invalid.
    """
    try:
        data = base64.urlsafe_b64decode(packed + "=" * (-len(packed) % 4))
        # A few kB can decompress to gigabytes.
        content = zlib.decompressobj().decompress(data, LARGEST_CONFIG_BYTES + 1)
    except (zlib.error, ValueError):
        content = b""
    if not content:
        fix = "copy the whole address, or upload the file again"
        raise RefusedInputError(ConfigError(where="config", rule="is not a complete packed config.json", fix=fix))
    return parse_config_json(content, source=CONFIG_FILE)


def command_of(settings: PageSettings) -> str:
    """Return the command line for the same plan, with a hardware file if links are set."""
    words = ["shardwright", "plan", settings.model or CONFIG_FILE]
    words += ["--hardware", HARDWARE_FILE if settings.states_links else str(settings.hardware)]
    for name, text in _texts(settings).items():
        if name in _OWN:
            continue
        option = f"--{name.replace('_', '-')}"
        words += [option] if text == "true" else [option, text]
    return shlex.join([*words, "--output-dir", "plan"])
