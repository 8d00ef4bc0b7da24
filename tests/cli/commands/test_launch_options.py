"""Options of machines without effect on an engine, and names that a scheduler does not accept."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest
from shardwright.cli.machines import TrainingMachineOptions, run_on_hosts, slurm_script_of_command
from shardwright.cli.main import build_app, run
from shardwright.cli.settings import resolve, running
from shardwright.ds_configs.plan.clusters import NodeCommand
from shardwright.ds_configs.plan.rendering import MAIN_PORT, NodePlace
from shardwright.ds_configs.specs.errors import UsageError
from shardwright.ds_configs.specs.hardware import parse_hardware
from shardwright.plugins.clusters.ssh import own_program


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--on", "slurm"], "hardware: must be the nodes of the job, not this machine"),
        (["--on", "slurm", "--hardware", "2x1xCPU", "--hostfile", "h"], "is for --on ssh, not slurm"),
        (["--on", "slurm", "--hardware", "2x1xCPU"], "on = 'slurm': sbatch is not on PATH"),
        (["--sbatch=--time=1"], "is for --on slurm, not local"),
        (["--on", "slurm", "--hardware", "2x1xCPU", "--name", "Two words"], "must be at most 40 lower-case letters"),
    ],
)
def test_a_training_command_that_no_job_can_run_is_rejected(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run(["train", "model", "--output-dir", str(tmp_path / "out"), *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--on", "slurm", "--hostfile", "h"], "hostfile = 'h': is for --on ssh, not slurm"),
        (["--on", "ssh", "--node-rank", "1", "--main-address", "a"], "is for --on local, not ssh"),
        (["--on", "slurm", "--main-port", "1234"], "main_port = 1234: is for --on local or ssh, not slurm"),
        (["--main-port", "1234"], "is for one of several machines"),
        (["--node-rank", "1"], "node_rank = 1: needs --main-address"),
        (["--on", "slurm", "--name", "a\n#SBATCH --wrap=x"], "must be at most 40 lower-case letters"),
        (["--on", "slurm", "--dry-run", "--sbatch=--time=1\n#SBATCH --uid=0"], "must have the form --NAME=VALUE"),
    ],
)
def test_an_option_without_effect_is_rejected(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["launch", "plan", *words]) == 2
    assert said in capsys.readouterr().err


def test_machines_read_the_file_of_settings_that_names_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, own = tmp_path / "settings.yaml", len(own_program())
    words = ("train", "model", "--output-dir", "out", "--config", str(file))
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1\n")
    file.write_text(f"on: ssh\nhostfile: {tmp_path}/hosts\nssh_config: own\nmax_steps: 3\n")
    commands: list[NodeCommand] = []
    monkeypatch.setattr(
        "shardwright.plugins.clusters.ssh.run_over_ssh", lambda command, *_, **__: commands.append(command)
    )
    with running(words):
        _, asked = resolve(build_app(), words)
        run_on_hosts(asked.arguments["machines"], parse_hardware("2x1xCPU"))
    there = commands[0].node_words(NodePlace(rank=1, main_address="a"), "--until-stdin-closes")
    _, over_ssh = resolve(build_app(), there[own:])
    file.write_text("on: slurm\nsbatch: [--time=1]\nname: tuning\nhardware: 2x1xCPU\nmax_steps: 3\n")
    stated = (*words, "--main-port", str(MAIN_PORT))
    with running(stated):
        _, asked = resolve(build_app(), stated)
        machines = asked.arguments["machines"]
        script = slurm_script_of_command(machines, parse_hardware("2x1xCPU"))
    assert "#SBATCH --job-name=tuning\n" in script and "#SBATCH --time=1\n" in script
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    node = shlex.split(script.splitlines()[-1].partition(" node ")[2])
    port = node.index("--main-port") + 1
    _, in_slurm = resolve(build_app(), [*node[own:port], "20005", *node[port + 1 :], "--node-rank", "1"])
    for bound in (over_ssh, in_slurm):
        assert bound.arguments["machines"].errors() == []
        assert bound.arguments["settings"].max_steps == 3


def test_options_of_ssh_and_places_are_rejected_together(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    for stated, where in (
        ({"on": "ssh", "node_rank": 1}, ["node_rank", "hostfile"]),
        ({"hostfile": hosts, "ssh_config": hosts, "main_port": 5}, ["hostfile", "ssh_config", "main_port"]),
    ):
        with pytest.raises(UsageError) as rejected:
            TrainingMachineOptions.model_validate(stated).place()
        assert [error.where for error in rejected.value.errors] == where
    hosts.write_text("a slots=1\nb slots=1\n")
    with pytest.raises(UsageError, match="lists 2 machines, but the plan has 3"):
        run_on_hosts(TrainingMachineOptions(on="ssh", hostfile=hosts), parse_hardware("3x1xCPU"))
