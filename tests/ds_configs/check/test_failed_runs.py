"""Logs of failed runs: the cause is named with its line and rank, and the next command exists.

The logs of tests/data/failed_runs were printed by runs on CPU ranks with torch 2.13.0. Messages of CUDA and NCCL, which
need GPUs, have the formats of torch's sources (`CUDACachingAllocator.cpp`, `ProcessGroupNCCL.cpp`).
"""

from __future__ import annotations

import io
import json
import re
import tracemalloc
from pathlib import Path

import pytest
from commands import every_command
from paths import CONFIGS, ROOT
from shardwright.cli.main import build_app
from shardwright.ds_configs.check.failed_runs import FAILURES, Order, find_causes

LOGS = ROOT / "tests" / "data" / "failed_runs"
EXPECTED = {
    "missing_package": ("missing_package", None),
    "state_dict_shapes": ("mismatched_shapes", 1),
    "product_shapes": ("mismatched_shapes", 1),
    "dtype": ("dtype", 1),
    "unused_parameters": ("unused_parameters", 1),
    "no_gradient": ("missing_gradient", 1),
    "killed": ("killed", 1),
    "host_allocator": ("host_out_of_memory", 1),
    "other_rank_ended": ("exception", 1),
    "token": ("token_outside_vocabulary", 1),
    "gloo_timeout": ("collective_timeout", 0),
    "zero3_weight": ("sharded_zero3_weight", 0),
    "fsdp_wrap": ("layer_class_to_wrap", None),
    "port": ("port_in_use", None),
    "train_memory": ("accelerator_out_of_memory", 0),
}
"""Cause and rank of each log."""
CUDA = (
    "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 15.66 GiB. GPU 3 has a total capacity of "
    "79.15 GiB of which 3.10 GiB is free. Including non-PyTorch memory, this process has 76.04 GiB memory in use.\n"
)
NCCL = (
    "[rank{0}]:[E1218 20:27:21.426415540 ProcessGroupNCCL.cpp:629] [Rank {0}] Watchdog caught collective operation "
    "timeout: WorkNCCL(SeqNum=812, OpType=ALLREDUCE, NumelIn=8, NumelOut=8, Timeout(ms)=600000) ran for 600081 "
    "milliseconds before timing out.\n"
)


def first(text: str | bytes) -> tuple[str, int, int | None]:
    causes = find_causes(io.BytesIO(text if isinstance(text, bytes) else text.encode()))
    return causes[0].failure.name, causes[0].line, causes[0].rank


def test_every_log_has_an_expected_cause():
    assert {file.stem for file in LOGS.glob("*.log")} == EXPECTED.keys()


@pytest.mark.parametrize("name", EXPECTED)
def test_the_cause_of_a_real_log_is_named(name: str) -> None:
    """Not the errors that follow from it, which other ranks may have printed before."""
    with (LOGS / f"{name}.log").open("rb") as log:
        cause = find_causes(log)[0]
    assert (cause.failure.name, cause.rank) == EXPECTED[name]
    lines = (LOGS / f"{name}.log").read_text(encoding="utf-8").split("\n")
    assert cause.text in lines[cause.line - 1]


def test_messages_of_gpus_are_read() -> None:
    timeouts = NCCL.format(0) + NCCL.format(1)
    assert first(timeouts) == ("collective_timeout", 1, 0)
    assert first("rank 1 made no progress for 4 s, since its start; the stacks") == ("collective_timeout", 1, 1)
    # The rank that ran out of memory printed last.
    assert first(timeouts + CUDA) == ("accelerator_out_of_memory", 3, 3)
    assert first("[rank1]: RuntimeError: CUDA error: device-side assert triggered\n")[0] == "token_outside_vocabulary"
    lost = "[rank0]: torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:77, remote process exited\n"
    assert first(lost)[0] == "lost_connection"
    assert first(lost + "[rank1]: KeyError: 'labels'\n") == ("exception", 2, 1)
    empty = "\tsize mismatch for 0.weight: copying a param with shape torch.Size([0]) from checkpoint, the shape in "
    assert first(f"{empty}current model is torch.Size([8, 8]).\n")[0] == "empty_zero3_checkpoint"
    assert first("[rank1]: AssertionError\n") == ("exception", 1, 1)
    assert first("slurmstepd: error: Detected 1 oom_kill event in StepId=1.0\n")[0] == "host_out_of_memory"


