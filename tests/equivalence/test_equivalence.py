"""Every layout trains as one process does, with whatever a run may have besides, and one process as the formulas say.

All selected cases of one number of ranks run one after the other in one launch. `cases.py` has layouts and data,
`settings.py` what a run may have, and `formulas.py` the steps in fp64. `make test` runs every layout and family, and
every setting that engines treat by code of its own, once; all cases, and every setting that the table of combinations
proves by them, run in `make test-grid`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from equivalence.cases import LOSS_TOLERANCE, MAX_GRAD_NORM, Case, probe_batch
from equivalence.comparison import NORM_TOLERANCE, assert_equal, difference
from equivalence.formulas import computed
from equivalence.records import Record, marked, records_of
from equivalence.runs import SAVED
from equivalence.settings import reference_of
from safetensors.torch import load_file
from shardwright.ds_configs.legality import combinations as table

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(3600)]

LOGIT_TOLERANCE = 1e-5
"""Largest difference of logits from those of the live engine, over the largest absolute logit."""


def _cases(layouts: str, *settings: str, accumulation: int = 1, model: str = "") -> list[Case]:
    return [
        Case(layout=layout, settings=settings, accumulation=accumulation, model=model) for layout in layouts.split()
    ]


_NOTED = Case(layout="ddp", settings=("length_groups", "noted", "dropout"))
_AXES_OF_FOUR = "sp2-dp2-zero2 tp2-dp2-zero1 pp2-dp2-zero1 tp2-pp2-zero1 ep2-dp2-zero2 ep2-dp2-zero3"
_TWO_RANKS = "ddp zero0 zero1 zero2 zero3 fsdp2 sp2-zero1 sp2-zero3 cp2-fsdp2 tp2-zero1 pp2-zero0 ep2-zero1 ep2-zero2"
CASES = [
    # Data loader workers are forks, which hang where many threads of earlier runs hold locks: they come first.
    *_cases("sp2-zero2", "workers", "epochs", accumulation=3),
    *_cases("tp2-zero1", "drawing", "workers"),
    # Every layout, first so that `make test` trains it so: micro-batches and ranks with other numbers of labels, and a
    # last batch with fewer samples. SGD shows a wrong scale of gradients, which Adam divides out.
    *_cases(f"{_TWO_RANKS} {_AXES_OF_FOUR}", "sgd", "last_batch", accumulation=3),
    *_cases("ddp tp2-zero1 sp2-zero1", "label_smoothing", "evaluated", "last_batch", accumulation=2),
    *_cases("ddp fsdp2", "balance_loss", "last_batch", accumulation=2),
    *_cases("zero3 ep2-zero2", "label_smoothing", "balance_loss", "last_batch", accumulation=2),
    *_cases("ddp", "own_share", "last_batch", accumulation=2),
    *_cases("sp2-zero1", "without_labels"),
    *_cases("pp2-zero1", "resumed", "cosine"),
    # Every layout with Adam
    *_cases(f"{_TWO_RANKS} {_AXES_OF_FOUR}", accumulation=3),
    *_cases("zero1-offload zero2-offload zero3-offload zero3-offload-param fsdp2-offload", accumulation=3),
    # bf16
    *_cases("ddp zero0 zero3 zero3-offload-param fsdp2 tp2-zero1 pp2-zero1", "bf16", accumulation=2),
    # Sequences
    *_cases("sp2-zero0", "own_loss", "sgd", accumulation=3, model="mixtral"),
    *_cases("sp2-zero3", "own_sum", "one_kv_head", "sgd", accumulation=3),
    *_cases("sp2-zero1", "aligned_loss", "sgd", accumulation=3),
    *_cases("sp2-zero3", "tiled", "sgd", accumulation=3),
    *_cases("sp2-zero2", "tiled", "tied", "sgd", accumulation=3),
    *_cases("sp2-zero2", "tiled", "lora", accumulation=3),
    *_cases("sp2-zero2", "streams", "sgd", accumulation=3, model="gpt_neox"),
    *_cases("sp2-zero2 zero3 fsdp2 tp2-zero2 ep2-zero3", "resumed", "cosine"),
    *_cases("sp2-dp2-zero3", "evaluated", accumulation=3),
    *_cases("cp2-fsdp2", "streams", "sgd", accumulation=3),
    # Tensors
    *(
        Case(layout="tp2-zero1", settings=("sgd",), model=family)
        for family in ("gemma", "gemma2", "gemma3_text", "granite", "mistral", "olmo2", "phi3", "qwen2", "qwen3")
    ),
    *_cases("tp2-zero1", "sgd", "gradient_checkpointing", accumulation=3, model="starcoder2"),
    *_cases("tp2-zero2", "sgd", "biases", accumulation=3),
    *_cases("tp2-zero2-offload", "unforced", "sgd"),
    *_cases("tp2-zero1", "sgd", "tied"),
    *_cases("tp2-zero0", "sgd"),
    *_cases("tp2-zero1", "sgd", "odd_vocabulary"),
    *_cases("tp2-zero1", "sgd", "own_share", accumulation=3),
    *_cases("tp2-zero1", "sgd", "own_share_of_groups", accumulation=3),
    *(
        Case(layout="tp2-zero1", settings=("sgd", part), model="qwen3")
        for part in ("frozen", "norms_frozen", "mlp_alone", "head_alone")
    ),
    *_cases("tp2-zero1", "other_dropout", model="phi3"),
    *_cases("tp2-zero1", "drawing"),
    *_cases("tp2-dp2-zero0", "sgd", "streams"),
    # Experts
    *_cases("ep2-zero2", "balance_loss", "sgd", accumulation=3),
    *_cases("ep2-zero0", "balance_loss", "sgd"),
    *_cases("ep2-zero2", "balance_loss", "sgd", "own_share", "evaluated"),
    *_cases("ep2-zero3", "balance_loss", "gradient_checkpointing", "resumed", model="qwen3_moe"),
    *_cases("ep2-zero3", "balance_loss", "sgd", "from_directory", accumulation=3, model="qwen2_moe"),
    *_cases("ep2-zero2", "resumed", accumulation=3, model="deepseek_v3"),
    *_cases("ep2-zero1", "sgd", model="deepseek_v2"),
    # Adapters
    *_cases("ddp zero1 zero3 fsdp2", "dora", "sgd", accumulation=2),
    *_cases("zero3 fsdp2", "rslora"),
    *_cases("ddp zero2 zero3 fsdp2", "pissa", "sgd", accumulation=2),
    *_cases("ddp zero2 zero3 fsdp2", "lora_plus", accumulation=2),
    *(Case(layout="zero3", settings=(kind, "from_directory")) for kind in ("dora", "pissa")),
    *_cases("zero3", "lora_experts", "from_directory", model="mixtral"),
    # Adapters of fused experts
    *_cases("ddp zero2 zero3 fsdp2", "lora_experts", "sgd", accumulation=2, model="qwen3_moe"),
    *_cases("zero1 zero3 fsdp2", "lora_experts", model="mixtral"),
    *_cases("zero3", "lora_attention_experts", "gradient_checkpointing", "sgd", model="deepseek_v3"),
    *_cases("zero3", "balance_loss", accumulation=2),
    # Stages
    *_cases("pp2-zero0", "sgd", "gradient_checkpointing", accumulation=3, model="gpt2"),
    *_cases("pp2-zero1", "sgd", "tied", accumulation=3),
    *_cases("pp2-zero1", "epochs", accumulation=3),
    *_cases("pp2-zero1", "tied", "evaluated", "resumed", "from_directory", accumulation=3),
    *_cases("pp2-dp2-zero1", "sgd", model="gpt2"),
    *_cases("tp2-pp2-zero0", "sgd", "tied", accumulation=3),
    *_cases("pp4-zero1", "four_layers", "epochs", accumulation=5),
    # Tiles and layer inputs in host memory
    *_cases("ddp zero2 zero3 fsdp2", "tiled", "sgd", accumulation=2),
    *_cases("zero3", "tiled", "sgd", "tied", accumulation=2),
    *_cases("ddp zero3", "tiled", "sgd", "balance_loss", accumulation=2),
    *_cases("ddp fsdp2", "tiled", "lora", accumulation=2),
    *_cases("ddp", "tiled", "distillation", accumulation=2),
    # Distillation
    *_cases("zero1 zero3 fsdp2 sp2-zero2 sp2-zero3", "distillation", accumulation=3),
    *_cases("ddp", "distillation", "packing", accumulation=3),
    *_cases("zero2 zero3", "distillation", "teacher_sharded"),
    *_cases("zero3", "distillation", "teacher_offloaded"),
    *_cases("ddp", "reverse_distillation", "gradient_checkpointing", "teacher_offloaded"),
    *_cases("ddp", "distillation", "teacher_sharded"),
    *_cases("fsdp2", "plain_distillation", "teacher_sharded"),
    *_cases("fsdp2", "distillation", "teacher_offloaded"),
    *_cases("zero2 zero3", "distilled_features", "gradient_checkpointing"),
    *_cases("fsdp2 sp2-zero1", "distilled_features", accumulation=3),
    *_cases("ddp zero2 zero3 fsdp2", "distilled_attention"),
    *_cases("zero3 fsdp2", "distillation", "lora", "teacher_sharded"),
    *_cases("ddp zero3 fsdp2", "distillation", "without_labels"),
    *_cases("ddp zero3 fsdp2 sp2-zero3", "own_term", accumulation=3),
    # Codes: no number lies on the border of two, where the last bit decides (docs/explain/qat_borders.md).
    *_cases("zero3 fsdp2", "w4_off_borders", "distillation"),
    # Zeros in weights
    *_cases("zero3 tp2-zero1 pp2-zero0", "pruning", "sgd", "resumed"),
    *_cases("ddp fsdp2", "pruning", "sgd"),
    *_cases("zero2 zero3-offload zero3", "pattern_pruning", "bf16"),
    *_cases("fsdp2", "pattern_pruning"),
    # Samples, labels and steps
    *_cases("ddp zero3 fsdp2 cp2-fsdp2 tp2-zero1 pp2-zero0", "without_labels"),
    *_cases("zero3 fsdp2 tp2-zero1", "resumed", "length_groups"),
    *_cases("ddp", "many_length_groups"),
    _NOTED,
    *_cases("ddp zero3 fsdp2 pp2-zero0", "last_batch", "logged_seldom", accumulation=2),
    *_cases("ddp zero3 fsdp2 tp2-zero1 sp2-zero1 pp2-zero0", "evaluations"),
    *(
        Case(layout=layout, settings=(kind, "in_order", "last_batch"), accumulation=2)
        for layout in ("ddp", "zero3", "fsdp2")
        for kind in ("classes", "numbers", "several", "tags")
    ),
    *_cases("ddp zero3 fsdp2", "streams", "last_batch"),
    *_cases("zero1 pp2-zero0", "stopped_early"),
    *_cases("ddp zero3 fsdp2", "own_mean", "last_batch"),
    *(
        Case(layout=layout, settings=(kind,), accumulation=2)
        for layout in ("ddp", "zero2", "fsdp2")
        for kind in ("own_focal", "own_mean_of_samples", "own_added")
    ),
    # Images
    *_cases("ddp zero1 zero2 zero3 fsdp2", "images", "sgd", accumulation=2),
    *_cases("ddp zero3 fsdp2", "images_frozen", "evaluated", "last_batch", accumulation=2),
    *_cases("zero2", "images_frozen", "lora"),
    *_cases("ddp zero1 zero2 zero3 fsdp2", "images_of_qwen", accumulation=2),
    *_cases("zero3 fsdp2", "images_of_qwen_projected", "gradient_checkpointing"),
    *_cases("ddp zero3", "images", "resumed"),
    *_cases("ddp", "images", "tiled", "sgd"),
    # What a script passes
    *_cases("zero1 fsdp2 sp2-zero1 cp2-fsdp2 tp2-zero1 pp2-zero0 ep2-zero2", "optimizer_class"),
    *_cases("zero2 ddp zero0 zero1 fsdp2", "model_init"),
    *_cases("zero3-offload-param fsdp2-offload", "model_init", "optimizer_class_adamw"),
    *_cases("fsdp2-offload ddp zero0 zero3 zero3-offload-param sp2-zero1 tp2-zero1 ep2-zero2", "own_loss", "own_adamw"),
    *_cases("cp2-fsdp2", "own_adamw"),
    *_cases("zero2-offload", "own_sgd", "unforced"),
    *_cases("zero0 zero3 fsdp2 tp2-zero1 ep2-zero2", "own_sgd"),
    *_cases("zero2 fsdp2", "own_nadam"),
    # Combinations that once failed or computed something else
    *_cases("tp2-zero1", "frozen"),
    *_cases("ep2-zero2", "pruning"),
    *_cases("fsdp2", "adafactor", accumulation=2),
    *_cases("fsdp2 zero2", "muon"),
]


OF_ENGINES = {"bf16", "distillation", "evaluated", "lora", "resumed", "streams", "tiled", "workers"}
"""Settings that other code of the engines runs; the others differ in samples, losses or sizes."""


def _marked(cases: list[Case]) -> list[Any]:
    return marked(cases, lambda case: (case.layout, case.family, *OF_ENGINES.intersection(case.settings)))


_COLUMN_LAYOUTS = {
    "zero_offload": "zero3-offload",
    "fsdp2_offload": "fsdp2-offload",
    "sp": "sp2-zero1",
    "cp": "cp2-fsdp2",
    "tp": "tp2-zero1",
    "pp": "pp2-zero0",
    "ep": "ep2-zero2",
}


def _grid() -> Iterator[Any]:
    """Yield the cells of the table that these runs prove and that are no cases above."""
    covered = {(setting, column) for case in CASES for setting in case.settings for column in case.columns}
    for cell in table.every_cell():
        if (
            cell.proven_by == table.EQUIVALENT
            and cell.setting != "PipelineTrainer"
            and (cell.setting, cell.column) not in covered
        ):
            layout = _COLUMN_LAYOUTS.get(cell.column, cell.column)
            if cell.setting == "compile":
                # ZeRO-3 releases parameters that a compiled backward pass reads.
                layout = layout.replace("zero3", "zero2")
            yield pytest.param(Case(layout=layout, settings=(cell.setting,)), marks=pytest.mark.full)


GRID = list(_grid())


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def records(deepspeed_cpu_ops: None, request: pytest.FixtureRequest, directory: Path) -> dict[str, Record]:
    items = [item for item in request.session.items if item.path == Path(__file__) and hasattr(item, "callspec")]
    selected = [_NOTED, *(item.callspec.params["case"] for item in items)]
    references = [reference_of(case) for case in selected if case not in REJECTED]
    return records_of([*selected, *references], directory, Path(__file__).with_name("runs.py"))


def _named(case: Case) -> str:
    return case.name


@pytest.mark.parametrize("case", [*_marked(CASES), *GRID], ids=_named)
def test_runs_equal_one_process(case: Case, records: dict[str, Record], directory: Path) -> None:
    assert_equal(case, records, directory)


def test_ranks_read_every_sample_once_in_an_epoch_with_dropout(records: dict[str, Record], directory: Path) -> None:
    """Dropout on batches of different lengths lets the random numbers of ranks part."""
    assert "losses" in records[_NOTED.name], records[_NOTED.name]
    seen = [json.loads((directory / f"{_NOTED.name}.{rank}.json").read_text())["seen"] for rank in range(2)]
    for first in (0, 10):
        assert sorted(index for each in seen for index in each[first : first + 10]) == list(range(20))


REJECTED: dict[Case, str] = {
    **dict.fromkeys(_cases("tp2-pp2-zero1 ep2-zero1", "qat"), "layers that round"),
    **dict.fromkeys(_cases("zero1", "adafactor"), "other updates"),
    **dict.fromkeys(_cases("fsdp2", "label_smoothing"), "which FSDP2 renames"),
    **dict.fromkeys(_cases("zero3", "compile"), "released"),
    **dict.fromkeys(_cases("cp2-fsdp2", "dropout"), "DTensors"),
    **dict.fromkeys(_cases("zero0 zero2 tp2-zero1", "own_adafactor"), "reads the shape of matrices"),
    **dict.fromkeys(_cases("zero3", "adafactor_class"), "reads the shape of matrices"),
    **dict.fromkeys(_cases("fsdp2", "adafactor_class"), "DTensors"),
    **dict.fromkeys(_cases("fsdp2 cp2-fsdp2", "own_adamw_8bit"), "cannot step DTensors"),
    **dict.fromkeys(_cases("ddp zero3 fsdp2", "a_part_for_each_rank"), "yields different rows on different ranks"),
    **dict.fromkeys(_cases("ddp zero3 fsdp2", "fewer_on_one_rank"), "ran out of rows on rank 1 before other ranks"),
    **dict.fromkeys(_cases("fsdp2 cp2-fsdp2", "adamw_8bit"), "do not support DTensors"),
}
"""Runs that would compute something else or fail late, and words of the reason."""


@pytest.mark.once
@pytest.mark.parametrize("case", marked(REJECTED, lambda case: case.settings), ids=_named)
def test_runs_that_would_differ_are_rejected_before_a_step(case: Case, records: dict[str, Record]) -> None:
    record = records[case.name]
    assert REJECTED[case] in record.get("refused", ""), record
    assert record["steps"] == 0 or "fewer_on_one_rank" in case.settings


@pytest.mark.parametrize("case", _marked([case for case in CASES if set(case.settings) <= SAVED]), ids=_named)
def test_checkpoint_has_the_trained_logits_in_transformers(
    case: Case, records: dict[str, Record], directory: Path
) -> None:
    from transformers import AutoModelForCausalLM

    assert "losses" in records[case.name], records[case.name]
    loaded = AutoModelForCausalLM.from_pretrained(directory / case.name / "model", use_safetensors=True).eval()
    live = load_file(directory / case.name / "logits0")["logits"]
    with torch.no_grad():
        logits = loaded(**probe_batch(), use_cache=False).logits
    assert difference(logits, live) <= LOGIT_TOLERANCE
    files = {path.suffix for path in (directory / case.name / "model").iterdir()}
    assert files == {".json", ".safetensors"}


STAGED = [
    case
    for kind in ((), ("lora",), ("model_init",), ("schedule_of_deepspeed",), ("stock",))
    for layouts in (
        "zero2 ddp zero0 zero1 zero3 fsdp2",
        "" if kind else "sp2-zero1 sp2-zero3 cp2-fsdp2 tp2-zero1 pp2-zero0 ep2-zero2 zero2-offload zero3-offload-param",
    )
    for case in _cases(layouts, "stages", *kind, accumulation=2)
]


@pytest.mark.parametrize(
    "case",
    marked(STAGED, lambda case: (case.full_layout.engine, *case.settings)),
    ids=_named,
)
def test_evaluations_and_training_runs_in_any_order_match_one_process(case: Case, records: dict[str, Record]) -> None:
    """One Trainer evaluates first, trains several times and is interrupted."""
    record, expected = records[case.name], records[reference_of(case).name]
    assert "error" not in record and "error" not in expected, record.get("error", expected.get("error"))
    if "schedule_of_deepspeed" in case.settings:
        # DeepSpeed's own schedules have other rates than those of Transformers; each run must begin a new one.
        rates = record["learning_rate of first stage"]
        assert len(set(rates)) > 1 and record["learning_rate of second stage"] == rates
        return
    # A pipeline cannot predict, and context parallelism cannot evaluate either.
    missing = {"pp": ("prediction",), "cp": ("prediction", "evaluation")}.get(case.layout[:2], ())
    expected = {name: figures for name, figures in expected.items() if not any(word in name for word in missing)}
    assert record.keys() == expected.keys()
    for name, figures in expected.items():
        if name.startswith("grad_norm") and case.layout == "zero0" and "stock" in case.settings:
            # DeepSpeed's ZeRO-0 without the corrections of a plan reports no norm.
            assert record[name] == []
        elif name.startswith("grad_norm"):
            assert record[name] == pytest.approx(figures, rel=NORM_TOLERANCE), name
        else:
            assert record[name] == pytest.approx(figures, abs=LOSS_TOLERANCE, rel=0), name


FORMULAS = [
    reference_of(case)
    for case in (
        *_cases("single", "in_order"),
        *_cases("single", "in_order", "sgd", accumulation=3),
        *_cases("single", "in_order", "without_labels", "sgd"),
        *_cases("single", "in_order", "label_smoothing", "sgd", accumulation=2),
        *_cases("single", "in_order", "balance_loss", "sgd", accumulation=2),
        *_cases("single", "in_order", "distillation", "sgd", accumulation=2),
        *_cases("single", "in_order", "plain_distillation", "sgd"),
        *_cases("single", "in_order", "reverse_distillation", "sgd"),
        *_cases("single", "in_order", "own_term", "sgd"),
        *_cases("single", "in_order", "classes", "sgd", accumulation=2),
        *_cases("single", "in_order", "numbers", "sgd", accumulation=2),
        *_cases("single", "in_order", "several", "sgd", accumulation=2),
        *_cases("single", "in_order", "tags", "sgd", accumulation=2),
    )
]


@pytest.mark.once
@pytest.mark.parametrize("case", FORMULAS, ids=_named)
def test_one_process_trains_as_the_formulas_say(case: Case, records: dict[str, Record], directory: Path) -> None:
    record, expected = records[case.name], computed(case)
    assert record["losses"] == pytest.approx(expected["losses"], abs=LOSS_TOLERANCE)
    assert record["grad_norms"] == pytest.approx(expected["grad_norms"], rel=NORM_TOLERANCE, abs=1e-6)
    if "kl_per_token" in record:
        assert record["kl_per_token"] == pytest.approx(expected["kl_per_token"], rel=1e-5)
    weights = load_file(directory / case.name / "weights")
    assert max(difference(weights[name].double(), value) for name, value in expected["weights"].items()) < 1e-4
    if not {"without_labels", "classes", "numbers", "several", "tags"} & set(case.settings):
        # Losses that do not move would agree whatever the optimizer does, and so would clipping that never acts.
        assert record["losses"][-1] < record["losses"][0] - 0.02
        assert all(norm > 1.2 * MAX_GRAD_NORM for norm in record["grad_norms"])
