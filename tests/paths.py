"""Where the checkout and its tests lie, whatever folder a test is in."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent
CONFIGS = ROOT / "ds_configs" / "data" / "models"
"""Configurations of public models, `ORG--NAME/config.json`."""
