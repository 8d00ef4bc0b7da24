"""Settings of every command: defaults < YAML file < environment < flags.

Cyclopts reads the flags and fills the others from `Sources`; pydantic converts the texts into values.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from inspect import BoundArguments
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_origin

from cyclopts import App, CycloptsError, Group, Parameter, Token
from cyclopts.argument import Argument, ArgumentCollection
from cyclopts.config import Env
from cyclopts.exceptions import MissingArgumentError, UnknownCommandError, UnknownOptionError

from ..ds_configs.specs.errors import ConfigError, InputError, UsageError
from ..ds_configs.specs.synonyms import command_meant, meanings, meant, removals, suggested
from ..ds_configs.specs.units import token_count

PREFIX = "SHARDWRIGHT_"
NOT_SETTINGS = frozenset(
    PREFIX + name for name in ("DEBUG", "DATA_DIR", "LAUNCH_TOKEN", "CPU_TENSOR_BYTES", "FAULT", "FAULT_LOG")
)
"""Environment variables that are no setting of a command; the last two are for tests."""

_SWITCH = re.compile(r"--(?:(?P<precision>bf16|fp16)(?:=true)?|(?P<name>[\w-]+)=(?P<word>on|off))", re.IGNORECASE)
"""Switches of `TrainingArguments` for two values of --precision, and words that Cyclopts 5.4.0 does not accept."""
_HEADINGS = ("Data", "Hardware", "Training", "Parallel layout", "Objective", "Guards")
Kind = TypeVar("Kind")
FILLED: Any = None
"""Default that Cyclopts requires for a parameter of type `Options`; `Sources` always fills it."""

if TYPE_CHECKING:
    Options = Annotated[Kind, ...]
    """Type of a parameter whose fields are options of the command."""
else:

    class Options:
        def __class_getitem__(cls, kind):
            return Annotated[_grouped(kind), Parameter(name="*")]


@cache
def _grouped(kind: Any) -> Any:
    """Return a class of settings with the heading of each option, and its other names."""
    from ..ds_configs.specs.job import HUGGING_FACE_NAMES

    groups = kind.groups()
    for name, field in kind.model_fields.items():
        # Several NAME=VALUE are a repeated flag.
        tokens = -1 if get_origin(field.annotation) is dict else None
        option, extra = name.replace("_", "-"), field.json_schema_extra or {}
        negative = [f"--{extra['negative']}", f"--no-{option}"] if "negative" in extra else None
        alias = [
            f"--{other.replace('_', '-')}" for other in extra.get("hugging_face") or HUGGING_FACE_NAMES.get(name, ())
        ]
        group = _heading(groups[name])
        field.metadata.append(Parameter(group=group, n_tokens=tokens, negative=negative, alias=alias or None))
    return kind


@cache
def _heading(name: str) -> Group:
    """Return the group of a heading: first those of `_HEADINGS`, then the command's own, output last."""
    position = _HEADINGS.index(name) if name in _HEADINGS else len(_HEADINGS)
    return Group(name, sort_key=position + (name == "Output"))


_arguments: ContextVar[tuple[str, ...]] = ContextVar("arguments", default=())


@contextmanager
def running(arguments: Sequence[str]) -> Iterator[None]:
    """Let `command_line` return these arguments of `shardwright` during the block."""
    token = _arguments.set(tuple(arguments))
    try:
        yield
    finally:
        _arguments.reset(token)


def command_line(*, full: bool = False) -> str:
    """Return the command line, unless `full` without directories of absolute paths; empty for a Python program."""
    words = _arguments.get()
    return shlex.join(["shardwright", *(words if full else map(_without_directory, words))]) if words else ""


def _without_directory(argument: str) -> str:
    """Omit the directories of an absolute path, because reports are published with a model.

    >>> _without_directory("--output-dir=/home/me/tuned"), _without_directory("/models/tiny/config.json")
    ('--output-dir=tuned', 'tiny/config.json')
    >>> _without_directory("a/b")
    'a/b'
    """
    option, sign, text = argument.partition("=") if argument.startswith("--") else ("", "", argument)
    if not text.startswith(("/", "~")):
        return argument
    path = Path(text)
    name = f"{path.parent.name}/{path.name}" if path.name == "config.json" else path.name
    return option + sign + name


