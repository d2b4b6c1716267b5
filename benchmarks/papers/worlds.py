"""The data of a grid's cells, made by the public tools: a derived language, or real ones.

A world's folder has shards/{mono,pairs}/ (and sides/: the pairs' texts without the pairing), heldout/, and tasks.json,
which names files for fine-tuning. It has tokenizer/, unless all arms go on from an encoder, and the dictionaries
lexicon/ (for training), withheld/ (words that no cell sees) and all/, if it has a dictionary.
"""

import json
import lzma
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_tools.demo_world import World as DemoWorld
from xscale import files
from xscale.data.words import split_words_and_symbols
from xscale.errors import UserError

DERIVE = Path(__file__).parent / "derive.py"
DICTIONARY = 0.25
PARALLEL = 0.25
"""The shares of the vocabulary that the dictionary has, and of the lines that become pairs (Tang et al., G.3, G.4)."""
REAL_DICTIONARY = 0.8
"""The share of a dictionary of real languages that is for training."""
PAIRS = 500
HELDOUT = 60
PAIR_FILES = {"tatoeba/en-de": "de", "tatoeba/en-fr": "fr", "tatoeba/en-zh": "zh", "multi30k/train": "de"}


def make_world(spec: dict[str, Any], scale: dict[str, Any], data: Path, out: Path, run: Callable[..., None]) -> None:
    """Make a world in the folder `out`, which appears only when it is complete. run: runs `python` with its arguments
    as the command line."""
    if not out.exists():
        with files.atomic_write(out) as partial:
            world = World(spec, scale, data, partial, run)
            if "how" in spec:
                world.write_derived()
            else:
                world.write_real()


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
        english = ("--text", text / "train.en.txt", "--lowercase", "--vocab_size", self.scale["vocab"])
        self.run_tool("tokenizer", "english", *english)
        how: list[object] = ["--how", self.spec["how"], "--tokenizer", self.out / "english"]
        how += ["--overlap", self.spec.get("overlap", 0.0)]
        parses = ("--conllu", text / "parses.conllu") if self.spec["how"].endswith("syn") else ()
        self.run(DERIVE, "text", *how, *parses, "--in", text / "train.en.txt", text / "heldout.en.txt",
                 "--out", text / "train.xx.txt", text / "heldout.xx.txt",
                 "--tokenizer_out", self.out / "tokenizer", "--dictionary_out", self.out / "ids.txt")  # fmt: skip
        parallel = round(self.spec.get("parallel", PARALLEL) * train_count)
        for lang in ("en", "xx"):
            self.write_mono(lang, [text / f"train.{lang}.txt"], f"mono/{lang}", "--whole_lines")
            write(text / f"parallel.{lang}.txt", read(text / f"train.{lang}.txt")[:parallel])
        for name, place in (("parallel", "shards/pairs"), ("heldout", "heldout")):
            self.write_pairs("en-xx", f"text/{name}.{{}}.txt", place)
        self.write_word_dictionary()
        self.split_dictionary("en-xx", self.spec.get("dictionary", DICTIONARY))
        train, test = [f"{self.data}/{self.spec['pos']}-{part}.conllu.xz" for part in ("train", "test")]
        derived = ["pos/train.xx.conllu", "pos/test.xx.conllu"]
        self.run(DERIVE, "conllu", *how, "--in", train, test, "--out", *(self.out / name for name in derived))
        tasks = {"pos": {"train": {"en": train, "xx": derived[0]}, "test": {"xx": derived[1]}}}
        write(self.out / "tasks.json", [json.dumps(tasks)])

    def write_english(self) -> int:
        """Write text/{train,heldout}.en.txt and, if the text is CoNLL-U, the parses in the order in which derive reads
        these. Returns the number of lines for training."""
        lines = read(self.data / self.spec["text"])
        parses: list[str] = []
        if self.spec["how"].endswith("syn"):
            parses = [block for block in "\n".join(lines).split("\n\n") if block.strip()]
            texts = [line for line in lines if line.startswith("# text =")]
            lines = [line.partition("=")[2].strip() for line in texts]
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
        for lang, texts in sides.items():
            self.write_mono(lang, texts, f"sides/{lang}", "--whole_lines")
            if "mono" in self.spec:
                articles = sorted((self.data / f"{self.spec['mono']}_{lang}").glob("*.xz"))
                self.write_mono(lang, articles[: 1 if self.scale["lines"] else 10], f"mono/{lang}")
        limits: list[object] = []
        if "tokenizer" in self.spec:
            size = self.spec["tokenizer"] * self.scale["vocab"]
            shards = sorted((self.out / "shards").iterdir())
            self.run_tool("tokenizer", "tokenizer", "--data", *shards, "--vocab_size", size)
            limits = ["--tokenizer", self.out / "tokenizer", "--min_tokens", self.scale.get("min_tokens", 10)]
            limits += ["--max_tokens", 128]
        for pair in self.spec["pairs"]:
            links = self.out / f"text/{pair}.links"
            alignment = ["--links", links] if links.exists() else ["--align"]
            self.write_pairs(pair, f"text/{pair}.{{}}", "shards/pairs", *alignment, *limits)
            self.write_pairs(pair, f"text/heldout.{pair}.{{}}", "heldout")
        for pair, file in self.spec.get("lexicon", {}).items():
            self.run_tool("lexicon", f"all/{pair}.txt", "--dict", self.data / file, "--drop_identical")
            self.split_dictionary(pair, REAL_DICTIONARY)
        tasks: dict[str, Any] = {}
        for task, parts in self.spec.get("tasks", {}).items():
            tasks[task] = {}
            for part, paths in parts.items():
                tasks[task][part] = {lang: str(self.data / name) for lang, name in paths.items()}
        write(self.out / "tasks.json", [json.dumps(tasks)])

    def write_pair_texts(self, pair: str, stem: str) -> None:
        """Write text/PAIR.{LANGUAGE,links}, and text/heldout.PAIR.{LANGUAGE,links}."""
        langs = pair.split("-")
        columns: dict[str, list[str]] = {}
        for name in (*langs, "links"):
            file = self.data / f"{stem}.{name}.xz"
            if name in langs or file.exists():
                columns[name] = read(file)[: self.scale["lines"]]
        train: Sequence[int] = range(len(columns[langs[0]]))
        tests = self.spec.get("heldout", {})
        if pair in tests:
            for lang, name in zip(langs, tests[pair], strict=True):
                write(self.out / f"text/heldout.{pair}.{lang}", read(self.data / name))
        else:
            train, heldout = split(train, self.scale["heldout"])
            for name, lines in columns.items():
                write(self.out / f"text/heldout.{pair}.{name}", [lines[number] for number in heldout])
        for name, lines in columns.items():
            write(self.out / f"text/{pair}.{name}", [lines[number] for number in train])

    def run_tool(self, name: str, place: str, *words: object) -> None:
        """Run a tool of data_tools that writes to this place of the world."""
        self.run("-m", f"data_tools.{name}", *words, "--out", self.out / place)

    def write_mono(self, lang: str, texts: list[Path], place: str, *options: object) -> None:
        self.run_tool("write_shards", f"shards/{place}", "mono", "--text", *texts, "--lang", lang, *options)

    def write_pairs(self, pair: str, names: str, place: str, *options: object) -> None:
        """Write shards of pairs. names: the path of a side's text in the world, with {} in place of its language."""
        source, target = pair.split("-")
        texts = ("--src", self.out / names.format(source), "--tgt", self.out / names.format(target))
        self.run_tool("write_shards", f"{place}/{pair}", "pairs", *texts, "--langs", source, target, *options)

    def split_dictionary(self, pair: str, share: float) -> None:
        """Write a dictionary with a share of the words for training, and one of the entries without any of these."""
        name = f"{pair}.txt"
        self.run_tool("lexicon", f"lexicon/{name}", "--dict", self.out / "all" / name, "--share", share)
        seen = set(" ".join(read(self.out / "lexicon" / name)).split())
        withheld = [line for line in read(self.out / "all" / name) if not seen & set(line.split())]
        write(self.out / "withheld" / name, withheld)


