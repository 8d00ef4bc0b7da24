"""Launches on a Ray cluster: Ray Train's `TorchTrainer` has one worker on each node, which runs the node's launcher.

Ray Train finds the nodes, starts their workers, and starts them again when one fails (ray 2.60). Ranks are started by
the plan's own launcher, as with every engine: a worker of Ray that was a rank would bring variables of its own, and a
process group that a rank of DeepSpeed or Accelerate has to make itself.
"""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...ds_configs.plan.fewer_nodes import most_nodes
from ...ds_configs.plan.launch import NodePlace
from ...ds_configs.plan.plan import Plan
from ...ds_configs.specs.errors import Fault, ShardwrightError, UsageError
from ..launching.launch import Launch, LaunchFailedError, run_together
from .ssh import exported_variables

if TYPE_CHECKING:
    from ...ds_configs.plan.cluster_jobs import ClusterJob

_LONGEST_RUN_SECONDS = 90 * 86400.0
_CONNECT_SECONDS = 10.0
_NO_RETRY = (2, 4)
"""Exit codes of a launch that would fail again: its options or its input are refused."""
_ENDED = -1


def worker_resources(plan: Plan) -> dict[str, float]:
    """Return what Ray is to reserve for a node of a plan: its accelerators, and a processor core for each rank."""
    ranks = float(plan.hardware.gpus_per_node)
    return {"CPU": ranks} if plan.hardware.gpu == "CPU" else {"CPU": ranks, "GPU": ranks}


