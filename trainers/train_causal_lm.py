"""The entry point of ranks under the name that plans contain; the training is `training/plan_training.py`."""

import sys

from .rank_main import main

if __name__ == "__main__":
    sys.exit(main())
