"""`shardwright merge`: merge a LoRA adapter into its base model."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import Field

from ..options import Output
from ..settings import Options


class Flags(Output):
    output_dir: Path = Field(description="Directory for the merged model")
    base: str | None = Field(None, description="Base model. Default: as the adapter records it")
    base_revision: str | None = Field(None, description="Branch, tag or commit of a Hub base model")
    qlora: bool | None = Field(
        None, description="Merge into dequantized NF4 weights. Default: as the adapter was trained by train"
    )
    force: bool = Field(False, description="Write into a directory that is not empty")


def merge_command(adapter: str, *, options: Options[Flags]) -> int:
    """Merge a LoRA adapter into its base: a complete model with tokenizer.

    Parameters
    ----------
    adapter
        Hub id or directory of a LoRA adapter.
    """
    from ...trainers.formats.merge import merge

    values = options.model_dump(exclude={"format", "config"})
    report = merge(adapter, **values)
    if options.as_json:
        print(json.dumps(report.to_dict()))
        return 0
    from rich.text import Text

    from ...ds_configs.plan.measurement import printable
    from ..show import console, show_next

    out, kind = console(), "dequantized NF4 weights" if report.qlora else "weights"
    out.print(Text(f"{printable(report.adapter)} merged into the {kind} of {printable(report.base)}", style="bold"))
    error = f"{report.rounding_error:.1e} (relative)"
    out.print(f"  rounding to {report.dtype} changed the merged matrices by {error}", markup=False)
    out.print(Text(f"Model in {printable(str(options.output_dir))}"))
    show_next("shardwright", "evaluate", options.output_dir, "--baseline", report.base)
    return 0
