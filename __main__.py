"""`python -m shardwright`."""

from .cli.main import main

main()
