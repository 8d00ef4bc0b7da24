"""Every trainer under every layout trains as its stock class does in one process, or is rejected before it trains.

Two ranks train all cases one after the other; the references are the stock classes in one process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from equivalence.cases import LOSS_TOLERANCE
from equivalence.records import marked, records_of
from shardwright.ds_configs.legality import combinations as table
from shardwright.ds_configs.legality.combinations import columns_of
from trainer_cases import TRAINERS, TrainerCase, make_models_and_data

pytestmark = [pytest.mark.distributed, pytest.mark.needs("trl"), pytest.mark.timeout(3600)]

NORM_TOLERANCE = 1e-5
"""Largest difference of a gradient norm from the one in one process, over that."""
_WORKER = Path(__file__).with_name("trainer_cases.py")


def _cases(trainers: str, layouts: str, **fields: Any) -> list[TrainerCase]:
    return [
        TrainerCase(trainer=trainer, layout=layout, **fields)
        for trainer in trainers.split()
        for layout in layouts.split()
    ]


EQUAL = [
    # An own loss, a mean over samples, one over the tokens of a batch, pairs of rows, and a loss that divides alone.
    *_cases("sft dpo orpo kto gkd", "tp"),
    *_cases("sft", "fsdp2 sp"),
    *_cases("sft_chat sft_dft sft_wrapped sft_padding_free sft_smoothed kto_apo distillation", "tp"),
    *_cases("dpo_precomputed reward trl_distillation", "zero3"),
    # Means over the tokens of a micro-batch, which ranks have different numbers of.
    *_cases("dpo", "zero2 tp-dp", accumulation=2, options=("mixed",)),
    *_cases("cpo tpo", "zero2"),
    *_cases("orpo", "zero3", family="mixtral"),
    *_cases("sft dpo", "tp", family="tied", accumulation=2),
    *_cases("sft", "tp-dp", accumulation=2),
    # The last batch of seven packed rows repeats one; five bytes of text are a document.
    *_cases("sft_packed", "tp"),
    # The balance loss of a mixture, and seven samples of which the last batch repeats one.
    *_cases("trainer distillation", "zero3", family="mixtral", rows=7),
    *_cases("sft distillation_of_nothing", "fsdp2", family="mixtral", rows=7),
    *_cases("trainer sft", "ep", family="mixtral", rows=7),
    *_cases("sft dpo kto gkd", "ep", family="mixtral", accumulation=2),
    # What scripts pass: a reference, adapters with texts, and sets that are evaluated.
    *_cases("dpo", "zero3 tp", options=("reference",)),
    *_cases("dpo", "ep", family="mixtral", options=("reference",)),
    *_cases("dpo", "ddp zero0 zero_offload fsdp2_offload", options=("reference", "adamw")),
    *_cases("sft_texts", "zero2 sp", options=("peft",)),
    *_cases("sft_texts", "ddp zero0 zero_offload fsdp2_offload", options=("peft", "adamw")),
    *_cases("sft dpo", "zero3", options=("evaluated",)),
    *_cases("sft", "sp", options=("evaluated",)),
    # The third batch would be incomplete, and training ends before.
    *_cases("dpo", "zero3", rows=9),
]
ROWS_OF_THE_TABLE = {
    "Trainer": "trainer",
    "SFTTrainer": "sft",
    "SFTTrainer.packing": "sft_packed",
    "SFTTrainer.dft": "sft_dft",
    "DPOTrainer": "dpo",
    "DPOTrainer.precomputed": "dpo_precomputed",
    "RewardTrainer": "reward",
    "KTOTrainer": "kto",
    "GKDTrainer": "gkd",
    "ORPOTrainer": "orpo",
    "CPOTrainer": "cpo",
    "trl.DistillationTrainer": "trl_distillation",
    "DistillationTrainer": "distillation",
    "PipelineTrainer": "pipeline",
}
"""What trains each row of trainers."""


def _cell_case(row: str, column: str) -> TrainerCase:
    return TrainerCase(
        trainer=ROWS_OF_THE_TABLE[row],
        layout=column,
        family="mixtral" if column == "ep" else "llama",
        # DeepSpeed's CPU Adam alone steps there.
        options=("adamw",) if column == "zero_offload" else (),
    )


def _is_covered(row: str, column: str) -> bool:
    return any(
        TRAINERS[case.trainer].table_row == row and column in columns_of(case.full_layout) for case in [*EQUAL, *CELLS]
    )


TABLE = table.every_cell(table.TRAINERS)
# Last the columns that others include: offload shards with ZeRO-3 or FSDP2, and axes have ZeRO-1 or ZeRO-2.
CELLS: list[TrainerCase] = []
"""One case for each further pair of the table."""
for one in sorted(TABLE, key=lambda one: one.column in ("zero1", "zero2", "zero3", "fsdp2")):
    if one.proven_by == table.TRAINED and not _is_covered(one.setting, one.column):
        CELLS.append(_cell_case(one.setting, one.column))
REJECTED = {
    **{
        case: reason
        for reason, case in {
            one.reason: _cell_case(one.setting, one.column) for one in TABLE if not one.is_proven
        }.items()
    },
    **dict.fromkeys(_cases("sft_smoothed", "sp"), "sum up only the loss of labels"),
    **dict.fromkeys(_cases("sft", "sp", family="mixtral"), "load-balancing loss"),
    **dict.fromkeys(_cases("sft", "tp", family="mixtral"), "does not support mixtures of experts"),
    **dict.fromkeys(_cases("dpo", "zero2", options=("sorted",)), "sorts the log-ratios"),
    **dict.fromkeys(_cases("dpo", "ddp", options=("sorted_unpaired",)), "sorts the log-ratios"),
    **dict.fromkeys(_cases("tpo", "tp"), "no test compares TPOTrainer"),
    **dict.fromkeys(_cases("sft", "ep"), "requires a mixture of experts"),
    **dict.fromkeys(_cases("dpo kto", "zero3", rows=7), "count twice"),
}
"""Rejected cases, with a fragment of the reason."""


@pytest.fixture(scope="module")
def records(
    deepspeed_cpu_ops: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    directory = tmp_path_factory.mktemp("trainers")
    parameters = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    cases = [each["case"] for each in parameters if isinstance(each.get("case"), TrainerCase)]
    make_models_and_data(directory / "models", cases)
    references = [case.reference() for case in cases if case not in REJECTED]
    return records_of([*references, *cases], directory, worker=_WORKER)


@pytest.mark.parametrize(
    "case",
    marked([*EQUAL, *CELLS], lambda case: (case.trainer, case.full_layout.engine)),
    ids=lambda case: case.name,
)
def test_trainers_match_one_process(case: TrainerCase, records: dict[str, dict[str, Any]]) -> None:
    record, reference = records[case.name], records[case.reference().name]
    assert "losses" in record and "losses" in reference, (record, reference)
    assert record["losses"] == pytest.approx(reference["losses"], abs=LOSS_TOLERANCE)
    assert record["eval_losses"] == pytest.approx(reference["eval_losses"], abs=2e-6)
    assert record["grad_norms"] == pytest.approx(reference["grad_norms"], rel=NORM_TOLERANCE)


@pytest.mark.once
@pytest.mark.parametrize("case", marked(REJECTED, lambda case: (case.trainer, case.layout)), ids=lambda case: case.name)
def test_unequal_trainers_are_rejected_before_a_step(case: TrainerCase, records: dict[str, dict[str, Any]]) -> None:
    record = records[case.name]
    assert REJECTED[case] in record.get("refused", ""), record
    assert record["steps"] == 0


def test_subclasses_follow_their_nearest_base() -> None:
    from shardwright.trainers.parallel.planned import table_rows
    from trl import DPOConfig, SFTConfig, SFTTrainer
    from trl.experimental.gkd import GKDTrainer

    class Mine(SFTTrainer):
        pass

    assert table_rows(Mine, SFTConfig(use_cpu=True, bf16=False)) == ["SFTTrainer"]
    packed = SFTConfig(use_cpu=True, bf16=False, packing=True, loss_type="dft")
    assert table_rows(Mine, packed) == ["SFTTrainer.packing", "SFTTrainer.dft"]
    assert table_rows(GKDTrainer, DPOConfig(use_cpu=True, bf16=False, precompute_ref_log_probs=True)) == ["GKDTrainer"]
