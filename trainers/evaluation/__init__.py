"""Evaluation of a language model: perplexity, distance to a baseline, and size."""
