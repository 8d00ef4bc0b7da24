"""Token losses against fp64 references that share no code with them, fused against plain, and their memory."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kd_memory import fused_peak_bytes
from shardwright.ds_configs.specs.errors import UsageError
from shardwright.plugins.metering import ByteMeter
from shardwright.plugins.transformers.output_heads import OutputHead
from shardwright.trainers.losses import fused_loss
from shardwright.trainers.losses.fused_loss import fused_token_loss
from shardwright.trainers.losses.objective import (
    HiddenTargets,
    LogitTargets,
    TokenObjective,
    TokenSums,
    TopKTargets,
    binned,
    divergence_and_gradient,
    divergence_rows,
    plain_token_loss,
)

pytestmark = pytest.mark.slow

KINDS = ("forward_kl", "reverse_kl", "jsd")
MIXTURE = 0.3
WIDTH = 24
MASKS = ("none", "partly", "one row", "all")


def top_k_targets(logits_NV: torch.Tensor, k: int, temperature: float, vocab_size: int | None = None) -> TopKTargets:
    """The K likeliest of the first `vocab_size` tokens at a temperature, and the mass of the others."""
    log_p_NV = torch.log_softmax(logits_NV[:, :vocab_size].double() / temperature, dim=-1)
    top = log_p_NV.topk(min(k, log_p_NV.shape[1]), dim=-1)
    others_NV = log_p_NV.scatter(1, top.indices, -torch.inf)
    return TopKTargets(
        ids_NK=top.indices,
        log_probabilities_NK=top.values.float(),
        tail_log_probability_N=others_NV.logsumexp(-1).float(),
        temperature=temperature,
    )


def reference_divergence(kind: str, p: torch.Tensor, q: torch.Tensor, mixture: float = MIXTURE) -> torch.Tensor:
    """Divergences as the papers print them, from probabilities."""

    def kl(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.where(a > 0, a * torch.log(a.clamp(min=1e-300) / b), 0.0).sum(-1)

    if kind == "forward_kl":
        return kl(p, q)
    if kind == "reverse_kl":
        return kl(q, p)
    middle = mixture * p + (1 - mixture) * q
    return mixture * kl(p, middle) + (1 - mixture) * kl(q, middle)


def reference_loss(
    logits: torch.Tensor,
    taught: torch.Tensor,
    labels: torch.Tensor,
    objective: TokenObjective,
    columns: int,
) -> torch.Tensor:
    """Row by row, in fp64."""
    total = logits.sum() * 0.0
    for z, t, label in zip(logits, taught, labels.tolist(), strict=True):
        if label == -100:
            continue
        exponentials = (z - z.max()).exp()
        hard = -(exponentials[label] / exponentials.sum()).log()
        softened = [(row[:columns] - row[:columns].max()) / objective.temperature for row in (t, z)]
        p, q = (row.exp() / row.exp().sum() for row in softened)
        soft = reference_divergence(objective.divergence, p, q)
        total = total + (1 - objective.alpha) * hard + objective.alpha * objective.temperature**2 * soft
    return total


def labels_of(mask: str, rows: int, columns: int) -> torch.Tensor:
    labels = torch.randint(0, columns, (rows,))
    hidden = {"none": [], "partly": [1, 4], "one row": [0, *range(2, rows)], "all": range(rows)}[mask]
    labels[list(hidden)] = -100
    return labels


def assert_near(found: torch.Tensor, expected: torch.Tensor, relative: float, what: object) -> None:
    error = (found.double() - expected.double()).norm()
    assert error <= relative * expected.double().norm() + 1e-12, (what, float(error), float(expected.norm()))


class Case:
    def __init__(self, *, student: int, teacher: int, rows: int = 7, dtype: torch.dtype = torch.float32, **head: Any):
        torch.manual_seed(student + teacher)
        self.hidden = torch.randn(rows, WIDTH).to(dtype).requires_grad_()
        self.weight = (torch.randn(student, WIDTH) * 0.4).to(dtype).requires_grad_(head.pop("trained", True))
        self.bias = torch.randn(student).to(dtype).requires_grad_() if head.pop("bias", False) else None
        self.head = OutputHead(weight_VH=self.weight, bias_V=self.bias, **head)
        other = OutputHead(weight_VH=(torch.randn(teacher, WIDTH) * 0.4).to(dtype), **head)
        self.targets = HiddenTargets(hidden_NH=torch.randn(rows, WIDTH).to(dtype), head=other)

    @property
    def leaves(self) -> list[torch.Tensor]:
        every = (self.hidden, self.weight, self.bias)
        return [leaf for leaf in every if leaf is not None and leaf.requires_grad]

    def taught(self) -> LogitTargets:
        return LogitTargets(logits_NV=self.targets.head.logits(self.targets.hidden_NH))

    def plain(self, labels: torch.Tensor, objective: TokenObjective, targets: Any = None, **more: Any) -> TokenSums:
        targets = self.taught() if targets is None else targets
        return plain_token_loss(self.head.logits(self.hidden), labels, targets, objective, **more)

    def fused(self, labels: torch.Tensor, objective: TokenObjective, targets: Any = None, **more: Any) -> TokenSums:
        targets = self.targets if targets is None else targets
        return fused_token_loss(self.hidden, self.head, labels, targets, objective, **more)

    def gradients(self, sums: TokenSums) -> list[torch.Tensor]:
        return list(torch.autograd.grad(sums.loss * 0.125, self.leaves, allow_unused=False))


HEADS: dict[str, dict[str, Any]] = {
    "bare": {},
    "bias": {"bias": True},
    "soft-cap": {"soft_cap": 3.0},
    "scale": {"scale": 0.25},
    "all": {"bias": True, "soft_cap": 3.0, "scale": 2.0},
    "frozen": {"trained": False},
}


@pytest.mark.parametrize("kind", KINDS)
def test_fused_loss_matches_reference_and_plain_loss(kind: str) -> None:
    sizes = ((149, 149, None), (97, 149, None), (149, 97, None), (149, 120, 89))
    grid = [(tau, "partly", size, {}) for tau in (1.0, 2.0, 4.0) for size in sizes]
    grid += [(2.0, mask, sizes[0], {}) for mask in MASKS] + [(2.0, "partly", sizes[0], head) for head in HEADS.values()]
    for tau, mask, (student, teacher, real), head in grid:
        what = (kind, tau, mask, student, teacher, real, head)
        case = Case(student=student, teacher=teacher, **head)
        columns = min(student, teacher, real or student)
        objective = TokenObjective(alpha=0.6, temperature=tau, divergence=kind, mixture=MIXTURE, vocab_size=real)  # type: ignore[arg-type]
        labels = labels_of(mask, 7, columns)
        plain = case.plain(labels, objective)
        fused = case.fused(labels, objective, chunk_rows=3)
        assert_near(fused.loss, plain.loss, 1e-6, what)
        exact = [
            None if t is None else t.detach().double().requires_grad_() for t in (case.hidden, case.weight, case.bias)
        ]
        head_64 = OutputHead(weight_VH=exact[1], bias_V=exact[2], scale=case.head.scale, soft_cap=case.head.soft_cap)
        other = case.targets.head
        other_64 = OutputHead(weight_VH=other.weight_VH.double(), scale=other.scale, soft_cap=other.soft_cap)
        taught = other_64.logits(case.targets.hidden_NH.double())
        expected = reference_loss(head_64.logits(exact[0]), taught, labels, objective, columns)
        assert_near(fused.loss, expected, 1e-5, what)
        wanted = torch.autograd.grad(expected * 0.125, [t for t in exact if t is not None], allow_unused=True)
        wanted_of = dict(
            zip((id(t) for t in (case.hidden, case.weight, case.bias) if t is not None), wanted, strict=True)
        )
        for leaf, from_fused, from_plain in zip(case.leaves, case.gradients(fused), case.gradients(plain), strict=True):
            assert_near(from_fused, wanted_of[id(leaf)], 1e-4, what)
            assert_near(from_fused, from_plain, 3e-6, what)


def sums_of(sums: TokenSums) -> dict[str, float]:
    named = {"loss": sums.loss.detach(), "weight": sums.weight, **sums.sums}
    return {name: float(value) for name, value in named.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fused_and_plain_agree_in_every_dtype_and_chunk_size(dtype: torch.dtype) -> None:
    for tau, head in product((1.0, 2.0), ({}, HEADS["all"])):
        case = Case(student=131, teacher=149, rows=23, dtype=dtype, **head)
        objective = TokenObjective(temperature=tau, divergence="jsd")
        labels = labels_of("partly", 23, 131)
        plain = case.plain(labels, objective)
        from_plain = case.gradients(plain)
        for chunk_rows in (1, 4, 23, None):
            fused = case.fused(labels, objective, chunk_rows=chunk_rows)
            assert sums_of(fused) == pytest.approx(sums_of(plain), rel=2e-6 if dtype == torch.float32 else 1e-3)
            rounding = {torch.float32: 3e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}[dtype]
            for mine, other in zip(case.gradients(fused), from_plain, strict=True):
                assert mine.dtype == dtype
                assert_near(mine, other, rounding, (tau, head, chunk_rows))


def test_bf16_gradients_use_an_unrounded_factor() -> None:
    case = Case(student=600, teacher=600, rows=64, dtype=torch.bfloat16)
    labels, objective = torch.randint(0, 600, (64,)), TokenObjective()
    factor = 1 / 761
    assert float(torch.tensor(factor).bfloat16()) != pytest.approx(factor, rel=1e-3)
    (one,) = torch.autograd.grad(case.fused(labels, objective).loss, case.hidden)
    (scaled,) = torch.autograd.grad(case.fused(labels, objective).loss * factor, case.hidden)
    slope = (scaled.double() * one.double()).sum() / one.double().square().sum()
    assert float(slope) == pytest.approx(factor, rel=5e-4)


@pytest.mark.parametrize("rows", [0, 1])
def test_batches_of_no_or_one_row_equal_the_plain_loss(rows: int) -> None:
    case, objective = Case(student=70, teacher=97, rows=rows), TokenObjective(alpha=0.5, temperature=2.0)
    labels = torch.randint(0, 70, (rows,))
    fused, plain = case.fused(labels, objective), case.plain(labels, objective)
    assert_near(fused.loss, plain.loss, 1e-6, rows)
    for own, expected in zip(case.gradients(fused), case.gradients(plain), strict=True):
        assert_near(own, expected, 3e-6, rows)


@pytest.mark.parametrize("soft_cap", [None, 30.0])
def test_logits_beyond_fp16_are_capped_or_give_no_finite_loss(soft_cap: float | None) -> None:
    case = Case(student=70, teacher=70, dtype=torch.float16, soft_cap=soft_cap)
    case.hidden.data.mul_(16_000)
    assert not torch.nn.functional.linear(case.hidden, case.weight).isfinite().all()
    labels, objective = torch.randint(0, 70, (7,)), TokenObjective(alpha=0.5, temperature=2.0)
    fused, plain = case.fused(labels, objective), case.plain(labels, objective)
    assert bool(fused.loss.isfinite()) == bool(plain.loss.isfinite()) == (soft_cap is not None)
    if soft_cap:
        assert_near(fused.loss, plain.loss, 1e-3, soft_cap)


def test_small_fp16_gradients_do_not_vanish() -> None:
    """Gradients of tokens of a probability of 1e-7 are near fp16's smallest number until the backward pass."""
    torch.manual_seed(0)
    hidden, weight = torch.full((1, 1), 1.0).half(), (3 * torch.randn(4000, 1) - 4).half().requires_grad_()
    weight.data[0] = 9.0
    head = OutputHead(weight_VH=weight)
    sums = fused_token_loss(hidden, head, torch.zeros(1, dtype=torch.long), None, TokenObjective(alpha=0.0))
    (found,) = torch.autograd.grad(sums.loss * 2.0**14, weight)
    expected = 2.0**14 * weight.detach().double().softmax(0)
    small = (expected > 2.0**14 * 1e-7) & (expected < 2.0**14 * 1e-5)
    assert int(small.sum()) > 100
    assert float(((found.double() - expected).abs() / expected)[small].max()) < 0.02


