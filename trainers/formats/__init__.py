"""Written formats: packed codes, the small format of SpQR and low-rank correction, and model directories."""
