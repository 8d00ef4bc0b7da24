"""Plan of the page's settings, by the functions of the command line, and its files as an archive.

On a Space anyone can open the page, so no setting is a path that is read on this machine.
"""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import yaml

from ...ds_configs.plan.gallery import packaged_model, packaged_models
from ...ds_configs.plan.plan import Plan, render_files, with_offers
from ...ds_configs.specs.errors import ConfigError, UsageError, collecting
from ...ds_configs.specs.hardware import HardwareSpec, hardware_from_mapping, parse_hardware, parse_overrides
from ...ds_configs.specs.model import ModelSpec
from ...plugins.huggingface_hub.hub import ModelSource, read_hub_source
from ...plugins.planning.from_names import job_from_words
from ...plugins.planning.from_names import plan as select_plan
from ...plugins.planning.models import LoadedModel, model_from_source
from ...plugins.releases import transformers_release
from ..plan_settings import answers, question_errors, shown_answers
from .address import CONFIG_FILE, HARDWARE_FILE, PageSettings, unpack_config

_LINKS = ("link_bytes_per_s", "network_bytes_per_s")
_OLDEST_DATE = (1980, 1, 1, 0, 0, 0)
"""Fixed, so that the same plan gives the same archive; the earliest date of ZIP."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """A plan with its notes, answers and files."""

    plan: Plan
    settings: PageSettings
    notes: tuple[str, ...]
    """Notes of planning."""
    answers: tuple[str, ...]
    """Answers about the whole run."""
    files: dict[str, str | bytes]
    """Contents by name: the files of `shardwright plan`, and uploaded files that its command line reads."""
    name: str
    """Name of the archive and of its directory."""


@cache
def known_models() -> dict[str, ModelSpec]:
    """Return the models of the gallery by Hub id, which need no request to the Hub."""
    return {name: packaged_model(name, release=transformers_release()) for name in packaged_models()}


def planned(settings: PageSettings, *, offers: bool = True) -> Planned:
    """Return the plan that `shardwright plan` makes of the same settings; `offered` adds offers.

    Raises:
        UsageError: a name, value or combination cannot be used.
        RefusedInputError: the model's files are corrupt, absurd or unsafe.
        PlanDoesNotFitError: no layout fits.
        ShardwrightError: the Hub cannot be reached or denies access.
    """
    notes: list[str] = []
    errors = question_errors(settings)
    with collecting(errors):
        hardware = cluster(settings)
    with collecting(errors):
        model = _model(settings)
    if errors:
        raise UsageError(errors)
    loaded = {"teacher": _named(settings.teacher, None).spec} if settings.teacher else {}
    words = settings.words(hardware_is_read=True) | loaded
    plan = select_plan(model, hardware, notify=notes.append, offers=offers, **words)
    return Planned(
        plan=plan,
        settings=settings,
        notes=tuple(notes),
        answers=tuple(shown_answers(answers(plan, settings))),
        files=_files(plan, settings),
        name=re.sub(r"[^\w.-]+", "-", f"{plan.model.name.rpartition('/')[2]}_{hardware.name}", flags=re.ASCII),
    )


def offered(result: Planned) -> Planned:
    if result.settings.teacher:
        return result
    requested = job_from_words(
        {"seq_len": result.plan.job.seq_len_tokens} | result.settings.words(hardware_is_read=True)
    )
    plan = with_offers(result.plan, requested)
    return replace(result, plan=plan, files=_files(plan, result.settings)) if plan.offers else result


def cluster(settings: PageSettings) -> HardwareSpec:
    """Return the hardware of a catalog name, with the links and memory of the settings.

    Raises:
        UsageError: the name is unknown, or a value is invalid.
    """
    name = settings.hardware or ""
    return hardware_from_mapping(_hardware_fields(settings, parse_hardware(name)), name=name)


def _hardware_fields(settings: PageSettings, named: HardwareSpec) -> dict[str, Any]:
    counted = {"gpu": named.gpu, "nodes": named.nodes, "gpus_per_node": named.gpus_per_node}
    links = {name: value for name in _LINKS if (value := getattr(settings, name)) is not None}
    return counted | links | parse_overrides(host_memory=settings.host_memory, nvme=settings.nvme)


def _model(settings: PageSettings) -> LoadedModel:
    if settings.config is None:
        return _named(settings.model, settings.revision)
    if settings.model:
        rule, fix = "excludes an uploaded config.json", "keep one of them"
        raise UsageError(ConfigError(where="model", value=settings.model, rule=rule, fix=fix))
    config = unpack_config(settings.config)
    source = ModelSource(name=CONFIG_FILE, revision=None, config=config, checkpoint_parameters=None)
    return model_from_source(source, by_structure=True)


def _named(name: str, revision: str | None) -> LoadedModel:
    """Return a model of the gallery, or of the Hub if a revision is set or the gallery lacks it."""
    if not name:
        raise UsageError(ConfigError(where="model", rule="is missing", fix="enter ORG/NAME, or upload its config.json"))
    if revision is None and name in known_models():
        return LoadedModel(spec=known_models()[name], config={}, notes=())
    return model_from_source(read_hub_source(name, revision=revision), by_structure=True)


def _files(plan: Plan, settings: PageSettings) -> dict[str, str | bytes]:
    files: dict[str, str | bytes] = dict(render_files(plan))
    if settings.config is not None:
        config = unpack_config(settings.config)
        files[CONFIG_FILE] = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    if settings.states_links:
        stated = _hardware_fields(settings, parse_hardware(settings.hardware or ""))
        files[HARDWARE_FILE] = yaml.safe_dump(stated, sort_keys=False)
    return files


def archive(files: Iterable[tuple[str, str | bytes]], *, directory: str) -> bytes:
    """Return a ZIP of files in a directory, with executable scripts (`.sh`, `.sbatch`) as `Plan.write` makes."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, content in files:
            entry = zipfile.ZipInfo(f"{directory}/{name}", _OLDEST_DATE)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (0o755 if name.endswith((".sh", ".sbatch")) else 0o644) << 16
            packed.writestr(entry, content)
    return stream.getvalue()
