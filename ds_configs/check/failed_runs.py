"""Cause of a failed run: the log of its ranks against a table of error messages, and what to do next.

Several ranks print tracebacks, and most of them only follow from the first one. `find_causes` therefore orders causes
by `Order` before their position in the log. A log is read in blocks, so that its size does not matter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import BinaryIO

_BLOCK_BYTES = 1 << 20
_CONTEXT_LINES = 80
"""Lines before an error in which its frames are looked for."""
_LONGEST_LINE = 2000


class Order(IntEnum):
    """Which of several errors explains the others: the smallest."""

    CAUSE = 0
    """Its message names what is wrong."""
    KILLED = 1
    """A killed rank, for which the others wait."""
    EXCEPTION = 2
    """An exception that the table does not have."""
    TIMEOUT = 3
    """Ranks waited for one that had another error, or was slow."""
    CONSEQUENCE = 4
    """A rank lost the connection to one that ended before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """One entry of the table."""

    name: str
    """Stable identifier in JSON output."""
    words: tuple[str, ...]
    """Texts of which an error line has at least one; searched first, because that is fast."""
    pattern: str = ""
    """Regular expression of the line; by default `words` suffice."""
    meaning: str
    fix: tuple[str, ...]
    """What to change; `{0}` is the first group of `pattern`."""
    command: str
    """The next command; words in capitals are the user's."""
    order: Order = Order.CAUSE


