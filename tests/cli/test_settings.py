"""Settings of every command: the same text from a flag, a variable and a file is the same value, and ranks alike."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from inspect import Parameter
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin
from unittest.mock import patch

import pytest
import yaml
from cyclopts.argument import Argument
from shardwright.cli.main import _COMMANDS, build_app, run
from shardwright.cli.settings import resolve
from shardwright.ds_configs.specs.settings import Settings

# `launch` has no settings: what it does not know is of the user's own script.
_PLAIN = [name for name in _COMMANDS if name not in ("configs", "launch")]
COMMANDS = [*((name,) for name in _PLAIN), ("configs", "ls"), ("configs", "cp")]
NAMES = [" ".join(command) for command in COMMANDS]


RANKS = ("file", "environment", "flag")
"""Where a value is stated, the later ones first in rank."""


def options_of(command: tuple[str, ...]) -> dict[str, Argument]:
    """Return the options of a command by name; what names a file is none, nor are a script's own arguments."""
    app = build_app()
    for word in command:
        app = app[word]
    found = {}
    for argument in app.assemble_argument_collection():
        if not argument.children and argument.field_info.kind is not Parameter.VAR_POSITIONAL:
            found[argument.name.removeprefix("--").replace("-", "_")] = argument
    del found["config"]
    return found


OPTIONS = {command: options_of(command) for command in COMMANDS}


def members(annotation: Any) -> list[Any]:
    """Return the plain types that an annotation allows."""
    inner = [item for item in get_args(annotation) if item is not NoneType]
    if get_origin(annotation) in (Literal, tuple, list, dict) or not inner:
        return [annotation]
    return [one for item in inner for one in members(item)]


SAMPLES = {bool: ["on", "no", "1"], int: ["007", "1_000", "2"], float: ["5e-1", ".25", "0.125"]}
LISTED = {int: ["1,2", "[3]", " 4 , 5 "], float: ["0.5", "[1, 2]", "3"], Path: ["a,b", "[c]", "d"]}
TEXTS = ["1e-5", "x: y", "0123"]


def texts(argument: Argument) -> list[str]:
    """Return three texts that an option accepts, written as people write them."""
    kind = members(argument.hint)[0]
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return [str(inner[index % len(inner)]) for index in range(3)]
    if origin in (tuple, list):
        return LISTED.get(inner[0], ["one", "re:.*(q,k){1,2}_proj", "[a, b]"])
    return ["a=1", "b=[1, 2]", "e=x=y"] if origin is dict else SAMPLES.get(kind, TEXTS)


def resolved(command: tuple[str, ...], **stated: Mapping[str, str]) -> dict[str, Any]:
    """Return the value and the origin of every option, with the texts that each source states."""
    in_file = dict(stated.get("file", {}))
    prefix = f"SHARDWRIGHT_{'_'.join(command).upper().replace('-', '_')}_"
    environment = {name: text for name, text in os.environ.items() if not name.startswith("SHARDWRIGHT_")}
    environment |= {f"{prefix}{name.upper()}": text for name, text in stated.get("environment", {}).items()}
    tokens = [*command]
    for name, text in stated.get("flag", {}).items():
        tokens.append(f"--{name.replace('_', '-')}={text}")
    if in_file:
        tokens.append("--config=settings.yaml")
    content = yaml.safe_dump(in_file).encode()
    with (
        patch.dict(os.environ, environment, clear=True),
        patch("shardwright.ds_configs.specs.texts.read_small_file", lambda *_, **__: content),
    ):
        _, bound = resolve(build_app(), tokens)
    found: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        if not isinstance(value, Settings):
            found[name] = value
            continue
        values = value.model_dump(by_alias=True)
        origins = value.origins()
        found |= {key: item for key, item in values.items() if key != "config"}
        found |= {f"{key} from": origin for key, origin in origins.items() if key != "config"}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS, ids=NAMES)
