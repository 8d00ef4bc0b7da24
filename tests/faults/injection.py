"""One fault in a rank, at a step and a phase, read from `SHARDWRIGHT_FAULT`, which launchers pass on to ranks.

`KIND@PHASE:step=3,rank=1` with a phase of `step`, `mark` (all files of a checkpoint are written, its record is not) or
`load`. Kinds: `exception`, `sigterm`, `sigint`, `sigkill`, `sigstop`, `hang`, `nan-loss`, `inf-gradient`, `nan-weight`.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from typing import Any

VARIABLE = "SHARDWRIGHT_FAULT"
SIGNALS = {"sigterm": signal.SIGTERM, "sigint": signal.SIGINT, "sigkill": signal.SIGKILL, "sigstop": signal.SIGSTOP}
PHASES = ("step", "mark", "load")


@dataclass(frozen=True, kw_only=True)
class Fault:
    kind: str
    phase: str
    step: int = 1
    rank: int = 0

    @property
    def text(self) -> str:
        return f"{self.kind}@{self.phase}:step={self.step},rank={self.rank}"

    @property
    def environment(self) -> dict[str, str]:
        """What a launch needs in its environment."""
        return {VARIABLE: self.text}


def parse(text: str) -> Fault:
    kind, _, rest = text.partition("@")
    phase, _, numbers = rest.partition(":")
    fields = dict(pair.split("=") for pair in numbers.split(",") if pair)
    found = Fault(kind=kind, phase=phase, **{name: int(value) for name, value in fields.items()})
    assert found.phase in PHASES, text
    return found


def install() -> None:
    """Let every Trainer of this process break as the environment says; nothing where it says nothing."""
    text = os.environ.get(VARIABLE)
    if not text:
        return
    fault = parse(text)
    if fault.rank != int(os.environ.get("RANK", "0")):
        return
    from transformers import Trainer, trainer

    if fault.phase == "load":
        _before(Trainer, "__init__", lambda _: happen(fault))
        return
    if fault.kind in ("nan-loss", "inf-gradient"):
        _break_training_step(Trainer, fault)
        return
    trainer.DEFAULT_CALLBACKS.append(_callback(fault))


def happen(fault: Fault) -> None:
    print(f"fault: {fault.text} in process {os.getpid()}", flush=True)
    if fault.kind in SIGNALS:
        os.kill(os.getpid(), SIGNALS[fault.kind])
    elif fault.kind == "hang":
        time.sleep(3600)
    else:
        raise RuntimeError(f"fault: {fault.text}")


def _before(kind: type, name: str, action: Any) -> None:
    original = getattr(kind, name)

    def broken(self: Any, *args: Any, **kwargs: Any) -> Any:
        action(self)
        return original(self, *args, **kwargs)

    setattr(kind, name, broken)


def _break_training_step(kind: type, fault: Fault) -> None:
    import torch

    original = kind.training_step

    def broken(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        now = self.state.global_step + 1
        if fault.kind == "nan-loss" and now >= fault.step:
            compute = self.compute_loss
            self.compute_loss = lambda *a, **k: compute(*a, **k) * float("nan")
            try:
                return original(self, model, inputs, *args, **kwargs)
            finally:
                self.compute_loss = compute
        if fault.kind == "inf-gradient" and now == fault.step:
            first: Any = next(one for one in self.model.parameters() if one.requires_grad)
            handle = first.register_hook(lambda gradient: torch.full_like(gradient, float("inf")))
            try:
                return original(self, model, inputs, *args, **kwargs)
            finally:
                handle.remove()
                if hasattr(first, "to_local"):
                    # FSDP2 computes with another tensor, whose gradient passes no hook of this one.
                    first.grad.to_local().fill_(float("inf"))
        return original(self, model, inputs, *args, **kwargs)

    kind.training_step = broken  # type: ignore[attr-defined]


def _callback(fault: Fault) -> type:
    from transformers import TrainerCallback

    class FaultCallback(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            if fault.phase == "step" and state.global_step + 1 == fault.step:
                if fault.kind == "nan-weight":
                    _poison(model)
                else:
                    happen(fault)

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if fault.phase == "mark" and state.global_step == fault.step:
                happen(fault)

    return FaultCallback


def _poison(model: Any) -> None:
    import torch

    with torch.no_grad():
        first = next(one for one in model.parameters() if one.requires_grad)
        local = getattr(first, "ds_tensor", None)
        local = first.to_local() if hasattr(first, "to_local") else first if local is None else local
        local.view(-1)[:1] = float("nan")
