"""Trainers of Transformers, of TRL and our own on small data: what each trains on, and under which layouts."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from equivalence.cases import MICRO_STEP_SAMPLES, Case, make_model, padded
from equivalence.records import logged, training_record, write_records
from shardwright.ds_configs.specs.layout import Layout
from shardwright.plugins.accelerate import configure_cpu_ranks
from shardwright.plugins.transformers.training_arguments import prepare_model_directory_save, save_model_directory
from shardwright.trainers.exact import count_as_one_process
from shardwright.trainers.parallel.planned import parallelism_of

STEPS = 2
ADAM_EPSILON = 1e-4
"""Adam would divide gradients that cancel, such as that of the last bias in a difference of rewards, by the size of
their rounding errors."""
VOCAB_SIZE = 288
"""Bytes, end of text, and a number that two ranks divide."""
ROWS = 2 * STEPS * MICRO_STEP_SAMPLES
HELD_OUT = 7
"""Samples of an evaluation, whose last batch is incomplete."""
EVERY_LAYOUT: Mapping[str, str] = {
    **{name: name for name in ("single", "ddp", "zero0", "zero1", "zero2", "zero3", "fsdp2")},
    "sp": "sp2-zero1",
    "cp": "cp2-fsdp2",
    "tp": "tp2-zero1",
    "pp": "pp2-zero0",
    "ep": "ep2-zero2",
    "tp-dp": "tp2-dp2-zero1",
    "zero_offload": "zero3-offload-param",
    "fsdp2_offload": "fsdp2-offload",
    "sp-zero3": "sp2-zero3",
    "ep-zero1": "ep2-zero1",
}
"""Names of layouts by what the table of combinations calls them, and a few more."""
_WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "then", "sleeps", "in", "sun")


@dataclass(frozen=True, kw_only=True)
class TrainerCase:
    trainer: str
    """A key of `TRAINERS`."""
    layout: str
    """A key of `EVERY_LAYOUT`."""
    family: str = "llama"
    """A key of `FAMILIES`."""
    accumulation: int = 1
    rows: int = ROWS
    """Samples of the data set."""
    options: tuple[str, ...] = ()
    """Keys of `OPTIONS`, and of the trainer's own."""

    @property
    def name(self) -> str:
        options = "".join(f"-{option}" for option in self.options)
        return f"{self.trainer}-{self.layout}-{self.family}-x{self.accumulation}-{self.rows}{options}"

    @property
    def run(self) -> Case:
        model = FAMILIES[self.family].model_type
        return Case(layout=EVERY_LAYOUT[self.layout], accumulation=self.accumulation, model=model)

    @property
    def full_layout(self) -> Layout:
        return self.run.full_layout

    def reference(self) -> TrainerCase:
        return replace(self, layout="single")

    def arguments(self, directory: Path) -> dict[str, Any]:
        """Return keys of `TrainingArguments`, which TRL's configurations take too."""
        # Configurations of TRL train in bf16 otherwise, whose rounding hides differences.
        arguments = self.run.arguments(directory) | {"max_steps": STEPS, "max_grad_norm": 100.0, "bf16": False}
        arguments |= {"optim": "sgd", "learning_rate": 0.2, "adam_epsilon": ADAM_EPSILON}
        arguments |= {"include_num_input_tokens_seen": "no"}
        for option in self.options:
            arguments |= (OPTIONS | TRAINERS[self.trainer].options)[option]
        if self.full_layout.engine == "single" and "per_device_eval_batch_size" in arguments:
            # A process that evaluates everything in one batch counts each token or sample once.
            arguments["per_device_eval_batch_size"] = HELD_OUT
        return arguments


def text(index: int, count: int) -> str:
    return " ".join(_WORDS[(index * 5 + each * (1 + index % 3)) % len(_WORDS)] for each in range(count))


def _pair(row: int) -> dict[str, Any]:
    chosen, rejected = text(row + 1, 1 + row % 4), text(row + 2, 1 + (row + 1) % 3)
    return {"prompt": text(row, 2), "chosen": f" {chosen}", "rejected": f" {rejected}"}


