"""Uploads to a Hub on loopback: checks before the upload, uploaded files, and a second upload after an interruption."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from shardwright.ds_configs.specs.errors import ShardwrightError
from shardwright.plugins.huggingface_hub import LEFT_OUT, push_errors, pushed
from writable_hub import READING, REFUSING, WRITING, WritableHub, writable_hub

pytestmark = pytest.mark.slow


@pytest.fixture
def hub() -> Iterator[WritableHub]:
    with writable_hub() as found:
        yield found


@pytest.fixture
def result(tmp_path: Path) -> Path:
    for name, content in {
        "README.md": b"---\nlicense: mit\n---\n# A card\n",
        "model.safetensors": b"\0" * 100,
        "checkpoints/checkpoint-2/optimizer.pt": b"ignored",
        "plan/plan.json": b"{}",
        "plan/accelerate.yaml": b"deepspeed_config_file: /home/ada/plan/ds_config.json",
        "plan/launch.sh": b"cd /home/ada",
        "plan/training_arguments.json": b"{}",
        "plan_measurement.json": b'{"plan": {"model": "/home/ada/model"}}',
    }.items():
        (tmp_path / "result" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "result" / name).write_bytes(content)
    return tmp_path / "result"


@pytest.mark.parametrize(
    ("token", "repository", "rule"),
    [
        (WRITING, "ada/tuned", None),
        (WRITING, "tuned", None),
        (WRITING, "a/b/c", "is not a name of a Hub repository"),
        (None, "ada/tuned", "needs a Hub token"),
    ],
)
def test_names_and_missing_tokens_are_reported_without_a_request(
    hub: WritableHub, monkeypatch: pytest.MonkeyPatch, token: str | None, repository: str, rule: str | None
) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: token)
    errors = [str(error) for error in push_errors(repository)]
    assert [rule in error for error in errors if rule] == [True] * (rule is not None)
    assert len(errors) == (rule is not None) and not hub.repositories


def test_a_directory_goes_up_without_its_checkpoints_and_places(
    hub: WritableHub, result: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"), pushed(result, "ada/tuned", private=True):
        assert hub.repositories == {"ada/tuned": True} and not hub.files
    assert sorted(hub.files) == ["README.md", "model.safetensors", "plan/plan.json"]
    assert hub.objects[hub.files["model.safetensors"].decode()] == b"\0" * 100
    assert f"uploaded to {hub.address}/ada/tuned" in caplog.messages and "checkpoints/**" in LEFT_OUT


def test_an_upload_that_failed_is_resumed(hub: WritableHub, result: Path) -> None:
    (result / "second.safetensors").write_bytes(b"\1" * 100)
    hub.failing_uploads = 1
    failed = pytest.raises(ShardwrightError, match=r"the upload failed .*is complete: `hf upload ada/tuned")
    with failed, pushed(result, "ada/tuned", private=False):
        pass
    with pushed(result, "ada/tuned", private=False):
        pass
    assert sorted(hub.objects.values()) == [b"\0" * 100, b"\1" * 100]


@pytest.mark.parametrize(
    ("token", "repository", "reason"),
    [
        (WRITING, "lab/closed", "403: the token has no write access to it"),
        (REFUSING, "ada/tuned", "401: the Hub does not accept the token"),
        (READING, "ada/known", "403: the token has no write access to it"),
    ],
)
def test_a_token_that_cannot_write_ends_before_the_work(
    hub: WritableHub, result: Path, monkeypatch: pytest.MonkeyPatch, token: str, repository: str, reason: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    hub.repositories["ada/known"] = False
    with (
        pytest.raises(ShardwrightError, match=f"push_to_hub = '{repository}': the Hub rejected it \\({reason}"),
        pushed(result, repository, private=False),
    ):
        pytest.fail("the work began")
    assert not hub.files
