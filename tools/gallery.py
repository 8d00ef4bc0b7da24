"""Regenerates the gallery: `python tools/gallery.py MODELS_DIRECTORY GALLERY_DIRECTORY`."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from shardwright.ds_configs.plan.gallery import gallery_plans
from shardwright.ds_configs.plan.output import write_files
from shardwright.ds_configs.plan.plan import render_files


def read_configs(directory: Path) -> dict[str, str]:
    """Return the text of every `ORG--NAME/config.json` under a directory, by Hub id."""
    return {
        path.parent.name.replace("--", "/", 1): path.read_text(encoding="utf-8")
        for path in sorted(directory.glob("*/config.json"))
    }


def main(arguments: list[str]) -> int:
    """Write every entry afresh and remove those that are gone."""
    models, gallery = map(Path, arguments)
    written = set()
    for entry, plan in gallery_plans(read_configs(models)):
        shutil.rmtree(gallery / entry.name, ignore_errors=True)
        write_files(render_files(plan), gallery / entry.name)
        written.add(entry.name)
        print(f"{entry.name}: {plan.chosen.strategy.label}")
    for stale in gallery.iterdir():
        if stale.is_dir() and stale.name not in written:
            shutil.rmtree(stale)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
