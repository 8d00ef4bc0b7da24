"""Students made from teachers: kept weights are equal, unused ones are removed, and everything loads again."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import shardwright
import torch
import transformers
from commands import Shell, every_command
from safetensors.torch import load_file, save_file
from shardwright.ds_configs.specs.errors import RefusedInputError, UsageError
from shardwright.plugins.transformers.training_arguments import byte_tokenizer
from shardwright.trainers.data.sources import pack, read_documents
from shardwright.trainers.distillation import student as maker
from shardwright.trainers.distillation.student import StudentRequest, make_student, plan_student

VOCAB = 300
DECODER = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-14,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GPT2 = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 32,
    "layer_norm_epsilon": 1e-14,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BERT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "layer_norm_eps": 1e-14,
    "initializer_range": 0.2,
}
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", DECODER | {"attention_bias": True}),
    "llama tied": ("LlamaForCausalLM", "LlamaConfig", DECODER | {"tie_word_embeddings": True}),
    "mistral": ("MistralForCausalLM", "MistralConfig", DECODER),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", DECODER),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", DECODER),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", DECODER | {"num_hidden_layers": 6}),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", DECODER | {"num_local_experts": 4}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "bert": ("BertForSequenceClassification", "BertConfig", BERT | {"num_labels": 5}),
    "bert mlm": ("BertForMaskedLM", "BertConfig", BERT),
}
WIDE = ("llama", "llama tied", "mistral", "qwen2", "qwen3")


def teacher_of(kind: str, **changes: Any) -> Any:
    transformers.set_seed(3)
    model, config, values = KINDS[kind]
    return getattr(transformers, model)(getattr(transformers, config)(**values | changes)).double().eval()


def saved(model: Any, directory: Path) -> str:
    """Save a teacher, with a tokenizer of bytes, which activations are measured with."""
    model.save_pretrained(directory)
    byte_tokenizer(VOCAB).save_pretrained(directory)
    return str(directory)


def made(teacher: str, output: Path, **request: Any) -> Any:
    asked = StudentRequest(**request)
    make_student(plan_student(teacher, asked, output_dir=output), teacher, output)
    config = json.loads((output / "config.json").read_text())
    model = getattr(transformers, config["architectures"][0])
    student, info = model.from_pretrained(output, output_loading_info=True, dtype="auto")
    assert not any(info.values()), info
    return student.eval()


def tokens() -> torch.Tensor:
    return torch.randint(3, VOCAB, (2, 20), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("kind", KINDS)
def test_kept_layers_equal_the_teachers(kind, tmp_path):
    model = teacher_of(kind)
    teacher = saved(model, tmp_path / "teacher")
    last = model.config.num_hidden_layers - 1
    student = made(teacher, tmp_path / "student", keep_layers=(1, last))
    path = {"gpt2": "transformer.h", "bert": "bert.encoder.layer", "bert mlm": "bert.encoder.layer"}.get(
        kind, "model.layers"
    )
    before, after = model.state_dict(), student.state_dict()
    for name, tensor in after.items():
        source = name.replace(f"{path}.0.", f"{path}.@.").replace(f"{path}.1.", f"{path}.{last}.").replace("@", "1")
        assert torch.equal(tensor, before[source]), name
    assert student.config.num_hidden_layers == 2
    if hasattr(model.config, "layer_types"):
        assert student.config.layer_types == [model.config.layer_types[layer] for layer in (1, last)]
    story = json.loads((tmp_path / "student" / "student.json").read_text())
    assert story["kept_layers"] == [1, last]
    assert story["student_parameters"] == sum(parameter.numel() for parameter in student.parameters())
    assert story["teacher_parameters"] == sum(parameter.numel() for parameter in model.parameters())


def idle_parts(model: Any) -> None:
    """Make half of the MLP's channels add nothing, and half of the residual channels stay unwritten."""
    draw = torch.Generator().manual_seed(11)
    state = model.state_dict()
    dead_H = torch.randperm(32, generator=draw)[:16]
    for name, tensor in state.items():
        if name.endswith("mlp.down_proj.weight"):
            tensor[:, torch.randperm(48, generator=draw)[:24]] = 0
    for name, tensor in state.items():
        if name.endswith(("o_proj.weight", "down_proj.weight", "o_proj.bias", "down_proj.bias")):
            tensor[dead_H] = 0
        elif name.endswith("embed_tokens.weight"):
            tensor[:, dead_H] = 0
    model.load_state_dict(state)