def test_fused_loss_supports_autocast_and_tied_embeddings() -> None:
    torch.manual_seed(0)
    embedding = torch.randn(61, WIDTH).requires_grad_()
    ids, labels = torch.randint(0, 61, (9,)), torch.randint(0, 61, (9,))
    taught = LogitTargets(logits_NV=torch.randn(9, 61))
    found = []
    for fused in (True, False):
        with torch.autocast("cpu", torch.bfloat16):
            hidden, head = embedding[ids].tanh(), OutputHead(weight_VH=embedding)
            if fused:
                sums = fused_token_loss(hidden, head, labels, taught, TokenObjective(), chunk_rows=4)
            else:
                sums = plain_token_loss(head.logits(hidden), labels, taught, TokenObjective())
        found.append((sums.loss, *torch.autograd.grad(sums.loss, embedding)))
    assert_near(found[0][0], found[1][0], 1e-6, "loss")
    assert found[0][1].dtype == torch.float32
    assert_near(found[0][1], found[1][1], 1e-2, "gradient of the tied weight")


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31), distance=st.sampled_from([0.0, 1e-4, 1e-2, 0.3]), columns=st.sampled_from([3, 97, 1100])
)
def test_divergences_of_bf16_logits_are_never_negative(seed: int, distance: float, columns: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    taught = (torch.randn(4, columns, generator=draw) * 4).bfloat16()
    logits = (taught.float() + distance * torch.randn(4, columns, generator=draw)).bfloat16()
    log_q, log_p = (tensor.float().log_softmax(-1) for tensor in (logits, taught))
    for kind in KINDS:
        value = divergence_rows(kind, log_q, log_p, MIXTURE)  # type: ignore[arg-type]
        assert (value >= 0).all()
        p, q = (tensor.double().softmax(-1) for tensor in (taught, logits))
        assert torch.allclose(value.double(), reference_divergence(kind, p, q), rtol=1e-4, atol=1e-10), kind


def test_columns_without_mass_add_nothing() -> None:
    logits = torch.randn(3, 50)
    logits[:, 40:] = float("-inf")
    for kind in KINDS:
        log_p = logits.log_softmax(-1)
        value, gradient = divergence_and_gradient(kind, log_p, log_p, MIXTURE)  # type: ignore[arg-type]
        assert (value >= 0).all() and float(value.max()) < 1e-12
        assert gradient.isfinite().all() and float(gradient.abs().max()) < 1e-7
    one_sided = divergence_rows("forward_kl", torch.zeros(1, 2).log_softmax(-1), torch.tensor([[0.0, -torch.inf]]), 0.5)
    assert float(one_sided) == pytest.approx(0.6931472)


def test_equal_models_with_padded_vocabularies_do_not_diverge() -> None:
    torch.manual_seed(4)
    hidden, weight = torch.randn(8, WIDTH), torch.randn(1519, WIDTH)
    padded = torch.cat([weight, torch.randn(128, WIDTH)])
    labels = torch.randint(0, 1519, (8,))
    for kind, (own, other) in product(KINDS, ((weight, padded), (padded, weight), (padded, padded))):
        head = OutputHead(weight_VH=own.clone().requires_grad_())
        targets = HiddenTargets(hidden_NH=hidden, head=OutputHead(weight_VH=other))
        objective = TokenObjective(alpha=1.0, divergence=kind, temperature=2.0, vocab_size=1519)  # type: ignore[arg-type]
        sums = fused_token_loss(hidden, head, labels, targets, objective)
        assert 0.0 <= float(sums.loss.detach()) < 1e-9
        assert (float(sums.sums["agreement"]), float(sums.weight)) == (8.0, 8.0)
        assert float(sums.sums["overlap"]) == pytest.approx(8.0, rel=1e-5)


def test_telemetry_sums_match_their_definitions() -> None:
    case = Case(student=149, teacher=120, rows=11)
    labels = labels_of("partly", 11, 149)
    labels[0] = 130  # known to the student alone
    objective = TokenObjective(temperature=3.0, divergence="reverse_kl", vocab_size=110)
    kept = labels != -100
    logits, taught = case.head.logits(case.hidden).detach()[kept], case.taught().logits_NV[kept]
    p, q = (x[:, :110].double().softmax(-1) for x in (taught, logits))
    soft_p, soft_q = ((x[:, :110].double() / 3).softmax(-1) for x in (taught, logits))
    known, whole = labels[kept] < 120, taught.double().softmax(-1)
    expected = {
        "divergence": reference_divergence("reverse_kl", soft_p, soft_q).sum(),
        "forward_kl": reference_divergence("forward_kl", p, q).sum(),
        "agreement": (p.argmax(-1) == q.argmax(-1)).sum(),
        "overlap": torch.minimum(p, q).sum(),
        "student_cross_entropy": -logits.double().log_softmax(-1)[range(len(logits)), labels[kept]].sum(),
        "teacher_cross_entropy": -whole[known].log()[range(int(known.sum())), labels[kept][known]].sum(),
        "nonfinite_teacher_rows": torch.zeros(()),
        "weight": kept.sum(),
    }
    for sums in (case.plain(labels, objective), case.fused(labels, objective, chunk_rows=2)):
        found = sums_of(sums)
        found.pop("loss")
        assert found == pytest.approx({name: float(value) for name, value in expected.items()}, rel=1e-5)


def test_unneeded_gradients_are_not_computed() -> None:
    case = Case(student=70, teacher=70)
    labels, objective = labels_of("none", 7, 70), TokenObjective()
    with torch.no_grad():
        evaluated = case.fused(labels, objective)
    assert not evaluated.loss.requires_grad
    assert evaluated.loss == case.fused(labels, objective).loss
    frozen = Case(student=4000, teacher=4, rows=2, trained=False)
    with ByteMeter() as meter:
        meter.label([frozen.weight], "other")
        before = meter.reading().current_bytes
        meter.enter("forward")
        frozen.fused(labels_of("none", 2, 4), objective, chunk_rows=1)
    assert meter.reading().peak_bytes - before < 4 * 4000 * WIDTH, "a frozen head needs no gradient as large as it"


def test_second_backward_pass_is_rejected() -> None:
    case = Case(student=70, teacher=70)
    sums = case.fused(labels_of("none", 7, 70), TokenObjective())
    sums.loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="frees its gradients"):
        sums.loss.backward()


