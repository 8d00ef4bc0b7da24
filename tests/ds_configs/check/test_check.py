"""The checker on whole files: good ones, unreadable ones, and an Accelerate YAML with its DeepSpeed JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import shardwright
import yaml
from checking import DEEPSPEED_YAML, FSDP2, PLAIN, ZERO, ZERO_2, ZERO_3_CPU, ZERO_3_NVME, E, W, found
from shardwright.ds_configs.check.deepspeed import REPLACEMENTS
from shardwright.ds_configs.check.files import check, check_text
from shardwright.ds_configs.check.parsing import detect_kind, parse
from shardwright.ds_configs.check.report import load_keys
from shardwright.ds_configs.specs.errors import UsageError


@pytest.mark.parametrize("config", [ZERO_2, ZERO_3_CPU, ZERO_3_NVME], ids=["zero-2", "zero-3-cpu", "zero-3-nvme"])
def test_good_deepspeed_files_have_no_findings(config: dict[str, Any]) -> None:
    assert check_text(json.dumps(config, indent="\t"), filename="ds_config.json", world_size=8) == ()


@pytest.mark.parametrize(
    "text",
    [
        FSDP2,
        DEEPSPEED_YAML,
        FSDP2.replace("\n", "\r\n"),
        FSDP2.replace("fsdp_version: 2\n", "fsdp_version: 2\n  fsdp_ignored_modules: null\n"),
    ],
    ids=["fsdp2", "ds", "crlf", "null"],
)
def test_good_accelerate_files_have_no_findings(text: str) -> None:
    assert check_text(text, filename="accelerate.yaml") == ()


def test_every_auto_is_an_error_without_transformers() -> None:
    findings = check_text(json.dumps(ZERO_2), filename="ds.json", uses_transformers=False)
    paths = {finding.error.where.partition(" ")[2] for finding in findings if "only Transformers" in finding.error.rule}
    assert paths == {
        "bf16.enabled", "gradient_accumulation_steps", "gradient_clipping", "train_batch_size",
        "train_micro_batch_size_per_gpu", f"{ZERO}.reduce_bucket_size",
    }  # fmt: skip


def test_findings_name_the_line_and_come_in_file_order() -> None:
    text = '{\n "train_micro_batch_size_per_gpu": 1,\n "zero_optimization": {\n  "stage": 7,\n  "foo": 1\n }\n}'
    findings = check_text(text, filename="a b.json")
    places = [finding.error.where for finding in findings if finding.kind == "error"]
    assert places == [f"a b.json:4 {ZERO}.stage", f"a b.json:5 {ZERO}.foo"]


BROKEN: list[tuple[str, str | bytes, str]] = [
    ("a.json", b"", "is empty"),
    ("a.yaml", b"", "is empty"),
    ("a.yaml", b"# nothing\n", "is empty"),
    ("a.json", b"{}", "has no keys"),
    ("a.json", b"[1, 2]", "must be a mapping"),
    ("a.yaml", b"just words", "must be a mapping"),
    ("a.json", b'{"bf16": {"enabled": true,}}', "remove the comma"),
    ("a.json", b'{"a": 1 // why\n}', "remove the comment"),
    ("a.json", b'{"a": 1', "expected a comma"),
    ("a.json", b'{"a": "x', "unterminated string"),
    ("a.json", b'{"gradient_clipping": NaN}', "not a JSON number"),
    ("a.json", b'{"gradient_clipping": 1e400}', "too large"),
    ("a.json", b'{"bf16": {}, "bf16": {}}', "duplicated"),
    ("a.yaml", b"debug: false\ndebug: true\n", "first set on line 1"),
    ("a.json", b'{"a": "\xff"}', "not UTF-8"),
    ("a.json", b"\xef\xbb\xbf{}", "byte order mark"),
    ("a.json", b"[" * 100_000, "deeper than 64"),
    ("a.yaml", b"[" * 100_000, "deeper than 64"),
    ("a.yaml", b"a: " * 1000, "not valid YAML"),
    ("a.yaml", b"x: !!python/object/apply:os.system ['true']", "tags that build objects"),
    ("a.yaml", b"a: 1\n---\nb: 2\n", "more than one YAML document"),
    ("a.yaml", b"? [a, b]\n: 1\n", "a key must be a string"),
    ("a.yaml", b"yes: 1\n", "quote the key"),
    ("a.yaml", b"a: &x [*x]", "before or inside"),
    ("a.yaml", b"a: 2026-99-99\n", "not a valid YAML value"),
    ("a.yaml", b"a: \x00\n", "not valid YAML"),
    ("a.json", b'{"a": ' + b"9" * 400 + b"}", "too large"),
    ("a.json", json.dumps({f"unknown_key_number_{i}": "auto" for i in range(19_000)}), "more than 200 findings"),
    ("a.yaml", "zero_stage: 1\n" * 9_000, "more than 200 findings"),
    ("a.json", json.dumps({"optimizer": {"type": "AdamW", "params": {f"lr{i}": 1 for i in range(19_000)}}}), "200"),
    ("a.json", b'{"a": "' + b"x" * (10 << 20) + b'"}', "at most 1048576"),
    ("a.json", json.dumps({"a": list(range(30_000))}), "more than 20000 values"),
    ("a.yaml", "a0: &a0 [x, x, x, x, x, x, x, x, x]\n"
     + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9)), "more than 20000"),
]  # fmt: skip


@pytest.mark.parametrize(("filename", "content", "fragment"), BROKEN, ids=range(len(BROKEN)))
def test_unreadable_files_are_findings(filename: str, content: str | bytes, fragment: str) -> None:
    findings = check_text(content, filename=filename)
    assert any(fragment in f"{finding.error.rule}; {finding.error.fix}" for finding in findings), findings
    assert all(finding.error.where.startswith(filename) for finding in findings)


def test_a_trailing_comma_is_found_on_its_line() -> None:
    (finding,) = check_text('{\n "bf16": {"enabled": true},\n\n}\n', filename="a.json")
    assert finding.error.where.startswith("a.json:2")


def test_key_with_control_characters_is_printed_on_one_line() -> None:
    text = json.dumps({**ZERO_2, "a\nb\x1b[31m\ud800": 1, "zero_optimization.stage": 3}, indent=1)
    findings = check_text(text, filename="a.json")
    assert len(findings) == 2 and all(str(finding.error).isprintable() for finding in findings)
    line = text.count("\n", 0, text.index("zero_optimization.stage")) + 1
    assert findings[-1].error.where == f"a.json:{line} zero_optimization.stage"


def test_format_is_detected_by_content_before_suffix() -> None:
    def kind(content: str, filename: str) -> str:
        return detect_kind(parse(content, filename))

    assert kind(json.dumps(yaml.safe_load(FSDP2)), "a.json") == "accelerate"
    assert kind(yaml.safe_dump(ZERO_2), "a.yaml") == "deepspeed"
    assert kind("foo: 1", "a.yaml") == "accelerate"
    assert kind('{"foo": 1}', "a.json") == "deepspeed"
    assert check_text(json.dumps(yaml.safe_load(FSDP2)), filename="a.json") == ()


def test_yaml_merge_keys_and_aliases_match_safe_load() -> None:
    text = "base: &b {x: 1, y: 2}\nuse: {<<: *b, y: 3}\nlist: [*b, *b]\nnumber: 1e5\nfloat: 1.0e+5\nword: no\n"
    assert parse(text, "a.yaml").root.plain() == yaml.safe_load(text)


def test_yaml_exponent_without_dot_is_reported_as_string() -> None:
    findings = check_text(FSDP2.replace("num_processes: 8", "num_processes: 1e1"), filename="a.yaml")
    assert found(findings, E, "num_processes", "write 10 without quotes")


def test_pair_checks_the_json_with_the_processes_of_the_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = {**PLAIN, "fp16": {"enabled": True}, "bf16": {"enabled": False}, ZERO: {"stage": 2}}
    (tmp_path / "ds_config.json").write_text(json.dumps(config))
    (tmp_path / "accelerate.yaml").write_text(
        DEEPSPEED_YAML.replace("num_processes: 8", "num_processes: 4\nmixed_precision: bf16")
    )
    paths = [Path("accelerate.yaml"), Path("ds_config.json")]
    findings = check(*paths).findings
    assert found(findings, E, "train_batch_size", "4 · 2 · 4 = 32")
    assert found(findings, E, "mixed_precision", "conflicts with fp16.enabled")
    assert found(findings, W, "deepspeed_config.zero3_init_flag", "stage 2")
    places = [finding.error.where for finding in findings if "train_batch_size" in finding.error.where]
    assert len(places) == 1, "a file that a YAML names is checked once"


def test_good_pair_has_no_findings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds_config.json").write_text(json.dumps(ZERO_3_CPU))
    (tmp_path / "accelerate.yaml").write_text(DEEPSPEED_YAML)
    good = check("accelerate.yaml", num_processes=8)
    assert (good.findings, good.files) == ((), ("accelerate.yaml", "ds_config.json"))
    monkeypatch.chdir("/")
    findings = check(tmp_path / "accelerate.yaml", num_processes=8).findings
    assert found(findings, W, "deepspeed_config.deepspeed_config_file", "working directory")
    (tmp_path / "ds_config.json").unlink()
    findings = check(tmp_path / "accelerate.yaml", num_processes=8).findings
    assert found(findings, E, "deepspeed_config.deepspeed_config_file", "does not exist")


def test_paths_that_cannot_be_read_are_findings(tmp_path: Path) -> None:
    large = tmp_path / "large.json"
    large.write_bytes(b" " * ((1 << 20) + 1))
    paths = [tmp_path, tmp_path / "none.json", large, Path("a\0b"), Path("/dev/zero"), Path("x" * 5000)]
    findings = check(*paths).findings
    rules = [finding.error.rule for finding in findings]
    assert len(rules) == len(paths)
    for rule, fragment in zip(rules, ["directory", "not exist", "at most", "", "regular", ""], strict=True):
        assert fragment in rule
    assert json.loads(json.dumps(check(*paths).to_dict()))["errors"] == len(rules)


def test_python_function_returns_what_the_command_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from shardwright.cli.main import run

    (tmp_path / "ds_config.json").write_text(json.dumps({**PLAIN, "gradient_cliping": 1.0, "train_batch_size": 7}))
    found = shardwright.check(tmp_path / "ds_config.json", num_processes=4)
    assert found.errors == sum(finding.kind == "error" for finding in found.findings) >= 2
    assert capsys.readouterr().out == ""
    assert run(["check", str(tmp_path / "ds_config.json"), "--num-processes", "4", "--format", "json"]) == 2
    assert json.loads(capsys.readouterr().out) == found.to_dict()
    with pytest.raises(
        UsageError, match=r"(?s)files: at least one file is required.*num_processes = 0: must be at least 1"
    ):
        shardwright.check(num_processes=0)


def test_every_removed_key_has_a_replacement() -> None:
    removed = load_keys("deepspeed")["removed"]
    paths = {f"{section}.{key}".lstrip(".") for section, keys in removed.items() for key in keys}
    assert paths == set(REPLACEMENTS)