@pytest.mark.parametrize("kind", WIDE)
def test_removing_unused_channels_keeps_logits(kind, tmp_path):
    model = teacher_of(kind)
    idle_parts(model)
    teacher = saved(model, tmp_path / "teacher")
    text = tmp_path / "text"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 30)
    sizes = {"hidden_size": 16, "intermediate_size": 24}
    student = made(teacher, tmp_path / "student", text=(text,), **sizes)
    ids = tokens()
    expected = model(ids).logits
    # Weights are fp64, but RMSNorm works in fp32.
    assert (student(ids).logits - expected).abs().max() < 1e-6 * expected.abs().max()
    assert student.config.hidden_size == 16
    assert student.num_parameters() < model.num_parameters() / 1.6


def test_students_with_all_cuts_load_completely(tmp_path):
    teacher = saved(teacher_of("llama"), tmp_path / "teacher")
    sizes = {"layers": 2, "intermediate_size": 20, "hidden_size": 24}
    student = made(teacher, tmp_path / "student", dtype="bfloat16", **sizes)
    assert {parameter.dtype for parameter in student.parameters()} == {torch.bfloat16}
    assert student(tokens()).logits.isfinite().all()
    config = student.config
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (8, 4, 8)


def test_cutting_one_width_keeps_the_channels_that_add_most(tmp_path):
    """A channel adds |a| ‖w‖₂ to the residual stream, where a = silu(gate) · up and w is its column of down."""
    model = teacher_of("qwen3")
    teacher = saved(model, tmp_path / "teacher")
    text = tmp_path / "text"
    text.write_text("".join(f"Sentence {number} of a text. " for number in range(40)))
    added = {}

    def add(layer):
        def hook(module, inputs):
            values_I = inputs[0].abs().sum(dim=(0, 1)) * module.weight.norm(dim=0)
            added[layer] = added.get(layer, 0) + values_I.detach()

        return hook

    for number, layer in enumerate(model.model.layers):
        layer.mlp.down_proj.register_forward_pre_hook(add(number))
    for sample in pack(read_documents((text,)), byte_tokenizer(VOCAB), 32):
        model(sample["input_ids"][None])
    student = made(teacher, tmp_path / "student", intermediate_size=16, text=(text,))
    state, before = student.state_dict(), load_file(tmp_path / "teacher" / "model.safetensors")
    assert all(torch.equal(state[name], before[name]) for name in state if "mlp" not in name)
    for number in range(3):
        mlp, kept = f"model.layers.{number}.mlp", added[number].argsort(descending=True)[:16].sort().values
        assert torch.equal(state[f"{mlp}.down_proj.weight"], before[f"{mlp}.down_proj.weight"][:, kept])
        assert torch.equal(state[f"{mlp}.up_proj.weight"], before[f"{mlp}.up_proj.weight"][kept])


def test_checkpoints_without_base_model_prefix_are_read(tmp_path):
    model = teacher_of("gpt2")
    saved(model, tmp_path / "teacher")
    file = tmp_path / "teacher" / "model.safetensors"
    bare = {name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}
    bare["h.0.attn.bias"] = torch.ones(1, 1, 32, 32)
    save_file(bare, file, metadata={"format": "pt"})
    student = made(str(tmp_path / "teacher"), tmp_path / "student", keep_layers=(0, 2))
    assert torch.equal(student.transformer.h[1].mlp.c_fc.weight, model.transformer.h[2].mlp.c_fc.weight)


def test_sharded_checkpoints_are_read_and_written(tmp_path, monkeypatch):
    model = teacher_of("llama")
    model.save_pretrained(tmp_path / "teacher", max_shard_size="40KB")
    assert len(list((tmp_path / "teacher").glob("model-*.safetensors"))) > 2
    monkeypatch.setattr(maker, "SHARD_BYTES", 30_000)
    student = made(str(tmp_path / "teacher"), tmp_path / "student", layers=2)
    assert len(list((tmp_path / "student").glob("model-*.safetensors"))) > 2
    assert torch.equal(student.model.layers[1].mlp.up_proj.weight, model.model.layers[2].mlp.up_proj.weight)


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    return partial(every_command(capsys, monkeypatch), "student")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved(teacher_of("llama"), tmp_path_factory.mktemp("student") / "teacher")


def test_command_writes_a_model_and_reports_sizes(shell, llama, tmp_path):
    out = tmp_path / "made" / "student"
    sizes = ("--layers", "2", "--intermediate", "24")
    dry = shell(llama, *sizes, "--output-dir", str(out), "--dry-run")
    assert dry.code == 0 and "No files written" in dry.out and not out.parent.exists()
    result = shell(llama, *sizes, "--output-dir", str(out))
    assert result.code == 0, result.err
    assert "layers kept: 0, 2" in result.out
    assert [path.name for path in out.parent.iterdir()] == ["student"]
    again = shell(llama, *sizes, "--output-dir", str(out))
    assert again.code == 2 and "exists and is not empty; use --force" in again.err
    forced = shell(llama, "--keep-layers", "0,1", "--output-dir", str(out), "--force", "--format", "json")
    assert forced.code == 0, forced.err
    story = json.loads(forced.out)
    assert story["kept_layers"] == [0, 1] and story["output_dir"] == str(out)
    assert story["widths"] is None and story["schema_version"] == 1
    assert transformers.LlamaForCausalLM.from_pretrained(out).num_parameters() == story["student_parameters"]


