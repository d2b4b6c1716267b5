"""Makes the data of the scale `smoke`: sentences of the demo world, in files with the names that --data has."""

import lzma
from collections.abc import Iterable
from pathlib import Path

from transformers import BertConfig, BertForMaskedLM

from data_tools import tokenizer as tokenizers
from data_tools.demo_world import World
from xscale.data.words import split_words_and_symbols

PAIRS = 500
HELDOUT = 60
TAGGED = 150
PAIR_FILES = {"tatoeba/en-de": "de", "tatoeba/en-fr": "fr", "tatoeba/en-zh": "zh", "multi30k/train": "de"}
TAGS = {"the": "DET", "a": "DET", "an": "DET", ".": "PUNCT", ",": "PUNCT", "?": "PUNCT", "!": "PUNCT"}


def make_data(folder: Path) -> Path:
    if (folder / "done").exists():
        return folder
    world = World(0)
    pairs = [world.pair(number) for number in range(PAIRS + HELDOUT)]
    english = [spaced(pair[0]) for pair in pairs]
    others = [spaced(pair[1]) for pair in pairs]
    links = [pair[2] for pair in pairs]
    contents: dict[str, Iterable[str]] = {"parallel/bible/bible.en": english[:PAIRS]}
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
            contents[f"eval/pos/{name}.conllu"] = map(tagged, sentences)
        for part in ("train", "dev"):
            contents[f"eval/ner/{part}-{language}.tsv"] = map(named, sentences[:TAGGED])
    for name, lines in contents.items():
        path = folder / f"{name}.xz"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(lzma.compress("".join(f"{line}\n" for line in lines).encode()))
    (folder / "done").touch()
    return folder


def make_encoder(folder: Path, data: Path) -> Path:
    """Make a tiny encoder of random weights with a tokenizer of sentencepiece's kind, trained on the made text."""
    if not (folder / "config.json").exists():
        texts = []
        for language in ("en", "de"):
            text = lzma.decompress((data / f"parallel/tatoeba/en-de.{language}.xz").read_bytes()).decode()
            texts += [("", line) for line in text.splitlines()]
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
        usual = "PROPN" if word.istitle() else "NOUN" if len(word) % 3 else "VERB"
        tag = TAGS.get(word.lower(), usual)
        relation = "obj" if number else "root"
        lines.append(f"{number + 1}\t{word}\t_\t{tag}\t_\t_\t{number}\t{relation}\t_\t_")
    return "\n".join([*lines, ""])


def named(text: str) -> str:
    return "".join(f"{word}\t{'B-PER' if word.istitle() else 'O'}\n" for word in text.split())