_PLAN = "shardwright plan MODEL --hardware HARDWARE --seq-len LENGTH"
_RERUN = "shardwright launch PLAN SCRIPT"
FAILURES = (
    Failure(
        name="accelerator_out_of_memory",
        words=("out of memory",),
        pattern=r"(?:CUDA|HIP) out of memory\.|CUDA error: out of memory|out of memory in phase ([\w ]+):"
        r"|CUBLAS_STATUS_ALLOC_FAILED",
        meaning="An accelerator has less memory than the run needs.",
        fix=(
            "Use a smaller micro-batch with more accumulation, gradient checkpointing, a higher stage, or offload.",
            "With its plan, `shardwright explain PLAN --error LOG` lists the plans that fit.",
        ),
        command=_PLAN,
    ),
    Failure(
        name="host_out_of_memory",
        words=("can't allocate memory", "Killed process", "oom-kill", "oom_kill", "killed by signal: Killed"),
        meaning="A machine has less host memory than the run needs.",
        fix=(
            "Load weights on one rank per machine: ZeRO-3 or FSDP2 with `shardwright launch`.",
            "Use fewer workers of the data loader, and no offload of optimizer states.",
        ),
        command=f"{_PLAN} --host-memory SIZE",
    ),
    Failure(
        name="empty_zero3_checkpoint",
        words=("torch.Size([0])",),
        pattern=r"size mismatch for .*torch\.Size\(\[0\]\)",
        meaning="The weights were saved from one rank under ZeRO-3, where state_dict() has empty tensors.",
        fix=(
            "Save with trainer.save_model(). The weights of a DeepSpeed checkpoint are written by the command below,",
            "in the directory of the checkpoint.",
        ),
        command="python zero_to_fp32.py . . --safe_serialization",
    ),
    Failure(
        name="sharded_zero3_weight",
        words=("must be 2-D", "size of tensor a (0)", "shape '[0]'"),
        pattern=r"'weight' must be 2-D|size of tensor a \(0\)|shape '\[0\]'",
        meaning="Under ZeRO-3 a weight is empty on every rank, except while its module runs.",
        fix=(
            "Read or change it inside `with deepspeed.zero.GatheredParameters([weight]):`,",
            "or call the module that owns it instead of a function with its weight.",
        ),
        command=_RERUN,
    ),
    Failure(
        name="active_zero3_weight",
        words=("still active in submodules", "active_sub_modules"),
        pattern=r"still active in submodules|\bds_active_sub_modules|AssertionError: \{'id': .*'active_sub_modules': ",
        meaning="ZeRO-3 freed a weight while a module used it, or a module used a weight that is not gathered.",
        fix=(
            "Change weights in `GatheredParameters` with modifier_rank=0, not None.",
            "If batches or ranks run different modules, such as experts, pass their parent's class to",
            "`deepspeed.utils.set_z3_leaf_modules`. ZeRO-2 does not shard weights.",
        ),
        command=f"{_PLAN} --strategy zero2",
    ),
    Failure(
        name="port_in_use",
        words=("EADDRINUSE", "ddress already in use", "another process is utilizing it"),
        pattern=r"(?:Error|error|failed).*(?:EADDRINUSE|[Aa]ddress already in use)|another process is utilizing it",
        meaning="Another process listens on the port of the main rank, often a rank of an earlier run.",
        fix=(
            "End the earlier run, or start with another port: --main-port 29700 of `shardwright launch`,",
            "--main_process_port 0 of `accelerate launch`, --standalone of torchrun.",
        ),
        command=f"{_RERUN} --main-port 29700",
    ),
    Failure(
        name="missing_package",
        words=("No module named", "ImportError: "),
        pattern=r"No module named '([\w.-]+)'|ImportError: .*?pip install ['\"`]?([\w.-]+(?:\[\w+\])?)",
        meaning="The Python of the ranks does not have the package {0}.",
        fix=("Install it on every machine, into the Python that the launcher uses; `shardwright env` shows it.",),
        command="python -m pip install {0}",
    ),
    Failure(
        name="mismatched_shapes",
        words=(
            "size mismatch for",
            "shapes cannot be multiplied",
            "must match the size of tensor b",
            "is invalid for input",
        ),
        meaning="Two tensors have shapes that do not fit: the weights or the batch belong to another model.",
        fix=(
            "Load the weights with the config.json they were saved with. For new tokens, call",
            "model.resize_token_embeddings(len(tokenizer)) before the weights are loaded and sharded.",
            "For a batch: truncate or pad all columns in the collator, and compare its shapes on the named rank.",
        ),
        command="shardwright plan CHECKPOINT --hardware HARDWARE",
    ),
    Failure(
        name="token_outside_vocabulary",
        words=("index out of range in self", "device-side assert", "srcIndex < srcSelectDimSize"),
        meaning="A token id, a position or a label is larger than its table.",
        fix=(
            "In config.json, compare vocab_size with len(tokenizer), max_position_embeddings with the length.",
            "Ignored labels are -100. On GPUs, CUDA_LAUNCH_BLOCKING=1 makes the traceback show the right line.",
        ),
        command=f"CUDA_LAUNCH_BLOCKING=1 {_RERUN}",
    ),
    Failure(
        name="unused_parameters",
        words=("Expected to have finished reduction in the prior iteration",),
        meaning="DDP waits for gradients of parameters that the loss does not depend on.",
        fix=(
            "Freeze parameters without a gradient (requires_grad_(False)) before the model is wrapped,",
            "or pass --ddp_find_unused_parameters true. TORCH_DISTRIBUTED_DEBUG=DETAIL names the parameters.",
        ),
        command=f"TORCH_DISTRIBUTED_DEBUG=DETAIL {_RERUN}",
    ),
    Failure(
        name="missing_gradient",
        words=("does not require grad and does not have a grad_fn", "mark a variable ready only once"),
        meaning="The loss has no gradient, or a recomputed layer reports one twice.",
        fix=(
            "Set gradient_checkpointing_kwargs={'use_reentrant': False}. With frozen embeddings and reentrant",
            "checkpointing, call model.enable_input_require_grads(). Check that a parameter has requires_grad.",
        ),
        command=f"{_RERUN} --gradient_checkpointing_kwargs '{{\"use_reentrant\": false}}'",
    ),
    Failure(
        name="dtype",
        words=("same dtype", "expected scalar type", "unscale FP16 gradients", "uniform dtype", "Expected dtype"),
        meaning="Two tensors have different types: an upcast is missing, or a module kept another type.",
        fix=(
            "Train weights in fp32 with bf16=True, which computes in bf16; fp16=True needs fp32 weights.",
            "Cast the inputs of modules outside of autocast to the type of their weights.",
        ),
        command="shardwright check PLAN",
    ),
    Failure(
        name="layer_class_to_wrap",
        words=("Could not find the transformer layer class",),
        pattern=r"Could not find the transformer layer class (\S+) in the model",
        meaning="FSDP shards the model by layers of the class {0}, which this model does not have.",
        fix=(
            "Use the class of this model's layers for fsdp_transformer_layer_cls_to_wrap;",
            "the accelerate.yaml of a plan has it.",
        ),
        command=f"{_PLAN} --strategy fsdp2 --output-dir plan",
    ),
    Failure(
        name="configuration",
        words=("DeepSpeed config values that mismatch", "should have the same value as the TrainingArguments"),
        meaning="ds_config.json and TrainingArguments have different values.",
        fix=('Write "auto" into the DeepSpeed config, or use the arguments of the plan.',),
        command="shardwright check ds_config.json",
    ),
    Failure(
        name="batch_equation",
        words=("Check batch related parameters",),
        meaning="train_batch_size is not micro-batch * accumulation * ranks.",
        fix=(
            'Write "auto" for the three keys, or numbers whose product is train_batch_size.',
            "The last number is how many ranks started: 1 if the script ran without a launcher.",
        ),
        command="shardwright check ds_config.json --num-processes RANKS",
    ),
    Failure(
        name="checkpoint_of_other_ranks",
        words=("used a DP world size of",),
        meaning="DeepSpeed loads a checkpoint only on as many data-parallel ranks as saved it.",
        fix=(
            "`shardwright launch` and Trainers of trainer_for convert it while they load.",
            'For others, convert it, and set {"checkpoint": {"load_universal": true}} in ds_config.json.',
        ),
        command="python -m deepspeed.checkpoint.ds_to_universal --input_folder CHECKPOINT/global_stepN "
        "--output_folder CHECKPOINT/global_stepN_universal --inject_missing_state",
    ),
    Failure(
        name="loading_under_zero3",
        words=("Zero-3 is not compatible with", "Model was not initialized with `Zero-3`"),
        meaning="from_pretrained loads the model in another way than under ZeRO-3.",
        fix=(
            "Create TrainingArguments with the DeepSpeed config before from_pretrained, and keep them.",
            "Pass no device_map and no low_cpu_mem_usage.",
        ),
        command=_RERUN,
    ),
    Failure(
        name="quantized_storage",
        words=("Only Tensors of floating point and complex dtype can require", "expected there to be only one unique"),
        meaning="The quantized weights are stored as integers, which ZeRO-3 and FSDP2 cannot shard with the others.",
        fix=(
            "Pass bnb_4bit_quant_storage=torch.bfloat16 to BitsAndBytesConfig, and dtype=torch.bfloat16 to",
            "from_pretrained. A plan with --method qlora does that, or selects ZeRO-2 or less.",
        ),
        command=f"{_PLAN} --method qlora",
    ),
    Failure(
        name="quantized_checkpoint",
        words=(
            "incompatible with PTQ-quantized",
            "is incompatible with DeepSpeed ZeRO-3",
            "on purely quantized models",
        ),
        meaning="The weights are quantized: they have no gradients, and ZeRO-3 and FSDP cannot shard them.",
        fix=(
            "Train adapters, with DDP, ZeRO-1 or ZeRO-2. Or load the checkpoint that is not quantized; QLoRA quantizes",
            "its weights to 4 bits as they load, also under ZeRO-3 and FSDP2.",
        ),
        command=f"{_PLAN} --method qlora",
    ),
    Failure(
        name="vllm_out_of_memory",
        words=("warming up sampler", "memory for the cache blocks", "less than desired GPU memory utilization"),
        meaning="vLLM has less memory than its weights, its cache or its largest batch need.",
        fix=(
            "Alone: a larger gpu_memory_utilization, or smaller max_model_len and max_num_seqs. Beside training: the",
            "vllm_gpu_memory_utilization of the plan, or vllm_enable_sleep_mode.",
        ),
        command=f"{_PLAN} --task grpo",
    ),
    Failure(
        name="full_disk",
        words=("No space left on device", "Disk quota exceeded"),
        meaning="A disk is full.",
        fix=("Delete old checkpoints or set save_total_limit; the cache of the Hub is ~/.cache/huggingface.",),
        command="df -h . /tmp /dev/shm",
    ),
    Failure(
        name="killed",
        words=("exitcode", "return code = -9", "SIGKILL", "Signals.SIGKILL"),
        pattern=r"exitcode *: -9\b|return code = -9\b|died with <Signals\.SIGKILL|rank \d+ was killed by SIGKILL",
        meaning="A rank was killed by signal 9: by the kernel when host memory ran out, by a scheduler or a person.",
        fix=(
            'Look for the kernel\'s line: dmesg | grep -i "killed process".',
            "Compare the planned host memory with the machine's: offload, one copy of the model per rank, workers.",
        ),
        command=f"{_PLAN} --host-memory SIZE",
        order=Order.KILLED,
    ),
    Failure(
        name="collective_timeout",
        words=("collective operation", "imed out waiting", "imeout waiting for", "imed out after", "no progress for"),
        pattern=r"Watchdog caught collective operation timeout|rank \d+ made no progress for|\bTimed out waiting \d+ms|"
        r"[Tt]imeout waiting for key|timed out after \d+ seconds? waiting for clients",
        meaning="Ranks waited in a collective operation that another rank did not reach, or reached in another order.",
        fix=(
            "All ranks must run the same collectives: as many batches, no rank-0 code that gathers or saves,",
            "no expert or branch that only some ranks use under ZeRO-3.",
            "TORCH_FR_DUMP_TEMP_FILE=TRACES/rank_ keeps a record per rank; the command reads the directory.",
        ),
        command="shardwright explain --error TRACES",
        order=Order.TIMEOUT,
    ),
    Failure(
        name="lost_connection",
        words=(
            "onnection closed by peer",
            "onnection reset by peer",
            "roken pipe",
            "remote process exited",
            "NCCL error in:",
        ),
        meaning="A rank lost its connection: another rank ended first, and its own message is not in this log.",
        fix=("Read the logs of the other machines. Between machines, NCCL_SOCKET_IFNAME names the interface.",),
        command=f"NCCL_DEBUG=WARN {_RERUN}",
        order=Order.CONSEQUENCE,
    ),
    Failure(
        name="exception",
        words=("Error: ", "Exception: ", "Error\n"),
        pattern=r"^(?:\[[^\]]*\](?:<\w+>)?:? *|(?:error: )?rank \d+: |\d+: )?"
        r"(?!\S*ChildFailedError|\S*CalledProcessError)((?:\w+\.)*[A-Z]\w*(?:Error|Exception))(?::|$)",
        meaning="A rank ended with {0}.",
        fix=("Read the traceback above this line.",),
        command=f"SHARDWRIGHT_DEBUG=1 {_RERUN}",
        order=Order.EXCEPTION,
    ),
)
_WORDS = tuple({word.encode(): None for failure in FAILURES for word in failure.words})
_PATTERNS = [(failure, re.compile(failure.pattern)) for failure in FAILURES]
_RANK = re.compile(
    r"\[rank ?(\d+)\]|\[(?:default|[\w-]+)(\d+)\]:|^\[\d+,(\d+)\]<|^(\d+): |\brank (\d+)(?:: | was killed| made no)",
    re.I,
)
_RANK_OF_SUMMARY = re.compile(r"^\s*rank\s+: (\d+)")
_SOURCE = re.compile(r"(?:\[\w+\]: ?)? {4,}\S")
_OFFERED = re.compile(r"(?:error: )? {4}(shardwright .*)")
_INSTALLED = re.compile(r"-packages/|/lib/python3|^<")
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')


