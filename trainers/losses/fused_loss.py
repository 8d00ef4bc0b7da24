"""The token loss from hidden states and heads, chunk by chunk, without [tokens × vocabulary] logits of either model.

The gradient is computed in the forward pass, by the formulas of `divergence_and_gradient`, and scaled in the backward
pass. It equals the gradient that autograd computes from full logits: the products run in the same dtype and order.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from ...ds_configs.memory.loss import BLOCK_BYTES as ACCELERATOR_BLOCK_BYTES
from ...ds_configs.memory.loss import CPU_BLOCK_BYTES, HEAD_ROWS, block_rows, even_chunk_rows, most_chunk_rows
from ...ds_configs.specs.errors import ConfigError, UsageError
from ...plugins import patches
from ...plugins.transformers.output_heads import OutputHead, further_bias, head_module, logit_shape, shaped_logits
from .objective import (
    HiddenTargets,
    LogitTargets,
    TeacherTargets,
    TokenSums,
    TopKTargets,
    check_targets,
    compared_rows,
    row_losses,
    shared_columns,
    valid_rows,
)
from .token_objective import TokenObjective

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

BLOCK_BYTES = {"cpu": CPU_BLOCK_BYTES}
"""Largest fp32 temporary of an uncompiled block: small for a CPU's cache, `ACCELERATOR_BLOCK_BYTES` elsewhere."""
_COMPILED_DEVICES = ("cuda",)
SCALED_ROWS = 1024
"""Rows of a gradient that are scaled and cast together in the backward pass."""
ALIGNED_ROWS = 8
"""Tensor cores need columns aligned to 16 bytes, so that the head is split at a multiple of this."""
_RECOMPUTES = dict.fromkeys(
    ("realize_reads_threshold", "realize_opcount_threshold", "realize_acc_reads_threshold"), 10_000
)
"""Inductor computes values again from the 16-bit logits instead of storing them in fp32, which is three times as many
bytes."""
_FP16_GRADIENT_SCALE = 256.0
"""A gradient of 1e-6, of which fp16 keeps two digits, has a full significand at this scale."""


def fused_token_loss(
    student_hidden_NH: torch.Tensor,
    student_head: OutputHead,
    labels_N: torch.Tensor,
    teacher: TeacherTargets | None,
    objective: TokenObjective,
    *,
    chunk_rows: int | None = None,
) -> TokenSums:
    """Return the result of `plain_token_loss` for the heads' logits, without ever holding the logits of all rows.

    `chunk_rows` rows are computed at a time; `None` keeps them below `CHUNK_BYTES`. Gradients that are not
    needed, of a frozen head or with autograd off, are not computed.

    Raises:
        UsageError: a label is beyond the student's vocabulary, or top-k targets have another temperature.
    """
    rows = valid_rows(labels_N, student_head.vocab_size)
    if rows is not None:
        student_hidden_NH, labels_N = student_hidden_NH[rows], labels_N[rows]
        teacher = None if teacher is None else teacher.select(rows)
    if isinstance(teacher, TopKTargets):
        columns = shared_columns(student_head.vocab_size, student_head.vocab_size, objective)
        check_targets(teacher, objective, columns)
    kind = student_hidden_NH.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else student_hidden_NH.dtype
    taught = teacher.head if isinstance(teacher, HiddenTargets) else None
    taught_bytes = 0 if taught is None else taught.vocab_size * taught.weight_VH.dtype.itemsize
    if isinstance(teacher, TopKTargets):
        # Indices of the K tokens scatter into fp32 values of all.
        taught_bytes = 4 * student_head.vocab_size
    work = _Work(
        head=student_head,
        labels_N=labels_N,
        teacher=teacher,
        objective=objective,
        chunk_rows=chunk_rows or most_chunk_rows(student_head.vocab_size * dtype.itemsize + taught_bytes),
        dtype=dtype,
        differentiates=torch.is_grad_enabled(),
    )
    loss = _FusedTokenLoss.apply(student_hidden_NH, student_head.weight_VH, student_head.bias_V, work)
    return TokenSums(loss=loss, weight=loss.new_tensor(len(labels_N)), rows=work.rows)


