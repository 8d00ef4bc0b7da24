"""Work of every rank of a launched training: arguments, model, guarded training, records, and result.

Seen with transformers 5.17.0: `Trainer.evaluate` computes the Trainer's own loss, and before training it starts another
DeepSpeed engine; `held_out_cross_entropy` instead computes the cross-entropy with the training engine. Both read each
sample once, and every labelled token has the same weight.
"""

from __future__ import annotations

import contextlib
import json
import socket
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from ...ds_configs.plan.output import write_files
from ...ds_configs.plan.plan import Plan
from ...ds_configs.specs.errors import ConfigError, RefusedInputError, ShardwrightError, UsageError
from ...ds_configs.specs.images import IMAGE_PARTS, ImagePart, image_part
from ...ds_configs.specs.tasks import TaskName
from ...plugins import patches
from ...plugins.accelerate import Engine, SamplesOnce, configure_cpu_ranks, engine_from_environment
from ...plugins.deepspeed.engine import prepare_nvme_offload, refuse_overwritten_rates, refuse_run_effects
from ...plugins.huggingface_hub import model_directory
from ...plugins.launching.background import FirstRank
from ...plugins.launching.messages import note_on_first_rank
from ...plugins.peft import add_lora
from ...plugins.transformers.loading import gathered, load_on_first_rank, stored_precision
from ...plugins.transformers.training_arguments import (
    compute_dtype,
    refuse_replaced_optimizer,
    training_arguments,
    warn_of_zero0_in_16_bit,
    weights_dtype,
)
from ..checkpoints import Selection, full_disk_errors, newest_whole
from ..counting.counts import evaluated_mean
from ..data.chat import IGNORED_LABEL, with_turn_end
from ..data.models import StartingModel, load_config, load_model
from ..data.samples import collate
from .clock import MetricsWriter, ProgressSender
from .inputs import job_options
from .plan_callback import memory_errors
from .settings import (
    EVALUATION_SAMPLES,
    PLAN_DIRECTORY,
    RESULT_FILE,
    TOKENIZER,
    TRAIN_SAMPLES,
    LaunchedJob,
    LaunchedSettings,
    RankTask,
)

_EVALUATED_LOGITS_BYTES = 2**30
"""Fp32 logits that exist at a time in an evaluation."""


@dataclass(frozen=True, kw_only=True)
class RankContext:
    """State of a rank before its Trainer is built."""

    work: Path
    """Directory of the job's file."""
    arguments: Any
    """`TrainingArguments`."""
    engine: Engine
    resumed: Selection | None
    """The checkpoint to resume from."""
    tokenizer: Any
    """Of the trained model."""
    processor: Any
    """Of a model that reads images; `None` for others."""
    samples: tuple[Any, Any]
    """Training samples and held-out samples."""
    plan: Plan
    """The plan that the ranks run."""

    def trainer_arguments(self) -> dict[str, Any]:
        padding = self.tokenizer.eos_token_id if self.tokenizer.pad_token_id is None else self.tokenizer.pad_token_id
        return {
            "args": self.arguments,
            "train_dataset": self.samples[0],
            "eval_dataset": self.samples[1],
            "data_collator": partial(collate, pad_token_id=padding or 0, processor=self.processor),
            "processing_class": self.processor or self.tokenizer,
        }


def rank_arguments(settings: dict[str, Any], *, method: str, task: TaskName = "sft") -> tuple[Any, Engine]:
    """Return the task's `TrainingArguments` of this rank and its engine; ZeRO-3 needs them before weights are made.

    Raises:
        UsageError: an installed release cannot train, or arguments contradict the host or each other.
    """
    engine = chosen_engine(settings)
    arguments = training_arguments(settings, configure_cpu_ranks(engine), task=task)
    check_upstream(engine, method=method)
    refuse_run_effects(arguments)
    refuse_replaced_optimizer(arguments)
    warn_of_zero0_in_16_bit(arguments)
    prepare_nvme_offload(arguments)
    return arguments, engine


