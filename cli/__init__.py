"""The `shardwright` command, one module for each subcommand."""
