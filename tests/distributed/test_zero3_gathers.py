"""The planner's gathers and reductions of ZeRO-3 against those that DeepSpeed runs on two CPU ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gathers_worker import CASES, PERSISTENCE, REDUCE_BUCKET
from shardwright.ds_configs.memory.communication import reduced_buckets, zero3_gathers
from shardwright.ds_configs.models.stored_shapes import model_spec_from_config
from shardwright.ds_configs.specs.layout import ZeroOptions
from warm_ranks import run_ranks

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def run(deepspeed_cpu_ops: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    output = tmp_path_factory.mktemp("gathers") / "found.json"
    run_ranks([Path(__file__).with_name("gathers_worker.py"), output], ranks=2)
    return json.loads(output.read_text())


@pytest.mark.parametrize("case", CASES)
def test_predicted_collectives_of_zero3_are_those_that_run(run: dict[str, dict[str, int]], case: str) -> None:
    build, sizes, (prefetch, live, reuse), recomputes = CASES[case]
    model = model_spec_from_config(build(**sizes).config.to_dict(), name=case)
    assert model is not None
    zero = ZeroOptions(
        reduce_bucket_size=REDUCE_BUCKET,
        stage3_param_persistence_threshold=PERSISTENCE,
        stage3_prefetch_bucket_size=prefetch,
        stage3_max_live_parameters=live,
        stage3_max_reuse_distance=reuse,
    )
    passes = zero3_gathers(model, zero, recomputes=recomputes)
    measured = run[case]
    assert model.parameter_count == measured["parameters"]
    assert sum(part.share for part in passes) * model.parameter_count == pytest.approx(measured["gathered"], rel=0.02)
    assert sum(part.calls for part in passes) == pytest.approx(measured["gathers"], abs=1)
    assert sum(part.tensors for part in passes) == pytest.approx(measured["tensors"], rel=0.15)
    assert sum(part.modules for part in passes) == pytest.approx(measured["modules"], rel=0.1)
    assert reduced_buckets(model, REDUCE_BUCKET) == pytest.approx(measured["reductions"], abs=1)
