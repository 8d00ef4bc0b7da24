"""Adapters, one package for each upstream library."""
