"""`python -m shardwright.cli`."""

from .main import main

main()
