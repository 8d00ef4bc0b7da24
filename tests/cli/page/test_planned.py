"""Plans of the page: the command line's, with nothing read from this machine, and their files as an archive."""

from __future__ import annotations

import io
import json
import re
import stat
import zipfile

import pytest
from paths import CONFIGS
from shardwright import plan
from shardwright.cli.main import run
from shardwright.cli.options import CheckedFor
from shardwright.cli.page.address import EXAMPLE, PageSettings, command_of, pack_config, settings_from_query
from shardwright.cli.page.app import results
from shardwright.cli.page.planned import archive, cluster, known_models, planned
from shardwright.cli.page.views import errors_view, findings_view, misfit_view, plan_view
from shardwright.ds_configs.plan.plan import PlanDoesNotFitError, render_files
from shardwright.ds_configs.specs.errors import ShardwrightError, UsageError

LLAMA = CONFIGS / "meta-llama--Llama-3.1-8B/config.json"


@pytest.fixture(scope="module")
def found():
    return planned(EXAMPLE)


def test_a_known_model_is_planned_as_the_command_line_plans_it(found):
    assert "meta-llama/Llama-3.1-8B" in known_models()
    own = plan(str(LLAMA), "8xA100-80GB")
    assert found.plan.chosen == own.chosen and found.plan.rejected == own.rejected
    assert found.plan.versions == own.versions


def test_a_plan_is_shown_before_its_offers():
    settings = settings_from_query("model=Qwen/Qwen2.5-7B&hardware=8xL40S")
    first, last = results(settings)
    assert "Changes the results:" not in first
    assert last.count("Changes the results:") == 2
    assert last == plan_view(planned(settings))


def test_links_equal_those_of_the_hardware_file(tmp_path, monkeypatch, capsys):
    packed = pack_config((CONFIGS / "openai-community--gpt2/config.json").read_bytes())
    query = f"config={packed}&hardware=2x2xA100-80GB&network_bytes_per_s=3GB/s&host_memory=2TB"
    settings = settings_from_query(query)
    assert cluster(settings).network_bytes_per_s == 3e9
    assert cluster(settings).host_bytes_per_node == 2 * 10**12
    slow = planned(settings)
    assert slow.plan.hardware.network_bytes_per_s == 3e9
    for name in ("hardware.yaml", "config.json"):
        (tmp_path / name).write_text(slow.files[name])
    monkeypatch.chdir(tmp_path)
    words = command_of(settings).split()
    assert run([*words[1:], "--dry-run", "--format", "json"]) == 0
    reported = json.loads(capsys.readouterr().out)
    assert reported["chosen"]["strategy"] == slow.plan.to_dict()["chosen"]["strategy"]
    assert reported["chosen"]["step_time"]["seconds"] == pytest.approx(slow.plan.chosen.time.seconds)


MODELS = ["/etc/passwd", "../model", "~", "a/b/c", "x.json ", "<b>", "a\nb", "", "é/x"]
CLUSTERS = ["local", "/etc/hosts.yaml", "cluster.yaml", "8xA100-80GB+8xT4", "0xT4", "-1xT4"]


@pytest.mark.parametrize(("model", "hardware"), list(zip(MODELS, [*CLUSTERS, *CLUSTERS[:3]], strict=True)))
def test_no_path_of_this_machine_is_read(model, hardware, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cluster.yaml").write_text("gpu: A100-80GB\n")
    with pytest.raises(UsageError) as caught:
        planned(PageSettings(model=model, hardware=hardware))
    assert {error.where.partition(":")[0] for error in caught.value.errors} >= {"model"}
    assert len(caught.value.errors) >= 2
    assert all(line.isprintable() for line in str(caught.value).splitlines())


def test_a_teacher_is_not_read_from_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(LLAMA.parent)
    with pytest.raises(UsageError, match=r"'./config.json': is not a Hub id"):
        planned(PageSettings(model="Qwen/Qwen2.5-0.5B", hardware="8xA100-80GB", teacher="./config.json"))
    taught = PageSettings(model="Qwen/Qwen2.5-0.5B", hardware="8xA100-80GB", teacher="Qwen/Qwen2.5-7B")
    assert planned(taught).plan.job.teacher.name == "Qwen/Qwen2.5-7B"


def test_archives_have_the_files_of_plan_and_are_deterministic(found):
    content = archive(found.files.items(), directory=found.name)
    assert content == archive(found.files.items(), directory=found.name)
    with zipfile.ZipFile(io.BytesIO(content)) as packed:
        assert {name: packed.read(f"{found.name}/{name}").decode() for name in found.files} == render_files(found.plan)
        modes = {entry.filename.rpartition("/")[2]: entry.external_attr >> 16 for entry in packed.infolist()}
    assert modes["launch.sh"] & stat.S_IXUSR and not modes["plan.json"] & stat.S_IXUSR


def test_questions_about_a_run_are_answered():
    asked = PageSettings(model="openai-community/gpt2", hardware="1xRTX3090", tokens=1e9, gpu_hour_price=2)
    page = plan_view(planned(asked))
    assert "The run: 1,000,000,000 tokens take" in page and "a price of" in page


def test_the_view_of_a_plan_has_all_parts_and_no_external_links(found):
    page = plan_view(found)
    for text in (
        "ZeRO-2",
        f"{found.plan.chosen.time.tokens_per_second:,.0f}",
        "Memory per accelerator",
        "Time of a step",
        "All candidates",
        "Alternatives",
    ):
        assert text in page
    assert page.count('<tr class="fits"') + page.count('<tr class="too-large"') == len(found.plan.rejected)
    assert all(
        address.startswith("data:application/zip;base64,") for address in re.findall(r'(?:href|src)="([^"]*)"', page)
    )


def test_a_model_that_does_not_fit_shows_changes_that_would():
    with pytest.raises(PlanDoesNotFitError) as caught:
        planned(PageSettings(model="meta-llama/Llama-3.1-70B", hardware="1xT4", precision="fp16"))
    page = misfit_view(caught.value)
    assert "No layout fits" in page and "Changes that would fit" in page
    assert page.count("<tr class=") == len(caught.value.tried)


HOSTILE = "<img src=x onerror=alert(1)>"


def test_hostile_texts_are_escaped():
    assert HOSTILE not in errors_view(ShardwrightError(HOSTILE))
    text = json.dumps({HOSTILE: 1, "zero_optimization": {"stage": HOSTILE}})
    page = findings_view(text, CheckedFor())
    assert "<img" not in page and "&lt;img src=x onerror=alert(1)&gt;" in page


def test_findings_show_their_lines():
    text = '{\n  "zero_optimization": {\n    "stage": 3,\n    "overlap_com": true\n  }\n}'
    page = findings_view(text, CheckedFor(num_processes=8))
    assert "2 errors, 2 warnings" in page and "Read as DeepSpeed JSON" in page
    assert (
        "<b>line 4</b>" in page
        and "&#34;overlap_com&#34;: true" in page
        and "did you mean &#39;overlap_comm&#39;?" in page
    )
    assert "Read as Accelerate YAML" in findings_view("num_processes: 2\n", CheckedFor())


@pytest.mark.parametrize("text", ["", "[" * 100_000, "\0", "{" * 10, "x" * 10_000_000, "a: &a [*a]"])
def test_any_pasted_text_has_a_short_answer(text):
    page = findings_view(text, CheckedFor())
    assert "error" in page and len(page) < 20_000
