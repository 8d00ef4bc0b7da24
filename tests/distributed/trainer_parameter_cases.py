"""Arguments of `trainer_for` besides model, arguments and data, and the layouts that support them."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from equivalence.cases import IGNORED, MICRO_STEP_SAMPLES, Case, make_model, samples
from equivalence.combinations import ALL_LAYOUTS, collated
from equivalence.drawn_worker import one_length
from equivalence.records import write_records
from fresh_process import forget_last_run
from shardwright.ds_configs.legality.combinations import columns_of
from shardwright.ds_configs.specs.errors import ShardwrightError
from shardwright.ds_configs.specs.layout import Layout
from shardwright.plugins.accelerate.cpu_ranks import configure_cpu_ranks
from shardwright.plugins.transformers.training_arguments import byte_tokenizer, training_arguments
from shardwright.trainers.parallel.trainer_for import parallelism_of
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, StepLR
from transformers import TrainerCallback
from transformers.optimization import Adafactor

STEPS = 4
LEARNING_RATE = 0.3
"""Of the arguments: far from those of the optimizers below."""
EVALUATED = 8
WHOLE_MODELS = ("ddp", "zero0", "zero3-offload-param", "fsdp2-offload")
"""Layouts of whole models; the last two also are ZeRO-3 and FSDP2. Axes have ZeRO-1 or ZeRO-2."""


@dataclass(frozen=True, kw_only=True)
class Given:
    layout: str
    kind: str
    """A function of `GIVEN`."""
    family: str = "llama"

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.layout}"

    @property
    def strategy(self) -> Layout:
        strategy = ALL_LAYOUTS[self.layout]
        return replace(strategy, micro_batch_size=MICRO_STEP_SAMPLES // strategy.data_parallel_size)

    @property
    def columns(self) -> tuple[str, ...]:
        return columns_of(self.strategy)

    def reference(self) -> Given:
        return replace(self, layout=f"single-{self.family}", kind=self.kind.removesuffix("_unforced"))

    def arguments(self, directory: Any) -> dict[str, Any]:
        arguments = Case(layout=self.layout, strategy=self.strategy, optimizer="adamw_torch").training_arguments(
            directory
        )
        arguments |= {"max_steps": STEPS, "learning_rate": LEARNING_RATE, "per_device_eval_batch_size": 2}
        if self.layout == "fsdp2-offload":
            arguments["fsdp_config"] |= {"offload_params": True}
        if self.kind.endswith("unforced"):
            arguments["deepspeed"]["zero_force_ds_cpu_optimizer"] = False
        return arguments


def _groups(model: Any) -> list[dict[str, Any]]:
    matrices = [each for each in model.parameters() if each.dim() > 1]
    vectors = [each for each in model.parameters() if each.dim() <= 1]
    return [{"params": matrices, "lr": 2e-3, "weight_decay": 0.1}, {"params": vectors, "lr": 5e-3, "weight_decay": 0.0}]


def _adamw(model: Any) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(_groups(model), betas=(0.8, 0.95), eps=1e-6)
    rates = [lambda step: 1.0 / (1 + step), lambda step: 0.5**step]
    return {"optimizers": (optimizer, LambdaLR(optimizer, rates))}


def _sgd(model: Any) -> dict[str, Any]:
    optimizer = torch.optim.SGD(_groups(model), momentum=0.9, nesterov=True)
    return {"optimizers": (optimizer, OneCycleLR(optimizer, max_lr=[0.05, 0.1], total_steps=STEPS + 1))}


def _adamax(model: Any) -> dict[str, Any]:
    optimizer = torch.optim.Adamax(model.parameters(), lr=2e-3, eps=1e-6)
    return {"optimizers": (optimizer, StepLR(optimizer, 2, gamma=0.1))}


def _class(kind: type, **options: Any) -> Callable[[Any], dict[str, Any]]:
    return lambda model: {"optimizer_cls_and_kwargs": (kind, {"lr": 2e-3, "eps": 1e-6, **options})}


GIVEN: dict[str, Callable[[Any], dict[str, Any]]] = {
    "adamw": _adamw,
    "functions": lambda model: {
        **_adamw(model),
        "compute_loss_func": cubed_loss,
        "compute_metrics": right_tokens,
        "preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1),
    },
    "sgd": _sgd,
    "sgd_unforced": _sgd,
    # The Trainer makes the scheduler.
    "nadam": lambda model: {"optimizers": (torch.optim.NAdam(_groups(model), eps=1e-6), None)},
    "adamax": _adamax,
    "resumed": _adamax,
    "class": _class(torch.optim.NAdam),
    "class_init": _class(torch.optim.NAdam),
    "class_init_adamw": _class(torch.optim.AdamW, betas=(0.7, 0.95)),
}
"""Arguments of each kind; kinds with `init` also pass `model_init`."""


VOCAB_SIZE = 288
"""Bytes, end of text, and padding to a vocabulary that two ranks divide evenly."""
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' }}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
_WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "then", "sleeps", "in")


def _words(row: int, count: int) -> str:
    return " ".join(_WORDS[(5 * row + each) % len(_WORDS)] for each in range(count))


@dataclass(frozen=True, kw_only=True)
class TrlTrainer:
    name: str
    given: Callable[[dict[str, Any]], dict[str, Any]]
    """Called with the sizes of the model."""
    row: Callable[[int], dict[str, Any]]
    module: str = "trl"
    config: dict[str, Any] = field(default_factory=dict)

    def rows(self) -> list[dict[str, Any]]:
        return [self.row(index) for index in range(STEPS * MICRO_STEP_SAMPLES)]


def _adapters(sizes: dict[str, Any]) -> dict[str, Any]:
    from peft import LoraConfig

    adapters = LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
    return {"peft_config": adapters, "formatting_func": lambda row: row["first"] + " " + row["second"]}


def _second(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda sizes: {name: make_model("llama", sizes, seed=9)}


def _pair(row: int) -> dict[str, Any]:
    chosen, rejected = _words(row + 1, 1 + row % 4), _words(row + 2, 1 + row % 3)
    return {"prompt": _words(row, 2), "chosen": " " + chosen, "rejected": " " + rejected}


def _chat(row: int) -> dict[str, Any]:
    # Of one length: GKD divides by tokens of its own rank here.
    return {"messages": [{"role": "user", "content": f"{row:05d}"}, {"role": "assistant", "content": f"{7 * row:05d}"}]}


TRL: dict[str, TrlTrainer] = {
    "sft_adapters": TrlTrainer(
        name="SFT", given=_adapters, row=lambda row: {"first": _words(row, 2), "second": _words(row + 1, 1 + row % 4)}
    ),
    "dpo_reference": TrlTrainer(name="DPO", given=_second("ref_model"), row=_pair),
    "gkd_teacher": TrlTrainer(
        name="GKD",
        module="trl.experimental.gkd",
        given=_second("teacher_model"),
        row=_chat,
        config={"lmbda": 0.0, "average_tokens_across_devices": False},
    ),
}


def _bitsandbytes(model: Any, arguments: Any) -> dict[str, Any]:
    import bitsandbytes

    return {"optimizers": (bitsandbytes.optim.AdamW8bit(model.parameters()), None)}


def _bitsandbytes_named(model: Any, arguments: Any) -> dict[str, Any]:
    arguments.optim = "adamw_8bit"
    return {}


_ADAFACTOR: dict[str, Any] = {"lr": 1e-3, "relative_step": False}
REJECTED: dict[str, Callable[[Any, Any], dict[str, Any]]] = {
    "bitsandbytes": _bitsandbytes,
    "bitsandbytes_named": _bitsandbytes_named,
    "adafactor": lambda model, _: {"optimizers": (Adafactor(model.parameters(), **_ADAFACTOR), None)},
    "adafactor_class": lambda model, _: {"optimizer_cls_and_kwargs": (Adafactor, _ADAFACTOR)},
}


def cubed_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    """Return a loss that no model has: cubes of cross-entropies over the number of labelled tokens."""
    logits = outputs.logits[:, :-1].float().flatten(0, 1)
    targets = labels[:, 1:].flatten()
    losses = torch.nn.functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none")
    items = (targets != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
    return 0.1 * (losses**3).sum() / items


def right_tokens(prediction: Any) -> dict[str, float]:
    """Return the share of labelled tokens that are predicted, and how many tokens there are."""
    labels, predicted = prediction.label_ids[:, 1:], prediction.predictions[:, :-1]
    counted = labels != IGNORED
    return {"right": float((labels == predicted)[counted].mean()), "tokens": float(counted.sum())}


def _layout_kinds() -> Iterator[tuple[str, str]]:
    yield from ((layout, "class_init") for layout in ("ddp", "zero0", "zero1", "zero2", "fsdp2"))
    yield from ((layout, "class_init_adamw") for layout in ("zero3-offload-param", "fsdp2-offload"))
    yield from ((layout, "class") for layout in ("sp2-zero1", "cp2-fsdp2", "tp2-zero1", "pp2-zero0", "ep2-zero2"))
    yield from ((layout, "functions") for layout in (*WHOLE_MODELS, "zero3", "sp2-zero1", "tp2-zero1", "ep2-zero2"))
    yield from (("cp2-fsdp2", "adamw"), ("zero2-offload", "sgd_unforced"), ("zero2", "nadam"), ("fsdp2", "adamax"))
    yield from ((layout, "sgd") for layout in ("zero0", "zero3", "fsdp2", "tp2-zero1", "ep2-zero2"))
    yield from ((layout, "resumed") for layout in ("zero3", "fsdp2", "tp2-zero1"))
    yield from ((layout, "sft_adapters") for layout in (*WHOLE_MODELS, "zero2", "sp2-zero1"))
    yield from ((layout, "dpo_reference") for layout in (*WHOLE_MODELS, "tp2-zero1", "ep2-zero2"))
    yield from ((layout, "gkd_teacher") for layout in (*WHOLE_MODELS, "tp2-zero1", "ep2-zero2"))


def _given(layout: str, kind: str) -> Given:
    return Given(layout=layout, kind=kind, family="mixtral" if layout.startswith("ep") else "llama")


CASES = [_given(layout, kind) for layout, kind in _layout_kinds()]
REJECTIONS: dict[Given, str] = {
    **{_given(layout, "bitsandbytes"): "cannot step DTensors" for layout in ("fsdp2", "cp2-fsdp2")},
    **{_given(layout, "bitsandbytes_named"): "do not support DTensors" for layout in ("fsdp2", "cp2-fsdp2")},
    **{_given(layout, "adafactor"): "reads the shape of matrices" for layout in ("zero0", "zero2", "tp2-zero1")},
    _given("zero3", "adafactor_class"): "reads the shape of matrices",
    _given("fsdp2", "adafactor_class"): "DTensors",
}
"""Rejections of unsupported arguments, with a fragment of the reason."""


class Counts(TrainerCallback):
    def __init__(self) -> None:
        self.steps = 0

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.steps += 1


def train(case: Given, directory: Path, *, resume_from: str | None = None, **more: Any) -> dict[str, Any]:
    engine = case.strategy.engine
    overrides = {"use_cpu": True} if engine == "single" else configure_cpu_ranks(engine)
    arguments = training_arguments(case.arguments(directory) | more, overrides)
    counts = Counts()
    made: dict[str, Any] = {}
    if "init" in case.kind:
        made["model_init"] = lambda: make_model(case.family, {})
        settings = GIVEN[case.kind](None)
    else:
        made["model"] = make_model(case.family, {})
        settings = GIVEN[case.kind](made["model"])
    rows = samples()
    trainer = parallelism_of(case.strategy).make_trainer(
        **made,
        args=arguments,
        train_dataset=rows[: -2 * EVALUATED],
        eval_dataset={"seen": rows[:EVALUATED], "new": rows[-EVALUATED:]},
        data_collator=one_length if case.kind == "functions" else collated,
        callbacks=[counts],
        processing_class=byte_tokenizer(VOCAB_SIZE),
        **settings,
    )
    trainer.train(resume_from_checkpoint=resume_from)
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    record: dict[str, Any] = {
        name: [float(one.get(name, 0)) for one in logged] for name in ("loss", "grad_norm", "learning_rate")
    }
    record["steps"] = counts.steps
    if "compute_metrics" in settings:
        found = trainer.evaluate()
        record["metrics"] = [found[f"eval_{part}_{name}"] for part in ("seen", "new") for name in ("right", "tokens")]
    return record


def train_trl(case: Given, directory: Path) -> dict[str, Any]:
    import importlib

    from datasets import Dataset
    from transformers import set_seed

    described = TRL[case.kind]
    module = importlib.import_module(described.module)
    engine = case.strategy.engine
    overrides = {"use_cpu": True} if engine == "single" else configure_cpu_ranks(engine)
    arguments = case.arguments(directory) | described.config | {"bf16": False, "max_length": 64, "learning_rate": 5e-3}
    if engine == "deepspeed":
        arguments["deepspeed"]["bf16"] = {"enabled": "auto"}
    config = getattr(module, f"{described.name}Config")(**arguments, **overrides)
    tokenizer = byte_tokenizer(VOCAB_SIZE)
    tokenizer.pad_token, tokenizer.chat_template = tokenizer.eos_token, CHAT_TEMPLATE
    sizes = {"vocab_size": VOCAB_SIZE, "pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    settings = described.given(sizes)
    set_seed(0)
    trainer = parallelism_of(case.strategy).make_trainer(
        model=make_model(case.family, sizes),
        args=config,
        trainer_class=getattr(module, f"{described.name}Trainer"),
        train_dataset=Dataset.from_list(described.rows()),
        processing_class=tokenizer,
        **settings,
    )
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {name: [float(one.get(name, 0)) for one in logged] for name in ("loss", "grad_norm")}


def resume(case: Given, directory: Path) -> dict[str, Any]:
    train(case, directory, save_strategy="steps", save_steps=STEPS // 2)
    forget_last_run()
    return train(case, directory, resume_from=str(directory / f"checkpoint-{STEPS // 2}"))


def reject(case: Given, directory: Path) -> dict[str, Any]:
    arguments = training_arguments(case.arguments(directory), configure_cpu_ranks(case.strategy.engine))
    model = make_model(case.family, {})
    made = REJECTED[case.kind](model, arguments)
    trainer = parallelism_of(case.strategy).make_trainer(
        model=model, args=arguments, train_dataset=samples(), data_collator=collated, **made
    )
    trainer.train()
    return {"trained": trainer.state.global_step}


def record(case: Given, output: Path) -> dict[str, Any]:
    directory = output / case.name
    if case.kind in TRL:
        work = train_trl
    elif case.kind in REJECTED:
        work = reject
    else:
        work = resume if case.kind == "resumed" and case.strategy.engine != "single" else train
    try:
        return work(case, directory)
    except ShardwrightError as error:
        return {"rejected": str(error)}
    except Exception:
        return {"error": traceback.format_exc()}


if __name__ == "__main__":
    write_records(Given, record)
