"""Choices of a user who serves a checkpoint, and what the checkpoint says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..specs.hardware import HardwareSpec
from ..specs.model import ModelSpec
from .engines import EngineName
from .memory import StoredWeight

CacheType = Literal["auto", "bf16", "fp8"]
DEFAULT_SHARE = 0.92
"""Share of a GPU's memory that vLLM 0.32.0 takes (`config/cache.py`)."""
_HUGE, _LARGE = 160 * 2**30, 70 * 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    """A checkpoint as its configuration and headers describe it."""

    spec: ModelSpec
    """Structure of the model."""
    config: Mapping[str, Any]
    """Contents of `config.json`."""
    weights: Mapping[str, StoredWeight]
    """Every tensor by name; empty where there is a configuration alone."""

    @property
    def quantization(self) -> Mapping[str, Any]:
        """`quantization_config`; empty for a dense checkpoint."""
        return self.config.get("quantization_config") or {}

    @property
    def quantized_experts(self) -> bool:
        """Whether the experts of a mixture are stored in fewer bits."""
        return any(".experts." in name and name.endswith(("weight_packed", "weight_scale")) for name in self.weights)

    @property
    def latent(self) -> bool:
        """Whether attention keeps one latent vector for all heads (DeepSeek-V2 and its successors)."""
        return bool((self.config.get("text_config") or self.config).get("kv_lora_rank"))

    @property
    def positions(self) -> int | None:
        """Longest sequence that the model is made for; `None` where it does not say."""
        text = self.config.get("text_config") or self.config
        stated = text.get("max_position_embeddings") or text.get("n_positions") or self.spec.learned_positions
        return stated if isinstance(stated, int) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingRequest:
    """Settings of a server; `None` leaves a choice to the arithmetic."""

    engine: EngineName = "vllm"
    """Which engine runs it."""
    hardware: HardwareSpec
    """GPUs of one node, or `CPU`."""
    tensor_parallel_size: int | None = None
    """GPUs that share the model."""
    max_model_len: int | None = None
    """Longest sequence, prompt and answer together, in tokens."""
    max_num_seqs: int | None = None
    """Sequences that run together; the cache is then to hold so many of the longest."""
    max_num_batched_tokens: int | None = None
    """Most tokens of one step."""
    kv_cache_dtype: CacheType = "auto"
    """Numbers of the cache; `auto` is what the checkpoint was made for."""
    kv_cache_bytes: int | None = None
    """Bytes of the cache on each GPU, instead of what is left."""
    block_tokens: int | None = None
    """Tokens of one block."""
    memory_share: float = DEFAULT_SHARE
    """Share of each GPU's memory that the engine takes."""
    shared_prefix_tokens: int = 0
    """Tokens with which all sequences begin."""
    draft_tokens: int = 4
    """Tokens that a draft proposes in each step."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8000
    """Port to listen on."""

    @property
    def on_cpu(self) -> bool:
        """Whether no GPU serves."""
        return self.hardware.gpu == "CPU"

    @property
    def device_bytes(self) -> int:
        """Memory of one GPU, or of the host."""
        return self.hardware.host_bytes_per_node if self.on_cpu else self.hardware.gpu_bytes

    def batched_tokens(self) -> int:
        """Return the most tokens of one step: what was asked for, else vLLM 0.32.0's own default for a server.

        `engine/arg_utils.py`, `get_batch_defaults`: 16,384 from 160 GiB, 8,192 from 70 GiB but on an A100, else 2,048.
        """
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        if self.on_cpu or self.hardware.gpu_bytes < _LARGE or self.hardware.gpu.startswith("A100"):
            return 2048
        return 16384 if self.hardware.gpu_bytes >= _HUGE else 8192

    def sequences(self) -> int:
        """Return the most sequences of one step: what was asked for, else vLLM 0.32.0's own default for a server."""
        if self.max_num_seqs is not None:
            return self.max_num_seqs
        if self.on_cpu:
            return 128
        return 1024 if self.batched_tokens() > 2048 and self.max_num_batched_tokens is None else 256
