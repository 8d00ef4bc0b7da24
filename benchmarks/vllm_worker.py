"""One process of vLLM that runs several checkpoints: `python vllm_worker.py MANIFEST RESULTS`.

It runs in the engine's environment, in which Shardwright may be missing, so it imports nothing of it. If the engine
rejects a checkpoint, its error is stored, and the next one is loaded. `serving_matrix.py` writes the manifest and reads
the results.
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
    # A window as long as the model's positions needs one token more for the engine, which is chosen and never read.
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
    "HF_HUB_OFFLINE": "1",
}


def _ask(engine: Any, rows: list[list[int]], tokens: int, **more: object) -> Any:
    from vllm import SamplingParams

    asked = SamplingParams(
        temperature=0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True, detokenize=False, **more
    )
    return engine.generate([{"prompt_token_ids": row} for row in rows], asked, use_tqdm=False)


def _answers(engine: Any, rows: list[list[int]], tokens: int) -> dict[str, Any]:
    """Return the log-probability of each token but the first, and the most likely continuation of each row."""
    outputs = _ask(engine, rows, tokens, prompt_logprobs=0)
    found = [
        [places[token].logprob for token, places in zip(row[1:], output.prompt_logprobs[1:], strict=True)]
        for row, output in zip(rows, outputs, strict=True)
    ]
    return {"log_probabilities": found, "greedy": [list(output.outputs[0].token_ids) for output in outputs]}


def _serve(entry: dict[str, Any], manifest: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    began, engine = time.monotonic(), None
    try:
        engine = LLM(
            entry["path"],
            skip_tokenizer_init=True,
            disable_log_stats=True,
            **{**manifest["options"], **entry["options"]},
        )
        loaded = time.monotonic() - began
        config = engine.llm_engine.vllm_config
        cache = config.cache_config
        return {
            "error": None,
            "answers": _answers(engine, manifest["rows"], manifest["answer_tokens"]),
            "load_seconds": loaded,
            "blocks": cache.num_gpu_blocks,
            "block_tokens": cache.block_size,
            "concurrency": cache.kv_cache_max_concurrency,
            "max_model_len": config.model_config.max_model_len,
        }
    except Exception as error:  # an engine's error is a result
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        del engine
        cleanup_dist_env_and_memory()
        gc.collect()


def main(manifest_file: Path, results: Path) -> None:
    """Serve each checkpoint of the manifest, and write the results after each."""
    os.environ.update(_ENVIRONMENT)
    manifest = json.loads(manifest_file.read_text(encoding="utf-8"))
    found: dict[str, Any] = {}
    for entry in manifest["checkpoints"]:
        found[entry["name"]] = _serve(entry, manifest)
        results.write_text(json.dumps(found), encoding="utf-8")
        print(f"served {entry['name']}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))
