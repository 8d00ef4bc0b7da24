"""`shardwright serve`: print the command that serves a checkpoint, with its memory, and run it."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

from pydantic import Field

from ...ds_configs.serving import DEFAULT_SHARE, CacheType
from ...ds_configs.specs.errors import ConfigError, UsageError
from ...ds_configs.specs.settings import HardwareFields, RevisionFields
from ..options import Output
from ..progress import note
from ..settings import FILLED, Options

if TYPE_CHECKING:
    from ...ds_configs.serving import ServingPlan


class Server(RevisionFields):
    """Options that the engine has too."""

    group = "Serving"

    tensor_parallel_size: int | None = Field(
        None, ge=1, description="GPUs that share the model. Default: the fewest that fit"
    )
    max_model_len: int | None = Field(
        None, ge=1, description="Longest sequence in tokens. Default: the model's maximum, or what fits"
    )
    max_num_seqs: int | None = Field(None, ge=1, description="Sequences that run together. Default: the engine's")
    max_num_batched_tokens: int | None = Field(None, ge=1, description="Tokens per step. Default: the engine's")
    kv_cache_dtype: CacheType = Field("auto", description="Type of the KV cache; auto: the type set in the checkpoint")
    kv_cache_memory: str | None = Field(None, description="KV cache per GPU, such as 20GiB. Default: the free memory")
    block_size: int | None = Field(None, ge=1, description="Tokens per cache block. Default: the engine's")
    gpu_memory_utilization: float = Field(
        DEFAULT_SHARE, gt=0, le=1, description="Share of each GPU's memory for the engine"
    )
    draft: str | None = Field(None, description="Draft model for speculative decoding")
    draft_tokens: int = Field(4, ge=1, description="Tokens that the draft proposes per step")
    host: str = Field("127.0.0.1", description="Address to listen on")
    port: int = Field(8000, ge=1, le=65535, description="Port to listen on")


class Flags(Output):
    dry_run: bool = Field(False, description="Print the command and its memory; start nothing")


def serve_command(
    checkpoint: str,
    *,
    hardware: Options[HardwareFields] = FILLED,
    settings: Options[Server] = FILLED,
    options: Options[Flags] = FILLED,
) -> int:
    """Serve a checkpoint: print the command of the engine and what fits into its cache, then run it.

    Parameters
    ----------
    checkpoint
        Hub id or local directory of a model, dense or quantized.
    """
    from ...ds_configs.serving import ServingRequest, plan_serving
    from ...ds_configs.specs.units import parse_bytes
    from ...plugins.huggingface_hub import split_revision
    from ...plugins.planning import read_hardware
    from ...plugins.vllm import (
        INSTALL,
        become_server,
        installed_engine,
        processor_flags,
        read_served_model,
        runnable_line,
    )

    own = {"kv_cache_memory", "block_size", "gpu_memory_utilization", "draft", "revision"}
    memory = settings.kv_cache_memory
    request = ServingRequest(
        hardware=read_hardware(
            hardware.hardware or "local", host_memory=hardware.host_memory, nvme=hardware.nvme, on_cpu=False
        ),
        amx="amx_tile" in processor_flags(),
        kv_cache_bytes=None if memory is None else parse_bytes(memory, where="kv_cache_memory"),
        block_tokens=settings.block_size,
        memory_share=settings.gpu_memory_utilization,
        **settings.model_dump(exclude=own),
    )
    name, revision = split_revision(checkpoint, settings.revision)
    model = read_served_model(name, revision=revision)
    draft = None if settings.draft is None else read_served_model(settings.draft)
    plan = plan_serving(model, request, draft=draft)
    engine = installed_engine()
    plan = replace(plan, line=runnable_line(plan.line, engine))
    if engine is None:
        error = ConfigError(where="vllm", rule="was not found on PATH", fix=INSTALL)
        if not options.dry_run:
            raise UsageError(error)
        note(str(error))
    if options.as_json:
        print(json.dumps(plan.to_dict() | {"engine_versions": dict(engine.versions) if engine else {}}))
    else:
        show_serving(plan)
    if not options.dry_run:
        become_server(plan.line)
    return 0


def show_serving(plan: ServingPlan) -> None:
    from rich.text import Text

    from ...ds_configs.plan.measurement import printable
    from ...ds_configs.specs.units import gigabytes
    from ..show import console, print_rows, terms_rows

    out = console()
    title = printable(plan.model)
    gpus = f"{plan.tensor_parallel_size} GPU(s) of {plan.hardware}" if plan.hardware != "CPU" else "the CPU"
    out.print(Text.assemble((title, "bold"), f"  with vLLM on {gpus}"))
    out.print()
    print_rows(out, ("Memory per GPU", "GB"), terms_rows(plan.memory), figures=("GB",))
    out.print()
    out.print(
        f"{plan.token_bytes:,} bytes per token in the {plan.kv_cache_dtype} cache; {plan.blocks:,} blocks of "
        f"{plan.block_tokens} tokens ({plan.block_bytes:,} bytes)"
    )
    longer = plan.longest_that_fits > plan.max_model_len
    single = f"; a single one could have {plan.longest_that_fits:,} tokens" if longer else ""
    out.print(
        f"{plan.sequences:.1f} sequences of {plan.max_model_len:,} tokens ({plan.blocks_per_sequence:,} blocks each) "
        f"fit in {gigabytes(plan.memory['cache'])} GB{single}"
    )
    out.print(f"Up to {plan.max_num_seqs:,} shorter sequences run together; equal prefixes share blocks")
    for text in plan.notes:
        out.print(Text(f"note: {printable(text)}", style="dim"))
    out.print()
    print(shlex.join(plan.line), flush=True)
