"""The GPU kernel of the rotation, for the forward and the backward pass. It is imported only on a machine with a GPU,
since Triton is not a required package."""

import torch
import triton
import triton.language as tl
from torch import Tensor


def rotate_into(
    qkv_NX: Tensor, out_NX: Tensor, cos_N11D: Tensor, sin_N11D: Tensor, heads: int, inverse: bool = False
) -> None:
    """Write the rotated queries and keys to `out`, by one kernel launch. Unless `out` is qkv itself, also copy the
    values. inverse: rotate by the opposite angles."""
    assert qkv_NX.is_contiguous() and out_NX.is_contiguous() and cos_N11D.is_contiguous() and sin_N11D.is_contiguous()
    half = cos_N11D.shape[-1] // 2
    parts = 2 if out_NX.data_ptr() == qkv_NX.data_ptr() else 3
    if len(qkv_NX):
        with torch.cuda.device_of(qkv_NX):
            rotate_heads[(len(qkv_NX), parts)](
                qkv_NX, out_NX, cos_N11D, sin_N11D, INVERSE=inverse, **launch_parameters(heads, half)
            )


def launch_parameters(heads: int, half_width: int) -> dict[str, int]:
    """Return the launch parameters. A program processes the queries, keys or values of one token. A lane processes 8
    numbers of each half of a head at a time."""
    room, wide = triton.next_power_of_2(heads), triton.next_power_of_2(half_width)
    warps = min(max(room * wide // 256, 1), 8)
    return {"HEADS": heads, "HALF": half_width, "ROOM": room, "WIDE": wide, "num_warps": warps}


@triton.jit
def rotate_heads(
    qkv,
    out,
    cos,
    sin,
    INVERSE: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    ROOM: tl.constexpr,
    WIDE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    head = tl.arange(0, ROOM)[:, None]
    lane = tl.arange(0, WIDE)[None, :]
    live = (head < HEADS) & (lane < HALF)
    first = (token * 3 + part) * (HEADS * 2 * HALF) + head * (2 * HALF) + lane
    a = tl.load(qkv + first, mask=live, other=0)
    b = tl.load(qkv + first + HALF, mask=live, other=0)
    if part < 2:
        place = token * (2 * HALF) + HALF + lane  # the second half of a head, for which the sine is positive
        c = tl.load(cos + place, mask=lane < HALF, other=0)
        s = tl.load(sin + place, mask=lane < HALF, other=0)
        if INVERSE:
            s = -s
        x = a.to(c.dtype)
        y = b.to(c.dtype)
        a = (x * c - y * s).to(a.dtype)
        b = (y * c + x * s).to(b.dtype)
    tl.store(out + first, a, mask=live)
    tl.store(out + first + HALF, b, mask=live)