def test_a_text_is_the_same_value_from_every_source_and_the_highest_source_wins(command: tuple[str, ...]) -> None:
    options = OPTIONS[command]
    samples = {name: texts(argument) for name, argument in options.items()}
    needed = {
        name: samples[name][0]
        for name in ("output_dir", *samples)
        if name in options
        and (options[name].required or (name == "output_dir" and command in (("cache-teacher",), ("quantize",))))
    }
    for index, rank in enumerate(RANKS):
        # Each source sets the options of the sources below it too, and loses to those above it.
        stated = {
            lower: {name: both[position] for name, both in samples.items()}
            for position, lower in enumerate(RANKS[: index + 1])
        }
        found = resolved(command, **stated)
        assert {found.get(f"{name} from", rank) for name in samples} == {rank}
        values = {name: both[index] for name, both in samples.items()}
        alone = {source: resolved(command, **{source: needed | values}) for source in RANKS}
        plain = [
            {name: value for name, value in each.items() if not name.endswith(" from")}
            for each in (found, *alone.values())
        ]
        assert all(each == plain[0] for each in plain), rank
    unset = resolved(command, flag=needed)
    assert {unset.get(f"{name} from", "default") for name in samples.keys() - needed.keys()} <= {"default"}


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith("SHARDWRIGHT_") and name != "SHARDWRIGHT_DATA_DIR"]:
        monkeypatch.delenv(name)
    yield


