"""Post-training quantization with verification, and the methods SpQR and low-rank correction."""
