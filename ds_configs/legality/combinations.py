"""The table of what a training run may combine: each setting with each engine and axis, proven or rejected.

A cell is *proven*, with the test that trains it and compares it with one process, or *rejected*, with the reason seen
in deepspeed 0.19.8, transformers 5.17.0, accelerate 1.15.0 and torch 2.13.0. A pair that is not in the table is
rejected. `axes.py` has the rules about sizes and model families.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..specs.errors import ConfigError
from ..specs.layout import Layout
from ..specs.optimizers import OPTIMIZERS

COLUMNS: Mapping[str, str] = {
    "ddp": "DDP",
    "zero0": "DeepSpeed without ZeRO",
    "zero1": "ZeRO-1",
    "zero2": "ZeRO-2",
    "zero3": "ZeRO-3",
    "fsdp2": "FSDP2",
    "zero_offload": "ZeRO with CPU or NVMe offload",
    "fsdp2_offload": "FSDP2 with CPU offload",
    "sp": "sequence parallelism (Ulysses)",
    "cp": "context parallelism (ring attention)",
    "tp": "tensor parallelism (AutoTP)",
    "pp": "pipeline parallelism",
    "ep": "expert parallelism (AutoEP)",
}
"""Engines, offload and axes. A run has one column for its engine, one for offload and one for each axis."""

SETTINGS: Mapping[str, str] = {
    "qat": "quantization-aware training of weights",
    "qat_inputs": "quantization-aware training with per-token input rounding",
    "qat_ranges": "quantization-aware training with stored input ranges",
    "learned_scales": "quantization-aware training with learned scales",
    "pruning": "magnitude pruning",
    "lora": "LoRA adapters",
    "frozen": "frozen parameters",
    "distillation": "distillation of logits",
    "distilled_features": "distillation of hidden states",
    "distilled_attention": "distillation of attention",
    "balance_loss": "the load-balancing loss of a mixture of experts (output_router_logits)",
    "dropout": "attention dropout",
    "gradient_checkpointing": "gradient checkpointing",
    "label_smoothing": "label smoothing",
    "packing": "packed documents",
    "streams": "streaming data sets",
    "last_batch": "an uneven last batch (even_batches)",
    "split_batches": "batches split by Accelerate (split_batches)",
    "compile": "torch.compile",
    "bf16": "bf16 mixed precision",
    "adamw_torch": "AdamW",
    "adamw_torch_fused": "fused AdamW",
    "sgd": "SGD",
    "adagrad": "Adagrad",
    "rmsprop": "RMSprop",
    "adafactor": "Adafactor",
    "muon": "Muon",
    **{name: name for name, spec in OPTIMIZERS.items() if spec.package},
}
"""Settings of a run beyond its layout; optimizers by the Trainer's names."""

TRAINERS: Mapping[str, str] = {
    "Trainer": "the Trainer of Transformers",
    "SFTTrainer": "TRL's SFTTrainer",
    "SFTTrainer.packing": "TRL's SFTTrainer with packing or padding_free",
    "SFTTrainer.dft": "TRL's SFTTrainer with loss_type='dft'",
    "DPOTrainer": "TRL's DPOTrainer",
    "DPOTrainer.precomputed": "TRL's DPOTrainer with precompute_ref_log_probs",
    "RewardTrainer": "TRL's RewardTrainer",
    "KTOTrainer": "TRL's KTOTrainer",
    "GKDTrainer": "TRL's GKDTrainer",
    "ORPOTrainer": "TRL's ORPOTrainer",
    "CPOTrainer": "TRL's CPOTrainer",
    "trl.DistillationTrainer": "TRL's DistillationTrainer",
    "DistillationTrainer": "Shardwright's DistillationTrainer",
    "PipelineTrainer": "Shardwright's PipelineTrainer",
}
"""Trainer classes. A subclass has the row of its nearest base; a dot precedes what a configuration adds."""
_BITSANDBYTES = " ".join(name for name, spec in OPTIMIZERS.items() if spec.plain_tensors_only)
_LAYERWISE = " ".join(name for name, spec in OPTIMIZERS.items() if spec.layerwise)
ONLY_ON_ACCELERATORS = frozenset(["fp16", *_BITSANDBYTES.split()])
"""Settings that CPU ranks cannot train, so that no test here can prove them: `rules.py` and the rejections below decide
about them."""

