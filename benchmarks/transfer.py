"""What each objective adds to the same pre-trained encoder, in as many steps: real text, end to end, several seeds.

    python benchmarks/transfer.py --data SHARED_DATA --out DIR [--langs de zh] [--seeds 0 1 2] [--arms mlm tlm ...]

For each language a tiny encoder (2 layers, 128 wide) is trained once by MLM on it and English: Wikipedia, and the two
sides of Tatoeba's pairs as monolingual text; its attention has a gain of 1, so that [CLS] tells sentences apart. From
it, each arm trains the same number of steps at the same learning rate, without dropout, on the same pairs: those with
10 word pieces or more a side and 128 or less together, as PPA's (Pan et al. 2021, 3.1). `mlm` reads their sides without
the pairing; a seed decides order, masks and new heads.
Prints means and standard deviations over seeds of:
sentence retrieval on the LASER Tatoeba test, whose pairs are not in the training data (accuracy of both directions, by
the mean, by [CLS], and of the mean at the best layer), the alignment score of the input embeddings on MUSE's words, of
those withheld from every arm and of the others, and the TLM loss on the test pairs. Every part is a command of
docs/; one that is complete is not repeated. `--code DIR` trains and exports with another checkout, and measures with
this one. Needs the optional extra `align`.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from itertools import product
from pathlib import Path

from common import print_table

ROOT = Path(__file__).resolve().parent.parent
ARMS = {
    "mlm": {"recipe": "mlm", "streams.mlm.samples": 24},
    "tlm": {"recipe": "tlm", "streams.tlm.samples": 128},
    "ppa": {"recipe": "ppa", "streams.ppa.samples": 128, "streams.ppa.queue_size": 4096, "streams.ppa.momentum": 0.99},
    "alignlm": {"recipe": "alignlm", "streams.alignlm.samples": 128},
    "contextual": {"recipe": "contextual", "streams.contextual.samples": 128, "train.max_grad_norm": 1.0},
    "align_mlm": {"recipe": "align_mlm", "streams.align_mlm.samples": 24, "streams.align_mlm.pairs_per_step": 4096},
    "mixed": {"recipe": "mixed", "streams.ppa.momentum": 0.99},
}
"""Recipe and fields of each arm; about 128 pairs, or as much text, a step."""
CODES = {"de": "deu", "fr": "fra", "zh": "cmn"}
COLUMNS = ("mean", "CLS", "best layer", "withheld", "trained words", "TLM loss")


class Bench:
    """The commands of one language."""

    def __init__(self, args: argparse.Namespace, lang: str):
        self.args, self.lang = args, lang
        self.given, self.out = args.data.resolve(), args.out.resolve() / lang
        self.lexicon = self.given / f"lexicon/muse/en-{lang}.txt.xz"

    def run(self, code: Path, *words: object) -> None:
        print("$", *words, flush=True)
        environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(code)}
        subprocess.run([sys.executable, *map(str, words)], check=True, cwd=code, env=environment)

    def make_data(self) -> None:
        code, write, pair = self.args.code, ("-m", "data_tools.write_shards"), ("en", self.lang)
        texts = {side: self.given / f"parallel/tatoeba/en-{self.lang}.{side}.xz" for side in pair}
        for side, text in texts.items():
            out = self.out / f"mono/tatoeba_{side}"
            if not (out / "index.json").exists():
                self.run(code, *write, "mono", "--text", text, "--lang", side, "--whole_lines", "--out", out)
            out, wiki = self.out / f"mono/wiki_{side}", sorted((self.given / f"mono/wiki_{side}").glob("*.xz"))[:10]
            if not (out / "index.json").exists():
                self.run(code, *write, "mono", "--text", *wiki, "--lang", side, "--out", out)
        if not (self.out / "test/index.json").exists():
            test = self.given / f"eval/tatoeba/tatoeba.{CODES[self.lang]}-eng"
            files = ("--src", f"{test}.eng.xz", "--tgt", f"{test}.{CODES[self.lang]}.xz", "--langs", *pair)
            self.run(ROOT, *write, "pairs", *files, "--out", self.out / "test")
        tokenizer, pairs = self.out / "tokenizer", self.out / "pairs/tatoeba"
        if not tokenizer.exists():
            words = ("-m", "data_tools.tokenizer", "--data", self.out / "mono", "--vocab_size", 12000)
            self.run(code, *words, "--out", tokenizer)
        if not (pairs / "index.json").exists():
            files = ("--src", texts["en"], "--tgt", texts[self.lang], "--langs", *pair, "--out", pairs, "--align")
            lengths = ("--tokenizer", tokenizer, "--min_tokens", 10, "--max_tokens", 128)
            self.run(code, *write, "pairs", *files, *lengths)

    def train(self, name: str, seed: int, recipe: str, steps: int, data: list[Path], fields: dict[str, object]) -> None:
        run, hf = self.out / f"runs/{name}.{seed}", self.hf(name, seed)
        if (hf / "config.json").exists():
            return
        fields = fields | {"model.tokenizer": self.out / "tokenizer", "checkpoint.every": steps, "data.workers": 1}
        sets = [f"{key}={value}" for key, value in fields.items()]
        command = ["xscale/train.py", "--ds_config", "ds_configs/zero2_cpu.json", "--recipe", recipe, "--data", *data]
        self.run(self.args.code, *command, "--out", run, "--steps", steps, "--seed", seed, "--set", *sets)
        self.run(self.args.code, "-m", "xscale.export", run, hf)

    def hf(self, name: str, seed: int) -> Path:
        return self.out / f"hf/{name}.{seed}"

    def pretrain(self) -> None:
        mono = sorted((self.out / "mono").iterdir())
        fields = {"model.preset": "tiny", "model.attention_gain": 1.0, "model.dropout": 0.0, "train.lr": 1e-3}
        self.train("pretrained", 0, "mlm", self.args.pretrain, mono, fields)

    def arm(self, name: str, seed: int) -> None:
        fields: dict[str, object] = dict(ARMS[name])
        recipe = str(fields.pop("recipe"))
        fields |= {"model.init": self.hf("pretrained", 0), "model.dropout": 0.0, "train.lr": self.args.lr}
        fields |= {"data.lexicons": f"[{self.lexicon}]", "train.measure_every": 0}
        sides, pairs = [self.out / f"mono/tatoeba_{side}" for side in ("en", self.lang)], self.out / "pairs/tatoeba"
        data = {"mlm": sides, "align_mlm": sides, "mixed": [*sides, pairs]}.get(name, [pairs])
        self.train(name, seed, recipe, self.args.steps, data, fields)

    def scores(self, name: str, seed: int) -> list[float]:
        """Of COLUMNS."""
        path = self.out / f"scores/{name}.{seed}.json"
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            tasks = ("--task", "retrieval", "alignment", "heldout", "--data", self.out / "test")
            read = sorted((self.out / f"runs/{name}.{seed}/lexicon").glob("*.txt")) or [self.lexicon]
            how = ("--pooling", "mean", "cls", "--layer", "all", "--lexicons", *read, "--lexicon_heldout", 0.2)
            self.run(ROOT, "-m", "xscale.eval.run", "--model", self.hf(name, seed), *tasks, *how, "--out", path)
        found = json.loads(path.read_text())["results"]
        rows = {row: scores["accuracy"] for row, scores in found["retrieval"].items()}
        of = {pooling: [value for row, value in rows.items() if pooling in row] for pooling in ("mean", "cls")}
        (words,), (heldout,) = found["alignment"].values(), found["heldout"].values()
        aligned = [words.get(f"en->{self.lang}{kind}", 0.0) for kind in ("", " trained")]
        retrieved = [of["mean"][-1], of["cls"][-1], max(of["mean"])]
        return [*(100 * value for value in retrieved + aligned), heldout["tlm_loss"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with parallel/, mono/, lexicon/, eval/")
    parser.add_argument("--out", type=Path, required=True, help="shards, runs and models go here")
    parser.add_argument("--code", type=Path, default=ROOT, help="checkout that writes shards, trains and exports")
    parser.add_argument("--langs", nargs="+", choices=CODES, default=["de", "zh"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--pretrain", type=int, default=1000, help="steps of the common MLM pre-training")
    parser.add_argument("--steps", type=int, default=400, help="steps of each arm")
    parser.add_argument("--lr", type=float, default=2e-3, help="of each arm")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    args = parser.parse_args()
    args.code = args.code.resolve()
    for lang in args.langs:
        Bench(args, lang).make_data()
        Bench(args, lang).pretrain()
    for seed, lang in product(args.seeds, args.langs):
        bench = Bench(args, lang)
        for name in args.arms:
            bench.arm(name, seed)
        print_language(bench, args.seeds[: args.seeds.index(seed) + 1])


def print_language(bench: Bench, seeds: list[int]) -> None:
    rows = []
    for name in ("pretrained", *bench.args.arms):
        of_name = [0] if name == "pretrained" else seeds
        columns = zip(*(bench.scores(name, seed) for seed in of_name), strict=True)
        digits = [1] * 5 + [2]
        rows.append([name, *(spread(values, n) for values, n in zip(columns, digits, strict=True))])
    title = (
        f"en-{bench.lang}: {bench.args.pretrain} steps of MLM, then {bench.args.steps} of each; {len(seeds)} seed(s)"
    )
    print_table(title, ["", *COLUMNS], rows)


def spread(values: tuple[float, ...], digits: int) -> str:
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.{digits}f} ± {deviation:.{digits}f}"


if __name__ == "__main__":
    main()
