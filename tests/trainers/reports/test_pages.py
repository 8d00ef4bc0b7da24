"""Reports of real runs (tests/data/runs): figures equal those of the files, and nothing is external."""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from commands import Shell, shell_in
from planning import gallery_directory
from shardwright.cli.main import run
from shardwright.ds_configs.specs.errors import RefusedInputError, UsageError
from shardwright.trainers.reports.runs import report_html

ROOT = Path(__file__).parents[3]
RUNS = ROOT / "tests" / "data" / "runs"
KINDS = {"train": "report.json", "distill": "report.json", "qat": "report.json", "quantize": "quantization.json",
         "evaluate": "evaluation.json"}  # fmt: skip
HOSTILE = "\"><script>alert(1)</script>'../../etc [a](http://b.c) ![d](//e.f) *g* |h| &lt;"


class Reader(HTMLParser):
    """Tags, attributes and text of a page; fails where a tag is not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in ("meta", "br"):
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip() and self._open[-1] != "style":
            self.texts.append(" ".join(data.split()))


def checked(text: str) -> Reader:
    """Read a page and hold it to what every report promises."""
    page = Reader(text)
    assert len(text.encode()) < 1_000_000
    assert not {"script", "img", "link", "iframe", "object", "a", "form"}.intersection(page.tags)
    assert not [value for name, value in page.attributes if name in ("src", "href", "action", "onload", "onerror")]
    style = re.sub(r"url\(#[^)]*\)", "", text)
    assert "url(" not in style and "@import" not in style
    assert {tag for tag in page.tags if tag == "main"} and page.tags.count("h1") == 1
    identifiers = [value for name, value in page.attributes if name == "id"]
    assert len(set(identifiers)) == len(identifiers)
    return page


@pytest.fixture(scope="module")
def pages() -> dict[str, Reader]:
    found = {name: checked(report_html(RUNS / name)) for name in KINDS}
    return found | {"plan": checked(report_html(gallery_directory()))}


def data_of(name: str) -> dict[str, Any]:
    return json.loads((RUNS / name / KINDS[name]).read_text())


@pytest.mark.parametrize("name", ["train", "distill", "qat"])
def test_figures_of_a_training_equal_its_files(name: str, pages: dict[str, Reader]) -> None:
    data, texts = data_of(name), pages[name].texts
    for row in data["measures"]["rows"]:
        for cell in filter(None, row):
            assert cell in texts, cell
    metrics = [json.loads(line) for line in (RUNS / name / "metrics.jsonl").read_text().splitlines()]
    assert any(f"loss {metrics[-1]['loss']:.4f}" in text for text in texts)
    speeds = [entry["tokens_per_second"] for entry in metrics][1:]
    error = (sum((x - sum(speeds) / len(speeds)) ** 2 for x in speeds) / (len(speeds) - 1) / len(speeds)) ** 0.5
    assert f"{data['tokens_per_second']:,.0f} ± {float(f'{error:.2g}'):,g}" in texts
    plan = json.loads((RUNS / name / "plan" / "plan.json").read_text())["chosen"]["step_time"]
    most = plan["tokens_per_second"] * plan["seconds"] / plan["low_seconds"]
    assert any(f"{plan['tokens_per_second']:,.0f}" in text and f"{most:,.0f}" in text for text in texts)


def test_figures_of_a_plan_equal_its_file(pages: dict[str, Reader]) -> None:
    plan, texts = json.loads((gallery_directory() / "plan.json").read_text()), pages["plan"].texts
    gpu = plan["chosen"]["gpu_memory"]
    assert f"{gpu['peak_bytes'] / 1e9:.1f} GB" in texts and plan["chosen"]["reason"] in texts
    low, high, capacity = (f"{gpu[name] / 1e9:.1f} GB" for name in ("low_bytes", "high_bytes", "capacity_bytes"))
    assert f"{low} to {high}, of {capacity}" in texts
    for term in gpu["terms"]:
        assert term.replace("_", " ") in texts
    rows = [text for text in texts if any(text and text in other["reason"] for other in plan["rejected"])]
    assert len(rows) >= len(plan["rejected"])


@pytest.mark.parametrize("name", KINDS)
def test_hostile_names_are_escaped(name: str, tmp_path: Path) -> None:
    """Each text in the files is replaced; the page shows them, and none becomes a tag or an attribute."""
    run_directory = tmp_path / f"run {HOSTILE.replace('/', '_')}"
    shutil.copytree(RUNS / name, run_directory)
    data = data_of(name)

    def replaced(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {each: replaced(inner, each) for each, inner in value.items()}
        if isinstance(value, list):
            return [replaced(each, key) for each in value]
        return HOSTILE if isinstance(value, str) and key not in ("kind", "state") else value

    (run_directory / KINDS[name]).write_text(json.dumps(replaced(data)))
    page = checked(report_html(run_directory))
    assert any(HOSTILE in text for text in page.texts)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data | {"schema_version": 2},
        lambda data: data | {"steps": "<b>many</b>"},
        lambda data: {name: value for name, value in data.items() if name != "measures"},
        lambda data: [data],
        lambda data: data | {"kind": "unheard of"},
    ],
)
def test_a_damaged_file_is_rejected_with_its_name(change: Any, tmp_path: Path) -> None:
    shutil.copytree(RUNS / "train", tmp_path / "run")
    (tmp_path / "run" / "report.json").write_text(json.dumps(change(data_of("train"))))
    with pytest.raises(RefusedInputError, match=r"report\.json"):
        report_html(tmp_path / "run")
    (tmp_path / "run" / "report.json").write_text("{")
    with pytest.raises(RefusedInputError, match=r"report\.json"):
        report_html(tmp_path / "run")


def test_a_directory_without_a_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="contains none of"):
        report_html(tmp_path)
    with pytest.raises(UsageError, match="no such file"):
        report_html(tmp_path / "nowhere")


@pytest.fixture
def shell(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    return shell_in(tmp_path, "report", capsys, monkeypatch)


def test_the_report_is_written_to_the_run_and_replaces_other_files_only_by_force(shell: Shell, tmp_path: Path) -> None:
    shutil.copytree(RUNS / "evaluate", tmp_path / "judged")
    assert shell("judged").code == 0
    first = (tmp_path / "judged" / "report.html").read_bytes()
    assert shell("judged", "--format", "json").code == 0
    assert (tmp_path / "judged" / "report.html").read_bytes() == first, "the same files give the same page"
    several = shell("judged", RUNS / "quantize")
    assert several.code == 2 and "a report shows one run; compare runs in a tracker" in several.err
    (tmp_path / "mine.html").write_text("mine")
    refused = shell("judged", "--output", "mine.html")
    assert refused.code == 2 and refused.errors == ["output = 'mine.html': exists; use --force to replace it"]
    assert (tmp_path / "mine.html").read_text() == "mine"
    assert shell("judged", "--output", "mine.html", "--force").code == 0
    assert shell("judged", "--output", ".").code == 2


def test_plan_writes_its_report(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = ROOT / "ds_configs" / "data" / "models" / "meta-llama--Llama-3.1-8B" / "config.json"
    asked = ("plan", str(config), "--hardware", "8xA100-80GB", "--output-dir", "plan")
    assert run(asked) == 0
    texts = checked((tmp_path / "plan" / "report.html").read_text()).texts
    shown = " ".join(("shardwright", *asked)).replace(str(config), f"{config.parent.name}/config.json")
    assert shown in texts, "directories of files are omitted"
