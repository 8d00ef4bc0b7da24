"""Run a plan on a Ray cluster: one worker of Ray Train on each node starts `shardwright launch` there.

    python ray_train.py PLAN [SCRIPT] [ARGUMENTS ...]      # without SCRIPT: flags of `shardwright train`

Run it on a node of the cluster (`RAY_ADDRESS`, or the Ray of this machine). Nodes must see the plan, the model and this
Python under the same paths. After a failure, Ray Train restarts all workers, and the run resumes from its newest
complete checkpoint; a script of yours has to do that itself. RESTARTS=3 sets their number.
"""

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import ray
from ray import train
from ray.train.backend import Backend
from ray.train.collective import broadcast_from_rank_zero
from ray.train.torch import TorchConfig, TorchTrainer
from shardwright import Plan


class NoProcessGroup(TorchConfig):
    """Ranks create their process group themselves."""

    @property
    def backend_cls(self) -> type[Backend]:
        return Backend


def free_port() -> int:
    """Return a free port whose successor, where the machines are compared, is probably free too."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        return listener.getsockname()[1] - 1


def run_node(node: dict) -> None:
    """Run the launcher of one node, whose ranks meet at the first one."""
    rank = train.get_context().get_world_rank()
    address, port = broadcast_from_rank_zero((ray.util.get_node_ip_address(), free_port()) if rank == 0 else None)
    place = ["--node-rank", str(rank), "--main-address", address, "--main-port", str(port), "--until-stdin-closes"]
    words = [sys.executable, "-m", "shardwright", "launch", node["plan"], *place, "--", *node["arguments"]]
    launcher = subprocess.Popen(words, cwd=node["directory"], stdin=subprocess.PIPE)
    # When this worker ends, its standard input closes; after this word the launcher then ends its ranks without saving.
    launcher.stdin.write(b"end\n")
    launcher.stdin.flush()
    code = launcher.wait()
    if code:
        raise RuntimeError(f"node {rank}: shardwright launch ended with exit code {code}")


def main(plan: str, *arguments: str) -> None:
    # Ray stores nothing under a relative path, which is what Python 3.11 makes of a relative directory.
    plan = str(Path(plan).absolute())
    hardware = Plan.load(plan).hardware
    ranks, on_gpus = hardware.gpus_per_node, hardware.gpu != "CPU"
    if not arguments or arguments[0].startswith("-"):
        arguments = (*arguments, "--resume-or-anew")
    ray.init(address=os.environ.get("RAY_ADDRESS", "auto"))
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if sum(each.get("GPU" if on_gpus else "CPU", 0) >= ranks for each in nodes) < hardware.nodes:
        sys.exit(f"the plan has {hardware.nodes} nodes with {ranks} ranks each; the cluster has {len(nodes)} nodes")
    with tempfile.TemporaryDirectory(prefix=".ray-", dir=plan, ignore_cleanup_errors=True) as storage:
        TorchTrainer(
            run_node,
            train_loop_config={
                "plan": plan,
                "arguments": arguments,
                "directory": str(Path.cwd()),
            },
            torch_config=NoProcessGroup(),
            scaling_config=train.ScalingConfig(
                num_workers=hardware.nodes,
                use_gpu=on_gpus,
                resources_per_worker={"CPU": ranks, "GPU": ranks} if on_gpus else {"CPU": ranks},
                placement_strategy="STRICT_SPREAD" if hardware.nodes > 1 else "PACK",
            ),
            run_config=train.RunConfig(
                name="shardwright",
                storage_path=storage,
                failure_config=train.FailureConfig(max_failures=int(os.environ.get("RESTARTS", "0"))),
            ),
        ).fit()


if __name__ == "__main__":
    main(*sys.argv[1:])
