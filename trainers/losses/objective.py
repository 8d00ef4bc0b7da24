"""Token losses: divergences with gradients, top-K targets, telemetry, and the loss from full logits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ...ds_configs.specs.errors import ConfigError, UsageError
from ...plugins.transformers.output_heads import OutputHead
from ..data.chat import IGNORED_LABEL
from .token_objective import Divergence, TokenObjective


@dataclass(frozen=True, kw_only=True)
class LogitTargets:
    logits_NV: torch.Tensor

    def select(self, rows: slice | torch.Tensor) -> LogitTargets:
        return LogitTargets(logits_NV=self.logits_NV[rows])


@dataclass(frozen=True, kw_only=True)
class HiddenTargets:
    """Inputs of a teacher's output head, so that its logits exist for one chunk at a time only."""

    hidden_NH: torch.Tensor
    head: OutputHead

    def select(self, rows: slice | torch.Tensor) -> HiddenTargets:
        return HiddenTargets(hidden_NH=self.hidden_NH[rows], head=self.head)


@dataclass(frozen=True, kw_only=True)
class TopKTargets:
    """A teacher's K likeliest tokens, at the temperature of the objective, and the mass of all others."""

    ids_NK: torch.Tensor
    """int64 token ids, distinct within a row."""
    log_probabilities_NK: torch.Tensor
    """fp32 log-probabilities of these tokens at τ."""
    tail_log_probability_N: torch.Tensor
    """fp32 log of the mass of all other tokens at τ; -inf without others."""
    temperature: float

    def select(self, rows: slice | torch.Tensor) -> TopKTargets:
        return TopKTargets(
            ids_NK=self.ids_NK[rows],
            log_probabilities_NK=self.log_probabilities_NK[rows],
            tail_log_probability_N=self.tail_log_probability_N[rows],
            temperature=self.temperature,
        )


TeacherTargets = LogitTargets | HiddenTargets | TopKTargets


@dataclass(frozen=True, kw_only=True)
class TokenSums:
    """Sums over the valid rows of a batch, in fp32; only `loss` carries a gradient.

    Divide by the global number of valid rows to get means.
    """

    loss: torch.Tensor
    """Σ (1 - α) CE + α τ² D."""
    weight: torch.Tensor
    """The number of valid rows, in fp32."""
    rows: Mapping[str, torch.Tensor]
    """[N] detached values of the valid rows, by name. What the teacher's targets do not determine is missing.

    `student_cross_entropy`, `teacher_cross_entropy` (not for top-k targets): with the labels. `divergence`: D at the
    objective's temperature, without τ². `forward_kl`: KL(teacher | student) at τ = 1. `agreement`: whether both
    models' likeliest tokens are the same. `overlap`: Σ_v min(p_v, q_v) at τ = 1, the expected acceptance of speculative
    decoding. `nonfinite_teacher_rows`: whether the teacher's logits are NaN or infinite; the caller must not train on
    them.
    """

    @property
    def sums(self) -> dict[str, torch.Tensor]:
        """The sum of the rows by name."""
        return {name: values_N.sum() for name, values_N in self.rows.items()}


LOWEST = -1e4
"""Replaces log 0: its exponential is 0 in fp32, and its differences are finite."""
_VANISHING = -80.0
"""Below this log-probability, p (log p - log q) - p + q is q to fp32's precision."""


def divergence_rows(
    kind: Divergence,
    student_log_probabilities_NV: torch.Tensor,
    teacher_log_probabilities_NV: torch.Tensor,
    mixture: float,
) -> torch.Tensor:
    """Return the divergence of each row, [N], differentiable by autograd."""
    return _rows(kind, student_log_probabilities_NV, teacher_log_probabilities_NV, mixture)[0]


