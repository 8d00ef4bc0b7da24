"""Zeros in weight matrices while a model trains: an L1 penalty, and magnitude pruning by a schedule."""
