"""The adapter of llm-compressor: checkpoints compute what memory computes, and nothing is left behind."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from shardwright.ds_configs.quantization.scheme import PRESETS, changed, scheme_named
from shardwright.plugins.compressed_tensors import round_to_nearest
from shardwright.plugins.llm_compressor import (
    all_fixes,
    build_modifiers,
    import_upstream,
    quantize_with_llm_compressor,
    without_bars,
)
from small_models import llama
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

pytestmark = pytest.mark.slow

LAYERS, VOCAB_SIZE = 4, 67
W4 = changed(scheme_named("W4A16"), group_size=32)
STATIC = scheme_named("W8A8_STATIC")
_RUNS = [
    ("rtn", W4),
    ("rtn", scheme_named("W8A8")),
    ("gptq", W4),
    ("gptq", changed(scheme_named("W4A16_ASYM"), group_size=16)),
    ("gptq", STATIC),
    ("awq", changed(scheme_named("W4A16_ASYM"), group_size=32)),
    ("smoothquant", STATIC),
    ("smoothquant-gptq", scheme_named("W8A8")),
    ("rtn", scheme_named("FP8")),
    ("rtn", scheme_named("FP8_DYNAMIC")),
    ("rtn", scheme_named("NVFP4")),
    ("rtn", scheme_named("MXFP4")),
]


def samples(seed: int = 1) -> list[dict[str, list[int]]]:
    draw = torch.Generator().manual_seed(seed)
    return [{"input_ids": torch.randint(VOCAB_SIZE, (length,), generator=draw).tolist()} for length in (24, 16, 24)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB_SIZE,
    )
    directory = tmp_path_factory.mktemp("source")
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    return directory


def loaded(directory: Path) -> LlamaForCausalLM:
    """Return a model whose rotary tables are fp32, as `from_pretrained` keeps them and `.to()` does not."""
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()


def request(source: Path, method: str, scheme=W4, **more) -> dict[str, Any]:
    values = {"calibration": samples(), "batch_size": 2} | more
    return {"model": loaded(source), "scheme": scheme, "method": method, **values}


def files(quantized, directory: Path) -> dict[str, bytes]:
    quantized.save(directory)
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.needs("llmcompressor")
@pytest.mark.parametrize(("method", "scheme"), _RUNS, ids=[f"{method}-{scheme.name}" for method, scheme in _RUNS])
def test_memory_computes_what_the_checkpoint_computes(source, tmp_path, caplog, method, scheme):
    with caplog.at_level(logging.INFO):
        quantized = quantize_with_llm_compressor(**request(source, method, scheme))
    assert len(quantized.quantized_layers) == 7 * LAYERS
    assert "lm_head" not in quantized.quantized_layers
    ids_BS = torch.randint(VOCAB_SIZE, (2, 20), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = quantized.model(ids_BS).logits
    names = set(files(quantized, tmp_path))
    assert names == {"config.json", "generation_config.json", "model.safetensors"}
    reloaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        assert torch.equal(reloaded.eval()(ids_BS).logits, expected)
    seen = [record.progress for record in caplog.records if hasattr(record, "progress")]
    assert [step.done for step in seen] == sorted(step.done for step in seen)
    assert {step.total for step in seen} == {seen[-1].done}, "the number of steps is known from the start"


@pytest.mark.needs("llmcompressor")
def test_same_seed_gives_the_same_bytes(source, tmp_path):
    runs = [quantize_with_llm_compressor(**request(source, "gptq")) for _ in range(2)]
    first, second = (files(run, tmp_path / str(index)) for index, run in enumerate(runs))
    assert first == second


ROUNDED = [name for name, scheme in PRESETS.items() if scheme.storage == "compressed-tensors"]


@pytest.mark.needs("llmcompressor")
@pytest.mark.parametrize("name", [name for name in ROUNDED if not PRESETS[name].activations_are_static])
def test_rounding_without_llm_compressor_writes_the_same_files(source, tmp_path, name):
    scheme = scheme_named(name)
    if scheme.weights.group_size == 128:
        scheme = changed(scheme, group_size=32)
    if scheme.weights.strategy == "block":
        weights = replace(scheme.weights, block_shape=(48, 48))
        scheme = replace(scheme, weights=weights, activations=replace(scheme.activations, group_size=32))
    upstream = quantize_with_llm_compressor(**request(source, "rtn", scheme, calibration=()))
    own = round_to_nearest(loaded(source), scheme)
    assert own.quantized_layers == upstream.quantized_layers and len(own.quantized_layers) == 7 * LAYERS
    written = [files(quantized, tmp_path / directory) for quantized, directory in ((own, "a"), (upstream, "b"))]
    assert written[0]["model.safetensors"] == written[1]["model.safetensors"]
    configs = [json.loads(each["config.json"])["quantization_config"] for each in written]
    for config in configs:
        config["config_groups"]["group_0"]["weights"]["observer"] = None
    assert configs[0] == configs[1]


@pytest.mark.needs("llmcompressor")
@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_tied_weights_are_written_once(tmp_path, method):
    torch.manual_seed(0)
    llama(tie_word_embeddings=True, vocab_size=VOCAB_SIZE).to(torch.bfloat16).save_pretrained(tmp_path / "tied")
    run = request(tmp_path / "tied", method, W4)
    quantized = round_to_nearest(run["model"], W4) if method == "rtn" else quantize_with_llm_compressor(**run)
    quantized.save(tmp_path / "out")
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as tensors:
        assert "lm_head.weight" not in tensors.keys()  # noqa: SIM118
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))


@pytest.mark.needs("llmcompressor")
def test_a_run_prints_nothing_and_leaves_nothing(source, tmp_path, capfd, caplog):
    from loguru import logger

    import_upstream()
    run = request(source, "awq")
    handlers, deterministic = dict(logger._core.handlers), torch.are_deterministic_algorithms_enabled()
    capfd.readouterr()
    with caplog.at_level(logging.WARNING), without_bars():
        quantized = quantize_with_llm_compressor(**run)
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in run["model"].modules())
        quantized.save(tmp_path / "out")
    assert capfd.readouterr() == ("", "")
    skipped = ["llmcompressor: 4 mappings were skipped due to incompatible shapes"]
    assert [
        record.message.partition(". ")[0] for record in caplog.records if "kernels" not in record.message
    ] == skipped
    assert logger._core.handlers == handlers
    assert torch.are_deterministic_algorithms_enabled() == deterministic
    assert "save_pretrained" not in vars(run["model"])


# Each of the following does what upstream does without a workaround. When one passes upstream, the workaround goes.


@pytest.mark.needs("llmcompressor")
def test_upstream_still_pins_memory_without_an_accelerator():
    from llmcompressor.pipelines.cache import IntermediatesCache

    cache = IntermediatesCache.empty(1, torch.device("cpu"))
    cache.update(0, {"hidden": torch.zeros(2)})
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="accelerator"):
            cache.pin_memory(0)
    with all_fixes():
        cache.pin_memory(0)


@pytest.mark.needs("llmcompressor")
def test_upstream_still_keeps_attention_scores_of_all_samples():
    from types import SimpleNamespace

    from llmcompressor.modifiers.transform.awq import AWQModifier

    class Scores:
        alive = most = 0

        def __init__(self):
            Scores.alive += 1
            Scores.most = max(Scores.most, Scores.alive)

        def __del__(self):
            Scores.alive -= 1

    def attention(number):
        return number, Scores()

    modifier = SimpleNamespace(_parent_args_cache={attention: [{"number": number} for number in range(5)]})
    assert AWQModifier._run_samples(modifier, attention) == [0, 1, 2, 3, 4]
    assert Scores.most == 5
    Scores.most = 0
    with all_fixes():
        assert AWQModifier._run_samples(modifier, attention) == [0, 1, 2, 3, 4]
    assert Scores.most <= 2


@pytest.mark.needs("llmcompressor")
def test_upstream_still_demands_a_processor_for_tokens(source):
    from llmcompressor import oneshot
    from torch.utils.data import DataLoader

    model = loaded(source)
    with pytest.raises(RuntimeError, match="processor"):
        oneshot(model=model, recipe=build_modifiers(W4, "gptq", {}), dataset=DataLoader([]))


@pytest.mark.needs("llmcompressor")
def test_upstream_still_reads_the_config_by_name(source):
    from llmcompressor import oneshot

    model = loaded(source)
    model.config._name_or_path = ""
    with pytest.raises((OSError, ValueError)):
        oneshot(model=model, processor=object(), recipe=build_modifiers(W4, "rtn", {}))


@pytest.mark.needs("llmcompressor")
def test_upstream_still_removes_the_handlers_of_others():
    from llmcompressor.logger import LoggerConfig, configure_logger
    from loguru import logger

    handlers, level = dict(logger._core.handlers), logger._core.min_level
    try:
        configure_logger(LoggerConfig(console_log_level="ERROR"))
        assert not set(handlers) & set(logger._core.handlers)
    finally:
        logger._core.handlers, logger._core.min_level = handlers, level


@pytest.mark.needs("llmcompressor")
def test_upstream_still_runs_a_separate_pass_for_a_modifier_without_data():
    from llmcompressor.pipelines.registry import CalibrationPipeline

    pipeline = CalibrationPipeline.from_modifiers(build_modifiers(W4, "awq", {}), user="independent")
    assert type(pipeline).__name__ == "IndependentPipeline"
