"""First floor: thin adapters, one folder for each upstream library."""