EQUIVALENT = "tests/equivalence/test_equivalence.py"
"""Also tests a first step on zero gradients, which DeepSpeed makes without ZeRO in 16 bit."""
EXPORTED = "tests/equivalence/test_qat_exports.py"
TRAINED = "tests/distributed/test_trainer_layouts.py"
METERED = "benchmarks/optimizer_table.py"
"""Optimizers whose packages tests lack."""

_SCHEDULE_FREE = "schedule_free_adamw schedule_free_radam schedule_free_sgd"
_ENGINES = "ddp zero0 zero1 zero2 zero3 fsdp2"
_OFFLOADED = "zero_offload fsdp2_offload"
_DATA_PARALLEL = f"{_ENGINES} {_OFFLOADED}"

_PROVEN: tuple[tuple[str, str, str], ...] = (
    (EQUIVALENT, "qat", f"{_DATA_PARALLEL} sp cp"),
    (EQUIVALENT, "learned_scales", f"{_DATA_PARALLEL} sp cp"),
    (EQUIVALENT, "pruning", f"{_DATA_PARALLEL} sp cp tp pp ep"),
    (EQUIVALENT, "lora", f"{_DATA_PARALLEL} sp cp"),
    (EQUIVALENT, "frozen", f"{_DATA_PARALLEL} sp cp tp"),
    (EQUIVALENT, "distillation distilled_features", f"{_DATA_PARALLEL} tp ep"),
    (EQUIVALENT, "gradient_checkpointing", f"{_DATA_PARALLEL} sp cp tp pp ep"),
    (EQUIVALENT, "dropout", f"{_DATA_PARALLEL} sp tp pp ep"),
    (EQUIVALENT, "label_smoothing", "ddp zero0 zero1 zero2 zero3 zero_offload sp tp ep"),
    (EQUIVALENT, "packing", f"{_DATA_PARALLEL} tp pp ep"),
    (EQUIVALENT, "streams", f"{_DATA_PARALLEL} sp cp tp pp ep"),
    (EQUIVALENT, "split_batches", f"{_DATA_PARALLEL} ep"),
    (EQUIVALENT, "last_batch", f"{_DATA_PARALLEL} sp cp tp pp ep"),
    (EQUIVALENT, "compile", "ddp zero0 zero1 zero2 fsdp2 zero_offload fsdp2_offload sp cp tp"),
    (EQUIVALENT, "bf16", "ddp zero1 zero2 zero3 fsdp2 zero_offload fsdp2_offload sp cp tp pp ep"),
    (EQUIVALENT, "adamw_torch adamw_torch_fused", f"{_DATA_PARALLEL} sp cp tp pp ep"),
    (EQUIVALENT, "sgd rmsprop", f"{_ENGINES} fsdp2_offload sp cp tp pp ep"),
    (EQUIVALENT, "adagrad", "ddp zero0 fsdp2 fsdp2_offload cp"),
    (EQUIVALENT, "adafactor", "ddp"),
    (METERED, "adafactor", "fsdp2"),
    (METERED, _BITSANDBYTES, "ddp zero1 zero2 zero3"),
    (METERED, "muon", "ddp zero1 zero2 zero3 fsdp2"),
    (METERED, "adamw_torch_8bit adamw_torch_4bit", "ddp zero1 zero2 zero3"),
    (METERED, _SCHEDULE_FREE, "ddp"),
    (METERED, "stable_adamw", "ddp fsdp2"),
    (METERED, "galore_adamw galore_adafactor apollo_adamw", "ddp"),
    (EQUIVALENT, "balance_loss", f"{_DATA_PARALLEL} ep"),
    (EQUIVALENT, "bf16", "zero0"),
    (EXPORTED, "qat_inputs", "ddp zero0 zero1 zero2 zero3 fsdp2"),
    (EXPORTED, "qat_ranges", "ddp zero1 zero2 zero3 fsdp2"),
    (EQUIVALENT, "distillation distilled_features", "sp"),
    (EQUIVALENT, "distilled_attention", "ddp zero2 zero3 fsdp2"),
    (TRAINED, "Trainer", f"{_DATA_PARALLEL} sp cp tp pp ep"),
    (TRAINED, "SFTTrainer", f"{_DATA_PARALLEL} sp tp ep"),
    (TRAINED, "SFTTrainer.packing SFTTrainer.dft", f"{_DATA_PARALLEL} tp ep"),
    (TRAINED, "DPOTrainer KTOTrainer GKDTrainer ORPOTrainer CPOTrainer", f"{_DATA_PARALLEL} tp ep"),
    (TRAINED, "RewardTrainer trl.DistillationTrainer", f"{_DATA_PARALLEL} ep"),
    (TRAINED, "DPOTrainer.precomputed", _DATA_PARALLEL),
    (TRAINED, "DistillationTrainer", f"{_DATA_PARALLEL} tp ep"),
    (TRAINED, "PipelineTrainer", "pp"),
    (EQUIVALENT, "PipelineTrainer", "zero1 tp"),
)
"""Tests, settings and columns; a line stands for all pairs of its settings and columns."""

