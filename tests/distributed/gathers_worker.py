"""Runs on every rank: writes the collectives of one step of DeepSpeed's ZeRO-3."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from shardwright.plugins.accelerate import configure_cpu_ranks
from small_models import llama, mixtral

CASES = {
    # A layer of this Llama has 36,864 elements in seven matrices, of which the largest have 8,192.
    "tensors fill buckets": (llama, {"num_hidden_layers": 6}, (9000, 80_000, 80_000), False),
    "tied embeddings": (llama, {"num_hidden_layers": 4, "tie_word_embeddings": True}, (9000, 80_000, 80_000), False),
    "lean and recomputed": (llama, {"num_hidden_layers": 6}, (2000, 20_000, 0), True),
    # Two tensors of a layer have all of its experts, 65,536 and 131,072 elements.
    "tensors exceed buckets": (mixtral, {"num_local_experts": 8}, (9000, 80_000, 80_000), False),
}
"""How to build each model, with which sizes, with which prefetch bucket, live parameters and reuse distance; whether
layers are recomputed."""
REDUCE_BUCKET, PERSISTENCE = 10_000, 100


def collectives(model: Any, options: tuple[int, int, int], *, recomputes: bool) -> dict[str, int]:
    """Return the calls, modules and gathered tensors of the fourth step, after the trace is complete."""
    import deepspeed
    import torch
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    elements = sum(parameter.numel() for parameter in model.parameters())
    if recomputes:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    configuration = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": REDUCE_BUCKET,
            "stage3_param_persistence_threshold": PERSISTENCE,
            "stage3_prefetch_bucket_size": options[0],
            "stage3_max_live_parameters": options[1],
            "stage3_max_reuse_distance": options[2],
        },
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=configuration)
    counted = {"parameters": elements, "gathers": 0, "gathered": 0, "tensors": 0, "modules": 0, "reductions": 0}
    fetch = PartitionedParameterCoordinator.fetch_sub_module
    gather = PartitionedParameterCoordinator._PartitionedParameterCoordinator__all_gather_params_
    reduce = DeepSpeedZeroOptimizer_Stage3._DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads

    def counting_gather(self: Any, params: Any, forward: bool, quantize: bool = False) -> None:
        missing = [parameter.ds_numel for parameter in params if parameter.ds_status.name == "NOT_AVAILABLE"]
        counted["gathers"] += bool(missing)
        counted["gathered"] += sum(missing)
        counted["tensors"] += len(missing)
        gather(self, params, forward, quantize)

    def counting_fetch(self: Any, *arguments: Any, **options: Any) -> None:
        counted["modules"] += 1
        fetch(self, *arguments, **options)

    def counting_reduce(self: Any, *arguments: Any) -> Any:
        counted["reductions"] += 1
        return reduce(self, *arguments)

    tokens = torch.arange(32).reshape(1, 32)
    for step in range(4):
        if step == 3:
            PartitionedParameterCoordinator._PartitionedParameterCoordinator__all_gather_params_ = counting_gather
            PartitionedParameterCoordinator.fetch_sub_module = counting_fetch
            DeepSpeedZeroOptimizer_Stage3._DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads = counting_reduce
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        if step < 3:
            engine.step()
    PartitionedParameterCoordinator._PartitionedParameterCoordinator__all_gather_params_ = gather
    PartitionedParameterCoordinator.fetch_sub_module = fetch
    DeepSpeedZeroOptimizer_Stage3._DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads = reduce
    engine.destroy()
    return counted


def main() -> None:
    output = Path(sys.argv[1])
    configure_cpu_ranks("deepspeed")
    found = {
        name: collectives(build(**sizes), options, recomputes=recomputes)
        for name, (build, sizes, options, recomputes) in CASES.items()
    }
    output.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