@pytest.mark.parametrize("label", [70, -1])
def test_labels_beyond_the_vocabulary_are_rejected(label: int) -> None:
    case = Case(student=70, teacher=90)
    labels = torch.tensor([0, 1, label, 3, -100, 5, 6])
    for call in (case.plain, case.fused):
        with pytest.raises(UsageError, match=rf"labels.*{label}"):
            call(labels, TokenObjective())


@pytest.mark.parametrize("kind", KINDS)
def test_top_k_divergence_is_over_bins(kind: Any) -> None:
    for k, tau in ((1, 1.0), (8, 2.0), (60, 1.0)):
        case = Case(student=73, teacher=60, rows=9)
        objective = TokenObjective(alpha=0.8, temperature=tau, divergence=kind, mixture=MIXTURE, vocab_size=60)
        labels = labels_of("partly", 9, 60)
        targets = top_k_targets(case.taught().logits_NV.detach(), k, tau, vocab_size=60)
        exact = case.head.logits(case.hidden).detach().double().requires_grad_()
        p = (case.taught().logits_NV.double()[:, :60] / tau).softmax(-1)
        q = (exact[:, :60] / tau).softmax(-1)
        order = p.argsort(dim=-1, descending=True)
        p, q = p.gather(1, order), q.gather(1, order)
        soft = reference_divergence(kind, *(torch.cat([x[:, :k], x[:, k:].sum(-1, keepdim=True)], 1) for x in (p, q)))
        if k == 60:
            soft = reference_divergence(kind, p, q)
        hard = torch.nn.functional.cross_entropy(exact, labels, reduction="none")
        expected = ((0.2 * hard + 0.8 * tau**2 * soft) * (labels != -100)).sum()
        plain, fused = case.plain(labels, objective, targets), case.fused(labels, objective, targets, chunk_rows=2)
        (wanted,) = torch.autograd.grad(expected, exact)
        for sums in (plain, fused):
            assert_near(sums.loss, expected, 1e-5, (kind, k, tau))
            assert_near(
                torch.autograd.grad(sums.loss, case.hidden)[0], wanted @ case.weight.double(), 1e-4, (kind, k, tau)
            )
        assert sums_of(fused) == pytest.approx(sums_of(plain), rel=1e-5)


