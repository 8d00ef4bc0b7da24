"""Entry point of the `shardwright` command: help, dispatch, exit codes, streams and error output."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec
from io import TextIOWrapper
from typing import TYPE_CHECKING, Any, TextIO

from cyclopts import App, CycloptsError, Parameter

from .. import __version__
from ..ds_configs.specs.errors import ConfigError, InputError, ShardwrightError
from ..plugins.deepspeed import quiet_accelerator_choice
from .progress import notes_on_stderr
from .settings import Sources, asks_for_json, resolve, running, sources_of

if TYPE_CHECKING:
    from cyclopts.help import HelpPanel
    from rich.console import Console, ConsoleOptions

_COMMANDS = {
    "plan": ("plan:plan_command", "Choose a layout and write configs for accelerate launch."),
    "check": ("configuration:check_command", "Find all errors in DeepSpeed, Accelerate and TRL configuration files."),
    "explain": ("explain:explain_command", "Explain a plan, a term, a layout, a rule, or why a run failed."),
    "calibrate": ("calibrate:calibrate_command", "Store the measurements of a run for later plans."),
    "rehearse": ("trials:rehearse_command", "Test the files of a plan on CPU ranks with a small model."),
    "tune": ("trials:tune_command", "Measure the best layouts of a plan in short runs, and keep the fastest."),
    "launch": ("launch:launch_command", "Run a plan, or your script with it, here or on a cluster."),
    "train": ("training:train_command", "Train a model on your data: plan, launch, evaluate, report."),
    "distill": ("training:distill_command", "Distill a teacher into a student: plan, train, evaluate, report."),
    "cache-teacher": ("teacher:cache_teacher_command", "Store outputs of a teacher, to distill without running it."),
    "merge": ("merge:merge_command", "Merge a LoRA adapter into its base model."),
    "student": ("teacher:student_command", "Prune a teacher to a smaller student for distillation."),
    "qat": ("training:qat_command", "Train with quantized weights, and export that checkpoint."),
    "quantize": ("quantize:quantize_command", "Quantize a model, verify the checkpoint and evaluate it."),
    "evaluate": ("evaluate:evaluate_command", "Measure perplexity, size and distance to a baseline."),
    "report": ("pages:report_command", "Write the HTML report of a run, or compare several runs."),
    "serve": ("serve:serve_command", "Serve a checkpoint, and print the memory that it needs."),
    "ui": ("pages:ui_command", "Plan and check in the browser."),
    "configs": ("configuration:app", "List ready-made configurations, or copy one."),
    "env": ("env:env_command", "Print versions and hardware for a bug report."),
    "schema": ("configuration:schema_command", "Print the JSON schema of a file or an answer of Shardwright."),
    "demo": ("demo:demo_command", "Plan a model, then train a small one on two CPU ranks."),
}

_RELEASES_UNCHECKED = frozenset({"configs", "env", "schema"})
"""Commands that need no upstream library, or that report on the installed ones."""
_PLANNING = frozenset({"calibrate", "check", "explain", "plan", "report", "serve", "ui"})
"""Commands that need no package of the extra `train`."""
_COMPUTING = frozenset(
    {"cache-teacher", "demo", "distill", "evaluate", "merge", "qat", "quantize", "rehearse", "student", "train", "tune"}
)
"""Commands that run torch on this machine."""
PRINTING = frozenset({"check", "explain", "configs", "env", "schema"})
"""Commands that only print; a closed pipe ends them without an error."""

_EMPTY_DEFAULTS = frozenset({"False", '""', "()", "{}", "[]"})
"""Defaults of options without effect unless set."""


def short_help(console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
    """Print a group of options without environment variables, and without `--no-` of a switch that is off.

    With cyclopts 5.4 the variables made the help of `train` longer by half; the end of each help states the rule.
    """
    from cyclopts.help import DefaultFormatter

    entries = [
        entry.copy(
            env_var=None,
            default=None if entry.default in _EMPTY_DEFAULTS else entry.default,
            negative_names=() if entry.default == "False" else entry.negative_names,
        )
        for entry in panel.entries
    ]
    DefaultFormatter()(console, options, panel.copy(entries=entries))


EXAMPLES = {
    "plan": (
        "meta-llama/Llama-3.1-8B --hardware 8xA100-80GB --output-dir plan",
        "MODEL --hardware 1xRTX4090 --method qlora --seq-len 2048",
    ),
    "check": ("plan", "ds_config.json --num-processes 8", "grpo.yaml --hardware 8xH100-80GB"),
    "explain": ("plan", "gathered_parameters", "--error run.log"),
    "calibrate": ("plan/model", "--list"),
    "rehearse": ("plan", "plan --script finetune.py -- --epochs 1"),
    "tune": ("plan --trials 8 --steps 10",),
    "launch": ("plan finetune.py --epochs 3", "plan --on slurm -- --dataset chats.jsonl --output-dir tuned"),
    "train": ("MODEL --plan plan --dataset chats.jsonl --output-dir tuned",),
    "distill": ("TEACHER STUDENT --dataset chats.jsonl --teacher-cache answers --output-dir taught",),
    "cache-teacher": ("TEACHER --dataset chats.jsonl --output-dir answers",),
    "merge": ("tuned --output-dir merged",),
    "student": ("TEACHER --layers 16 --intermediate 8192 --output-dir student",),
    "qat": ("MODEL --scheme W4A16 --teacher self --dataset chats.jsonl --output-dir trained-w4",),
    "quantize": ("MODEL --scheme W4A16 --method gptq --dataset chats.jsonl --output-dir model-w4",),
    "evaluate": ("model-w4 --baseline MODEL --dataset book.txt",),
    "report": ("tuned", "tuned --output other.html"),
    "serve": ("model-w4 --hardware 1xRTX4090", "MODEL --hardware 1xL40S --draft STUDENT --port 9000"),
    "ui": ("--port 8080",),
    "configs": ("ls llama", "cp llama-3.1-8b_8xA100-80GB plan"),
    "schema": ("settings", "plan-answer"),
    "env": ("",),
    "demo": ("my-demo --steps 10",),
}
"""Arguments after `shardwright COMMAND`."""


def shown_examples(command: str) -> str:
    """Return the end of a command's help: examples, and the other sources of its options."""
    lines = [f"shardwright {command} {rest}".rstrip() for rest in EXAMPLES[command]]
    variable = f"SHARDWRIGHT_{command.upper().replace('-', '_')}_"
    rule = f"Each option is also a key of the --config YAML file and an environment variable {variable}NAME."
    return "\n\n".join(["Examples:", *lines, rule])


