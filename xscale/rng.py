"""Counter-based randomness: every random number is a function of its keys alone (seed, epoch, record, purpose).

The 64-bit hash is the finaliser of splitmix64 (Steele, Lea, Flood 2014). All functions take numpy arrays of uint64, and
their results are the same on all machines and with all versions of numpy.
"""

import hashlib
from typing import NamedTuple

import numpy as np

Key = np.ndarray | np.uint64
"""One 64-bit key, or an array of them."""

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_M1, _M2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31, _S11 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(11)


def key(*names: str | int) -> np.uint64:
    """Return a 64-bit key that is a function of names and numbers, such as `key(seed, "tlm", "mask", epoch)`."""
    digest = hashlib.sha256(repr(names).encode()).digest()
    return np.uint64(int.from_bytes(digest[:8], "little"))


def hash64(key: Key, counter: Key) -> np.ndarray:
    """Return the uint64 hash of each `counter` with `key`. The two arguments broadcast against each other."""
    with np.errstate(over="ignore"):
        x = (np.asarray(counter).astype(np.uint64) + np.uint64(1)) * GOLDEN + key
        x = (x ^ (x >> _S30)) * _M1
        x = (x ^ (x >> _S27)) * _M2
        return x ^ (x >> _S31)


def uniform(key: Key, counter: Key) -> np.ndarray:
    """Return a uniform float64 random number in [0, 1) for each `counter`."""
    return (hash64(key, counter) >> _S11).astype(np.float64) * (1.0 / (1 << 53))


def permutation(key: Key, n: int) -> np.ndarray:
    """Return a random int64 permutation of range(n)."""
    return np.argsort(hash64(key, np.arange(n, dtype=np.uint64)))  # no two hashes are equal


class PermutedPart(NamedTuple):
    """A part of a permutation: the numbers whose hashes have the same first bits."""

    first: int
    """The place of the part's first number in the permutation."""
    ascending: np.ndarray
    """The numbers in ascending order."""
    order: np.ndarray
    """Indices such that ascending[order] is the part."""


def part_of_permutation_at(key: Key, leading_bits: np.ndarray, bits: int, position: int) -> PermutedPart:
    """Return the part of permutation(key, n) that has `position`, in less time and memory than the whole takes.
    leading_bits: the result of leading_bits_of_hashes(key, n, bits)."""
    value = (position << bits) // len(leading_bits)  # hashes are uniform, so the part's first bits are near this value
    first = np.count_nonzero(leading_bits < np.uint8(value))
    while position < first:
        value -= 1
        first -= np.count_nonzero(leading_bits == np.uint8(value))
    while position >= first + (size := np.count_nonzero(leading_bits == np.uint8(value))):
        first += size
        value += 1
    ascending = np.flatnonzero(leading_bits == np.uint8(value))
    return PermutedPart(int(first), ascending, np.argsort(hash64(key, ascending)))


def leading_bits_of_hashes(key: Key, n: int, bits: int) -> np.ndarray:
    """Return the first `bits` bits (1 to 8) of each of hash64(key, range(n)), uint8 [n]."""
    leading = np.empty(n, dtype=np.uint8)
    for start in range(0, n, _CHUNK):
        hashes = hash64(key, np.arange(start, min(start + _CHUNK, n), dtype=np.uint64))
        leading[start : start + _CHUNK] = hashes >> np.uint64(64 - bits)
    return leading


_CHUNK = 1 << 14
"""`leading_bits_of_hashes` computes this many hashes at a time, which fit into a processor's cache."""


def torch_seed(*names: str | int) -> int:
    """Return a seed for `torch.manual_seed`, for one step's dropout or one model's initialisation. names: see `key`."""
    return int(key(*names) >> np.uint64(1))
