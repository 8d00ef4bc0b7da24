"""State of the page in its address, and invalid addresses."""

from __future__ import annotations

import base64
import json
import shlex
import zlib
from urllib.parse import urlencode

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paths import CONFIGS
from shardwright.cli.main import run
from shardwright.cli.page.address import (
    EXAMPLE,
    LONGEST_PACKED,
    PageSettings,
    command_of,
    is_shared_by,
    pack_config,
    query_of,
    settings_from_form,
    settings_from_query,
    unpack_config,
)
from shardwright.ds_configs.models.model_config import LARGEST_CONFIG_BYTES
from shardwright.ds_configs.specs.errors import RefusedInputError, UsageError

CONFIG = (CONFIGS / "meta-llama--Llama-3.1-8B/config.json").read_bytes()


@given(
    st.fixed_dictionaries(
        {"model": st.text(min_size=1).filter(str.strip), "hardware": st.text(min_size=1).filter(str.strip)},
        optional={
            "seq_len": st.integers(1, 10**8),
            "method": st.sampled_from(["lora", "qlora"]),
            "tokens": st.floats(1e-3, 1e15),
            "zero_quantized_weights": st.just(True),
            "tensor_parallel_size": st.integers(1, 64),
            "lora_targets": st.sampled_from(["q_proj,v_proj", "all-linear"]),
            "nvme": st.text(),
        },
    ).filter(lambda stated: "null" not in stated.values())
)
def test_settings_survive_the_address(stated):
    settings = PageSettings(**stated)
    again = settings_from_query(query_of(settings))
    assert again == settings
    assert query_of(again) == query_of(settings)


def test_an_empty_address_is_the_example_and_names_of_gradio_are_ignored():
    assert settings_from_query("") is EXAMPLE
    assert settings_from_query("__theme=dark&__sign=x") is EXAMPLE
    assert settings_from_query("model=a&seq-len=128&__theme=dark").seq_len == 128


@pytest.mark.parametrize(
    ("query", "messages"),
    [
        ("metod=lora", ["metod", "did you mean method?"]),
        ("model=a&model=b", ["model: occurs twice in the address"]),
        ("precision=bf17&seq_len=many", ["did you mean bf16?", "seq_len = 'many'"]),
        ("&".join(f"a{index}=1" for index in range(200)), ["has more than 100 settings"]),
    ],
)
def test_errors_of_an_address_are_reported_together(query, messages):
    with pytest.raises(UsageError) as caught:
        settings_from_query(query)
    assert all(message in str(caught.value) for message in messages)


def test_empty_fields_and_defaults_are_not_set():
    values = {"model": " org/name ", "hardware": "8xT4", "method": "full", "seq_len": "", "tokens": None}
    settings = settings_from_form(values | {"micro_batch_size": "auto", "zero_quantized_weights": False})
    assert settings.stated() == {"model": "org/name", "hardware": "8xT4"}


def test_an_uploaded_configuration_survives_the_address():
    settings = PageSettings(config=pack_config(CONFIG), hardware="8xA100-80GB")
    assert unpack_config(settings_from_query(query_of(settings)).config) == json.loads(CONFIG)
    assert is_shared_by(settings) and len(query_of(settings)) < 1_500
    # Text that does not compress, and is longer than any line that servers take.
    random = [hash(str(index)) for index in range(2_000)]
    large = PageSettings(config=pack_config(json.dumps(json.loads(CONFIG) | {"labels": random}).encode()))
    assert len(large.config) > LONGEST_PACKED
    assert not is_shared_by(large) and "config" not in query_of(large)


@pytest.mark.parametrize(
    "packed",
    [
        "",
        "abc",
        "ü",
        pack_config(CONFIG)[: len(pack_config(CONFIG)) // 2],
        base64.urlsafe_b64encode(zlib.compress(b"[1]")).decode(),
        base64.urlsafe_b64encode(zlib.compress(bytes(100 * 2**20))).decode(),
    ],
)
def test_invalid_packed_configurations_are_rejected_before_decompression(packed):
    with pytest.raises(RefusedInputError) as caught:
        unpack_config(packed)
    assert len(str(caught.value)) < 300
    assert LARGEST_CONFIG_BYTES < 100 * 2**20


def test_the_command_line_makes_the_same_plan(capsys, tmp_path, monkeypatch):
    config = (CONFIGS / "openai-community--gpt2/config.json").read_bytes()
    (tmp_path / "config.json").write_bytes(config)
    monkeypatch.chdir(tmp_path)
    query = {"config": pack_config(config), "hardware": "1xRTX3090", "method": "lora", "seq_len": "512"}
    words = shlex.split(command_of(settings_from_query(urlencode(query))))
    expected = "shardwright plan config.json --hardware 1xRTX3090 --seq-len 512 --method lora --output-dir plan"
    assert words == shlex.split(expected)
    assert run([*words[1:], "--dry-run", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["job"]["method"] == "lora"


def test_links_come_from_a_file_and_hostile_names_stay_one_word():
    settings = PageSettings(model="a; rm -rf ~", hardware="2x8xH100-80GB", link_bytes_per_s="300GB/s")
    words = shlex.split(command_of(settings))
    assert words[:5] == ["shardwright", "plan", "a; rm -rf ~", "--hardware", "hardware.yaml"]
    assert "300GB/s" not in words
