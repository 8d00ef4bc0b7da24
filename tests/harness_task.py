"""A task of lm-evaluation-harness that chooses between answers, as its task file."""

from __future__ import annotations

from pathlib import Path

import yaml


def write_task(file: Path, rows: Path) -> None:
    """Write a task named as its file, whose rows each have a `question`, `choices` and the `label` of the right one."""
    task = {
        "task": file.stem,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(rows)}},
        "output_type": "multiple_choice",
        "test_split": "test",
        "doc_to_text": "question",
        "doc_to_choice": "choices",
        "doc_to_target": "label",
        "metric_list": [{"metric": "acc"}],
    }
    file.write_text(yaml.safe_dump(task))
