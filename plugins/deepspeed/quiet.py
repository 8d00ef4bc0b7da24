"""DeepSpeed's remarks at import that tell a user of a host without accelerators nothing to act on."""

from __future__ import annotations

import logging

_CHOICE_OF_CPU = "Setting accelerator to CPU."


def quiet_accelerator_choice() -> None:
    """Keep DeepSpeed from warning on stderr, whenever it is imported, that a host without accelerators has none.

    Seen with deepspeed 0.19.8 (`accelerator/real_accelerator.py`): Accelerate and PEFT import it in runs that do not
    use it.
    """
    logging.getLogger("DeepSpeed").addFilter(_tells_something)


def _tells_something(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(_CHOICE_OF_CPU)
