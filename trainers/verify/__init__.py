"""Verification of a written checkpoint by a fresh process."""
