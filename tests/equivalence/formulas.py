"""The steps of a training run in fp64, sample by sample, from the formulas: independent of Trainers and engines."""

from __future__ import annotations

from typing import Any

import torch
from equivalence.cases import ADAM_EPSILON, IGNORED, MAX_GRAD_NORM, MICRO_STEP_SAMPLES, STEPS, Case, make_model, padded
from equivalence.settings import Z_WEIGHT, make_teacher, run_of


def computed(case: Case) -> dict[str, Any]:
    """Return losses, gradient norms and weights of a run whose samples are read in order.

    A loss that is a mean over the labels of a batch is that of all samples of the step. Else

    loss = sum over labelled tokens of [(1 - e) CE + e mean CE] / count, plus the balance loss of its micro-batches;
    with a teacher (1 - a) CE + a t² KL(teacher || student).
    """
    run = run_of(case, "")
    model = make_model(case.family, run.sizes).double()
    for change in run.change_model:
        model = change(model).double()
    model.set_experts_implementation("eager")
    teacher = make_teacher(case, run).double() if run.distillation else None
    decayed = [each for each in model.parameters() if each.dim() > 1]
    others = [each for each in model.parameters() if each.dim() <= 1]
    groups = [
        {"params": decayed, "weight_decay": run.arguments["weight_decay"]},
        {"params": others, "weight_decay": 0.0},
    ]
    rate = run.arguments["learning_rate"]
    if run.arguments["optim"] == "sgd":
        optimizer: Any = torch.optim.SGD(groups, lr=rate)
    else:
        optimizer = torch.optim.AdamW(groups, lr=rate, eps=ADAM_EPSILON)
    losses, norms, divergences = [], [], []
    rows_of_a_step = MICRO_STEP_SAMPLES * case.accumulation
    for step in range(STEPS):
        rows = run.data[step * rows_of_a_step : (step + 1) * rows_of_a_step]
        count = 0 if run.change_model else sum(int((row["labels"][1:] != IGNORED).sum()) for row in rows)
        sums = [] if run.change_model else [_loss_of_sample(model, teacher, row, run) for row in rows]
        total = sum(loss for loss, _ in sums) / max(count, 1)
        divergences.append(sum(kl for _, kl in sums) / max(count, 1))
        if run.sizes.get("output_router_logits"):
            total = total + run.sizes["router_aux_loss_coef"] * _balance_loss(model, rows, case.accumulation)
        if run.change_model:
            total = model(**_in_fp64(run.collator(rows))).loss
        total.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        for group in optimizer.param_groups:
            group["lr"] = rate * (1 - step / STEPS)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total.detach()))
        norms.append(float(norm))
    return {"losses": losses, "grad_norms": norms, "kl_per_token": divergences, "weights": model.state_dict()}


def _in_fp64(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}


def _loss_of_sample(model: Any, teacher: Any, row: dict[str, Any], run: Any) -> tuple[torch.Tensor, float]:
    """Return the sums over the labelled tokens of a sample: the loss, and the divergence from the teacher."""
    labels_T = row["labels"][1:]
    kept = labels_T != IGNORED
    logits_TV = model(row["input_ids"][None]).logits[0, :-1][kept].double()
    log_q = torch.log_softmax(logits_TV, -1)
    smoothed = run.arguments.get("label_smoothing_factor", 0.0)
    own = -(1 - smoothed) * log_q.gather(1, labels_T[kept][:, None]).sum() - smoothed * log_q.mean(-1).sum()
    if teacher is None:
        return own, 0.0
    alpha, temperature = run.distillation["alpha"], run.distillation["temperature"]
    width = logits_TV.shape[1]
    with torch.no_grad():
        taught_TV = teacher(row["input_ids"][None]).logits[0, :-1][kept].double()[:, :width]
    p, log_q = torch.softmax(taught_TV / temperature, -1), torch.log_softmax(logits_TV / temperature, -1)
    if run.distillation.get("divergence") == "reverse_kl":
        divergence = (log_q.exp() * (log_q - p.log())).sum()
    else:
        divergence = (p * (p.log() - log_q)).sum()
    loss = (1 - alpha) * own + alpha * temperature**2 * divergence
    if "own_term" in run.case.settings:
        loss = loss + Z_WEIGHT * (torch.logsumexp(logits_TV, -1) ** 2).sum()
    at_one = torch.softmax(taught_TV, -1)
    return loss, float((at_one * (at_one.log() - torch.log_softmax(logits_TV.detach(), -1))).sum())


def _balance_loss(model: Any, rows: list[dict[str, Any]], accumulation: int) -> Any:
    """Return the mean over micro-batches of E times the sum over experts of (share of choices) (mean probability)."""
    total: Any = 0.0
    for first in range(0, len(rows), MICRO_STEP_SAMPLES):
        batch = padded(rows[first : first + MICRO_STEP_SAMPLES])
        seen = batch["attention_mask"].bool().flatten()
        outputs = model(batch["input_ids"], attention_mask=batch["attention_mask"], output_router_logits=True)
        probabilities_NE = torch.cat([torch.softmax(each[seen].double(), -1) for each in outputs.router_logits])
        experts = probabilities_NE.shape[1]
        chosen_NKE = torch.nn.functional.one_hot(probabilities_NE.topk(2).indices, experts).double()
        total = total + experts * (chosen_NKE.mean(0) * probabilities_NE.mean(0)).sum()
    return total / accumulation
