"""Checks of a TRL configuration file (`trl dpo --config FILE`), alone and with the launch files of its run.

A file does not name its configuration class. The classes that fit its keys and values best are candidates; if several
remain, what does not hold for all of them is a warning.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import PurePath
from typing import get_args

from ..specs.errors import ConfigError
from ..specs.model import ModelSpec
from ..specs.tasks import TrlTask
from .report import DATA, Entry, Finding, KeyWalker, Node, Report, Schema, load_keys, nearest_key
from .trl_rules import GENERATING, RULES, TrlRun

_TEXTS = tomllib.loads((DATA / "trl_texts.toml").read_text(encoding="utf-8"))
MEANINGS: Mapping[str, str] = _TEXTS["meanings"]
"""Texts of `explain` about keys of TRL."""
_REMOVED: Mapping[str, str] = _TEXTS["removed"]
"""Keys of earlier releases of TRL and Transformers, with what to write; a class that has the key accepts it."""
_EXPONENT = re.compile(r"[-+]?\d{1,20}(\.\d{0,20})?[eE][-+]?\d{1,3}")


def check_trl(
    report: Report,
    *,
    task: TrlTask | None = None,
    launch: Sequence[Report] = (),
    engines: Sequence[Report] = (),
    world_size: int | None = None,
    model: ModelSpec | None = None,
    context_tokens: int | None = None,
    gpu_bytes: int | None = None,
) -> None:
    """Add the findings under every configuration class that the file fits; those of only some are warnings.

    `launch` and `engines` are the Accelerate and DeepSpeed files of the run; `task` selects the class.
    """
    names = candidates(report, task)
    by_class: list[list[Finding]] = []
    for name in names:
        schema = keys_of(name)
        copy = Report(filename=report.filename, root=_converted(report.root, schema))
        run = TrlRun(
            config=name,
            schema=schema,
            report=copy,
            launch=launch,
            engines=engines,
            world_size=world_size,
            model=model,
            context_tokens=context_tokens,
            gpu_bytes=gpu_bytes,
        )
        _check_keys(run)
        for check_rules in RULES:
            check_rules(run)
        by_class.append(copy.findings)
    places = [{(finding.kind, finding.error.where) for finding in findings} for findings in by_class]
    common = set.intersection(*places)
    report.findings += [finding for finding in by_class[0] if (finding.kind, finding.error.where) in common]
    # What holds for some of the classes, with their names.
    uncertain: dict[tuple[str, str, str], tuple[ConfigError, list[str]]] = {}
    for name, findings in zip(names, by_class, strict=True):
        for finding in findings:
            error = finding.error
            if (finding.kind, error.where) not in common:
                uncertain.setdefault((error.where, error.rule, error.fix), (error, []))[1].append(name)
    for error, holders in uncertain.values():
        rule = f"if the file is for {' or '.join(holders)}: {error.rule}"
        report.findings.append(Finding(kind="warning", error=replace(error, rule=rule)))
    if uncertain:
        tasks = [load_keys("trl")["classes"][name]["task"] for name in names]
        rule = f"the file fits {', '.join(names)}, and some rules depend on which it is for"
        report.warning("", rule, f"pass --task {' or '.join(tasks)}")


def keys_of(config: str) -> Mapping[str, Schema]:
    """Return the nodes of all keys that a file for a configuration class may have."""
    data = load_keys("trl")
    own = data["classes"][config]
    return {key: own["differing"].get(key) or data["keys"][key] for key in (*data["common"], *own["keys"])}


def candidates(report: Report, task: TrlTask | None = None) -> list[str]:
    """Return the configuration class of a task, or the classes with the fewest unknown keys and values.

    Among these, a task in the name of the file, or else of its directory, decides.
    """
    classes = load_keys("trl")["classes"]
    names = {classes[name]["task"]: name for name in classes}
    if task is not None:
        return [names[task]]
    errors: dict[str, int] = {}
    for name in (names[word] for word in get_args(TrlTask)):
        schema = keys_of(name)
        errors[name] = 0
        for entry in report.root.entries:
            node = schema.get(entry.key)
            values = [item.scalar for item in entry.node.items] or [entry.node.scalar]
            choices = (node or {}).get("choices", values)
            wrong = any(isinstance(value, str) and value not in choices for value in values)
            errors[name] += 2 * (node is None and entry.key not in _REMOVED) + wrong
    best = [name for name in errors if errors[name] == min(errors.values())]
    path = PurePath(report.filename)
    for part in (path.stem, path.parent.name):
        words = set(re.split(r"[^a-z]+", part.lower()))
        if named := [name for name in best if classes[name]["task"] in words]:
            return named
    # GKDConfig inherits from SFTConfig; a file without keys of GKD is for SFT.
    own_keys = {name: set(classes[name]["keys"]) for name in best}
    return [name for name in best if not any(own_keys[other] < own_keys[name] for other in best)]


# transformers/hf_argparser.py, `string_to_bool`.
_WORDS = dict.fromkeys(("yes", "true", "t", "y", "1"), True) | dict.fromkeys(("no", "false", "f", "n", "0"), False)


def _converted(root: Node, schema: Mapping[str, Schema]) -> Node:
    """Return the root with strings as argparse converts them: `5e-7` and `"8"` become numbers, `"true"` a boolean."""
    entries = []
    for entry in root.entries:
        node, kinds = entry.node, schema.get(entry.key, {}).get("types", ())
        value = node.scalar
        if isinstance(value, str) and "string" not in kinds:
            readers: dict[str, Callable[[str], object]] = {
                "boolean": lambda text: _WORDS[text.lower()],
                "count": int,
                "number": float,
            }
            for read in (readers[kind] for kind in kinds if kind in readers):
                with suppress(KeyError, ValueError):
                    value = read(str(node.scalar))
        elif type(value) is int and value in (0, 1) and "boolean" in kinds:
            value = bool(value)
        entries.append(entry if value is node.scalar else replace(entry, node=replace(node, scalar=value)))
    return replace(root, entries=tuple(entries))


@functools.lru_cache(maxsize=512)
def _nearest(key: str) -> str:
    return nearest_key(key, list(load_keys("trl")["keys"]))


def _check_keys(run: TrlRun) -> None:
    data, report = load_keys("trl"), run.report

    def unknown(path: str, entry: Entry, parent: Schema) -> None:
        key, line = entry.key, entry.line
        if parent is data["dataset"]:
            report.error(path, "unknown key of a dataset", nearest_key(key, list(parent["keys"])), line=line)
            return
        owners = [name for name, own in data["classes"].items() if key in own["keys"]]
        # cli/commands/training.py: keys that no dataclass has become arguments of accelerate launch.
        if key in data["launcher"]["values"] or key == "accelerate_config":
            return
        if key in data["launcher"]["flags"]:
            rule = f"`trl` passes '--{key} {entry.node.plain()}' to accelerate launch, which has no value there"
            report.error(path, rule, f"pass --{key} on the command line, or write accelerate_config", line=line)
        elif key in _REMOVED:
            fix = _REMOVED[key]
            if key == "max_prompt_length" and run.config in GENERATING:
                fix = "remove it, and filter long prompts in the dataset"
            report.error(path, f"is not a key of {run.config} in TRL 1.16", fix, line=line)
        elif owners:
            rule = f"is not a key of {run.config}, but of {', '.join(owners)}"
            report.error(path, rule, "remove it, or use that configuration", line=line)
        else:
            rule = "unknown key; `trl` stops, and a script of TRL under accelerate launch ignores it"
            report.error(path, rule, _nearest(key), line=line)

    def auto(path: str, schema: Schema) -> None:
        report.error(path, "TRL does not fill 'auto' here", "write the value")

    walker = KeyWalker(report, unknown=unknown, auto=auto)
    walker.walk(report.root, {"keys": run.schema, "strict": True})
    datasets = report.node("datasets")
    for item in datasets.items if datasets is not None else ():
        walker.walk(item, data["dataset"], "datasets")
    # argparse converts only the strings of the top level.
    for entry in report.root.entries:
        for part in entry.node.entries if entry.key != "env" else ():
            if isinstance(part.node.scalar, str) and _EXPONENT.fullmatch(part.node.scalar):
                number, _, power = part.node.scalar.lower().partition("e")
                rule = "is a string in YAML, which requires a dot and a sign in a number with an exponent"
                fix = f"write {float(number)}e{int(power):+d}"
                report.error(f"{entry.key}.{part.key}", rule, fix, line=part.line)
    for key, fix in _TEXTS["deprecated"].items():
        if key in run.schema and run.sets(key):
            report.warning(key, "is deprecated; TRL 2.0 removes it", fix)
    for key, words in _TEXTS["deprecated_values"].items():
        if key in run.schema and (fix := words.get(str(report.value(key)))):
            report.warning(key, "is deprecated; TRL 2.0 removes it", fix)
