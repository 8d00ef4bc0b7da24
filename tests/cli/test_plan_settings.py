"""Settings that were stated, and the plan that they make."""

from __future__ import annotations

import pytest
from shardwright.cli.plan_settings import PlanSettings
from shardwright.ds_configs.plan.gallery import gallery_entry, gallery_plan
from shardwright.ds_configs.specs.errors import UsageError
from shardwright.ds_configs.specs.hardware import parse_hardware
from shardwright.plugins.planning.from_names import plan
from shardwright.plugins.planning.models import LoadedModel


def test_words_omit_hardware_and_questions():
    model = LoadedModel(spec=gallery_plan(gallery_entry("gpt2_1xRTX3090")).model, config={}, notes=())
    settings = PlanSettings(hardware="1xT4", host_memory="1TB", num_processes=1, tokens=1e9, seq_len=512)
    made = plan(model, parse_hardware("1xRTX3090"), notify=pytest.fail, **settings.words(hardware_is_read=True))
    assert (made.hardware.name, made.job.seq_len_tokens) == ("1xRTX3090", 512)


def test_an_unknown_entry_of_the_gallery_names_the_nearest():
    with pytest.raises(UsageError, match=r"nearest names: llama-3\.1-8b_8xA100-80GB"):
        gallery_plan(gallery_entry("llama-3.1-8b_8xA100"))
