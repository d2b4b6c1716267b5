"""Nearest neighbours by cosine, a part of the rows at a time: what retrieval, mining and induction search with.

Shape letters: N rows that search, M rows that are searched, H width, k neighbours. Rows are unit vectors.
"""

import torch
from torch import Tensor

_CELLS = 1 << 24
"""Of the N x M cosines, so many at a time."""


def nearest(
    x_NH: Tensor,
    y_MH: Tensor,
    k: int,
    penalty_M: Tensor | None = None,
    numbers: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """`(x @ y.T - penalty).topk(k, 1)`: scores and rows of y, best first [N, min(k, M)].

    numbers: of what the rows of x [N] and of y [M] stand for; none is its own neighbour.
    """
    scores, rows = [], []
    step = max(1, _CELLS // max(len(y_MH), 1))
    for start in range(0, len(x_NH), step):
        cells = x_NH[start : start + step] @ y_MH.T
        if penalty_M is not None:
            cells -= penalty_M
        if numbers is not None:
            cells[numbers[0][start : start + step, None] == numbers[1]] = -torch.inf
        best = cells.topk(min(k, len(y_MH)), 1)
        scores.append(best.values)
        rows.append(best.indices)
    none = x_NH.new_empty(0, min(k, len(y_MH)))
    return torch.cat([none, *scores]), torch.cat([none.long(), *rows])
