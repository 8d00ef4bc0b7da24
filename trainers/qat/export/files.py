"""The files of an exported checkpoint: weights in shards, configuration, generation settings, tokenizer, report."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....ds_configs.plan.write import write_files
from ....ds_configs.quantization.layers import LinearLayer
from ....ds_configs.quantization.mixtures import mixture_quantization_config
from ....ds_configs.specs.errors import Fault, ShardwrightError, UsageError
from ....plugins.huggingface_hub.time_limit import fetch_snapshot
from ....plugins.safetensors.writing import save_tensors
from ...formats.model_directory import COMPANIONS, copy_companions

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ..rounding.attachment import Attachment

REPORT = "qat_report.json"
ADAPTER = "adapter"


def write_config(
    root: Any,
    attachment: Attachment,
    directory: Path,
    *,
    architecture: str,
    layers: Sequence[LinearLayer],
    ignore: Sequence[str],
    kv_cache_scheme: Mapping[str, Any] | None,
) -> None:
    """Write `config.json` with the `quantization_config` that post-training quantization writes."""
    config = copy.deepcopy(root.config)
    _set_dtype(config, attachment.stored_dtype)
    config.architectures = [architecture]
    config.save_pretrained(directory)
    place = directory / "config.json"
    stated = json.loads(place.read_text(encoding="utf-8"))
    stated["quantization_config"] = mixture_quantization_config(attachment.scheme, layers, ignore=ignore)
    if kv_cache_scheme is not None:
        stated["quantization_config"]["kv_cache_scheme"] = dict(kv_cache_scheme)
    _write_json(place, stated)


def write_companions(root: Any, directory: Path, *, tokenizer: Any, source: str | Path | None) -> None:
    """Write tokenizer and generation settings: the ones given, else those of the model that this one came from."""
    where = _source_directory(root, source)
    if where is not None:
        copy_companions(where, directory)
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)
    if root.can_generate() and not (directory / "generation_config.json").is_file():
        try:
            root.generation_config.save_pretrained(directory)
        except ValueError as error:
            # Transformers refuses to save settings that contradict each other, which models of the Hub have.
            rule, fix = f"cannot be saved ({str(error).splitlines()[0]})", "correct model.generation_config"
            raise UsageError(Fault(where="generation_config", rule=rule, fix=fix)) from None


def write_adapter(model: Any, tensors: Mapping[str, Tensor], directory: Path, *, name: str, base: Path) -> None:
    """Write an adapter that was trained on the quantized base, as PEFT loads it onto that base."""
    from peft import get_peft_model_state_dict

    place = directory / ADAPTER
    model.peft_config[name].save_pretrained(str(place))
    found = get_peft_model_state_dict(model, state_dict=dict(tensors), adapter_name=name, save_embedding_layers=False)
    prefix = "base_model.model."
    named = {prefix + key.removeprefix(prefix): tensor for key, tensor in found.items()}
    save_tensors(named, place / "adapter_model.safetensors")
    settings = place / "adapter_config.json"
    stated = json.loads(settings.read_text(encoding="utf-8"))
    _write_json(settings, stated | {"base_model_name_or_path": str(base), "inference_mode": True})


def write_export_report(report: Mapping[str, Any], directory: Path) -> None:
    """Write what was exported and how it was proven."""
    _write_json(directory / REPORT, report)


def _set_dtype(config: Any, dtype: torch.dtype) -> None:
    config.dtype = dtype
    for name in config.sub_configs:
        inner = getattr(config, name, None)
        if inner is not None:
            inner.dtype = dtype


def _source_directory(root: Any, source: str | Path | None) -> Path | None:
    """Return where companions lie; those of a Hub model are fetched if it was named."""
    stated = root.config._name_or_path if source is None else str(source)
    if stated and Path(stated).expanduser().is_dir():
        return Path(stated).expanduser()
    if source is None:
        return None
    try:
        return fetch_snapshot(stated, patterns=COMPANIONS)
    except Exception as error:
        # Whatever the connection, the cache or the disk raises.
        raise ShardwrightError(f"source = {stated!r}: cannot be fetched ({type(error).__name__}: {error})") from None


def _write_json(place: Path, content: Mapping[str, Any]) -> None:
    write_files({place.name: json.dumps(content, indent=2) + "\n"}, place.parent, force=True)