@dataclass(frozen=True, kw_only=True, slots=True)
class Cause:
    """An error in a log."""

    failure: Failure
    line: int
    """Number of the line, from 1."""
    text: str
    """The line, at most 2,000 characters."""
    groups: tuple[str, ...] = ()
    """What the pattern found, for the texts of `failure`."""
    rank: int | None = None
    """`None` if the log does not show it."""
    frame: str = ""
    """`file:line in function` of the innermost frame outside of installed packages."""
    offered: str = ""
    """Command of a plan that needs less, where the log has one."""

    def filled(self, text: str) -> str:
        """Return a text of `failure` with the groups of its pattern."""
        return text.replace("{0}", self.groups[0]) if self.groups else text


def find_causes(log: BinaryIO) -> list[Cause]:
    """Return the first error of each entry of the table, the one that explains the others first."""
    causes: dict[str, Cause] = {}
    # torchrun lists the ranks that it ended itself above the first one that failed.
    is_root, summary_rank = False, None
    offered = ""
    for number, line, before in _lines_with_words(log):
        if before and _FRAME.search(_decoded(before[-1])) and _SOURCE.match(line):
            # A traceback shows the line that raises, with the text of its message.
            continue
        if not offered and (match := _OFFERED.match(line)):
            offered = match[1]
        if "Root Cause" in line:
            is_root = True
        if match := _RANK_OF_SUMMARY.match(line):
            summary_rank = int(match[1])
        ended = f"{line}\n"
        for failure, pattern in _PATTERNS:
            if not any(word in ended for word in failure.words) or not (match := pattern.search(line)):
                continue
            rank = _rank(line)
            if failure.name == "killed" and line.lstrip().startswith("exitcode"):
                if not is_root:
                    continue
                rank = summary_rank
            # The first line about a killed rank has no rank; the summary at the end has.
            known = causes.get(failure.name)
            if known is None or (failure.name == "killed" and known.rank is None and rank is not None):
                causes[failure.name] = Cause(
                    failure=failure,
                    line=number,
                    text=line.strip()[:_LONGEST_LINE],
                    groups=tuple(group for group in match.groups() if group),
                    rank=rank,
                    frame=_frame(before, rank),
                )
            # The entries after it would read the same error as another one.
            break
    for name in ("accelerator_out_of_memory", "host_out_of_memory"):
        if name in causes:
            causes[name] = replace(causes[name], offered=offered)
    return sorted(causes.values(), key=lambda cause: (cause.failure.order, cause.line))