_ENDINGS = {
    "bash": ("\ncomplete -F ", "\ncomplete -o default -F "),
    "zsh": ("  esac\n}\n", "  esac || { compset -P '--*='; _files }\n}\n"),
}
"""Last lines of a script, and those that let the shell complete paths where the script has no candidates."""
_BASH_FILES = 'COMPREPLY=( $(compgen -f -- "${cur}") )'
"""Completes a directory with a space behind it, not a slash."""


class CompletingApp(App):
    """Application whose scripts complete paths as shells do without a script, unless there are candidates.

    Seen with cyclopts 5.4.0 and 5.5.2: models and datasets, which are texts, are not completed.
    """

    __slots__ = ()

    def generate_completion(self, **stated: Any) -> str:
        """Return the script for a shell."""
        script = super().generate_completion(**stated).replace(_BASH_FILES, "COMPREPLY=()")
        generated, completed = _ENDINGS["zsh" if script.startswith("#compdef") else "bash"]
        return completed.join(script.rsplit(generated, 1))


def build_app() -> App:
    """Return the application; the module of a command is imported when the command runs."""
    app = CompletingApp(
        name="shardwright",
        help="Plan DeepSpeed and Accelerate training, test the plan, and run it.",
        version=__version__,
        config=Sources(_COMMANDS),
        help_formatter=short_help,
        default_parameter=Parameter(negative_iterable="", env_var_split=lambda _, text: [text]),
    )
    for name, (target, summary) in _COMMANDS.items():
        # A command with subcommands is an App, which has its own epilogue.
        ending = {} if target.endswith(":app") else {"help_epilogue": shown_examples(name)}
        app.command(f"{__package__}.commands.{target}", name=name, help=summary, **ending)
    app.register_install_completion_command(help="Install shell completion.")
    return app


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code: 0 success, 1 failure, 2 usage, 3 does not fit, 4 unsafe input."""
    app = build_app()

    def report(code: int, message: str, errors: Sequence[ConfigError] = ()) -> int:
        for line in message.splitlines():
            print(f"error: {line}", file=sys.stderr)
        if asks_for_json(app, arguments):
            listed = [
                asdict(
                    each if isinstance(each.value, str | int | bool | None) else replace(each, value=repr(each.value))
                )
                for each in errors
            ]
            print(json.dumps({"schema_version": 2, "error": {"exit_code": code, "message": message, "errors": listed}}))
        return code

    try:
        try:
            command, bound = resolve(app, arguments)
        except (CycloptsError, ShardwrightError):
            # A missing package is reported before a missing option.
            if (_COMMANDS.keys() - _RELEASES_UNCHECKED - _PLANNING).intersection(arguments[:1]):
                from ..plugins.releases import REQUIRED, check_releases

                check_releases(REQUIRED)
            raise
        # Help is a function of Cyclopts, for which torch must not be imported.
        name = arguments[0] if arguments and command.__module__.startswith(__package__) else ""
        if name in _COMMANDS and name not in _RELEASES_UNCHECKED:
            from ..plugins.huggingface_hub import check_endpoint
            from ..plugins.releases import LIGHT, REQUIRED, check_releases, check_torch, release_warnings

            check_endpoint()
            check_releases(LIGHT if name in _PLANNING else REQUIRED)
            if name in _COMPUTING:
                check_torch()
            for line in release_warnings():
                print(f"warning: {line}", file=sys.stderr)
        with running(arguments), notes_on_stderr(), warnings.catch_warnings():
            if not sys.warnoptions:
                # For the developers of the libraries that a command calls.
                warnings.filterwarnings("ignore", category=FutureWarning)
            result = command(*bound.args, **bound.kwargs)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except CycloptsError as error:
        return report(2, str(error).strip() or type(error).__name__)
    except ShardwrightError as error:
        if os.environ.get("SHARDWRIGHT_DEBUG") == "1":
            raise
        if not isinstance(error, InputError):
            return report(error.exit_code, str(error))
        errors = sources_of(app).located(error.errors)
        return report(error.exit_code, "\n".join(map(str, errors)), errors)
    except ImportError as error:
        package = (error.name or "a package").partition(".")[0]
        if os.environ.get("SHARDWRIGHT_DEBUG") == "1" or package == "shardwright":
            raise
        from ..plugins.releases import INSTALL_TRAIN

        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        fix = "reinstall it with pip install --force-reinstall" if find_spec(package) else INSTALL_TRAIN
        return report(2, f"{package} cannot be imported: {first_line}; {fix}")
    except KeyboardInterrupt:
        return 130
    except SystemExit as stop:
        # Rich 15 exits with code 1 when stdout is closed (rich/console.py `on_broken_pipe`).
        if isinstance(stop.__context__, BrokenPipeError):
            return 0
        raise
    except BrokenPipeError:
        # The reader of stdout is gone (`| head`).
        _discard(sys.stdout)
        return 0
    except Exception as error:
        # A library may request a file of the Hub where no caller expects it.
        from ..plugins.huggingface_hub import uncaught_hub_failure

        failure = uncaught_hub_failure(error)
        if failure is None and isinstance(error, OSError):
            failure = (f"{error.filename}: " if error.filename else "") + str(error.strerror or error)
        if failure is None or os.environ.get("SHARDWRIGHT_DEBUG") == "1":
            raise
        code = report(1, failure)
        try:
            sys.stdout.flush()
        except OSError:
            _discard(sys.stdout)
        return code


def _discard(stream: TextIO) -> None:
    """Let a stream write to the null device: otherwise its flush at exit fails, and Python 3.11.2 exits with 120."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


