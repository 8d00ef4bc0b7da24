"""Live tensor bytes on a rank, by phase of a training step and by role (torch 2.13)."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TrainerCallback

from ..ds_configs.specs.terms import ROLES, Role
from . import patches

if TYPE_CHECKING:
    from transformers import Trainer

MeterPhase = Literal["init", "generate", "score", "forward", "loss", "backward", "step", "other"]

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
    """Live bytes at each phase's peak, by role; empty if the meter does not know roles."""
    reserved_peak_bytes: int | None = None
    """Largest bytes that the caching allocator held; `None` on the CPU, which has none."""
    host_peak_bytes: int = 0
    """Largest bytes of tensors created inside `host_memory`; 0 on an accelerator, which does not count them."""

    @property
    def peak_bytes(self) -> int:
        """Largest live bytes of all phases of a step."""
        return max((self.peaks[name] for name in self.peaks if name not in ("init", "other")), default=0)


def start_meter() -> Meter:
    """Return the meter for this rank's device; enter it before the model is built.

    >>> with start_meter() as meter:
    ...     meter.enter("forward")
    ...     kept = torch.zeros(1000)
    >>> meter.reading().peaks["forward"]
    4000
    """
    return AcceleratorMeter() if torch.cuda.is_available() else ByteMeter()


_HOST_BLOCKS: list[None] = []


@contextmanager
def host_memory() -> Iterator[None]:
    """Count tensors that are created inside the block as host memory, which CPU ranks cannot distinguish otherwise."""
    _HOST_BLOCKS.append(None)
    try:
        yield
    finally:
        _HOST_BLOCKS.pop()


