"""Counts live tensor bytes on CPU ranks, by phase of a training step and by role (seen with torch 2.13).

`ByteMeter` is a dispatch mode that follows storages, not tensors: a view costs nothing, and what autograd saved counts
as long as autograd holds it. It sees every operator that goes through the dispatcher of its thread, which on the CPU
includes the backward pass and the reducer of DDP. It does not see memory that operators use inside, buffers of gloo
and oneDNN, temporaries of an operator on DTensors, sparse tensors, NumPy arrays, or threads of a data loader; a storage
that was made before the meter counts from the first operator that returns it. `AcceleratorMeter` has the same interface
and reads the caching allocator instead.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType, TracebackType
from typing import Any, Literal, Protocol, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ...ds_configs.memory.terms import Role

MeterPhase = Literal["init", "forward", "loss", "backward", "step", "other"]

ROLES: tuple[Role, ...] = ("weights", "gradients", "optimizer", "activations", "buckets", "other")

_ROLE_OF_PHASE: Mapping[MeterPhase, Role] = {
    "init": "other",
    "forward": "activations",
    "loss": "activations",
    "backward": "activations",
    "step": "optimizer",
    "other": "other",
}
_SHARDING_CODE = ("/deepspeed/runtime/zero/", "/deepspeed/runtime/utils.py", "/deepspeed/utils/", "/fsdp/_fully_shard/")
_MODEL_CODE = ("/torch/nn/modules/module.py", "/torch/autograd/graph.py", "/torch/autograd/__init__.py")


@dataclass(frozen=True, kw_only=True, slots=True)
class MeterReading:
    """Bytes of tensors on one rank."""

    current_bytes: int
    """Live now."""
    peaks: dict[MeterPhase, int]
    """Largest live bytes of each phase that was entered."""
    roles: dict[MeterPhase, dict[Role, int]]
    """What lived at each phase's peak, by role; empty where the meter cannot tell."""
    reserved_peak_bytes: int | None = None
    """Largest bytes that the caching allocator held; `None` on the CPU, which has none."""

    @property
    def peak_bytes(self) -> int:
        """Largest live bytes of all phases of a step."""
        return max((self.peaks[name] for name in self.peaks if name not in ("init", "other")), default=0)


