"""Pipeline stages in one process: equal logits, gradients and checkpoints, and rejected models."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
import transformers
from parallel_rules import rule_errors
from safetensors import safe_open
from shardwright.ds_configs.legality.axes import (
    PIPELINE_MODEL_TYPES,
    pipeline_errors,
)
from shardwright.ds_configs.specs.errors import UsageError
from shardwright.ds_configs.specs.layout import PipelineStage, contiguous_stages
from shardwright.plugins.deepspeed_pipeline import checkpoint as pipeline_checkpoint
from shardwright.plugins.deepspeed_pipeline.checkpoint import pipeline_tensors, save_pipeline_checkpoint
from shardwright.plugins.deepspeed_pipeline.stage import CausalLMStage, StageParts, stage_inputs
from torch import distributed

LAYERS, VOCAB, WINDOW, TOKENS = 4, 96, 5, 16
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
GROUPED = {**SIZES, "intermediate_size": 48, "num_key_value_heads": 2}
CONFIGS = {
    "gemma2": lambda: transformers.Gemma2Config(**GROUPED, head_dim=16, sliding_window=WINDOW),
    "gpt2": lambda: transformers.GPT2Config(**SIZES),
    "llama": lambda: transformers.LlamaConfig(**GROUPED),
    "llama, tied": lambda: transformers.LlamaConfig(**GROUPED, tie_word_embeddings=True),
    "mistral": lambda: transformers.MistralConfig(**GROUPED, sliding_window=WINDOW),
    "mistral, eager": lambda: transformers.MistralConfig(**GROUPED, sliding_window=WINDOW, attn_implementation="eager"),
    "phi3": lambda: transformers.Phi3Config(**GROUPED, sliding_window=WINDOW),
    "phi3, long rope": lambda: transformers.Phi3Config(
        **GROUPED,
        original_max_position_embeddings=8,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10_000.0,
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [2.0, 3.0, 4.0, 5.0],
        },
    ),
    "qwen2": lambda: transformers.Qwen2Config(
        **GROUPED, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2
    ),
    "qwen3": lambda: transformers.Qwen3Config(**GROUPED, head_dim=16),
}


def made(name: str) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    found = {}
    for name in CONFIGS:
        model = made(name)
        directory = tmp_path_factory.mktemp("models") / name.replace(", ", "-")
        model.save_pretrained(directory)
        found[name] = (model, directory)
    return found


def evenly(count: int) -> tuple[PipelineStage, ...]:
    return contiguous_stages([-(-LAYERS * (index + 1) // count) for index in range(count)])


def stages_of(source, count: int = 3, attention: str | None = None, **settings) -> list[CausalLMStage]:
    """Each stage made by itself, as on a rank of its own."""
    return [
        CausalLMStage(StageParts(source, attn_implementation=attention), stage, **settings).eval()
        for stage in evenly(count)
    ]


def through(stages, inputs):
    for stage in stages:
        inputs = stage(inputs)
    return inputs


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids_BS = torch.randint(1, VOCAB, (3, TOKENS), generator=generator)
    mask_BS = torch.ones_like(ids_BS)
    mask_BS[1, 11:] = 0
    mask_BS[2, :3] = 0
    return ids_BS, mask_BS


@pytest.mark.parametrize("source", ["live", "checkpoint"])
@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_stages_give_the_logits_of_the_model(models, name, source):
    model, directory = models[name]
    ids_BS, mask_BS = batch()
    packed_BS = torch.arange(TOKENS).remainder(7).expand(3, -1)
    shifted_BS = torch.arange(TOKENS).expand(3, -1) + 2
    stages = stages_of(model) if source == "live" else stages_of(directory, attention=model.config._attn_implementation)
    for mask, positions in ((None, None), (mask_BS, None), (mask_BS, shifted_BS), (None, packed_BS)):
        expected_BSV = model(input_ids=ids_BS, attention_mask=mask, position_ids=positions, use_cache=False).logits
        found_BSV = through(stages, stage_inputs(ids_BS, mask, positions))
        visible_BS = torch.ones_like(ids_BS).bool() if mask is None else mask.bool()
        assert torch.equal(found_BSV[visible_BS], expected_BSV[visible_BS])


@pytest.mark.parametrize("name", CONFIGS)
def test_names_are_those_of_the_checkpoint_and_each_tensor_is_in_one_stage(models, name):
    model, directory = models[name]
    with safe_open(directory / "model.safetensors", framework="pt") as file:
        expected = sorted(file.keys())
    stages = stages_of(model)
    found = [key for stage in stages for key, _ in pipeline_tensors(SimpleNamespace(stages=(stage,)))]
    assert sorted(found) == expected


def test_a_rank_reads_and_holds_its_own_stage_alone(models, monkeypatch):
    model, directory = models["llama"]
    asked = []
    read = StageParts._read
    monkeypatch.setattr(StageParts, "_read", lambda self, name, made: asked.append(name) or read(self, name, made))
    parts = StageParts(directory)
    middle = CausalLMStage(parts, evenly(3)[1])
    assert sorted(asked) == sorted(middle.state_dict())
    assert {name.split(".")[2] for name in asked} == {"2"}
    assert all(parameter.is_meta for parameter in parts._model.lm_head.parameters())
    assert not any(tensor.is_meta for tensor in (*middle.parameters(), *middle.buffers()))
    in_16_bit = CausalLMStage(StageParts(directory, dtype=torch.bfloat16), middle.stage)
    assert {parameter.dtype for parameter in in_16_bit.parameters()} == {torch.bfloat16}
    assert in_16_bit.get_submodule("model.rotary_emb").inv_freq.dtype == torch.float32
    name = "model.layers.2.mlp.up_proj.weight"
    assert torch.equal(in_16_bit.state_dict()[name], model.state_dict()[name].bfloat16())


def test_head_and_embedding_on_two_ranks_start_equal(models):
    model, directory = models["llama, tied"]
    first, *_, last = stages_of(directory)
    assert last.tied_name == "lm_head.weight"
    assert torch.equal(last.get_submodule("lm_head").weight, first.get_submodule("model.embed_tokens").weight)
    assert "lm_head.weight" not in dict(pipeline_tensors(SimpleNamespace(stages=(last,))))
    # On one rank they are one parameter, as with one stage.
    for source in (model, directory):
        (whole,) = stages_of(source, 1)
        assert whole.get_submodule("lm_head").weight is whole.get_submodule("model.embed_tokens").weight
    untied = stages_of(models["llama"][1])[-1]
    assert untied.tied_name is None


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "llama"])
def test_random_weights_do_not_depend_on_the_number_of_stages(name):
    def weights(count: int, seed: int = 3) -> dict[str, torch.Tensor]:
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]())
        torch.manual_seed(seed)
        found = {key: value for stage in stages_of(model, count) for key, value in stage.state_dict().items()}
        assert torch.initial_seed() == seed
        return found

    two, four = weights(2), weights(4)
    assert all(torch.equal(two[key], four[key]) for key in (*two, *four))
    layer = "transformer.h.{}.mlp.c_fc.weight" if name == "gpt2" else "model.layers.{}.mlp.up_proj.weight"
    assert not torch.equal(two[layer.format(0)], two[layer.format(2)])
    assert not torch.equal(two[layer.format(0)], weights(2, seed=4)[layer.format(0)])
    assert 0.15 < two[layer.format(0)].std() < 0.25


@pytest.fixture
def one_rank(tmp_path):
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def on_one_rank(source, dtype=None) -> SimpleNamespace:
    """What the checkpoint functions ask of a module, with all stages on this rank."""
    parts = StageParts(source, dtype=dtype)
    stages = tuple(CausalLMStage(parts, stage) for stage in evenly(2))
    return SimpleNamespace(stages=stages, source=parts, stage_id=0, data_parallel_rank=0, tensor_parallel_rank=0)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.usefixtures("one_rank")
def test_saved_checkpoint_loads_in_transformers_with_equal_logits(models, tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline_checkpoint, "SHARD_BYTES", 30_000)
    ids_BS, mask_BS = batch()
    for name, (model, directory) in models.items():
        module = on_one_rank(directory)
        before = module.source.config.to_dict()
        output = tmp_path / name
        output.mkdir()
        (output / "model-00001-of-00099.safetensors").write_bytes(b"of an earlier model")
        (output / "tokenizer.json").write_text("{}")
        save_pipeline_checkpoint(module, output)
        assert not list(tmp_path.glob(".*"))
        assert module.source.config.to_dict() == before
        assert (output / "tokenizer.json").exists()
        loaded, report = type(model).from_pretrained(output, output_loading_info=True)
        assert not (report["missing_keys"] or report["unexpected_keys"])
        assert loaded.config.architectures == [type(model).__name__]
        loaded.set_attn_implementation(model.config._attn_implementation)
        expected, found = (each(ids_BS, attention_mask=mask_BS).logits for each in (model, loaded.eval()))
        assert torch.equal(found, expected)
        index = json.loads((output / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"].values()) == {path.name for path in output.glob("*.safetensors")}
        tensors = dict(pipeline_tensors(module))
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
        read = dict(pipeline_tensors(on_one_rank(output)))
        assert all(torch.equal(read[key], tensor) for key, tensor in tensors.items())


def test_unsupported_models_are_rejected(models):
    import peft

    with pytest.raises(UsageError, match=r"model_type = 'opt': pipelines support gemma2, gpt2"):
        StageParts(transformers.OPTForCausalLM(transformers.OPTConfig(**SIZES, ffn_dim=32, word_embed_proj_dim=32)))
    with pytest.raises(UsageError, match="language modelling head"):
        StageParts(transformers.LlamaForSequenceClassification(CONFIGS["llama"]()))
    adapted = peft.get_peft_model(made("llama"), peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(UsageError, match="not adapters"):
        StageParts(adapted)
    frozen = made("llama")
    frozen.model.norm.weight.requires_grad_(False)
    with pytest.raises(UsageError, match=r"'model\.norm\.weight': pipelines train all weights"):
        StageParts(frozen)
    crossed = transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES, add_cross_attention=True))
    with pytest.raises(UsageError, match="no encoder"):
        StageParts(crossed)


def test_auto_tp_still_rejects_stages_of_a_model(models):
    """If this fails, DeepSpeed can shard stages itself: see plugins/deepspeed_pipeline/stage.py."""
    from deepspeed.module_inject.auto_tp import AutoTP

    (stage,) = stages_of(models["llama"][0], 1)
    with pytest.raises(AssertionError, match="Not able to determine model policy automatically"):
        AutoTP.tp_parser(stage)


LEGAL = {"pp": 2, "num_layers": 4, "model_type": "llama", "zero_stage": 1, "world_size": 4, "micro_batches": 4}


@pytest.mark.parametrize(
    ("change", "where", "says"),
    [
        ({"pp": 0}, "pp", "must be at least 1"),
        ({"zero_stage": 3}, "zero_optimization.stage", "nearest legal value: 1"),
        ({"engine": "fsdp2", "zero_stage": None}, "pp", "requires DeepSpeed"),
        ({"offload_optimizer": "nvme"}, "offload_optimizer", "use cpu with ZeRO-1"),
        ({"offload_param": "cpu"}, "offload_param", "ZeRO-3"),
        ({"cp": 2}, "cp", "FSDP2"),
        ({"ep": 2}, "ep", "have no experts"),
        ({"tp": 4}, "pp * tp", "4 % 8 = 4"),
        ({"tp": 2, "model_type": "phi3"}, "tp", "not phi3"),
        ({"model_type": "bloom"}, "model_type", "gemma2, gpt2"),
        ({"method": "lora"}, "method", "use full"),
    ],
)
def test_each_rule_names_value_and_way_out(change, where, says):
    (error,) = rule_errors(pipeline_errors, **LEGAL | change)
    assert error.where == where
    assert says in str(error)


def test_every_family_is_compared():
    assert {name.partition(",")[0] for name in CONFIGS} == set(PIPELINE_MODEL_TYPES)


def test_stages_of_a_replica_read_the_same_samples_and_draw_alike(monkeypatch):
    from functools import partial

    from accelerate import Accelerator, data_loader
    from shardwright.plugins.deepspeed_pipeline.engine import read_own_replica
    from transformers.trainer_utils import seed_worker

    # The random numbers of samplers are not under test.
    monkeypatch.setattr(data_loader, "synchronize_rng_states", lambda *_: None)
    rows = []
    for replica in range(2):
        accelerator = Accelerator(cpu=True)
        read_own_replica(accelerator, replicas=2, replica=replica)
        seeded = partial(seed_worker, num_workers=0, rank=7)
        loader = torch.utils.data.DataLoader(range(8), batch_size=2, worker_init_fn=seeded)
        prepared = accelerator.prepare_data_loader(loader)
        assert loader.worker_init_fn.keywords == {"num_workers": 0, "rank": replica}
        rows.append([batch.tolist() for batch in prepared])
    assert rows == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
