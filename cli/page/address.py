"""State of the page as the query of its address: the words of `shardwright plan`, so that a plan can be shared."""

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
from ...ds_configs.specs.errors import Fault, RefusedInputError, UsageError
from ...ds_configs.specs.settings import settings_of
from ..planning.stated import PlanSettings
from ..settings import grouped

CONFIG_FILE, HARDWARE_FILE = "config.json", "hardware.yaml"
LONGEST_PACKED = 8_000
"""Characters of an uploaded configuration that an address still carries; servers refuse lines of some 64 kB."""
_MOST_SETTINGS = 100


@grouped
class PageSettings(PlanSettings):
    """Settings of a plan, and what the command line has files and an argument for."""

    group = "Model"

    model: str = Field("", description="ORG/NAME of a model on the Hub")
    link_bytes_per_s: str | None = Field(
        None, description="One direction, one accelerator to its peers within the node, such as 300GB/s"
    )
    network_bytes_per_s: str | None = Field(
        None, description="One direction and accelerator, between nodes, such as 25GB/s"
    )
    config: str | None = Field(None, description="An uploaded config.json, packed")

    @property
    def states_links(self) -> bool:
        """Whether the cluster is one that only a file of hardware describes on the command line."""
        return self.link_bytes_per_s is not None or self.network_bytes_per_s is not None


EXAMPLE = settings_of(PageSettings, {"model": "meta-llama/Llama-3.1-8B", "hardware": "8xA100-80GB"})
"""What the page shows when its address says nothing."""
_FIRST = ("model", "hardware")
_OWN = {"hardware", *(PageSettings.model_fields.keys() - PlanSettings.model_fields.keys())}


def settings_from_query(query: str) -> PageSettings:
    """Return the settings that an address states, those of `EXAMPLE` where it states none.

    Names that begin with two underscores are those of Gradio and of Spaces.

    Raises:
        UsageError: unknown names, names that stand twice, and values that are not allowed, all together.
    """
    try:
        pairs = parse_qsl(query, keep_blank_values=True, max_num_fields=_MOST_SETTINGS)
    except ValueError:
        raise UsageError(Fault(where="address", rule=f"states more than {_MOST_SETTINGS} settings")) from None
    pairs = [(name.replace("-", "_"), value) for name, value in pairs if not name.startswith("__")]
    names = [name for name, _ in pairs]
    twice = [Fault(where=name, rule="stands twice in the address") for name in set(names) if names.count(name) > 1]
    if twice:
        raise UsageError(twice)
    return settings_of(PageSettings, dict(pairs)) if pairs else EXAMPLE


def settings_from_form(values: Mapping[str, Any]) -> PageSettings:
    """Return the settings that fields of the form state: those that are filled, with another value than the default.

    Raises:
        UsageError: values that are not allowed, all together.
    """
    defaults = {name: field.default for name, field in PageSettings.model_fields.items()}
    filled = {
        name: value.strip() if isinstance(value, str) else value
        for name, value in values.items()
        if value is not None and str(value).strip() not in ("", str(defaults[name]))
    }
    return settings_of(PageSettings, filled)


def query_of(settings: PageSettings) -> str:
    """Return the query that `settings_from_query` reads; a configuration beyond `LONGEST_PACKED` is left out."""
    return urlencode({name: text for name, text in _texts(settings).items() if name != "config" or _is_short(text)})


def is_shared_by(settings: PageSettings) -> bool:
    """Whether the address alone makes the plan again."""
    return settings.config is None or _is_short(settings.config)


def _is_short(packed: str) -> bool:
    return len(packed) <= LONGEST_PACKED


def _texts(settings: PageSettings) -> dict[str, str]:
    """Return what is stated as text, by name, in the order of the settings; defaults are left out."""
    fields = PageSettings.model_fields
    stated = {name: value for name, value in settings.stated().items() if value != fields[name].default}
    return {name: _text(value) for name, value in sorted(stated.items(), key=lambda item: _place(item[0]))}


def _text(value: object) -> str:
    if isinstance(value, float):
        short = f"{value:g}"
        return short if float(short) == value else repr(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _place(name: str) -> int:
    """Model and hardware come first, an uploaded file last."""
    return [*_FIRST, *(other for other in PageSettings.model_fields if other not in _FIRST)].index(name)


def pack_config(content: bytes) -> str:
    """Return an uploaded `config.json` as text for an address.

    Raises:
        RefusedInputError: it is no configuration of a model, or an absurd one.
    """
    config = parse_config_json(content, source=CONFIG_FILE)
    compact = json.dumps(config, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")
    return base64.urlsafe_b64encode(zlib.compress(compact, 9)).decode().rstrip("=")


def unpack_config(packed: str) -> dict[str, Any]:
    """Return the validated configuration that `pack_config` packed.

    Raises:
        RefusedInputError: the text is cut or was not packed, or it holds no sound configuration.
    """
    try:
        data = base64.urlsafe_b64decode(packed + "=" * (-len(packed) % 4))
        # Text of a few kB can hold gigabytes of zeros.
        content = zlib.decompressobj().decompress(data, LARGEST_CONFIG_BYTES + 1)
    except (zlib.error, ValueError):
        content = b""
    if not content:
        fix = "copy the whole address, or upload the file again"
        raise RefusedInputError(Fault(where="config", rule="is no packed config.json, or a cut one", fix=fix))
    return parse_config_json(content, source=CONFIG_FILE)


def command_of(settings: PageSettings) -> str:
    """Return the command line that makes the same plan; links that were stated come from a file of hardware."""
    words = ["shardwright", "plan", settings.model or CONFIG_FILE]
    words += ["--hardware", HARDWARE_FILE if settings.states_links else str(settings.hardware)]
    for name, text in _texts(settings).items():
        if name in _OWN:
            continue
        option = f"--{name.replace('_', '-')}"
        words += [option] if text == "true" else [option, text]
    return shlex.join([*words, "--output-dir", "plan"])