def ray_run(job: ClusterJob, *, restarts: int, wait_seconds: float, least: int) -> dict[str, Any]:
    """Return what `TorchTrainer` is made of, as keywords of its configurations, and the command of the first node.

    Where fewer nodes do, Ray Train counts those that there are for each turn (`ElasticScalingPolicy` of ray 2.60). Its
    count is up to 20 s old: of a node that has just died it waits in vain for a worker, and counts anew then, which is
    a failure of the controller for each restart. It would also end a running turn for a node that has come back.
    """
    plan, nodes = job.plan, job.plan.hardware.nodes
    workers: dict[str, Any] = {"num_workers": nodes}
    if least < nodes:
        workers = {"num_workers": (least, nodes), "elastic_resize_monitor_interval_s": _LONGEST_RUN_SECONDS}
    return {
        "scaling_config": {
            **workers,
            "use_gpu": plan.hardware.gpu != "CPU",
            "resources_per_worker": worker_resources(plan),
            "placement_strategy": "STRICT_SPREAD" if nodes > 1 else "PACK",
        },
        # A node that does not come in time is a failure of the controller.
        "failure_config": {
            "max_failures": restarts,
            "controller_failure_limit": restarts if least == nodes else 2 * restarts,
        },
        "environment": {"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(wait_seconds)},
        "worker": job.node_words(NodePlace(rank="RANK", main_address="FIRST_NODE", main_port="PORT")),
    }


def connect(address: str | None) -> None:
    """Connect to a running cluster: the one that is named, or that of `RAY_ADDRESS`, or of this machine.

    Raises:
        UsageError: there is no Ray, or no cluster of its version at the address.
    """
    # Ranks print the same lines, of which Ray would show one.
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"
    try:
        import ray
    except ImportError:
        rule, fix = "needs the package ray", "pip install 'shardwright[ray]'"
        raise UsageError(Fault(where="on", value="ray", rule=rule, fix=fix)) from None
    address = address or os.environ.get("RAY_ADDRESS") or "auto"
    fix = "start one with `ray start --head`, and name it with --address HOST:6379"
    host, _, port = address.rpartition(":")
    if address != "auto":
        if not port.isdigit() or "/" in host or not host:
            rule = "must read HOST:PORT, on a node of the cluster"
            raise UsageError(Fault(where="address", value=address, rule=rule, fix=fix))
        try:
            socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
        except (OSError, OverflowError) as error:
            rule = f"no cluster answers there ({getattr(error, 'strerror', None) or error})"
            raise UsageError(Fault(where="address", value=address, rule=rule, fix=fix)) from None
    try:
        ray.init(address=address, logging_level="WARNING")
    except (ConnectionError, RuntimeError, ValueError) as error:
        rule = f"cannot be joined: {' '.join(str(error).split())}"
        raise UsageError(Fault(where="address", value=address, rule=rule, fix=fix)) from None


def ray_node_faults(plan: Plan, *, least: int) -> list[Fault]:
    """Return a fault where the cluster that this process is connected to does not suit a plan: too few nodes, or those
    on which Ray Train would count two workers of a run that goes on with fewer.
    """
    import ray

    needed = worker_resources(plan)
    there = [node for node in ray.nodes() if node["Alive"] and _has(node["Resources"], needed)]
    each = " and ".join(f"{count:.0f} {name}" for name, count in needed.items())
    if len(there) >= plan.hardware.nodes:
        # ray 2.60 packs workers when it counts them (`autoscaling_coordinator_client.py`), wherever they may be placed.
        twice = {name: 2 * count for name, count in needed.items()}
        if least == plan.hardware.nodes or not any(_has(node["Resources"], twice) for node in there):
            return []
        rule = f"counts nodes by their room for {each}, and one has twice as much"
        fix = "plan for all accelerators of a node, start Ray with --num-cpus and --num-gpus, or leave --min-nodes out"
        return [Fault(where="min_nodes", value=least, rule=rule, fix=fix)]
    rule = f"the plan has {plan.hardware.nodes} nodes with {each} each, the cluster {len(there)}"
    return [Fault(where="nodes", value=plan.hardware.name, rule=rule, fix="plan for what there is, or add nodes")]


def _has(resources: Mapping[str, float], needed: Mapping[str, float]) -> bool:
    return all(resources.get(name, 0.0) >= count for name, count in needed.items())


class _Turns:
    """Turns of a run: what the workers of one tell those of the next, and the command that started them all."""

    def __init__(self) -> None:
        self._turns = 0
        self._failures: list[tuple[str, int]] = []

    def begin(self) -> int:
        """Return the number of the turn that begins; `_ENDED` where there is to be none."""
        if any(code in _NO_RETRY for _, code in self._failures):
            return _ENDED
        self._turns += 1
        return self._turns - 1

    def failed(self, message: str, code: int) -> None:
        """Remember a launcher that failed."""
        self._failures.append((message, code))

    def failure(self) -> tuple[str, int] | None:
        """Return the failure that ended the run, if one was told; a node that died tells none."""
        refused = [failure for failure in self._failures if failure[1] in _NO_RETRY]
        return next(iter(refused or self._failures[-1:]), None)


def run_on_ray(job: ClusterJob, *, address: str | None, restarts: int, wait_seconds: float, least: int) -> None:
    """Run a plan on a Ray cluster and wait for its end; a run that fails goes on from its newest whole checkpoint.

    Args:
        job: What every node runs.
        address: `HOST:PORT` of the cluster; `None` for `RAY_ADDRESS`, else the cluster of this machine.
        restarts: How often a run that failed is started again, on the nodes that there are then.
        wait_seconds: How long the nodes are waited for.
        least: With how many nodes a restart goes on, where others are missing.

    Raises:
        UsageError: there is no Ray, no cluster, or one with too few nodes.
        ShardwrightError: the run failed once more than it is restarted.
    """
    run = ray_run(job, restarts=restarts, wait_seconds=wait_seconds, least=least)
    os.environ.update(run["environment"])
    connect(address)
    import ray
    from ray import train
    from ray.train.torch import TorchTrainer
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    try:
        if faults := ray_node_faults(job.plan, least=least):
            raise UsageError(faults)
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        turns = ray.remote(num_cpus=0)(_Turns).options(scheduling_strategy=here).remote()
        node = {
            "job": job,
            "least": least,
            "turns": turns,
            "directory": str(Path.cwd()),
            "environment": exported_variables(),
        }
        # Ray Train wants a directory that all nodes see, and leaves next to nothing in it.
        with tempfile.TemporaryDirectory(prefix=".ray-", dir=job.directory, ignore_cleanup_errors=True) as storage:
            trainer = TorchTrainer(
                _run_node,
                train_loop_config=node,
                torch_config=_without_process_group(),
                scaling_config=train.ScalingConfig(**run["scaling_config"]),
                run_config=train.RunConfig(
                    name=job.name,
                    storage_path=storage,
                    failure_config=train.FailureConfig(**run["failure_config"]),
                    logging_config=train.LoggingConfig(log_level="WARNING"),
                ),
            )
            try:
                trainer.fit()
            except train.TrainingFailedError as error:
                raise _told(ray.get(turns.failure.remote()) or (_first_lines(error), 1)) from None
            if (failure := ray.get(turns.failure.remote())) and failure[1] in _NO_RETRY:
                raise _told(failure)
    finally:
        ray.shutdown()


def _told(failure: tuple[str, int]) -> ShardwrightError:
    error = ShardwrightError(failure[0])
    error.exit_code = failure[1]
    return error


def _first_lines(error: Exception) -> str:
    return " ".join(str(error).split("\n")[:2])


def _without_process_group() -> Any:
    """Return the configuration of a backend that makes no process group of the workers, which have no tensors.

    Seen with ray 2.60: `TorchConfig` makes one, whose gloo listens where a host's own name resolves to.
    """
    from ray.train.backend import Backend
    from ray.train.torch import TorchConfig

    class NoProcessGroup(TorchConfig):
        @property
        def backend_cls(self) -> type[Any]:
            backend: type[Any] = Backend
            return backend

    return NoProcessGroup()


def _run_node(node: Mapping[str, Any]) -> None:
    """Run the launcher of one node, in the worker that Ray Train has started there."""
    import ray
    from ray import train
    from ray.train.collective import broadcast_from_rank_zero

    there, rank, meeting = train.get_context().get_world_size(), train.get_context().get_world_rank(), None
    if rank == 0:
        meeting = (ray.get(node["turns"].begin.remote()), ray.util.get_node_ip_address(), _two_free_ports())
    turn, address, port = broadcast_from_rank_zero(meeting)
    job: ClusterJob = node["job"].resumed() if turn else node["job"]
    nodes = most_nodes(job.plan, there, least=node["least"])
    if turn == _ENDED or (nodes is not None and rank >= nodes):
        # A number of nodes that does not divide the global batch leaves some over.
        return
    if nodes is None:
        raise RuntimeError(f"there are {there} nodes, of {node['least']} that the plan needs")
    fewer = None if nodes == job.plan.hardware.nodes else nodes
    if rank == 0 and not turn and fewer is not None:
        print(f"the run begins with {nodes} of {job.plan.hardware.nodes} nodes: no more are free", flush=True)
    if turn and rank == 0:
        print(f"the run goes on from its newest whole checkpoint, with {nodes} node(s)", flush=True)
    place = NodePlace(rank=rank, main_address=address, main_port=port, nodes=fewer)
    words = job.node_words(place, "--until-stdin-closes")
    text = ("-C", node["directory"], *(f"{name}={value}" for name, value in node["environment"].items()), *words)
    launch = Launch(program=("env",), arguments=text, ends_with_starter=True)
    try:
        run_together([launch], timeout_seconds=_LONGEST_RUN_SECONDS, on_line=lambda line: print(line, flush=True))
    except LaunchFailedError as error:
        said = error.output.strip().splitlines()[-1:] or [str(error)]
        code = error.launcher_exit_code if error.launcher_exit_code in _NO_RETRY else 1
        ray.get(node["turns"].failed.remote(f"node {rank}: {said[0]}", code))
        if code not in _NO_RETRY:
            raise RuntimeError(said[0]) from None


def _two_free_ports() -> int:
    """Return a TCP port of this machine that nothing listens on, nor on the one above it."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("", 0))
            port: int = first.getsockname()[1]
            try:
                second.bind(("", port + 1))
            except (OSError, OverflowError):
                continue
            return port