def errors(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    capsys.readouterr()
    assert run(words) == 2
    shown = capsys.readouterr()
    assert not shown.out
    lines = shown.err.splitlines()
    assert all(line.startswith("error: ") for line in lines), shown.err
    return [line.removeprefix("error: ") for line in lines]


TRIED = {
    "plan": ("plan", "m", "--hardware", "8xA100-80GB"),
    "quantize": ("quantize", "m", "--dry-run"),
    "cache-teacher": ("cache-teacher", "t", "--dry-run"),
}
"""Commands that have `seq_len`, with what they need."""
FILES = [
    ("seq_len: 2.5", ["seq_len (from settings.yaml:1) = 2.5: must be an integer"]),
    ("seq_len: [1, 2]", ['seq_len (from settings.yaml:1) = \'["1", "2"]\': must be an integer']),
    (
        "seq-len: 64\nseq_len: 65",
        ["seq_len (from settings.yaml:2): is set twice, with a hyphen and with an underscore; remove one"],
    ),
    (
        "seq_len: x\nnothing_like_it: 1\nformat: html",
        ["seq_len (from settings.yaml:1) = 'x'", "nothing_like_it", "or 'json'"],
    ),
    (
        "config: other.yaml",
        ["config (from settings.yaml:1) = 'other.yaml': a settings file cannot name another one; use --config"],
    ),
    ("- seq_len", ["must be a mapping of keys to values"]),
    ("seq_len: &a 64\nrevision: *a", ["is not valid YAML (aliases are not allowed)"]),
    ("seq_len: !!python/object/apply:os.system [ls]", ["is not valid YAML"]),
]


@pytest.mark.parametrize("command", list(TRIED))
def test_a_file_has_the_same_errors_for_every_command(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for text, said in FILES:
        Path("settings.yaml").write_text(text)
        found = errors(capsys, *TRIED[command], "--config", "settings.yaml")
        assert len(found) == len(said), found
        for part in said:
            assert any(part in error for error in found), (part, found)


def test_every_source_can_select_json_errors(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("format: json")
    wrong = ["plan", "nowhere", "--hardware", "nope"]
    monkeypatch.setenv("SHARDWRIGHT_CHECK_FORMAT", "json")
    assert (run(wrong), capsys.readouterr().out) == (2, "")
    assert run([*wrong, "--config", str(file)]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["exit_code"] == 2
    monkeypatch.setenv("SHARDWRIGHT_PLAN_FORMAT", "json")
    for more in ([], ["--seq-len", "x"]):
        assert run([*wrong, *more]) == 2
        assert json.loads(capsys.readouterr().out)["error"]["errors"]
    assert (run([*wrong, "--format", "human"]), capsys.readouterr().out) == (2, "")


def test_variables_apply_to_the_command_in_their_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words, own, other = TRIED["cache-teacher"], "SHARDWRIGHT_CACHE_TEACHER_", "SHARDWRIGHT_PLAN_"
    for name in (f"{other}SEQ_LEN", f"{other}NO_SUCH_OPTION", "SHARDWRIGHT_CONFIGS_LS_FORMAT"):
        monkeypatch.setenv(name, "nonsense")
    monkeypatch.setenv(f"{own}SEQ_LEN", "nonsense")
    (found,) = errors(capsys, *words)
    assert found == f"seq_len (from {own}SEQ_LEN) = 'nonsense': must be an integer"
    monkeypatch.delenv(f"{own}SEQ_LEN")
    monkeypatch.setenv(f"{own}SEQLEN", "64")
    (found,) = errors(capsys, *words)
    assert found == f"{own}SEQLEN: is not a setting; did you mean seq_len?"
    monkeypatch.delenv(f"{own}SEQLEN")
    monkeypatch.setenv("SHARDWRIGHT_SEQ_LEN", "64")
    (found,) = errors(capsys, *words)
    assert found == f"SHARDWRIGHT_SEQ_LEN = '64': names no command, so it has no effect; use {own}SEQ_LEN"
    monkeypatch.delenv("SHARDWRIGHT_SEQ_LEN")
    monkeypatch.setenv("SHARDWRIGHT_ELSEWHERE", "1")
    (found,) = errors(capsys, *words)
    assert found.endswith(f"names no command, so it has no effect; its name must begin like {own}")


def test_every_error_of_every_source_is_reported_together(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("lora_rank: 0\nlearning_rat: 1\nloss: l2\nseed: null\n")
    monkeypatch.setenv("SHARDWRIGHT_QAT_EPOCHS", "nan")
    monkeypatch.setenv("SHARDWRIGHT_QAT_STAT_STEP", "1")
    found = errors(
        capsys, "qat", "m", "--config", str(file), "--seq-len=2.5", "--micro_batch_size", "few", "--aplha", "1"
    )
    assert sorted(found) == [
        "--aplha: is not an option; did you mean --alpha?",
        "SHARDWRIGHT_QAT_STAT_STEP: is not a setting; did you mean start_step?",
        "epochs (from SHARDWRIGHT_QAT_EPOCHS) = 'nan': must be a finite number",
        f"learning_rat (from {file}:2): is not a setting; did you mean learning_rate?",
        f"lora_rank (from {file}:1) = 0: must be an integer from 1 to 100,000",
        f"loss (from {file}:3) = 'l2': must be 'forward_kl', 'reverse_kl', 'jsd', 'eager' or 'chunked'",
        "micro_batch_size (from --micro-batch-size) = 'few': must be an integer from 1 to 1,000,000, or auto",
        "output_dir: is missing; pass --output-dir",
        f"seed (from {file}:4): must not be null; omit it to use the default",
        "seq_len (from --seq-len) = 2.5: must be an integer",
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--method-option", "a=[1"), "method_options = 'a=[1': is not valid YAML (expected ',' or ']'"),
        (("--method-option", "a=1", "--method-option", "=2"), "must be NAME=VALUE"),
        (("--symmetric=maybe",), 'Invalid value for --symmetric: unable to convert "maybe" into bool.'),
        (("--seq-len", "64", "--seq_len", "65"), "--seq_len specified multiple times"),
    ],
)
def test_values_with_broken_syntax_are_one_line(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    (found,) = errors(capsys, "quantize", "m", "--dry-run", *words)
    assert said in found


def test_lists_switches_null_and_named_values_have_one_spelling_everywhere() -> None:
    command = ("quantize",)
    for source in ("flag", "environment", "file"):
        for text in ("a,re:.*b", "[a, re:.*b]", " a , re:.*b "):
            found = resolved(command, **{source: {"model": "m", "output_dir": "q", "ignore": text}})
            assert found["ignore"] == ("a", "re:.*b"), (source, text)
        for text, value in (("on", True), ("No", False), ("null", None)):
            assert (
                resolved(command, **{source: {"model": "m", "output_dir": "q", "symmetric": text}})["symmetric"]
                is value
            )
        found = resolved(
            command, **{source: {"model": "m", "output_dir": "q", "method_option": "{a-b: 0.05, c: [1, x], d: 'on'}"}}
        )
        assert found["method_option"] == {"a_b": 0.05, "c": [1, "x"], "d": "on"}
        assert resolved(command, **{source: {"model": "m", "output_dir": "q", "dataset": "null"}})["dataset"] is None
