"""Engines that start a plan on several machines, one file each; `node_check.py` compares the machines beforehand."""
