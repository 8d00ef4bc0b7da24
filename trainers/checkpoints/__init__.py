"""Complete checkpoints: all ranks have saved, and a record lists every file.

`callback.py` marks a checkpoint complete and finds the one to resume from. `record.py` writes and reads the record.
`resume.py` selects a checkpoint and lists what may differ between the run that saved it and the run that resumes.
"""
