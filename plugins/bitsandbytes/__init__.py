"""bitsandbytes behind two adapters: `checkpoint.py` writes its format, `sharded_loading.py` loads for QLoRA."""
