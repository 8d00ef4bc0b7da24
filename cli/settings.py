"""Settings of every command from defaults, a YAML file, the environment and flags, in that order of rank.

Cyclopts reads the flags and fills what they leave open from `Sources`; pydantic turns the texts into values.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from inspect import BoundArguments
from itertools import pairwise
from typing import Any, TypeVar, get_origin

from cyclopts import App, CycloptsError, Group, Parameter, Token
from cyclopts.argument import Argument, ArgumentCollection
from cyclopts.config import Env
from cyclopts.exceptions import MissingArgumentError

from ..ds_configs.specs.errors import Fault, FaultsError, UsageError

PREFIX = "SHARDWRIGHT_"
NOT_SETTINGS = frozenset({"SHARDWRIGHT_DEBUG", "SHARDWRIGHT_DATA_DIR", "SHARDWRIGHT_LAUNCH_TOKEN"})
"""Variables that no command's prefix begins."""

_HEADINGS = ("Data", "Hardware", "Training", "Parallel layout", "Objective", "Guards")
Kind = TypeVar("Kind", bound=type)
Options = Parameter(name="*")
"""Marks a parameter whose fields are options of the command."""
FILLED: Any = None
"""The default that Cyclopts asks of such a parameter; `Sources` always fills it."""


class Sources(Env):
    """Environment and file of the command that is called, which state what its flags leave open.

    Subclass of Cyclopts' `Env`, whose names the help shows. Seen with cyclopts 5.4.0: `Env` passes over names that it
    does not know and keeps the hyphen of `cache-teacher`, and `Yaml` drops a key that is a command's name too.
    """

    def __init__(self, commands: Iterable[str]) -> None:
        super().__init__(PREFIX, source="environment")
        self.faults: list[Fault] = []
        self.arguments = ArgumentCollection()  # type: ignore[no-untyped-call]
        self._commands = [name.upper().replace("-", "_") for name in commands]

    def _prefix(self, commands: tuple[str, ...]) -> str:
        return str(super()._prefix(commands)).replace("-", "_")

    def __call__(self, app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        """Append the tokens of both sources to the arguments that have none yet."""
        self.arguments = arguments
        options = _options(arguments)
        for name, variable, text in self._environment(commands, options):
            self._append(options[name], text, variable)
        for name, value in self._file(options).items():
            if name not in options:
                self.faults.append(_unknown(name, options, f"{name} (from file)"))
            elif name == "config":
                rule = "names a file from inside of one"
                self.faults.append(Fault(where="config (from file)", value=value, rule=rule, fix="use --config"))
            else:
                self._append(options[name], value, "file")
        for name, argument in options.items():
            if get_origin(argument.hint) is dict:
                self._read_mappings(name, argument)
        for root in arguments:
            # Cyclopts builds a group of options only where one of them is stated.
            if not root.keys and root.children and not root.has_tokens:
                root.append(Token(implicit_value={}, source="default"))

    def _environment(
        self, commands: tuple[str, ...], options: Mapping[str, Argument]
    ) -> Iterable[tuple[str, str, str]]:
        own = self._prefix(commands)
        for variable, text in sorted(os.environ.items()):
            if variable in NOT_SETTINGS:
                continue
            name = variable.removeprefix(own).lower()
            if variable.startswith(own):
                if name in options:
                    yield name, variable, text
                else:
                    self.faults.append(_unknown(name, options, variable))
            elif variable.startswith(PREFIX):
                self._refuse_unowned(variable, own, options)

    def _refuse_unowned(self, variable: str, own: str, options: Iterable[str]) -> None:
        """Refuse what is meant for this command and would be passed over; other commands' variables are theirs."""
        if any(variable.startswith(f"{PREFIX}{command}_") for command in self._commands):
            return
        meant = {f"{start}{name.upper()}": name for name in options for start in (PREFIX, own)}
        near = get_close_matches(variable, meant, n=1, cutoff=0.9)
        if near:
            rule, fix = "names no command, so it states nothing", f"use {own}{meant[near[0]].upper()}"
            self.faults.append(Fault(where=variable, value=os.environ[variable], rule=rule, fix=fix))

    def _file(self, options: Mapping[str, Argument]) -> dict[str, Any]:
        named = options["config"]
        if not named.tokens:
            return {}
        owner = next(root for root in self.arguments if named in root.children)
        try:
            found: dict[str, Any] = owner.resolved_hint.read_config(named.tokens[0].value)
            return found
        except FaultsError as error:
            self.faults += error.faults
            return {}

    def _read_mappings(self, name: str, argument: Argument) -> None:
        """Spell mappings as JSON, which is what Cyclopts reads; users write them as YAML."""
        from ..ds_configs.specs.settings import parsed

        for index, token in enumerate(argument.tokens):
            if token.value.lstrip().startswith("{"):
                try:
                    argument.tokens[index] = token.evolve(value=json.dumps(parsed(token.value), default=str))
                except ValueError as error:
                    self.faults.append(Fault(where=name, value=token.value, rule=str(error)))
                    argument.tokens[index] = token.evolve(value="{}")

    def _append(self, argument: Argument, value: Any, source: str) -> None:
        """Add the tokens that a flag would have for this value."""
        if argument.tokens:
            return
        many = isinstance(value, list) and argument.token_count()[1]
        for index, item in enumerate(value if many else [value]):
            if item is None:
                argument.append(Token(implicit_value=None, source=source, index=index))
            else:
                text = item if isinstance(item, str) else json.dumps(item, default=str)
                argument.append(Token(keyword=argument.name, value=text, source=source, index=index))
        if many and not value:
            argument.append(Token(implicit_value=(), source=source))


def _options(arguments: ArgumentCollection) -> dict[str, Argument]:
    """Return what can be stated by name, under each of its names."""
    return {
        name.removeprefix("--").replace("-", "_"): argument
        for argument in arguments
        if argument.parse and not argument.children
        for name in argument.parameter.name or ()
        if name.startswith("--")
    }


def _unknown(name: str, options: Iterable[str], where: str) -> Fault:
    from ..ds_configs.specs.settings import unknown_fault

    return unknown_fault(name, options, where=where)


def resolve(app: App, tokens: Sequence[str]) -> tuple[Callable[..., Any], BoundArguments]:
    """Return the command that the tokens name, and its parameters from all sources.

    Raises:
        UsageError: everything wrong with its settings, from whatever source.
        CycloptsError: a command or flag cannot be told from the tokens.
    """
    (sources,) = (source for source in app.config if isinstance(source, Sources))
    try:
        command, bound, unused, _ = app.parse_known_args(list(tokens))
    except CycloptsError as error:
        error.verbose = False
        if not sources.arguments:
            spelled = _plain_switch(error, tokens)
            if spelled is None:
                raise
            return resolve(app, spelled)
        faults = sources.faults + _conversion_faults(sources.arguments)
        raise UsageError(faults + _unused_faults(error.unused_tokens, sources)) from error
    faults = sources.faults + _unused_faults(unused, sources)
    if faults:
        raise UsageError(faults)
    origins = {name: _origin(argument) for name, argument in _options(sources.arguments).items() if argument.tokens}
    for value in bound.arguments.values():
        if hasattr(value, "stated_by"):
            value.stated_by(origins)
    return command, bound


def asks_for_json(app: App, tokens: Sequence[str]) -> bool:
    """Return whether some source states `--format json`; only the flags where the command could not be told."""
    (sources,) = (source for source in app.config if isinstance(source, Sources))
    stated = _options(sources.arguments).get("format")
    if stated is not None and stated.tokens:
        return stated.tokens[0].value == "json"
    return "--format=json" in tokens or ("--format", "json") in pairwise(tokens)


def _plain_switch(error: CycloptsError, tokens: Sequence[str]) -> list[str] | None:
    """Return the tokens with one `on` or `off` in the words that Cyclopts 5.4.0 knows for `--switch=WORD`."""
    token, argument = getattr(error, "token", None), error.argument
    if token is None or argument is None or argument.resolved_hint is not bool:
        return None
    word = {"on": "true", "off": "false"}.get(token.value.lower())
    if word is None:
        return None
    stated = f"{token.keyword}={token.value}"
    return [f"{token.keyword}={word}" if one == stated else one for one in tokens]


def _origin(argument: Argument) -> str:
    source = argument.tokens[0].source
    return {"cli": "flag", "file": "file"}.get(source, "environment")


def _conversion_faults(arguments: ArgumentCollection) -> list[Fault]:
    """Return what is wrong with each parameter of the command; Cyclopts stops at the first."""
    faults: list[Fault] = []
    for argument in arguments:
        if argument.keys or not argument.parse:
            continue
        try:
            argument.convert()
        except CycloptsError as error:
            error.verbose = False
            faults += _faults_of(argument, error)
        else:
            if argument.field_info.required and not argument.has_tokens:
                faults.append(_missing(argument))
    return faults


def _missing(argument: Argument) -> Fault:
    names = argument.names
    name = names[0].removeprefix("--")
    fix = f"give {' or '.join(names)}" if argument.index is None else f"name it after the command, or give --{name}"
    return Fault(where=name.lower(), rule="is missing", fix=fix)


def _faults_of(argument: Argument, error: CycloptsError) -> list[Fault]:
    from pydantic import ValidationError

    from ..ds_configs.specs.settings import faults_of

    if not isinstance(error.__cause__, ValidationError):
        if isinstance(error, MissingArgumentError):
            return [_missing(argument)]
        return [Fault(where=argument.names[0], rule=" ".join(str(error).split()))]
    stated = _options(argument.children)
    found = []
    for fault in faults_of(error.__cause__, argument.resolved_hint):
        tokens = stated[fault.where].tokens if fault.where in stated else []
        source = tokens[0].source if tokens else "cli"
        found.append(fault if source == "cli" else replace(fault, where=f"{fault.where} (from {source})"))
    return found


def _unused_faults(tokens: Sequence[str] | None, sources: Sources) -> list[Fault]:
    """Return the flags that are no options, and words that no parameter takes."""
    flags = [token.partition("=")[0] for token in tokens or () if token.startswith("--") and len(token) > 2]
    if not flags:
        return [Fault(where=token, rule="is one argument too many") for token in (tokens or ())[:1]]
    from ..ds_configs.specs.settings import not_covered

    known = {f"--{name.replace('_', '-')}": name for name in _options(sources.arguments)}
    faults = []
    for flag in flags:
        near = get_close_matches(flag.replace("_", "-"), known, n=1, cutoff=0.5)
        fix = not_covered(flag) or (f"did you mean {near[0]}?" if near else "see --help")
        faults.append(Fault(where=flag, rule="is not an option", fix=fix))
    return faults


def grouped(kind: Kind) -> Kind:
    """Put the options of a class under the headings that its bases declare, and return the class."""
    groups = kind.groups()  # type: ignore[attr-defined]
    for name, field in kind.model_fields.items():  # type: ignore[attr-defined]
        # Several NAME=VALUE are a flag that is repeated.
        tokens = -1 if get_origin(field.annotation) is dict else None
        option, opposite = name.replace("_", "-"), (field.json_schema_extra or {}).get("negative")
        negative = [f"--{opposite}", f"--no-{option}"] if opposite else None
        field.metadata.append(Parameter(group=_heading(groups[name]), n_tokens=tokens, negative=negative))
    return kind


@cache
def _heading(name: str) -> Group:
    """Return the group of a heading; in the order of `_HEADINGS`, a command's own one after them, output last."""
    place = _HEADINGS.index(name) if name in _HEADINGS else len(_HEADINGS)
    return Group(name, sort_key=place + (name == "Output"))