@dataclass(kw_only=True)
class _Work:
    """Inputs of the loop over chunks, and its results per row."""

    head: OutputHead
    labels_N: torch.Tensor
    teacher: TeacherTargets | None
    objective: TokenObjective
    chunk_rows: int
    dtype: torch.dtype
    """Of the products: the dtype of the hidden states, or autocast's."""
    differentiates: bool
    rows: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def gradient_scale(self) -> float:
        """Factor of gradients, so that small ones do not vanish in fp16."""
        return _FP16_GRADIENT_SCALE if str(self.dtype) == "torch.float16" else 1.0


class _FusedTokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, hidden_NH: torch.Tensor, weight_VH: torch.Tensor, bias_V: torch.Tensor | None, work: _Work
    ) -> torch.Tensor:
        needs = [work.differentiates and needed for needed in ctx.needs_input_grad[:3]]
        hidden_gradient = torch.empty(hidden_NH.shape, dtype=work.dtype, device=hidden_NH.device) if needs[0] else None
        bias_gradient = torch.zeros_like(bias_V, dtype=torch.float32) if needs[2] else None
        weight_gradient, sums = _empty_head_gradient(weight_VH) if needs[1] else (None, [])
        gradients = [hidden_gradient, weight_gradient, bias_gradient]
        ctx.sums, ctx.gradients, ctx.scale = sums, gradients, 1.0 / work.gradient_scale
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in (hidden_NH, weight_VH, bias_V)]
        values: list[dict[str, torch.Tensor]] = []
        count = len(work.labels_N)
        size = even_chunk_rows(count, work.chunk_rows)
        with torch.autocast(hidden_NH.device.type, enabled=False):
            cast_VH = weight_VH.to(work.dtype)
            cast_V = None if bias_V is None else bias_V.to(work.dtype)
            for first in range(0, count, size):
                chunk = slice(first, first + size)
                hidden = hidden_NH[chunk].to(work.dtype)
                product = torch.nn.functional.linear(hidden, cast_VH, cast_V)
                values += _chunk_values(product, chunk, work, gradient=any(needs))
                _add_gradients(hidden_gradient, sums, bias_gradient, product, hidden, cast_VH, chunk)
                del product
        rows_N = {name: torch.cat([block[name] for block in values]) for name in (values[0] if values else ())}
        work.rows.update(rows_N)
        if not values:
            return hidden_NH.new_zeros((), dtype=torch.float32)
        loss_N = row_losses(rows_N["student_cross_entropy"], rows_N.get("divergence"), work.objective)
        return loss_N.sum()

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.gradients is None:
            rule = "the fused loss frees its gradients in the first backward pass; a second one is impossible"
            raise RuntimeError(rule)
        (hidden, weight, bias), ctx.gradients = ctx.gradients, None
        sums, ctx.sums = ctx.sums, []
        factor = gradient.float() * ctx.scale
        # In fp32: a factor such as 1 / tokens, rounded to 16 bit, would change every gradient.
        if hidden is not None:
            _scale_into(hidden, [hidden], factor)
        if weight is not None:
            _scale_into(weight, sums, factor)
        if bias is not None:
            bias.mul_(factor)
        scaled = [
            None if own is None else own.to(dtype)
            for own, dtype in zip((hidden, weight, bias), ctx.dtypes, strict=True)
        ]
        return (*scaled, None)


