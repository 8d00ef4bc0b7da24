"""`shardwright evaluate`: measure a model, alone or against a baseline."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from ...ds_configs.specs.errors import ConfigError, UsageError
from ...ds_configs.specs.settings import RevisionFields
from ..options import OutputDirectory
from ..progress import note, progress_on_stderr
from ..settings import FILLED, Options, command_line

if TYPE_CHECKING:
    from ...trainers.evaluation.evaluate import Evaluation


class Flags(OutputDirectory, RevisionFields):
    group = "Evaluation"

    baseline: str | None = Field(None, description="Model to compare with on the same tokens, usually the original")
    dataset: str | None = Field(
        None,
        description="Hub ID[:config][#N], .txt file, file or directory of rows. Default: python-help",
    )
    split: str = Field("test", description="Split of a Hub dataset")
    chat_template: str | None = Field(
        None, description="Jinja file, or alpaca, chatml, llama3, zephyr. Default: the tokenizer's"
    )
    seq_len: int | None = Field(
        None, description="Tokens of a window (2k = 2,048). Default: 2048, or the model's maximum"
    )
    num_samples: int = Field(64, description="Windows to read, from the start of the text")
    batch_size: int = Field(4, description="Windows per batch; does not change results")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Type to load weights as; auto: as stored"
    )
    device: str | None = Field(None, description="Such as cuda:0 or cpu. Default: an accelerator if available")
    baseline_revision: str | None = Field(None, description="Branch, tag or commit of a Hub baseline")
    dataset_revision: str | None = Field(None, description="Branch, tag or commit of a Hub dataset")


def evaluate_command(model: str, *, options: Options[Flags] = FILLED) -> int:
    """Measure perplexity and size of a model, and KL and agreement with a baseline.

    Parameters
    ----------
    model
        Hub id or directory of a model, plain or quantized.
    """
    from ...ds_configs.plan.output import output_errors, reserved, write_files
    from ...trainers.data.sources import PYTHON_HELP, local_place
    from ...trainers.evaluation.evaluate import evaluate_model
    from ...trainers.evaluation.measures import TextRequest
    from ...trainers.reports.runs import evaluation_files, write_html

    errors: list[ConfigError] = []
    if options.chat_template is not None and options.dataset is None:
        rule, fix = "requires --dataset: only conversations are rendered", "pass --dataset with chats, or omit it"
        errors.append(ConfigError(where="--chat-template", value=options.chat_template, rule=rule, fix=fix))
    output_dir, force = options.output_dir, options.force
    # Before hours of evaluation.
    sources = {"the model": model, "the baseline": options.baseline, "the dataset": local_place(options.dataset)}
    errors += [] if output_dir is None else output_errors(output_dir, force=force, sources=sources)
    if errors:
        raise UsageError(errors)
    if options.dataset is None:
        note(f"using {PYTHON_HELP}, Python's help topics; pass your own --dataset")
    request = TextRequest(
        dataset=options.dataset or PYTHON_HELP,
        split=options.split,
        dataset_revision=options.dataset_revision,
        chat_template=options.chat_template,
        num_samples=options.num_samples,
    )
    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(sys.stderr))
        if output_dir is not None:
            stack.enter_context(reserved(output_dir, force=force))
        stack.enter_context(progress_on_stderr("checking"))
        evaluation = evaluate_model(
            model,
            baseline=options.baseline,
            text=request,
            seq_len=options.seq_len,
            batch_size=options.batch_size,
            dtype=options.dtype,
            device=options.device,
            revision=options.revision,
            baseline_revision=options.baseline_revision,
        )
        if output_dir is not None:
            write_files(evaluation_files(evaluation.to_dict() | {"command": command_line()}), output_dir, force=True)
            write_html(output_dir)
    if options.as_json:
        where = None if output_dir is None else str(output_dir)
        print(json.dumps(evaluation.to_dict() | {"output_dir": where}, allow_nan=False))
    else:
        show_evaluation(evaluation, output_dir)
    return 0


def show_evaluation(evaluation: Evaluation, output_dir: Path | None) -> None:
    from rich.text import Text

    from ...ds_configs.plan.measurement import printable
    from ...trainers.reports.runs import REPORT_FILE as HTML_FILE
    from ...trainers.reports.runs import evaluation_table, verdict
    from ..show import console, print_figures

    out, text, compared = console(), evaluation.text, evaluation.comparison is not None
    against = "" if evaluation.baseline is None else f"  against {printable(evaluation.baseline.name)}"
    out.print(Text.assemble((printable(evaluation.model.name), "bold"), against))
    out.print(
        Text(
            f"{text.predicted_tokens:,} tokens of {printable(text.source)}: {text.windows:,} of "
            f"{text.available_windows:,} windows of {text.seq_len_tokens:,} tokens"
        )
    )
    out.print()
    data = evaluation.to_dict()
    table = evaluation_table(data)
    print_figures(out, ("", *table.headings[1:]), table.rows)
    out.print()
    if compared:
        out.print(Text(verdict(data)))
    out.print(Text(f"{evaluation.seconds:.0f} s total", style="dim"))
    if output_dir is None:
        out.print("No files written; pass --output-dir")
    else:
        files = (printable(str(output_dir / name)) for name in ("REPORT.md", "evaluation.json", HTML_FILE))
        out.print(Text(f"Written: {', '.join(files)}"))