def test_python_student_equals_the_commands(shell, llama, tmp_path, capsys):
    sizes = ("--layers", "2", "--hidden", "16")
    made = shell(llama, *sizes, "--output-dir", str(tmp_path / "one"), "--format", "json")
    capsys.readouterr()
    found = shardwright.student(llama, tmp_path / "other", layers=2, hidden=16)
    assert capsys.readouterr().out == ""
    assert found.to_dict() == {name: value for name, value in json.loads(made.out).items() if name != "output_dir"}
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "other"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert shardwright.student(llama, layers=1).output_dir is None
    with pytest.raises(UsageError) as caught:
        shardwright.student(llama, tmp_path / "bad", layer=2, dtype="size")
    assert {error.where for error in caught.value.errors} == {"layer", "dtype"} and not (tmp_path / "bad").exists()


@pytest.mark.parametrize(
    ("flags", "messages"),
    [
        ((), ["no setting makes it smaller"]),
        (("--layers", "4"), ["the teacher has 3 layers"]),
        (("--keep-layers", "2,1"), ["ascending"]),
        (("--keep-layers", "0,3"), ["numbered from 0 to 2"]),
        (("--keep-layers", "a"), ["must be an integer"]),
        (("--hidden", "20"), ["--hidden = 20: must be a multiple of the 8 query heads; use 16"]),
        (("--text", "x", "--layers", "2"), ["is only used to compare channels"]),
        (("--layers", "2", "--low-rank", "4", "--dry-run"), ["quantize --method low-rank"]),
        (("--hidden", "0", "--layers", "0"), ["hidden_size = 0", "layers = 0"]),
        (("--hidden", "64", "--intermediate", "100"), ["--hidden = 64: the teacher has 32", "--intermediate = 100"]),
    ],
)
def test_all_errors_of_a_request_are_reported_together(shell, llama, tmp_path, flags, messages):
    result = shell(llama, *flags, "--output-dir", str(tmp_path / "out"))
    assert result.code == 2, result
    assert len(result.errors) == len(messages), result.err
    assert all(message in result.err for message in messages), result.err
    assert not list(tmp_path.iterdir())


def test_unsupported_cuts_are_rejected(tmp_path):
    for kind in ("mixtral", "gpt2", "bert"):
        teacher = saved(teacher_of(kind), tmp_path / kind)
        with pytest.raises(UsageError, match="widths can be reduced only in llama, mistral, qwen2, qwen3; --layers"):
            plan_student(teacher, StudentRequest(intermediate_size=16))
    sizes = {"d_model": 32, "d_kv": 8, "num_heads": 4, "num_layers": 3, "d_ff": 64, "vocab_size": VOCAB}
    t5 = saved(transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes)), tmp_path / "t5")
    with pytest.raises(UsageError, match="one plain stack of layers"):
        plan_student(t5, StudentRequest(layers=2))


def test_layers_that_would_change_their_kind_are_rejected(tmp_path):
    values = DECODER | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_hidden_layers": 4}
    config = transformers.Qwen3MoeConfig(**values, decoder_sparse_step=2)
    teacher = saved(transformers.Qwen3MoeForCausalLM(config), tmp_path / "teacher")
    with pytest.raises(UsageError, match="would become layer 1, which this family builds differently") as error:
        plan_student(teacher, StudentRequest(keep_layers=(0, 2)))
    assert len(error.value.errors) == 1
    made(teacher, tmp_path / "student", keep_layers=(0, 3))


def test_damaged_or_missing_weights_leave_no_files(tmp_path):
    teacher = saved(teacher_of("llama"), tmp_path / "teacher")
    file = tmp_path / "teacher" / "model.safetensors"
    whole = file.read_bytes()
    plan = plan_student(teacher, StudentRequest(layers=2))
    file.write_bytes(whole[:-100])
    with pytest.raises(RefusedInputError):
        make_student(plan, teacher, tmp_path / "student")
    file.unlink()
    with pytest.raises(RefusedInputError, match="no safetensors weights"):
        make_student(plan, teacher, tmp_path / "student")
    assert [path.name for path in tmp_path.iterdir()] == ["teacher"]
