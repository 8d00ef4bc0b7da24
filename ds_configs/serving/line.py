"""Command lines of the engines, as lists of arguments: what was chosen is stated, so that nothing is guessed twice.

Flags of vLLM 0.32.0 (run), SGLang (read) and `transformers serve` 5.17.0 (its own help).
"""

from __future__ import annotations

import json

from .request import ServingRequest


def serving_line(
    model: str, chosen: ServingRequest, *, draft: str | None, blocks: int, revision: str | None = None
) -> tuple[str, ...]:
    """Return the command that serves a model.

    Args:
        model: Directory or Hub id.
        chosen: Request with every choice made.
        draft: Model that proposes tokens.
        blocks: Blocks of the cache, which Transformers has to be told.
        revision: Commit of a Hub id.
    """
    make = {"vllm": _vllm, "sglang": _sglang, "transformers": _transformers}[chosen.engine]
    return tuple(str(word) for word in make(model, chosen, draft, blocks, revision))


def _vllm(model: str, chosen: ServingRequest, draft: str | None, blocks: int, revision: str | None) -> list[object]:
    words: list[object] = ["vllm", "serve", model, "--host", chosen.host, "--port", chosen.port]
    words += ["--revision", revision] if revision else []
    words += ["--tensor-parallel-size", chosen.tensor_parallel_size, "--max-model-len", chosen.max_model_len]
    words += ["--max-num-seqs", chosen.max_num_seqs, "--max-num-batched-tokens", chosen.max_num_batched_tokens]
    words += ["--enable-prefix-caching"]
    words += ["--block-size", chosen.block_tokens] if chosen.block_tokens else []
    words += ["--kv-cache-dtype", "fp8"] if chosen.kv_cache_dtype == "fp8" else []
    words += ["--kv-cache-dtype", "bfloat16"] if chosen.kv_cache_dtype == "bf16" else []
    if chosen.kv_cache_bytes is not None:
        words += ["--kv-cache-memory-bytes", chosen.kv_cache_bytes]
    else:
        words += ["--gpu-memory-utilization", chosen.memory_share]
    # Compiling for a CPU takes minutes, and a server of tests or of a small model gains nothing by it.
    words += ["--enforce-eager"] if chosen.on_cpu else []
    if draft is not None:
        stated = {"method": "draft_model", "model": draft, "num_speculative_tokens": chosen.draft_tokens}
        words += ["--speculative-config", json.dumps(stated)]
    return words


def _sglang(model: str, chosen: ServingRequest, draft: str | None, blocks: int, revision: str | None) -> list[object]:
    words: list[object] = ["python", "-m", "sglang.launch_server", "--model-path", model]
    words += ["--host", chosen.host, "--port", chosen.port, "--tp-size", chosen.tensor_parallel_size]
    words += ["--revision", revision] if revision else []
    words += ["--context-length", chosen.max_model_len, "--max-running-requests", chosen.max_num_seqs]
    words += ["--chunked-prefill-size", chosen.max_num_batched_tokens]
    words += ["--page-size", chosen.block_tokens] if chosen.block_tokens else []
    words += ["--kv-cache-dtype", "fp8_e4m3"] if chosen.kv_cache_dtype == "fp8" else []
    words += ["--mem-fraction-static", chosen.memory_share]
    words += ["--device", "cpu"] if chosen.on_cpu else []
    if draft is not None:
        words += ["--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", draft]
        words += ["--speculative-num-steps", chosen.draft_tokens, "--speculative-eagle-topk", 1]
        words += ["--speculative-num-draft-tokens", chosen.draft_tokens + 1]
    return words


def _transformers(
    model: str, chosen: ServingRequest, draft: str | None, blocks: int, revision: str | None
) -> list[object]:
    named = f"{model}@{revision}" if revision else model
    words: list[object] = ["transformers", "serve", named, "--host", chosen.host, "--port", chosen.port]
    words += ["--continuous-batching", "--cb-num-blocks", blocks]
    words += ["--cb-max-batch-tokens", chosen.max_num_batched_tokens]
    words += ["--cb-block-size", chosen.block_tokens] if chosen.block_tokens else []
    return words + (["--device", "cpu"] if chosen.on_cpu else [])