def _completion(row: int) -> dict[str, Any]:
    return {"prompt": text(row, 2), "completion": f" {text(row + 1, 1 + row % 4)}"}


def _labelled(row: int) -> dict[str, Any]:
    return {**_completion(row), "label": bool(row % 3)}


def _chat(row: int) -> dict[str, Any]:
    asked, answered = _completion(row).values()
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]}


def _prompt(row: int) -> dict[str, Any]:
    return {"prompt": _chat(row)["messages"][:1]}


def _tokens(row: int) -> dict[str, Any]:
    found = list(text(row, 2 + row % 4).encode())
    return {"input_ids": found, "labels": [-100, *found[1:]]}


@dataclass(frozen=True, kw_only=True)
class Family:
    model_type: str
    sizes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_mixture(self) -> bool:
        return bool(self.sizes.get("output_router_logits"))


_ONE_GROUP = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "output_router_logits": True}
FAMILIES: Mapping[str, Family] = {
    **{name: Family(model_type=name) for name in ("llama", "qwen2", "qwen3", "phi3")},
    # Its head has the weight of the embedding.
    "tied": Family(model_type="llama", sizes={"tie_word_embeddings": True}),
    "gemma3": Family(
        model_type="gemma3_text",
        sizes={"tie_word_embeddings": True, "query_pre_attn_scalar": 8, "sliding_window": 64},
    ),
    "granite": Family(model_type="granite", sizes={"embedding_multiplier": 2.0, "logits_scaling": 2.0}),
    "gpt2": Family(model_type="gpt2", sizes={"tie_word_embeddings": True}),
    # Mixtures with a balance loss
    "mixtral": Family(model_type="mixtral", sizes={"router_aux_loss_coef": 0.5, "output_router_logits": True}),
    "qwen3_moe": Family(model_type="qwen3_moe", sizes={"output_router_logits": True}),
    "deepseek_v3": Family(model_type="deepseek_v3", sizes=_ONE_GROUP),
}
_EVALUATED = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 2}
EVALUATED = ("evaluated", "evaluated_in_order")
OPTIONS: Mapping[str, dict[str, Any]] = {
    "adamw": {"optim": "adamw_torch", "learning_rate": 1e-3},
    "fused_adamw": {"optim": "adamw_torch_fused", "learning_rate": 1e-3},
    "rmsprop": {"optim": "rmsprop", "learning_rate": 1e-3},
    "reference": {},
    "peft": {},
    "own_adamw": {},
    "own_sgd": {},
    "optimizer_class": {},
    "lora": {},
    "frozen": {},
    "embedding_frozen": {},
    "evaluated": _EVALUATED,
    "evaluated_in_order": _EVALUATED | {"eval_on_start": True, "per_device_eval_batch_size": 1},
    "clipped": {"max_grad_norm": 0.1},
    "unclipped": {"max_grad_norm": 0.0},
    "smoothed": {"label_smoothing_factor": 0.1},
    "recomputed": {"gradient_checkpointing": True},
    "recomputed_reentrant": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    "length_groups": {"train_sampling_strategy": "group_by_length"},
    "in_order": {"train_sampling_strategy": "sequential"},
    "warmed_up": {"warmup_steps": 2, "lr_scheduler_type": "cosine"},
    "restarts": {"warmup_steps": 1, "lr_scheduler_type": "cosine_with_restarts"},
    "constant": {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 1},
    "polynomial": {"lr_scheduler_type": "polynomial"},
    "inverse_root": {"lr_scheduler_type": "inverse_sqrt", "warmup_steps": 1, "weight_decay": 0.0},
    "noise": {"neftune_noise_alpha": 1e-4},
    "other_data_seed": {"data_seed": 5},
    "last_dropped": {"dataloader_drop_last": True},
    "epochs": {"max_steps": -1, "num_train_epochs": 2},
    "long": {"max_steps": 2 * STEPS},
    "logged_seldom": {"logging_steps": 3, "max_steps": 2 * STEPS},
    "first_logged": {"logging_first_step": True, "logging_steps": 2, "max_steps": 2 * STEPS},
    "tokens_counted": {"include_num_input_tokens_seen": "non_padding"},
}
"""Keys of `TrainingArguments` by name; `_further_settings` makes the other changes of an option."""


