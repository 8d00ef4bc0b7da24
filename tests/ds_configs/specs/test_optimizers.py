"""Every optimizer of the installed Transformers is in the table, and names and arguments are checked."""

from __future__ import annotations

import pytest
from shardwright.ds_configs.specs.job import TrainingJob, job_errors
from shardwright.ds_configs.specs.optimizers import _ARGUMENTS, OPTIMIZERS, REJECTED


def test_every_name_of_transformers_is_planned_or_has_a_reason() -> None:
    from transformers.training_args import OptimizerNames

    names = {name.value for name in OptimizerNames}
    assert names <= OPTIMIZERS.keys() | REJECTED.keys()
    assert OPTIMIZERS.keys() - names <= {"muon"}
    assert not OPTIMIZERS.keys() & REJECTED.keys()


def test_arguments_in_the_table_are_read_by_transformers() -> None:
    import inspect

    from transformers import trainer_optimizer

    source = inspect.getsource(trainer_optimizer)
    keys = {key for name, keys in _ARGUMENTS.items() if name != "muon" for key in keys}
    assert not [key for key in keys if f'"{key}"' not in source]


@pytest.mark.parametrize(
    ("job", "message"),
    [
        ({"optimizer": "adamw_8bits"}, "did you mean adamw_8bit?"),
        ({"optimizer": "OneBitAdam"}, "was removed from DeepSpeed"),
        ({"optimizer": "auto"}, "was removed"),
        ({"optimizer": "galore_adamw_8bit"}, "percentile_clipping arrives as max_unorm"),
        ({"optimizer": "galore_adamw", "optim_args": "rnk=64"}, "did you mean rank=?"),
        ({"optimizer": "adamw_torch_fused", "optim_args": "eps=1e-6"}, "reads no optim_args"),
        ({"optimizer": "sgd", "optim_args": "momentum=high"}, "momentum must be a number"),
        ({"optimizer": "stable_adamw", "optim_args": "kahan_sum=false"}, "kahan_sum must be one of true"),
    ],
)
def test_mistakes_name_the_nearest_known_value(job: dict[str, str], message: str) -> None:
    (error,) = job_errors(TrainingJob(**job))  # type: ignore[arg-type]
    assert message in str(error)
