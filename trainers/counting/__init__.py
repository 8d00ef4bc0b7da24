"""Counting of labels, samples and tokens, and standard errors of means."""
