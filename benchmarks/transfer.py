"""What each objective adds to the same pre-trained encoder, in as many steps: real text, end to end.

    python benchmarks/transfer.py --data SHARED_DATA --out DIR [--pretrain 2000] [--steps 800] [--arms mlm tlm ppa ...]

A tiny encoder (2 layers, 128 wide) is trained by MLM on English and German: Wikipedia, and the two sides of Tatoeba's
pairs as monolingual text. From it, each arm trains the same number of steps at the same learning rate, on the same
Tatoeba pairs; `mlm` reads their sides without the pairing. Prints, before and after: sentence retrieval on the LASER
Tatoeba test (whose pairs are not in the training data; mean-pooled last states, cosine), the alignment score of the
input embeddings on MUSE en-de, of the words that are withheld from every arm and of the others, and masked prediction
on the test pairs. Every part is a command of the README; a part that is complete is not repeated. Needs the optional
extra `align`.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from common import print_table

ROOT = Path(__file__).resolve().parent.parent
ARMS = {
    "mlm": {"recipe": "mlm", "streams.mlm.samples": 24},
    "tlm": {"recipe": "tlm", "streams.tlm.samples": 128},
    "ppa": {"recipe": "ppa", "streams.ppa.queue_size": 8192},
    "ppa_fast": {"recipe": "ppa", "streams.ppa.queue_size": 8192, "streams.ppa.momentum": 0.99},
    "alignlm": {"recipe": "alignlm", "streams.alignlm.samples": 128},
    "mixed": {"recipe": "mixed"},
}
"""Recipe and fields of each arm; about 128 pairs, or as much text, a step.
ppa_fast: at the paper's 0.999 the key encoder follows in a thousand steps, more than an arm has."""


def run(*words: object) -> None:
    print("$", *words, flush=True)
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
    subprocess.run([sys.executable, *map(str, words)], check=True, cwd=ROOT, env=environment)


def make_data(given: Path, out: Path) -> None:
    write = ("-m", "data_tools.write_shards")
    texts = {lang: given / f"parallel/tatoeba/en-de.{lang}.xz" for lang in ("en", "de")}
    tests = {lang: given / f"eval/tatoeba/tatoeba.deu-eng.{code}.xz" for lang, code in (("en", "eng"), ("de", "deu"))}
    if not (out / "pairs/tatoeba/index.json").exists():
        files = ("--src", texts["en"], "--tgt", texts["de"], "--langs", "en", "de")
        run(*write, "pairs", *files, "--out", out / "pairs/tatoeba", "--align")
    for lang, text in texts.items():
        if not (out / f"mono/tatoeba_{lang}/index.json").exists():
            run(*write, "mono", "--text", text, "--lang", lang, "--whole_lines", "--out", out / f"mono/tatoeba_{lang}")
        if not (out / f"mono/wiki_{lang}/index.json").exists():
            wiki = sorted((given / f"mono/wiki_{lang}").glob("*.xz"))
            run(*write, "mono", "--text", *wiki, "--lang", lang, "--out", out / f"mono/wiki_{lang}")
    if not (out / "test/index.json").exists():
        files = ("--src", tests["en"], "--tgt", tests["de"], "--langs", "en", "de")
        run(*write, "pairs", *files, "--out", out / "test")
    if not (out / "tokenizer").exists():
        data = [out / name for name in ("pairs/tatoeba", "mono/wiki_en", "mono/wiki_de")]
        run("-m", "data_tools.tokenizer", "--data", *data, "--out", out / "tokenizer", "--vocab_size", 16000)


def train(name: str, recipe: str, steps: int, data: list[Path], out: Path, fields: dict[str, object]) -> None:
    if (out / f"hf/{name}/config.json").exists():
        return
    fields = fields | {"model.tokenizer": out / "tokenizer", "checkpoint.every": steps, "data.workers": 1}
    sets = [f"{key}={value}" for key, value in fields.items()]
    command = ["xscale/train.py", "--ds_config", "ds_configs/zero2_cpu.json", "--recipe", recipe, "--data", *data]
    run(*command, "--out", out / f"runs/{name}", "--steps", steps, "--set", *sets)
    run("-m", "xscale.export", out / f"runs/{name}", out / f"hf/{name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with parallel/, mono/, lexicon/, eval/")
    parser.add_argument("--out", type=Path, required=True, help="shards, runs and models go here")
    parser.add_argument("--pretrain", type=int, default=2000, help="steps of the common MLM pre-training")
    parser.add_argument("--steps", type=int, default=800, help="steps of each arm")
    parser.add_argument("--lr", type=float, default=2e-3, help="of each arm")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    args = parser.parse_args()
    given, out = args.data.resolve(), args.out.resolve()
    make_data(given, out)
    lexicon = given / "lexicon/muse/en-de.txt.xz"
    mono, pairs = sorted((out / "mono").iterdir()), out / "pairs/tatoeba"
    train("pretrained", "mlm", args.pretrain, mono, out, {"model.preset": "tiny", "train.lr": 1e-3})
    for name in args.arms:
        fields: dict[str, object] = dict(ARMS[name])
        recipe = str(fields.pop("recipe"))
        fields |= {"model.init": out / "hf/pretrained", "train.lr": args.lr, "data.lexicons": f"[{lexicon}]"}
        sides = [out / f"mono/tatoeba_{lang}" for lang in ("en", "de")]
        data = {"mlm": sides, "mixed": [*sides, pairs]}.get(name, [pairs])
        train(name, recipe, args.steps, data, out, fields)
    rows = []
    for name in ("pretrained", *args.arms):
        scores = out / f"scores/{name}.json"
        if not scores.exists():
            tasks = ("--task", "retrieval", "alignment", "heldout", "--data", out / "test", "--lexicons", lexicon)
            run("-m", "xscale.eval.run", "--model", out / f"hf/{name}", *tasks, "--out", scores)
        found = {task: next(iter(each.values())) for task, each in json.loads(scores.read_text())["results"].items()}
        words = [found["alignment"][f"en->de{kind}"] for kind in ("", " trained")]
        values = [found["retrieval"]["accuracy"], *words, found["heldout"]["masked_accuracy"]]
        rows.append([name, *(f"{value:.1%}" for value in values)])
    header = ["", "retrieval, both directions", "alignment, withheld", "alignment, trained", "masked accuracy"]
    print_table(f"{args.pretrain} steps of MLM, then {args.steps} of each", header, rows)


if __name__ == "__main__":
    main()
