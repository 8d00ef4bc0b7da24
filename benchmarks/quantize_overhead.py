"""What the adapter adds to llm-compressor: `python benchmarks/quantize_overhead.py [--write] [--strict]`.

The same model, scheme, method and tokens go through `llmcompressor.oneshot`, through the adapter, and through the
adapter with a journal; each in a process of its own, in turns, so that whatever else the machine does meets all alike.
Seconds run from the model in memory to the model quantized; peak memory is that of the process.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

MEASURED = Path(__file__).with_name("quantize_overhead.json")
DOCUMENT = Path(__file__).parents[1] / "docs" / "measurements" / "costs.md"
WAYS = ("oneshot", "adapter", "adapter with journal")
TURNS, ALLOWED = 3, 1.05
SAMPLES, SEQ_LEN, VOCAB_SIZE, LAYERS, HIDDEN_SIZE = 8, 256, 4096, 6, 384


@dataclass(frozen=True, kw_only=True)
class Run:
    """One process."""

    method: str
    """"gptq" or "awq"."""
    way: str
    """One of `WAYS`."""
    seconds: float
    """Quantization alone, without imports, model and saving."""
    cpu_seconds: float
    """Processor time of the same stretch."""
    peak_bytes: int
    """Largest resident set of the process."""


def main() -> int:
    """Measure and print; with `--strict`, return 1 where the adapter takes more than five percent longer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"keep the figures in {MEASURED.name} and {DOCUMENT.name}")
    parser.add_argument("--strict", action="store_true", help="exit with 1 when the target is missed")
    parser.add_argument("--turns", type=int, default=TURNS, help="runs of each way")
    parser.add_argument("--methods", nargs="+", default=["gptq", "awq"], choices=["gptq", "awq"])
    parser.add_argument("--one", nargs=2, metavar=("METHOD", "WAY"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(asdict(measure(*arguments.one))))
        return 0
    found = [
        measured_in_own_process(method, way)
        for method in arguments.methods
        for _ in range(arguments.turns)
        for way in WAYS
    ]
    print(table(found))
    if arguments.write:
        write(found)
    return int(arguments.strict and bool(misses(found)))


def measured_in_own_process(method: str, way: str) -> Run:
    """Return the figures of a fresh process."""
    command = [sys.executable, str(Path(__file__).resolve()), "--one", method, way]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=900)
    print(done.stdout.splitlines()[-1], file=sys.stderr)
    return Run(**json.loads(done.stdout.splitlines()[-1]))


def measure(method: str, way: str, *, layers: int = LAYERS, samples: int = SAMPLES) -> Run:
    """Quantize the model once to W4A16 in this process."""
    model, tokens = inputs(layers, samples)
    quantize = {"oneshot": _oneshot, "adapter": _adapter, "adapter with journal": _adapter_with_journal}[way]
    prepared = quantize(method, model, tokens)
    start, cpu_start = time.perf_counter(), time.process_time()
    prepared()
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Run(method=method, way=way, seconds=seconds, cpu_seconds=cpu_seconds, peak_bytes=peak)


def inputs(layers: int, samples: int) -> tuple[Any, list[list[int]]]:
    """Return a Llama, always the same, and token samples."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN_SIZE,
        intermediate_size=3 * HIDDEN_SIZE,
        num_hidden_layers=layers,
        num_attention_heads=6,
        num_key_value_heads=2,
        vocab_size=VOCAB_SIZE,
    )
    return LlamaForCausalLM(config).eval(), torch.randint(VOCAB_SIZE, (samples, SEQ_LEN)).tolist()


def _oneshot(method: str, model: Any, tokens: list[list[int]]) -> Any:
    import torch
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier
    from shardwright.plugins.llm_compressor.quiet import all_fixes, named_by_directory
    from torch.utils.data import DataLoader

    named = {"scheme": "W4A16", "ignore": ["lm_head"]}
    recipe = [GPTQModifier(**named)] if method == "gptq" else [AWQModifier(), QuantizationModifier(**named)]
    rows = [torch.tensor([row]) for row in tokens]
    batches = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in rows]

    def run() -> None:
        # Without these, a model built in memory is rejected, and AWQ fails on a host without a GPU.
        with all_fixes(), named_by_directory(model):
            oneshot(model=model, processor=object(), recipe=recipe, dataset=DataLoader(batches, batch_size=None))

    return run


def _adapter(method: str, model: Any, tokens: list[list[int]], journal: Path | None = None) -> Any:
    from shardwright.ds_configs.quantization.scheme import scheme_named
    from shardwright.plugins.llm_compressor.engine import EngineRequest, quantize_with_llm_compressor
    from shardwright.plugins.llm_compressor.quiet import import_upstream

    import_upstream()
    request = EngineRequest(
        model=model,
        tokenizer=None,
        scheme=scheme_named("W4A16"),
        method=method,  # type: ignore[arg-type]
        calibration=[{"input_ids": row} for row in tokens],
        journal=journal,
    )
    return lambda: quantize_with_llm_compressor(request, lambda step: None)


def _adapter_with_journal(method: str, model: Any, tokens: list[list[int]]) -> Any:
    directory = tempfile.TemporaryDirectory(prefix="quantize-overhead-")
    run = _adapter(method, model, tokens, Path(directory.name))

    def run_and_clean() -> None:
        with directory:
            run()

    return run_and_clean


def misses(found: Sequence[Run]) -> list[str]:
    """Return each method and way of the adapter whose median is beyond five percent of `oneshot`."""
    return [
        f"{method}, {way}"
        for method in dict.fromkeys(run.method for run in found)
        for way in WAYS[1:]
        if _median(found, method, way, "seconds") > ALLOWED * _median(found, method, WAYS[0], "seconds")
    ]


def table(found: Sequence[Run]) -> str:
    """Return one markdown line for each method and way; medians."""
    lines = ["| method | way | seconds | against oneshot | CPU seconds | peak MB |", "|---|---|---|---|---|---|"]
    for method in dict.fromkeys(run.method for run in found):
        for way in WAYS:
            seconds, plain = (_median(found, method, name, "seconds") for name in (way, WAYS[0]))
            cpu = _median(found, method, way, "cpu_seconds")
            peak = _median(found, method, way, "peak_bytes")
            lines.append(
                f"| {method} | {way} | {seconds:.2f} | {seconds / plain - 1:+.1%} | {cpu:.2f} | {peak / 1e6:.0f} |"
            )
    return "\n".join(lines)


def _median(found: Sequence[Run], method: str, way: str, field: str) -> float:
    return median(getattr(run, field) for run in found if (run.method, run.way) == (method, way))


def stored() -> list[Run]:
    """Return the figures that were kept."""
    return [Run(**entry) for entry in json.loads(MEASURED.read_text(encoding="utf-8"))]


def write(found: Sequence[Run]) -> None:
    """Keep the figures and put their table in the document."""
    lines = ",\n".join(json.dumps(asdict(run)) for run in found)
    MEASURED.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    text = DOCUMENT.read_text(encoding="utf-8")
    start = text.index("| method | way |")
    end = text.index("\n\n", start)
    DOCUMENT.write_text(text[:start] + table(found) + text[end:], encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