_CONTEXT_WORDS = (b"Root Cause", b"rank      :", b"    shardwright ")


def _lines_with_words(log: BinaryIO) -> Iterator[tuple[int, str, list[bytes]]]:
    """Yield lines that may match: their number, their text and the lines before them."""
    words = (*_WORDS, *_CONTEXT_WORDS)
    number, rest, before = 1, b"", list[bytes]()
    while True:
        block = log.read(_BLOCK_BYTES)
        text = rest + block
        # A line without end is searched too, in parts that overlap.
        end = (text.rfind(b"\n") + 1) if block else len(text)
        if end == 0 and len(text) > _BLOCK_BYTES:
            end = len(text) - _LONGEST_LINE
        searched, rest = text[:end], text[end:]
        lines = searched.removesuffix(b"\n").split(b"\n") if any(word in searched for word in words) else []
        for index, line in enumerate(lines):
            # Progress bars return to the start of their line.
            for part in line.split(b"\r"):
                if any(map((part + b"\n").__contains__, words)):
                    context = lines[max(0, index - _CONTEXT_LINES) : index]
                    yield number + index, _decoded(part), context if index >= _CONTEXT_LINES else [*before, *context]
        number += searched.count(b"\n")
        last = searched[-200 * _CONTEXT_LINES :].removesuffix(b"\n").split(b"\n")
        before = [*before, *last][-_CONTEXT_LINES:]
        if not block:
            return


def _decoded(line: bytes) -> str:
    return line.decode("utf-8", "replace")


def _rank(line: str) -> int | None:
    match = _RANK.search(line)
    return None if match is None else next(int(group) for group in match.groups() if group is not None)


def _frame(before: list[bytes], rank: int | None) -> str:
    """Return the innermost frame of the traceback before an error, of the same rank, outside of installed packages."""
    for line in map(_decoded, reversed(before)):
        is_own = (match := _FRAME.search(line)) and _rank(line) == rank and not _INSTALLED.search(match[1])
        if match and is_own:
            return f"{match[1]}:{match[2]} in {match[3]}"
    return ""
