"""DeepSpeed under the Trainer: operators, offload, AutoTP, AutoEP, Ulysses, and parameters under every engine."""

from __future__ import annotations

import logging


def quiet_accelerator_choice() -> None:
    """Suppress DeepSpeed's import warning that a host has no accelerator.

    Accelerate and PEFT import DeepSpeed even in runs that do not use it (deepspeed 0.19.8,
    `accelerator/real_accelerator.py`).
    """
    logging.getLogger("DeepSpeed").addFilter(
        lambda record: not str(record.msg).startswith("Setting accelerator to CPU.")
    )