def test_tiny_tail_keeps_its_precision() -> None:
    logits = torch.tensor([[30.0, 29.0, -4.0, -5.0]])
    student, _ = binned(logits.log_softmax(-1), top_k_targets(logits, 2, 1.0))
    expected = logits.double().log_softmax(-1)[:, 2:].logsumexp(-1)
    assert torch.allclose(student[:, -1].double(), expected, rtol=1e-6)
    student, _ = binned(logits.log_softmax(-1), top_k_targets(logits, 9, 1.0))
    assert student[:, -1].tolist() == [-torch.inf]


def test_unsuitable_top_k_is_rejected() -> None:
    case = Case(student=70, teacher=90)
    labels, logits = labels_of("none", 7, 70), torch.randn(7, 90)
    logits[3, 88] = 50.0
    for call in (case.plain, case.fused):
        with pytest.raises(UsageError, match=r"2\.0.*1\.0"):
            call(labels, TokenObjective(temperature=2.0), top_k_targets(logits, 4, 1.0, 70))
        with pytest.raises(UsageError, match=r"88.*70.*vocab_size=70"):
            call(labels, TokenObjective(), top_k_targets(logits, 4, 1.0))


def step_of(case: Case, divergence: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    labels, objective = labels_of("partly", 7, 70), TokenObjective(alpha=0.3, temperature=2.0, divergence=divergence)
    sums = case.fused(labels, objective, LogitTargets(logits_NV=torch.randn(7, 70)))
    return [*torch.autograd.grad(sums.loss, [case.hidden, case.head.weight_VH]), *sums.rows.values()]


@pytest.mark.full
@pytest.mark.once
def test_compiled_kernels_equal_the_uncompiled_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = step_of(Case(student=70, teacher=70), "jsd")
    monkeypatch.setattr(fused_loss, "_COMPILED_DEVICES", ("cpu",))
    monkeypatch.setattr(fused_loss, "_kernels", fused_loss._Kernels())
    compiled = step_of(Case(student=70, teacher=70), "jsd")
    assert fused_loss._kernels.usable
    for own, reference in zip(compiled, expected, strict=True):
        assert_near(own, reference, 1e-6, "jsd")


def test_16_bit_head_gradients_are_cast_within_their_memory() -> None:
    weight = torch.zeros(5 * 1024 + 3, 16, dtype=torch.bfloat16)
    gradient, sums = fused_loss._empty_head_gradient(weight)
    values = torch.randn(len(weight), 16)
    for part, rows in zip(sums, values.split([len(part) for part in sums]), strict=True):
        part.copy_(rows)
    fused_loss._scale_into(gradient, sums, torch.tensor(0.3))
    assert torch.equal(gradient, (values * torch.tensor(0.3)).bfloat16())
    assert sums[0].untyped_storage().data_ptr() == gradient.untyped_storage().data_ptr()


def test_without_a_compiler_the_loss_runs_uncompiled_and_warns_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = step_of(Case(student=70, teacher=70), "jsd")
    kernels = fused_loss._Kernels()

    def failing(*_: object, **__: object) -> None:
        raise torch._dynamo.exc.BackendCompilerFailed(failing, RuntimeError("no C compiler"), None)

    monkeypatch.setattr(fused_loss, "_COMPILED_DEVICES", ("cpu",))
    monkeypatch.setattr(fused_loss, "_kernels", kernels)
    kernels.__dict__["_compiled"] = failing
    for _ in range(2):
        for own, reference in zip(step_of(Case(student=70, teacher=70), "jsd"), expected, strict=True):
            assert torch.equal(own, reference)
    assert [record.message for record in caplog.records if "no C compiler" in record.message] == [caplog.messages[0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.full)])
