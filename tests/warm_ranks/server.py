"""The server of warm processes: imports torch, Transformers, Accelerate and DeepSpeed once and forks for each request.

A forked process is killed when the connection of its request closes, and when the server ends. The server is killed
when the process that started it ends. It only imports before it forks: requests share no other state.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import gc
import importlib
import os
import pkgutil
import random
import runpy
import selectors
import signal
import socket
import sys
import tempfile
import threading
import traceback
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from protocol import HANDLED_SIGNALS, OPERATORS, exit_with, receive_request, send_number

PRELOADED = (
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.run",
    "transformers.trainer",
    "transformers.models.llama.modeling_llama",
    "transformers.models.mixtral.modeling_mixtral",
    "transformers.integrations.deepspeed",
    "accelerate.commands.accelerate_cli",
    "datasets",
    "peft",
    "bitsandbytes",
    "deepspeed.comm.mori",
    "deepspeed.module_inject.auto_ep",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.moe.ep_kernels",
    "deepspeed.ops.op_builder.all_ops",
    "deepspeed.runtime.engine",
    "deepspeed.runtime.pipe.engine",
    "deepspeed.runtime.sequence_parallel.ulysses_sp",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "distutils.sysconfig",
    "torch._subclasses.schema_check_mode",
    "torch.distributed.algorithms.ddp_comm_hooks",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.elastic.multiprocessing.errors",
    "torch.distributed.tensor.experimental._attention",
    "torch.profiler._cupti_monitor",
    "torch.utils.serialization.config",
)
"""What ranks, launchers and commands import first, in addition to every module of Shardwright."""
LAYERS = ("ds_configs", "plugins", "trainers", "cli")
_REGISTERING = "shardwright.trainers.formats."
"""Modules that register formats in other libraries when they are imported: a process does that for itself."""
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    # Arrow's own allocator would start a thread, which does not survive a fork.
    "ARROW_DEFAULT_MEMORY_POOL": "system",
}
"""Variables that these packages read while they are imported."""
_SET_PARENT_DEATH_SIGNAL = 1
"""`PR_SET_PDEATHSIG` of Linux's prctl."""
_COLLAPSE = 25
"""`MADV_COLLAPSE` of Linux 6.1 and later."""
_HUGE_PAGE_BYTES = 2 << 20


class Server:
    """Answers requests until the process that started it ends."""

    def __init__(self, descriptor: int) -> None:
        self._listener = socket.socket(fileno=descriptor)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._processes: dict[int, tuple[int, socket.socket]] = {}
        """Process id and connection of its request, by the descriptor that becomes readable when the process ends."""
        self._warm = False

    def serve(self) -> dict[str, Any]:
        """Fork for every request; returns only in the children, with the request."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    connection, _ = self._listener.accept()
                    self._selector.register(connection, selectors.EVENT_READ)
                elif key.fd in self._processes:
                    self._report_exit(key.fd)
                elif isinstance(key.fileobj, socket.socket):
                    request = self._handle(key.fileobj)
                    if request is not None:
                        return request

    def _handle(self, connection: socket.socket) -> dict[str, Any] | None:
        """Fork for a request, or kill the process of a closed connection. Returns the request in the child."""
        try:
            received = receive_request(connection)
        except OSError:
            received = None
        if received is None:
            self._selector.unregister(connection)
            processes = [process for process, requester in self._processes.values() if requester is connection]
            for process in processes:
                _end_group(process)
            if not processes:
                connection.close()
            return None
        if not self._warm:
            _import_all()
            self._warm = True
        if "deepspeed" in sys.modules:
            _load_operators()
        request, streams = received
        process = os.fork()
        if process == 0:
            self._become(request, connection, streams)
            return request
        for stream in streams:
            os.close(stream)
        with contextlib.suppress(OSError):
            send_number(connection, process)
        descriptor = os.pidfd_open(process)
        self._processes[descriptor] = process, connection
        self._selector.register(descriptor, selectors.EVENT_READ)
        return None

    def _report_exit(self, descriptor: int) -> None:
        process, connection = self._processes.pop(descriptor)
        self._selector.unregister(descriptor)
        os.close(descriptor)
        # Workers of a data loader outlive a killed rank; its process group exists until `waitpid`.
        _end_group(process)
        _, status = os.waitpid(process, 0)
        with contextlib.suppress(OSError):
            send_number(connection, os.waitstatus_to_exitcode(status))
        with contextlib.suppress(KeyError):
            self._selector.unregister(connection)
        connection.close()

    def _become(self, request: dict[str, Any], connection: socket.socket, streams: Sequence[int]) -> None:
        """Give the forked process the session, streams, environment, directory and signals of the request."""
        os.setsid()
        end_with_parent()
        self._selector.close()
        for other in (self._listener, connection, *(requester for _, requester in self._processes.values())):
            other.close()
        for descriptor in self._processes:
            os.close(descriptor)
        for target, stream in enumerate(streams):
            os.dup2(stream, target)
            os.close(stream)
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["directory"])
        for number in HANDLED_SIGNALS:
            default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, signal.SIG_IGN if number in request["ignored_signals"] else default)
        _reopen_streams()
        _reset_random_state()


def _end_group(process: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process, signal.SIGKILL)


def end_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies."""
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def _import_all() -> None:
    """Import what processes share; a module that is not installed fails in the process that needs it."""
    from shardwright.plugins.bitsandbytes import quiet_optional_kernels

    quiet_optional_kernels()
    for name in (*PRELOADED, *_modules_of_shardwright()):
        try:
            importlib.import_module(name)
        except Exception:
            traceback.print_exc()
    _fill_caches()
    _disable_finalizers()
    gc.collect()
    gc.freeze()
    _use_huge_pages()


