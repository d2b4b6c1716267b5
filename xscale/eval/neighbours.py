"""Nearest neighbours by cosine, computed tile by tile; for retrieval, mining and induction.

Only one tile of the N x M cosines is in memory at a time; only its rows with a new better neighbour are sorted.

Shape letters: N rows of x, M rows of y, H width, k neighbours; of a tile, R rows, C columns, U rows with a new better
neighbour. Rows of x and y are unit vectors.
"""

import torch
from torch import Tensor

TILE = 1024
"""The number of rows, and of columns, of a tile, whose 4 MB fit into a CPU's cache."""


def nearest_both(
    x_NH: Tensor,
    y_MH: Tensor,
    k: int,
    penalties: tuple[Tensor, Tensor] | None = None,
    numbers: tuple[Tensor, Tensor] | None = None,
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """`(x @ y.T - penalties).topk(k, 1)`: scores and rows of y, best first [N, min(k, M)]. Then the same for y among x.

    penalties: what is subtracted for each row of x [N] and of y [M]. numbers: the numbers of the words or sentences in
    the rows of x [N] and of y [M]; rows with the same number are never neighbours.
    """
    N, M = len(x_NH), len(y_MH)
    there, back = NearestSoFar(x_NH, N, min(k, M)), NearestSoFar(x_NH, M, min(k, N))
    for i in range(0, N if k and M else 0, TILE):
        for j in range(0, M, TILE):
            rows, columns = slice(i, i + TILE), slice(j, j + TILE)
            cells = x_NH[rows] @ y_MH[columns].T
            if penalties is not None:
                cells -= penalties[0][rows, None]
                cells -= penalties[1][columns]
            if numbers is not None:
                cells.masked_fill_(numbers[0][rows, None] == numbers[1][columns], -torch.inf)
            there.add_tile(cells, i, j)
            back.add_tile(cells.T.contiguous(), j, i)
    return (there.scores, there.rows), (back.scores, back.rows)


def ratio_margins(x_NH: Tensor, y_MH: Tensor, k: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Ratio margins (Artetxe & Schwenk 2019) of each x and its k nearest rows of y, and these rows; then of y and x:

    ratio(x, y) = cos(x, y) / ((r(x) + r(y)) / 2)        r(x): mean cosine of x with its k nearest of the other list
    """
    (there, rows_there), (back, rows_back) = nearest_both(x_NH, y_MH, k)
    there, back = there.double(), back.double()
    r_N, r_M = there.mean(1), back.mean(1)
    forward, backward = there / ((r_N[:, None] + r_M[rows_there]) / 2), back / ((r_M[:, None] + r_N[rows_back]) / 2)
    return (forward, rows_there), (backward, rows_back)


class NearestSoFar:
    """The k best columns of each of n rows, among the columns that were added so far."""

    def __init__(self, like: Tensor, n: int, k: int):
        self.scores = like.new_full((n, k), -torch.inf)
        self.rows = torch.zeros(n, k, dtype=torch.int64, device=like.device)

    def add_tile(self, cells_RC: Tensor, at: int, first: int) -> None:
        """Add a tile with rows from `at` on and columns from `first` on. Columns come in ascending order."""
        k = self.scores.shape[1]
        better_U = (cells_RC.amax(1) > self.scores[at : at + len(cells_RC), -1]).nonzero()[:, 0]
        cells_UC, at_U = cells_RC[better_U], at + better_U
        # Of equal scores topk takes any, max the first.
        new = cells_UC.max(1, keepdim=True) if k == 1 else cells_UC.topk(min(k, cells_UC.shape[1]), 1)
        scores = torch.cat([self.scores[at_U], new.values], 1)
        rows = torch.cat([self.rows[at_U], first + new.indices], 1)
        scores, order = scores.sort(dim=1, descending=True, stable=True)
        self.scores[at_U], self.rows[at_U] = scores[:, :k], rows.gather(1, order[:, :k])
