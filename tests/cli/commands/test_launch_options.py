"""Options of machines that an engine would pass over, and names that it would read otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest
from shardwright.cli.machines import SameCommand
from shardwright.cli.main import build_app, run
from shardwright.cli.settings import resolve
from shardwright.ds_configs.plan.launch import NodePlace
from shardwright.plugins.clusters.ssh import own_program


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--on", "slurm", "--hostfile", "h"], "hostfile = 'h': is for --on ssh, not slurm"),
        (["--on", "ssh", "--node-rank", "1", "--main-address", "a"], "is for --on local, not ssh"),
        (["--on", "slurm", "--main-port", "1234"], "main_port = 1234: is for --on local or ssh, not slurm"),
        (["--dry-run"], "dry_run = True: is for --on ssh or slurm or"),
        (["--main-port", "1234"], "is for one of several machines"),
        (["--node-rank", "1"], "node_rank = 1: needs --main-address beside it"),
        (["--on", "slurm", "--name", "a\n#SBATCH --wrap=x"], "must be at most 40 lower-case letters"),
        (["--on", "slurm", "--dry-run", "--sbatch=--time=1\n#SBATCH --uid=0"], "must read --NAME=VALUE"),
        (["--on", "ssh", "--address", "a:6379"], "address = 'a:6379': is for --on ray, not ssh"),
        (["--on", "ray", "--main-port", "1234"], "main_port = 1234: is for --on local or ssh, not ray"),
        (["--on", "slurm", "--min-nodes", "1"], "min_nodes = 1: is for --on ssh or ray, not slurm"),
        (["--nodes", "1"], "nodes = 1: needs --node-rank and --main-address"),
        (["--on", "jobset", "--sbatch=--time=1"], "is for --on slurm, not jobset"),
    ],
)
def test_an_option_that_would_be_passed_over_is_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["launch", "plan", *words]) == 2
    assert said in capsys.readouterr().err


def test_machines_read_the_file_of_settings_that_names_them(tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_text("on: ssh\nhostfile: hosts\nssh_config: own\nmax_steps: 3\n")
    words = ("train", "model", "--output-dir", "out", "--config", str(tmp_path / "settings.yaml"))
    there = SameCommand(words=words).node_words(NodePlace(rank=1, main_address="a"), "--until-stdin-closes")
    _, bound = resolve(build_app(), there[len(own_program()) :])
    assert bound.arguments["machines"].faults() == []
    assert bound.arguments["settings"].max_steps == 3