_FLAT = "DeepSpeed steps flat tensors, but this optimizer needs the shapes of matrices and would compute other updates"
_STATES_FIRST = "the optimizer creates its states before DeepSpeed replaces the parameters, and then fails"
_MATRICES = "galore_adamw galore_adafactor apollo_adamw stable_adamw"
_OBJECTS = "its states contain objects, which FSDP2's checkpoints do not save"
_COLLECTIVES = "its checkpoints contain unfinished collectives, which PyTorch does not load (torchao 0.18)"
_ON_DEVICE = "DeepSpeed gathers offloaded matrices on the accelerator, in buffers that plans do not count"
_SEEDS = "it creates seeds of parameters, which FSDP2 replaces, and fails"
_RESUMED_BY_STEP = "PyTorch resumes it by a step before train() is called, which it rejects"
_MODES = "DeepSpeed's optimizer hides train() and eval(), without which it does not step"
_ONE_PROCESS = "it updates weights in the backward pass with the gradients of one rank"
_HOST = "DeepSpeed replaces the optimizer with CPU Adam"
_DTENSOR = "PyTorch fails because plain tensors are mixed with the DTensors of FSDP2"
_PLAIN_TENSORS = "its kernels do not support DTensors, the parameters of FSDP2"
_NO_ROUNDING = "the engine replaces or splits the layers that round: train with ZeRO-3 or FSDP2"
_STAGE_LOSS = "a pipeline's last stage computes only the cross-entropy of labels"
_BALANCE = "this loss covers all tokens of a sequence except padding, but each rank has only a part, without the mask"
_STATISTICS = "no rank has the full input ranges"
_POSITIONS = "documents would attend to earlier documents: attention has no mask when ranks share a sequence"
_SAMPLES = "Accelerate splits a batch over all ranks, but some ranks must read the same samples"
_NO_STAGES = "it does not support pipeline stages, which compute only the cross-entropy of labels"
_PARTS = "it computes a loss from parts of sequences, where labels cannot be shifted"
_SUMS = "it needs log-probabilities of full sequences, but a rank has a part of each"
_SECOND = "the second model would attend only to the rank's part of the sequence"
_ORDER = "context parallelism reorders the sequence, which a second model cannot follow"
_UNPROVEN = "no test compares it with one process"