class Meter(Protocol):
    """Interface of `ByteMeter` and `AcceleratorMeter`."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def enter(self, phase: MeterPhase) -> None:
        """Begin a phase."""

    def reset_peaks(self) -> None:
        """Forget the peaks so far."""

    def label(self, tensors: Iterable[torch.Tensor], role: Role) -> None:
        """Say what some tensors are for."""

    def reading(self) -> MeterReading:
        """Return what was measured so far."""


def start_meter() -> ByteMeter | AcceleratorMeter:
    """Return the meter for this rank's device; enter it before the model is built.

    >>> with start_meter() as meter:
    ...     meter.enter("forward")
    ...     kept = torch.zeros(1000)
    >>> meter.reading().peaks["forward"]
    4000
    """
    return AcceleratorMeter() if torch.cuda.is_available() else ByteMeter()


class ByteMeter(TorchDispatchMode):
    """Live bytes of CPU tensors by storage, while the mode is active.

    An operator costs about 10 microseconds more, 8 of them for having any dispatch mode, and a new storage 3 to 10 on
    top (an x86 server core).
    """

    def __init__(self) -> None:
        super().__init__()
        self._phase: MeterPhase = "init"
        self._sizes: dict[int, int] = {}
        self._storage_roles: dict[int, Role] = {}
        self._watchers: dict[int, weakref.ref[Any]] = {}
        self._totals: dict[Role, int] = dict.fromkeys(ROLES, 0)
        self._current = 0
        self._peaks: dict[MeterPhase, int] = {"init": 0}
        self._roles: dict[MeterPhase, dict[Role, int]] = {}
        self._code_kinds: dict[CodeType, Literal["sharding", "model"] | None] = {}
        self._replaced_resizes: list[Any] = []

    def __enter__(self) -> Self:
        # FSDP2 frees and refills gathered parameters through the storage, which no operator sees.
        original = torch.UntypedStorage.resize_
        self._replaced_resizes.append(original)

        def resize(storage: Any, size: int) -> Any:
            result = original(storage, size)
            if storage.device.type == "cpu":
                self._resized(storage)
            return result

        torch.UntypedStorage.resize_ = resize
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        torch.UntypedStorage.resize_ = self._replaced_resizes.pop()

    def enter(self, phase: MeterPhase) -> None:
        """Begin a phase; what lives already counts for it."""
        self._phase = phase
        self._note_peak()

    def reset_peaks(self) -> None:
        """Forget the peaks so far; what lives stays counted."""
        self._peaks, self._roles = {}, {}
        self._note_peak()

    def label(self, tensors: Iterable[torch.Tensor], role: Role) -> None:
        """Say what some tensors are for; what lives already moves to that role."""
        for plain in (part for tensor in tensors for part in _plain(tensor)):
            self._watch(plain)
            key = plain.untyped_storage()._cdata
            self._totals[self._storage_roles[key]] -= self._sizes[key]
            self._totals[role] += self._sizes[key]
            self._storage_roles[key] = role

    def reading(self) -> MeterReading:
        """Return live bytes now and the peaks of the phases since the last reset."""
        roles = {phase: dict(found) for phase, found in self._roles.items()}
        return MeterReading(current_bytes=self._current, peaks=dict(self._peaks), roles=roles)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, then count the storages of its results."""
        results = func(*args, **(kwargs or {}))
        if isinstance(results, torch.Tensor):
            self._watch_result(results)
        elif isinstance(results, tuple | list):
            for result in results:
                if isinstance(result, torch.Tensor):
                    self._watch_result(result)
                elif isinstance(result, tuple | list):
                    for inner in result:
                        if isinstance(inner, torch.Tensor):
                            self._watch_result(inner)
        return results

    def _watch_result(self, tensor: torch.Tensor) -> None:
        for plain in _plain(tensor):
            self._watch(plain)

    def _watch(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._sizes:
            if self._sizes[key] != size:
                self._resized(storage)
            return
        role = self._role_of_new_storage()

        def freed(_: object) -> None:
            self._change(key, -self._sizes.pop(key))
            del self._storage_roles[key], self._watchers[key]

        self._watchers[key] = weakref.ref(storage, freed)
        self._storage_roles[key] = role
        self._sizes[key] = size
        self._change(key, size)
        self._note_peak()

    def _resized(self, storage: Any) -> None:
        key = storage._cdata
        if key in self._sizes:
            size = storage.nbytes()
            self._change(key, size - self._sizes[key])
            self._sizes[key] = size
            self._note_peak()

    def _change(self, key: int, difference: int) -> None:
        self._current += difference
        self._totals[self._storage_roles[key]] += difference

    def _note_peak(self) -> None:
        if self._current >= self._peaks.get(self._phase, -1):
            self._peaks[self._phase] = self._current
            self._roles[self._phase] = dict(self._totals)

    def _role_of_new_storage(self) -> Role:
        """Sharding code that runs inside a module or the backward pass fills buckets; else the phase decides."""
        if self._phase in ("init", "other"):
            return _ROLE_OF_PHASE[self._phase]
        frame: FrameType | None = sys._getframe(3)
        while frame is not None:
            code = frame.f_code
            if code not in self._code_kinds:
                self._code_kinds[code] = _code_kind(code.co_filename)
            kind = self._code_kinds[code]
            if kind is not None:
                return "buckets" if kind == "sharding" and self._phase != "step" else _ROLE_OF_PHASE[self._phase]
            frame = frame.f_back
        return _ROLE_OF_PHASE[self._phase]


class AcceleratorMeter:
    """The same interface on an accelerator, from the statistics of torch's caching allocator; roles stay unknown."""

    def __init__(self) -> None:
        self._phase: MeterPhase = "init"
        self._peaks: dict[MeterPhase, int] = {}
        self._reserved = 0

    def __enter__(self) -> Self:
        torch.cuda.reset_peak_memory_stats()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._note_peak()

    def enter(self, phase: MeterPhase) -> None:
        """Begin a phase: kernels that were started before allocate no more, so nothing needs to be awaited."""
        self._note_peak()
        self._phase = phase
        torch.cuda.reset_peak_memory_stats()

    def reset_peaks(self) -> None:
        """Forget the peaks so far."""
        self._peaks, self._reserved = {}, 0
        torch.cuda.reset_peak_memory_stats()

    def label(self, tensors: Iterable[torch.Tensor], role: Role) -> None:
        """Do nothing: the allocator knows no tensors."""

    def reading(self) -> MeterReading:
        """Return allocated bytes now and the peaks of the phases since the last reset."""
        self._note_peak()
        return MeterReading(
            current_bytes=torch.cuda.memory_allocated(),
            peaks=dict(self._peaks),
            roles={},
            reserved_peak_bytes=self._reserved,
        )

    def _note_peak(self) -> None:
        self._peaks[self._phase] = max(self._peaks.get(self._phase, 0), torch.cuda.max_memory_allocated())
        self._reserved = max(self._reserved, torch.cuda.max_memory_reserved())


def _plain(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return the plain CPU tensors that a tensor consists of: subclasses such as DTensor hold theirs inside."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        parts = (getattr(tensor, name) for name in flatten()[0])
        return [plain for part in parts if isinstance(part, torch.Tensor) for plain in _plain(part)]
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return ()
    return () if torch._C._functorch.is_functorch_wrapped_tensor(tensor) else (tensor,)


def _code_kind(filename: str) -> Literal["sharding", "model"] | None:
    if filename.endswith("/deepspeed/runtime/zero/linear.py"):
        return "model"
    if any(part in filename for part in _SHARDING_CODE):
        return "sharding"
    return "model" if filename.endswith(_MODEL_CODE) else None
