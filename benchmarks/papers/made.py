"""Makes the data of the scale `smoke`: sentences of the demo world, in files with the names that --data has."""

import lzma
from pathlib import Path

from transformers import BertConfig, BertForMaskedLM

from data_tools import tokenizer as tokenizers
from data_tools.demo_world import World
from xscale.data.words import split_words_and_symbols

PAIRS = 500
HELDOUT = 60
TAGGED = 150
PARALLEL = {
    "parallel/tatoeba/en-de": "de",
    "parallel/tatoeba/en-fr": "fr",
    "parallel/tatoeba/en-zh": "zh",
    "parallel/multi30k/train": "de",
}
TESTS = {
    "eval/tatoeba/tatoeba.deu-eng.": ("eng", "deu"),
    "eval/tatoeba/tatoeba.cmn-eng.": ("eng", "cmn"),
    "eval/tatoeba/tatoeba.fra-eng.": ("eng", "fra"),
    "parallel/multi30k/val.": ("en", "de"),
}
_TAGS = {"the": "DET", "a": "DET", "an": "DET", ".": "PUNCT", ",": "PUNCT", "?": "PUNCT", "!": "PUNCT"}


def make_data(folder: Path) -> Path:
    if (folder / "done").exists():
        return folder
    world = World(0)
    pairs = [world.pair(number) for number in range(PAIRS + HELDOUT)]
    texts = [[spaced(pair[0]) for pair in pairs], [spaced(pair[1]) for pair in pairs]]
    train = [side[:PAIRS] for side in texts]
    held = [side[PAIRS:] for side in texts]
    write(folder / "parallel/bible/bible.en.xz", train[0])
    dictionary = [f"{a}\t{b}" for a, b in world.dictionary()]
    for stem, other in PARALLEL.items():
        write(folder / f"{stem}.en.xz", train[0])
        write(folder / f"{stem}.{other}.xz", train[1])
        write(folder / f"{stem}.links.xz", [pair[2] for pair in pairs[:PAIRS]])
        write(folder / f"lexicon/muse/en-{other}.txt.xz", dictionary)
    for stem, ends in TESTS.items():
        for end, side in zip(ends, held, strict=True):
            write(folder / f"{stem}{end}.xz", side)
    links = [pair[2] for pair in pairs[PAIRS:]]
    write(folder / "eval/wordalign/enfr.src-tgt.xz", [f"{a} ||| {b}" for a, b in zip(*held, strict=True)])
    write(folder / "eval/wordalign/enfr.gold.xz", links)
    for lang in ("es", "it"):
        rows = [f"{a}\t{b}\t{linked}" for a, b, linked in zip(*held, links, strict=True)]
        write(folder / f"eval/wordalign/xlwa-en-{lang}.test.tsv.xz", rows)
    for lang, sentences in (("en", train[0]), ("de", train[1]), ("fr", train[1]), ("es", train[1]), ("zh", train[1])):
        write(folder / f"mono/wiki_{lang}/aa.xz", sentences)
        for name in ("en_ewt-ud-train", "en_ewt-ud-test") if lang == "en" else (f"{lang}_pud-ud-test",):
            write(folder / f"eval/pos/{name}.conllu.xz", [tagged(text) for text in sentences])
        for part in ("train", "dev"):
            write(folder / f"eval/ner/{part}-{lang}.tsv.xz", [named(text) for text in sentences[:TAGGED]])
    (folder / "done").touch()
    return folder


def make_encoder(folder: Path, data: Path) -> Path:
    """Make a tiny encoder of random weights with a tokenizer of sentencepiece's kind, trained on the made text."""
    if not (folder / "config.json").exists():
        texts = []
        for path in sorted((data / "parallel/tatoeba").glob("en-de.[ed]*.xz")):
            texts += [("", line) for line in lzma.decompress(path.read_bytes()).decode().splitlines()]
        tokenizer = tokenizers.train(texts, "unigram", 400, lowercase=False)
        shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
        config = BertConfig(**shape, vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id)
        tokenizer.save_pretrained(folder)
        BertForMaskedLM(config).save_pretrained(folder)
    return folder


def spaced(text: str) -> str:
    """Return the text with spaces between all words that its links count."""
    return " ".join(split_words_and_symbols([text])[0][0])


def tagged(text: str) -> str:
    """Return a sentence as CoNLL-U. Tags follow from the form of a word; its head is the word before it."""
    lines = [f"# text = {text}"]
    for number, word in enumerate(text.split()):
        relation = "obj" if number else "root"
        lines.append(f"{number + 1}\t{word}\t_\t{tag(word)}\t_\t_\t{number}\t{relation}\t_\t_")
    return "\n".join([*lines, ""])


def tag(word: str) -> str:
    if word.istitle():
        return _TAGS.get(word.lower(), "PROPN")
    return _TAGS.get(word.lower(), "NOUN" if len(word) % 3 else "VERB")


def named(text: str) -> str:
    return "".join(f"{word}\t{'B-PER' if word.istitle() else 'O'}\n" for word in text.split())


def write(path: Path, lines: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(lzma.compress("".join(line + "\n" for line in lines).encode()))
