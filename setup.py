"""Find the packages: the repository's root is the package `shardwright`, which setuptools cannot map by itself."""

from setuptools import find_packages, setup

layers = ("cli", "ds_configs", "plugins", "trainers")
inner = find_packages(include=[pattern for layer in layers for pattern in (layer, f"{layer}.*")])
setup(packages=["shardwright", *(f"shardwright.{name}" for name in inner)])