def open_rank(job: LaunchedJob, work: Path) -> RankContext:
    """Check this rank and the installed releases, and read the inputs of the Trainer.

    Raises:
        ShardwrightError: the number of ranks is not the planned one.
        UsageError: arguments contradict the host or each other, or machines have different data or settings.
    """
    from datasets import load_from_disk
    from transformers import AutoProcessor, AutoTokenizer

    arguments, engine = rank_arguments(
        job.training_arguments, method=job.settings.method, task=getattr(job.settings, "task", "sft")
    )
    if arguments.world_size != job.world_size:
        raise ShardwrightError(f"{arguments.world_size} ranks started, but the plan has {job.world_size}")
    if job.digests:
        check_same_inputs(job.digests)
    resumed = None
    if job.resume:
        directory = Path(arguments.output_dir)
        with FirstRank() as ranks:
            resumed = ranks.does(lambda: _checkpoint_to_resume(directory, or_anew=job.or_anew))
    arguments.resume_from_checkpoint = None if resumed is None else str(resumed.path)
    files, processor = work / TOKENIZER, None
    if (files / "processor_config.json").is_file():
        processor = AutoProcessor.from_pretrained(str(files), trust_remote_code=False)
    return RankContext(
        work=work,
        arguments=arguments,
        engine=engine,
        resumed=resumed,
        tokenizer=getattr(processor, "tokenizer", None)
        or AutoTokenizer.from_pretrained(str(files), trust_remote_code=False),
        processor=processor,
        samples=(load_from_disk(str(work / TRAIN_SAMPLES)), load_from_disk(str(work / EVALUATION_SAMPLES))),
        plan=Plan.load(work / PLAN_DIRECTORY),
    )


def check_same_inputs(digests: Mapping[str, str]) -> None:
    """Check that all ranks have equal digests; every rank must call it.

    Raises:
        UsageError: digests differ; names the hosts and the inputs.
    """
    (first_host, expected), *others = gathered((socket.gethostname(), digests))
    errors = []
    for rank, (host, own) in enumerate(others, start=1):
        if different := [name for name, digest in own.items() if expected.get(name) != digest]:
            rule = f"rank {rank} on {host} and rank 0 on {first_host} differ in: {', '.join(different)}"
            errors.append(ConfigError(where="ranks", rule=rule, fix="use the same files and versions everywhere"))
    if errors:
        raise UsageError(errors)


def _checkpoint_to_resume(directory: Path, *, or_anew: bool) -> Selection | None:
    """Return the newest complete checkpoint; `None`, with a log line, if the run starts at step 0.

    Raises:
        RefusedInputError: there are checkpoints, but none is complete, and the run must not start at step 0.
    """
    try:
        newest = newest_whole(directory)
    except RefusedInputError as error:
        if not or_anew:
            raise
        reasons = "; ".join(str(error).splitlines())
        note_on_first_rank(f"no checkpoint is complete, training starts again at step 0: {reasons}")
        return None
    if newest is None:
        note_on_first_rank(f"{directory} has no checkpoint: training begins at step 0")
    return newest


class TrainingTask(LaunchedJob, RankTask):
    """Training on a rank, as `train`, `distill` and `qat` share it."""

    evaluates_last: ClassVar[bool] = False
    """Whether the Trainer evaluates after the last step."""

    @abstractmethod
    def build(self, context: RankContext) -> Any:
        """Return the Trainer."""

    @abstractmethod
    def metrics(self, trainer: Any, context: RankContext) -> dict[str, Any]:
        """Evaluate and save the model, and return the measurements; every rank calls it."""

    def run(self, work: Path) -> None:
        """Build the Trainer, train from the checkpoint or from step 0, evaluate, save, and write the result.

        Raises:
            RunOutOfMemoryError: an allocation failed; has the planned memory and plans that need less.
            ShardwrightError: the disk takes no more.
        """
        import torch

        from .plan_callback import PlanCallback

        context, options = open_rank(self, work), job_options(self.settings)
        output_dir, settings, plan = Path(self.output_dir), self.settings, context.plan

        def tokens_of(steps: int) -> int:
            # Ranks that share a sequence or a model do not count again.
            batch = plan.chosen.layout.global_batch_size
            return trained_tokens(batch, steps, self.train_samples, self.train_tokens)

        with full_disk_errors(output_dir), memory_errors(plan, command=self.command, options=options):
            clock = PlanCallback(
                plan,
                tokens_of=tokens_of,
                seq_len_tokens=settings.seq_len,
                method=settings.method,
                output_dir=output_dir,
            )
            trainer = self.build(context)
            generation = getattr(trainer.model, "generation_config", None)
            if self.turn_end not in (None, context.tokenizer.eos_token_id) and generation is not None:
                # The Trainer adds the end-of-sequence token of the tokenizer; checkpoints and sampling need this one.
                generation.eos_token_id = with_turn_end(generation.eos_token_id, self.turn_end)
            # Before the clock: it requests the log of the last step, for which the clock gathers figures.
            trainer.add_callback(MetricsWriter(output_dir, evaluates_last=self.evaluates_last))
            clock.follow(trainer)
            trainer.add_callback(ProgressSender(clock))
            train_guarded(trainer, resume=context.resumed, **self.settings.guards())
            result = self.metrics(trainer, context)
            peak_bytes = None
            if (own_peak := clock.peak_bytes()) is not None:
                own = torch.tensor([own_peak], device=trainer.args.device)
                # The log also has the steps before resuming.
                peaks_gb = [entry.get("peak_allocated_gb", 0.0) for entry in trainer.state.log_history]
                peak_bytes = int(max(trainer.accelerator.gather(own).max(), *(peak * 1e9 for peak in peaks_gb), 0))
            steps, timed_from = trainer.state.global_step, clock.first_step
            seconds = sum(clock.steps.read(waits=True))
            if steps == clock.first_step:
                # A run that resumed after its last step has only the logged times of the earlier run.
                seconds, timed_from, logged_step = 0.0, 0, 0
                for entry in trainer.state.log_history:
                    if "step_seconds" in entry:
                        seconds += entry["step_seconds"] * (entry["step"] - logged_step)
                        logged_step = entry["step"]
            result |= {
                "peak_bytes": peak_bytes,
                "steps": steps,
                "step_seconds": seconds,
                "tokens": tokens_of(steps),
                "timed_tokens": tokens_of(steps) - tokens_of(timed_from),
            }
            if trainer.args.process_index == 0:
                if self.turn_end is not None:
                    # An adapter has the file too, from which `merge` and servers take it.
                    file = output_dir / "generation_config.json"
                    own = {} if generation is None else generation.to_diff_dict()
                    saved = json.loads(file.read_bytes()) if file.is_file() else own
                    saved["eos_token_id"] = with_turn_end(saved.get("eos_token_id"), self.turn_end)
                    write_json(saved, file)
                write_json(result, context.work / RESULT_FILE)
                with contextlib.suppress(OSError):
                    Path(trainer.args.output_dir).rmdir()
            # A rank that exits while others communicate makes gloo abort them.
            trainer.accelerator.wait_for_everyone()
            trainer.accelerator.end_training()


