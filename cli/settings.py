"""Settings of every command: defaults < YAML file < environment < flags.

Cyclopts reads the flags and fills the others from `Sources`; pydantic converts the texts into values.
"""

from __future__ import annotations

import json
import os
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
from typing import Any, TypeVar, get_origin

from cyclopts import App, CycloptsError, Group, Parameter, Token
from cyclopts.argument import Argument, ArgumentCollection
from cyclopts.config import Env
from cyclopts.exceptions import MissingArgumentError, UnknownCommandError, UnknownOptionError

from ..ds_configs.specs.errors import ConfigError, InputError, UsageError
from ..ds_configs.specs.synonyms import HUGGING_FACE_NAMES, REMOVED, command_meant, meanings, meant, suggested
from ..ds_configs.specs.units import token_count

PREFIX = "SHARDWRIGHT_"
NOT_SETTINGS = frozenset(
    {"SHARDWRIGHT_DEBUG", "SHARDWRIGHT_DATA_DIR", "SHARDWRIGHT_LAUNCH_TOKEN", "SHARDWRIGHT_CPU_TENSOR_BYTES"}
)
"""Environment variables that are no setting of a command."""

_TOKEN_COUNTS = frozenset({"seq_len", "max_length", "max_seq_length", "max_model_len"})
"""Options with the length of a sequence, which may be written as 16k (16,384) or 1M."""
_PRECISION_SWITCHES = ("--bf16", "--fp16")
"""Switches of `TrainingArguments` for two values of --precision."""
_HEADINGS = ("Data", "Hardware", "Training", "Parallel layout", "Objective", "Guards")
Kind = TypeVar("Kind", bound=type)
Options = Parameter(name="*")
"""Marks a parameter whose fields are options of the command."""
FILLED: Any = None
"""Default that Cyclopts requires for such a parameter; `Sources` always fills it."""

_arguments: ContextVar[tuple[str, ...]] = ContextVar("arguments", default=())


@contextmanager
def running(arguments: Sequence[str]) -> Iterator[None]:
    """Let `command_line` and `arguments` return these arguments of `shardwright` during the block."""
    token = _arguments.set(tuple(arguments))
    try:
        yield
    finally:
        _arguments.reset(token)


def command_line() -> str:
    """Return the command line without directories of absolute paths; empty when a Python program calls."""
    stated = arguments()
    return shlex.join(["shardwright", *map(_without_directory, stated)]) if stated else ""


def full_command_line() -> str:
    """Return the command line as it was called; empty when a Python program calls."""
    return shlex.join(["shardwright", *arguments()]) if arguments() else ""


