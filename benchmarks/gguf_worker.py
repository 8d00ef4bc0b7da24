"""One process of llama.cpp that reads many files: `python gguf_worker.py MANIFEST RESULTS`, in its own environment.

Each file of the manifest answers with the log-probability of every token of the rows but the first. A file with
`quantize` is made first, by llama.cpp's own quantizer, from the one that it names.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import llama_cpp
import numpy


def answers(path: str, rows: list[list[int]]) -> list[list[float]]:
    """Return the log-probabilities of the rows' tokens."""
    model = llama_cpp.Llama(path, n_ctx=max(map(len, rows)), logits_all=True, verbose=False, n_threads=1)
    found = []
    for row in rows:
        model.reset()
        model.eval(row)
        logits_SV = numpy.asarray(model.scores[: len(row) - 1], dtype=numpy.float64)
        shifted_SV = logits_SV - logits_SV.max(axis=-1, keepdims=True)
        log_p_SV = shifted_SV - numpy.log(numpy.exp(shifted_SV).sum(axis=-1, keepdims=True))
        found.append(log_p_SV[numpy.arange(len(row) - 1), row[1:]].tolist())
    model.close()
    return found


def requantize(source: str, target: str, kind: str) -> None:
    """Write a file in another of llama.cpp's types, such as `Q4_0`."""
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    options.nthread = 1
    if code := llama_cpp.llama_model_quantize(source.encode(), target.encode(), options):
        raise RuntimeError(f"llama_model_quantize ended with {code}")


def main(manifest_file: Path, results: Path) -> None:
    """Answer on each file of the manifest."""
    manifest: dict[str, Any] = json.loads(manifest_file.read_text())
    found: dict[str, Any] = {"version": llama_cpp.__version__}
    for entry in manifest["files"]:
        if "quantize" in entry:
            requantize(entry["from"], entry["path"], entry["quantize"])
        found[entry["name"]] = answers(entry["path"], manifest["rows"])
    results.write_text(json.dumps(found))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))
