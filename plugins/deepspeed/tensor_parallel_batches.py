"""Metrics from one rank of each tensor-parallel group, because all ranks of a group see the same samples.

Seen with accelerate 1.15.0: `gather_for_metrics` collects from every process, and cuts the last batch by the samples
that one group saw.
"""

from __future__ import annotations

from typing import Any


class GroupsOnce:
    """Stands in for `Accelerator.gather_for_metrics`: collects over the data-parallel ranks alone."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def __call__(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Return what every data-parallel rank gave, in the order of the data set, without repeated samples."""
        from accelerate.utils import recursively_apply

        if use_gather_object or not _all_tensors(input_data):
            objects = _gathered_objects(input_data)
            return objects[: self._count(len(objects))]
        gathered = recursively_apply(_gathered_tensor, input_data)
        return recursively_apply(lambda one: one[: self._count(len(one))], gathered)

    def _count(self, all_samples: int) -> int:
        state = self._accelerator.gradient_state
        return state.remainder if state.end_of_dataloader and state.remainder > 0 else all_samples


def _all_tensors(data: Any) -> bool:
    from accelerate.utils import recursively_apply

    try:
        recursively_apply(lambda one: one, data, error_on_other_type=True)
    except TypeError:
        return False
    return True


def _gathered_tensor(tensor: Any) -> Any:
    import torch
    import torch.distributed as dist
    from deepspeed.utils import groups

    group = groups.get_data_parallel_group()
    own = tensor[None] if tensor.dim() == 0 else tensor
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, own.contiguous(), group=group)
    return torch.cat(parts)


def _gathered_objects(data: Any) -> list[Any]:
    import torch.distributed as dist
    from deepspeed.utils import groups

    group = groups.get_data_parallel_group()
    parts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, data, group=group)
    return [one for part in parts for one in part]
