"""`shardwright configs ls|cp`: the gallery of ready-made configurations and of quantization recipes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App
from pydantic import Field

from ...ds_configs.search.reasons import display_name
from ...ds_configs.specs.units import gigabytes
from ..examples import shown_examples
from ..options import ConfigOption, FormatOptions
from ..planning.gallery import entry_names, load_entry
from ..settings import FILLED, Options, grouped

if TYPE_CHECKING:
    from ...ds_configs.quantization.recipe import Recipe

app = App(
    name="configs", help="List the ready-made configurations, or copy one.", help_epilogue=shown_examples("configs")
)


@app.command(name="ls")
def list_command(subject: str = "", *, options: Annotated[FormatOptions, Options] = FILLED) -> int:
    """List the gallery; a word narrows it, such as llama or lora. `quantize` lists the recipes of that command.

    Parameters
    ----------
    subject
        Text that a name must hold, or quantize.
    """
    if subject.lower() in ("quantize", "quantization"):
        return _list_recipes(as_json=options.as_json)
    plans = {name: load_entry(name) for name in entry_names() if subject.lower() in name.lower()}
    rows = [
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
        print(json.dumps({"schema_version": 1, "configs": rows}, indent=2))
        return 0
    from ..show import console, print_rows

    shown = []
    for name, plan in plans.items():
        strategy, gpu = plan.chosen.strategy, plan.chosen.memory.gpu
        shown.append((name, display_name(strategy), str(strategy.micro_batch_size), gigabytes(gpu.peak_bytes)))
    figures = ("micro-batch", "GB")
    print_rows(console(), ("name", "strategy", *figures), shown, figures=figures, folded={"strategy": 20})
    return 0


@grouped
class CopyOptions(ConfigOption):
    """Copy of a configuration."""

    force: bool = Field(False, description="Replace the files of an earlier copy")


@app.command(name="cp")
def copy_command(name: str, output_dir: Path, *, options: Annotated[CopyOptions, Options] = FILLED) -> int:
    """Copy one configuration of the gallery into a directory, with the paths of that directory in it; or a recipe.

    Parameters
    ----------
    name
        A name that `configs ls` prints.
    output_dir
        Where the files go.
    """
    from ...ds_configs.quantization.recipe import read_recipe, recipe_names

    if name in recipe_names():
        _copy_recipe(read_recipe(name), output_dir, force=options.force)
        return 0
    plan = load_entry(name)
    for path in plan.write(output_dir, force=options.force):
        print(path)
    return 0


def _list_recipes(*, as_json: bool) -> int:
    from ...ds_configs.quantization.recipe import quantize_settings, read_recipe, recipe_names

    recipes = [read_recipe(name) for name in recipe_names()]
    resolved = [quantize_settings({}, recipe=recipe).resolved() for recipe in recipes]
    if as_json:
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


def _copy_recipe(recipe: Recipe, output_dir: Path, *, force: bool) -> None:
    from ...ds_configs.plan.write import write_files

    for path in write_files({f"{recipe.name}.yaml": recipe.text}, output_dir, force=force):
        print(path)
