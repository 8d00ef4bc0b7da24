"""peft behind one adapter: `lora.py`."""
