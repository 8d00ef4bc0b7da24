"""Host time of ZeRO-3's hooks by module, tensor and collective: `python benchmarks/zero3_host_time.py`.

One process is rank 0 of eight in torch's fake process group, whose collectives return immediately. Layers of 16 x 16
weights compute next to nothing, so what DeepSpeed adds to a pass is the host time of its hooks. The differences between
pairs of models give one price each; a small Llama and GPT-2 are then predicted from these prices. Seconds are processor
time, the fastest of many passes, because other work on the machine only adds to them.
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

WIDTH = 16
LAYERS = 8
RANKS = 8


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model of equal layers; each layer is itself a module."""

    empty: int = 2
    """Modules without parameters in a layer."""
    weights: int = 2
    """Modules with one weight in a layer."""
    persistent: bool = False
    """Whether weights stay gathered, like norms and biases."""
    frozen: bool = False
    prefetched: bool = False
    """Whether the weights of a layer are gathered in one call, instead of one call each."""
    one_reduction: bool = False
    """Whether gradients of a layer are reduced in one call, instead of one call each."""
    recomputed: bool = False


SHAPES = {
    "small": Shape(),
    "more modules": Shape(empty=10),
    "more weights": Shape(weights=10),
    "persistent weights": Shape(weights=10, persistent=True),
    "frozen weights": Shape(weights=10, frozen=True),
    "fewer gathers": Shape(weights=10, prefetched=True),
    "fewer reductions": Shape(weights=10, one_reduction=True),
}


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Host seconds of one event; a pass is forward, backward or recomputed."""

    module_forward: float
    module_backward: float
    gathered_forward: float
    """A gathered tensor, with its own call."""
    gathered_backward: float
    gather_call: float
    """The part of a gathered tensor that a call for several tensors saves."""
    gradient: float
    """A gradient, with its own reduction."""
    reduction_call: float


def start() -> None:
    """Become rank 0 of a process group whose collectives do nothing."""
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(RANKS), "DS_ACCELERATOR": "cpu"}
    import torch
    from torch.testing._internal.distributed.fake_pg import FakeStore

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    import deepspeed

    deepspeed.init_distributed(dist_backend="fake")


def layered(shape: Shape) -> Any:
    import torch

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.empty = torch.nn.ModuleList(torch.nn.Identity() for _ in range(shape.empty))
            self.linear = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(shape.weights))

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            for module in (*self.empty, *self.linear):
                hidden = module(hidden)
            return hidden

    model = torch.nn.Sequential(*(Layer() for _ in range(LAYERS)))
    if shape.frozen:
        # The first layer trains, because DeepSpeed needs a parameter for its optimizer.
        model[1:].requires_grad_(False)
    return model


def sharded(model: Any, shape: Shape) -> Any:
    """Return DeepSpeed's engine for a model, with buckets that make the calls of a shape."""
    import deepspeed

    layer = WIDTH * WIDTH * shape.weights
    zero = {
        "stage": 3,
        "stage3_param_persistence_threshold": 10**6 if shape.persistent else 0,
        "stage3_prefetch_bucket_size": layer if shape.prefetched else 1,
        "stage3_max_reuse_distance": 0,
        "stage3_max_live_parameters": 2 * layer,
        "reduce_bucket_size": layer if shape.one_reduction else WIDTH * WIDTH,
    }
    optimizer = {"type": "Adam", "params": {"lr": 0.0, "torch_adam": True}}
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 10**6}
    config |= {"zero_optimization": zero, "optimizer": optimizer}
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def passes(model: Any, data: Sequence[Any], backward: Callable[[Any], Any]) -> tuple[float, float]:
    """Return the processor seconds of one forward and one backward pass."""
    started = time.process_time()
    out = model(*data)
    loss = out.sum() if hasattr(out, "sum") else out.loss
    between = time.process_time()
    backward(loss)
    return between - started, time.process_time() - between


def measured(models: dict[str, tuple[Any, Any, Sequence[Any]]], rounds: int) -> dict[str, tuple[float, float]]:
    """Return the fastest forward and backward pass under ZeRO-3, less those of the same model without it."""
    best: dict[str, list[float]] = {name: [float("inf")] * 4 for name in models}
    for number in range(rounds + 3):
        for name, (plain, engine, data) in models.items():
            seconds = (
                *passes(engine, data, engine.backward),
                *passes(plain, data, lambda loss: loss.backward()),
            )
            # In its first passes DeepSpeed records the order of modules.
            if number >= 3:
                best[name] = [min(pair) for pair in zip(best[name], seconds, strict=True)]
    return {name: (each[0] - each[2], each[1] - each[3]) for name, each in best.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    start()
    import torch

    data = [torch.randn(2, WIDTH, requires_grad=True)]
    models = {name: (layered(shape), sharded(layered(shape), shape), data) for name, shape in SHAPES.items()}
    for name, (f, b) in measured(models, options.rounds).items():
        print(f"{name:20s} forward {f / LAYERS * 1e6:8.1f} us per layer, backward {b / LAYERS * 1e6:8.1f}")


if __name__ == "__main__":
    main()
