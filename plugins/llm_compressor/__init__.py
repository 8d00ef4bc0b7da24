"""Adapter of llm-compressor, with corrections for its releases (observed with 0.14.0.1)."""
