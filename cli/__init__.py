"""Top floor: the `shardwright` command, one small module per verb."""
