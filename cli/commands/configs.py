"""`shardwright configs ls|cp`: the gallery of ready-made configurations and of quantization recipes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from cyclopts import App
from pydantic import Field

from ...ds_configs.search.reasons import display_name
from ...ds_configs.specs.units import gigabytes
from ..gallery import entry_names, load_entry
from ..help import shown_examples
from ..options import ConfigOption, FormatOptions
from ..settings import FILLED, Options, grouped

app = App(name="configs", help="List ready-made configurations, or copy one.", help_epilogue=shown_examples("configs"))


@app.command(name="ls")
def list_command(subject: str = "", *, options: Annotated[FormatOptions, Options] = FILLED) -> int:
    """List the gallery, or its entries with a word such as llama; `quantize` lists the quantization recipes.

    Parameters
    ----------
    subject
        Part of a name, or quantize.
    """
    if subject.lower() in ("quantize", "quantization"):
        from ...ds_configs.quantization.recipe import quantize_settings, read_recipe, recipe_names

        recipes = [read_recipe(name) for name in recipe_names()]
        resolved = [quantize_settings({}, recipe=recipe).resolved() for recipe in recipes]
        if options.as_json:
            rows = [
                {"name": recipe.name, "scheme": run.scheme.name, "method": run.method, "purpose": recipe.purpose}
                for recipe, run in zip(recipes, resolved, strict=True)
            ]
            print(json.dumps({"schema_version": 1, "configs": rows}, indent=2))
            return 0
        from ..show import console, print_rows

        shown = [
            (recipe.name, run.scheme.name, run.method, recipe.purpose)
            for recipe, run in zip(recipes, resolved, strict=True)
        ]
        print_rows(console(), ("name", "scheme", "method", "purpose"), shown, folded={"purpose": 40})
        return 0
    plans = {name: load_entry(name) for name in entry_names() if subject.lower() in name.lower()}
    entries = [
        {
            "name": name,
            "model": plan.model.name,
            "hardware": plan.hardware.name,
            "strategy": plan.chosen.strategy.label,
            "peak_bytes": plan.chosen.memory.gpu.peak_bytes,
        }
        for name, plan in plans.items()
    ]
    if options.as_json:
        print(json.dumps({"schema_version": 1, "configs": entries}, indent=2))
        return 0
    from ..show import console, print_rows

    table = []
    for name, plan in plans.items():
        strategy, gpu = plan.chosen.strategy, plan.chosen.memory.gpu
        table.append((name, display_name(strategy), str(strategy.micro_batch_size), gigabytes(gpu.peak_bytes)))
    figures = ("micro-batch", "GB")
    print_rows(console(), ("name", "strategy", *figures), table, figures=figures, folded={"strategy": 20})
    return 0


@grouped
class CopyOptions(ConfigOption):
    force: bool = Field(False, description="Replace the files of an earlier copy")


@app.command(name="cp")
def copy_command(name: str, output_dir: Path, *, options: Annotated[CopyOptions, Options] = FILLED) -> int:
    """Copy a recipe, or a configuration with its paths changed to the new directory.

    Parameters
    ----------
    name
        A name from `configs ls`.
    output_dir
        Directory for the files.
    """
    from ...ds_configs.quantization.recipe import read_recipe, recipe_names

    if name in recipe_names():
        from ...ds_configs.plan.output import write_files

        recipe = read_recipe(name)
        paths = write_files({f"{recipe.name}.yaml": recipe.text}, output_dir, force=options.force)
    else:
        paths = load_entry(name).write(output_dir, force=options.force)
    for path in paths:
        print(path)
    return 0
