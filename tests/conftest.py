"""Shared fixtures: one thread per process, DeepSpeed's CPU operators compiled once, and a small model on disk."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Tests are collected with importlib, which puts no test directory on the path.
sys.path.insert(0, str(Path(__file__).parent / "distributed"))


@pytest.fixture(scope="session", autouse=True)
def no_measured_runs(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep every test and its processes away from the measured runs of whoever runs them."""
    os.environ["SHARDWRIGHT_DATA_DIR"] = str(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def deepspeed_cpu_ops() -> None:
    """Compile cpu_adam and the shared-memory operator; the first run takes 1 to 3 minutes, later ones seconds."""
    from shardwright.plugins.compiled_operators import extensions_directory, prepare_operators, stale_locks

    for lock in stale_locks(extensions_directory()):
        lock.unlink()
        print(f"removed {lock}: a compilation was killed and left it behind", file=sys.stderr)
    prepare_operators(("cpu_adam", "deepspeed_shm_comm"))


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a Llama with 2 layers, hidden size 64, grouped-query attention and random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM, set_seed

    directory = tmp_path_factory.mktemp("tiny-llama")
    set_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
        max_position_embeddings=128,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory
