"""Traces the activations of any transformers model from its config, in a subprocess that may crash or hang."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from typing import Any

from shardwright.ds_configs.memory.activations import ActivationEstimate, Mode
from shardwright.ds_configs.specs.errors import ShardwrightError

WORKER_MODULE = "worker"
RESULT_PREFIX = "activation-trace-result "


class ActivationTraceError(ShardwrightError):
    """The model could not be traced."""


def trace_model(
    config: Mapping[str, Any],
    *,
    micro_batch_size: int,
    seq_len_tokens: int,
    mode: Mode = "bf16",
    num_layers: int | None = None,
    time_limit_seconds: float = 300.0,
) -> ActivationEstimate:
    """Traces a model that transformers can build from `config`, without weights, GPU or network.

    The model is built with two layers and, stack by stack, with four, on fake CPU tensors; bytes are linear in depth.
    `config` is the content of `config.json`. A model with several stacks (encoder and decoder, text and vision) has
    its saved bytes spread over `num_layers` layers, by default over all layers of all stacks.
    torch 2.13 ends the interpreter on some fake operators, so the trace runs in a process of its own.

    Raises:
        ActivationTraceError: the config names no known architecture, or the trace failed or took too long.
    """
    from shardwright.plugins.launching.launch import interpreter

    request = {
        "config": dict(config),
        "micro_batch_size": micro_batch_size,
        "seq_len_tokens": seq_len_tokens,
        "mode": mode,
        "num_layers": num_layers,
    }
    name = str(config.get("model_type", "without model_type"))
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    try:
        process = subprocess.run(
            [interpreter(), "-m", f"{__package__}.{WORKER_MODULE}"],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            timeout=time_limit_seconds,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ActivationTraceError(
            f"model_type = {name!r}: tracing took longer than {time_limit_seconds:.0f} s; raise the time limit, or "
            "pass activation bytes yourself"
        ) from None
    return _read(process, name)


def _read(process: subprocess.CompletedProcess[str], name: str) -> ActivationEstimate:
    results = [line for line in process.stdout.splitlines() if line.startswith(RESULT_PREFIX)]
    if process.returncode == 0 and results:
        fields = json.loads(results[-1].removeprefix(RESULT_PREFIX))
        if "error" not in fields:
            return ActivationEstimate(**fields)
        reason = fields["error"]
    else:
        last_lines = [line for line in process.stderr.splitlines() if line.strip()][-1:]
        reason = f"the tracing process ended with code {process.returncode}" + "".join(f": {s}" for s in last_lines)
    raise ActivationTraceError(
        f"model_type = {name!r}: its activations could not be traced ({reason}); check the config, or name a family "
        "with stored coefficients"
    )
