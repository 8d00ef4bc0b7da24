"""Speed of training on the same chats with and without packing: `python benchmarks/packing.py [--rounds 3]`.

`shardwright train` runs one epoch of chats of different lengths with a small Llama, with `--packing off` and `on` in
turns, so that a busy machine slows both. Speeds are those of the run's own `metrics.jsonl`, without its first step.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

SEQ_LEN, CHATS, BATCH = 512, 512, 8
MEDIAN_TOKENS, SPREAD = 110, 0.7
"""Lengths are log-normal, as those of collected chats are roughly, and at most `SEQ_LEN`."""
SPEEDS = ("labelled_tokens_per_second", "tokens_per_second", "positions_per_second")


def main() -> None:
    """Train in turns, and print the speeds and their ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each way")
    parser.add_argument("--hardware", default="1xCPU", help="as for train")
    flags = parser.parse_args()
    logging.disable(logging.INFO)
    rounds: list[dict[str, dict[str, float]]] = []
    with tempfile.TemporaryDirectory(prefix="packing-") as directory:
        root = Path(directory)
        write_inputs(root)
        for number in range(flags.rounds):
            rounds.append({way: trained(root, way, number, flags.hardware) for way in ("off", "on")})
            print(json.dumps(rounds[-1]), flush=True)
    for name in SPEEDS:
        off, on = (median(speeds[way][name] for speeds in rounds) for way in ("off", "on"))
        ratios = sorted(speeds["on"][name] / speeds["off"][name] for speeds in rounds)
        spread = f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        print(f"{name}: {off:,.0f} padded, {on:,.0f} packed, ratio {spread}")
    # Does not depend on the load of the machine.
    read = {
        way: speeds["positions_per_second"] / speeds["labelled_tokens_per_second"] for way, speeds in rounds[0].items()
    }
    print(f"positions per labelled token: {read['off']:.2f} padded, {read['on']:.2f} packed")


def write_inputs(root: Path) -> None:
    """Write the model, whose tokens are bytes, and the chats."""
    from transformers import LlamaConfig, LlamaForCausalLM, set_seed

    set_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=300, max_position_embeddings=SEQ_LEN))
    model.save_pretrained(root / "model")
    draw = random.Random(0)
    rows = []
    for number in range(CHATS):
        length = min(SEQ_LEN, round(draw.lognormvariate(0, SPREAD) * MEDIAN_TOKENS))
        # The template adds about 40 characters to a question and its answer.
        asked, answered = max(4, length // 3), max(4, length - length // 3 - 40)
        question, answer = (f"{number} word " * SEQ_LEN)[:asked], (f"{number} answer " * SEQ_LEN)[:answered]
        rows.append({"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]})
    (root / "chats.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def trained(root: Path, packing: str, number: int, hardware: str) -> dict[str, float]:
    """Train one epoch, and return its speeds."""
    import shardwright

    outcome: Any = shardwright.train(
        str(root / "model"),
        root / f"{packing}-{number}",
        dataset=str(root / "chats.jsonl"),
        chat_template="alpaca",
        packing=packing,
        seq_len=SEQ_LEN,
        hardware=hardware,
        strategy="ddp" if hardware == "1xCPU" else "auto",
        micro_batch_size=BATCH,
        global_batch_size=BATCH,
        evaluation_samples=8,
        gradient_checkpointing="off",
        epochs=1,
        logging_steps=1,
    )
    steps = outcome.metrics[1:]
    seconds = sum(step["step_seconds"] for step in steps)
    return {name: sum(step[name] * step["step_seconds"] for step in steps) / seconds for name in SPEEDS}


if __name__ == "__main__":
    main()
