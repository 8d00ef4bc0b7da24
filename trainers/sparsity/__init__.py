"""Sparse training: an L1 penalty, and magnitude pruning with a schedule."""
