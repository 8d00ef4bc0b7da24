"""Safetensors files: `reading.py` reads them strictly, `writing.py` writes files and checkpoints."""
