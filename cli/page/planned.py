"""Plan of the page's settings, by the functions of the command line, and its files as an archive.

Whoever reaches the page may be a stranger, on a Space: no setting names a path that is read on this machine.
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

from ...ds_configs.plan.files import render_files
from ...ds_configs.plan.plan import Plan, with_offers
from ...ds_configs.specs.errors import Fault, UsageError, collecting
from ...ds_configs.specs.hardware import HardwareSpec, hardware_from_mapping, parse_hardware, parse_overrides
from ...ds_configs.specs.model import ModelSpec
from ...plugins.huggingface_hub.hub import ModelSource, read_hub_source
from ...plugins.planning.models import LoadedModel, model_from_source
from ..planning.gallery import entry_names, load_entry
from ..planning.run_questions import answers, question_faults, shown_answers
from ..planning.stated import plan_stated
from .address import CONFIG_FILE, HARDWARE_FILE, PageSettings, unpack_config

_LINKS = ("link_bytes_per_s", "network_bytes_per_s")
_OLDEST_DATE = (1980, 1, 1, 0, 0, 0)
"""The same plan gives the same archive; ZIP knows no earlier date."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """A plan with what was said while it was made."""

    plan: Plan
    settings: PageSettings
    """What the page asked for."""
    remarks: tuple[str, ...]
    """Remarks while planning."""
    answers: tuple[str, ...]
    """Answers about a whole run, where it was asked about."""
    files: dict[str, str | bytes]
    """Contents by name, as `shardwright plan` writes them, with the uploaded files that the command line reads."""
    name: str
    """Of the archive and the directory in it."""


@cache
def known_models() -> dict[str, ModelSpec]:
    """Return the models of the gallery by Hub id: those that are planned without asking the Hub."""
    return {plan.model.name: plan.model for plan in map(load_entry, entry_names())}


def planned(settings: PageSettings, *, offers: bool = True) -> Planned:
    """Return the plan that `shardwright plan` would make of the same words; `offered` adds what it leaves out.

    Raises:
        UsageError: a name, value or combination cannot be used.
        RefusedInputError: the model's files are corrupt, absurd or unsafe.
        PlanDoesNotFitError: no layout fits.
        ShardwrightError: the Hub cannot be reached or denies access.
    """
    remarks: list[str] = []
    faults: list[Fault] = []
    with collecting(faults):
        question_faults(settings)
    with collecting(faults):
        hardware = cluster(settings)
    with collecting(faults):
        model = _model(settings)
    if faults:
        raise UsageError(faults)
    loaded = {"teacher": _named(settings.teacher, None).spec} if settings.teacher else {}
    plan = plan_stated(model, hardware, settings, notify=remarks.append, offers=offers, loaded=loaded)
    return Planned(
        plan=plan,
        settings=settings,
        remarks=tuple(remarks),
        answers=tuple(shown_answers(answers(plan, settings))),
        files=_files(plan, settings),
        name=re.sub(r"[^\w.-]+", "-", f"{plan.model.name.rpartition('/')[2]}_{hardware.name}", flags=re.ASCII),
    )


def offered(found: Planned) -> Planned:
    """Return a plan that was made without offers with them."""
    plan = with_offers(found.plan)
    return replace(found, plan=plan, files=_files(plan, found.settings)) if plan.offers else found


def cluster(settings: PageSettings) -> HardwareSpec:
    """Return the cluster of a name from the catalog, with the links and the memory that are stated.

    Raises:
        UsageError: it is no such name, or a value cannot be used.
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
        rule, fix = "stands beside an uploaded config.json", "keep one of them"
        raise UsageError(Fault(where="model", value=settings.model, rule=rule, fix=fix))
    config = unpack_config(settings.config)
    source = ModelSource(name=CONFIG_FILE, revision=None, config=config, checkpoint_parameters=None)
    return model_from_source(source, by_structure=True)


def _named(name: str, revision: str | None) -> LoadedModel:
    """Return a model of the gallery, or of the Hub, from where a stated revision always comes."""
    if not name:
        raise UsageError(Fault(where="model", rule="is missing", fix="write ORG/NAME, or upload its config.json"))
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
    """Return a ZIP of files in a directory; scripts (`.sh`, `.sbatch`) are executable, as `Plan.write` leaves them."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, content in files:
            entry = zipfile.ZipInfo(f"{directory}/{name}", _OLDEST_DATE)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (0o755 if name.endswith((".sh", ".sbatch")) else 0o644) << 16
            packed.writestr(entry, content)
    return stream.getvalue()