@dataclass(frozen=True, kw_only=True)
class TrainerKind:
    module: str = "trl"
    kind: str
    """Name of the class without `Trainer`; the configuration of one of TRL is named alike."""
    config: Mapping[str, Any] = field(default_factory=dict)
    row: Callable[[int], dict[str, Any]] = _completion
    teacher: str = ""
    """Keyword of its frozen second model; empty if it makes one or needs none."""
    rewards: bool = False
    """Whether the model has one output for a sequence."""
    distillation: Mapping[str, Any] | None = None
    """Fields of `DistillationConfig`; `None` for other trainers."""
    options: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """Keys of its own configuration by names."""
    row_name: str = ""
    """Its row in the table of combinations; empty if it equals the class name."""

    @property
    def table_row(self) -> str:
        return self.row_name or f"{self.kind}Trainer"


_SFT_OPTIONS = {"short": {"max_length": 24}, "every_token": {"completion_only_loss": False}}
_DPO_OPTIONS: dict[str, dict[str, Any]] = {
    "ipo": {"loss_type": ["ipo"]},
    "hinge": {"loss_type": ["hinge"], "beta": 0.5},
    "robust": {"loss_type": ["robust"], "label_smoothing": 0.1},
    "mixed": {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]},
    "sorted": {"loss_type": ["sigmoid", "aot"]},
    "sorted_unpaired": {"loss_type": ["aot_unpaired"]},
    "weighted": {"use_weighting": True},
}


def _sft(**config: Any) -> TrainerKind:
    return TrainerKind(kind="SFT", config={"max_length": 64, **config}, options=_SFT_OPTIONS)


_DISTILLED = TrainerKind(
    module="shardwright.trainers.distillation", kind="Distillation", row=_tokens, teacher="teacher", distillation={}
)
TRAINERS: Mapping[str, TrainerKind] = {
    "trainer": TrainerKind(module="transformers", kind="", row=_tokens),
    "sft": _sft(),
    "sft_texts": replace(
        _sft(), row=lambda row: dict(zip(("first", "second"), _completion(row).values(), strict=True))
    ),
    "sft_chat": replace(_sft(assistant_only_loss=True), row=_chat),
    "sft_dft": replace(_sft(loss_type="dft"), row_name="SFTTrainer.dft"),
    "sft_packed": replace(_sft(packing=True), row_name="SFTTrainer.packing"),
    "sft_wrapped": replace(_sft(packing=True, packing_strategy="wrapped"), row_name="SFTTrainer.packing"),
    "sft_padding_free": replace(_sft(padding_free=True, max_length=None), row_name="SFTTrainer.packing", options={}),
    "sft_smoothed": _sft(label_smoothing_factor=0.1),
    "dpo": TrainerKind(kind="DPO", config={"max_length": 64}, row=_pair, options=_DPO_OPTIONS),
    "dpo_precomputed": TrainerKind(
        kind="DPO",
        config={"precompute_ref_log_probs": True},
        row=_pair,
        options=_DPO_OPTIONS,
        row_name="DPOTrainer.precomputed",
    ),
    "reward": TrainerKind(
        kind="Reward",
        config={"max_length": 64},
        row=_pair,
        rewards=True,
        options={"centered": {"center_rewards_coefficient": 0.1}},
    ),
    "kto": TrainerKind(
        kind="KTO",
        config={"max_length": 64},
        row=_labelled,
        options={"unequal": {"desirable_weight": 1.5, "undesirable_weight": 0.5}, "sharp": {"beta": 0.5}},
    ),
    "kto_apo": TrainerKind(kind="KTO", config={"loss_type": "apo_zero_unpaired"}, row=_labelled),
    "gkd": TrainerKind(
        module="trl.experimental.gkd",
        kind="GKD",
        config={"max_length": 64, "lmbda": 0.0},
        row=_chat,
        teacher="teacher_model",
        options={"reverse": {"beta": 1.0}, "warm": {"temperature": 2.0}},
    ),
    "orpo": TrainerKind(
        module="trl.experimental.orpo",
        kind="ORPO",
        config={"max_length": 64},
        row=_pair,
        options={"strong": {"beta": 0.5}},
    ),
    "cpo": TrainerKind(
        module="trl.experimental.cpo",
        kind="CPO",
        config={"max_length": 64},
        row=_pair,
        options={"simpo": {"loss_type": "simpo"}, "ipo": {"loss_type": "ipo", "cpo_alpha": 0.5}},
    ),
    "tpo": TrainerKind(
        module="trl.experimental.tpo",
        kind="TPO",
        config={"max_length": 64},
        row=lambda row: {**_pair(row), "reference": f" {text(row + 3, 1 + row % 5)}"},
    ),
    # Sampling from the most probable token alone is the same on all ranks.
    "trl_distillation": TrainerKind(
        kind="Distillation",
        config={"max_completion_length": 6, "top_k": 1},
        row=_prompt,
        teacher="teacher_model",
        row_name="trl.DistillationTrainer",
    ),
    "distillation": replace(_DISTILLED, distillation={"alpha": 0.5, "temperature": 2.0}),
    "distillation_of_nothing": replace(_DISTILLED, distillation={"alpha": 0.0}, teacher=""),
    "pipeline": TrainerKind(module="shardwright.trainers.parallel.pipeline", kind="Pipeline", row=_tokens),
}


