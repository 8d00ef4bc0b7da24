"""What `accelerate estimate-memory` and DeepSpeed's own estimators say for a case of the grid."""

from __future__ import annotations

from memory_cases import Case


def accelerate_estimate(case: Case) -> int:
    """Return what `accelerate estimate-memory` calls training with Adam: the largest of its four figures.

    It knows neither sharding nor activations, offload or adapters, and asks for no sequence length.
    """
    from accelerate import init_empty_weights
    from accelerate.commands.estimate import calculate_maximum_sizes, estimate_training_usage
    from transformers import AutoConfig, AutoModelForCausalLM

    with init_empty_weights():
        config = AutoConfig.for_model(**case.config)
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    total, _ = calculate_maximum_sizes(model)
    usage = estimate_training_usage(total, "bfloat16" if case.precision == "bf16" else "float32")
    return int(max(usage.values()))


def deepspeed_estimate(case: Case) -> int | None:
    """Return what DeepSpeed's estimator of the case's stage says for one rank; `None` where it has none.

    The estimators cover stages 2 and 3. On CPU ranks an offloaded share is the rank's too; their 50 % for buffers on
    the host is left as it is.
    """
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    spec, offload = case.spec(), case.offload != "none"
    if case.layout == "zero2":
        host, device = estimate_zero2_model_states_mem_needs(
            spec.parameter_count, num_gpus_per_node=case.ranks, cpu_offload=offload
        )
    elif case.layout == "zero3":
        host, device, _ = estimate_zero3_model_states_mem_needs(
            spec.parameter_count,
            spec.largest_gather_unit(),
            num_gpus_per_node=case.ranks,
            cpu_offload=offload,
            cpu_offload_params=case.offload == "optimizer+param",
        )
    else:
        return None
    return int(device + (host / case.ranks if offload else 0))
