"""What a language model is worth: perplexity, distance to a baseline, size and speed."""