class Sources(Env):
    """Environment and file of the called command, for the options without a flag.

    Subclass of Cyclopts' `Env`, whose names the help shows. Seen with cyclopts 5.4.0: `Env` ignores unknown names and
    keeps the hyphens of commands, and `Yaml` drops a key that is also a command's name.
    """

    def __init__(self, commands: Iterable[str]) -> None:
        super().__init__(PREFIX, source="environment")
        self.reset()
        self._commands = tuple(f"{PREFIX}{name.upper().replace('-', '_')}_" for name in commands)

    def reset(self) -> None:
        """Forget the command and the errors of an earlier call."""
        self.errors: list[ConfigError] = []
        self.arguments = ArgumentCollection()  # type: ignore[no-untyped-call]

    def _prefix(self, commands: tuple[str, ...]) -> str:
        return str(super()._prefix(commands)).replace("-", "_")

    def __call__(self, app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        """Append the tokens of both sources to the arguments that have none yet."""
        from ..ds_configs.specs.settings import parsed

        options = _options(arguments)
        if "config" not in options:
            # A command of Cyclopts itself, such as --install-completion.
            return
        self.arguments = arguments
        self._read_environment(self._prefix(commands), options)
        if options["config"].tokens:
            self._read_file(options)
        for name, argument in options.items():
            # Lengths of sequences may be written as 16k (16,384) or 1M.
            if name in ("seq_len", "max_model_len"):
                argument.tokens = [token.evolve(value=token_count(token.value)) for token in argument.tokens]
            if get_origin(argument.hint) is not dict:
                continue
            for index, token in enumerate(argument.tokens):
                # Users write mappings in YAML; Cyclopts reads JSON.
                if token.value.lstrip().startswith("{"):
                    try:
                        argument.tokens[index] = token.evolve(value=json.dumps(parsed(token.value), default=str))
                    except ValueError as error:
                        self.errors.append(ConfigError(where=name, value=token.value, rule=str(error)))
                        argument.tokens[index] = token.evolve(value="{}")
        for root in arguments:
            # Cyclopts builds a group of options only if one of them has a value.
            if not root.keys and root.children and not root.has_tokens:
                root.append(Token(implicit_value={}, source="default"))

    def _read_environment(self, own: str, options: Mapping[str, Argument]) -> None:
        """Append the tokens of variables; collect errors for variables that no command uses."""
        # Imported here, as in other functions of this module: pydantic takes a fifth of the time of --help.
        from ..ds_configs.specs.settings import unknown_error

        names = {f"{start}{name.upper()}": name for name in options for start in (PREFIX, own)}
        for variable, text in sorted(os.environ.items()):
            name = variable.removeprefix(own).lower()
            if variable in NOT_SETTINGS or not variable.startswith(PREFIX):
                continue
            if not variable.startswith(own):
                if not variable.startswith(self._commands):
                    near = get_close_matches(variable, names, n=1, cutoff=0.9)
                    fix = f"use {own}{names[near[0]].upper()}" if near else f"its name must begin like {own}"
                    rule = "names no command, so it has no effect"
                    self.errors.append(ConfigError(where=variable, value=text, rule=rule, fix=fix))
            elif name in options:
                _append(options[name], text, variable)
            else:
                self.errors.append(unknown_error(name, options, where=variable))

    def _read_file(self, options: Mapping[str, Argument]) -> None:
        """Append the tokens of the settings file; collect errors for keys that cannot be used."""
        from ..ds_configs.specs.settings import unknown_error
        from ..ds_configs.specs.texts import read_small_file, settings_mapping

        file = options["config"].tokens[0].value
        try:
            values, lines = settings_mapping(read_small_file(Path(file), what="config"), name=file)
        except InputError as error:
            # Recipes of quantization have no names any more.
            self.errors += [replace(each, fix=removals().get(f"configs={file}", each.fix)) for each in error.errors]
            return
        for name, value in values.items():
            source = f"{file}:{lines[name]}"
            where = f"{name} (from {source})"
            if name not in options:
                self.errors.append(unknown_error(name, options, where=where))
            elif name == "config":
                rule = "a settings file cannot name another one"
                self.errors.append(ConfigError(where=where, value=value, rule=rule, fix="use --config"))
            elif any(options[other] is options[name] for other in values if other in options and other < name):
                self.errors.append(ConfigError(where=where, rule="is set by another name too", fix="keep one of them"))
            else:
                _append(options[name], value, source)

    def located(self, errors: Iterable[ConfigError]) -> list[ConfigError]:
        """Return errors whose options a variable or a file sets with that source; with flags, if there are several."""
        options = _options(self.arguments)
        sources = {name: argument.tokens[0].source for name, argument in options.items() if argument.tokens}
        errors = list(errors)
        if len({sources.get(error.where) for error in errors} - {None}) < 2:
            sources = {name: source for name, source in sources.items() if source != "cli"}
        return [
            replace(error, where=f"{name} (from {f'--{name}'.replace('_', '-') if source == 'cli' else source})")
            if (source := sources.get(name := error.where))
            else error
            for error in errors
        ]

    def origins(self) -> dict[str, str]:
        """Return `flag`, `environment` or `file` for each option that is set."""
        kinds = {"cli": "flag"}
        return {
            name: kinds.get(source, "environment" if source.startswith(PREFIX) else "file")
            for name, argument in _options(self.arguments).items()
            for source in [token.source for token in argument.tokens[:1]]
        }


def _append(argument: Argument, value: object, source: str) -> None:
    """Add the tokens that a flag would have for this value, unless there are some already."""
    if argument.tokens:
        return
    items = value if isinstance(value, list) and argument.token_count()[1] else [value]
    for index, item in enumerate(items):
        if item is None:
            argument.append(Token(implicit_value=None, source=source, index=index))
        else:
            text = item if isinstance(item, str) else json.dumps(item, default=str)
            argument.append(Token(keyword=argument.name, value=text, source=source, index=index))
    if not items:
        argument.append(Token(implicit_value=(), source=source))


def _options(arguments: ArgumentCollection) -> dict[str, Argument]:
    """Return the options under each of their names."""
    return {
        name.removeprefix("--").replace("-", "_"): argument
        for argument in arguments
        if argument.parse and not argument.children
        for name in argument.parameter.name or ()
        if name.startswith("--")
    }


def _options_of(command: App) -> dict[str, Argument]:
    """Return the options of a command; none for a group of commands."""
    return {} if command.default_command is None else _options(command.assemble_argument_collection())


def sources_of(app: App) -> Sources:
    """Return the environment and file of the called command."""
    return next(source for source in app.config if isinstance(source, Sources))


def resolve(app: App, tokens: Sequence[str]) -> tuple[Callable[..., Any], BoundArguments]:
    """Return the command that the tokens name, and its parameters from all sources."""
    sources, tokens = sources_of(app), _spelled(app, tokens)
    sources.reset()
    errors: list[ConfigError] = []
    try:
        command, bound, unused, _ = app.parse_known_args(tokens)
    except CycloptsError as error:
        error.verbose = False
        unused = error.unused_tokens or []
        if isinstance(error, UnknownCommandError) and unused:
            near = command_meant(unused[0], [name for name in app if not name.startswith("-")])
            fix = f"did you mean {near}?" if near else "see shardwright --help"
            raise UsageError(ConfigError(where=unused[0], rule="is not a command", fix=fix)) from error
        if isinstance(error, UnknownOptionError) and error.argument_collection and error.token is not None:
            # Raised before `sources` is called, for an unknown flag in front of a positional argument.
            options = _options(error.argument_collection)
            raise UsageError(_unused_errors(app, tokens, [error.token.value], options)) from error
        if not sources.arguments:
            raise
        bound, errors = None, _conversion_errors(sources.arguments)
    errors = sources.located(sources.errors + errors)
    if bound is None or unused:
        errors += _unused_errors(app, tokens, unused, _options(sources.arguments))
    if errors or bound is None:
        raise UsageError(errors)
    for value in bound.arguments.values():
        if hasattr(value, "stated_by"):
            value.stated_by(sources.origins())
    return command, bound


def _spelled(app: App, tokens: Sequence[str]) -> list[str]:
    """Return tokens with `--bf16`, `--bf16 true` and `--bf16=true` as --precision, and `on` and `off` as JSON."""
    spelled, last = list(tokens), [*tokens, "--"].index("--")
    switches = {index: match for index in range(last) if (match := _SWITCH.fullmatch(tokens[index]))}
    options = _options_of(app.parse_commands(tokens)[1][-1]) if switches else {}
    for index, match in reversed(switches.items()):
        argument = options.get((match["name"] or "precision").replace("-", "_"))
        if argument is not None and match["precision"]:
            following = tokens[index + 1].lower() if index + 1 < last and "=" not in tokens[index] else ""
            if following != "false":
                spelled[index : index + 1 + (following == "true")] = [f"--precision={match['precision'].lower()}"]
        elif argument is not None and argument.resolved_hint is bool:
            spelled[index] = f"--{match['name']}={'true' if match['word'].lower() == 'on' else 'false'}"
    return spelled


def asks_for_json(app: App, tokens: Sequence[str]) -> bool:
    """Return whether any source sets `--format json`; if the command is unknown, whether a flag does."""
    option = _options(sources_of(app).arguments).get("format")
    if option is not None and option.tokens:
        return option.tokens[0].value == "json"
    return "--format=json" in tokens or ("--format", "json") in pairwise(tokens)


def _conversion_errors(arguments: ArgumentCollection) -> list[ConfigError]:
    """Return the errors of all parameters of the command; Cyclopts stops at the first."""
    from pydantic import ValidationError

    from ..ds_configs.specs.settings import errors_of

    errors: list[ConfigError] = []
    for argument in arguments:
        if argument.keys or not argument.parse:
            continue
        name = argument.names[0].removeprefix("--").lower()
        try:
            argument.convert()
            is_missing = argument.field_info.required and not argument.has_tokens
        except CycloptsError as error:
            error.verbose, is_missing = False, isinstance(error, MissingArgumentError)
            if isinstance(error.__cause__, ValidationError):
                errors += errors_of(error.__cause__, argument.resolved_hint)
                continue
            if not is_missing:
                errors.append(ConfigError(where=argument.names[0], rule=" ".join(str(error).split())))
        if is_missing:
            fix = f"pass {' or '.join(argument.names)}"
            if argument.index is not None:
                fix = f"pass it after the command, or as --{name}"
            errors.append(ConfigError(where=name, rule="is missing", fix=fix))
    return errors


def _unused_errors(
    app: App, tokens: Sequence[str], unused: Sequence[str], known: Mapping[str, Argument]
) -> list[ConfigError]:
    """Return errors for unknown flags of a command line, or for a word that no parameter accepts."""
    flags = [token.partition("=")[0] for token in unused if token.startswith("--") and len(token) > 2]
    if not flags:
        rule = "is an unexpected argument"
        return [ConfigError(where=token, rule=rule, fix=removals().get(token, "")) for token in unused[:1]]
    errors = []
    for flag in flags:
        rule, fix = "is not an option", meant(flag, known, flag=True)
        if not fix:
            # The commands that have the option, by its name or by one with its meaning.
            others = {name: _options_of(app[name]) for name in app if not name.startswith("-") and name != tokens[0]}
            owners = {name: [other for other in others if name in others[other]] for name in meanings(flag)}
            if name := next((name for name in owners if owners[name]), ""):
                listed = " or ".join(filter(None, (", ".join(owners[name][:-1]), owners[name][-1])))
                rule, fix = f"is not an option of {tokens[0]}", f"pass --{name.replace('_', '-')} to {listed}"
        fix = fix or suggested(flag, known, flag=True) or "see --help"
        errors.append(ConfigError(where=flag, rule=rule, fix=fix))
    return errors
