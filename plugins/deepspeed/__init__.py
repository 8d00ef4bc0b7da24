"""DeepSpeed under the Trainer: operators, offload, AutoTP, AutoEP, Ulysses, and parameters under every engine."""

from __future__ import annotations

import logging


def quiet_accelerator_choice() -> None:
    """Suppress DeepSpeed's import warning about hosts without accelerator: Accelerate and PEFT import it in any run."""
    logging.getLogger("DeepSpeed").addFilter(
        lambda record: not str(record.msg).startswith("Setting accelerator to CPU.")
    )
