"""The software behind each published table, as facts of its code: attention, traffic, overlap, recomputation.

None of these numbers is fitted. Bytes are counted operation by operation from the sources named; a table that does not
say a fact gets the default of its framework.
"""

from __future__ import annotations

from dataclasses import replace

from shardwright.ds_configs.step_time.rates import COMPILED_TRAFFIC, FLASH_ATTENTION_2, TRANSFORMERS, Software

MEGATRON = Software(
    attention="eager",
    # Fused LayerNorm (2 read, 2 written) and fused bias, dropout and residual (5 read and written, 1 of mask), twice.
    hidden_bytes_forward=22.0,
    hidden_bytes_backward=34.0,
    # Bias and GELU in one kernel.
    inner_bytes_forward=4.0,
    inner_bytes_backward=8.0,
    projected_bytes=16.0,
    # Fused scale, mask and softmax (2 read, 2 written), dropout with its mask (2, 2 and 1); backward 5 and 6.
    score_bytes_forward=9.0,
    score_bytes_backward=11.0,
    # fp32 logits, maximum, exponentials and their gradient (`vocab_parallel_cross_entropy`).
    loss_bytes=36.0,
    kernels_forward=35.0,
    kernels_backward=70.0,
    optimizer_bytes=40.0,
    overlaps_reduction=False,
    reduction_bytes=2,
    vocabulary_parallel=True,
    padded_vocabulary=128,
    even_stages=True,
    scatters_transfers=True,
)
"""Megatron-LM of 2021 and what follows it (vTrain's Megatron-DeepSpeed, MT-NLG): eager attention, fused elementwise
kernels, gradients reduced after the backward pass in 16 bit."""

VTRAIN = replace(
    MEGATRON,
    # The loss stays in 16 bit: log-softmax reads and writes, its gradient reads twice and writes.
    loss_bytes=12.0,
    # fp16 weights and gradients, fp32 moments and no fp32 weights (`master_weights=False`).
    optimizer_bytes=22.0,
    # Gradients are dropped after each step, and a profiled layer writes its own.
    gradient_bytes=0.0,
    padded_vocabulary=None,
)
"""The model that vTrain measures on one node (src/model, src/trainer.py): Megatron's layers, an output head of its own,
and a vocabulary of 50,257 that is divided as it is."""

MT_NLG = replace(MEGATRON, reduction_bytes=4, gradient_bytes=14.0, scatters_transfers=False)
"""DeepSpeed's pipeline engine in bf16: `BF16_Optimizer` adds gradients to fp32 ones (2 and 4 read, 4 written, and 4 to
clear) and reduces them in fp32; stages pass on whole tensors (`is_pipe_partitioned` is off, pipe/engine.py)."""

MEGATRON_CORE = replace(
    MEGATRON,
    attention="fused",
    sequence_parallel_norms=True,
    overlaps_reduction=True,
    overlaps_updates=True,
    reduces_to_owners=True,
    # Transformer Engine's `tp_comm_overlap`, in both passes.
    overlapped_tensor_parallel=1.0,
    overlaps_transfers=True,
    virtual_stages=2,
    kernels_forward=25.0,
    kernels_backward=45.0,
    score_bytes_forward=0.0,
    score_bytes_backward=0.0,
)
"""Megatron-Core r0.8.0 with Transformer Engine: fused attention, sequence parallelism, overlapped reductions."""

MPT = Software(
    hidden_bytes_forward=26.0,
    hidden_bytes_backward=40.0,
    inner_bytes_forward=4.0,
    inner_bytes_backward=8.0,
    projected_bytes=16.0,
    loss_bytes=32.0,
    kernels_forward=22.0,
    kernels_backward=45.0,
    optimizer_bytes=36.0,
    reduction_bytes=4,
)
"""llm-foundry's MPT under FSDP: Triton FlashAttention, 16-bit LayerNorm, GELU; `DEFAULT` reduces in fp32."""

INTERNEVO = Software(
    hidden_bytes_forward=40.0,
    hidden_bytes_backward=60.0,
    inner_bytes_forward=10.0,
    inner_bytes_backward=18.0,
    projected_bytes=30.0,
    loss_bytes=24.0,
    kernels_forward=30.0,
    kernels_backward=60.0,
    optimizer_bytes=40.0,
    reduction_bytes=2,
    vocabulary_parallel=True,
    reduces_to_owners=True,
    # Each tensor is broadcast by the rank that steps it: about 290 of 7.3 billion elements.
    update_bucket=25_000_000,
)
"""InternEvo: FlashAttention, SwiGLU, fused RMSNorm where apex is there, hierarchical ZeRO-1."""

TORCHTITAN = Software(
    hidden_bytes_forward=60.0,
    hidden_bytes_backward=90.0,
    inner_bytes_forward=10.0,
    inner_bytes_backward=18.0,
    projected_bytes=50.0,
    loss_bytes=32.0,
    kernels_forward=40.0,
    kernels_backward=80.0,
    optimizer_bytes=36.0,
    reduction_bytes=4,
    sequence_parallel_norms=True,
    vocabulary_parallel=True,
)
"""torchtitan in eager mode: FSDP2 that reduces in fp32, sdpa, tensor parallelism with sequence parallelism."""

COMPILED = replace(TORCHTITAN, **COMPILED_TRAFFIC)

ASYNCHRONOUS_TP = 0.5
"""Share of the collectives that PyTorch's asynchronous TP runs during products: those of the forward pass. It speeds up
the forward pass of a 7B Llama by 29 % and the step by 8 %, so nothing in the backward pass, which is two thirds of a
step (https://discuss.pytorch.org/t/209487)."""

BERT = Software(
    attention="eager",
    hidden_bytes_forward=44.0,
    hidden_bytes_backward=60.0,
    inner_bytes_forward=12.0,
    inner_bytes_backward=20.0,
    projected_bytes=24.0,
    score_bytes_forward=18.0,
    score_bytes_backward=22.0,
    loss_bytes=32.0,
    kernels_forward=40.0,
    kernels_backward=75.0,
    optimizer_bytes=44.0,
    step_seconds=5e-3,
    micro_batch_seconds=2e-3,
)
"""Transformers 4.12 (GPT-2, BERT): eager attention with dropout on its scores, LayerNorm, eager GELU."""

VECTORLM = replace(TRANSFORMERS, optimizer_bytes=22.0, copies_gathered=False)
"""VectorLM: Transformers' Llama with FlashAttention 2 under FSDP1; weights, gradients and moments in bf16, half of the
bytes of fp32."""

AUTOMODEL = replace(FLASH_ATTENTION_2, optimizer_bytes=0.0, step_seconds=0.0, reduction_bytes=4)
"""Transformers 5 under NeMo Automodel's FSDP2, which reduces in fp32 (`FSDP2Config.mp_policy`), timed without the
optimizer step."""
