"""One row for each rule on DeepSpeed configurations."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from checking import ZERO, ZERO_2, E, W, found
from shardwright.ds_configs.check.files import check_text

OFFLOAD = f"{ZERO}.offload_optimizer"


def deepspeed(**changes: Any) -> str:
    """Return a good configuration with values replaced at dotted paths written with `__`."""
    config = copy.deepcopy(ZERO_2)
    for path, value in changes.items():
        target = config
        *parents, last = path.split("__")
        for parent in parents:
            target = target.setdefault(parent, {})
        if value is None:
            target.pop(last, None)
        else:
            target[last] = value
    return json.dumps(config, indent=2)


def zero(**keys: Any) -> str:
    return deepspeed(**{ZERO: keys})


DEEPSPEED_ROWS: list[tuple[str, str, str, str]] = [
    # unknown, removed, misplaced and deprecated keys
    (deepspeed(zero_optimisation={}), E, "zero_optimisation", "did you mean 'zero_optimization'"),
    (zero(stage=2, reduce_bucket=1), E, f"{ZERO}.reduce_bucket", "rejects it; did you mean 'reduce_bucket_size'"),
    (deepspeed(aio={"blocksize": 1}), E, "aio.blocksize", "ignores it silently; did you mean 'block_size'"),
    (deepspeed(checkpoint={"writer": {"typ": "fast"}}), E, "checkpoint.writer.typ", "did you mean 'type'"),
    (deepspeed(bf16__check_overflow=True), E, "bf16.check_overflow", "'check_grad_overflow'"),
    (deepspeed(max_grad_norm=1.0), E, "max_grad_norm", "write gradient_clipping"),
    (deepspeed(stage3_max_live_parameters=1), E, "stage3_max_live_parameters", "belongs at zero_optimization."),
    (deepspeed(amp={"enabled": False}), E, "amp", "removed this key"),
    (deepspeed(curriculum_learning={}), E, "curriculum_learning", "data_efficiency.data_sampling"),
    (zero(stage=3, mics_shard_size=2), E, f"{ZERO}.mics_shard_size", "zero_hpz_partition_size"),
    (zero(stage=2, cpu_offload=True), W, f"{ZERO}.cpu_offload", "write 'offload_optimizer'"),
    (deepspeed(optimizer={"type": "OneBitAdam"}), E, "optimizer.type", "removed the 1-bit optimizers"),
    (deepspeed(optimizer={"type": "Adamm"}), E, "optimizer.type", "did you mean 'Adam'"),
    (deepspeed(optimizer__type="AdamW", optimizer__params__beta=1), E, "optimizer.params.beta", "'betas'"),
    (deepspeed(scheduler={"type": "Warmup"}), E, "scheduler.type", "did you mean 'WarmupLR'"),
    (deepspeed(scheduler={"type": "WarmupLR", "params": {"steps": 1}}), E, "scheduler.params.steps", "no such"),
    # types and ranges
    (zero(stage=True), E, f"{ZERO}.stage", "one of 0, 1, 2, 3"),
    (zero(stage="3"), E, f"{ZERO}.stage", "write 3 without quotes"),
    (zero(stage=2.5), E, f"{ZERO}.stage", "one of 0, 1, 2, 3"),
    (zero(stage=2, reduce_bucket_size=5.5), E, f"{ZERO}.reduce_bucket_size", "an integer"),
    (zero(stage=2, reduce_bucket_size=-5e8), E, f"{ZERO}.reduce_bucket_size", "greater than 0"),
    (zero(stage=2, reduce_bucket_size="5e8"), E, f"{ZERO}.reduce_bucket_size", "write 500000000 without"),
    (zero(stage=2, reduce_scatter="true"), E, f"{ZERO}.reduce_scatter", "write true without quotes"),
    (zero(stage=2, allgather_bucket_size=3), E, f"{ZERO}.allgather_bucket_size", "write 4"),
    (deepspeed(zero_optimization=True), E, ZERO, 'write {"stage": 1}'),
    (deepspeed(bf16=True), E, "bf16", "must be a mapping"),
    (deepspeed(train_micro_batch_size_per_gpu=4.0), E, "train_micro_batch_size_per_gpu", "write 4"),
    (deepspeed(gradient_clipping=-1), E, "gradient_clipping", "at least 0"),
    (deepspeed(communication_data_type="fp8"), E, "communication_data_type", "one of fp16, bf16, fp32"),
    (deepspeed(data_types={"grad_accum_dtype": "bf15"}), E, "data_types.grad_accum_dtype", "'bf16'"),
    (zero(stage=3, offload_optimizer={"device": "cp"}), E, f"{OFFLOAD}.device", "did you mean 'cpu'"),
    (deepspeed(fp16={"enabled": "auto", "loss_scale": -1}), E, "fp16.loss_scale", "at least 0"),
    (deepspeed(tensor_parallel={"dtype": "bf16"}), E, "tensor_parallel.dtype", "Python object"),
    # keys that end, redirect or silently change a run
    (deepspeed(autotuning={"enabled": True, "fast": True}), E, "autotuning.enabled", "ends the run early"),
    (deepspeed(managed_gradient_accumulation=False), E, "managed_gradient_accumulation", "stops the first step"),
    (deepspeed(fp16={"auto_cast": True}), E, "fp16.auto_cast", "fp16 is not enabled"),
    (deepspeed(prescale_gradients=True), E, "prescale_gradients", "reduce_scatter"),
    (deepspeed(gradient_predivide_factor=2.0), E, "gradient_predivide_factor", "reduce_scatter"),
    (deepspeed(gradient_allreduce_op="sum"), W, "gradient_allreduce_op", "number of ranks"),
    (deepspeed(communication_data_type="fp16"), W, "communication_data_type", "rounds gradients to fp16"),
    (deepspeed(hybrid_engine={"enabled": True}), W, "hybrid_engine.enabled", "other kernels"),
    (
        deepspeed(data_efficiency={"enabled": True, "data_sampling": {"curriculum_learning": {"enabled": True}}}),
        W,
        "data_efficiency.data_sampling.curriculum_learning.enabled",
        "the Trainer makes its own",
    ),
    (
        deepspeed(data_efficiency={"enabled": True, "data_routing": {"random_ltd": {"enabled": True}}}),
        W,
        "data_efficiency.data_routing.random_ltd.enabled",
        "drops no tokens",
    ),
    (deepspeed(dataloader_drop_last=True), W, "dataloader_drop_last", "the Trainer makes its own"),
    (deepspeed(checkpoint={"load_universal": True}), W, "checkpoint.load_universal", "ds_to_universal"),
    (deepspeed(zero_optimization__load_from_fp32_weights=False), W, f"{ZERO}.load_from_fp32_weights", "rounded"),
    (deepspeed(wall_clock_breakdown=True), W, "wall_clock_breakdown", "waits for the device"),
    (deepspeed(flops_profiler={"enabled": True}), W, "flops_profiler.enabled", "not only profile_step"),
    (deepspeed(comms_logger={"enabled": True}), W, "comms_logger.enabled", "every collective"),
    (deepspeed(memory_breakdown=True), W, "memory_breakdown", "every step"),
    # keys that do nothing, or something else
    (zero(stage=2, offload_param={"device": "cpu"}), E, f"{ZERO}.offload_param.device", "only stage 3"),
    (zero(stage=1, offload_optimizer={"device": "nvme", "nvme_path": "/n"}), E, f"{OFFLOAD}.device", "host memory"),
    (zero(stage=0, offload_optimizer={"device": "cpu"}), E, f"{OFFLOAD}.device", "use stage 1, 2 or 3"),
    (zero(stage=2, offload_optimizer={"device": "cpu", "ratio": 0.5}), E, f"{OFFLOAD}.ratio", "requires stage 3"),
    (zero(stage=3, offload_optimizer={"device": "nvme"}), E, f"{OFFLOAD}.device", "add nvme_path"),
    (zero(stage=3, offload_optimizer={"device": "cpu", "buffer_count": 9}), W, f"{OFFLOAD}.buffer_count", "'nvme'"),
    (zero(stage=3, offload_optimizer={"pin_memory": True}), W, OFFLOAD, "nothing is offloaded"),
    (zero(stage=3, offload_optimizer={"device": "cpu"}), W, f"{OFFLOAD}.device", "zero_force_ds_cpu_optimizer"),
    (zero(stage=2, allgather_bucket_size=2), W, f"{ZERO}.allgather_bucket_size", "no effect"),
    (zero(stage=2, allgather_partitions=True), W, f"{ZERO}.allgather_partitions", "never uses it"),
    (deepspeed(disable_allgather=True), W, "disable_allgather", "no effect"),
    (zero(stage=2, stage3_max_live_parameters=1), W, f"{ZERO}.stage3_max_live_parameters", "only stage 3"),
    (zero(stage=2, sub_group_size=1e9), W, f"{ZERO}.sub_group_size", "only stage 3"),
    (zero(stage=3, round_robin_gradients=True), W, f"{ZERO}.round_robin_gradients", "only stage 1, 2"),
    (zero(stage=2, overlap_comm=True), W, f"{ZERO}.overlap_comm", "doubles"),
    (zero(reduce_scatter=True), W, ZERO, "stage 0"),
    (deepspeed(pipeline={"stages": 4}), W, "pipeline.stages", "num_stages"),
    (deepspeed(activation_checkpointing={"cpu_checkpointing": True}), W, "activation_checkpointing",
     "--offload-activations on"),
    (deepspeed(optimizer={"type": "Adam"}), W, "optimizer.type", "runs AdamW"),
    (deepspeed(gradient_clipping=None), W, "gradient_clipping", "clips at 1.0"),
    (deepspeed(gradient_accumulation_steps=None), W, "gradient_accumulation_steps", "Accelerate writes 1"),
    # combinations
    (deepspeed(bf16__enabled=True, fp16={"enabled": True}), E, "fp16.enabled", "cannot both"),
    (deepspeed(bf16__enabled=True, data_types={"grad_accum_dtype": "fp32"}, zero_optimization={"stage": 0}),
     E, "data_types.grad_accum_dtype", "stage 0 accumulates"),
    (deepspeed(bf16__enabled=True, data_types={"grad_accum_dtype": "fp32"}, zero_optimization={"stage": 1}),
     W, "data_types.grad_accum_dtype", "BF16_Optimizer"),
    (deepspeed(bf16__enabled=True, data_types={"param_dtype": "fp16"}), E, "data_types.param_dtype", "bf16"),
    (deepspeed(bf16__enabled=True, bf16__bf16_optimizer_states=True), E, "bf16.bf16_optimizer_states", "both to true"),
    (deepspeed(bf16__enabled=True, bf16__bf16_master_weights_and_grads=True),
     E, "bf16.bf16_master_weights_and_grads", "offload_optimizer"),
    (zero(stage=2, compute_grad_norm=False), E, f"{ZERO}.compute_grad_norm", '"gradient_clipping": 0'),
    (zero(stage=3, compute_grad_norm=False), E, f"{ZERO}.compute_grad_norm", "stage 1 or 2"),
    (zero(stage=1, legacy_stage1=True), E, f"{ZERO}.legacy_stage1", "remove"),
    (deepspeed(gradient_allreduce_op="sum", zero_optimization={"stage": 3}), E, "gradient_allreduce_op", "stage 3"),
    (deepspeed(optimizer={"type": "Muon"}, zero_optimization={"stage": 3}), E, f"{ZERO}.reduce_scatter", "Muon"),
    (zero(stage=2, zenflow={"topk_ratio": 0.1}), E, f"{ZERO}.zenflow", "device 'cpu'"),
    (deepspeed(optimizer__type="AdamW", optimizer__params__max_grad_norm=1.0),
     E, "optimizer.params.max_grad_norm", "gradient_clipping"),
    (deepspeed(scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 0}}),
     E, "scheduler.params.warmup_num_steps", "positive"),
    (deepspeed(scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}),
     W, "scheduler.params.warmup_num_steps", "warm-up"),
    # the table of combinations
    (deepspeed(optimizer={"type": "Adagrad"}, zero_optimization={"stage": 1}, tensor_parallel={"autotp_size": 2}),
     W, "optimizer.type", "Adagrad is not supported with ZeRO-1, tensor parallelism (AutoTP): the optimizer creates"),
    (deepspeed(compile={"deepcompile": True}, expert_parallel={"enabled": True, "autoep_size": 2}),
     W, "compile.deepcompile", "torch.compile is not supported with expert parallelism (AutoEP)"),
    (deepspeed(bf16=None, tensor_parallel={"autotp_size": 2}), W, "tensor_parallel.autotp_size", '"bf16": {"enabled"'),
    # axes
    (deepspeed(tensor_parallel={"autotp_size": 3}), E, "tensor_parallel.autotp_size", "must divide the 8 ranks"),
    (deepspeed(tensor_parallel={"autotp_size": 2}, zero_optimization={"stage": 3}),
     E, "tensor_parallel.autotp_size", "requires ZeRO stage 0 to 2; the stage is 3"),
    (deepspeed(tensor_parallel={"autotp_size": 2}, expert_parallel={"enabled": True, "autoep_size": 2}),
     E, "expert_parallel.autoep_size", "AutoTP does not support mixtures of experts"),
    (deepspeed(expert_parallel={"enabled": True, "autoep_size": 16}),
     E, "expert_parallel.autoep_size", "must divide the 8 ranks"),
    (deepspeed(expert_parallel={"autoep_size": 2}), W, "expert_parallel.autoep_size", "AutoEP is not enabled"),
    (deepspeed(expert_parallel={"enabled": True, "autoep_size": 2},
               zero_optimization={"stage": 3, "zero_hpz_partition_size": 4}),
     E, f"{ZERO}.zero_hpz_partition_size", "is not supported with AutoEP at stage 3"),
    # auto
    (zero(stage=3, stage3_max_live_parameters="auto"), E, f"{ZERO}.stage3_max_live_parameters", "its default instead"),
    (deepspeed(steps_per_print="auto"), E, "steps_per_print", "receives the word itself"),
    (deepspeed(optimizer__type="AdamW", optimizer__params__adam_w_mode="auto"),
     E, "optimizer.params.adam_w_mode", "does not fill"),
    (deepspeed(zero_optimization="auto"), E, ZERO, "does not fill"),
    (deepspeed(zero_optimization=None), E, ZERO, "Accelerate requires it"),
    # batch
    (deepspeed(train_batch_size=None, train_micro_batch_size_per_gpu=None), E, "", "is required"),
    (deepspeed(train_batch_size=30, train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=4),
     E, "train_batch_size", "2 · 4 · 8 = 64; write 64"),
    (deepspeed(train_batch_size=30, train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=None),
     E, "train_batch_size", "2 · 8 = 16; write 16 or 32"),
    (deepspeed(train_batch_size=4, train_micro_batch_size_per_gpu=None, gradient_accumulation_steps=None),
     E, "train_batch_size", "the 8 ranks; write 8"),
    (deepspeed(sequence_parallel_size=3, train_batch_size=8, train_micro_batch_size_per_gpu=1,
               gradient_accumulation_steps=1), E, "sequence_parallel_size", "must divide the 8"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "kind", "path", "fragment"), DEEPSPEED_ROWS, ids=range(len(DEEPSPEED_ROWS)))
def test_each_deepspeed_rule(text: str, kind: str, path: str, fragment: str) -> None:
    findings = check_text(text, filename="ds_config.json", world_size=8)
    assert found(findings, kind, path, fragment), [str(finding.error) for finding in findings]


@pytest.mark.parametrize("block", ["compression_training", "quantize_training"])
def test_removed_compression_blocks_name_what_replaces_them(block):
    findings = check_text(json.dumps({"train_batch_size": 8, block: {"anything": [None]}}), filename="old.json")
    (finding,) = [finding for finding in findings if block in finding.error.where]
    assert finding.kind == "error" and all(name in finding.error.fix for name in ("qat", "student", "Magnitude"))


@pytest.mark.parametrize(
    ("scheduler", "path"),
    [
        ({"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3}}, "scheduler.params.warmup_max_lr"),
        ({"type": "WarmupLR", "params": {"warmup_num_steps": 4}}, None),
        ({"type": "WarmupLR", "params": {"warmup_max_lr": None}}, None),
        ({"type": "WarmupLR", "params": {"warmup_max_lr": [2e-2, 1e-5]}}, None),
        ({"type": "WarmupDecayLR", "params": {"total_num_steps": 9}}, "scheduler.type"),
        ({"type": "OneCycle", "params": {"cycle_min_lr": 0, "cycle_max_lr": 1e-3}}, "scheduler.params.cycle_max_lr"),
        ({"type": "LRRangeTest", "params": {}}, "scheduler.type"),
        ({"type": "WarmupCosineLR", "params": {"total_num_steps": 9}}, None),
    ],
)
def test_a_scheduler_of_one_rate_is_an_error_only_beside_two_rates_of_muon(
    scheduler: dict[str, Any], path: str | None
) -> None:
    def rate_errors(params: dict[str, float]) -> list[str]:
        text = deepspeed(optimizer={"type": "Muon", "params": params}, scheduler=scheduler)
        findings = check_text(text, filename="ds.json")
        return [each.error.where.split()[-1] for each in findings if "rates of Muon" in each.error.rule]

    expected = [] if path is None else [path]
    assert rate_errors({"lr": 1e-4, "muon_lr": 2e-2, "adam_lr": 1e-5}) == expected
    assert rate_errors({"lr": 1e-4, "muon_lr": 2e-2}) == expected, "Adam has the shared rate"
    assert rate_errors({"lr": 1e-4, "adam_lr": 1e-4}) == rate_errors({"lr": 1e-4}) == []


def test_a_run_with_accelerates_infinite_print_interval_has_no_errors() -> None:
    from shardwright.ds_configs.check.effects import effect_errors

    assert effect_errors({"steps_per_print": float("inf"), "zero_optimization": {"stage": 2}}) == []
