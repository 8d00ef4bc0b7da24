"""Find the packages: the repository's root is the package `shardwright`, which setuptools cannot map by itself."""

import sys

from setuptools import find_packages, setup

if sys.version_info < (3, 11):  # noqa: UP036
    # Older versions of pip report the dependencies that this Python cannot install instead.
    found = sys.version.split()[0]
    sys.exit(f"Python {found}: must be 3.11 or newer for shardwright. Create an environment with a newer Python.")

layers = ("cli", "ds_configs", "plugins", "trainers")
inner = find_packages(include=[pattern for layer in layers for pattern in (layer, f"{layer}.*")])
setup(packages=["shardwright", *(f"shardwright.{name}" for name in inner)])
