"""The data of a grid's cells, made by the public tools: a derived language, or two real ones.

A world's folder has tokenizer/, shards/{mono,pairs}/ (and sides/: the pairs' texts without the pairing), heldout/, the
dictionaries lexicon/ (for training), withheld/ (words that no cell sees) and all/, and files for fine-tuning.
"""

import json
import lzma
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xscale.errors import UserError

Run = Callable[..., None]
"""Runs `python` with its arguments as the command line."""
DERIVE = Path(__file__).parent / "derive.py"
WRITE = ("-m", "data_tools.write_shards")
DICTIONARY = 0.25
PARALLEL = 0.25
"""The shares of the vocabulary that the dictionary has, and of the lines that become pairs (Tang et al., G.3, G.4)."""


def make_world(spec: dict[str, Any], scale: dict[str, Any], data: Path, out: Path, run: Run) -> None:
    """Make a world in the folder `out`, which appears only when it is complete."""
    if out.exists():
        return
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    world = World(spec, scale, data, partial, run)
    if "how" in spec:
        world.derive()
    elif "aer" in spec:
        world.read_pairs()
    else:
        world.read_languages()
    partial.rename(out)


@dataclass
class World:
    """A world that is being made."""

    spec: dict[str, Any]
    scale: dict[str, Any]
    data: Path
    out: Path
    run: Run

    def derive(self) -> None:
        """Make a world of English and a language derived from it. Every n-th line is held out from all cells."""
        train_count = self.write_english()
        text = self.out / "text"
        self.run("-m", "data_tools.tokenizer", "--text", text / "train.en.txt", "--lowercase",
                 "--vocab_size", self.scale["vocab"], "--out", self.out / "english")  # fmt: skip
        how = (
            "--how",
            self.spec["how"],
            "--tokenizer",
            self.out / "english",
            "--overlap",
            self.spec.get("overlap", 0.0),
        )
        parses = ("--conllu", text / "parses.conllu") if (text / "parses.conllu").exists() else ()
        self.run(DERIVE, "text", *how, *parses, "--in", text / "train.en.txt", text / "heldout.en.txt",
                 "--out", text / "train.xx.txt", text / "heldout.xx.txt",
                 "--tokenizer_out", self.out / "tokenizer", "--dictionary_out", self.out / "ids.txt")  # fmt: skip
        parallel = round(self.spec.get("parallel", PARALLEL) * train_count)
        for lang in ("en", "xx"):
            self.write_mono(lang, [text / f"train.{lang}.txt"], f"mono/{lang}", "--whole_lines")
            write(text / f"parallel.{lang}.txt", read(text / f"train.{lang}.txt")[:parallel])
        for name, place in (("parallel", "shards/pairs/en-xx"), ("heldout", "heldout/en-xx")):
            self.write_pairs(text / f"{name}.en.txt", text / f"{name}.xx.txt", ["en", "xx"], place)
        write_words(self.out)
        self.split_dictionary("en-xx", self.spec.get("dictionary", DICTIONARY))
        if "pos" in self.spec:
            train = self.data / f"{self.spec['pos']}-train.conllu.xz"
            test = self.data / f"{self.spec['pos']}-test.conllu.xz"
            moved = [self.out / "pos/train.xx.conllu", self.out / "pos/test.xx.conllu"]
            self.run(DERIVE, "conllu", *how, "--in", train, test, "--out", *moved)
            texts = {"en": str(train), "xx": "pos/train.xx.conllu"}
            self.write_tasks({"pos": {"train": texts, "test": {"xx": "pos/test.xx.conllu"}}})

    def write_english(self) -> int:
        """Write text/{train,heldout}.en.txt and, if the text is CoNLL-U, the parses in the order in which derive reads
        these. Returns the number of lines for training."""
        source = self.data / self.spec["text"]
        syn = self.spec["how"].endswith("syn")
        parses = read_blocks(source) if syn else []
        lines = [text_of(block) for block in parses] if syn else read(source)
        chosen = [number for number, line in enumerate(lines) if line.strip()][: self.scale["lines"]]
        every = max(len(chosen) // self.scale["heldout"], 1)
        heldout = chosen[::every][: self.scale["heldout"]]
        train = sorted({*chosen} - {*heldout})
        write(self.out / "text/train.en.txt", [lines[number] for number in train])
        write(self.out / "text/heldout.en.txt", [lines[number] for number in heldout])
        if syn:
            write(self.out / "text/parses.conllu", [parses[number] + "\n" for number in [*train, *heldout]])
        return len(train)

    def read_languages(self) -> None:
        """Make a world of two languages: pairs with word links, the sides of the pairs as text, running text if
        given."""
        spec = self.spec
        langs = spec["langs"]
        pair = "-".join(langs)
        for lang in langs:
            text = self.out / f"text/{lang}.txt"
            write(text, read(self.data / f"{spec['pairs']}.{lang}.xz")[: self.scale["lines"]])
            self.write_mono(lang, [text], f"sides/{lang}", "--whole_lines")
            if "mono" in spec:
                articles = sorted((self.data / f"{spec['mono']}_{lang}").glob("*.xz"))
                self.write_mono(lang, articles[: 1 if self.scale["lines"] else 10], f"mono/{lang}")
        self.run("-m", "data_tools.tokenizer", "--data", *sorted((self.out / "shards").iterdir()),
                 "--vocab_size", 3 * self.scale["vocab"], "--out", self.out / "tokenizer")  # fmt: skip
        file = self.data / f"{spec['pairs']}.links.xz"
        links = ["--links", file] if file.exists() else ["--align"]
        source, target = (self.out / f"text/{lang}.txt" for lang in langs)
        self.write_pairs(source, target, langs, f"shards/pairs/{pair}", *links, "--tokenizer", self.out / "tokenizer",
                         "--min_tokens", self.scale.get("min_tokens", 10), "--max_tokens", 128)  # fmt: skip
        stem, _, ends = spec["test"].removesuffix("}.xz").partition("{")
        first, second = ends.split(",")
        self.write_pairs(self.data / f"{stem}{first}.xz", self.data / f"{stem}{second}.xz", langs, f"heldout/{pair}")
        self.run("-m", "data_tools.lexicon", "--dict", self.data / spec["lexicon"], "--drop_identical",
                 "--out", self.out / f"all/{pair}.txt")  # fmt: skip
        self.split_dictionary(pair, spec.get("dictionary", 0.8))
        tasks: dict[str, Any] = {}
        if "pos" in spec:
            tasks["pos"] = {"train": {langs[0]: str(self.data / spec["pos"]["train"])}}
            tasks["pos"]["test"] = {langs[1]: str(self.data / spec["pos"]["test"])}
        if "ner" in spec:
            ner = self.data / spec["ner"]  # of dev files: XTREME's tests have no labels
            tasks["ner"] = {"train": {lang: f"{ner}/train-{lang}.tsv.xz" for lang in langs}}
            tasks["ner"]["test"] = {langs[1]: f"{ner}/dev-{langs[1]}.tsv.xz"}
        self.write_tasks(tasks)

    def read_pairs(self) -> None:
        """Make a world of several pairs of languages: pairs with word links, of which every n-th is held out from all
        cells, the sides of the pairs as text, and the files of the tasks."""
        sides: dict[str, list[Path]] = {}
        for pair, stem in self.spec["pairs"].items():
            langs = pair.split("-")
            columns = {lang: read(self.data / f"{stem}.{lang}.xz")[: self.scale["lines"]] for lang in langs}
            file = self.data / f"{stem}.links.xz"
            if file.exists():
                columns["links"] = read(file)[: self.scale["lines"]]
            every = max(len(columns[langs[0]]) // self.scale["heldout"], 1)
            for name, lines in columns.items():
                heldout = lines[::every][: self.scale["heldout"]]
                train = [line for number, line in enumerate(lines) if number % every or number >= every * len(heldout)]
                write(self.out / f"text/{pair}.{name}", train)
                write(self.out / f"text/heldout.{pair}.{name}", heldout)
            links = ["--links", self.out / f"text/{pair}.links"] if file.exists() else ["--align"]
            for name, place, more in ((pair, "shards/pairs", links), (f"heldout.{pair}", "heldout", [])):
                source, target = (self.out / f"text/{name}.{lang}" for lang in langs)
                self.write_pairs(source, target, langs, f"{place}/{pair}", *more)
            for lang in langs:
                sides.setdefault(lang, []).append(self.out / f"text/{pair}.{lang}")
        for lang, files in sides.items():
            self.write_mono(lang, files, f"sides/{lang}", "--whole_lines")
        tasks: dict[str, Any] = {}
        for task, parts in self.spec["tasks"].items():
            tasks[task] = {}
            for part, files in parts.items():
                tasks[task][part] = {lang: str(self.data / name) for lang, name in files.items()}
        self.write_tasks(tasks)

    def write_mono(self, lang: str, files: list[Path], place: str, *more: object) -> None:
        self.run(*WRITE, "mono", "--text", *files, "--lang", lang, *more, "--out", self.out / "shards" / place)

    def write_pairs(self, source: Path, target: Path, langs: list[str], place: str, *more: object) -> None:
        texts = ("--src", source, "--tgt", target, "--langs", *langs)
        self.run(*WRITE, "pairs", *texts, *more, "--out", self.out / place)

    def split_dictionary(self, pair: str, share: float) -> None:
        """Write a dictionary with a share of the words for training, and one of the entries without any of these."""
        name = f"{pair}.txt"
        self.run("-m", "data_tools.lexicon", "--dict", self.out / "all" / name, "--share", share,
                 "--out", self.out / "lexicon" / name)  # fmt: skip
        seen = set(" ".join(read(self.out / "lexicon" / name)).split())
        withheld = [line for line in read(self.out / "all" / name) if not seen & set(line.split())]
        write(self.out / "withheld" / name, withheld)

    def write_tasks(self, tasks: dict[str, Any]) -> None:
        if tasks:
            write(self.out / "tasks.json", [json.dumps(tasks)])


def write_words(out: Path) -> None:
    """Write the dictionary all/en-xx.txt: those entries of the id dictionary whose tokens are whole words."""
    vocabulary = json.loads((out / "tokenizer/tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    tokens = {number: token for token, number in vocabulary.items()}
    words = []
    for line in read(out / "ids.txt"):
        a, b = (tokens[int(number)] for number in line.split())
        if not a.startswith("##") and a.isalpha():
            words.append(f"{a}\t{b}")
    write(out / "all/en-xx.txt", words)


def read(path: Path) -> list[str]:
    """Return the lines of a text file, plain or .xz. Raises UserError."""
    if not path.is_file():
        raise UserError(f"{path} does not exist; --data is the folder with parallel/, mono/, lexicon/ and eval/")
    raw = path.read_bytes()
    text = (lzma.decompress(raw) if path.suffix == ".xz" else raw).decode()
    return text.removesuffix("\n").split("\n")


def read_blocks(path: Path) -> list[str]:
    return [block for block in "\n".join(read(path)).split("\n\n") if block.strip()]


def text_of(block: str) -> str:
    """Return the sentence in the comment `# text =` of a block of CoNLL-U. Raises UserError."""
    found = [line.partition("=")[2].strip() for line in block.split("\n") if line.startswith("# text =")]
    if not found:
        raise UserError(f"a sentence of the parses has no `# text =`: {block[:200]!r}; add it, as UD's files have it")
    return found[0]


def write(path: Path, lines: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
