"""Measure the preparation of a hundred languages in one corpus.yaml, and the start of training on them.

    python benchmarks/hundred_languages.py [--languages 100] [--largest 20000] [--steps 50] [--workers 2]

Each language is an invented one of data_tools/demo_world.py, in a script of its own. Language n has `largest` / n
sentences, as documents in one of four formats. One rank then trains on the prepared corpus with the recipe mlm. Last,
the script compares the languages' shares of the samples that training draws with n^alpha.
"""

import argparse
import gzip
import json
import os
import re
import sys
import tempfile
import time
import unicodedata
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import yaml
from common import print_table

from data_tools.demo_world import World
from xscale.data.mixture import initial_state
from xscale.data.words import split
from xscale.ranks import Process
from xscale.run_spec import resolve_run

LATIN = "abcdefghijklmnopqrstuvwxyz"


def scripts() -> Iterator[dict[int, str]]:
    """Yield a map from Latin letters to each invented script, whose letters have no case and join to words."""
    letters = (chr(code) for code in range(0x620, 0xD7A4) if unicodedata.category(chr(code)) == "Lo")
    usable = (c for c in letters if unicodedata.normalize("NFC", c) == c and len(split([c * 2])[0][0]) == 1)
    while alphabet := list(islice(usable, len(LATIN))):
        yield str.maketrans(LATIN, "".join(alphabet))


def write_language(folder: Path, number: int, script: dict[int, str], sentences: int) -> dict[str, Any]:
    """Write the documents of a language. Returns its entry under `sources` of corpus.yaml."""
    language, world, written, documents = f"q{number:03d}", World(number), 0, []
    while written < sentences:
        texts = [text.lower().translate(script) for text in world.document("xx", len(documents) + 1)]
        documents.append(texts[: sentences - written])
        written += len(documents[-1])
    form = ("doc", "jsonl", "txt", "gz")[number % 4]
    path = folder / f"{language}.{form}"
    if form == "jsonl":
        text = "".join(json.dumps({"text": " ".join(of)}) + "\n" for of in documents)
    elif form == "doc":
        text = "".join(f'<doc id="{n}">\n' + "\n".join(of) + "\n</doc>\n" for n, of in enumerate(documents))
    else:
        text = "\n\n".join("\n".join(of) for of in documents)
    path.write_bytes(gzip.compress(text.encode()) if form == "gz" else text.encode())
    return {"mono": language, ("jsonl" if form == "jsonl" else "text"): str(path)}


def write_corpus(folder: Path, languages: int, largest: int) -> Path:
    """Write raw files and corpus.yaml."""
    (folder / "raw").mkdir()
    numbered = enumerate(islice(scripts(), languages))
    sources = [write_language(folder / "raw", n, script, largest // (n + 1)) for n, script in numbered]
    tree = {
        "sources": sources,
        "rules": {"dedup": "exact", "length": {"characters": [1, 1000]}},
        "tokenizer": {"type": "wordpiece", "vocab_size": 16_000, "alpha": 0.5},
        "heldout": {"mono": 20},
    }
    (folder / "corpus.yaml").write_text(yaml.safe_dump(tree))
    return folder / "corpus.yaml"


class Usage(NamedTuple):
    """The time and memory that the processes of a command have used so far."""

    seconds: float
    cpu: float
    """The CPU seconds of those processes that still run."""
    mb: float
    """The largest resident size of all processes together so far, in MB."""


def run(words: list[str], *patterns: str) -> list[Usage]:
    """Run a command. Returns its usage when its output first matches each pattern, and its usage at the end."""
    started, found, usage = time.perf_counter(), list[Usage](), Usage(0, 0, 0)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with tempfile.NamedTemporaryFile("w") as log:
        process = psutil.Popen([sys.executable, *words], stdout=log, stderr=log, env=environment)
        while process.poll() is None:
            time.sleep(0.05)
            with suppress(psutil.NoSuchProcess):
                all_of_it = [process, *process.children(recursive=True)]
                cpu = sum(sum(each.cpu_times()[:2]) for each in all_of_it)
                memory = max(usage.mb, sum(each.memory_info().rss for each in all_of_it) / 1e6)
                usage = Usage(time.perf_counter() - started, cpu, memory)
            if len(found) < len(patterns) and re.search(patterns[len(found)], Path(log.name).read_text()):
                found.append(usage)
        if process.returncode:
            sys.exit("\n".join(line for line in Path(log.name).read_text().splitlines() if "rror" in line))
    return [*found, usage]


def shares(data: Path, alpha: float, steps: int) -> tuple[float, float]:
    """The largest differences, after `steps` steps, between languages' shares of the samples and n^alpha: in percentage
    points, and in per cent of the share."""
    run_spec = resolve_run("mlm", [f"data.alpha={alpha}"], [data]).calibrated()
    mixture = run_spec.mixture(Process(0, 1, 0, 1), "cpu", run_spec.specs, initial_state(run_spec.specs))
    counts = np.zeros(len(run_spec.sources))
    for _ in range(steps):
        of = mixture.next_batch().records["mlm"]
        first = np.unique(of.sample, return_index=True)[1]
        counts += np.bincount(of.source[first], minlength=len(counts))
    expected = np.array([source.records for source in run_spec.sources]) ** alpha
    expected /= expected.sum()
    found = counts / counts.sum()
    return 100 * np.abs(found - expected).max(), 100 * np.abs(found / expected - 1).max()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--languages", type=int, default=100)
    parser.add_argument("--largest", type=int, default=20_000)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        corpus, out, trained = write_corpus(folder, args.languages, args.largest), folder / "out", folder / "run"
        words = ["-m", "data_tools.prepare", str(corpus), "--out", str(out), "--workers", str(args.workers)]
        rows = [["preparation", *map(cell, run(words)[0])]]
        words = ["-m", "torch.distributed.run", "--nproc_per_node", "1", "--master_port", "29517", "xscale/train.py"]
        words += ["--ds_config", "ds_configs/zero2_cpu.json", "--recipe", "mlm", "--data", str(out / "shards")]
        words += ["--out", str(trained), "--set", f"train.steps={args.steps}"]
        rows += [["--dry_run", *map(cell, run([*words, "--dry_run"])[0])]]
        names = ("training, until imports are done", "until step 1", "until the end")
        for name, usage in zip(names, run(words, "rank 0: host", "step 1/"), strict=True):
            rows.append([name, *map(cell, usage)])
        print_table(f"{args.languages} languages", ["", "seconds", "of CPU", "MB"], rows)
        metrics = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
        losses = {key for line in metrics for key in line if re.fullmatch(r"loss/mlm/q\d+", key)}
        print(f"{len(losses):,} languages have a loss of their own")
        for steps in (args.steps, 40 * args.steps):
            points, relative = shares(out / "shards", 0.7, steps)
            print(f"largest error of a share after {steps:,} steps: {points:.3f} points, {relative:.1f} % of the share")


def cell(number: float) -> str:
    return f"{number:,.1f}"


if __name__ == "__main__":
    main()