class LastingStream(TextIOWrapper):
    """Text stream that switches to the null device when its pipe is closed.

    A command that only prints ends then. One that quantizes or trains still has files to write.
    """

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except BrokenPipeError:
            _discard(self)
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except BrokenPipeError:
            _discard(self)


def outlast_readers() -> None:
    """Let this process continue when the pipes of its stdout and stderr are closed."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, TextIOWrapper):
            names = ("encoding", "errors", "line_buffering", "write_through")
            settings = {key: getattr(stream, key) for key in names}
            setattr(sys, name, LastingStream(stream.detach(), **settings))


def main() -> None:
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    for stream in (sys.stdout, sys.stderr):
        # Characters that the terminal's encoding lacks are escaped.
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if not PRINTING.intersection(sys.argv[1:2]):
        outlast_readers()
    if sys.argv[1:2] == ["plan"]:
        # Looking for reference cycles takes a tenth of the second that a plan takes, and finds next to none.
        gc.disable()
    if _COMPUTING.union(("launch", "serve")).intersection(sys.argv[1:2]):
        from ..plugins.bitsandbytes import quiet_optional_kernels

        quiet_optional_kernels()
    quiet_accelerator_choice()
    code = run(sys.argv[1:])
    # Skip the last search for reference cycles.
    gc.freeze()
    raise SystemExit(code)