def divergence_and_gradient(
    kind: Divergence,
    student_log_probabilities_NV: torch.Tensor,
    teacher_log_probabilities_NV: torch.Tensor,
    mixture: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the divergence [N] and its gradient with respect to the student's logits [N, V], without autograd.

    With g = ∂D/∂q at fixed p, the gradient is ``q (g - Σ q g)``; constants in g cancel.
    """
    value_N, log_q, log_p, log_m = _rows(kind, student_log_probabilities_NV, teacher_log_probabilities_NV, mixture)
    q = log_q.exp()
    if kind == "forward_kl":
        return value_N, q.sub_(log_p.exp_())
    if kind == "reverse_kl":
        slope = log_q.sub_(log_p)
    else:
        assert log_m is not None, "a JSD compares with a mixture"
        slope = log_q.sub_(log_m).mul_(1.0 - mixture)
    slope.sub_((q * slope).sum(dim=-1, keepdim=True))
    return value_N, q.mul_(slope)


def _rows(
    kind: Divergence, log_q: torch.Tensor, log_p: torch.Tensor, mixture: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return the divergence of each row, and the log-probabilities of student, teacher and mixture, clamped."""
    log_q, log_p, log_m = log_q.clamp(min=LOWEST), log_p.clamp(min=LOWEST), None
    if kind == "forward_kl":
        elements = _relative_entropy(log_p, log_q)
    elif kind == "reverse_kl":
        elements = _relative_entropy(log_q, log_p)
    else:
        log_m = torch.logaddexp(log_p + math.log(mixture), log_q + math.log(1.0 - mixture))
        from_teacher, from_student = _relative_entropy(log_p, log_m), _relative_entropy(log_q, log_m)
        elements = mixture * from_teacher + (1.0 - mixture) * from_student
    return elements.sum(dim=-1), log_q, log_p, log_m


def _relative_entropy(log_a: torch.Tensor, log_b: torch.Tensor) -> torch.Tensor:
    """Return ``a (log a - log b) - a + b`` elementwise, whose sum over normalised rows is KL(a | b).

    Each element is 0 or more, so rounding cannot make a sum negative. An error in a row's normalisation has an effect
    of second order only; in ``a (log a - log b)`` it would be of first order.
    """
    counts = log_a > _VANISHING
    difference = torch.where(counts, log_a - log_b, torch.zeros_like(log_a))
    inside = log_a.exp() * (torch.expm1(-difference) + difference)
    return torch.where(counts, inside, log_b.exp()).clamp(min=0.0)


def check_targets(targets: TopKTargets, objective: TokenObjective, columns: int) -> None:
    """Check the temperature of targets, and that their tokens are among the columns that are compared.

    Raises:
        UsageError: they do not fit the objective.
    """
    if targets.temperature != objective.temperature:
        rule = f"the teacher's top-k has temperature {targets.temperature}"
        fix = "use the same temperature for the loss and the top-k"
        raise UsageError(ConfigError(where="temperature", value=objective.temperature, rule=rule, fix=fix))
    if targets.ids_NK.numel() and int(targets.ids_NK.max()) >= columns:
        rule = f"the teacher's top-k has a token beyond the {columns} that are compared"
        fix = f"compute the top-k with vocab_size={columns} or less"
        raise UsageError(ConfigError(where="ids_NK", value=int(targets.ids_NK.max()), rule=rule, fix=fix))


def binned(log_q_NV: torch.Tensor, targets: TopKTargets) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probabilities of student and teacher over K + 1 bins, [N, K + 1]."""
    student = log_q_NV.gather(1, targets.ids_NK)
    if targets.ids_NK.shape[1] >= log_q_NV.shape[1]:
        tail_N = log_q_NV.new_full(log_q_NV.shape[:1], float("-inf"))
    else:
        # The sum of the others: 1 minus the sum of the K would consist of rounding errors.
        tail_N = log_q_NV.scatter(1, targets.ids_NK, float("-inf")).logsumexp(dim=-1)
    teacher = torch.cat([targets.log_probabilities_NK, targets.tail_log_probability_N[:, None]], dim=1)
    return torch.cat([student, tail_N[:, None]], dim=1), teacher


def top_k_divergence_and_gradient(
    kind: Divergence, log_q_NV: torch.Tensor, targets: TopKTargets, mixture: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the divergence [N] and its gradient with respect to the student's logits [N, V], without autograd.

    A token's share of its bin's gradient is its share of the bin's mass.
    """
    student, teacher = binned(log_q_NV, targets)
    value_N, gradient_bins = divergence_and_gradient(kind, student, teacher, mixture)
    gradient_NV = log_q_NV - student[:, -1:].clamp(min=LOWEST)
    gradient_NV.exp_().mul_(gradient_bins[:, -1:])
    return value_N, gradient_NV.scatter_(1, targets.ids_NK, gradient_bins[:, :-1])


def dense_rows(
    log_q_NV: torch.Tensor, log_p_NV: torch.Tensor, *, forward_kl_N: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    """Return KL, agreement and overlap, from log-probabilities over the same V tokens.

    ``forward_kl_N`` is the KL, if it is known already.
    """
    if forward_kl_N is None:
        forward_kl_N = divergence_rows("forward_kl", log_q_NV, log_p_NV, 0.5)
    return {
        "forward_kl": forward_kl_N,
        "agreement": (log_q_NV.argmax(dim=-1) == log_p_NV.argmax(dim=-1)).float(),
        "overlap": torch.minimum(log_q_NV, log_p_NV).exp_().sum(dim=-1),
    }


def teacher_cross_entropy(log_p_NV: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
    """Return the teacher's cross-entropy of each row, from log-probabilities over all of its own tokens.

    The student's is over all of its tokens too, so both match `evaluate`. A label that is not a token of the teacher
    counts 0.
    """
    known_N = labels_N < log_p_NV.shape[1]
    taught_N = log_p_NV.gather(1, torch.where(known_N, labels_N, 0)[:, None]).squeeze(1)
    return torch.where(known_N, -taught_N, 0.0)


def top_k_rows(log_q_NV: torch.Tensor, targets: TopKTargets) -> dict[str, torch.Tensor]:
    """Return agreement, and at τ = 1 the KL over K + 1 bins, from the student's log-probabilities at τ."""
    likeliest_N = targets.log_probabilities_NK.argmax(dim=-1, keepdim=True)
    same_N = log_q_NV.argmax(dim=-1) == targets.ids_NK.gather(1, likeliest_N).squeeze(1)
    rows = {"agreement": same_N.float()}
    if targets.temperature == 1.0:
        rows["forward_kl"] = divergence_rows("forward_kl", *binned(log_q_NV, targets), 0.5)
    return rows


def plain_token_loss(
    student_logits_NV: torch.Tensor,
    labels_N: torch.Tensor,
    teacher: LogitTargets | TopKTargets | None,
    objective: TokenObjective,
) -> TokenSums:
    """Return ``Σ (1 - α) CE + α τ² D`` over the rows whose label is not -100, in fp32 for any dtype, by autograd.

    D compares the first V* columns of both models, the tokens that both have; CE is over all columns of the student.
    Without a teacher the loss is ``Σ (1 - α) CE``. Without any valid row it is 0, with a graph.

    Raises:
        UsageError: a label is beyond the student's vocabulary, or top-k targets have another temperature.
    """
    rows = valid_rows(labels_N, student_logits_NV.shape[1])
    if rows is not None:
        student_logits_NV, labels_N = student_logits_NV[rows], labels_N[rows]
        teacher = None if teacher is None else teacher.select(rows)
    logits_NV = student_logits_NV.float()
    cross_entropy_N = torch.nn.functional.cross_entropy(logits_NV, labels_N, reduction="none")
    rows_by_name, divergence_N = {"student_cross_entropy": cross_entropy_N.detach()}, None
    if objective.alpha == 0.0:
        logits_NV = logits_NV.detach()
    if teacher is not None:
        if isinstance(teacher, TopKTargets):
            check_targets(teacher, objective, shared_columns(logits_NV.shape[1], logits_NV.shape[1], objective))
        targets = teacher.logits_NV.detach() if isinstance(teacher, LogitTargets) else teacher
        divergence_N, _, values = compared_rows(logits_NV, targets, labels_N, objective)
        rows_by_name |= values
    loss_N = row_losses(cross_entropy_N, divergence_N, objective)
    return TokenSums(loss=loss_N.sum(), weight=loss_N.new_tensor(len(loss_N)), rows=rows_by_name)


def row_losses(
    cross_entropy_N: torch.Tensor, divergence_N: torch.Tensor | None, objective: TokenObjective
) -> torch.Tensor:
    """Return ``(1 - α) CE + α τ² D``; a term whose weight is 0 is skipped, not multiplied by 0."""
    hard_N = (1.0 - objective.alpha) * cross_entropy_N
    if divergence_N is None or objective.alpha == 0.0:
        return hard_N
    soft_N = objective.alpha * objective.temperature**2 * divergence_N
    return soft_N if objective.alpha == 1.0 else hard_N + soft_N


def valid_rows(labels_N: torch.Tensor, columns: int) -> torch.Tensor | None:
    """Return the indices of the rows with a label, or `None` if all have one.

    Raises:
        UsageError: a label is not a column of the student.
    """
    valid_N = labels_N != IGNORED_LABEL
    bad_N = valid_N & ((labels_N < 0) | (labels_N >= columns))
    if bool(bad_N.any()):
        rule = f"must be from 0 to {columns - 1}, the columns of the student's head, or {IGNORED_LABEL} for no label"
        raise UsageError(ConfigError(where="labels", value=int(labels_N[bad_N][0]), rule=rule))
    rows = valid_N.nonzero().squeeze(1)
    return None if len(rows) == len(labels_N) else rows


def shared_columns(student_columns: int, teacher_columns: int, objective: TokenObjective) -> int:
    """Return V*: the tokens that both models are compared on."""
    return min(student_columns, teacher_columns, objective.vocab_size or student_columns)


def compared_rows(
    logits_NV: torch.Tensor,
    targets: torch.Tensor | TopKTargets,
    labels_N: torch.Tensor,
    objective: TokenObjective,
    *,
    log_q_at_one_NV: torch.Tensor | None = None,
    gradient: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, dict[str, torch.Tensor]]:
    """Return the divergence of each row, its gradient, and detached values of each row by name.

    `log_q_at_one_NV` are the student's log-probabilities at
    τ = 1, if they are known. With `gradient`, the gradient is by logits / τ on the shared columns.
    """
    vocabulary, at_one = logits_NV.shape[1], objective.temperature == 1.0
    taught_columns = vocabulary if isinstance(targets, TopKTargets) else targets.shape[1]
    columns = shared_columns(vocabulary, taught_columns, objective)
    if columns != vocabulary:
        log_q_at_one_NV = None
    log_q = log_q_at_one_NV if at_one else None
    if log_q is None:
        log_q = torch.log_softmax(logits_NV[:, :columns] / objective.temperature, dim=-1)
    kind, mixture, slope = objective.divergence, objective.mixture, None
    if isinstance(targets, TopKTargets):
        if gradient:
            divergence_N, slope = top_k_divergence_and_gradient(kind, log_q, targets, mixture)
        else:
            divergence_N = divergence_rows(kind, *binned(log_q, targets), mixture)
        # NaN or +infinite log-probabilities; -infinity is a mass of 0.
        largest_N = targets.log_probabilities_NK.amax(dim=-1)
        nonfinite_N = ~((largest_N < math.inf) & (targets.tail_log_probability_N < math.inf))
        rows = {"divergence": divergence_N.detach(), "nonfinite_teacher_rows": nonfinite_N.float()}
        with torch.no_grad():
            return divergence_N, slope, rows | top_k_rows(log_q, targets)
    taught = targets[:, :columns].float()
    log_p = torch.log_softmax(taught / objective.temperature, dim=-1)
    if gradient:
        divergence_N, slope = divergence_and_gradient(kind, log_q, log_p, mixture)
    else:
        divergence_N = divergence_rows(kind, log_q, log_p, mixture)
    # NaN or infinite logits: a log-softmax turns the whole row into NaN.
    nonfinite_N = torch.isnan(log_p[:, 0]).float()
    rows = {"divergence": divergence_N.detach(), "nonfinite_teacher_rows": nonfinite_N}
    with torch.no_grad():
        known_N = rows["divergence"] if at_one and kind == "forward_kl" else None
        own, theirs = log_q, log_p
        if not at_one:
            own = logits_NV[:, :columns].log_softmax(dim=-1) if log_q_at_one_NV is None else log_q_at_one_NV
            theirs = taught.log_softmax(dim=-1)
        rows |= dense_rows(own, theirs, forward_kl_N=known_N)
        all_theirs = theirs if columns == taught_columns else targets.float().log_softmax(dim=-1)
        rows["teacher_cross_entropy"] = teacher_cross_entropy(all_theirs, labels_N)
    return divergence_N, slope, rows
