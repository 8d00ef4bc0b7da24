"""The adapter of llm-compressor: checkpoints compute what memory computes, runs resume, nothing is left behind."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from shardwright.ds_configs.quantization.scheme import changed, scheme_named
from shardwright.ds_configs.specs.errors import UsageError
from shardwright.plugins.llm_compressor.engine import EngineRequest, build_modifiers, quantize_with_llm_compressor
from shardwright.plugins.llm_compressor.journal import Journal
from shardwright.plugins.llm_compressor.quiet import (
    attention_scores_are_not_kept,
    import_upstream,
    no_pinned_memory_without_cuda,
    quiet_upstream,
)
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


def request(source: Path, method: str, scheme=W4, **more) -> EngineRequest:
    values = {"calibration": samples(), "batch_size": 2} | more
    return EngineRequest(model=loaded(source), tokenizer=None, scheme=scheme, method=method, **values)


def files(quantized, directory: Path) -> dict[str, bytes]:
    quantized.save(directory)
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.needs("llmcompressor")
@pytest.mark.parametrize(("method", "scheme"), _RUNS, ids=[f"{method}-{scheme.name}" for method, scheme in _RUNS])
def test_memory_computes_what_the_checkpoint_computes(source, tmp_path, method, scheme):
    seen = []
    quantized = quantize_with_llm_compressor(request(source, method, scheme), seen.append)
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
    indices = [step.index for step in seen]
    assert indices == sorted(indices)
    assert {step.count for step in seen} == {seen[-1].index + 1}, "the number of steps is known from the start"
    assert seen[-1].stage == "done"


@pytest.mark.needs("llmcompressor")
def test_gptq_writes_no_order_of_columns(source, tmp_path):
    run = request(source, "gptq", method_options={"actorder": "weight"})
    quantize_with_llm_compressor(run, lambda step: None).save(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as tensors:
        assert not [name for name in tensors.keys() if "g_idx" in name]  # noqa: SIM118


@pytest.mark.needs("llmcompressor")
def test_same_seed_gives_the_same_bytes(source, tmp_path):
    runs = [quantize_with_llm_compressor(request(source, "gptq"), lambda step: None) for _ in range(2)]
    first, second = (files(run, tmp_path / str(index)) for index, run in enumerate(runs))
    assert first == second


@pytest.mark.needs("llmcompressor")
def test_every_error_of_the_options_is_reported(source):
    options = {"dampening_fraction": 0.1, "block_size": "many", "num_calibration_steps": 3}
    with pytest.raises(UsageError) as error:
        quantize_with_llm_compressor(request(source, "gptq", method_options=options), lambda step: None)
    text = str(error.value)
    assert "did you mean dampening_frac?" in text
    assert "num_calibration_steps" in text
    assert "method_options.block_size = 'many'" in text


@pytest.mark.needs("llmcompressor")
@pytest.mark.parametrize("method", ["gptq", "awq", "smoothquant"])
def test_methods_that_need_samples_report_it(source, method):
    with pytest.raises(UsageError, match="needs text for calibration"):
        quantize_with_llm_compressor(request(source, method, calibration=()), lambda step: None)


@pytest.mark.needs("llmcompressor")
def test_rounding_needs_no_samples(source):
    quantized = quantize_with_llm_compressor(request(source, "rtn", calibration=()), lambda step: None)
    assert len(quantized.quantized_layers) == 7 * LAYERS


class Interrupted(Exception):
    """Stands for whatever ends a run early."""


def interrupt_after(part: int, stage: str = "propagating"):
    """Return a report that ends the run when step `part` has been written."""

    def report(step):
        if step.index == part and step.stage == stage:
            raise Interrupted

    return report


@pytest.mark.needs("llmcompressor")
@pytest.mark.parametrize(
    ("method", "scheme", "part"),
    [
        ("gptq", W4, 1),
        ("awq", W4, 1),
        ("rtn", STATIC, 2),
        ("smoothquant", STATIC, 1),
        ("smoothquant-gptq", STATIC, LAYERS + 1 + 2),
        ("rtn", scheme_named("NVFP4"), 1),
    ],
)
def test_interrupted_run_ends_as_if_it_had_not_been(source, tmp_path, method, scheme, part):
    whole = files(quantize_with_llm_compressor(request(source, method, scheme), lambda step: None), tmp_path / "whole")
    journal = tmp_path / "journal"
    with pytest.raises(Interrupted):
        quantize_with_llm_compressor(request(source, method, scheme, journal=journal), interrupt_after(part))
    seen = []
    resumed = quantize_with_llm_compressor(request(source, method, scheme, journal=journal), seen.append)
    restored = [step.index for step in seen if step.stage == "restored"]
    assert restored == list(range(part + 1)), "every finished part, and nothing else, is taken over"
    assert not set(restored) & {step.index for step in seen if step.stage == "quantizing"}
    assert files(resumed, tmp_path / "resumed") == whole


@pytest.mark.needs("llmcompressor")
def test_damaged_journal_is_done_again_from_there(source, tmp_path):
    journal = tmp_path / "journal"
    whole = files(quantize_with_llm_compressor(request(source, "gptq"), lambda step: None), tmp_path / "whole")
    with pytest.raises(Interrupted):
        quantize_with_llm_compressor(request(source, "gptq", journal=journal), interrupt_after(2))
    damaged = journal / "layer-00001.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    (journal / ".layer-00009.safetensors.half").write_bytes(b"half")
    seen = []
    resumed = quantize_with_llm_compressor(request(source, "gptq", journal=journal), seen.append)
    assert [step.index for step in seen if step.stage == "restored"] == [0]
    assert files(resumed, tmp_path / "resumed") == whole
    assert not list(journal.glob(".*"))
    damaged.write_bytes(damaged.read_bytes()[:-10])
    identity = json.loads((journal / "journal.json").read_text())["run"]
    assert len(Journal(journal, identity).entries) == 1, "a file that was cut short is not trusted"


def test_manifest_cannot_name_files_elsewhere(source, tmp_path):
    journal = Journal(tmp_path / "journal", {"method": "gptq"})
    journal.record(phase=0, part=0, tensors={"a.weight": torch.zeros(2)})
    manifest = tmp_path / "journal" / "journal.json"
    content = json.loads(manifest.read_text())
    (tmp_path / "layer-00000.safetensors").write_bytes((tmp_path / "journal" / "layer-00000.safetensors").read_bytes())
    content["layers"][0]["file"] = "../layer-00000.safetensors"
    manifest.write_text(json.dumps(content))
    assert Journal(tmp_path / "journal", {"method": "gptq"}).entries == ()


@pytest.mark.needs("llmcompressor")
def test_journal_of_another_run_is_rejected(source, tmp_path):
    journal = tmp_path / "journal"
    with pytest.raises(Interrupted):
        quantize_with_llm_compressor(request(source, "gptq", journal=journal, run_key="a"), interrupt_after(0))
    before = {path.name: path.read_bytes() for path in journal.iterdir()}
    other = request(
        source, "gptq", journal=journal, run_key="b", calibration=samples(9), method_options={"block_size": 64}
    )
    with pytest.raises(UsageError) as error:
        quantize_with_llm_compressor(other, lambda step: None)
    text = str(error.value)
    assert all(f"another {name}" in text for name in ("model and settings", "calibration text", "options"))
    assert "another scheme" not in text
    assert {path.name: path.read_bytes() for path in journal.iterdir()} == before


_INTERRUPTED_SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from test_llm_compressor import quantize_with_llm_compressor, request
def report(step):
    if (step.index, step.stage) == (1, "propagating"):
        print("NOW", flush=True)
quantize_with_llm_compressor(request(Path(sys.argv[1]), "gptq", journal=Path(sys.argv[2])), report)
"""