def test_peak_bytes_follow_the_formula(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fused_loss.BLOCK_BYTES, "cpu", 40_000)
    sizes = ((256, 64, 1000), (100, 128, 3000))
    for (rows, width, columns), trains, chunk, cap in product(sizes, (True, False), (None, 32), (None, 5.0)):
        hidden = torch.randn(rows, width).to(dtype).requires_grad_()
        head = OutputHead(weight_VH=torch.randn(columns, width).to(dtype).requires_grad_(trains), soft_cap=cap)
        other = OutputHead(weight_VH=torch.randn(columns, width).to(dtype), soft_cap=cap)
        targets = HiddenTargets(hidden_NH=torch.randn(rows, width).to(dtype), head=other)
        labels = torch.randint(0, columns, (rows,))
        with ByteMeter() as meter:
            meter.label([hidden, head.weight_VH, other.weight_VH, targets.hidden_NH, labels], "other")
            before = meter.reading().current_bytes
            meter.enter("forward")
            sums = fused_token_loss(hidden, head, labels, targets, TokenObjective(temperature=2.0), chunk_rows=chunk)
            meter.enter("backward")
            sums.loss.backward()
        expected = fused_peak_bytes(
            rows=rows,
            hidden_width=width,
            columns=columns,
            element_bytes=dtype.itemsize,
            teacher_element_bytes=dtype.itemsize,
            trains_head=trains,
            soft_cap=cap is not None,
            chunk_rows=chunk,
            device="cpu",
        )
        assert meter.reading().peak_bytes - before == pytest.approx(expected, rel=0.01), (rows, width, trains, cap)