def trained_model(
    name: str,
    settings: LaunchedSettings,
    context: RankContext,
    *,
    for_stages: bool = False,
    reads_weights: bool = False,
    score_head: bool = False,
) -> Any:
    """Return the model to train, with adapters if the method has them.

    `for_stages` is for a pipeline, whose ranks load only their stage. With a `score_head` it returns a score per
    sequence. `reads_weights`: the caller computes with weights
    before FSDP2 shards them, in fp32.
    """
    source = StartingModel(model=name, revision=settings.revision, method=settings.method)
    dtype, seed = (
        weights_dtype(context.arguments, method=settings.method, trained=settings.weights_dtype),
        context.arguments.seed,
    )
    converted_later = context.engine == "fsdp2" and settings.method == "full" and not reads_weights
    is_mixed = context.arguments.mixed_precision in ("bf16", "fp16")
    with stored_precision() if converted_later and is_mixed else contextlib.nullcontext():
        model = load_model(
            source,
            load_config(source),
            dtype,
            seed,
            engine=context.engine,
            for_stages=for_stages,
            score_head=score_head,
        )
    return with_trained_parts(model, settings, context.engine, **settings.lora_options())


def with_trained_parts(model: Any, job: Any, engine: Engine, **lora: Any) -> Any:
    """Return a model with adapters if the method of a job has them, whose parts for images are trained as it says."""
    frozen = frozen_parts(job)
    if job.method != "full":
        whole = {part for part in IMAGE_PARTS if getattr(job, part, "frozen") == "full"}
        return add_lora(model, **lora, fp32_adapters=engine != "deepspeed", frozen=frozen, whole=whole)
    if not isinstance(model, str):
        freeze(model, frozen)
    return model


def frozen_parts(job: Any) -> set[ImagePart]:
    """Return the parts for images that a job, or settings of a command, do not train."""
    return {part for part in IMAGE_PARTS if getattr(job, part, "frozen") == "frozen"}


def freeze(model: Any, parts: Collection[ImagePart]) -> None:
    for name, weight in model.named_parameters():
        if image_part(name) in parts:
            weight.requires_grad_(False)


def starting_weights(name: str, settings: LaunchedSettings) -> Path | None:
    """Return the directory of the weights that full training starts from; `None` for an adapter or random weights."""
    if settings.method != "full" or Path(name).is_file():
        return None
    return model_directory(name, revision=settings.revision)


def loaded_teacher(name: str, revision: str | None, job: LaunchedJob, context: RankContext) -> Any:
    """Return a frozen teacher, loaded for the plan's placement in the compute type."""
    from ...plugins.transformers.second_model import load_second_model
    from ...plugins.transformers.tiled_compute import share_tiled_mlps, tile_mlps, untiled_experts

    dtype = compute_dtype(context.arguments)
    engine = context.engine if job.world_size > 1 else "single"
    placement = job.placements["teacher"]
    model = load_second_model(name, revision=revision, placement=placement, dtype=dtype, engine=engine)
    if context.plan.chosen.layout.tiled_mlp and not untiled_experts(model):
        tile_mlps(model, None)
        share_tiled_mlps(model)
    return model


