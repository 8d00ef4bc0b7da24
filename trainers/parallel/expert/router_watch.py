"""Reads what the routers of AutoEP's layers do, and adds up what is logged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .balance import RoutedTokens, assigned_to, entropy_sum, loads

if TYPE_CHECKING:
    from torch import Tensor


class RouterWatch:
    """Hooks on routers, quiet outside of `recording`: a forward pass that backward repeats is not counted again.

    Args:
        layers: AutoEP's layers by name, in order.
    """

    def __init__(self, layers: Mapping[str, Any]) -> None:
        self._records: list[RoutedTokens] | None = None
        self._logits: Tensor | None = None
        self._sigmoid = any(layer.router.score_func == "sigmoid" for layer in layers.values())
        self._sums: Tensor | None = None
        self._handles = []
        for layer in layers.values():
            self._handles.append(layer.router.gate.register_forward_hook(self._keep_logits))
            self._handles.append(layer.router.register_forward_hook(self._keep_routing))

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()

    @contextmanager
    def recording(self) -> Iterator[list[RoutedTokens]]:
        """Collect one record for each layer that runs in the block."""
        records: list[RoutedTokens] = []
        self._records = records
        try:
            yield records
        finally:
            self._records, self._logits = None, None

    def add(self, records: list[RoutedTokens], mask_T: Tensor | None) -> None:
        """Add the records of one micro-batch to the sums since the last log, without waiting for the device."""
        import torch

        with torch.no_grad():
            assigned = [assigned_to(routed, mask_T) for routed in records]
            entropy = sum(entropy_sum(routed, mask_T, sigmoid=self._sigmoid) for routed in records)
            tokens = sum(routed.logits_TE.shape[0] if mask_T is None else mask_T.sum() for routed in records)
            dropped = sum(routed.selected_TK.numel() - routed.sent for routed in records)
            scalars = [torch.as_tensor(value, device=assigned[0].device) for value in (entropy, tokens, dropped)]
            # fp64: counts of a long stretch between two logs stay whole numbers.
            found = torch.cat([torch.stack([value.double() for value in scalars]), *(one.double() for one in assigned)])
            self._sums = found if self._sums is None else self._sums + found

    def report(self, sum_over_ranks: Any) -> dict[str, float]:
        """Return what to log about the time since the last call; every rank must call."""
        if self._sums is None:
            return {}
        sums, self._sums = self._sums, None
        sum_over_ranks(sums)
        entropy, tokens, dropped = sums[:3].tolist()
        mean_load, worst_load = loads(sums[3:].view(len(self._handles) // 2, -1))
        return {
            "expert_load": mean_load,
            "expert_load_max": worst_load,
            "router_entropy": entropy / max(tokens, 1.0),
            "dropped_tokens": dropped,
        }

    def _keep_logits(self, module: Any, arguments: Any, output: Any) -> None:
        self._logits = output if self._records is not None else None

    def _keep_routing(self, module: Any, arguments: Any, output: Any) -> None:
        if self._records is None:
            return
        assert self._logits is not None, "the gate runs inside of the router"
        _, selected_TK, sent_E = output
        self._records.append(RoutedTokens(logits_TE=self._logits, selected_TK=selected_TK, sent=sent_E.sum()))