_REJECTED: tuple[tuple[str, str, str], ...] = (
    (_FLAT, f"adafactor {_MATRICES}", "zero0 zero1 zero2 zero3 zero_offload sp tp pp ep"),
    (_DTENSOR, "adafactor", "fsdp2_offload cp"),
    (_OBJECTS, "galore_adamw galore_adafactor", "fsdp2 fsdp2_offload cp"),
    (_COLLECTIVES, "adamw_torch_8bit adamw_torch_4bit", "fsdp2 fsdp2_offload cp"),
    (_ON_DEVICE, "muon", "zero_offload"),
    (_HOST, "adamw_torch_8bit adamw_torch_4bit", "zero_offload"),
    (_SEEDS, "apollo_adamw", "fsdp2 fsdp2_offload cp"),
    (_MODES, _SCHEDULE_FREE, "zero0 zero1 zero2 zero3 zero_offload sp tp pp ep"),
    (_RESUMED_BY_STEP, _SCHEDULE_FREE, "fsdp2 fsdp2_offload cp"),
    (_ONE_PROCESS, _LAYERWISE, " ".join(COLUMNS)),
    (_STATES_FIRST, "adagrad", "zero1 zero2 zero3 sp tp pp ep"),
    (_HOST, f"sgd rmsprop adagrad {_BITSANDBYTES}", "zero_offload"),
    (_PLAIN_TENSORS, _BITSANDBYTES, "fsdp2 fsdp2_offload cp"),
    (_NO_ROUNDING, "qat qat_inputs qat_ranges learned_scales", "tp pp ep"),
    (_STATISTICS, "qat_ranges", "sp cp"),
    ("the engine does not find the layers of its plan under the adapters' names", "lora", "tp pp ep"),
    ("some stages or groups of experts would have no trainable parameter", "frozen", "pp ep"),
    (_STAGE_LOSS, "distillation distilled_features distilled_attention", "pp"),
    (_STAGE_LOSS, "balance_loss label_smoothing", "pp"),
    (_ORDER, "distillation distilled_features", "cp"),
    (_ORDER, "distilled_attention", "cp"),
    ("it needs full sequences, but a rank has a part of each", "distilled_attention", "sp"),
    (_BALANCE, "balance_loss", "sp cp"),
    ("AutoTP does not support mixtures of experts", "balance_loss", "tp"),
    (
        "labels would not be shifted: the Trainer decides this by the name of the model's class, which FSDP2 renames",
        "label_smoothing",
        "fsdp2 fsdp2_offload",
    ),
    ("labels would be shifted within parts of the sequence that are not adjacent", "label_smoothing", "cp"),
    (_POSITIONS, "packing", "sp cp"),
    (_SAMPLES, "split_batches", "sp cp tp pp"),
    ("DeepSpeed's schedule runs the stages without compiling them", "compile", "pp"),
    ("torch.compile cannot trace the routing of AutoEP", "compile", "ep"),
    ("the compiled backward pass reads parameters that ZeRO-3 has released", "compile", "zero3"),
    ("PyTorch fails because plain tensors are mixed with DTensors", "dropout", "cp"),
    (_NO_STAGES, "SFTTrainer SFTTrainer.packing SFTTrainer.dft DPOTrainer DPOTrainer.precomputed RewardTrainer", "pp"),
    (_NO_STAGES, "KTOTrainer GKDTrainer ORPOTrainer CPOTrainer trl.DistillationTrainer DistillationTrainer", "pp"),
    (_PARTS, "SFTTrainer SFTTrainer.packing SFTTrainer.dft DPOTrainer DPOTrainer.precomputed RewardTrainer", "cp"),
    (_PARTS, "KTOTrainer GKDTrainer ORPOTrainer CPOTrainer trl.DistillationTrainer DistillationTrainer", "cp"),
    (_POSITIONS, "SFTTrainer.packing", "sp"),
    ("the ranks of a sequence sum up only the loss of labels, but this is another loss", "SFTTrainer.dft", "sp"),
    (_SUMS, "DPOTrainer DPOTrainer.precomputed KTOTrainer ORPOTrainer CPOTrainer", "sp"),
    ("it reads the last token of a sequence, which only one rank has", "RewardTrainer", "sp"),
    (_SECOND, "GKDTrainer trl.DistillationTrainer", "sp"),
    ("the head has one output, which AutoTP does not shard", "RewardTrainer", "tp"),
    (
        "it computes the reference's log-probabilities before the groups of ranks exist",
        "DPOTrainer.precomputed",
        "tp ep",
    ),
    (
        "it shares sequences itself: set TrainingArguments.parallelism_config, and plan without sp",
        "DistillationTrainer",
        "sp",
    ),
    ("it passes functions to the forward pass, which AutoTP does not support", "trl.DistillationTrainer", "tp"),
    (
        "it requires pipeline stages, with ZeRO-1 or without ZeRO: plan with pp",
        "PipelineTrainer",
        "ddp zero0 zero2 zero3 fsdp2 zero_offload fsdp2_offload sp cp ep",
    ),
)
"""Reasons, settings and columns."""


