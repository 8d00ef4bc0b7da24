"""First floor: thin adapters, one module or folder for each upstream library."""
