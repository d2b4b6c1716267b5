"""The data of a grid's cells, made by the public tools: a derived language, or two real ones.

A world's folder has tokenizer/, shards/{mono,pairs}/ (and sides/: the pairs' texts without the pairing), heldout/, the
dictionaries lexicon/ (for training), withheld/ (words that no cell sees) and all/, and files for fine-tuning.
"""

import json
import lzma
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from xscale.errors import UserError

Run = Callable[..., None]
"""Runs `python` with its arguments as the command line."""
DERIVE = Path(__file__).parent / "derive.py"
WRITE = ("-m", "data_tools.write_shards")
DICTIONARY, PARALLEL = 0.25, 0.25
"""The shares of the vocabulary that the dictionary has, and of the lines that become pairs (Tang et al., G.3, G.4)."""


def make_world(spec: dict[str, Any], scale: dict[str, Any], data: Path, out: Path, run: Run) -> None:
    """Make a world in the folder `out`, which appears only when it is complete."""
    if out.exists():
        return
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    (make_derived if "how" in spec else make_real)(spec, scale, data, partial, run)
    partial.rename(out)


def make_derived(spec: dict[str, Any], scale: dict[str, Any], data: Path, out: Path, run: Run) -> None:
    """Make a world of English and a language derived from it. Every n-th line is held out from all cells."""
    source, syn = data / spec["text"], spec["how"].endswith("syn")
    parses = read_blocks(source) if syn else []
    lines = [text_of(block) for block in parses] if syn else read(source)
    chosen = [number for number, line in enumerate(lines) if line.strip()][: scale["lines"]]
    held = set(chosen[:: max(len(chosen) // scale["heldout"], 1)][: scale["heldout"]])
    parts = {"train": [n for n in chosen if n not in held], "heldout": sorted(held)}
    for name, numbers in parts.items():
        write(out / f"text/{name}.en.txt", [lines[number] for number in numbers])
    if syn:  # in the order in which derive reads the texts
        write(out / "text/parses.conllu", [parses[n] + "\n" for numbers in parts.values() for n in numbers])
    run("-m", "data_tools.tokenizer", "--text", out / "text/train.en.txt", "--lowercase", "--vocab_size",
        scale["vocab"], "--out", out / "english")  # fmt: skip
    derive = ("--how", spec["how"], "--tokenizer", out / "english", "--overlap", spec.get("overlap", 0.0))
    sides = [[out / f"text/{name}.{lang}.txt" for name in parts] for lang in ("en", "xx")]
    run(DERIVE, "text", *derive, "--in", *sides[0], "--out", *sides[1], "--tokenizer_out",
        out / "tokenizer", "--dictionary_out", out / "ids.txt",
        *(("--conllu", out / "text/parses.conllu") if syn else ()))  # fmt: skip
    for lang, (train, _) in zip(("en", "xx"), sides, strict=True):
        run(*WRITE, "mono", "--text", train, "--lang", lang, "--whole_lines", "--out", out / f"shards/mono/{lang}")
    parallel = round(spec.get("parallel", PARALLEL) * len(parts["train"]))
    for lang, (train, _) in zip(("en", "xx"), sides, strict=True):
        write(out / f"text/parallel.{lang}.txt", read(train)[:parallel])
    for name, place in (("parallel", "shards/pairs/en-xx"), ("heldout", "heldout/en-xx")):
        texts = ("--src", out / f"text/{name}.en.txt", "--tgt", out / f"text/{name}.xx.txt")
        run(*WRITE, "pairs", *texts, "--langs", "en", "xx", "--out", out / place)
    write_words(out)
    split_dictionary(out, "en-xx", spec.get("dictionary", DICTIONARY), run)
    if "pos" in spec:
        files = {part: data / f"{spec['pos']}-{part}.conllu.xz" for part in ("train", "test")}
        moved = [out / f"pos/{part}.xx.conllu" for part in files]
        run(DERIVE, "conllu", *derive, "--in", *files.values(), "--out", *moved)
        tune = {"train": {"en": str(files["train"]), "xx": "pos/train.xx.conllu"}, "test": {"xx": "pos/test.xx.conllu"}}
        write(out / "tasks.json", [json.dumps({"pos": tune})])


def write_words(out: Path) -> None:
    """Write the dictionary all/en-xx.txt: those entries of the id dictionary whose tokens are whole words."""
    vocabulary = json.loads((out / "tokenizer/tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    tokens = {number: token for token, number in vocabulary.items()}
    entries = [[tokens[int(number)] for number in line.split()] for line in read(out / "ids.txt")]
    write(out / "all/en-xx.txt", [f"{a}\t{b}" for a, b in entries if not a.startswith("##") and a.isalpha()])


def split_dictionary(out: Path, pair: str, share: float, run: Run) -> None:
    """Write a dictionary with a share of the words for training, and one of the entries without any of these words."""
    name = f"{pair}.txt"
    run("-m", "data_tools.lexicon", "--dict", out / "all" / name, "--share", share, "--out", out / "lexicon" / name)
    seen = {word for line in read(out / "lexicon" / name) for word in line.split()}
    write(out / "withheld" / name, [line for line in read(out / "all" / name) if not seen & set(line.split())])


def make_real(spec: dict[str, Any], scale: dict[str, Any], data: Path, out: Path, run: Run) -> None:
    """Make a world of two languages: pairs with word links, the sides of the pairs as text, running text if given."""
    langs, pair = spec["langs"], "-".join(spec["langs"])
    for lang in langs:
        write(out / f"text/{lang}.txt", read(data / f"{spec['pairs']}.{lang}.xz")[: scale["lines"]])
        run(*WRITE, "mono", "--text", out / f"text/{lang}.txt", "--lang", lang, "--whole_lines",
            "--out", out / f"shards/sides/{lang}")  # fmt: skip
        if "mono" in spec:
            articles = sorted((data / f"{spec['mono']}_{lang}").glob("*.xz"))[: 1 if scale["lines"] else 10]
            run(*WRITE, "mono", "--text", *articles, "--lang", lang, "--out", out / f"shards/mono/{lang}")
    run("-m", "data_tools.tokenizer", "--data", *sorted((out / "shards").iterdir()), "--vocab_size", 3 * scale["vocab"],
        "--out", out / "tokenizer")  # fmt: skip
    texts = ("--src", out / f"text/{langs[0]}.txt", "--tgt", out / f"text/{langs[1]}.txt", "--langs", *langs)
    lengths = ("--tokenizer", out / "tokenizer", "--min_tokens", scale.get("min_tokens", 10), "--max_tokens", 128)
    given = data / f"{spec['pairs']}.links.xz"
    links = ("--links", given) if given.exists() else ("--align",)
    run(*WRITE, "pairs", *texts, *lengths, *links, "--out", out / f"shards/pairs/{pair}")
    stem, _, ends = spec["test"].partition("{")
    first, second = (data / f"{stem}{end}.xz" for end in ends.partition("}")[0].split(","))
    run(*WRITE, "pairs", "--src", first, "--tgt", second, "--langs", *langs, "--out", out / f"heldout/{pair}")
    run("-m", "data_tools.lexicon", "--dict", data / spec["lexicon"], "--drop_identical",
        "--out", out / f"all/{pair}.txt")  # fmt: skip
    split_dictionary(out, pair, spec.get("dictionary", 0.8), run)
    tasks: dict[str, Any] = {}
    if "pos" in spec:
        train, test = (str(data / spec["pos"][part]) for part in ("train", "test"))
        tasks["pos"] = {"train": {langs[0]: train}, "test": {langs[1]: test}}
    if "ner" in spec:
        ner, dev = (data / f"{spec['ner']}/{part}" for part in ("train", "dev"))  # XTREME's tests have no labels
        tasks["ner"] = {"train": {lang: f"{ner}-{lang}.tsv.xz" for lang in langs},
                        "test": {langs[1]: f"{dev}-{langs[1]}.tsv.xz"}}  # fmt: skip
    if tasks:
        write(out / "tasks.json", [json.dumps(tasks)])


def read(path: Path) -> list[str]:
    """The lines of a text file, plain or .xz. Raises UserError."""
    if not path.is_file():
        raise UserError(f"{path} does not exist; --data is the folder with parallel/, mono/, lexicon/ and eval/")
    raw = path.read_bytes()
    text = (lzma.decompress(raw) if path.suffix == ".xz" else raw).decode()
    return text.removesuffix("\n").split("\n")


def read_blocks(path: Path) -> list[str]:
    return [block for block in "\n".join(read(path)).split("\n\n") if block.strip()]


def text_of(block: str) -> str:
    """The sentence in the comment `# text =` of a block of CoNLL-U. Raises UserError."""
    found = [line.partition("=")[2].strip() for line in block.split("\n") if line.startswith("# text =")]
    if not found:
        raise UserError(f"a sentence of the parses has no `# text =`: {block[:200]!r}; add it, as UD's files have it")
    return found[0]


def write(path: Path, lines: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
