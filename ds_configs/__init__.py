"""Planning as pure arithmetic on frozen dataclasses; imports no torch."""
