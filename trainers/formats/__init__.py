"""Written formats: packed codes, the small format of SpQR and low-rank corrections, model directories, Markdown."""
