"""What trainings that the command line plans, launches and reports have in common."""
