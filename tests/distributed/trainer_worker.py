"""Rank script: train all cases and write their results."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from equivalence.cases import padded
from equivalence.records import logged, training_record, write_records
from shardwright.plugins.accelerate.cpu_ranks import configure_cpu_ranks
from shardwright.plugins.transformers.training_arguments import prepare_model_directory_save, save_model_directory
from shardwright.trainers.counting.counts import count_as_one_process
from shardwright.trainers.parallel.trainer_for import parallelism_of
from trainer_cases import ADAM_EPSILON, EVALUATED, FAMILIES, TRAINERS, TrainerCase, data_of


def record(case: TrainerCase, output: Path) -> dict[str, Any]:
    directory = output / case.name

    def result(trainer: Any) -> dict[str, Any]:
        if case.options:
            save_model_directory(trainer, str(directory / "trained"))
        return {
            "losses": logged(trainer),
            "grad_norms": list(map(float, logged(trainer, "grad_norm"))),
            "eval_losses": logged(trainer, "eval_loss"),
            "tokens": trainer.state.num_input_tokens_seen if "tokens_counted" in case.options else 0,
            "train_loss": trainer.state.log_history[-1].get("train_loss"),
        }

    return training_record(lambda: make_trainer(case, output / "models", directory), result)


def make_trainer(case: TrainerCase, models: Path, directory: Path) -> Any:
    from datasets import Dataset
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
        Trainer,
        TrainingArguments,
        set_seed,
    )

    described = TRAINERS[case.trainer]
    module = importlib.import_module(described.module)
    engine = case.strategy.engine
    overrides = {"use_cpu": True} if engine == "single" else configure_cpu_ranks(engine)
    configuration = (
        getattr(module, f"{described.kind}Config") if described.module.startswith("trl") else TrainingArguments
    )
    arguments = configuration(**case.arguments(directory) | {**described.config, **overrides})
    set_seed(0)
    place = models / case.family
    if described.rewards:
        model = AutoModelForSequenceClassification.from_pretrained(place / "model", dtype="float32", num_labels=1)
    else:
        model = AutoModelForCausalLM.from_pretrained(place / "model", dtype="float32")
    settings: dict[str, Any] = {"model": model, "args": arguments}
    settings["train_dataset"] = Dataset.load_from_disk(str(data_of(models, case.trainer, case.rows)))
    if described.module.startswith("trl"):
        settings["processing_class"] = AutoTokenizer.from_pretrained(place / "model")
    else:
        settings["train_dataset"].set_format("torch")
        settings["data_collator"] = padded
    if described.teacher:
        settings[described.teacher] = AutoModelForCausalLM.from_pretrained(place / "teacher", dtype="float32")
    if described.distillation is not None:
        settings["distillation"] = module.DistillationConfig(**described.distillation)
    if set(case.options) & set(EVALUATED):
        settings["eval_dataset"] = Dataset.load_from_disk(str(data_of(models, case.trainer, case.rows, held_out=True)))
        if not described.module.startswith("trl"):
            settings["eval_dataset"].set_format("torch")
    settings |= _further_settings(case, model)
    prepare_model_directory_save(arguments)
    kind = getattr(module, f"{described.kind}Trainer")
    if engine == "single":
        trainer = (Trainer if case.trainer == "pipeline" else kind)(**settings)
        if set(case.options) & set(EVALUATED) and FAMILIES[case.family].is_mixture:
            # An evaluation leaves the balance loss out.
            count_as_one_process(trainer)
        return trainer
    stock = described.module == "transformers"
    return parallelism_of(case.strategy).make_trainer(trainer_class=None if stock else kind, **settings)


def _further_settings(case: TrainerCase, model: Any) -> dict[str, Any]:
    import torch

    layers = next(one for one in model.modules() if isinstance(one, torch.nn.ModuleList))
    for option in case.options:
        match option:
            case "frozen":
                layers[0].requires_grad_(False)
            case "embedding_frozen":
                model.get_input_embeddings().requires_grad_(False)
            case "lora":
                from shardwright.plugins.peft import add_lora
                from transformers import set_seed

                set_seed(4)
                return {"model": add_lora(model, rank=4, targets=None, fp32_adapters=True)}
            case "own_adamw":
                optimizer: Any = torch.optim.AdamW(_groups(model), betas=(0.8, 0.95), eps=ADAM_EPSILON)
                rates = [lambda step: 1.0 / (1 + step), lambda step: 0.5**step]
                return {"optimizers": (optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, rates))}
            case "own_sgd":
                return {"optimizers": (torch.optim.SGD(_groups(model), momentum=0.9, nesterov=True), None)}
            case "optimizer_class":
                return {"optimizer_cls_and_kwargs": (torch.optim.NAdam, {"lr": 2e-3, "eps": ADAM_EPSILON})}
    return {}


def _groups(model: Any) -> list[dict[str, Any]]:
    trained = [each for each in model.parameters() if each.requires_grad]
    # Parameters of ZeRO-3 hold nothing, and know the shape that they have elsewhere.
    sizes = {id(each): len(getattr(each, "ds_shape", each.shape)) for each in trained}
    matrices = [each for each in trained if sizes[id(each)] > 1]
    vectors = [each for each in trained if sizes[id(each)] <= 1]
    groups = [{"params": matrices, "lr": 2e-3, "weight_decay": 0.1}]
    return groups + ([{"params": vectors, "lr": 5e-3, "weight_decay": 0.0}] if vectors else [])


if __name__ == "__main__":
    write_records(TrainerCase, record)