@pytest.mark.parametrize(
    ("line", "name"),
    [
        (
            "AssertionError: Check batch related parameters. train_batch_size is not equal to micro_batch_per_gpu * "
            "gradient_acc_step * world_size 8 != 2 * 1 * 1",
            "batch_equation",
        ),
        (
            "deepspeed.runtime.zero.utils.ZeRORuntimeException: The checkpoint being loaded used a DP world size of 8 "
            "but the current world size is 16. Automatic adjustment of ZeRO's optimizer state partitioning with a new "
            "world size is not currently supported.",
            "checkpoint_of_other_ranks",
        ),
        (
            "ValueError: DeepSpeed Zero-3 is not compatible with `low_cpu_mem_usage=True` or with passing a "
            "`device_map`.",
            "loading_under_zero3",
        ),
        (
            "ValueError: Model was not initialized with `Zero-3` despite being configured for DeepSpeed Zero-3.",
            "loading_under_zero3",
        ),
        (
            "RuntimeError: Only Tensors of floating point and complex dtype can require gradients",
            "quantized_storage",
        ),
        ("ValueError: DeepSpeed ZeRO-3 or FSDP is incompatible with PTQ-quantized models.", "quantized_checkpoint"),
        (
            "AssertionError: {'id': 419, 'status': 'INFLIGHT', 'numel': 16777216, 'ds_numel': 16777216, 'shape': "
            "(8192, 2048), 'ds_shape': (8192, 2048), 'requires_grad': True, 'grad_shape': None, 'persist': False, "
            "'active_sub_modules': {425}, 'ds_tensor.shape': torch.Size([4194304])}",
            "active_zero3_weight",
        ),
        ("assert not param.ds_active_sub_modules, param.ds_summary()", "active_zero3_weight"),
        (
            "RuntimeError: Cannot free a ZeRO-3 parameter while it is still active in submodules. This can happen if: "
            "(1) submodules have not released the parameter, or (2) you modified parameters inside a "
            "`GatheredParameters` context with `modifier_rank=None`.",
            "active_zero3_weight",
        ),
        (
            "RuntimeError: CUDA out of memory occurred when warming up sampler with 1024 dummy requests. Please try "
            "lowering `max_num_seqs` or `gpu_memory_utilization` when initializing the engine.",
            "vllm_out_of_memory",
        ),
    ],
)
def test_errors_that_people_report_are_named(line: str, name: str) -> None:
    """Lines of issues of DeepSpeed (3647, 6441, 6914, 7811), TRL (3523), PEFT (2014) and others."""
    (cause,) = find_causes(io.BytesIO(f"[rank1]: {line}\n".encode()))
    assert (cause.failure.name, cause.rank) == (name, 1)


def test_ranks_that_the_launcher_killed_are_no_cause() -> None:
    """torchrun kills ranks that do not end after a failure; its summary lists them above the first failure."""
    summary = "Failures:\n[1]:\n  rank      : 1 (local_rank: 1)\n  exitcode  : -9 (pid: 2)\n"
    summary += "Root Cause (first observed failure):\n[0]:\n  rank      : 0 (local_rank: 0)\n  exitcode  : 1 (pid: 1)\n"
    assert first(NCCL.format(0) + summary) == ("collective_timeout", 1, 0)


def test_a_run_without_errors_has_no_cause() -> None:
    log = "step 3 of 9, loss 2.1, out of memory is far away\n{'train_loss': 2.0, 'exitcode': 0}\nno NCCL errors\n"
    assert find_causes(io.BytesIO(log.encode())) == []