@pytest.mark.needs("llmcompressor")
def test_interrupt_from_the_keyboard(source, tmp_path):
    journal = tmp_path / "journal"
    command = [
        os.environ["PYTHON_EXEC"],
        "-c",
        _INTERRUPTED_SCRIPT,
        str(source),
        str(journal),
        str(Path(__file__).parent),
    ]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # What a shell starts in the background ignores Ctrl-C, and so does all that it starts.
    with subprocess.Popen(command, **pipes, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "NOW\n", "nothing but the script writes to stdout"
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "KeyboardInterrupt" in stderr
    seen = []
    resumed = quantize_with_llm_compressor(request(source, "gptq", journal=journal), seen.append)
    assert {step.index for step in seen if step.stage == "restored"} >= {0, 1}
    whole = quantize_with_llm_compressor(request(source, "gptq"), lambda step: None)
    assert files(resumed, tmp_path / "resumed") == files(whole, tmp_path / "whole")


@pytest.mark.needs("llmcompressor")
def test_nothing_is_printed_or_left_in_place(source, tmp_path, capfd, monkeypatch, caplog):
    import requests
    from loguru import logger
    from tqdm.std import tqdm

    import_upstream()
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    monkeypatch.setenv("LLM_COMPRESSOR_LOG_FILE", str(tmp_path / "upstream.log"))
    asked = []
    monkeypatch.setattr(requests, "head", lambda *arguments, **named: asked.append(arguments))
    monkeypatch.setattr(
        "huggingface_hub.file_download._get_metadata_or_catch_error", lambda **named: asked.append(named)
    )
    before = dict(os.environ), vars(tqdm)["__init__"], dict(logger._core.handlers)
    run = request(source, "awq")
    capfd.readouterr()
    run.model.config._name_or_path = run.model.name_or_path = "nobody/nothing"
    with caplog.at_level(logging.WARNING):
        quantized = quantize_with_llm_compressor(run, lambda step: None)
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in run.model.modules())
        quantized.save(tmp_path / "out")
    out, err = capfd.readouterr()
    assert (out, err, asked) == ("", "", [])
    assert [record.message for record in caplog.records] == [
        "llmcompressor: 4 mappings were skipped due to incompatible shapes. Set logging to DEBUG to view full list."
    ]
    assert (dict(os.environ), vars(tqdm)["__init__"], dict(logger._core.handlers)) == before
    assert not (tmp_path / "upstream.log").exists()
    assert run.model.name_or_path == "nobody/nothing"
    assert "save_pretrained" not in vars(run.model)


