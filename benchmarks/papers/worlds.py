"""The data of a grid's cells, made by the public tools: a derived language, or real ones.

A world's folder has shards/{mono,pairs}/ (and sides/: the pairs' texts without the pairing), heldout/, and files for
fine-tuning, which tasks.json names if there are any. It has tokenizer/, unless all arms go on from an encoder, and the
dictionaries lexicon/ (for training), withheld/ (words that no cell sees) and all/, if it has a dictionary.
"""

import json
import lzma
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xscale.errors import UserError

DERIVE = Path(__file__).parent / "derive.py"
WRITE = ("-m", "data_tools.write_shards")
DICTIONARY = 0.25
PARALLEL = 0.25
"""The shares of the vocabulary that the dictionary has, and of the lines that become pairs (Tang et al., G.3, G.4)."""
REAL_DICTIONARY = 0.8
"""The share of a dictionary of real languages that is for training."""


def make_world(spec: dict[str, Any], scale: dict[str, Any], data: Path, out: Path, run: Callable[..., None]) -> None:
    """Make a world in the folder `out`, which appears only when it is complete. run: runs `python` with its arguments
    as the command line."""
    if out.exists():
        return
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    world = World(spec, scale, data, partial, run)
    if "how" in spec:
        world.write_derived()
    else:
        world.write_real()
    partial.rename(out)


