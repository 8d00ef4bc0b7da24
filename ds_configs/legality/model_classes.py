"""Classes of models that can be quantized, after training or in it: decided by what a class is made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from ..specs.errors import Fault

Work = Literal["quantize", "qat"]
LINEAR_TARGETS = ("Linear", "Module")
"""Targets of a scheme that mean every linear layer."""


def model_class_faults(
    architecture: str,
    *,
    work: Work,
    is_causal: bool,
    is_encoder_decoder: bool,
    transposed_layers: Sequence[str] = (),
    targets: Sequence[str] = ("Linear",),
) -> list[Fault]:
    """Return why a class of models cannot be quantized; empty where it can.

    Args:
        architecture: Name of the class, as in `config.json`.
        work: `quantize` for methods after training, `qat` for quantization-aware training.
        is_causal: Whether the class is a causal language model of Transformers.
        is_encoder_decoder: As in `config.json`.
        transposed_layers: Names of layers of Transformers' `Conv1D`, which stores [in, out].
        targets: Of the scheme; layers that are named one by one leave others out on purpose.

    >>> [str(fault) for fault in model_class_faults("T5Model", work="quantize", is_causal=False,
    ...                                             is_encoder_decoder=True)]
    ["architecture = 'T5Model': is an encoder with a decoder: calibration, the check of what was written and the \
evaluation run causal language models; give a causal language model"]
    """
    faults = []
    if is_encoder_decoder and work == "quantize":
        rule = (
            "is an encoder with a decoder: calibration, the check of what was written and the evaluation run causal "
            "language models"
        )
        faults.append(Fault(where="architecture", value=architecture, rule=rule, fix="give a causal language model"))
    elif not is_causal and work == "quantize":
        rule = "is no causal language model, and would be loaded as another class than it was trained as"
        faults.append(Fault(where="architecture", value=architecture, rule=rule, fix="give a causal language model"))
    if transposed_layers and any(target in LINEAR_TARGETS for target in targets):
        rule = (
            f"keeps {len(transposed_layers)} matrices in Conv1D, such as {transposed_layers[0]}, which stores them "
            "transposed: compressed-tensors packs linear layers alone"
        )
        fix = "use a model of linear layers"
        if work == "qat":
            fix += ", or name the linear layers that you want as targets"
        faults.append(Fault(where="architecture", value=architecture, rule=rule, fix=fix))
    return faults