def _disable_finalizers() -> None:
    """Skip finalizers of imported modules in forked processes: torch would unregister every operator of its Python
    libraries, which copies half as many pages as a short training."""
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False


def _use_huge_pages() -> None:
    """Move what was imported to pages of 2 MiB, because a fork copies an entry for each page. Not every kernel can."""
    advise = ctypes.CDLL(None).madvise
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        addresses, permissions, _, _, _, *name = line.split(maxsplit=5)
        if permissions == "rw-p" and name in ([], ["[heap]"]):
            first, end = (int(address, 16) for address in addresses.split("-"))
            first = -(-first // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
            if first + _HUGE_PAGE_BYTES <= end:
                advise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), _COLLAPSE)


def _modules_of_shardwright() -> Iterator[str]:
    for layer in LAYERS:
        package = importlib.import_module(f"shardwright.{layer}")
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.startswith(_REGISTERING) and not module.name.endswith(".__main__"):
                yield module.name


def _fill_caches() -> None:
    """Build the tables that every model and engine builds, which takes a quarter of a small training."""
    import cpuinfo
    import deepspeed.ops
    from torch._dynamo.trace_rules import get_torch_obj_rule_map
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("llama")
    get_torch_obj_rule_map()
    # Runs a compiler.
    _ = deepspeed.ops.__compatible_ops__
    # Each of DeepSpeed's CPU optimizers asks for it, which starts a process and takes a second.
    processor = cpuinfo.get_cpu_info()
    cpuinfo.get_cpu_info = lambda: dict(processor)
    # Each rendezvous asks for names of its callers with inspect.stack(), which looks through thousands of modules.
    dynamic_rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name


def _load_operators() -> None:
    """Load DeepSpeed's compiled operators: torch locks the directory of an operator while it loads it, and a rank
    that is killed meanwhile leaves the lock behind."""
    from deepspeed.accelerator import get_accelerator
    from shardwright.plugins.deepspeed.compiled_operators import (
        BUILDERS,
        extensions_directory,
        is_compiled,
        stale_locks,
    )

    directory = extensions_directory()
    for name in OPERATORS:
        builder = get_accelerator().create_op_builder(BUILDERS[name])
        if builder.name in builder._loaded_ops or stale_locks(directory, [name]):
            continue
        if is_compiled(directory, name):
            builder.load(verbose=False)


def _reopen_streams() -> None:
    for name, descriptor, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        stream = os.fdopen(descriptor, mode, encoding="utf-8", errors="surrogateescape", closefd=False)
        stream.reconfigure(line_buffering=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _reset_random_state() -> None:
    random.seed()
    tempfile.tempdir = None
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


def run_as_interpreter(arguments: list[str]) -> int:
    """Run what an interpreter with these arguments would run, and return its exit status, negative for a signal."""
    while arguments[0] in ("-u", "-B"):
        arguments = arguments[1:]
    kind, *rest = arguments
    try:
        if kind == "-c":
            _set_arguments(["-c", *rest[1:]], "")
            main = sys.modules["__main__"] = type(sys)("__main__")
            main.__dict__["__builtins__"] = builtins
            exec(compile(rest[0], "<string>", "exec"), main.__dict__)  # noqa: S102
        elif kind == "-m":
            _set_arguments(rest, str(Path.cwd()))
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            _set_arguments(arguments, str(Path(kind).absolute().parent))
            runpy.run_path(kind, run_name="__main__")
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return (ended.code or 0) & 0xFF
        print(ended.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        traceback.print_exc()
        return -signal.SIGINT
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _set_arguments(arguments: list[str], first_path: str) -> None:
    sys.argv = arguments
    more = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:1] = [first_path, *more]


def finish(status: int) -> NoReturn:
    """End as an interpreter does, without freeing all modules, which takes as long as a small training."""
    for last in (threading._shutdown, atexit._run_exitfuncs, sys.stdout.flush, sys.stderr.flush):  # type: ignore[attr-defined]
        with contextlib.suppress(BaseException):
            last()
    exit_with(status)
    raise AssertionError


if __name__ == "__main__":
    end_with_parent()
    os.environ.update(ENVIRONMENT | os.environ)
    finish(run_as_interpreter(Server(int(sys.argv[1])).serve()["arguments"]))