def _empty_head_gradient(weight_VH: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the gradient of a head, and the fp32 sums of consecutive rows that become it.

    The sums of the first half need as many bytes as all 16-bit rows: they are in the memory of the result, so that the
    cast needs no further copy of the head.
    """
    if weight_VH.dtype.itemsize != 2:
        gradient = torch.zeros_like(weight_VH, dtype=torch.float32)
        return gradient, [gradient]
    gradient = torch.zeros(weight_VH.shape, dtype=weight_VH.dtype, device=weight_VH.device)
    rows, width = gradient.shape
    half = rows // 2 // ALIGNED_ROWS * ALIGNED_ROWS
    lower = gradient[: 2 * half].view(-1).view(torch.float32).view(half, width)
    return gradient, [lower, torch.zeros((rows - half, width), dtype=torch.float32, device=gradient.device)]


def _scale_into(gradient: torch.Tensor, sums: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Write sums of consecutive rows times a factor into a gradient, which may share its memory with the first."""
    if gradient.dtype == torch.float32:
        gradient.mul_(factor)
        return
    first = 0
    for part in sums:
        # Row r of the result overwrites row r / 2 of the sums, which has been read by then.
        for rows in part.split(SCALED_ROWS):
            gradient[first : first + len(rows)] = rows.float().mul_(factor).to(gradient.dtype)
            first += len(rows)


def _chunk_values(
    product_nV: torch.Tensor, chunk: slice, work: _Work, *, gradient: bool
) -> list[dict[str, torch.Tensor]]:
    """Return the values of the rows by name; with `gradient`, replace ``h Wᵀ + b`` by its gradient.

    The product of a teacher that gives hidden states is computed for the full chunk, in the dtype of its head. A GPU
    runs compiled kernels on the full chunk; without them, blocks bound the temporaries.
    """
    objective = work.objective
    teacher = None if work.teacher is None else work.teacher.select(chunk)
    shapes = [(work.head.scale, work.head.soft_cap)]
    targets_n: torch.Tensor | TopKTargets | None
    if isinstance(teacher, HiddenTargets):
        head = teacher.head
        shapes.append((head.scale, head.soft_cap))
        targets_n = torch.nn.functional.linear(teacher.hidden_NH.to(head.weight_VH.dtype), head.weight_VH, head.bias_V)
    else:
        targets_n = teacher.logits_NV if isinstance(teacher, LogitTargets) else teacher
    scale = work.gradient_scale * work.head.scale
    factors = (scale * (1.0 - objective.alpha), scale * objective.alpha * objective.temperature)
    # Tensors, because a weight that a schedule changes must not be compiled as a constant.
    hard, soft = (torch.full((), factor, device=product_nV.device) for factor in factors)
    if objective.alpha not in (0.0, 0.5):
        # Only whether it is 0 matters below.
        objective = replace(objective, alpha=0.5)
    constants = {"shapes": shapes, "objective": objective, "gradient": gradient}

    def values_of(rows_of: Callable[..., dict[str, torch.Tensor]], rows: slice) -> dict[str, torch.Tensor]:
        targets = targets_n.select(rows) if isinstance(targets_n, TopKTargets) else targets_n
        if isinstance(targets, torch.Tensor):
            targets = targets[rows]
        return rows_of(product_nV[rows], work.labels_N[chunk][rows], hard, soft, targets, **constants)

    if product_nV.device.type in _COMPILED_DEVICES and _kernels.usable:
        try:
            return [values_of(_kernels.block_values, slice(None))]
        except (torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit) as error:
            # No tensor has changed.
            _kernels.usable = False
            logger.warning("The fused loss runs uncompiled, about four times slower: %s", error)
    block = block_rows(work.head.vocab_size, BLOCK_BYTES.get(product_nV.device.type, ACCELERATOR_BLOCK_BYTES))
    return [values_of(block_values, slice(first, first + block)) for first in range(0, len(product_nV), block)]


def block_values(
    product_bV: torch.Tensor,
    labels_b: torch.Tensor,
    hard: torch.Tensor,
    soft: torch.Tensor,
    targets: torch.Tensor | TopKTargets | None,
    *,
    shapes: Sequence[tuple[float, float | None]],
    objective: TokenObjective,
    gradient: bool,
) -> dict[str, torch.Tensor]:
    """Return the values of each row by name; with `gradient`, replace the product by the gradient of the loss.

    The scalars `hard` and `soft` weight the gradients of cross-entropy and divergence. `shapes` are scale and soft-cap
    of the student's logits, and of those of a teacher that gives hidden states.
    """
    logits = shaped_logits(product_bV, *shapes[0]).float()
    log_q = torch.log_softmax(logits, dim=-1)
    rows, softened = {"student_cross_entropy": -log_q.gather(1, labels_b[:, None]).squeeze(1)}, None
    if isinstance(targets, torch.Tensor) and len(shapes) > 1:
        targets = shaped_logits(targets, *shapes[1])
    if targets is not None:
        _, softened, values = compared_rows(
            logits,
            targets,
            labels_b,
            objective,
            log_q_at_one_NV=log_q,
            gradient=gradient and objective.alpha != 0.0,
        )
        rows |= values
    if not gradient:
        return rows
    soft_cap = shapes[0][1]
    slope = None if soft_cap is None else (logits / soft_cap).square_().neg_().add_(1.0)
    dz = log_q.exp_()
    columns = torch.arange(dz.shape[1], device=dz.device)
    dz.sub_((columns == labels_b[:, None]).float())
    dz.mul_(hard)
    if softened is not None:
        dz[:, : softened.shape[1]] += softened.mul_(soft)
    if slope is not None:
        dz.mul_(slope)
    product_bV.copy_(dz)
    return rows


class _Kernels:
    """`block_values` with compiled kernels, until a compilation fails."""

    usable = True

    @cached_property
    def _compiled(self) -> Callable[..., dict[str, torch.Tensor]]:
        # Which of two forms of the softmax Inductor selects is no concern of a user.
        warnings.filterwarnings("ignore", message=r"\s*Online softmax is disabled", category=UserWarning)
        compiled: Callable[..., dict[str, torch.Tensor]] = torch.compile(
            block_values, fullgraph=True, options=_RECOMPUTES
        )
        return compiled

    def block_values(self, *inputs: Any, **constants: Any) -> dict[str, torch.Tensor]:
        for tensor in inputs:
            if isinstance(tensor, torch.Tensor) and tensor.dim():
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        # One compilation per divergence, temperature, shape of the logits, and with or without gradient.
        with torch._dynamo.config.patch(recompile_limit=64):
            return self._compiled(*inputs, **constants)


_kernels = _Kernels()


def _add_gradients(
    hidden_gradient: torch.Tensor | None,
    head_sums: Sequence[torch.Tensor],
    bias_gradient: torch.Tensor | None,
    dz_nV: torch.Tensor,
    hidden_nH: torch.Tensor,
    weight_VH: torch.Tensor,
    chunk: slice,
) -> None:
    """Add the gradients of one chunk: dh = dz W, dW += dzᵀ h and db += Σ dz, with sums over chunks in fp32."""
    if hidden_gradient is not None:
        torch.mm(dz_nV, weight_VH, out=hidden_gradient[chunk])
    if bias_gradient is not None:
        bias_gradient += dz_nV.sum(dim=0, dtype=torch.float32)
    columns_of = dz_nV.split([len(part) for part in head_sums], dim=1) if head_sums else ()
    for part, dz in zip(head_sums, columns_of, strict=True):
        if dz.dtype == torch.float32:
            part.addmm_(dz.T, hidden_nH)
        elif dz.is_cuda:
            torch.addmm(part, dz.T, hidden_nH, out_dtype=torch.float32, out=part)
        else:
            for first in range(0, len(part), HEAD_ROWS):
                rows = slice(first, first + HEAD_ROWS)
                part[rows] += dz[:, rows].T @ hidden_nH


HeadWork = Callable[["torch.Tensor"], "torch.Tensor"]
"""Takes the head's input [B, S, H] and returns a loss."""
_PROBES = (1.0, -3.0, 40.0)
"""Outputs of a head that distinguish scales, soft-caps and biases applied to them."""


class UnknownLogitsError(UsageError):
    """A model computes other logits from its head's outputs than the fused loss assumes."""


@contextmanager
def replaced_forward(model: PreTrainedModel, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace ``model.forward(**inputs)`` by ``forward(original, **inputs)`` inside the block."""

    def replacing(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: forward(original, *args, **kwargs)

    with patches.applied("replaced-forward", replacing, on=model):
        yield


class HeadReplacement:
    """Replaces the head of a model by a loss for one call.

    ``result`` is the loss after the hooks of wrappers on the head: the tensor to differentiate. ``head`` is the forward
    that is replaced, once it is. ``name`` is that of the model in errors, by default its class.
    """

    head: Callable[[torch.Tensor], torch.Tensor]

    def __init__(self, model: PreTrainedModel, work: HeadWork, *, name: str | None = None) -> None:
        self._model, self._head, self._work = model, head_module(model), work
        self._name = name or type(model).__name__
        self._finished: torch.Tensor | None = None

    @contextmanager
    def __call__(self) -> Iterator[HeadReplacement]:
        def keep(_module: object, _inputs: object, output: torch.Tensor) -> torch.Tensor:
            self._finished = output
            # Some models change their logits in place.
            return output.clone()

        def work(original: Callable[..., torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
            self.head = original
            loss = self._work(hidden)
            # Known numbers after the loss, as wide as logits, so that biases and masks of a vocabulary meet them too.
            # The width of the head is known here, where its weight is gathered.
            width = int(getattr(self._head, "out_features", None) or self._head.weight.shape[0])
            return torch.cat([loss.reshape(1), _probes(width, loss)[1:]]).reshape(1, 1, -1)

        handle = self._head.register_forward_hook(keep)
        try:
            with replaced_forward(self._head, work):
                yield self
        finally:
            handle.remove()
            # It may refer to this object, and tensors of a step must not wait for the garbage collector.
            del self._work

    @property
    def result(self) -> torch.Tensor:
        """The loss, a scalar with its graph.

        Raises:
            UnknownLogitsError: the model's forward never called its head module.
        """
        return self._output()[0, 0, 0]

    def _output(self) -> torch.Tensor:
        if self._finished is None:
            rule = "its forward does not call its output embeddings as a module"
            raise UnknownLogitsError(ConfigError(where=self._name, rule=rule, fix="use implementation='plain'"))
        return self._finished

    def check_logits(self, logits: torch.Tensor) -> None:
        """Compare the model's logits [1, 1, V] with the scale, soft-cap and bias that an `OutputHead` assumes.

        Raises:
            UnknownLogitsError: the head was not called, or the model computes its logits differently.
        """
        self._output()
        actual = logits.detach().reshape(-1).float().cpu()
        probes = _probes(len(actual), actual)
        scale, soft_cap = logit_shape(self._model)
        bias_V = further_bias(self._model)
        expected = (probes if bias_V is None else probes + bias_V.float().cpu()[: len(probes)]) * scale
        if soft_cap is not None:
            expected = torch.tanh(expected / soft_cap) * soft_cap
        off = ~torch.isclose(actual, expected, rtol=1e-2, atol=1e-3)
        # The first column has the loss.
        off[:1] = False
        if bool(off.any()):
            column = int(off.nonzero()[0])
            rule = (
                f"computes the logit {actual[column].item():g} from the head's output {probes[column].item():g}, "
                f"where {expected[column].item():g} was expected"
            )
            raise UnknownLogitsError(ConfigError(where=self._name, rule=rule, fix="use implementation='plain'"))


def captured_head_input(model: PreTrainedModel, name: str) -> tuple[HeadReplacement, list[torch.Tensor]]:
    """Return a replacement of a model's head, and the list that gets its inputs: one per call, [B, S, H].

    Raises:
        UsageError: the model has no output embeddings.
    """
    inputs: list[torch.Tensor] = []

    def keep(hidden_BSH: torch.Tensor) -> torch.Tensor:
        inputs.append(hidden_BSH)
        return hidden_BSH.new_zeros(())

    return HeadReplacement(model, keep, name=name), inputs


def _probes(count: int, like: torch.Tensor) -> torch.Tensor:
    return like.new_tensor(_PROBES).repeat(-(-count // len(_PROBES)))[:count]


def accepted_inputs(model: PreTrainedModel, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs that a model's forward accepts, with the key-value cache off.

    With the cache, Transformers (5.17.0, masking_utils.py) does not detect packed documents in `position_ids`.
    """
    parameters = inspect.signature(type(model).forward).parameters
    if "use_cache" in parameters:
        inputs = {**inputs, "use_cache": False}
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return inputs
    return {name: value for name, value in inputs.items() if name in parameters}
