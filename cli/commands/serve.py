"""`shardwright serve`: the line that serves a checkpoint, with the memory that it needs, and the start of it."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from ...ds_configs.serving.engines import EngineName
from ...ds_configs.serving.request import DEFAULT_SHARE, CacheType
from ...ds_configs.specs.errors import UsageError
from ...ds_configs.specs.settings import HardwareSettings, Settings
from ..options import FormatOptions
from ..progress import note
from ..settings import FILLED, Options, grouped

if TYPE_CHECKING:
    from ...ds_configs.serving.plan import ServingPlan
    from ...ds_configs.serving.request import ServingRequest


grouped(HardwareSettings)


@grouped
class ServeSettings(Settings):
    """Choices of a server; what is left open is chosen by what fits."""

    group = "Serving"

    engine: EngineName = Field("vllm", description="Which engine serves")
    tensor_parallel_size: int | None = Field(
        None, ge=1, description="GPUs that share the model. Default: the fewest that hold its longest sequence"
    )
    max_model_len: int | None = Field(
        None, ge=1, description="Longest sequence, in tokens. Default: what the model is made for, or what fits"
    )
    max_num_seqs: int | None = Field(
        None, ge=1, description="Sequences that run together, for which the cache is to suffice. Default: the engine's"
    )
    max_num_batched_tokens: int | None = Field(None, ge=1, description="Tokens of one step. Default: the engine's")
    kv_cache_dtype: CacheType = Field("auto", description="Numbers of the cache; auto: what the checkpoint is for")
    kv_cache_memory: str | None = Field(None, description="Cache on each GPU, such as 20GiB. Default: what is left")
    block_size: int | None = Field(None, ge=1, description="Tokens of one block. Default: the engine's")
    gpu_memory_utilization: float = Field(
        DEFAULT_SHARE, gt=0, le=1, description="Share of each GPU's memory that the engine takes"
    )
    shared_prefix: int = Field(0, ge=0, description="Tokens with which all sequences begin, such as a system prompt")
    draft: str | None = Field(None, description="Student that proposes tokens: speculative decoding")
    draft_tokens: int = Field(4, ge=1, description="Tokens that the draft proposes in each step")
    host: str = Field("127.0.0.1", description="Address to listen on")
    port: int = Field(8000, ge=1, le=65535, description="Port to listen on")
    revision: str | None = Field(None, description="Branch, tag or commit of a Hub model")


@grouped
class ServeOptions(FormatOptions):
    """Options of a command that starts something."""

    dry_run: bool = Field(False, description="Print the line and its memory; start nothing")


def serve_command(
    checkpoint: str,
    *,
    hardware: Annotated[HardwareSettings, Options] = FILLED,
    settings: Annotated[ServeSettings, Options] = FILLED,
    options: Annotated[ServeOptions, Options] = FILLED,
) -> int:
    """Serve a checkpoint: print the line for the engine, with what fits into its cache, and run it.

    Example: shardwright serve quantized --hardware 1xA100-80GB --dry-run

    Parameters
    ----------
    checkpoint
        Hub id or local directory, dense or quantized.
    """
    from ...ds_configs.serving.engines import processor_faults
    from ...ds_configs.serving.plan import plan_serving
    from ...plugins.serving.checkpoint import read_served_model
    from ...plugins.serving.engine import (
        become_server,
        installed_engine,
        port_faults,
        processor_flags,
        runnable_line,
        server_faults,
    )

    request = _request(hardware, settings)
    model = read_served_model(checkpoint, revision=settings.revision)
    draft = None if settings.draft is None else read_served_model(settings.draft)
    plan = plan_serving(model, request, draft=draft)
    found = installed_engine(settings.engine)
    plan = replace(plan, line=runnable_line(plan.line, found))
    faults = server_faults(settings.engine, found, model.quantization)
    if not options.dry_run:
        faults += port_faults(settings.host, settings.port)
        if settings.engine == "vllm" and request.on_cpu:
            faults += processor_faults(processor_flags(), quantized_experts=model.quantized_experts)
        if faults:
            raise UsageError(faults)
    elif found is None:
        note(f"not checked against an engine: {faults[0]}")
    elif faults:
        raise UsageError(faults)
    if options.as_json:
        print(json.dumps(plan.to_dict() | {"engine_versions": dict(found.versions) if found else {}}))
    else:
        show_serving(plan)
    if not options.dry_run:
        become_server(plan.line)
    return 0


def _request(hardware: HardwareSettings, settings: ServeSettings) -> ServingRequest:
    from ...ds_configs.serving.request import ServingRequest
    from ...ds_configs.specs.units import parse_bytes
    from ...plugins.planning.from_names import read_hardware

    memory = settings.kv_cache_memory
    return ServingRequest(
        engine=settings.engine,
        hardware=read_hardware(hardware.hardware or "local", host_memory=hardware.host_memory, nvme=hardware.nvme),
        tensor_parallel_size=settings.tensor_parallel_size,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        kv_cache_dtype=settings.kv_cache_dtype,
        kv_cache_bytes=None if memory is None else parse_bytes(memory, where="kv_cache_memory"),
        block_tokens=settings.block_size,
        memory_share=settings.gpu_memory_utilization,
        shared_prefix_tokens=settings.shared_prefix,
        draft_tokens=settings.draft_tokens,
        host=settings.host,
        port=settings.port,
    )


def show_serving(plan: ServingPlan) -> None:
    """Print a plan: memory of a GPU, what the cache holds, remarks, and the line to run."""
    from rich.text import Text

    from ...ds_configs.plan.measurement import printable
    from ...ds_configs.serving.engines import TITLES
    from ...ds_configs.specs.units import gigabytes
    from ..show import console, terms_table

    out = console()
    gpus = f"{plan.tensor_parallel_size} GPU(s)" if plan.hardware != "CPU" else "the CPU"
    out.print(
        Text.assemble((printable(plan.model), "bold"), f"  with {TITLES[plan.engine]} on {gpus} of {plan.hardware}")
    )
    out.print()
    out.print(terms_table(plan.memory, "Memory of each"))
    out.print()
    out.print(
        f"A token takes {plan.token_bytes:,} bytes of the {plan.kv_cache_dtype} cache; {plan.blocks:,} blocks of "
        f"{plan.block_tokens} tokens ({plan.block_bytes:,} bytes)"
    )
    out.print(
        f"{plan.sequences:.1f} sequences of {plan.max_model_len:,} tokens fit at once ({plan.blocks_per_sequence:,} "
        f"blocks each) in {gigabytes(plan.memory['cache'])} GB; one alone could have {plan.longest_that_fits:,}"
    )
    out.print(f"Up to {plan.max_num_seqs:,} run together where they are shorter; equal beginnings share whole blocks")
    for remark in plan.notes:
        out.print(Text(f"note: {printable(remark)}", style="dim"))
    out.print()
    print(shlex.join(plan.line), flush=True)