def trained_tokens(global_batch_size: int, steps: int, samples: int, tokens: int) -> int:
    """Return the tokens of a number of optimizer steps; the last step of an epoch has the remaining samples."""
    epochs, further = divmod(steps, -(-samples // global_batch_size))
    return epochs * tokens + round(tokens * further * global_batch_size / samples)


def write_json(record: Mapping[str, Any], path: Path) -> None:
    write_files({path.name: json.dumps(record)}, path.parent, force=True)


def train_guarded(trainer: Any, *, resume: str | bool | Selection | None, **guards: Any) -> None:
    """Train with `GuardCallback(**guards)` and `CheckpointCallback` after all other callbacks; every rank must call it.

    `resume` is a checkpoint, true for the newest valid one, or a selected one; `None` starts at step 0.

    Raises:
        UsageError: settings of the run are incompatible with the checkpoint.
        RefusedInputError: the checkpoint is not valid, or weights of the model are not finite.
        NonFiniteError: losses or gradients were not finite for several steps.
        StoppedBySignalError: the run was interrupted, and has saved a checkpoint.
    """
    from ..checkpoint_callback import CheckpointCallback
    from ..guards import GuardCallback

    GuardCallback(**guards).attach(trainer)
    checkpoints = CheckpointCallback()
    checkpoints.attach(trainer)
    trainer.train(resume_from_checkpoint=checkpoints.resolve(resume))


def chosen_engine(settings: dict[str, Any]) -> Engine:
    """Return the engine from the settings, or else from the launcher's environment."""
    if settings.get("deepspeed"):
        return "deepspeed"
    return "fsdp2" if settings.get("fsdp") else engine_from_environment()


def check_upstream(engine: Engine | str, *, method: str = "full") -> None:
    """Check that Shardwright's patches fit the installed libraries; call it before weights load.

    Under FSDP2 and ZeRO-3, `from_pretrained` then reads weights on the first rank only.

    Raises:
        UsageError: an installed release differs from the tested ones; all differences together.
    """
    packages = {"accelerate", "torch", "transformers"}
    packages |= {"deepspeed"} if engine == "deepspeed" else set()
    packages |= {"peft"} if method != "full" else set()
    patches.check_patches(frozenset(packages))
    if engine == "deepspeed":
        refuse_overwritten_rates()
    if engine in ("fsdp2", "deepspeed"):
        load_on_first_rank(engine)


def held_out_cross_entropy(trainer: Any) -> float:
    """Return the mean over all labelled tokens of the evaluation set, in nats; every rank must call it.

    Raises:
        UsageError: no token has a label.
    """
    import torch

    from ...plugins.transformers.output_heads import base_model, has_plain_head, output_head
    from ..losses.fused_loss import HeadReplacement

    model, inner = trainer.model_wrapped, base_model(trainer.model)
    part_rows = max(1, _EVALUATED_LOGITS_BYTES // (4 * inner.config.get_text_config().vocab_size))
    sums_and_counts: list[Any] = []

    def add(head: Callable[[Any], Any], states_BSD: Any, labels_BS: Any) -> None:
        """Add the sum of the cross-entropies of a batch and the number of its labels; large logits exist in parts."""
        rows_ND, labels_N = states_BSD[:, :-1].flatten(0, 1), labels_BS[:, 1:].flatten()
        nats = [
            torch.nn.functional.cross_entropy(head(part).float(), labels, ignore_index=IGNORED_LABEL, reduction="sum")
            for part, labels in zip(rows_ND.split(part_rows), labels_N.split(part_rows), strict=True)
        ]
        sums_and_counts.append(
            torch.stack([torch.stack(nats).double().sum(), (labels_N != IGNORED_LABEL).sum().double()])
        )

    was_training = model.training
    model.eval()
    loader = trainer.get_eval_dataloader()
    samples = SamplesOnce(loader, trainer.accelerator.gradient_state)
    with torch.no_grad(), trainer.compute_loss_context_manager():
        for batch in loader:
            inputs = trainer._prepare_inputs(samples.step(batch).batch)
            labels_BS = inputs.pop("labels")
            if labels_BS.numel() <= part_rows or not has_plain_head(inner):
                add(lambda logits: logits, model(**inputs, use_cache=False).logits, labels_BS)
                continue

            def compute(hidden_BSH: Any, labels_BS: Any = labels_BS) -> Any:
                add(output_head(inner).logits, hidden_BSH, labels_BS)
                return hidden_BSH.new_zeros(())

            replacement = HeadReplacement(inner, compute)
            with replacement():
                replacement.check_logits(model(**inputs, use_cache=False).logits)
    model.train(was_training)
    sums, counts = trainer.accelerator.gather(torch.stack(sums_and_counts)).T.tolist()
    return evaluated_mean(sums, counts)


def read_logged(state: Any, name: str) -> float | None:
    """Return the first logged value of this name, which checkpoints contain; `None` without one."""
    return next((values[name] for values in state.log_history if name in values), None)
