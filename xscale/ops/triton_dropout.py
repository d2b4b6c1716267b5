"""Dropout masks that GPU kernels compute from counters, and compute again in the backward pass. This module is imported
only on a machine with a GPU."""

import triton
import triton.language as tl


def dropout_mask_arguments(seed: int, dropout: float) -> tuple[int, int, int, float]:
    """Return the arguments of `dropout_mask` after `row`: 64 mixed bits of the seed as two signed 32-bit numbers
    (splitmix64, Steele et al. 2014), the dropout probability in units of 2^-24, and the factor of the elements that are
    kept."""
    z = (seed + 1) * 0x9E3779B97F4A7C15 % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    z ^= z >> 31
    low, high = (word - 2**32 if word >= 2**31 else word for word in (z % 2**32, z >> 32))
    drop = round(dropout * 2**24)
    return low, high, drop, 2**24 / (2**24 - drop)


@triton.jit
def dropout_mask(place, row, low, high, drop, kept):
    """Return a mask in the shape of `place`: 0 with probability drop / 2^24, else `kept`. The index of each place of a
    row is mixed with two 32-bit numbers that depend on the seed and the row (lowbias32, Wellons 2018). This takes about
    10 integer operations, where Philox takes about 80."""
    number = row.to(tl.uint32)
    one = _mix_bits(number * 0x9E3779B1 ^ low.to(tl.uint32, bitcast=True))
    two = _mix_bits(number * 0x85EBCA6B ^ high.to(tl.uint32, bitcast=True))
    x = place.to(tl.uint32) + one
    x = (x ^ (x >> 16)) * 0x7FEB352D ^ two
    x = (x ^ (x >> 15)) * 0x846CA68B
    x = x ^ (x >> 16)
    return tl.where((x >> 8).to(tl.int32) >= drop, kept, 0.0)


@triton.jit
def _mix_bits(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)
