"""Searches nearest neighbours by cosine, tile by tile, for retrieval, mining and induction.

Only one tile of the N x M cosines is in memory at a time; only its rows with a new better neighbour are sorted.

Shape letters: N rows of x, M rows of y, H width, k neighbours; of a tile, R rows, C columns, U rows with a new better
neighbour. Rows of x and y are unit vectors.
"""

import torch
from torch import Tensor

TILE = 1024
"""The rows, and the columns, of a tile, whose 4 MB fit into a CPU's cache."""


def nearest_both(
    x_NH: Tensor,
    y_MH: Tensor,
    k: int,
    penalties: tuple[Tensor, Tensor] | None = None,
    ids: tuple[Tensor, Tensor] | None = None,
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return `(x @ y.T - penalties).topk(k, 1)`: (scores, rows of y), best first [N, min(k, M)]. Then the same for y in
    x.

    penalties: what to subtract for each row of x [N] and of y [M]. ids: the id of the word in each row of x [N] and of
    y [M]; rows with the same id are never neighbours.
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
            if ids is not None:
                cells.masked_fill_(ids[0][rows, None] == ids[1][columns], -torch.inf)
            there.add_tile(cells, i, j)
            back.add_tile(cells.T.contiguous(), j, i)
    return (there.scores, there.columns), (back.scores, back.columns)


def ratio_margins(x_NH: Tensor, y_MH: Tensor, k: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return (ratio margins, rows of y) of the k nearest rows of y [N, min(k, M)]. Then the same for y in x [M, min(k,
    N)].

    ratio(x, y) = cos(x, y) / ((r(x) + r(y)) / 2)        r(x): mean cosine of x with its k nearest rows of y
    """
    (there, rows_there), (back, rows_back) = nearest_both(x_NH, y_MH, k)
    there, back = there.double(), back.double()
    r_N, r_M = there.mean(1), back.mean(1)
    forward, backward = there / ((r_N[:, None] + r_M[rows_there]) / 2), back / ((r_M[:, None] + r_N[rows_back]) / 2)
    return (forward, rows_there), (backward, rows_back)


class NearestSoFar:
    """The k best columns of each of n rows, among the columns that were added so far."""

    def __init__(self, like: Tensor, n: int, k: int):
        """like: a tensor with the scores' dtype and device."""
        self.scores = like.new_full((n, k), -torch.inf)
        self.columns = torch.zeros(n, k, dtype=torch.int64, device=like.device)

    def add_tile(self, cells_RC: Tensor, first_row: int, first_column: int) -> None:
        """Add the scores of a tile. Tiles with the same rows must be added from left to right."""
        k = self.scores.shape[1]
        better_U = (cells_RC.amax(1) > self.scores[first_row : first_row + len(cells_RC), -1]).nonzero()[:, 0]
        cells_UC, rows_U = cells_RC[better_U], first_row + better_U
        # Among equal scores, topk returns any, and max the first.
        new = cells_UC.max(1, keepdim=True) if k == 1 else cells_UC.topk(min(k, cells_UC.shape[1]), 1)
        scores = torch.cat([self.scores[rows_U], new.values], 1)
        columns = torch.cat([self.columns[rows_U], first_column + new.indices], 1)
        scores, order = scores.sort(dim=1, descending=True, stable=True)
        self.scores[rows_U], self.columns[rows_U] = scores[:, :k], columns.gather(1, order[:, :k])
