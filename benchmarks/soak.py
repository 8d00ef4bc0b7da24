"""What 300 steps leave behind: `python benchmarks/soak.py [--write] [--strict]`.

Two CPU ranks train a small Llama with the guard and complete checkpoints, one every 5 steps, under each engine, and
once more as the Trainer alone does it, so that what both gain is not taken for ours. Every rank tells its resident
memory, descriptors, threads and mapped names of /dev/shm along the way; after the launch no name there may hold its
port or the number of one of its processes.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from checkpoint_overhead import write

ENGINES = ("ddp", "zero2", "zero3", "fsdp2")
STEPS, SAVE_STEPS = 300, 5
SEEN_AFTER = (27, 57, 87, 177, 292)
"""Half a turn after a save, whose end is over by then; closer at first, where the allocator still makes its arenas."""
ALLOWED_GROWTH = 0.02
BARE, GUARDED = "bare", "guarded"
SHARED_MEMORY = "/dev/shm"  # noqa: S108


def main() -> int:
    """Train under each engine and print; with `--strict`, return 1 where something grew."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="keep the figures in reliability.json")
    parser.add_argument("--strict", action="store_true", help="exit with 1 where something grew")
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--rank", nargs=3, metavar=("ENGINE", "WAY", "DIRECTORY"), help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.rank:
        engine, way, directory = flags.rank
        train(engine, Path(directory), guarded=way == GUARDED)
        return 0
    found = [row for engine in flags.engines for way in (BARE, GUARDED) for row in soaked(engine, way)]
    print(json.dumps(found, indent=1))
    if flags.write:
        write("soak", {"steps": STEPS, "save_steps": SAVE_STEPS, "seen_after": SEEN_AFTER, "rows": found})
    return int(flags.strict and any(grew(row) for row in found if row["way"] == GUARDED))


def soaked(engine: str, way: str) -> list[dict[str, Any]]:
    """Return a row for each rank."""
    from shardwright.plugins.launching.launch import Launch, free_port, launch_ranks, python_arguments

    port = free_port()
    with tempfile.TemporaryDirectory(prefix="soak-") as directory:
        command = ["torchrun", "--nproc-per-node", "2", "--master-port", str(port), str(Path(__file__).resolve())]
        launch_ranks(
            Launch(arguments=python_arguments([*command, "--rank", engine, way, directory]), port=port),
            timeout_seconds=1200,
        )
        ranks = [json.loads((Path(directory) / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    own = [str(port), *(str(rank["process"]) for rank in ranks)]
    names = sorted(path.name for path in Path(SHARED_MEMORY).iterdir())
    left = [name for name in names if any(one in name for one in own)]
    return [
        {"engine": engine, "way": way, "rank": index, "seen": rank["seen"], "left_in_shared_memory": left}
        for index, rank in enumerate(ranks)
    ]


def grew(row: dict[str, Any]) -> bool:
    """Tell whether the last look at a rank shows more than the first, or the launch left something."""
    first, last = row["seen"][0], row["seen"][-1]
    more = any(last[name] > first[name] for name in ("descriptors", "threads", "shared_names"))
    return more or bool(row["left_in_shared_memory"]) or last["bytes"] > (1 + ALLOWED_GROWTH) * first["bytes"]


def train(engine: str, directory: Path, *, guarded: bool) -> None:
    """Run on every rank, and leave what it saw of itself."""
    import psutil
    from shardwright.plugins.accelerate.cpu_ranks import configure_cpu_ranks
    from shardwright.trainers.runs.ranks import train_guarded
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Trainer,
        TrainerCallback,
        TrainingArguments,
        default_data_collator,
        set_seed,
    )

    set_seed(0)
    seen: list[dict[str, int]] = []
    process = psutil.Process()

    class Look(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step in SEEN_AFTER:
                look = {"bytes": process.memory_info().rss, "descriptors": process.num_fds()}
                mapped = {one.path for one in process.memory_maps() if one.path.startswith(SHARED_MEMORY)}
                seen.append(look | {"threads": process.num_threads(), "shared_names": len(mapped)})

    settings: dict[str, Any] = {}
    if engine == "fsdp2":
        wrapped = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
        settings = {"fsdp": True, "fsdp_config": wrapped}
    elif engine.startswith("zero"):
        sizes = dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto")
        zero = {"stage": int(engine[-1]), "stage3_gather_16bit_weights_on_model_save": True}
        settings = {"deepspeed": sizes | {"train_batch_size": "auto", "zero_optimization": zero}}
    layouts: dict[str, Any] = {"zero2": "deepspeed", "zero3": "deepspeed"}
    host = configure_cpu_ranks(layouts.get(engine, engine))
    arguments = TrainingArguments(
        str(directory / "out"),
        max_steps=STEPS,
        save_steps=SAVE_STEPS,
        save_total_limit=2,
        per_device_train_batch_size=2,
        logging_steps=10,
        report_to="none",
        disable_tqdm=True,
        log_level="error",
        **settings,
        **host,
    )
    model = LlamaForCausalLM(
        LlamaConfig(hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, vocab_size=1024)
    )
    rows = [{"input_ids": list(range(one, one + 32)), "labels": list(range(one, one + 32))} for one in range(256)]
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, data_collator=default_data_collator)
    trainer.log = lambda logs, *rest, **named: None
    trainer.add_callback(Look())
    if guarded:
        train_guarded(trainer, resume=None)
    else:
        trainer.train()
    (directory / f"rank-{arguments.process_index}.json").write_text(json.dumps({"process": os.getpid(), "seen": seen}))
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()


if __name__ == "__main__":
    raise SystemExit(main())
