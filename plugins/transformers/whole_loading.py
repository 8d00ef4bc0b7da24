"""Weights on every rank where Transformers would load them on the first rank alone.

Seen with transformers 5.17.0 and accelerate 1.15.0: with `fsdp_cpu_ram_efficient_loading`, `from_pretrained` gives the
other ranks of a node uninitialised weights (modeling_utils.py, `is_fsdp_enabled() and not is_local_dist_rank_0()`), and
`accelerator.prepare` fills them from the first rank. A second model that never goes through `prepare`, such as a
teacher, keeps them: on two ranks a trained one answered with a cross-entropy of 3.86 instead of 2.29, without a word.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

_VARIABLE = "FSDP_CPU_RAM_EFFICIENT_LOADING"
_ON = ("1", "true", "yes", "on", "y", "t")


@contextmanager
def weights_on_every_rank() -> Iterator[None]:
    """Let `from_pretrained` read the weights on every rank inside the block."""
    from accelerate.utils import patch_environment

    with patch_environment(**{_VARIABLE: "false"}):
        yield


def loads_on_first_rank() -> bool:
    """Tell whether `from_pretrained` reads weights on the first rank of a node alone."""
    return all(os.environ.get(name, "").lower() in _ON for name in ("ACCELERATE_USE_FSDP", _VARIABLE))
