"""Entry point of the `shardwright` command: dispatch, exit codes, and how errors are shown."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from types import FrameType

from cyclopts import App, CycloptsError, Parameter

from .. import __version__
from ..ds_configs.specs.errors import Fault, FaultsError, ShardwrightError
from ..plugins.bitsandbytes.checkpoint import quiet_optional_kernels
from ..plugins.deepspeed.quiet import quiet_accelerator_choice
from .command_line import running
from .examples import shown_examples
from .help import short_help
from .settings import Sources, asks_for_json, resolve
from .streams import PRINTING, outlast_readers

_COMMANDS = {
    "plan": ("plan:plan_command", "Choose the ZeRO stage and write configs that accelerate launch runs."),
    "check": ("check:check_command", "Find every fault in DeepSpeed JSON and Accelerate YAML files."),
    "explain": ("explain:explain_command", "Explain a written plan, or one term, strategy or rule."),
    "calibrate": ("calibrate:calibrate_command", "Store what a run measured, so that later plans know it."),
    "rehearse": ("rehearse:rehearse_command", "Launch a plan's files on CPU ranks with a small model, and check them."),
    "launch": (
        "launch:launch_command",
        "Run a plan or your script under it, on this machine or a cluster.",
    ),
    "train": ("train:train_command", "Train a model on your data: plan, launch, evaluate, report."),
    "distill": ("distill:distill_command", "Teach a student what a teacher knows: plan, train, evaluate, report."),
    "cache-teacher": ("cache_teacher:cache_teacher_command", "Store a teacher's answers, to distil without it."),
    "student": ("student:student_command", "Cut a smaller student out of a teacher, to be distilled into."),
    "qat": ("qat:qat_command", "Train with the numbers of the quantized checkpoint, and write exactly these."),
    "quantize": ("quantize:quantize_command", "Quantize a model, prove that it loads, and measure what it cost."),
    "evaluate": ("evaluate:evaluate_command", "Measure a model: perplexity, distance to a baseline, size, speed."),
    "report": ("report:report_command", "Make the HTML report of a run, or of several side by side."),
    "serve": ("serve:serve_command", "Serve a checkpoint: the engine's line, with the memory that it needs."),
    "ui": ("ui:ui_command", "Plan and check in the browser, on this machine."),
    "configs": ("configs:app", "List the ready-made configurations, or copy one."),
    "env": ("env:app", "Print versions and hardware to paste into a report."),
    "schema": ("schema:schema_command", "Print the JSON schema of the files that Shardwright reads and writes."),
    "demo": ("demo:demo_command", "Plan a model, then really train a small one on two CPU ranks."),
}


def build_app() -> App:
    """Return the command line application; the modules of its commands load when they are called."""
    app = App(
        name="shardwright",
        help="Plans DeepSpeed and Accelerate training, proves the plan, and runs it.",
        version=__version__,
        config=Sources(_COMMANDS),
        help_formatter=short_help,
        default_parameter=Parameter(negative_iterable="", env_var_split=lambda _, text: [text]),
    )
    for name, (target, summary) in _COMMANDS.items():
        # An App of its own ends its help itself.
        ending = {} if target.endswith(":app") else {"help_epilogue": shown_examples(name)}
        app.command(f"{__package__}.commands.{target}", name=name, help=summary, **ending)
    app.register_install_completion_command(help="Let the shell complete commands and options.")
    return app


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code: 0 done, 1 failed, 2 usage, 3 does not fit, 4 refused input."""
    app = build_app()

    def report(code: int, message: str, faults: Sequence[Fault] = ()) -> int:
        for line in message.splitlines():
            print(f"error: {line}", file=sys.stderr)
        if asks_for_json(app, arguments):
            listed = [{"where": f.where, "value": _plain(f.value), "rule": f.rule, "fix": f.fix} for f in faults]
            print(json.dumps({"schema_version": 1, "error": {"exit_code": code, "message": message, "faults": listed}}))
        return code

    try:
        command, bound = resolve(app, arguments)
        with running(arguments):
            result = command(*bound.args, **bound.kwargs)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except CycloptsError as error:
        return report(2, str(error).strip() or type(error).__name__)
    except ShardwrightError as error:
        if os.environ.get("SHARDWRIGHT_DEBUG") == "1":
            raise
        return report(error.exit_code, str(error), error.faults if isinstance(error, FaultsError) else ())
    except KeyboardInterrupt:
        return 130
    except SystemExit as stop:
        # Rich 15 answers a closed stdout with exit code 1 (rich/console.py `on_broken_pipe`).
        if isinstance(stop.__context__, BrokenPipeError):
            return 0
        raise
    except BrokenPipeError:
        # The reader of stdout left (`| head`).
        _discard_stdout()
        return 0
    except OSError as error:
        if os.environ.get("SHARDWRIGHT_DEBUG") == "1":
            raise
        place = f"{error.filename}: " if error.filename else ""
        code = report(1, f"{place}{error.strerror or error}")
        try:
            sys.stdout.flush()
        except OSError:
            _discard_stdout()
        return code


def _discard_stdout() -> None:
    """Another flush at exit would fail again: Python 3.11.2 then exits with 120."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _plain(value: object) -> object:
    return value if isinstance(value, str | int | bool) or value is None else repr(value)


def _terminate(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def main() -> None:
    """Console script."""
    signal.signal(signal.SIGTERM, _terminate)
    for stream in (sys.stdout, sys.stderr):
        # A bar or a path that the terminal's encoding lacks is shown escaped.
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if not PRINTING.intersection(sys.argv[1:2]):
        outlast_readers()
    quiet_optional_kernels()
    quiet_accelerator_choice()
    raise SystemExit(run(sys.argv[1:]))
