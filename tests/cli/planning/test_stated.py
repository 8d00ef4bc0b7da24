"""Settings that were stated, and the plan that they make."""

from __future__ import annotations

import pytest
from shardwright.cli.planning.gallery import load_entry
from shardwright.cli.planning.stated import PlanSettings, plan_stated
from shardwright.ds_configs.specs.errors import UsageError
from shardwright.ds_configs.specs.hardware import parse_hardware
from shardwright.plugins.planning.models import LoadedModel


def test_a_cluster_that_was_read_keeps_what_it_was_read_from_and_questions_are_no_settings_of_a_job():
    model = LoadedModel(spec=load_entry("gpt2_1xRTX3090").model, config={}, notes=())
    settings = PlanSettings(hardware="1xT4", host_memory="1TB", num_processes=1, tokens=1e9, seq_len=512)
    plan = plan_stated(model, parse_hardware("1xRTX3090"), settings, notify=pytest.fail)
    assert (plan.hardware.name, plan.job.seq_len_tokens) == ("1xRTX3090", 512)


def test_an_unknown_entry_of_the_gallery_names_the_nearest():
    with pytest.raises(UsageError, match=r"nearest: llama-3\.1-8b_8xA100-80GB"):
        load_entry("llama-3.1-8b_8xA100")
