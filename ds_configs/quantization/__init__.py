"""Quantization as arithmetic: schemes, legal shapes, sizes and memory; imports no torch."""