def arguments() -> tuple[str, ...]:
    """Return the arguments of `shardwright`; none when a Python program calls."""
    return _arguments.get()


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
    keeps the hyphen of `cache-teacher`, and `Yaml` drops a key that is also a command's name.
    """

    def __init__(self, commands: Iterable[str]) -> None:
        super().__init__(PREFIX, source="environment")
        self.reset()
        self._commands = [name.upper().replace("-", "_") for name in commands]

    def reset(self) -> None:
        """Forget the command and the errors of an earlier call."""
        self.errors: list[ConfigError] = []
        self.arguments = ArgumentCollection()  # type: ignore[no-untyped-call]

    def _prefix(self, commands: tuple[str, ...]) -> str:
        return str(super()._prefix(commands)).replace("-", "_")

    def __call__(self, app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        """Append the tokens of both sources to the arguments that have none yet."""
        options = _options(arguments)
        if "config" not in options:
            # A command of Cyclopts itself, such as --install-completion.
            return
        self.arguments = arguments
        for name, variable, text in self._environment(self._prefix(commands), options):
            _append(options[name], text, variable)
        config, values = options["config"], {}
        if config.tokens:
            owner = next(root for root in arguments if config in root.children)
            try:
                values = dict(owner.resolved_hint.read_config(config.tokens[0].value))
            except InputError as error:
                self.errors += error.errors
        for name, value in values.items():
            if name not in options:
                self.errors.append(_unknown(name, options, f"{name} (from file)"))
            elif name == "config":
                rule = "a settings file cannot name another one"
                self.errors.append(ConfigError(where="config (from file)", value=value, rule=rule, fix="use --config"))
            elif any(options[other] is options[name] for other in values if other in options and other < name):
                fix = "keep one of them"
                self.errors.append(ConfigError(where=f"{name} (from file)", rule="is set by another name too", fix=fix))
            else:
                _append(options[name], value, "file")
        for name, argument in options.items():
            if get_origin(argument.hint) is dict:
                self._read_mappings(name, argument)
        for name in _TOKEN_COUNTS & options.keys():
            argument = options[name]
            argument.tokens = [token.evolve(value=token_count(token.value)) for token in argument.tokens]
        for root in arguments:
            # Cyclopts builds a group of options only if one of them has a value.
            if not root.keys and root.children and not root.has_tokens:
                root.append(Token(implicit_value={}, source="default"))

    def _environment(self, own: str, options: Mapping[str, Argument]) -> Iterator[tuple[str, str, str]]:
        """Yield option, variable and text; collect errors for variables that this command would ignore."""
        names = {f"{start}{name.upper()}": name for name in options for start in (PREFIX, own)}
        for variable, text in sorted(os.environ.items()):
            if variable in NOT_SETTINGS or not variable.startswith(PREFIX):
                continue
            name = variable.removeprefix(own).lower()
            if variable.startswith(own):
                if name in options:
                    yield name, variable, text
                else:
                    self.errors.append(_unknown(name, options, variable))
            elif not any(variable.startswith(f"{PREFIX}{command}_") for command in self._commands) and (
                near := get_close_matches(variable, names, n=1, cutoff=0.9)
            ):
                rule, fix = "names no command, so it has no effect", f"use {own}{names[near[0]].upper()}"
                self.errors.append(ConfigError(where=variable, value=text, rule=rule, fix=fix))

    def _read_mappings(self, name: str, argument: Argument) -> None:
        """Convert mappings from YAML, which users write, to JSON, which Cyclopts reads."""
        from ..ds_configs.specs.settings import parsed

        for index, token in enumerate(argument.tokens):
            if token.value.lstrip().startswith("{"):
                try:
                    argument.tokens[index] = token.evolve(value=json.dumps(parsed(token.value), default=str))
                except ValueError as error:
                    self.errors.append(ConfigError(where=name, value=token.value, rule=str(error)))
                    argument.tokens[index] = token.evolve(value="{}")


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


def _unknown(name: str, options: Iterable[str], where: str) -> ConfigError:
    # Imported here, like the other functions of this module: pydantic takes a fifth of the time of --help.
    from ..ds_configs.specs.settings import unknown_error

    return unknown_error(name, options, where=where)


def resolve(app: App, tokens: Sequence[str]) -> tuple[Callable[..., Any], BoundArguments]:
    """Return the command that the tokens name, and its parameters from all sources.

    Raises:
        UsageError: all errors of its settings, from all sources.
        CycloptsError: a command or flag is unknown.
    """
    (sources,) = (source for source in app.config if isinstance(source, Sources))
    sources.reset()
    try:
        command, bound, unused, _ = app.parse_known_args(list(tokens))
    except CycloptsError as error:
        error.verbose = False
        if isinstance(error, UnknownCommandError) and error.unused_tokens:
            unknown = error.unused_tokens[0]
            near = command_meant(unknown, [name for name in app if not name.startswith("-")])
            fix = f"did you mean {near}?" if near else "see shardwright --help"
            raise UsageError(ConfigError(where=unknown, rule="is not a command", fix=fix)) from error
        if isinstance(error, UnknownOptionError) and error.argument_collection and error.token is not None:
            # Raised before `sources` is called, for an unknown flag in front of a positional argument.
            options, flag = _options(error.argument_collection), error.token.value
            if (with_precision := _with_precision(tokens, [flag], options)) is not None:
                return resolve(app, with_precision)
            raise UsageError(_unused_errors(app, tokens, [flag], options)) from error
        if not sources.arguments:
            # Cyclopts 5.4.0 accepts neither `on` nor `off` for `--switch=WORD`.
            token, argument = getattr(error, "token", None), error.argument
            if token is None or argument is None or argument.resolved_hint is not bool:
                raise
            word = {"on": "true", "off": "false"}.get(token.value.lower())
            if word is None:
                raise
            stated, accepted = (f"{token.keyword}={text}" for text in (token.value, word))
            return resolve(app, [accepted if item == stated else item for item in tokens])
        if (with_precision := _with_precision(tokens, error.unused_tokens, _options(sources.arguments))) is not None:
            return resolve(app, with_precision)
        errors = sources.errors + _conversion_errors(sources.arguments)
        raise UsageError(
            errors + _unused_errors(app, tokens, error.unused_tokens, _options(sources.arguments))
        ) from error
    if (with_precision := _with_precision(tokens, unused, _options(sources.arguments))) is not None:
        return resolve(app, with_precision)
    errors = sources.errors + _unused_errors(app, tokens, unused, _options(sources.arguments))
    if errors:
        raise UsageError(errors)
    names = {"cli": "flag", "file": "file"}
    origins = {
        name: names.get(argument.tokens[0].source, "environment")
        for name, argument in _options(sources.arguments).items()
        if argument.tokens
    }
    for value in bound.arguments.values():
        if hasattr(value, "stated_by"):
            value.stated_by(origins)
    return command, bound


def _with_precision(
    tokens: Sequence[str], unused: Sequence[str] | None, options: Mapping[str, Argument]
) -> list[str] | None:
    """Return the tokens with `--bf16`, `--bf16 true` or `--bf16=true` as --precision; `None` if they have none."""
    if "precision" not in options:
        return None
    for index, token in enumerate(tokens):
        switch, sign, value = token.partition("=")
        if switch not in _PRECISION_SWITCHES or token not in (unused or ()):
            continue
        words = 1
        if not sign and index + 1 < len(tokens) and tokens[index + 1].lower() in ("true", "false"):
            value, words = tokens[index + 1], 2
        if value.lower() in ("", "true"):
            return [*tokens[:index], f"--precision={switch[2:]}", *tokens[index + words :]]
    return None


def asks_for_json(app: App, tokens: Sequence[str]) -> bool:
    """Return whether any source sets `--format json`; if the command is unknown, whether a flag does."""
    (sources,) = (source for source in app.config if isinstance(source, Sources))
    option = _options(sources.arguments).get("format")
    if option is not None and option.tokens:
        return option.tokens[0].value == "json"
    return "--format=json" in tokens or ("--format", "json") in pairwise(tokens)


def _conversion_errors(arguments: ArgumentCollection) -> list[ConfigError]:
    """Return the errors of all parameters of the command; Cyclopts stops at the first."""
    errors: list[ConfigError] = []
    for argument in arguments:
        if argument.keys or not argument.parse:
            continue
        try:
            argument.convert()
        except CycloptsError as error:
            error.verbose = False
            errors += _errors_of(argument, error)
        else:
            if argument.field_info.required and not argument.has_tokens:
                errors.append(_missing(argument))
    return errors


def _missing(argument: Argument) -> ConfigError:
    names = argument.names
    name = names[0].removeprefix("--")
    fix = f"pass {' or '.join(names)}"
    if argument.index is not None:
        fix = f"pass it after the command, or as --{name}"
    return ConfigError(where=name.lower(), rule="is missing", fix=fix)


def _errors_of(argument: Argument, error: CycloptsError) -> list[ConfigError]:
    from pydantic import ValidationError

    from ..ds_configs.specs.settings import errors_of

    if isinstance(error, MissingArgumentError) and not isinstance(error.__cause__, ValidationError):
        return [_missing(argument)]
    if not isinstance(error.__cause__, ValidationError):
        return [ConfigError(where=argument.names[0], rule=" ".join(str(error).split()))]
    options = _options(argument.children)
    errors = []
    for rejection in errors_of(error.__cause__, argument.resolved_hint):
        tokens = options[rejection.where].tokens if rejection.where in options else []
        source = tokens[0].source if tokens else "cli"
        errors.append(rejection if source == "cli" else replace(rejection, where=f"{rejection.where} (from {source})"))
    return errors


def _unused_errors(
    app: App, tokens: Sequence[str], unused: Sequence[str] | None, known: Mapping[str, Argument]
) -> list[ConfigError]:
    """Return errors for unknown flags of a command line, or for a word that no parameter accepts."""
    flags = [token.partition("=")[0] for token in unused or () if token.startswith("--") and len(token) > 2]
    if not flags:
        return [
            ConfigError(where=token, rule="is an unexpected argument", fix=REMOVED.get(token, ""))
            for token in (unused or ())[:1]
        ]
    from ..ds_configs.specs.settings import not_covered

    errors, others = [], None
    for flag in flags:
        rule, fix = "is not an option", not_covered(flag) or meant(flag, known, flag=True)
        if not fix:
            others = _options_of_others(app, tokens[0]) if others is None else others
            if fix := _for_other_commands(others, flag):
                rule = f"is not an option of {tokens[0]}"
        fix = fix or suggested(flag, known, flag=True) or "see --help"
        errors.append(ConfigError(where=flag, rule=rule, fix=fix))
    return errors


def _options_of_others(app: App, command: str) -> dict[str, dict[str, Argument]]:
    return {
        name: _options(app[name].assemble_argument_collection())
        for name in app
        if not name.startswith("-") and name != command and app[name].default_command is not None
    }


def _for_other_commands(others: Mapping[str, Mapping[str, Argument]], flag: str) -> str:
    """Return the fix for an option of other commands, by its name or one with its meaning; empty if none has it."""

    for name in meanings(flag):
        owners = [other for other, options in others.items() if name in options]
        if owners:
            listed = " or ".join(filter(None, (", ".join(owners[:-1]), owners[-1])))
            return f"pass --{name.replace('_', '-')} to {listed}"
    return ""


def grouped(kind: Kind) -> Kind:
    """Put the options of a class under the headings that its bases declare, and return the class."""
    groups = kind.groups()  # type: ignore[attr-defined]
    for name, field in kind.model_fields.items():  # type: ignore[attr-defined]
        # Several NAME=VALUE are a repeated flag.
        tokens = -1 if get_origin(field.annotation) is dict else None
        option, opposite = name.replace("_", "-"), (field.json_schema_extra or {}).get("negative")
        negative = [f"--{opposite}", f"--no-{option}"] if opposite else None
        alias = [f"--{other.replace('_', '-')}" for other in HUGGING_FACE_NAMES.get(name, ())]
        field.metadata.append(
            Parameter(group=_heading(groups[name]), n_tokens=tokens, negative=negative, alias=alias or None)
        )
    return kind


@cache
def _heading(name: str) -> Group:
    """Return the group of a heading: first those of `_HEADINGS`, then the command's own, output last."""
    position = _HEADINGS.index(name) if name in _HEADINGS else len(_HEADINGS)
    return Group(name, sort_key=position + (name == "Output"))
