"""The planner page as a Hugging Face Space."""

from shardwright.cli.main import run

run(["ui", "--host", "0.0.0.0"])  # noqa: S104
