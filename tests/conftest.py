"""Shared fixtures: one thread per process, DeepSpeed's CPU operators compiled once, and a small model on disk."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Tests are collected with importlib, which puts no test directory on the path.
sys.path.insert(0, str(Path(__file__).parent / "distributed"))


@pytest.fixture(scope="session")
def deepspeed_cpu_ops() -> None:
    """Compile cpu_adam and the shared-memory operator; the first run takes 1 to 3 minutes, later ones seconds."""
    from operators import compile_deepspeed_operators

    compile_deepspeed_operators()


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
