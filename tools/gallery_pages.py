"""Pages of the gallery for the documentation site: the ready-made plans by model and hardware, with their figures.

They are written when the site is built, from the plans that ship; the repository holds the templates alone.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from shardwright.ds_configs.plan.gallery import GALLERY, GALLERY_RELEASE, GalleryEntry, gallery_plan
from shardwright.ds_configs.plan.plan import Plan, render_files
from shardwright.ds_configs.search.reasons import display_name
from shardwright.ds_configs.specs.units import gigabytes, human_count
from shardwright.ds_configs.step_time.estimate import term_title

_SHOWN = {
    "accelerate.yaml": "yaml",
    "ds_config.json": "json",
    "launch.sh": "bash",
    "launch.sbatch": "bash",
    "training_arguments.json": "json",
}
"""Files of a plan that a page shows, with their languages."""


@dataclass(frozen=True, kw_only=True)
class Shown:
    """A configuration of the gallery as the pages need it."""

    entry: GalleryEntry
    """Model, hardware and what differs from the defaults."""
    plan: Plan
    """Its plan, as it ships."""

    @property
    def heading(self) -> str:
        """What sets it apart from others of its model."""
        return ", ".join(part for part in (self.entry.hardware, self.entry.suffix) if part)

    @property
    def title(self) -> str:
        """Its name in a list of all models."""
        return f"{short(self.entry.model)} on {self.heading}"

    @property
    def counts(self) -> str:
        """What it is in the column of its accelerator: `4×8` for `4x8xA100-80GB`."""
        counts = self.entry.hardware.removesuffix(self.plan.hardware.gpu).removesuffix("x").replace("x", "×")
        return " ".join(part for part in (counts, self.entry.suffix) if part)

    @property
    def anchor(self) -> str:
        """The target of links to its section."""
        return re.sub(r"[^a-z0-9]+", "-", self.entry.name.lower())

    @property
    def link(self) -> str:
        """Its section, from any page of the gallery."""
        return f"{page(self.entry.model)}#{self.anchor}"

    @property
    def command(self) -> str:
        """The command that makes the plan."""
        flags = [
            f"--{name.removesuffix('_tokens').replace('_', '-')}={value}" for name, value in self.entry.job.items()
        ]
        nvme = [f"--nvme={self.entry.nvme}"] if self.entry.nvme else []
        words = ["shardwright", "plan", self.entry.model, "--hardware", self.entry.hardware, *nvme, *flags]
        return shlex.join([*words, "--output-dir", "plan"])

    @property
    def files(self) -> list[tuple[str, str, str]]:
        """Name, language and text of the files that the page shows."""
        texts = render_files(self.plan)
        shown = [file for file in self.plan.file_names if file in _SHOWN]
        return [(file, _SHOWN[file], texts[file]) for file in shown]

    @property
    def memory_parts(self) -> list[tuple[str, str, float]]:
        """Name, GB and share of the bar in percent of each term of memory, largest first."""
        named = {name.replace("_", " "): float(size) for name, size in self.plan.chosen.memory.gpu.terms.items()}
        return [(name, gigabytes(int(size)), share) for name, size, share in _shares(named, self._widest_bytes)]

    @property
    def capacity_share(self) -> float:
        """Where the bar of memory has the line of what is usable, in percent."""
        return 100 * self.plan.chosen.memory.gpu.capacity_bytes / self._widest_bytes

    @property
    def time_parts(self) -> list[tuple[str, str, float]]:
        """Name, seconds and share of the bar in percent of each term of time, largest first."""
        named = {term_title(name): seconds for name, seconds in self.plan.chosen.time.terms.items()}
        return [(name, f"{seconds:.2f}", share) for name, seconds, share in _shares(named, sum(named.values()))]

    @property
    def _widest_bytes(self) -> float:
        return float(max(self.plan.chosen.memory.gpu.capacity_bytes, sum(self.plan.chosen.memory.gpu.terms.values())))


def gallery_pages() -> dict[str, str]:
    """Texts of the pages by file name: an overview, and one page for each model."""
    entries = [Shown(entry=entry, plan=gallery_plan(entry)) for entry in GALLERY]
    entries.sort(key=lambda shown: (shown.plan.model.parameter_count, shown.entry.model))
    models = {model: list(group) for model, group in groupby(entries, key=lambda shown: shown.entry.model)}
    # Those with little memory first, and of those with equally much the slow ones.
    accelerators = {shown.plan.hardware.gpu: shown.plan.hardware for shown in entries}
    kinds = sorted(
        accelerators, key=lambda kind: (round(accelerators[kind].gpu_bytes / 1e9), accelerators[kind].flops_per_s)
    )
    # Pages are Markdown of our own plans: nothing in them is to be escaped.
    templates = Environment(  # noqa: S701
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    filters = {"gigabytes": gigabytes, "count": human_count, "short": short, "page": page, "layout": display_name}
    templates.filters |= filters
    pages = {
        "index.md": templates.get_template("gallery.md").render(
            entries=entries, models=models, kinds=kinds, release=GALLERY_RELEASE
        )
    }
    for model, group in models.items():
        text = templates.get_template("gallery_model.md").render(model=model, spec=group[0].plan.model, entries=group)
        pages[page(model)] = text
    return pages


def short(model: str) -> str:
    """A model's name without its organization."""
    return model.rpartition("/")[2]


def page(model: str) -> str:
    """File name of a model's page."""
    return f"{short(model).lower()}.md"


def _shares(parts: Mapping[str, float], whole: float) -> list[tuple[str, float, float]]:
    ranked = sorted(parts.items(), key=lambda part: -part[1])
    return [(name, size, 100 * size / whole) for name, size in ranked]