@pytest.mark.needs("llmcompressor")
def test_failed_run_leaves_no_session_and_no_hooks(source):
    from llmcompressor.core import active_session

    run = request(source, "gptq")
    with pytest.raises(Interrupted):
        quantize_with_llm_compressor(run, interrupt_after(1, stage="quantizing"))
    assert not active_session().lifecycle.recipe.modifiers
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in run.model.modules())
    assert run.model.name_or_path == str(source)


@pytest.mark.needs("llmcompressor")
def test_random_numbers_of_the_caller_go_on(source):
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    run = request(source, "rtn", seed=11)
    torch.manual_seed(5)
    quantize_with_llm_compressor(run, lambda step: None)
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.needs("llmcompressor")
def test_layers_that_are_ignored_stay_as_they_are(source, tmp_path):
    scheme = replace(W4, ignore=("lm_head", "re:.*down_proj"))
    quantized = quantize_with_llm_compressor(request(source, "gptq", scheme), lambda step: None)
    assert len(quantized.quantized_layers) == 6 * LAYERS
    quantized.save(tmp_path)
    name = "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(loaded_tensor(tmp_path, name), loaded_tensor(source, name))


def loaded_tensor(directory: Path, name: str) -> torch.Tensor:
    with safe_open(directory / "model.safetensors", framework="pt") as tensors:
        return tensors.get_tensor(name)


# Each of the following does what upstream does without a workaround. When one passes upstream, the workaround goes.


@pytest.mark.needs("llmcompressor")
def test_upstream_still_pins_memory_without_an_accelerator():
    from llmcompressor.pipelines.cache import IntermediatesCache

    cache = IntermediatesCache.empty(1, torch.device("cpu"))
    cache.update(0, {"hidden": torch.zeros(2)})
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="accelerator"):
            cache.pin_memory(0)
    with no_pinned_memory_without_cuda():
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
    with attention_scores_are_not_kept():
        assert AWQModifier._run_samples(modifier, attention) == [0, 1, 2, 3, 4]
    assert Scores.most <= 2


@pytest.mark.needs("llmcompressor")
def test_upstream_still_demands_a_processor_for_tokens(source):
    from llmcompressor import oneshot
    from torch.utils.data import DataLoader

    model = loaded(source)
    with pytest.raises(RuntimeError, match="processor"), quiet_upstream():
        oneshot(model=model, recipe=build_modifiers(W4, "gptq", {}), dataset=DataLoader([]))


@pytest.mark.needs("llmcompressor")
def test_upstream_still_reads_the_config_by_name(source):
    from llmcompressor import oneshot

    model = loaded(source)
    model.config._name_or_path = model.name_or_path = ""
    with pytest.raises((OSError, ValueError)), quiet_upstream():
        oneshot(model=model, processor=object(), recipe=build_modifiers(W4, "rtn", {}))


@pytest.mark.needs("llmcompressor")
def test_upstream_still_looks_for_a_recipe_on_the_hub(source, tmp_path, monkeypatch):
    import requests
    from llmcompressor.transformers.compression.compressed_tensors_utils import update_and_save_recipe

    class Asked(Exception):
        pass

    def head(*arguments, **named):
        raise Asked

    monkeypatch.setattr(requests, "head", head)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with pytest.raises(Asked), quiet_upstream():
        update_and_save_recipe("nobody/nothing", str(tmp_path))


@pytest.mark.needs("llmcompressor")
def test_upstream_still_removes_the_handlers_of_others():
    from llmcompressor.logger import LoggerConfig, configure_logger
    from loguru import logger

    with quiet_upstream():
        own = logger.add(lambda message: None)
        configure_logger(LoggerConfig(console_log_level="ERROR"))
        assert own not in logger._core.handlers


@pytest.mark.needs("llmcompressor")
def test_upstream_still_runs_a_separate_pass_for_a_modifier_without_data():
    from llmcompressor.pipelines.registry import CalibrationPipeline

    pipeline = CalibrationPipeline.from_modifiers(build_modifiers(W4, "awq", {}), user="independent")
    assert type(pipeline).__name__ == "IndependentPipeline"
