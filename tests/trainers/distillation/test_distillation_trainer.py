"""`DistillationTrainer` in one process: losses and gradients against fp64, tasks, heads, self-teachers, errors."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from distilling import VOCAB, collate, reference_loss, rows, tiny, training_arguments
from shardwright.ds_configs.quantization.scheme import changed, scheme_named
from shardwright.ds_configs.specs.errors import ShardwrightError, UsageError
from shardwright.trainers.distillation import (
    DistillationConfig,
    DistillationTrainer,
    HiddenStateTerm,
    SelfTeacher,
)
from shardwright.trainers.distillation.teacher import split_batch, with_decoder_inputs
from shardwright.trainers.exact import count_as_one_process
from shardwright.trainers.qat.callback import QATCallback
from transformers import Trainer
from transformers.utils import ModelOutput

pytestmark = pytest.mark.slow

ALPHA, TEMPERATURE = 0.6, 2.0


def trainer_of(
    directory: Path, student: Any, teacher: Any, samples: Any, config: DistillationConfig | None, **settings: Any
) -> DistillationTrainer:
    own = {
        name: settings.pop(name) for name in ("callbacks", "compute_metrics", "processing_class") if name in settings
    }
    return DistillationTrainer(
        model=student,
        args=training_arguments(directory, **settings),
        teacher=teacher,
        distillation=config,
        train_dataset=samples,
        eval_dataset=samples,
        data_collator=collate,
        **own,
    )


def trained(*arguments: Any, **settings: Any) -> DistillationTrainer:
    trainer = trainer_of(*arguments, **settings)
    trainer.train()
    return trainer


def losses_of(trainer: DistillationTrainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def gradients(before: dict[str, torch.Tensor], model: Any) -> dict[str, torch.Tensor]:
    """One step of plain SGD with rate 1 moved every weight by its negative gradient."""
    return {name: before[name] - value.detach().double() for name, value in model.named_parameters()}


CAUSAL = ("llama", "gemma2", "granite", "cohere", "gpt2")


@pytest.mark.parametrize(
    ("kind", "implementation"),
    [
        *((kind, "fused") for kind in (*CAUSAL, "bert_mlm")),
        *((kind, "plain") for kind in ("llama", "cohere", "bert_sequences")),
        ("bert_tokens", "auto"),
    ],
)
def test_step_equals_reference_gradient(kind: str, implementation: Any, tmp_path: Path) -> None:
    # Dropout would draw other numbers for another order of the samples.
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} if kind == "gpt2" else {}
    off |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0} if kind.startswith("bert") else {}
    student, teacher = tiny(kind, **off), tiny(kind, hidden=48, layers=3, seed=1, **off)
    samples = rows(kind, 12)
    exact = copy.deepcopy(student).double()
    expected = reference_loss(
        exact, copy.deepcopy(teacher).double(), samples, alpha=ALPHA, temperature=TEMPERATURE, causal=kind in CAUSAL
    )
    expected.backward()
    expected = expected.detach()
    before = {name: value.detach().double().clone() for name, value in student.named_parameters()}
    config = DistillationConfig(alpha=ALPHA, temperature=TEMPERATURE, implementation=implementation)
    trainer = trained(tmp_path, student, teacher, samples, config, gradient_accumulation_steps=3)
    assert trainer.state.log_history[0]["loss"] == pytest.approx(float(expected), rel=1e-5)
    found = gradients(before, student)
    largest = max(float(value.grad.abs().max()) for value in exact.parameters() if value.grad is not None)
    for name, value in exact.named_parameters():
        if value.grad is not None:
            assert float((found[name] - value.grad).abs().max()) < 3e-6 * largest + 1e-7, name


def test_encoder_decoder_loss_equals_reference(tmp_path: Path) -> None:
    student, teacher = tiny("t5", dropout_rate=0.0), tiny("t5", hidden=48, seed=1, dropout_rate=0.0)
    samples = rows("t5", 8)
    labels = collate(samples)["labels"]
    batch = {name: value for name, value in collate(samples).items() if name != "labels"}
    with torch.no_grad():
        decoder = student.prepare_decoder_input_ids_from_labels(labels=labels)
        q, p = (
            torch.log_softmax(m(**batch, decoder_input_ids=decoder).logits.double(), -1) for m in (student, teacher)
        )
    kept = labels != -100
    expected = (p.exp() * (p - q)).sum(-1)[kept].mean()
    losses = []
    for implementation in ("fused", "plain"):
        config = DistillationConfig(alpha=1.0, implementation=implementation)  # type: ignore[arg-type]
        arguments = {"per_device_train_batch_size": 8}
        trainer = trained(tmp_path, copy.deepcopy(student), teacher, samples, config, **arguments)
        losses.append(trainer.state.log_history[0]["loss"])
    assert losses == pytest.approx([float(expected)] * 2, rel=1e-5)


@pytest.mark.parametrize(("kind", "taught_by"), [("llama", "falcon_h1"), ("recurrent_gemma", "llama")])
def test_unknown_logit_shapes_use_the_plain_loss(kind: str, taught_by: str, tmp_path: Path) -> None:
    """Scales and soft-caps with unknown names are detected in the first step, in student and teacher."""
    losses = {}
    for implementation in ("auto", "plain"):
        config = DistillationConfig(alpha=ALPHA, temperature=TEMPERATURE, implementation=implementation)
        changes = {"max_steps": 2, "num_train_epochs": 2}
        trainer = trained(tmp_path, tiny(kind, seed=1), tiny(taught_by, seed=2), rows("llama", 4), config, **changes)
        losses[implementation] = losses_of(trainer)
    assert losses["auto"] == pytest.approx(losses["plain"], abs=1e-6)
    config = DistillationConfig(alpha=ALPHA, implementation="fused")
    with pytest.raises(UsageError, match=r"where .* was expected"):
        trained(tmp_path, tiny(kind, seed=1), tiny(taught_by, seed=2), rows("llama", 4), config)


@pytest.mark.parametrize("head", ["followed by a bias", "quantized"])
def test_losses_of_other_heads_equal_the_plain_loss(head: str, tmp_path: Path) -> None:
    """A bias is added to the fused loss; the fused loss would replace a quantized head by an unquantized one."""
    losses = []
    for implementation in ("auto" if head == "quantized" else "fused", "plain"):
        models, callbacks = [tiny("llama" if head == "quantized" else "bart", seed=seed) for seed in (1, 2)], []
        if head == "quantized":
            callbacks = [QATCallback(changed(scheme_named("W4A16"), group_size=32, ignore=()))]
        else:
            for model in models:
                model.final_logits_bias.normal_(generator=torch.Generator().manual_seed(7))
        config = DistillationConfig(alpha=ALPHA, temperature=TEMPERATURE, implementation=implementation)  # type: ignore[arg-type]
        losses.append(losses_of(trained(tmp_path, *models, rows("llama", 8), config, max_steps=2, callbacks=callbacks)))
        assert all("lm_head" in callback.attachment.modules for callback in callbacks)
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


def test_student_as_teacher_is_rejected(tmp_path: Path) -> None:
    student = tiny("llama")
    with pytest.raises(UsageError, match=r"shares .* tensors with the student"):
        trained(tmp_path, student, student, rows("llama", 4), DistillationConfig(alpha=0.5))
    assert all(parameter.requires_grad for parameter in student.parameters())


def test_alpha_zero_equals_the_stock_trainer(tmp_path: Path) -> None:
    samples = rows("llama", 12)
    arguments = training_arguments(tmp_path, max_steps=3, learning_rate=0.1, gradient_accumulation_steps=2)
    plain = Trainer(model=tiny("llama"), args=arguments, train_dataset=samples, data_collator=collate)
    plain.train()
    config = DistillationConfig(alpha=0.0)
    ours = trained(
        tmp_path, tiny("llama"), None, samples, config, max_steps=3, learning_rate=0.1, gradient_accumulation_steps=2
    )
    for own, other in zip(ours.state.log_history, plain.state.log_history, strict=True):
        assert own.get("loss") == other.get("loss")
    for own, other in zip(ours.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(own, other)


def test_telemetry_matches_reference(tmp_path: Path) -> None:
    student, teacher, samples = tiny("llama"), tiny("llama", hidden=48, seed=1), rows("llama", 8)
    config = DistillationConfig(alpha=0.5, temperature=3.0)
    trainer = trainer_of(tmp_path, student, teacher, samples, config, per_device_eval_batch_size=3)
    metrics = trainer.evaluate()
    found = []
    with torch.no_grad():
        for sample in samples:
            ids, labels = torch.tensor([sample["input_ids"]]), torch.tensor(sample["labels"][1:])
            kept = labels != -100
            p, q = (torch.softmax(m(ids).logits[0, :-1].double(), -1)[kept] for m in (teacher, student))
            labels = labels[kept][:, None]
            values = [(p * (p / q).log()).sum(), (p.argmax(-1) == q.argmax(-1)).sum(), torch.minimum(p, q).sum()]
            values += [-q.gather(1, labels).log().sum(), -p.gather(1, labels).log().sum(), kept.sum()]
            found.append(torch.stack([value.double() for value in values]))
    sums = torch.stack(found).sum(0)
    names = ("kl_per_token", "top1_agreement", "speculative_acceptance", "student_cross_entropy")
    expected = zip((*names, "teacher_cross_entropy"), (sums[:5] / sums[5]).tolist(), strict=True)
    for name, value in expected:
        assert metrics[f"eval_{name}"] == pytest.approx(value, rel=1e-5), name
    trainer.train()
    (logged,) = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert set(logged) >= {*names, "teacher_cross_entropy", "alpha", "temperature", "loss"}


def test_mixture_keeps_its_load_balancing_loss(tmp_path: Path) -> None:
    """With α = 1 and an equal teacher only the auxiliary loss remains, averaged over micro-batches."""
    student = tiny("mixtral", output_router_logits=True, router_aux_loss_coef=0.5)
    teacher, samples = copy.deepcopy(student), rows("llama", 4)
    with torch.no_grad():
        batches = [collate(samples[:2]), collate(samples[2:])]
        expected = sum(float(student(**{**batch, "labels": None}).aux_loss) for batch in batches) / 2 * 0.5
    trainer = trained(
        tmp_path,
        student,
        teacher,
        samples,
        DistillationConfig(alpha=1.0),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        train_sampling_strategy="sequential",
    )
    assert trainer.state.log_history[0]["loss"] == pytest.approx(expected, rel=1e-4)


def test_early_exit_learns_from_the_output_and_gives_no_logits(tmp_path: Path) -> None:
    config = DistillationConfig(alpha=0.5, self_teacher=SelfTeacher(exit_layer=1))
    trainer = trained(
        tmp_path, tiny("llama", layers=3), None, rows("llama", 4), config, max_steps=12, learning_rate=0.2
    )
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert logs[-1]["kl_per_token"] < 0.7 * logs[0]["kl_per_token"]
    with pytest.raises(UsageError, match=r"compute_loss cannot return logits.*omit return_outputs=True"):
        trainer.compute_loss(trainer.model, collate(rows("llama", 2)), return_outputs=True)


def test_batches_are_split_as_models_read_them() -> None:
    model, labels = tiny("t5"), torch.tensor([[5, 6, -100], [7, -100, -100]])
    without_method = SimpleNamespace(config=model.config)
    made = with_decoder_inputs(without_method, {"labels": labels})["decoder_input_ids"]  # type: ignore[arg-type]
    assert torch.equal(made, model.prepare_decoder_input_ids_from_labels(labels=labels))
    ids = torch.tensor([[1, 5, 6], [1, 7, 0]])
    shifted = split_batch({"input_ids": ids, "shift_labels": labels}, shifts=True)
    assert torch.equal(shifted.labels, labels), "a sequence-parallel data loader has shifted them"
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    classes = split_batch({"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([2, 0])}, shifts=False)
    assert classes.position_weights().tolist() == [pytest.approx([1 / 3] * 3), [0.5, 0.5, 0.0]]


def test_a_loss_that_an_engine_rounds_is_reported_in_fp32(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, tiny("llama"), tiny("llama", seed=1), rows("llama", 4), None)
    batch, exact = collate(rows("llama", 4)), {}

    class Rounding(torch.nn.Module):
        def forward(self, **inputs: Any) -> Any:
            exact["loss"] = float((outputs := trainer.model(**inputs))["loss"].detach())
            return {name: value.bfloat16() for name, value in outputs.items()}

    assert float(trainer.compute_loss(Rounding(), batch).detach()) == exact["loss"]
    assert exact["loss"] != float(torch.tensor(exact["loss"]).bfloat16())


def test_projectors_are_restored_but_not_exported(tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    config = DistillationConfig(alpha=0.5, hidden_states=HiddenStateTerm(weight=0.5))

    def run(resume: str | None, where: Path) -> DistillationTrainer:
        saving = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
        models = tiny("llama"), tiny("llama", hidden=48, layers=3, seed=1)
        settings = saving | {"learning_rate": 0.05, "optim": "adamw_torch"}
        trainer = trainer_of(where, *models, rows("llama", 8), config, **settings)
        trainer.train(resume_from_checkpoint=resume)
        assert trainer.state.global_step == 4
        return trainer

    whole = run(None, tmp_path / "whole")
    resumed = run(str(tmp_path / "whole" / "checkpoint-2"), tmp_path / "resumed")
    for own, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.allclose(own, other, atol=1e-7)
    whole.save_model(str(tmp_path / "final"))
    saved = load_file(tmp_path / "final" / "model.safetensors")
    assert not [name for name in saved if "projector" in name]
    _, report = AutoModelForCausalLM.from_pretrained(tmp_path / "final", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert {path.name for path in (tmp_path / "final").iterdir()} & {"distillation_projectors.safetensors"} == set()


class TestBadInput:
    def test_config_reports_all_errors(self) -> None:
        with pytest.raises(UsageError) as caught:
            DistillationConfig(alpha=1.5, temperature=0.0, divergence="kl", mixture=2.0)  # type: ignore[arg-type]
        assert [error.where for error in caught.value.errors] == ["alpha", "temperature", "divergence", "mixture"]

    def test_all_errors_of_arguments_are_reported_together(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError) as caught:
            DistillationTrainer(
                model=tiny("llama"),
                args=training_arguments(tmp_path, label_smoothing_factor=0.1),
                compute_loss_func=lambda outputs, labels, **named: outputs.logits.sum(),
            )
        errors = [str(error) for error in caught.value.errors]
        assert len(errors) == 3 and errors[0].startswith("label_smoothing_factor = 0.1")
        assert errors[1].startswith("compute_loss_func: would not be called") and "need a teacher" in errors[2]

    def test_nan_teacher_logits_are_rejected(self, tmp_path: Path) -> None:
        teacher = tiny("llama", seed=1)
        teacher.lm_head.weight.data[3, 3] = float("nan")
        with pytest.raises(ShardwrightError, match="teacher: NaN or infinite logits at"):
            trained(tmp_path, tiny("llama"), teacher, rows("llama", 4), None)

    def test_batches_without_labels_are_rejected(self, tmp_path: Path) -> None:
        masked = [{**row, "labels": [-100] * len(row["labels"])} for row in rows("llama", 4)]
        unlabelled = [{"input_ids": row["input_ids"]} for row in rows("llama", 4)]
        for samples, rule in (
            (masked, "every label of the first batch is masked"),
            (unlabelled, "labels: batches need labels"),
        ):
            with pytest.raises(UsageError, match=rule):
                trained(tmp_path, tiny("llama"), tiny("llama", seed=1), samples, None)


@pytest.mark.parametrize(("implementation", "loss_only"), [("auto", False), ("auto", True), ("fused", False)])
def test_subclass_reads_logits_in_training_and_evaluation(implementation: Any, loss_only: bool, tmp_path: Path) -> None:
    shapes = []

    class OwnTerm(DistillationTrainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
            assert isinstance(outputs, ModelOutput)
            shapes.append((model.training, outputs.logits.shape == (*inputs["labels"].shape, VOCAB)))
            return (loss, outputs) if return_outputs else loss

    trainer = OwnTerm(
        model=tiny("llama"),
        args=training_arguments(tmp_path, prediction_loss_only=loss_only),
        teacher=tiny("llama", seed=1),
        distillation=DistillationConfig(alpha=ALPHA, implementation=implementation),
        train_dataset=rows("llama", 4),
        eval_dataset=rows("llama", 4),
        data_collator=collate,
    )
    trainer.train()
    trainer.evaluate()
    assert set(shapes) == {(True, True), (False, True)}


def test_a_subclass_logs_each_batch_once(tmp_path: Path) -> None:
    """The first batch is computed once more, to measure what kind of loss a subclass has."""

    class OwnLoss(DistillationTrainer):
        def compute_loss(self, *arguments: Any, **keywords: Any) -> Any:
            return super().compute_loss(*arguments, **keywords)

    logged = []
    for kind in (DistillationTrainer, OwnLoss):
        trainer = kind(
            model=tiny("llama"),
            args=training_arguments(tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=2),
            teacher=tiny("llama", seed=1),
            train_dataset=rows("llama", 4),
            data_collator=collate,
        )
        count_as_one_process(trainer, weighs_own_losses=True)
        trainer.train()
        logged.append([entry["kl_per_token"] for entry in trainer.state.log_history if "kl_per_token" in entry])
    assert logged[0] and logged[1] == pytest.approx(logged[0], rel=1e-6)
