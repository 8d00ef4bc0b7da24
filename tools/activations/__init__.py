"""Activation bytes of any Transformers model, traced in a process of its own; what is traced ships as JSON."""
