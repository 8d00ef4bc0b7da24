"""Distance between hidden states of a student and a teacher, as a sum over tokens, and the projectors between widths.

Shapes: T tokens, H the student's hidden width, D the teacher's.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

HiddenStateKind = Literal["mse", "cosine"]
PROJECTOR_PREFIX = "distillation_projectors."
"""What names of projector weights begin with in the student's state dict."""
_LEAST_POWER = 1e-12
"""Least mean square of a teacher's vector that is divided by."""


def hidden_state_sum(
    student_TD: torch.Tensor,
    teacher_TD: torch.Tensor,
    weights_T: torch.Tensor,
    *,
    kind: HiddenStateKind = "mse",
    normalize: bool = True,
) -> torch.Tensor:
    """Return ``Σ_t w_t · |h_s - h_t|² / D``, or ``Σ_t w_t · (1 - cos(h_s, h_t))``, as an fp32 scalar.

    ``normalize`` divides each token's term by the mean square of that token's own teacher vector, so that the few
    huge activations which models put on some tokens do not outweigh all others. A mean over the batch would do so too,
    but then sums over parts of a batch would not add up to the sum over the whole.
    The squared error is that of FitNets (arXiv 1412.6550) and TinyBERT (arXiv 1909.10351), the cosine DistilBERT's
    (arXiv 1910.01108).
    """
    import torch

    with torch.autocast(student_TD.device.type, enabled=False):
        student, teacher, weights = student_TD.float(), teacher_TD.detach().float(), weights_T.float()
        if kind == "cosine":
            return (weights * (1.0 - torch.nn.functional.cosine_similarity(student, teacher, dim=-1))).sum()
        distance_T = (student - teacher).square().mean(dim=-1)
        if normalize:
            distance_T = distance_T / teacher.square().mean(dim=-1).clamp(min=_LEAST_POWER)
        return (weights * distance_T).sum()


def projectors(student_width: int, teacher_width: int, count: int) -> Any:
    """Return `count` linear maps without bias from the student's width to the teacher's, as a ModuleList in fp32.

    All begin as the same semi-orthogonal matrix, since a residual stream has one basis for all layers, scaled so that
    a random vector keeps its root mean square. It is drawn from a fixed seed, and the global one stays as it is.
    """
    import torch

    weight_DH = torch.empty(teacher_width, student_width)
    torch.nn.init.orthogonal_(weight_DH, generator=torch.Generator().manual_seed(0))
    weight_DH *= max(1.0, teacher_width / student_width) ** 0.5
    return torch.nn.ModuleList(_projector_class()(weight_DH.clone()) for _ in range(count))


@cache
def _projector_class() -> Any:
    import torch

    class Projector(torch.nn.Module):
        """Multiplies in fp32 whatever dtype an engine keeps the weight in; a module, so that engines can gather it."""

        def __init__(self, weight_DH: torch.Tensor) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(weight_DH)

        def forward(self, hidden_TH: torch.Tensor) -> torch.Tensor:
            with torch.autocast(hidden_TH.device.type, enabled=False):
                return torch.nn.functional.linear(hidden_TH.float(), self.weight.float())

    return Projector