@dataclass
class World:
    """A world that is being made."""

    spec: dict[str, Any]
    scale: dict[str, Any]
    data: Path
    out: Path
    run: Callable[..., None]

    def write_derived(self) -> None:
        """Write a world of English and a language derived from it."""
        train_count = self.write_english()
        text = self.out / "text"
        self.run("-m", "data_tools.tokenizer", "--text", text / "train.en.txt", "--lowercase",
                 "--vocab_size", self.scale["vocab"], "--out", self.out / "english")  # fmt: skip
        how: list[object] = ["--how", self.spec["how"], "--tokenizer", self.out / "english"]
        how += ["--overlap", self.spec.get("overlap", 0.0)]
        parses = ("--conllu", text / "parses.conllu") if (text / "parses.conllu").exists() else ()
        self.run(DERIVE, "text", *how, *parses, "--in", text / "train.en.txt", text / "heldout.en.txt",
                 "--out", text / "train.xx.txt", text / "heldout.xx.txt",
                 "--tokenizer_out", self.out / "tokenizer", "--dictionary_out", self.out / "ids.txt")  # fmt: skip
        parallel = round(self.spec.get("parallel", PARALLEL) * train_count)
        for lang in ("en", "xx"):
            self.write_mono(lang, [text / f"train.{lang}.txt"], f"mono/{lang}", "--whole_lines")
            write(text / f"parallel.{lang}.txt", read(text / f"train.{lang}.txt")[:parallel])
        for name, place in (("parallel", "shards/pairs"), ("heldout", "heldout")):
            self.write_pairs("en-xx", [text / f"{name}.en.txt", text / f"{name}.xx.txt"], place)
        self.write_word_dictionary()
        self.split_dictionary("en-xx", self.spec.get("dictionary", DICTIONARY))
        if "pos" in self.spec:
            stem = f"{self.data}/{self.spec['pos']}"
            english = [f"{stem}-train.conllu.xz", f"{stem}-test.conllu.xz"]
            self.run(DERIVE, "conllu", *how, "--in", *english,
                     "--out", self.out / "pos/train.xx.conllu", self.out / "pos/test.xx.conllu")  # fmt: skip
            train = {"en": english[0], "xx": "pos/train.xx.conllu"}
            self.write_tasks({"pos": {"train": train, "test": {"xx": "pos/test.xx.conllu"}}})

    def write_english(self) -> int:
        """Write text/{train,heldout}.en.txt and, if the text is CoNLL-U, the parses in the order in which derive reads
        these. Returns the number of lines for training."""
        source = self.data / self.spec["text"]
        parses: list[str] = []
        lines = read(source)
        if self.spec["how"].endswith("syn"):
            parses = [block for block in "\n".join(lines).split("\n\n") if block.strip()]
            lines = [text_of(block) for block in parses]
        filled = [number for number, line in enumerate(lines) if line.strip()]
        train, heldout = split(filled[: self.scale["lines"]], self.scale["heldout"])
        write(self.out / "text/train.en.txt", [lines[number] for number in train])
        write(self.out / "text/heldout.en.txt", [lines[number] for number in heldout])
        if parses:
            write(self.out / "text/parses.conllu", [parses[number] + "\n" for number in [*train, *heldout]])
        return len(train)

    def write_word_dictionary(self) -> None:
        """Write all/en-xx.txt: those entries of the dictionary of ids whose tokens are whole words."""
        vocabulary = json.loads((self.out / "tokenizer/tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
        tokens = {str(number): token for token, number in vocabulary.items()}
        words = []
        for line in read(self.out / "ids.txt"):
            first, second = line.split()
            if tokens[first].isalpha():
                words.append(f"{tokens[first]}\t{tokens[second]}")
        write(self.out / "all/en-xx.txt", words)

    def write_real(self) -> None:
        """Write a world of real languages: pairs with word links, the sides of the pairs as text, running text if
        given. Each pair of languages has a file of held-out pairs, or every n-th of its pairs is held out."""
        sides: dict[str, list[Path]] = {}
        for pair, stem in self.spec["pairs"].items():
            self.write_pair_texts(pair, stem)
            for lang in pair.split("-"):
                sides.setdefault(lang, []).append(self.out / f"text/{pair}.{lang}")
        for lang, files in sides.items():
            self.write_mono(lang, files, f"sides/{lang}", "--whole_lines")
            if "mono" in self.spec:
                articles = sorted((self.data / f"{self.spec['mono']}_{lang}").glob("*.xz"))
                self.write_mono(lang, articles[: 1 if self.scale["lines"] else 10], f"mono/{lang}")
        limits: list[object] = []
        if "tokenizer" in self.spec:
            self.run("-m", "data_tools.tokenizer", "--data", *sorted((self.out / "shards").iterdir()),
                     "--vocab_size", self.spec["tokenizer"] * self.scale["vocab"],
                     "--out", self.out / "tokenizer")  # fmt: skip
            limits = ["--tokenizer", self.out / "tokenizer", "--min_tokens", self.scale.get("min_tokens", 10)]
            limits += ["--max_tokens", 128]
        for pair in self.spec["pairs"]:
            texts = [self.out / f"text/{pair}.{lang}" for lang in pair.split("-")]
            links = self.out / f"text/{pair}.links"
            alignment = ["--links", links] if links.exists() else ["--align"]
            self.write_pairs(pair, texts, "shards/pairs", *alignment, *limits)
            heldout = [self.out / f"text/heldout.{pair}.{lang}" for lang in pair.split("-")]
            self.write_pairs(pair, heldout, "heldout")
        for pair, file in self.spec.get("lexicon", {}).items():
            self.run("-m", "data_tools.lexicon", "--dict", self.data / file, "--drop_identical",
                     "--out", self.out / f"all/{pair}.txt")  # fmt: skip
            self.split_dictionary(pair, REAL_DICTIONARY)
        tasks: dict[str, Any] = {}
        for task, parts in self.spec.get("tasks", {}).items():
            tasks[task] = {}
            for part, files in parts.items():
                tasks[task][part] = {lang: str(self.data / name) for lang, name in files.items()}
        self.write_tasks(tasks)

    def write_pair_texts(self, pair: str, stem: str) -> None:
        """Write text/PAIR.{LANGUAGE,links}, and text/heldout.PAIR.{LANGUAGE,links}."""
        langs = pair.split("-")
        columns = {lang: read(self.data / f"{stem}.{lang}.xz")[: self.scale["lines"]] for lang in langs}
        if (self.data / f"{stem}.links.xz").exists():
            columns["links"] = read(self.data / f"{stem}.links.xz")[: self.scale["lines"]]
        train: Sequence[int] = range(len(columns[langs[0]]))
        tests = self.spec.get("heldout", {})
        if pair in tests:
            for lang, file in zip(langs, tests[pair], strict=True):
                write(self.out / f"text/heldout.{pair}.{lang}", read(self.data / file))
        else:
            train, heldout = split(train, self.scale["heldout"])
            for name, lines in columns.items():
                write(self.out / f"text/heldout.{pair}.{name}", [lines[number] for number in heldout])
        for name, lines in columns.items():
            write(self.out / f"text/{pair}.{name}", [lines[number] for number in train])

    def write_mono(self, lang: str, files: list[Path], place: str, *more: object) -> None:
        self.run(*WRITE, "mono", "--text", *files, "--lang", lang, *more, "--out", self.out / "shards" / place)

    def write_pairs(self, pair: str, files: list[Path], place: str, *more: object) -> None:
        texts = ("--src", files[0], "--tgt", files[1], "--langs", *pair.split("-"))
        self.run(*WRITE, "pairs", *texts, *more, "--out", self.out / place / pair)

    def split_dictionary(self, pair: str, share: float) -> None:
        """Write a dictionary with a share of the words for training, and one of the entries without any of these."""
        name = f"{pair}.txt"
        self.run("-m", "data_tools.lexicon", "--dict", self.out / "all" / name, "--share", share,
                 "--out", self.out / "lexicon" / name)  # fmt: skip
        seen = set(" ".join(read(self.out / "lexicon" / name)).split())
        withheld = [line for line in read(self.out / "all" / name) if not seen & set(line.split())]
        write(self.out / "withheld" / name, withheld)

    def write_tasks(self, tasks: dict[str, Any]) -> None:
        write(self.out / "tasks.json", [json.dumps(tasks)])


def split(numbers: Sequence[int], count: int) -> tuple[list[int], list[int]]:
    """Return the numbers for training, and `count` numbers at equal distances that are held out from all cells."""
    heldout = [*numbers[:: max(len(numbers) // count, 1)][:count]]
    return sorted({*numbers} - {*heldout}), heldout


def text_of(block: str) -> str:
    """Return the sentence in the comment `# text =` of a block of CoNLL-U. Raises UserError."""
    for line in block.split("\n"):
        if line.startswith("# text ="):
            return line.partition("=")[2].strip()
    raise UserError(f"a sentence of the parses has no `# text =`: {block[:200]!r}; add it, as UD's files have it")


def read(path: Path) -> list[str]:
    """Return the lines of a text file, plain or .xz. Raises UserError."""
    if not path.is_file():
        raise UserError(f"{path} does not exist; --data is the folder with parallel/, mono/, lexicon/ and eval/")
    raw = path.read_bytes()
    text = (lzma.decompress(raw) if path.suffix == ".xz" else raw).decode()
    return text.removesuffix("\n").split("\n")


def write(path: Path, lines: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
