"""Names of options in other tools, and the option of this package with that meaning."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from ... import ds_configs


class Option(NamedTuple):
    """An option that replaces another name."""

    name: str
    values: str = ""
    """Values that have the meaning of the other name; empty if it takes the same value."""
    beside: str = ""
    """An option that the command must have too, if commands use `name` for different things."""


@cache
def _other_names() -> dict[str, Any]:
    """Return the file of names. Only errors and `explain` read it, because its parser takes 15 ms."""
    return tomllib.loads(files(ds_configs).joinpath("data", "other_names.toml").read_text(encoding="utf-8"))


@cache
def removals() -> Mapping[str, str]:
    """Return options and values of earlier versions, and what replaces them."""
    entries = _other_names()["removed"]
    return {name: entry["fix"] for entry in entries if "beside" not in entry for name in entry["names"]}


@cache
def synonyms() -> Mapping[str, tuple[Option, ...]]:
    """Return the options with the meaning of a name in other tools, or of one of these where a command lacks it."""
    return {
        name: tuple(Option(**option) for option in entry["options"])
        for entry in _other_names()["synonym"]
        for name in entry["names"]
    }


_COMMANDS: Mapping[tuple[str, ...], str] = {
    ("finetune", "fine_tune", "sft", "fit", "tune", "pretrain", "run"): "train",
    ("estimate", "memory", "suggest", "config", "configure"): "plan",
    ("compress", "awq", "gptq"): "quantize",
    ("eval", "benchmark", "perplexity"): "evaluate",
    ("validate", "verify", "lint"): "check",
    ("generate", "chat", "infer", "deploy"): "serve",
    ("prune",): "student",
    ("dryrun", "simulate", "test"): "rehearse",
    ("submit",): "launch",
}
_MEANT_COMMANDS = {name: command for names, command in _COMMANDS.items() for name in names}


def command_meant(word: str, commands: Collection[str]) -> str:
    """Return the command with this meaning in other tools, or with the nearest name; else nothing.

    >>> command_meant("fine-tune", ["train", "plan"]), command_meant("trian", ["train", "plan"])
    ('train', 'train')
    """
    plain = word.lower().replace("-", "_")
    near = get_close_matches(word.lower(), commands, n=1, cutoff=0.6)
    return _MEANT_COMMANDS.get(plain, near[0] if near else "")


def meant(name: str, known: Collection[str], *, flag: bool = False) -> str:
    """Return the fix for a name of another tool: the known option with its meaning; else nothing."""
    plain = _plain(name)
    for entry in _other_names()["removed"]:
        # Other commands use the name.
        if plain in entry["names"] and entry.get("beside") in known:
            return str(entry["fix"])
    if plain in removals() and plain not in synonyms():
        return removals()[plain]
    for option in synonyms().get(plain.lower(), ()):
        if option.name in known and option.name != plain and (not option.beside or option.beside in known):
            written = _written(option.name, option.values, flag=flag)
            return f"use {written}" if option.values else f"did you mean {written}?"
    return ""


def meanings(name: str) -> tuple[str, ...]:
    """Return the option of this name, and options with its meaning.

    >>> meanings("--lr")
    ('lr', 'learning_rate')
    """
    plain = _plain(name)
    return plain, *(option.name for option in synonyms().get(plain.lower(), ()) if not option.values)


def texts_about(word: str, texts: Collection[str]) -> list[str]:
    """Return the text of this name, else those of the values and options with its meaning.

    >>> texts_about("fsdp", ["fsdp2", "strategy"]), texts_about("lr", ["learning_rate"])
    (['fsdp2'], ['learning_rate'])
    """
    if word in texts:
        return [word]
    if joined := [name for name in texts if name.replace("_", "") == word.replace("_", "")]:
        return joined[:1]
    names: list[str] = []
    for option in synonyms().get(word, ()):
        values = [value.replace("-", "_") for value in re.findall(r"[\w-]+", option.values)]
        names += [value for value in values if value in texts] or [name for name in (option.name,) if name in texts]
    return list(dict.fromkeys(names))


def _plain(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


def _written(option: str, values: str = "", *, flag: bool) -> str:
    if flag:
        return f"--{option.replace('_', '-')} {values}".rstrip()
    return f"{option}: {values}" if values else option


def suggested(name: str, known: Collection[str], *, flag: bool = False) -> str:
    """Return the fix for an unknown option: the option with its meaning, or with the nearest name; else nothing.

    `flag` writes the option as a flag.

    >>> suggested("zero_stage", ["strategy"], flag=True), suggested("lora_rnk", ["lora_rank"])
    ('use --strategy zero1, zero2 or zero3', 'did you mean lora_rank?')
    """
    if fix := meant(name, known, flag=flag):
        return fix
    plain = _plain(name)
    near = get_close_matches(plain, known, n=1, cutoff=0.7 if plain.lower() in synonyms() else 0.6)
    return f"did you mean {_written(near[0], flag=flag)}?" if near else ""
