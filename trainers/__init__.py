"""Second floor: Trainer subclasses, callbacks and the pure loss functions they use."""