@pytest.mark.once
def test_a_large_log_takes_little_memory() -> None:
    class Repeated(io.RawIOBase):
        """A log of 50 MB: progress bars without an end of line, then lines, then the error."""

        def __init__(self) -> None:
            self.parts = [b"\r 17%|##   | step 123" * 50_000] * 13 + [b"loss 2.13 gradient norm 0.71\n" * 36_000] * 36
            self.parts.append(b"\n" + CUDA.encode())
            self.size = sum(map(len, self.parts))
            self.rest = b""

        def read(self, count: int = -1) -> bytes:
            while len(self.rest) < count and self.parts:
                self.rest += self.parts.pop(0)
            read, self.rest = self.rest[:count], self.rest[count:]
            return read

    log = Repeated()
    assert log.size > 50e6
    assert find_causes(log)[0].failure.name == "accelerator_out_of_memory"
    log = Repeated()
    log.parts = log.parts[11:16] + log.parts[-1:]
    tracemalloc.start()
    find_causes(log)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 40e6


def test_the_cause_is_found_among_lines_that_all_have_words_of_errors() -> None:
    log = b"[rank0]: skipped: KeyError: no exitcode, Root Cause unknown\n" * 40_000 + CUDA.encode()
    assert first(log) == ("accelerator_out_of_memory", 40_001, 3)


def test_an_error_across_two_blocks_is_read() -> None:
    for length in range((1 << 20) - len(CUDA) - 2, (1 << 20) + 2, 40):
        assert first(b"." * length + b"\n" + CUDA.encode()) == ("accelerator_out_of_memory", 2, 3)


def test_the_table_names_commands_that_exist() -> None:
    app = build_app()
    for failure in FAILURES:
        if match := re.search(r"shardwright ([a-z]+)(.*)", failure.command):
            command = app[match[1]]
            options = {name for argument in command.assemble_argument_collection() for name in argument.names}
            stated = set(re.findall(r"--[a-z-]+(?= |$)", match[2])) if match[1] != "launch" else {"--main-port"}
            assert stated <= options, failure.command
    assert len({failure.name for failure in FAILURES}) == len(FAILURES)
    assert all(failure.order == Order.CAUSE or failure.name in ORDERED for failure in FAILURES)


ORDERED = ("killed", "exception", "collective_timeout", "lost_connection")


def test_explain_names_the_cause_and_the_next_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shell = every_command(capsys, monkeypatch)
    done = shell("explain", "--error", LOGS / "fsdp_wrap.log", "--format", "json")
    answer = json.loads(done.out)
    assert done.code == 0 and answer["cause"] == "layer_class_to_wrap" and "LlamaDecoderLayer" in answer["meaning"]
    # The next command, with the user's words filled in, writes a file with the class of the model's layers.
    words = answer["command"].replace("MODEL", str(CONFIGS / "Qwen--Qwen2.5-0.5B")).replace("HARDWARE", "2xL40S")
    words = words.replace("LENGTH", "512").replace("--output-dir plan", f"--output-dir {tmp_path / 'plan'}").split()
    assert words[0] == "shardwright" and shell(*words[1:]).code == 0
    assert "Qwen2DecoderLayer" in (tmp_path / "plan" / "accelerate.yaml").read_text(encoding="utf-8")
    # With the plan, plans that need less memory; each is a command.
    log = tmp_path / "run.log"
    log.write_text(CUDA, encoding="utf-8")
    done = shell("explain", tmp_path / "plan", "--error", log)
    assert done.code == 0 and "plans with the same global batch that need less" in done.out
    command = re.search(r"^next: shardwright (.*)$", done.out, re.MULTILINE)
    assert (
        command
        and shell(*command[1].replace("--output-dir plan", "--dry-run").replace(" --force", "").split()).code == 0
    )
    log.write_text("all is well\n", encoding="utf-8")
    done = shell("explain", "--error", log)
    assert done.code == 1 and "no error of a run in it; pass the complete output of all ranks" in done.err
    done = shell("explain", "--error", tmp_path / "none.log")
    assert done.code == 2 and "cannot be read (No such file or directory)" in done.err
    done = shell("explain", tmp_path / "no-plan", "--error", LOGS / "dtype.log")
    assert done.code == 2 and "no-plan" in done.err
    done = shell("explain")
    assert done.code == 2 and "subject: is missing" in done.err


def test_a_log_is_read_from_standard_input(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    shell = every_command(capsys, monkeypatch)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO((LOGS / "dtype.log").read_bytes())))
    done = shell("explain", "--error", "-")
    assert done.code == 0 and done.out.startswith("dtype: Two tensors have different types")
    # Users of the package have no docs directory.
    assert "docs/" not in done.out
