"""Launches on a Ray cluster: one worker of Ray Train's `TorchTrainer` on each node runs the node's launcher.

Ray Train finds the nodes, starts their workers, and restarts them after a failure (ray 2.60). The plan's own launcher
starts the ranks. If workers of Ray were ranks, their variables and process group would conflict with those that
DeepSpeed and Accelerate create.
"""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...ds_configs.plan.plan import most_nodes
from ...ds_configs.plan.rendering import LaunchSpec, NodePlace
from ...ds_configs.specs.errors import ConfigError, ShardwrightError, UsageError
from ..launching.launch import Launch, LaunchFailedError, launch_ranks
from ..launching.messages import NOTE
from .ssh import exported_variables

if TYPE_CHECKING:
    from ...ds_configs.plan.clusters import ClusterJob

_LONGEST_RUN_SECONDS = 90 * 86400.0
_CONNECT_SECONDS = 10.0
_NO_RETRY = (2, 4)
"""Exit codes of a launch whose options or input are rejected, so that it would fail again."""
_ENDED = -1


def worker_resources(plan: LaunchSpec) -> dict[str, float]:
    """Return the resources that Ray reserves per node: its accelerators, and a processor core for each rank."""
    ranks = float(plan.hardware.gpus_per_node)
    return {"CPU": ranks} if plan.hardware.gpu == "CPU" else {"CPU": ranks, "GPU": ranks}