AXES = ("sp", "cp", "tp", "pp", "ep")
"""Columns under which ranks share samples, layers or experts."""

STEP_METHODS = frozenset(
    [
        "get_train_dataloader",
        "get_eval_dataloader",
        "get_test_dataloader",
        "_get_dataloader",
        "_get_train_sampler",
        "_get_eval_sampler",
        "get_batch_samples",
        "_get_num_items_in_batch",
        "train",
        "_inner_training_loop",
        "_run_epoch",
        "training_step",
        "_prepare_input",
        "_prepare_inputs",
        "create_accelerator_and_postprocess",
    ]
)
"""Methods of the Trainer that decide which samples a rank reads, and what a step does with them."""


def batch_loss_errors(trainers: Collection[str], args: Any, *, data_ranks: int) -> list[ConfigError]:
    """Return an error for each setting with which the loss of several ranks differs from one process.

    Such a loss of a batch is no sum over its rows, so that ranks cannot add up their parts. Seen with trl 1.16.0. These
    losses are sums over rows or tokens, or use means over all ranks, and are exact:

    - DPO: all other loss types, with `ld_alpha` and `use_weighting`; `sft` by `plugins/trl.py`.
    - CPO, ORPO and TPO: their mean over tokens by `plugins/trl.py`. KTO: its KL term is a mean over all ranks.
    - GRPO: grpo, sapo, luspo and dr_grpo are means over rows; dapo, cispo and vespo divide by the tokens of all ranks,
      and bnpo does by `plugins/trl.py`.

    `trainers` are the names of a trainer class and its bases in TRL, `data_ranks` read different samples.
    """
    stated = getattr(args, "loss_type", None) or ()
    losses = {stated} if isinstance(stated, str) else set(stated)
    errors = []

    def reject(setting: str, rule: str, fix: str) -> None:
        errors.append(ConfigError(where=setting, value=getattr(args, setting, None), rule=rule, fix=fix))

    if data_ranks < 2:
        return []
    if "DPOTrainer" in trainers and losses & {"aot", "aot_unpaired"}:
        rule = "aot sorts the log-ratios of a batch, but a rank sorts only its own"
        reject("loss_type", rule, "use another loss_type, or one process")
    if "DPOTrainer" in trainers and getattr(args, "use_weighting", False) and "sft" in losses:
        rule = "multiplies the sft loss, a mean over the tokens of a batch, by the mean weight of the batch"
        reject("use_weighting", rule, "omit use_weighting, or sft in loss_type")
    is_subclass = "GRPOTrainer" in trainers and set(trainers) - {"GRPOTrainer", "_BaseTrainer"}
    if "bnpo" in losses and (is_subclass or "SDPOTrainer" in trainers):
        rule = "bnpo divides by the tokens of each micro-batch of a rank"
        reject("loss_type", rule, "use loss_type='grpo' or 'dr_grpo'")
    if "SDPOTrainer" in trainers and "dapo" in losses:
        rule = "this trainer's dapo divides by the tokens of each micro-batch of a rank"
        reject("loss_type", rule, "use loss_type='grpo' or 'dr_grpo'")
    entropy = getattr(args, "entropy_coef", 0.0) or getattr(args, "use_adaptive_entropy", False)
    if "GRPOTrainer" in trainers and entropy:
        rule = "the entropy bonus is a mean over the tokens of each micro-batch of a rank"
        reject("entropy_coef", rule, "set entropy_coef=0.0 and use_adaptive_entropy=False")
    if "DistillationTrainer" in trainers and getattr(args, "eval_strategy", "no") != "no":
        rule = "its evaluation averages the means of ranks, and ends in an error under ZeRO-3 and FSDP2"
        reject("eval_strategy", rule, "set eval_strategy='no', and evaluate the saved model in one process")
    return errors


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One pair of the table."""

    setting: str
    column: str
    proven_by: str = ""
    """The test that proves the pair; empty if it is rejected."""
    reason: str = ""
    """Why the pair is rejected; empty if it is proven."""
    fix: str = ""
    """What to use instead, where the reason does not say it."""

    @property
    def is_proven(self) -> bool:
        return bool(self.proven_by)


Rows = Iterable[tuple[str, str, str]]
"""Values of several cells, their settings and their columns; a row stands for all pairs of these."""


def cells(proven: Rows, rejected: Rows) -> dict[tuple[str, str], Cell]:
    """Return the cells of rows of tests and of rows of reasons."""
    return {
        (setting, column): Cell(setting=setting, column=column, **{name: value})
        for name, rows in (("proven_by", proven), ("reason", rejected))
        for value, settings, columns in rows
        for setting in settings.split()
        for column in columns.split()
    }


TABLE: Mapping[tuple[str, str], Cell] = cells(_PROVEN, _REJECTED)


def cell(setting: str, column: str) -> Cell:
    """Return the cell of a pair; a pair that is not in the table is rejected.

    >>> cell("dropout", "cp").reason
    'PyTorch fails because plain tensors are mixed with DTensors'
    """
    return TABLE.get((setting, column), Cell(setting=setting, column=column, reason=_UNPROVEN))


def every_cell(rows: Iterable[str] = (*SETTINGS, *TRAINERS)) -> list[Cell]:
    """Return the cells of the given rows, by default of all settings and trainers, in every column."""
    return [cell(row, column) for row in rows for column in COLUMNS]


def columns_of(layout: Layout) -> tuple[str, ...]:
    """Return the columns of a layout; none for one process, with which every setting is compared.

    >>> columns_of(Layout(engine="deepspeed", zero_stage=1, tp=2))
    ('zero1', 'tp')
    """
    offloads = {layout.offload_optimizer, layout.offload_param} - {"none"}
    columns = []
    if layout.engine == "deepspeed":
        # A pipeline without ZeRO uses another 16-bit optimizer than ZeRO-0.
        columns += [] if layout.pp > 1 and not layout.zero_stage else [f"zero{layout.zero_stage or 0}"]
        columns += ["zero_offload"] if offloads else []
    elif layout.engine == "fsdp2":
        columns += ["fsdp2", "fsdp2_offload"] if offloads else ["fsdp2"]
    elif layout.engine == "ddp":
        columns += ["ddp"]
    return (*columns, *(axis for axis in AXES if axis in layout.axes))


def rejection(setting: str, columns: Collection[str], reason: str) -> tuple[str, str]:
    """Return the rule and the fix of an error about a setting that some columns reject."""
    proven = [column for column in COLUMNS if cell(setting, column).is_proven]
    fix = f"supported with {', '.join(proven)}" if proven else "omit it"
    if setting in OPTIMIZERS:
        fix = f"supported with {', '.join(['one process', *proven])}"
        usable = [name for name in OPTIMIZERS if all(cell(name, column).is_proven for column in columns)]
        fix += f"; or use {', '.join(usable[:6])}" if usable else ""
    return f"is not supported with {', '.join(COLUMNS.get(column, column) for column in columns)}: {reason}", fix


def incompatibility_errors(settings: Iterable[str], columns: Iterable[str]) -> list[ConfigError]:
    """Return an error for each pair of a setting and a column that no test proves."""
    columns = tuple(columns)
    errors = []
    for setting in dict.fromkeys(settings):
        for column in columns:
            # `rules.py` decides about settings that only accelerators can prove.
            decided_elsewhere = setting in ONLY_ON_ACCELERATORS and (setting, column) not in TABLE
            if not cell(setting, column).is_proven and not decided_elsewhere:
                rule, fix = rejection(setting, [column], cell(setting, column).reason)
                where = SETTINGS.get(setting) or TRAINERS.get(setting, setting)
                errors.append(ConfigError(where=where, rule=rule, fix=fix))
    return errors
