"""One process of vLLM's CPU engine that loads many checkpoints: `python serving_worker.py MANIFEST ROWS RESULTS`.

Runs in the engine's own environment, with this package on the path for its small format alone. An engine that refuses a
checkpoint says so in its own words, and the next one is loaded.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

_ENVIRONMENT = {
    # The engine's process is this one: its cache configuration can be read, and its errors arrive as they are.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
CACHE_BYTES = 64 * 2**20
BATCHED_TOKENS = 2048
ANSWER_TOKENS = 12


def _answers(engine: Any, rows: list[list[int]]) -> dict[str, Any]:
    from vllm import SamplingParams

    asked = SamplingParams(
        temperature=0,
        max_tokens=ANSWER_TOKENS,
        min_tokens=ANSWER_TOKENS,
        ignore_eos=True,
        prompt_logprobs=0,
        detokenize=False,
    )
    outputs = engine.generate([{"prompt_token_ids": row} for row in rows], asked, use_tqdm=False)
    found = [
        [places[token].logprob for token, places in zip(row[1:], output.prompt_logprobs[1:], strict=True)]
        for row, output in zip(rows, outputs, strict=True)
    ]
    return {"log_probabilities": found, "greedy": [list(output.outputs[0].token_ids) for output in outputs]}


def _serve(entry: dict[str, Any], rows: list[list[int]]) -> dict[str, Any]:
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    began, engine = time.monotonic(), None
    try:
        engine = LLM(
            entry["path"],
            enforce_eager=True,
            kv_cache_memory_bytes=CACHE_BYTES,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_num_seqs=len(rows),
            max_num_batched_tokens=BATCHED_TOKENS,
            disable_log_stats=True,
            **entry["options"],
        )
        loaded = time.monotonic() - began
        config = engine.llm_engine.vllm_config
        cache = config.cache_config
        return {
            "error": None,
            "answers": _answers(engine, rows),
            "load_seconds": loaded,
            "blocks": cache.num_gpu_blocks,
            "block_tokens": cache.block_size,
            "concurrency": cache.kv_cache_max_concurrency,
            "max_model_len": config.model_config.max_model_len,
        }
    except Exception as error:  # what an engine refuses is a result
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        del engine
        cleanup_dist_env_and_memory()
        gc.collect()


def main(manifest: Path, rows_file: Path, results: Path) -> None:
    """Serve each entry of the manifest, and write what came of it after each."""
    os.environ.update(_ENVIRONMENT)
    try:
        from shardwright.trainers.formats import vllm_loader  # noqa: F401 - registers the small format
    except ImportError as error:
        print(f"without the small format: {error}", file=sys.stderr, flush=True)
    rows = json.loads(rows_file.read_text())
    found: dict[str, Any] = {}
    for entry in json.loads(manifest.read_text()):
        if entry["error"] is None:
            found[entry["name"]] = _serve(entry, rows)
            results.write_text(json.dumps(found))
            print(f"served {entry['name']}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))
