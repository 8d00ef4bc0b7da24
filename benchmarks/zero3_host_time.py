"""Host time of ZeRO-3's hooks by module, tensor and reduction: `python benchmarks/zero3_host_time.py`.

A process is rank 0 in torch's fake process group, whose collectives return immediately, and layers of 16 x 16 weights
compute next to nothing: what DeepSpeed adds to a pass is the Python time of its hooks. Pairs of models that differ in
one number give the prices in `ds_configs/data/step_time.toml`; a small Llama and GPT-2 are predicted from these.

Seconds are processor time, the fastest of many passes. Other work on the processor still slows them, so they are
scaled to a host on which the Llama without DeepSpeed takes what the constants of an idle CPU say.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from shardwright.ds_configs.memory.model_states import reduced_buckets, zero3_gathers
from shardwright.ds_configs.models.families import model_spec_from_config
from shardwright.ds_configs.specs.layout import ZeroOptions
from shardwright.ds_configs.step_time.rates import TRANSFORMERS, constants_of

WIDTH = 16
LAYERS = 4
RANKS = (8, 64)
LANGUAGE_MODELS = ("Llama", "GPT-2")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What each of the equal layers of a model contains; the layer is a module too."""

    empty: int = 2
    """Modules without parameters."""
    weights: int = 8
    """Modules with one weight."""
    persistent: bool = False
    """Whether weights stay gathered, like norms and biases."""
    reductions: int = 1
    """Reductions of the gradients of a layer: one, or one for each weight."""


SHAPES = {
    "small": Shape(),
    "more modules": Shape(empty=34),
    "persistent": Shape(persistent=True),
    "more reductions": Shape(reductions=8),
    "more gradients": Shape(weights=24, persistent=True),
}

Passes = tuple[float, float]
"""Seconds of a layer's forward and backward pass."""


def measured(ranks: int, rounds: int) -> dict[str, tuple[Passes, Passes]]:
    """Return the seconds of each model under ZeRO-3, and without it, in this process."""
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks), "DS_ACCELERATOR": "cpu"}
    import torch
    from torch.testing._internal.distributed.fake_pg import FakeStore

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    import deepspeed

    deepspeed.init_distributed(dist_backend="fake")
    hidden, tokens = torch.randn(2, WIDTH, requires_grad=True), torch.randint(0, 64, (1, 4))
    models = {name: (_layers(shape), _sharded(_layers(shape), shape), hidden) for name, shape in SHAPES.items()}
    for name in LANGUAGE_MODELS:
        models[name] = (_language_model(name), _sharded(_language_model(name), Shape(reductions=8)), tokens)
    best = {name: [float("inf")] * 4 for name in models}
    for number in range(rounds + 3):
        for name, (plain, engine, data) in models.items():
            seconds = (*_passes(engine, data, engine.backward), *_passes(plain, data, torch.Tensor.backward))
            # In its first passes DeepSpeed records the order of modules.
            if number >= 3:
                best[name] = [min(pair) for pair in zip(best[name], seconds, strict=True)]
    return {name: ((each[0], each[1]), (each[2], each[3])) for name, each in best.items()}


def _layers(shape: Shape) -> Any:
    import torch

    layers = [
        torch.nn.Sequential(
            *(torch.nn.Identity() for _ in range(shape.empty)),
            *(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(shape.weights)),
        )
        for _ in range(LAYERS)
    ]
    return torch.nn.Sequential(*layers)


def _configuration(name: str) -> Any:
    from transformers import GPT2Config, LlamaConfig

    outside = {"vocab_size": 64, "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0}
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 1}
    if name == "Llama":
        return LlamaConfig(intermediate_size=WIDTH, **sizes, **outside)
    return GPT2Config(n_inner=WIDTH, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **sizes, **outside)


