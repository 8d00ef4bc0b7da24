"""Layers divided over ranks: DeepSpeed AutoTP as a callback of any Trainer."""
