"""Seconds of the phases before an update of a task that generates: completions, scores, and weights sent to vLLM."""

from __future__ import annotations

from ..memory.generation import cache_bytes, generated_sequences, scores_completions
from ..specs.terms import StepTerm
from .model_work import StepInputs, head_passes, layer_passes
from .rates import gather_seconds, group_of

TERMS = (
    StepTerm("generation_prefill", "the forward pass over the prompts of all completions"),
    StepTerm(
        "generation_decode",
        "tokens one after the other, until the longest completion ends: weights and cached keys and values of each "
        "token / memory bandwidth, or the host's launches",
        label="generation, token by token",
    ),
    StepTerm("weight_synchronization", "gathering parameters for generation, or sending them to vLLM"),
    StepTerm("scoring_forward", "the trained model's forward pass over completions, for their log-probabilities"),
)

GENERATION_ERROR = 1.0
"""Assumed relative error of these terms: completions may end early, and no such step was measured on an accelerator."""


def generation_seconds(step: StepInputs) -> dict[str, float]:
    """Return the seconds of generation, synchronization and scoring for one optimizer step, by term.

    A generation of S completions is used for `S / micro-batch` micro-batches. Decoding reads all weights and the
    cached keys and values of the S sequences for each token, so that its rate is `S / seconds of a token`;
    `transformers` also waits for the host to launch every kernel, which vLLM replays as CUDA graphs.
    """
    layout, model, hardware, job = step.layout, step.model, step.hardware, step.job
    on_vllm = job.generation in ("vllm", "vllm-server")
    size = job.vllm_tensor_parallel_size or 1 if on_vllm else 1
    own = generated_sequences(layout, job)
    # Ranks that share an engine decode together, each with its share of weights and heads.
    sequences = own * size
    if job.generation == "vllm-server":
        engines = max(1, (job.vllm_gpus or 1) // size)
        sequences = -(-own * layout.data_parallel_size // engines)
    generated, width = job.generated_tokens, job.compute_bytes
    prompt = max(1, job.seq_len_tokens - generated)
    layers = model.dimensions.num_layers
    unquantized = (width, False, False)
    ahead, _ = layer_passes(step.work, own * prompt, prompt, step.device, step.software, *unquantized)
    prefill = layers * ahead.device
    # One token of every sequence.
    token, _ = layer_passes(step.work, sequences / size, prompt, step.device, step.software, *unquantized)
    weights = width * model.parameter_count / size
    cached = cache_bytes(model, sequences, prompt + generated // 2, width) / size
    reading = (weights + cached) / step.device.memory_bytes_per_s
    products = layers * token.products
    launches = 0.0 if on_vllm else layers * token.kernels * step.constants.launch_seconds
    each = max(reading, products) if on_vllm else max(reading, products, launches)
    group = group_of(hardware, step.constants, ranks=layout.world_size)
    whole = 0.0
    if layout.shards_parameters:
        whole = gather_seconds(group, width * model.parameter_count, calls=layers)
    synchronization = whole
    if job.generation == "vllm-server":
        synchronization += width * model.parameter_count / group.bytes_per_s
    elif job.generation == "vllm":
        synchronization += 2 * width * model.parameter_count / step.device.memory_bytes_per_s
    elif layout.engine == "fsdp2":
        # Without vLLM, every token gathers the layers again.
        each, synchronization = max(each, whole), 0.0
    generations = layout.micro_batch_size * layout.gradient_accumulation_steps / own
    terms = {
        "generation_prefill": generations * prefill,
        "generation_decode": generations * generated * each,
        "weight_synchronization": generations * synchronization,
    }
    if scores_completions(layout, job):
        forward, _ = layer_passes(
            step.work, step.tokens, job.seq_len_tokens, step.device, step.software, width, False, False
        )
        head, _ = head_passes(step.work, step.tokens, step.device, step.software, True, False)
        terms["scoring_forward"] = layout.gradient_accumulation_steps * (layers * forward.device + head.device)
    return terms