def _language_model(name: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(_configuration(name), attn_implementation="sdpa")


def _options(shape: Shape) -> ZeroOptions:
    weight = WIDTH * WIDTH
    return ZeroOptions(
        # Biases and norms stay gathered, as by default.
        stage3_param_persistence_threshold=weight if shape.persistent else weight - 1,
        # Weights are gathered one by one, in each pass.
        stage3_prefetch_bucket_size=1,
        stage3_max_reuse_distance=0,
        stage3_max_live_parameters=2 * weight * shape.weights,
        reduce_bucket_size=weight * (1 if shape.reductions > 1 else shape.weights),
    )


def _sharded(model: Any, shape: Shape) -> Any:
    import deepspeed

    options = asdict(_options(shape))
    zero = {name: value for name, value in options.items() if name.startswith("stage3")}
    zero |= {"stage": 3, "reduce_bucket_size": options["reduce_bucket_size"]}
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 10**6, "zero_optimization": zero}
    config["optimizer"] = {"type": "Adam", "params": {"lr": 0.0, "torch_adam": True}}
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def _passes(model: Any, data: Any, backward: Callable[[Any], Any]) -> Passes:
    started = time.process_time()
    loss = model(data).sum() if data.is_floating_point() else model(data, labels=data).loss
    between = time.process_time()
    backward(loss)
    return (between - started) / LAYERS, (time.process_time() - between) / LAYERS


def hooks(found: Mapping[str, Any]) -> dict[str, Passes]:
    """Return the seconds that ZeRO-3 adds to both passes of each model, on an idle host."""
    idle = constants_of("CPU").kernel_seconds * (TRANSFORMERS.kernels_forward + TRANSFORMERS.kernels_backward)
    scale = idle / sum(found["Llama"][1])
    return {
        name: (scale * (sharded[0] - plain[0]), scale * (sharded[1] - plain[1]))
        for name, (sharded, plain) in found.items()
    }


def prices(added: Mapping[str, Passes]) -> tuple[float, float, float, float]:
    """Return the seconds of a module and of a gathered tensor, means of both passes, of a gradient and a reduction."""
    small, modules, persistent, reductions, gradients = (added[name] for name in SHAPES)
    module = (sum(modules) - sum(small)) / 2 / 32
    gather = (sum(small) - sum(persistent)) / 2 / 8
    gradient = (sum(gradients) - sum(persistent)) / 16 - 2 * module
    return module, gather, gradient, (reductions[1] - small[1]) / 7


def table(found: Mapping[int, Mapping[str, Any]]) -> str:
    """Return prices by number of ranks, and the predicted and measured hooks of language models, as Markdown."""
    lines = ["| ranks | module | gather | gradient | reduction | Llama layer | predicted | GPT-2 layer | predicted |"]
    lines.append("|" + "---|" * 9)
    for ranks, values in found.items():
        added = hooks(values)
        module, gather, gradient, reduction = prices(added)
        cells = [f"{price * 1e6:.0f} µs" for price in (module, gather, gradient, reduction)]
        for name in LANGUAGE_MODELS:
            model = model_spec_from_config(_configuration(name).to_dict(), name=name)
            assert model is not None
            options = _options(Shape(reductions=8))
            passes = zero3_gathers(model, options, recomputes=False)
            seconds = module * sum(each.modules for each in passes) + gather * sum(each.tensors for each in passes)
            seconds += gradient * sum(parameter.count for parameter in model.parameters)
            seconds += reduction * reduced_buckets(model, options.reduce_bucket_size)
            cells += [f"{sum(added[name]) * 1e3:.1f} ms", f"{seconds / LAYERS * 1e3:.1f} ms"]
        lines.append(f"| {ranks} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure with each number of ranks in a fresh process, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--ranks", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ranks is not None:
        print(json.dumps(measured(options.ranks, options.rounds)))
        return
    found = {}
    for ranks in RANKS:
        command = [sys.executable, __file__, "--rounds", str(options.rounds), "--ranks", str(ranks)]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        found[ranks] = json.loads(output.splitlines()[-1])
    print(table(found))


if __name__ == "__main__":
    main()
