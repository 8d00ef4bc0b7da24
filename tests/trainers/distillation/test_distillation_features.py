"""Feature terms against fp64 loops, layer maps, and capture of attention on real models."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from distilling import collate, rows, tiny, training_arguments
from hypothesis import given
from hypothesis import strategies as st
from shardwright.ds_configs.specs.errors import UsageError
from shardwright.plugins.transformers.attention import captured_attention, hidden_states_of
from shardwright.trainers.distillation import feature_matching
from shardwright.trainers.distillation.feature_matching import (
    AttentionTerm,
    FeatureMatching,
    HiddenStateTerm,
    hidden_state_sum,
    relation_sum,
    uniform_pairs,
    visibility,
)
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_utils import AttentionInterface

DEPTHS = st.integers(1, 40)
SAMPLES, POSITIONS = 2, 7


def drawn(*shape: int, seed: int, spread: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * spread


def weights() -> torch.Tensor:
    """Return weights with zeros, for one position of all samples and for single positions."""
    made = torch.rand(SAMPLES, POSITIONS, generator=torch.Generator().manual_seed(9)) + 0.5
    made[:, 3] = 0.0
    made[0, 5:] = 0.0
    return made


def agrees(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    scale = float(expected.abs().max())
    return bool((found.double() - expected).abs().max() <= tolerance * scale)


@given(DEPTHS, DEPTHS)
def test_maps_are_monotonic_and_keep_relative_depth(student: int, teacher: int) -> None:
    pairs = uniform_pairs(student, teacher)
    assert [layer for layer, _ in pairs] == list(range(student + 1))
    numbers = [number for _, number in pairs]
    assert numbers == sorted(numbers)
    assert (numbers[0], numbers[-1]) == (0, teacher)
    for layer, number in enumerate(numbers):
        assert abs(number - layer * teacher / student) <= 0.5


def test_hidden_states_match_the_reference() -> None:
    own, taught, w = drawn(6, 10, seed=1), drawn(6, 10, seed=2, spread=30.0), torch.rand(6) + 0.1
    exact, known = own.double().requires_grad_(), taught.double()
    expected = sum(weight * ((s - t) ** 2).sum() / (t**2).sum() for s, t, weight in zip(exact, known, w, strict=True))
    expected.backward()
    own.requires_grad_()
    found = hidden_state_sum(own, taught, w)
    found.backward()
    assert found.dtype == torch.float32
    assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    assert agrees(own.grad, exact.grad, 1e-5)
    cast = hidden_state_sum(own.bfloat16(), taught.bfloat16(), w)
    assert cast.dtype == torch.float32
    assert float(cast.detach()) == pytest.approx(float(expected.detach()), rel=2e-2)


@pytest.mark.parametrize(("own", "taught"), [(32, 48), (48, 32)])
def test_projectors_keep_the_size_of_a_vector(own: int, taught: int) -> None:
    vectors = drawn(2000, own, seed=1)
    projected = feature_matching.projectors(own, taught, 1)[0](vectors).detach()
    assert float(projected.square().mean().sqrt()) == pytest.approx(float(vectors.square().mean().sqrt()), rel=0.05)


CASES: dict[str, tuple[dict[str, Any], bool, int | None]] = {
    "causal": ({}, True, None),
    "bidirectional": ({}, False, None),
    "right-padded": ({"attention_mask": torch.tensor([[1] * 7, [1] * 4 + [0] * 3])}, True, None),
    "left-padded-encoder": ({"attention_mask": torch.tensor([[1] * 7, [0] * 3 + [1] * 4])}, False, None),
    "packed": ({"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2], [0, 1, 0, 1, 2, 3, 4]])}, True, None),
    "window": ({}, True, 3),
}


def seen(inputs: dict[str, Any], causal: bool, window: int | None, sample: int, row: int) -> list[int]:
    documents, ids = [0], inputs.get("position_ids")
    for position in range(1, POSITIONS):
        begins = ids is not None and int(ids[sample, position]) == 0
        documents.append(documents[-1] + begins)
    mask = inputs.get("attention_mask")
    return [
        key
        for key in range(POSITIONS)
        if (key <= row or not causal)
        and (window is None or abs(row - key) < window)
        and (mask is None or int(mask[sample, key]))
        and documents[key] == documents[row]
    ]


def relation_reference(own: torch.Tensor, taught: torch.Tensor, case: str, heads: int) -> Any:
    inputs, causal, window = CASES[case]
    w, total = weights().double(), torch.zeros((), dtype=torch.float64)
    mask = inputs.get("attention_mask", torch.ones(SAMPLES, POSITIONS))
    for sample in range(SAMPLES):
        joined = [torch.cat(list(tensor[sample].double()), dim=-1) for tensor in (own, taught)]
        for row in range(POSITIONS):
            keys = seen(inputs, causal, window, sample, row)
            for head in range(heads if keys and mask[sample, row] else 0):
                relations = []
                for vectors in joined:
                    width = vectors.shape[1] // heads
                    part = vectors[:, head * width : (head + 1) * width]
                    relations.append(torch.softmax(part[keys] @ part[row] / width**0.5, dim=0))
                learned, known = relations
                total = total + w[sample, row] / heads * (known * (known / learned).log()).sum()
    return total


def masked_weights(case: str) -> torch.Tensor:
    mask = CASES[case][0].get("attention_mask")
    return weights() if mask is None else weights() * mask


@pytest.mark.parametrize("case", CASES)
def test_relations_match_the_reference(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The student has 2 key heads of width 6, the teacher 4 heads of width 9."""
    monkeypatch.setattr(feature_matching, "BLOCK_ELEMENTS", 100)
    own, taught = drawn(SAMPLES, 2, POSITIONS, 6, seed=1), drawn(SAMPLES, 4, POSITIONS, 9, seed=2)
    inputs, causal, window = CASES[case]
    exact = own.double().requires_grad_()
    expected = relation_reference(exact, taught, case, 4)
    expected.backward()
    own.requires_grad_()
    visible = visibility(inputs, POSITIONS, causal=causal, window=window)
    found = relation_sum(own, taught, masked_weights(case), visible)
    found.backward()
    assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    assert agrees(own.grad, exact.grad, 1e-5)