def split(numbers: Sequence[int], count: int) -> tuple[list[int], list[int]]:
    """Return the numbers for training, and `count` numbers at equal distances that are held out from all cells."""
    heldout = [*numbers[:: max(len(numbers) // count, 1)][:count]]
    return sorted({*numbers} - {*heldout}), heldout


def read(path: Path) -> list[str]:
    """Return the lines of a text file, plain or .xz. Raises UserError."""
    if not path.is_file():
        raise UserError(f"{path} does not exist; --data is the folder with parallel/, mono/, lexicon/ and eval/")
    raw = path.read_bytes()
    text = (lzma.decompress(raw) if path.suffix == ".xz" else raw).decode()
    return text.removesuffix("\n").split("\n")


def write(path: Path, lines: list[str]) -> None:
    files.write_text(path, "".join(line + "\n" for line in lines))


def make_data(folder: Path) -> Path:
    """Make the data of the scale smoke: sentences of the demo world, in files with the names that --data has."""
    if folder.exists():
        return folder
    world = DemoWorld(0)
    pairs = [world.pair(number) for number in range(PAIRS + HELDOUT)]
    english = [spaced(pair[0]) for pair in pairs]
    others = [spaced(pair[1]) for pair in pairs]
    links = [pair[2] for pair in pairs]
    contents = {"parallel/bible/bible.en": english[:PAIRS]}
    contents |= {"parallel/bible/bible.de": english[:PAIRS], "parallel/bible/bible.zh": others[:PAIRS]}
    contents["parallel/bible/bible.links"] = links[:PAIRS]
    for name, language in PAIR_FILES.items():
        contents[f"parallel/{name}.en"] = english[:PAIRS]
        contents[f"parallel/{name}.{language}"] = others[:PAIRS]
        contents[f"parallel/{name}.links"] = links[:PAIRS]
        contents[f"lexicon/muse/en-{language}.txt"] = [f"{a}\t{b}" for a, b in world.dictionary()]
    held = list(zip(english[PAIRS:], others[PAIRS:], links[PAIRS:], strict=True))
    contents |= {"parallel/multi30k/val.en": english[PAIRS:], "parallel/multi30k/val.de": others[PAIRS:]}
    for code in ("deu", "fra", "cmn"):
        contents[f"eval/tatoeba/tatoeba.{code}-eng.eng"] = english[PAIRS:]
        contents[f"eval/tatoeba/tatoeba.{code}-eng.{code}"] = others[PAIRS:]
    contents["eval/wordalign/enfr.src-tgt"] = [f"{a} ||| {b}" for a, b, _ in held]
    contents["eval/wordalign/enfr.gold"] = links[PAIRS:]
    for language in ("es", "it"):
        contents[f"eval/wordalign/xlwa-en-{language}.test.tsv"] = ["\t".join(columns) for columns in held]
    for language in ("en", "de", "fr", "es", "zh"):
        sentences = (english if language == "en" else others)[:PAIRS]
        contents[f"mono/wiki_{language}/aa"] = sentences
        treebanks = ["en_ewt-ud-train", "en_ewt-ud-test"] if language == "en" else [f"{language}_pud-ud-test"]
        for name in treebanks:
            contents[f"eval/pos/{name}.conllu"] = [tagged(sentence) for sentence in sentences]
        for part in ("train", "dev"):
            contents[f"eval/ner/{part}-{language}.tsv"] = [named(sentence) for sentence in sentences[:150]]
    with files.atomic_write(folder) as partial:
        for name, lines in contents.items():
            path = partial / f"{name}.xz"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(lzma.compress("".join(f"{line}\n" for line in lines).encode()))
    return folder


def spaced(text: str) -> str:
    """Return the text with spaces between all words that its links count."""
    return " ".join(split_words_and_symbols([text])[0][0])


def tagged(text: str) -> str:
    """Return a sentence as CoNLL-U. Tags follow from the form of a word; its head is the word before it."""
    lines = [f"# text = {text}"]
    for number, word in enumerate(text.split()):
        tag = "NOUN" if len(word) % 3 else "VERB"
        relation = "obj" if number else "root"
        lines.append(f"{number + 1}\t{word}\t_\t{tag}\t_\t_\t{number}\t{relation}\t_\t_")
    return "\n".join([*lines, ""])


def named(text: str) -> str:
    return "".join(f"{word}\t{'B-PER' if word.istitle() else 'O'}\n" for word in text.split())
