"""Compiles the operators of DeepSpeed that tests load; the first time takes 1 to 3 minutes."""

from __future__ import annotations

from shardwright.plugins.deepspeed.compiled_operators import prepare_operators
from warm_ranks.protocol import OPERATORS

if __name__ == "__main__":
    prepare_operators(OPERATORS)
