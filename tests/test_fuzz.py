"""Seeded damage of folders of shards: each is refused by a line that names the folder, or read as it was before."""

import json
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests import demo_shards
from xscale.data.shards import find_sources
from xscale.errors import UserError
from xscale.files import map_in_threads

CASES = 90
LONGEST = 6000
"""Characters of a message."""
ODD_VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 3.5, -0.5, 1e308, 10**400, float("nan"), float("inf"), 1e-320, 1 << 40, 1 << 63),
    *("", "auto", "true", "1", "0.5", "3e-4", "x" * 300, "é", "\0", "../..", "cpu", "en", [], [1], [[]], {}, {"a": 1}),
    *([0.9, 0.999], ["en"], ["en-xx"], [None], "nan", "no", "fp16", "bf16"),
]


def damaged(rng: random.Random, data: bytes) -> bytes:
    """Other bytes than `data`."""
    at = rng.randrange(max(len(data), 1))
    size = rng.choice((1, 1, 1, 8, 512))
    how = rng.choice(("flip", "cut", "empty", "zeros", "append", "drop", "double"))
    if how == "flip" and data:
        return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
    if how == "cut" and at < len(data):
        return data[:at]
    if how == "zeros" and data[at : at + size].strip(b"\0"):
        return data[:at] + bytes(len(data[at : at + size])) + data[at + size :]
    if how == "drop" and data:
        return data[:at] + data[at + size :]
    if how == "double" and data:
        return data[: at + size] + data[at : at + size] + data[at + size :]
    if how == "append" or not data:
        return data + rng.choice((b"x", b"\0", b"\n", b"{}", rng.randbytes(600)))
    return b""


def leaves_of(tree: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        yield (*at, key)
        yield from leaves_of(value, (*at, key))


def change_leaf(rng: random.Random, tree: Any) -> None:
    """One value, at any depth, becomes another, goes, or stands under another name."""
    *at, last = rng.choice(list(leaves_of(tree)))
    node = tree
    for key in at:
        node = node[key]
    how = rng.choice(("set", "set", "near", "near", "near", "delete", "rename", "add"))
    if how == "delete":
        del node[last]
    elif how == "near":
        value = node[last]
        if isinstance(value, bool):
            node[last] = not value
        elif isinstance(value, int | float):
            node[last] = rng.choice((value + 1, 2 * value, value / 2, value))
    elif how == "rename" and isinstance(node, dict):
        node[rng.choice((str(last) + "s", str(last)[:-1], str(last).upper(), "x"))] = node.pop(last)
    elif how == "add" and isinstance(node, dict):
        node[rng.choice(("x", "enabled", "steps", "lr", "type", "params"))] = rng.choice(ODD_VALUES)
    else:
        node[last] = rng.choice(ODD_VALUES)


def damage(rng: random.Random, directory: Path) -> str:
    """Change one file of a folder, and say how."""
    path = rng.choice(sorted(directory.iterdir()))
    how = rng.choice(("damage", "damage", "damage", "delete", "copy", "field"))
    if how == "damage":
        path.write_bytes(damaged(rng, path.read_bytes()))
    elif how == "delete":
        path.unlink()
    elif how == "copy":
        shutil.copy(path, directory / f"copy{path.suffix}")
    else:
        path = directory / "index.json"
        tree = json.loads(path.read_text())
        change_leaf(rng, tree)
        path.write_text(json.dumps(tree))
    return f"{how} {path.name}"


def state_of(directory: Path) -> Any:
    """All that a run reads of a folder of shards: names, records, documents."""
    found = []
    for source in find_sources([directory]):
        map_in_threads(source.check_local_file, source.shards)
        for shard, count in enumerate(source.counts.tolist()):
            records = [source.renumber_links_by_xscale_words(source.read(shard, record)) for record in range(count)]
            follows = source.byte_lengths_and_continuations(shard, slice(None))[1].tolist()
            found.append((source.langs_name, records, follows))
    return found


def test_damaged_shards_are_refused_or_read_as_they_were(tmp_path: Path) -> None:
    demo_shards.build(tmp_path / "demo", pairs=60, mono=60)
    outcomes = Counter[str]()
    for seed in range(CASES):
        rng = random.Random(f"shards:{seed}")
        whole = tmp_path / "demo" / rng.choice(("pairs", "mono_en"))
        directory = Path(shutil.copytree(whole, tmp_path / str(seed) / whole.name))
        what = damage(rng, directory)
        try:
            assert state_of(directory) == state_of(whole), f"{seed}, {what}: other records"
            outcomes["read"] += 1
        except UserError as error:
            message = str(error)
            assert str(directory) in message and "Traceback" not in message, f"{seed}, {what}: {message}"
            assert len(message) <= LONGEST, f"{seed}, {what}: {len(message)} characters"
            outcomes["refused"] += 1
    assert outcomes["read"] and outcomes["refused"], "one-sided"