def make_models_and_data(directory: Path, cases: list[TrainerCase]) -> None:
    from datasets import Dataset
    from shardwright.plugins.transformers.training_arguments import byte_tokenizer

    tokenizer = byte_tokenizer(VOCAB_SIZE)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message['role'] + ': ' }}"
        "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    common = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 128, "pad_token_id": tokenizer.pad_token_id}
    common |= {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    for family in dict.fromkeys(case.family for case in cases):
        for role, seed in (("model", 0), ("teacher", 9)):
            kind = FAMILIES[family]
            model = make_model(kind.model_type, common | dict(kind.sizes), seed=seed)
            model.save_pretrained(directory / family / role)
            tokenizer.save_pretrained(directory / family / role)
    for name, rows in {(case.trainer, case.rows) for case in cases}:
        # Trainers of TRL share what they compute first through the files of a data set.
        made = [TRAINERS[name].row(row) for row in range(rows + HELD_OUT)]
        Dataset.from_list(made[:rows]).save_to_disk(data_of(directory, name, rows))
        Dataset.from_list(made[rows:]).save_to_disk(data_of(directory, name, rows, held_out=True))


def data_of(directory: Path, trainer: str, rows: int, *, held_out: bool = False) -> Path:
    return directory / "data" / f"{trainer}-{rows}{'-held-out' if held_out else ''}"


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
    engine = case.full_layout.engine
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
    settings |= _further_settings(case, model, models)
    prepare_model_directory_save(arguments)
    kind = getattr(module, f"{described.kind}Trainer")
    if engine == "single":
        trainer = (Trainer if case.trainer == "pipeline" else kind)(**settings)
        if set(case.options) & set(EVALUATED) and FAMILIES[case.family].is_mixture:
            # An evaluation leaves the balance loss out.
            count_as_one_process(trainer)
        return trainer
    stock = described.module == "transformers"
    return parallelism_of(case.full_layout).make_trainer(trainer_class=None if stock else kind, **settings)


def _further_settings(case: TrainerCase, model: Any, models: Path) -> dict[str, Any]:
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
            case "reference":
                from transformers import AutoModelForCausalLM

                path = models / case.family / "teacher"
                return {"ref_model": AutoModelForCausalLM.from_pretrained(path, dtype="float32")}
            case "peft":
                from peft import LoraConfig

                adapters = LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
                return {"peft_config": adapters, "formatting_func": lambda row: row["first"] + row["second"]}
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
