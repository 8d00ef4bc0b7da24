"""Live tensor bytes of a training, by phase and role: `byte_meter.py`; `trainer_phases.py` tells it the phase."""
