"""Written formats: the small format of SpQR and low-rank correction, and model directories."""
