"""Merge a LoRA adapter into its base: a complete model directory for every tool that reads no adapters."""

from __future__ import annotations

import logging
import sys
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...ds_configs.plan.output import output_errors, reserved
from ...ds_configs.plan.plan import Plan
from ...ds_configs.specs.errors import ConfigError, UsageError, collecting
from ...plugins.huggingface_hub import (
    commit_of,
    model_directory,
    read_model_source,
    split_revision,
)
from ...plugins.llm_compressor import without_bars
from ...plugins.peft import check_adapter_fits, merge_adapter, read_adapter
from ...plugins.safetensors import appearing_directory
from ...plugins.transformers.loading import refuse_code, refuse_nonfinite_weights
from ...plugins.transformers.meta_model import build_meta_model
from ..data.models import StartingModel, copy_companions, load_config, load_model
from ..runs.settings import PLAN_DIRECTORY

SCHEMA_VERSION = 1
"""Version of `merge --format json`."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class MergeReport:
    """A merged model that was written."""

    adapter: str
    """Directory as the user wrote it, or Hub id."""
    adapter_revision: str | None
    """Commit of an adapter on the Hub."""
    base: str
    """Hub id or path of the base model."""
    base_revision: str | None
    qlora: bool
    """Whether the adapter was merged into dequantized NF4 weights."""
    dtype: str
    """Dtype of the weights, which is that of the base."""
    rounding_error: float
    """Relative error of the merged matrices from rounding to `dtype`."""
    output_dir: str

    def to_dict(self) -> dict[str, Any]:
        return {"schema_version": SCHEMA_VERSION} | asdict(self)


def merge(
    adapter: str | Path,
    output_dir: str | Path,
    *,
    base: str | None = None,
    base_revision: str | None = None,
    qlora: bool | None = None,
    force: bool = False,
) -> MergeReport:
    """Merge a LoRA adapter into its base and write a complete model: safetensors and tokenizer.

    Prints nothing on stdout. A failure leaves no files. Example: ``shardwright.merge("tuned", "merged")``

    Args:
        adapter: Directory of the adapter, or its Hub id with an optional `@REVISION`.
        output_dir: Directory for the model.
        base: Hub id or directory of the base model. Default: as the adapter records it.
        base_revision: Branch, tag or commit of a base model on the Hub.
        qlora: Merge into the NF4 weights that QLoRA trains on, dequantized. Default: whether a plan of `train` in the
            adapter's directory has the method `qlora`.
        force: Replace the model in a directory that is not empty.

    Raises:
        UsageError: the adapter is not a LoRA adapter, its base is unknown, or the directory cannot be used.
        RefusedInputError: files are missing or damaged, or the adapter is of another base.
        ShardwrightError: the Hub cannot be reached.
    """
    import torch
    from huggingface_hub import is_offline_mode

    output, sources = Path(output_dir), {"the adapter": str(adapter), "the base model": base}
    name, revision = split_revision(str(adapter))
    with redirect_stdout(sys.stderr):
        errors: list[ConfigError] = []
        read = None
        with collecting(errors):
            read = read_adapter(model_directory(name, revision=revision))
            sources["the base model"] = base or read.base
        errors += output_errors(output, force=force, sources=sources)
        if errors or read is None:
            raise UsageError(errors)
        commit = None if Path(name).expanduser().exists() else commit_of(read.directory)
        # Whether the adapter fits its base model shows from configurations and headers, before weights are read.
        fix, base_name = "pass --base MODEL", base or read.base
        if base_name is None:
            rule = "does not name its base model"
            raise UsageError(ConfigError(where="adapter", value=name, rule=rule, fix=fix))
        if base is None and not Path(base_name).expanduser().exists():
            base_revision = base_revision or read.base_revision
        try:
            source = read_model_source(base_name, revision=base_revision)
        except UsageError as error:
            if base is not None:
                raise
            rule = f"names the base model {base_name!r}, which does not exist here ({error})"
            raise UsageError(ConfigError(where="adapter", value=name, rule=rule, fix=fix)) from None
        refuse_code(source.config, source.name)
        if source.config.get("quantization_config"):
            rule = "has quantized weights"
            fix = f"use the 16-bit model, and --qlora to merge as QLoRA trained: {fix}"
            raise UsageError(ConfigError(where="base", value=base_name, rule=rule, fix=fix))
        if source.checkpoint_parameters is None and not (source.revision is not None and is_offline_mode()):
            rule, fix = "has no safetensors weights", f"use a trained model: {fix}"
            raise UsageError(ConfigError(where="base", value=base_name, rule=rule, fix=fix))
        check_adapter_fits(read, build_meta_model(source.config, source=source.name), base_name, fix=fix)
        plan = read.directory / PLAN_DIRECTORY
        if qlora is None:
            qlora = (plan / "plan.json").is_file() and Plan.load(plan).job.method == "qlora"
        with reserved(output, force=force), without_bars():
            directory = model_directory(source.name, revision=source.revision)
            origin = StartingModel(model=source.name, revision=source.revision, method="qlora" if qlora else "lora")
            config = load_config(origin)
            dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
            model = load_model(origin, config, dtype, seed=0)
            # It warns about the type in which it dequantizes, which is that of the model.
            logging.getLogger("transformers.integrations.bitsandbytes").setLevel(logging.ERROR)
            model, rounding_error = merge_adapter(model.dequantize() if qlora else model, read)
            refuse_nonfinite_weights(model, what="the merged model")
            report = MergeReport(
                adapter=name,
                adapter_revision=commit,
                base=base_name,
                base_revision=source.revision,
                qlora=qlora,
                dtype=str(dtype).removeprefix("torch."),
                rounding_error=rounding_error,
                output_dir=str(output),
            )
            with appearing_directory(output) as unfinished:
                model.save_pretrained(unfinished)
                # The tokenizer of the adapter has the chat template that it was trained with.
                copy_companions(directory, unfinished)
                copy_companions(read.directory, unfinished)
        return report