def ray_run(job: ClusterJob, *, restarts: int, wait_seconds: float, least: int) -> dict[str, Any]:
    """Return the keywords of `TorchTrainer`'s configurations, and the command of the first node.

    If fewer nodes are allowed, Ray Train counts the nodes before each attempt (`ElasticScalingPolicy` of ray 2.60). The
    count is up to 20 s old, so that it may wait for a worker on a dead node; each restart then costs a controller
    failure. It would also end a running attempt when a node returns, which the monitoring interval prevents.
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
        # A node that does not start in time counts as a failure of the controller.
        "failure_config": {
            "max_failures": restarts,
            "controller_failure_limit": restarts if least == nodes else 2 * restarts,
        },
        "environment": {"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(wait_seconds)},
        "worker": job.node_words(NodePlace(rank="RANK", main_address="FIRST_NODE", main_port="PORT")),
    }


def connect(address: str | None) -> None:
    """Connect to a running cluster: at `address`, else at `RAY_ADDRESS`, else on this machine.

    Raises:
        UsageError: Ray is not installed, or there is no cluster of its version at the address.
    """
    # Ray would merge equal lines of different ranks.
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"
    try:
        import ray
    except ImportError:
        rule, fix = "requires the package ray", "pip install 'shardwright[ray]'"
        raise UsageError(ConfigError(where="on", value="ray", rule=rule, fix=fix)) from None
    address = address or os.environ.get("RAY_ADDRESS") or "auto"
    fix = "start a cluster with `ray start --head`, and pass --address HOST:6379"
    host, _, port = address.rpartition(":")
    if address != "auto":
        if not port.isdigit() or "/" in host or not host:
            rule = "must have the form HOST:PORT, for a node of the cluster"
            raise UsageError(ConfigError(where="address", value=address, rule=rule, fix=fix))
        try:
            socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
        except (OSError, OverflowError) as error:
            rule = f"no cluster answers there ({getattr(error, 'strerror', None) or error})"
            raise UsageError(ConfigError(where="address", value=address, rule=rule, fix=fix)) from None
    try:
        ray.init(address=address, logging_level="WARNING")
    except (ConnectionError, RuntimeError, ValueError) as error:
        rule = f"cannot connect: {' '.join(str(error).split())}"
        raise UsageError(ConfigError(where="address", value=address, rule=rule, fix=fix)) from None


def ray_node_errors(plan: LaunchSpec, *, least: int) -> list[ConfigError]:
    """Return an error if the connected cluster has too few nodes, or nodes that Ray Train would count twice."""
    import ray

    needed = worker_resources(plan)
    there = [node for node in ray.nodes() if node["Alive"] and _has(node["Resources"], needed)]
    each = " and ".join(f"{count:.0f} {name}" for name, count in needed.items())
    if len(there) >= plan.hardware.nodes:
        # ray 2.60 packs workers when it counts them (`autoscaling_coordinator_client.py`), whatever their placement.
        twice = {name: 2 * count for name, count in needed.items()}
        if least == plan.hardware.nodes or not any(_has(node["Resources"], twice) for node in there):
            return []
        rule = f"requires nodes with {each}, but one has twice as much and would count as two"
        fix = "plan for all accelerators of a node, start Ray with --num-cpus and --num-gpus, or omit --min-nodes"
        return [ConfigError(where="min_nodes", value=least, rule=rule, fix=fix)]
    rule = f"the plan has {plan.hardware.nodes} nodes with {each} each, but the cluster has {len(there)}"
    return [ConfigError(where="nodes", value=plan.hardware.name, rule=rule, fix="plan for fewer nodes, or add nodes")]


def _has(resources: Mapping[str, float], needed: Mapping[str, float]) -> bool:
    return all(resources.get(name, 0.0) >= count for name, count in needed.items())


class _Attempts:
    """State that the workers of an attempt leave for the next attempt and for the command."""

    def __init__(self) -> None:
        self._attempts = 0
        self._failures: list[tuple[str, int]] = []

    def begin(self) -> int:
        """Return the number of the new attempt; `_ENDED` if there must be none."""
        if any(code in _NO_RETRY for _, code in self._failures):
            return _ENDED
        self._attempts += 1
        return self._attempts - 1

    def failed(self, message: str, code: int) -> None:
        """Record the failure of a launcher."""
        self._failures.append((message, code))

    def failure(self) -> tuple[str, int] | None:
        """Return the failure that ended the run; `None` if a node died without reporting one."""
        final = [failure for failure in self._failures if failure[1] in _NO_RETRY]
        return next(iter(final or self._failures[-1:]), None)


def run_on_ray(job: ClusterJob, *, address: str | None, restarts: int, wait_seconds: float, least: int) -> None:
    """Run a plan on a Ray cluster and wait for it; a failed run resumes from its newest valid checkpoint.

    Args:
        job: Command of every node.
        address: `HOST:PORT` of the cluster; `None` for `RAY_ADDRESS`, else the cluster of this machine.
        restarts: Maximum number of restarts of a failed run, on the nodes that are then available.
        wait_seconds: How long to wait for the nodes.
        least: Minimum number of nodes for a restart.

    Raises:
        UsageError: Ray is not installed, there is no cluster, or it has too few nodes.
        ShardwrightError: the run failed after its last restart.
    """
    run = ray_run(job, restarts=restarts, wait_seconds=wait_seconds, least=least)
    os.environ.update(run["environment"])
    connect(address)
    import ray
    from ray import train
    from ray.train.torch import TorchTrainer
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    try:
        if errors := ray_node_errors(job.plan, least=least):
            raise UsageError(errors)
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        attempts = ray.remote(num_cpus=0)(_Attempts).options(scheduling_strategy=here).remote()
        node = {
            "job": job,
            "least": least,
            "attempts": attempts,
            "directory": str(Path.cwd()),
            "environment": exported_variables(),
        }
        # Ray Train requires a directory that all nodes share, and writes very little to it.
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
                first_lines = " ".join(str(error).split("\n")[:2])
                raise _error(ray.get(attempts.failure.remote()) or (first_lines, 1)) from None
            if (failure := ray.get(attempts.failure.remote())) and failure[1] in _NO_RETRY:
                raise _error(failure)
    finally:
        ray.shutdown()


def _error(failure: tuple[str, int]) -> ShardwrightError:
    error = ShardwrightError(failure[0])
    error.exit_code = failure[1]
    return error


def _without_process_group() -> Any:
    """Return a backend configuration without a process group, which the workers do not need.

    Seen with ray 2.60: `TorchConfig` creates one, whose gloo listens on the address that the host name resolves to.
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
    """Run the launcher of one node in its Ray Train worker."""
    import ray
    from ray import train
    from ray.train.collective import broadcast_from_rank_zero

    there, rank, meeting = train.get_context().get_world_size(), train.get_context().get_world_rank(), None
    if rank == 0:
        meeting = (ray.get(node["attempts"].begin.remote()), ray.util.get_node_ip_address(), _two_free_ports())
    attempt, address, port = broadcast_from_rank_zero(meeting)
    job: ClusterJob = node["job"].resumed() if attempt else node["job"]
    nodes = most_nodes(job.plan, there, least=node["least"])
    if attempt == _ENDED or (nodes is not None and rank >= nodes):
        # Nodes are unused if their number does not divide the global batch.
        return
    if nodes is None:
        raise RuntimeError(f"{there} nodes are available, but the plan needs {node['least']}")
    fewer = None if nodes == job.plan.hardware.nodes else nodes
    if rank == 0 and not attempt and fewer is not None:
        print(f"the run starts with {nodes} of {job.plan.hardware.nodes} nodes: the others are not free", flush=True)
    if attempt and rank == 0:
        print(f"the run resumes from its newest valid checkpoint, with {nodes} node(s)", flush=True)
    place = NodePlace(rank=rank, main_address=address, main_port=port, nodes=fewer)
    words = job.node_words(place, "--until-stdin-closes")
    text = ("-C", node["directory"], *(f"{name}={value}" for name, value in node["environment"].items()), *words)
    launch = Launch(program=("env",), arguments=text, ends_with_starter=True)
    try:
        launch_ranks(launch, on_message=lambda message: _print(f"{NOTE}{message}"), on_line=_print)
    except LaunchFailedError as error:
        (last_line,) = error.output.strip().splitlines()[-1:] or [str(error)]
        code = error.launcher_exit_code if error.launcher_exit_code in _NO_RETRY else 1
        ray.get(node["attempts"].failed.remote(f"node {rank}: {last_line}", code))
        if code not in _NO_RETRY:
            raise RuntimeError(last_line) from None


def _print(line: str) -> None:
    print(line, flush=True)


def _two_free_ports() -> int:
    """Return a free TCP port of this machine whose successor is free too."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("", 0))
            port: int = first.getsockname()[1]
            try:
                second.bind(("", port + 1))
            except (OSError, OverflowError):
                continue
            return port