class ByteMeter(TorchDispatchMode):
    """Live bytes of CPU tensors by storage, while the mode is active.

    An operator costs about 10 microseconds more, 8 of them for having any dispatch mode, and a new storage 3 to 10 on
    top (an x86 server core). Above `limit_bytes` an operator raises `torch.OutOfMemoryError` once, as an accelerator's
    allocator does.
    """

    def __init__(self, *, limit_bytes: int | None = None) -> None:
        super().__init__()
        self._limit = limit_bytes
        self._phase: MeterPhase = "init"
        self._sizes: dict[int, int] = {}
        self._storage_roles: dict[int, Role | None] = {}
        """`None` for host memory."""
        self._watchers: dict[int, weakref.ref[Any]] = {}
        self._totals: dict[Role, int] = dict.fromkeys(ROLES, 0)
        self._current = 0
        self._host_bytes = self._host_peak = 0
        self._peaks: dict[MeterPhase, int] = {"init": 0}
        self._roles: dict[MeterPhase, dict[Role, int]] = {}
        self._code_kinds: dict[CodeType, Literal["sharding", "model"] | None] = {}
        self._followed_resizes: list[AbstractContextManager[None]] = []

    def __enter__(self) -> Self:
        # FSDP2 frees and refills gathered parameters through the storage, which no operator sees.
        def following(original: Callable[[Any, int], Any]) -> Callable[[Any, int], Any]:
            def resize(storage: torch.UntypedStorage, size: int) -> Any:
                result = original(storage, size)
                if storage.device.type == "cpu":
                    self._resized(storage)
                return result

            return resize

        followed = patches.applied("metered-storages", following)
        followed.__enter__()
        self._followed_resizes.append(followed)
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._followed_resizes.pop().__exit__(None, None, None)

    def enter(self, phase: MeterPhase) -> None:
        """Begin a phase; bytes that are already live count for it."""
        self._phase = phase
        self._note_peak()

    def reset_peaks(self) -> None:
        """Discard the peaks so far; live bytes are still counted."""
        self._peaks, self._roles = {}, {}
        self._host_peak = self._host_bytes
        self._note_peak()

    def label(self, tensors: Iterable[torch.Tensor], role: Role) -> None:
        """Assign a role to tensors; their live bytes move to that role."""
        for plain in (part for tensor in tensors for part in _plain(tensor)):
            self._watch(plain)
            key = plain.untyped_storage()._cdata
            if (former := self._storage_roles[key]) is not None:
                self._totals[former] -= self._sizes[key]
                self._totals[role] += self._sizes[key]
                self._storage_roles[key] = role

    def reading(self) -> MeterReading:
        """Return live bytes now and the peaks of the phases since the last reset."""
        roles = {phase: dict(found) for phase, found in self._roles.items()}
        return MeterReading(
            current_bytes=self._current, peaks=dict(self._peaks), roles=roles, host_peak_bytes=self._host_peak
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, then count the storages of its results; of a DTensor's operator, those inside of it."""
        if any(issubclass(kind, DTensor) for kind in types):
            # DTensor runs operators on its local tensors with this mode on: ring attention has many in one.
            return NotImplemented
        results = func(*args, **(kwargs or {}))
        for tensor in _tensors(results):
            for plain in _plain(tensor):
                self._watch(plain)
        if self._limit is not None and self._current > self._limit:
            limit, self._limit = self._limit, None
            raise torch.OutOfMemoryError(
                f"tensors need {self._current:,} bytes, but the limit of this rank is {limit:,}"
            )
        return results

    def _watch(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._sizes:
            if self._sizes[key] != size:
                self._resized(storage)
            return
        role = None if _HOST_BLOCKS else self._role_of_new_storage()

        def freed(_: object) -> None:
            self._change(key, -self._sizes.pop(key))
            del self._storage_roles[key], self._watchers[key]

        self._watchers[key] = weakref.ref(storage, freed)
        self._storage_roles[key] = role
        self._sizes[key] = size
        self._change(key, size)
        self._note_peak()

    def _resized(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._sizes:
            size = storage.nbytes()
            self._change(key, size - self._sizes[key])
            self._sizes[key] = size
            self._note_peak()

    def _change(self, key: int, difference: int) -> None:
        if (role := self._storage_roles[key]) is None:
            self._host_bytes += difference
            self._host_peak = max(self._host_peak, self._host_bytes)
            return
        self._current += difference
        self._totals[role] += difference

    def _note_peak(self) -> None:
        if self._current >= self._peaks.get(self._phase, -1):
            self._peaks[self._phase] = self._current
            self._roles[self._phase] = dict(self._totals)

    def _role_of_new_storage(self) -> Role:
        """Sharding code that runs inside a module or the backward pass fills buckets; else the phase decides."""
        if self._phase in ("init", "other"):
            return "other"
        if self._phase == "step":
            return "optimizer"
        frame: FrameType | None = sys._getframe(3)
        while frame is not None:
            code = frame.f_code
            if code not in self._code_kinds:
                filename, self._code_kinds[code] = code.co_filename, None
                if filename.endswith((*_MODEL_CODE, "/deepspeed/runtime/zero/linear.py")):
                    self._code_kinds[code] = "model"
                elif any(part in filename for part in _SHARDING_CODE):
                    self._code_kinds[code] = "sharding"
            kind = self._code_kinds[code]
            if kind is not None:
                return "buckets" if kind == "sharding" else "activations"
            frame = frame.f_back
        return "activations"


class AcceleratorMeter:
    """The same interface on an accelerator, from the statistics of torch's caching allocator; roles stay unknown."""

    def __init__(self) -> None:
        self._phase: MeterPhase = "init"
        self._peaks: dict[MeterPhase, int] = {}
        self._reserved = 0

    def __enter__(self) -> Self:
        torch.cuda.reset_peak_memory_stats()
        return self

    def __exit__(self, *raised: Any) -> None:
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


Meter = ByteMeter | AcceleratorMeter


def _plain(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return the plain CPU tensors that a tensor consists of: subclasses such as DTensor hold theirs inside."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        parts = (getattr(tensor, name) for name in flatten()[0])
        return [plain for part in parts if isinstance(part, torch.Tensor) for plain in _plain(part)]
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return ()
    return () if torch._C._functorch.is_functorch_wrapped_tensor(tensor) else (tensor,)


WARM_UP_STEPS = 2
"""Optimizer states and DDP's final buckets appear in the first step; ZeRO-3 prefetches from the second step on."""

_OPTIMIZER_ATTRIBUTES = (
    "single_partition_of_fp32_groups",
    "fp32_partitioned_groups_flat",
    "fp32_groups_flat_partition",
)
_WEIGHT_ATTRIBUTES = ("bit16_groups_flat", "fp16_partitioned_groups_flat", "bf16_groups_flat")
_GRADIENT_ATTRIBUTES = ("averaged_gradients", "grad_partitions_flat_buffer", "fp32_groups_gradients_flat")


_PHASE_OF_INSTRUCTION: Mapping[str, MeterPhase] = {
    "ForwardPass": "forward",
    "BackwardPass": "backward",
    "ReduceGrads": "backward",
    "OptimizerStep": "step",
}
"""Phase that each instruction of a pipeline's schedule begins."""


def meter_trainer(trainer: Trainer, meter: Meter) -> None:
    """Make `meter` follow the phases of `trainer`'s steps, and discard the first `WARM_UP_STEPS` of them.

    The loss phase lasts from the output head's forward pass until the gradient reaches the head's input; without an
    output head, or with one that computes no logits, the forward phase includes it, and without logits also the
    backward phase. Of a trainer that generates, completions and their scores are phases of their own. The
    micro-batches of a pipeline interleave, so a phase includes memory that other phases of the step keep. Call it
    before `trainer.train()`.
    """

    def metered(compute_loss: Callable[..., Any]) -> Callable[..., Any]:
        def metered_loss(*args: object, **kwargs: object) -> Any:
            meter.enter("forward")
            return compute_loss(*args, **kwargs)

        return metered_loss

    # A pipeline's schedule never calls it.
    if not hasattr(trainer.model, "stages"):
        patches.apply("metered-loss", metered, on=trainer)

    def metered_generation(generate: Callable[..., Any]) -> Callable[..., Any]:
        def generating(*args: object, **kwargs: object) -> Any:
            meter.enter("generate")
            completions = generate(*args, **kwargs)
            meter.enter("score")
            return completions

        return generating

    if hasattr(trainer, "_generate"):
        patches.apply("metered-generation", metered_generation, on=trainer)
    for parameter in trainer.model.parameters():
        if parameter.requires_grad:
            parameter.register_hook(lambda gradient: meter.label([gradient], "gradients"))
    trainer.add_callback(_PhaseCallback(trainer, meter))


class _PhaseCallback(TrainerCallback):
    def __init__(self, trainer: Trainer, meter: Meter) -> None:
        self._trainer = trainer
        self._meter = meter
        self._wrapped = False

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self._wrapped:
            self._wrapped = True
            # Tensor parallelism replaces the output head when the engine is made.
            model = self._trainer.model
            head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
            if head is not None:
                head.register_forward_pre_hook(self._enter_loss)
            self._wrap_step()
            self._follow_instructions()
        self._label()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._meter.enter("other")
        if state.global_step == WARM_UP_STEPS:
            self._meter.reset_peaks()

    def _enter_loss(self, _: Any, inputs: tuple[Any, ...]) -> None:
        if inputs and isinstance(inputs[0], torch.Tensor) and inputs[0].requires_grad and torch.is_grad_enabled():
            self._meter.enter("loss")
            inputs[0].register_hook(lambda _: self._meter.enter("backward"))

    def _wrap_step(self) -> None:
        """DeepSpeed steps inside `accelerator.backward`; elsewhere the step begins when that returns."""
        accelerator = self._trainer.accelerator
        engine = getattr(accelerator, "deepspeed_engine_wrapped", None)

        def entering(method: Callable[..., Any]) -> Callable[..., Any]:
            def metered(*args: object, **kwargs: object) -> Any:
                if engine is not None:
                    self._enter_step()
                result = method(*args, **kwargs)
                if engine is None:
                    self._enter_step()
                return result

            return metered

        if engine is not None:
            patches.apply("metered-engine-step", entering, on=engine.engine)
        else:
            patches.apply("metered-backward", entering, on=accelerator)

    def _follow_instructions(self) -> None:
        """Let the instructions of a pipeline's schedule begin phases."""
        engine: Any = getattr(getattr(self._trainer.accelerator, "deepspeed_engine_wrapped", None), "engine", None)
        if not hasattr(engine, "_INSTRUCTION_MAP"):
            return

        def entering(execute: Callable[..., Any], phase: MeterPhase) -> Callable[..., Any]:
            # A function, because instructions are called as methods of the engine.
            def run(*args: object, **kwargs: object) -> Any:
                self._meter.enter(phase)
                return execute(*args, **kwargs)

            return run

        def metered(instructions: dict[type, Callable[..., None]]) -> dict[type, Callable[..., None]]:
            phases = {kind: _PHASE_OF_INSTRUCTION.get(kind.__name__) for kind in instructions}
            return instructions | {
                kind: entering(instructions[kind], phase) for kind, phase in phases.items() if phase is not None
            }

        patches.apply("metered-instructions", metered, on=engine)
        patches.apply("metered-stage-loss", partial(entering, phase="loss"), on=engine.module)

    def _enter_step(self) -> None:
        if not self._trainer.accelerator.sync_gradients:
            self._meter.enter("other")
            return
        self._label()
        self._meter.enter("step")

    def _label(self) -> None:
        """Assign roles to the tensors that the engine keeps between steps."""
        trainer: Any = self._trainer
        optimizer = trainer.optimizer
        # TRL's reference and reward models, which may be functions.
        models = [trainer.model_wrapped, getattr(trainer, "ref_model", None), *getattr(trainer, "reward_funcs", ())]
        parameters = [p for model in models if isinstance(model, torch.nn.Module) for p in model.parameters()]
        self._meter.label((p if hasattr(p, "_local_tensor") else p.data for p in parameters), "weights")
        # Partitions of ZeRO-3.
        kept = (getattr(p, name, None) for p in parameters for name in ("ds_tensor", "ds_secondary_tensor"))
        self._meter.label((shard for shard in kept if isinstance(shard, torch.Tensor)), "weights")
        self._meter.label((p.grad for p in parameters if p.grad is not None), "gradients")
        # Accelerate's optimizer, DeepSpeed's inside it, and torch's inside that: each has its own tensors.
        holders = [optimizer]
        while (inner := getattr(holders[-1], "optimizer", None)) is not None and len(holders) < 4:
            holders.append(inner)
        for holder in holders:
            self._meter.label(_tensors(getattr(holder, "state", None)), "optimizer")
            for role, names in (
                ("optimizer", _OPTIMIZER_ATTRIBUTES),
                ("weights", _WEIGHT_ATTRIBUTES),
                ("gradients", _GRADIENT_ATTRIBUTES),
            ):
                for name in names:
                    self._meter.label(_tensors(getattr(holder, name, None)), role)  # type: ignore[arg-type]
            for name in ("ipg_buckets", "_DeepSpeedZeroOptimizer_Stage3__ipg_bucket_flat_buffer"):
                buckets = getattr(holder, name, None)
                if isinstance(buckets, dict):
                    buckets = [getattr(bucket, "buffer", None) for bucket in buckets.values()]
                self._meter.label(_tensors(buckets), "buckets")


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _tensors(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _tensors(inner)