class LargestTensor(TorchDispatchMode):
    """Records the elements of the largest tensor that any operator returns."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        made = function(*arguments, **(keywords or {}))
        sizes = [tensor.numel() for tensor in torch.utils._pytree.tree_leaves(made) if torch.is_tensor(tensor)]
        self.elements = max([self.elements, *sizes])
        return made


def test_no_tensor_over_all_pairs_of_positions_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    heads, size, rows_of_a_block = 2, 96, 8
    monkeypatch.setattr(feature_matching, "BLOCK_ELEMENTS", heads * size * rows_of_a_block)
    learned, taught = drawn(1, heads, size, 8, seed=1).requires_grad_(), drawn(1, heads, size, 8, seed=2)
    visible = visibility({}, size, causal=True)
    with LargestTensor() as largest:
        relation_sum(learned, taught, torch.ones(1, size), visible).backward()
    assert learned.grad is not None
    assert largest.elements == heads * size * rows_of_a_block


def model(kind: str, **changes: Any) -> Any:
    if kind == "qwen3":
        from transformers import Qwen3Config, Qwen3ForCausalLM

        sizes = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 1}
        torch.manual_seed(0)
        return Qwen3ForCausalLM(Qwen3Config(**sizes, **heads)).eval()
    return tiny(kind, **changes)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2", "bert_mlm", "gemma2"])
def test_capture_changes_neither_logits_nor_kernel(kind: str) -> None:
    """Attention computed from the captured tensors equals the attention that eager returns."""

    changes = {"sliding_window": 4} if kind == "gemma2" else {}
    captured_model, original = model(kind, **changes), AttentionInterface.get_interface
    ids = collate(rows("llama", 3))
    inputs = {"input_ids": ids["input_ids"], "attention_mask": ids["attention_mask"]}
    plain = captured_model(**inputs).logits
    with captured_attention(captured_model, [2]) as captured:
        assert torch.equal(captured_model(**inputs).logits, plain)
    # Gemma-2 has no SDPA since transformers 5.21.
    assert captured_model.config._attn_implementation == ("sdpa" if captured_model._supports_sdpa else "eager")
    assert AttentionInterface.get_interface is original
    assert list(captured) == [2]
    captured_model.set_attn_implementation("eager")
    with captured_attention(captured_model, [1]) as first:
        outputs = captured_model(**inputs, output_attentions=True)
    for number, own in ((1, first[1]), (2, captured[2])):
        query, key = own.tensor("query"), own.tensor("key").repeat_interleave(4 // own.tensor("key").shape[1], dim=1)
        scores = query @ key.transpose(2, 3)
        scores *= getattr(captured_model.config, "query_pre_attn_scalar", query.shape[-1]) ** -0.5
        cap = getattr(captured_model.config, "attn_logit_softcapping", None)
        if cap is not None:
            scores = torch.tanh(scores / cap) * cap
        size = scores.shape[-1]
        view = visibility(inputs, size, causal=own.causal, window=own.window)(torch.arange(size))
        expected = torch.softmax(scores.masked_fill(~view[:, None], -1e9), dim=-1)
        real = inputs["attention_mask"].bool()
        assert torch.allclose(
            expected.transpose(1, 2)[real], outputs.attentions[number - 1].transpose(1, 2)[real], atol=2e-5
        )


def test_capture_is_undone_after_errors() -> None:
    from transformers import MambaConfig, MambaForCausalLM

    original, student = AttentionInterface.get_interface, tiny("llama")
    with pytest.raises(RuntimeError, match="broken"), captured_attention(student, [1]):
        raise RuntimeError("broken")
    assert AttentionInterface.get_interface is original
    ids = torch.ones(1, 3, dtype=torch.long)
    rule = r"= \[7\]: .*pair layers that have attention: 1, 2"
    with pytest.raises(UsageError, match=rule), captured_attention(student, [1, 7]):
        student(ids)
    mamba = MambaForCausalLM(
        MambaConfig(vocab_size=16, hidden_size=8, state_size=2, num_hidden_layers=1, pad_token_id=0, eos_token_id=0)
    )
    rule = r"attention of MambaForCausalLM: .*; match hidden states instead"
    with pytest.raises(UsageError, match=rule), captured_attention(mamba, [1]):
        mamba(ids)
    assert len(hidden_states_of(mamba(ids, output_hidden_states=True))) == 2
    with pytest.raises(UsageError, match="returned no hidden states"):
        hidden_states_of(mamba(ids))
    student.train()
    student.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    student.enable_input_require_grads()
    with pytest.raises(UsageError, match="use_reentrant"), captured_attention(student, [1]):
        student(ids)


def terms(student: Any, teacher: Any, matching: FeatureMatching, inputs: dict[str, Any], w: torch.Tensor) -> Any:
    """Return the sum of both terms, as the trainer computes it.

    Transformers 5.17.0 tells packed documents apart only where no cache is kept (masking_utils.py).
    """
    asked = {**inputs, "output_hidden_states": True, "use_cache": False}
    if "bert" in type(teacher).__name__.lower():
        asked.pop("use_cache")
    with matching.capture(teacher, is_student=False) as taught, torch.no_grad():
        known = teacher(**asked)
    with matching.capture(student, is_student=True) as own:
        learned = student(**asked)
    total = torch.zeros(())
    if matching.hidden_term is not None:
        total = total + matching.hidden_sum(hidden_states_of(learned), hidden_states_of(known), w)
    if matching.attention_term is not None:
        assert own is not None
        assert taught is not None
        total = total + matching.attention_sum(own, taught, w, inputs)
    return total


def pair(kind: str = "llama") -> tuple[Any, Any]:
    return tiny(kind), tiny(kind, hidden=48, layers=3, seed=1, num_attention_heads=6, num_key_value_heads=3)


def test_matched_layers_are_averaged_over_common_visible_positions() -> None:
    student, teacher = tiny("gemma2", sliding_window=4), pair()[1]
    hidden, attention = HiddenStateTerm(layers=((1, 1), (2, 3))), AttentionTerm(layers="uniform")
    matching = FeatureMatching(student.config, teacher.config, hidden, attention)
    batch = collate(rows("llama", 4))
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    w = batch["attention_mask"].float()
    with (
        torch.no_grad(),
        matching.capture(teacher, is_student=False) as taught,
        matching.capture(student, is_student=True) as own,
    ):
        known, learned = (model(**inputs, output_hidden_states=True).hidden_states for model in (teacher, student))
        assert own is not None
        assert taught is not None
        size = w.shape[1]
        views = {number: visibility(inputs, size, causal=True, window=window) for number, window in ((1, 4), (2, None))}
        distances = [
            relation_sum(own[a].tensor(name), taught[b].tensor(name), w, views[a])
            for a, b in ((1, 2), (2, 3))
            for name in ("query", "key", "value")
        ]
        found = matching.attention_sum(own, taught, w, inputs)
        assert float(found) == pytest.approx(float(sum(distances)) / 6, rel=1e-6)
        projected = [matching.projectors[index](learned[layer]) for index, layer in enumerate((1, 2))]
        compared = zip(projected, (known[1], known[3]), strict=True)
        sums = [hidden_state_sum(a.flatten(0, 1), b.flatten(0, 1), w.flatten()) for a, b in compared]
        assert float(matching.hidden_sum(learned, known, w)) == pytest.approx(float(sum(sums)) / 2, rel=1e-6)


def test_packed_documents_are_matched_separately() -> None:
    student, teacher = pair()
    matching = FeatureMatching(student.config, teacher.config, None, AttentionTerm())
    documents = [torch.tensor([sample["input_ids"]]) for sample in rows("llama", 3)]
    alone = sum(
        terms(student, teacher, matching, {"input_ids": ids}, torch.ones(ids.shape)).detach() for ids in documents
    )
    positions = torch.cat([torch.arange(ids.shape[1]) for ids in documents])[None]
    packed = {"input_ids": torch.cat(documents, dim=1), "position_ids": positions}
    together = terms(student, teacher, matching, packed, torch.ones(positions.shape))
    assert float(together.detach()) == pytest.approx(float(alone), rel=1e-5)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_gradient_checkpointing_gives_the_same_gradients(kind: str) -> None:
    off = ("resid_pdrop", "embd_pdrop", "attn_pdrop") if kind == "gpt2" else ()
    changes = dict.fromkeys(off, 0.0)
    student, teacher = tiny(kind, **changes).train(), tiny(kind, hidden=48, layers=3, seed=1, **changes)
    matching = FeatureMatching(student.config, teacher.config, HiddenStateTerm(), AttentionTerm(layers="uniform"))
    batch = collate(rows("llama", 3))
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    found = []
    for checkpointed in (False, True):
        if checkpointed:
            student.gradient_checkpointing_enable()
        student.zero_grad()
        terms(student, teacher, matching, inputs, batch["attention_mask"].float()).backward()
        found.append({name: value.grad.clone() for name, value in student.named_parameters() if value.grad is not None})
    assert found[0].keys() == found[1].keys()
    for name, gradient in found[0].items():
        assert torch.allclose(gradient, found[1][name], rtol=1e-5, atol=1e-7), name


def test_models_that_cannot_be_matched_are_rejected() -> None:
    from transformers import LlamaConfig, T5Config

    llama, t5 = LlamaConfig(num_hidden_layers=2), T5Config()
    with pytest.raises(UsageError) as caught:
        FeatureMatching(t5, t5, HiddenStateTerm(), None)
    assert [error.where for error in caught.value.errors] == ["student", "teacher"]
    with pytest.raises(UsageError) as caught:
        FeatureMatching(llama, llama, HiddenStateTerm(layers=((3, 9), (-1, 2))), AttentionTerm(layers=((0, 1),)))
    assert [str(error) for error in caught.value.errors] == [
        "attention.layers = (0, 1): student layers are 1 to 2",
        "hidden_states.layers = (3, 9): student layers are 0 to 2",
        "hidden_states.layers = (3, 9): teacher layers are 0 to 2",
        "hidden_states.layers = (-1, 2): student layers are 0 to 2",
    ]
    matching = FeatureMatching(llama, llama, HiddenStateTerm(), None)
    states = [torch.zeros(1, 4, 8)] * 3
    with pytest.raises(UsageError, match="hidden states of the teacher = 2: its forward must return 3"):
        matching.hidden_sum(states, states[:2], torch.ones(1, 4))
    with pytest.raises(UsageError, match=r"\(1, 4\) and \(1, 8\) positions; pass full sequences to both"):
        matching.hidden_sum(states, [torch.zeros(1, 8, 8)] * 3, torch.ones(1, 4))


def test_trainer_adds_feature_terms_and_saves_only_the_student(tmp_path: Path) -> None:
    """A step of SGD with rate 1 subtracts the gradient of the sums over all samples, also of several micro-batches."""
    from safetensors.torch import load_file
    from shardwright.trainers.distillation import DistillationConfig, DistillationTrainer

    student, teacher = pair()
    before = {name: value.detach().clone() for name, value in student.named_parameters()}
    config = DistillationConfig(
        alpha=0.0, hidden_states=HiddenStateTerm(weight=0.5), attention=AttentionTerm(weight=2.0)
    )
    batch = collate(rows("llama", 4))
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    w = torch.nn.functional.pad(batch["labels"][:, 1:] != -100, (0, 1)).float()
    count, reference = float(w.sum()), copy.deepcopy(student)
    hidden, attention = (
        terms(reference, teacher, FeatureMatching(student.config, teacher.config, *own), inputs, w) / count
        for own in ((config.hidden_states, None), (None, config.attention))
    )
    logits = reference(**inputs).logits[:, :-1].flatten(0, 1)
    task = torch.nn.functional.cross_entropy(logits, batch["labels"][:, 1:].flatten())
    (task + 0.5 * hidden + 2.0 * attention).backward()
    trainer = DistillationTrainer(
        model=student,
        args=training_arguments(tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=2),
        teacher=teacher,
        distillation=config,
        train_dataset=rows("llama", 4),
        data_collator=collate,
    )
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["hidden_state_distance"] == pytest.approx(float(hidden.detach()), rel=1e-5)
    assert log["attention_distance"] == pytest.approx(float(attention.detach()), rel=1e-5)
    for name, value in reference.named_parameters():
        moved = before[name] - student.get_parameter(name).detach()
        assert torch.allclose(moved, value.grad, rtol=1e-4, atol=2e-7), name
    trainer.save_model(str(tmp_path / "saved"))
    assert set(load_file(tmp_path / "saved" / "model.safetensors")) <= set(before)
