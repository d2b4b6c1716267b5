"""Gathers vectors from all ranks. Each rank may have a different number of vectors.

Shape letters: N vectors of this rank, V of all ranks, D width of a vector.
"""

import torch
import torch.distributed as dist
from torch import Tensor


def is_only_rank() -> bool:
    """Return whether the run has one rank."""
    return not dist.is_initialized() or dist.get_world_size() == 1


def all_gather_rows(rows_ND: Tensor, row_counts_of_ranks: list[int] | None = None) -> tuple[Tensor, int]:
    """Return the vectors of all ranks [V, D], in the order of ranks, and the index of this rank's first vector. All
    ranks call it together. row_counts_of_ranks: the number of vectors of each rank; None: the ranks first exchange
    these numbers, for which the host waits for the device."""
    if is_only_rank():
        return rows_ND, 0
    if row_counts_of_ranks is None:
        sizes = [torch.zeros(1, dtype=torch.int64, device=rows_ND.device) for _ in range(dist.get_world_size())]
        dist.all_gather(sizes, torch.tensor([len(rows_ND)], device=rows_ND.device))
        row_counts_of_ranks = torch.cat(sizes).tolist()
    rank = dist.get_rank()
    assert row_counts_of_ranks[rank] == len(rows_ND), (row_counts_of_ranks, len(rows_ND))
    padded = rows_ND.new_zeros(max(row_counts_of_ranks), rows_ND.shape[1])
    padded[: len(rows_ND)] = rows_ND
    gathered = [torch.empty_like(padded) for _ in row_counts_of_ranks]
    dist.all_gather(gathered, padded)
    parts = [rows[:count] for rows, count in zip(gathered, row_counts_of_ranks, strict=True)]
    return torch.cat(parts), sum(row_counts_of_ranks[:rank])
