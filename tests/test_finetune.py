"""Fine-tuning: files, encodings, scores and the plan, each against something that shares no code with it."""

import errno
import json
import lzma
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForMaskedLM, BertConfig, ModernBertConfig, set_seed

from tests import launch
from tests.rows import one_thread  # noqa: F401
from xscale.data.tokenizer import Tokenizer
from xscale.errors import NotFinite, UserError
from xscale.eval.finetune import __main__ as command
from xscale.eval.finetune import tasks, training
from xscale.eval.finetune.examples import LabelledExample
from xscale.eval.finetune.tasks import TASKS, read_examples
from xscale.eval.finetune.training import FineTunedModel, SequenceMaker
from xscale.eval.finetune.transfer import (
    below_majority_warnings,
    make_code_switched_examples,
    plan_training,
    summarize_by_language,
)
from xscale.eval.model import ExportedModel

SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    torch.manual_seed(0)
    config = BertConfig(**SHAPE, vocab_size=tokenizer.vocab_size, max_position_embeddings=40, initializer_range=0.3)
    config.xscale = {"languages": ["de", "en"], "segments": True}
    path = tmp_path_factory.mktemp("model") / "hf"
    AutoModelForMaskedLM.from_config(config).save_pretrained(path)
    tokenizer.hf.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def maker(hf: Path) -> SequenceMaker:
    return SequenceMaker(ExportedModel(hf), ["en", "de"], 40)


def words_of(tokenizer: Tokenizer) -> list[str]:
    """Whole words that the tokenizer knows, then such as it cuts."""
    known = sorted(word for word in tokenizer.hf.get_vocab() if word.isascii() and word.isalpha() and len(word) > 2)
    return known[:40] + [known[i] + known[i + 1] for i in range(20)]


def conllu(sentences: list[list[tuple[str, str]]]) -> str:
    lines = []
    for sentence in sentences:
        lines.append("# a comment")
        for number, (word, tag) in enumerate(sentence, start=1):
            if number == 2:
                lines += ["2-3\tboth\t" + "\t".join("_" * 8), "1.1\tempty\t" + "\t".join("_" * 8)]
            lines.append("\t".join([str(number), word, "_", tag, *"______"]))
        lines.append("")
    return "\n".join(lines)


def squad(*questions: tuple[str, str, str, int], context: str = "Ada wrote it in 1843.") -> str:
    asked = []
    for key, text, answer, start in questions:
        answers = [{"text": answer, "answer_start": start}] if answer else []
        asked.append({"id": key, "question": text, "answers": answers})
    return json.dumps({"data": [{"paragraphs": [{"context": context, "qas": asked}]}]}, indent=1)


# Files

OWN_XNLI = "language\tgold_label\tsentence1\tsentence2\n{}\tneutral\ta\tb\nfr\tneutral\tc\td\nde\t-\te\tf\n"
WITHHELD = conllu([[("_", "NOUN"), ("_", "VERB")]])
GOOD = {
    "CoNLL-U": ("pos", "a.conllu", conllu([[("Go", "VERB"), ("on", "ADV")]]), [(("Go", "on"), ("VERB", "ADV"))]),
    "withheld words": ("pos", "a.conllu", WITHHELD + "\n" + conllu([[("Go", "VERB")]]), [(("Go",), ("VERB",))]),
    "XTREME's udpos": ("pos", "a.tsv", "Go\tVERB\n\n\nBe\tAUX\n", [(("Go",), ("VERB",)), (("Be",), ("AUX",))]),
    "PAN-X": ("ner", "a.tsv", "-DOCSTART- O\nYork\tB-LOC\n", [(("York",), ("B-LOC",))]),
    "CoNLL's columns": ("ner", "a.txt", "York NNP B-LOC\n", [(("York",), ("B-LOC",))]),
    "pairs": ("xnli", "a.tsv", "a b\tc\tneutral\r\n \nd\te\tcontradictory\n",
              [(("a b", "c"), ("neutral",)), (("d", "e"), ("contradiction",))]),
    "PAWS-X": ("pawsx", "a.tsv", "id\tsentence1\tsentence2\tlabel\n1\ta\tb\t0\n2\t\t\t1\n3\tc\td\t1\n",
               [(("a", "b"), ("0",)), (("c", "d"), ("1",))]),
    "XNLI's own": ("xnli", "a.tsv", OWN_XNLI.format("de"), [(("a", "b"), ("neutral",))]),
    "another code of German": ("xnli", "a.tsv", OWN_XNLI.format("deu_Latn"), [(("a", "b"), ("neutral",))]),
    "SIB-200": ("sentences", "a.tsv", "index_id\tcategory\ttext\n7\ttravel\tgo\n", [(("go",), ("travel",))]),
    "sentences": ("sentences", "a.tsv", "go\ttravel\n", [(("go",), ("travel",))]),
    "two labels": ("sentences", "a.tsv", "label\ttext\tcategory\n7\tgo\ttravel\n", [(("go",), ("7",))]),
    "a blank first line": ("sentences", "a.tsv", "\ncategory\ttext\ntravel\tgo\n", [(("go",), ("travel",))]),
    "several columns of tags": ("ner", "a.jsonl", '{"tokens": ["Ann"], "ner_tags": ["B-PER"], "pos_tags": ["NNP"], '
                                '"tags": ["X"]}\n', [(("Ann",), ("B-PER",))]),
    "SNLI": ("xnli", "a.jsonl", '{"premise": "a", "hypothesis": "b", "label": -1}\n'
             '{"premise": "a", "hypothesis": "c", "label": 1}\n', [(("a", "c"), ("1",))]),
    "sentiment -1 and 1": ("sentences", "a.tsv", "go\t-1\nstay\t1\n", [(("go",), ("-1",)), (("stay",), ("1",))]),
    "sentiment - and +": ("sentences", "a.tsv", "go\t-\nstay\t+\n", [(("go",), ("-",)), (("stay",), ("+",))]),
    "an unknown header": ("sentences", "a.tsv", "review\tstars\ngo\t5\n", [(("review",), ("stars",)),
                                                                         (("go",), ("5",))]),
    "SQuAD": ("xquad", "a.json", squad(("q0", "Who?", "", 0), ("q", "When?", "1843", 16)),
              [(("When?", "Ada wrote it in 1843."), ())]),
}  # fmt: skip
PRINTED = {"an unknown header": "line 1 .* 'stars'.* by text<TAB>label",
           "withheld words": "1 of 2 .*distributed without text", "PAWS-X": "1 of 3 .*blank",
            "XNLI's own": "1 of 2 .*label", "SNLI": "1 of 2 .*label", "SQuAD": "1 of 2 .*answer"}  # fmt: skip
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
SHORT_JSON = '{"data": [{"paragraphs": [{"qas": [{}]}]}]}'
BAD = {
    "columns": ("pos", "a.conllu", "1\tThe\t_\tDET\t_\t_\t_\t_\t_\t_\n2\tend\tNOUN\n", "line 2 .*ten columns"),
    "no blank line": ("pos", "a.conllu", 2 * "1\tThe\t_\tDET\t_\t_\t_\t_\t_\t_\n", "line 2 .*blank line"),
    "spaces": ("pos", "a.conllu", "1  The  _  DET", "line 1 .*columns"),
    "part of speech": ("pos", "a.tsv", "The\tDT\n", "line 1: the tag 'DT' of the word 'The' .*NOUN"),
    "no sentence": ("pos", "a.conllu", "# nothing\n", "has no usable example in de"),
    "bio": ("ner", "a.tsv", "a\tO\nb\tLOC\n", "line 2: the tag 'LOC' of the word 'b'"),
    "no tag": ("ner", "a.tsv", "a\tO\nb\n", "line 2 .*`word<TAB>tag`"),
    "no word": ("ner", "a.tsv", "\tO\n", "line 1 .*`word<TAB>tag`"),
    "WikiANN": ("ner", "a.tsv", "de:a\tO\nde:b\tO\n", "every word starts with 'de:'.*sed 's/.de://'"),
    "GermEval": ("ner", "a.tsv", "1\ta\tO\tO\n2\tb\tO\tO\n\n1\tc\tO\tO\n", "numbers instead of words.* cut -f 2,3"),
    "no language": (
        "sentences",
        "a.jsonl",
        '{"text": "a", "label": 0, "language": null}\n',
        "row 1: .*`language`.* None",
    ),
    "two columns": (
        "xnli",
        "a.tsv",
        "a\tb\tneutral\nc\td\n",
        "line 2: the number of columns is 2 instead of 3 .premise<TAB>hypothesis<TAB>label",
    ),
    "no column": (
        "xnli",
        "a.jsonl",
        '{"premise": "a", "b": "c"}\n',
        "row 1: .*column `hypothesis` of type str.*premise, b",
    ),
    "a number": (
        "xnli",
        "a.jsonl",
        '{"premise": 1, "hypothesis": "b"}\n',
        "row 1: each example needs a column `premise` of type str.* the value of `premise` is 1",
    ),
    "no label": (
        "xnli",
        "a.jsonl",
        '{"premise": "a", "hypothesis": "b"}\n',
        "row 1: each example needs a column `label` of type",
    ),
    "fewer tags": (
        "pos",
        "a.jsonl",
        '{"tokens": ["a", "b"], "upos": ["X"]}\n',
        "row 1: the number of words is 2, and that of tags 1. Write",
    ),
    "no answer_start": (
        "xquad",
        "a.jsonl",
        '{"question": "a", "context": "b", "answers": {"text": ["b"]}}\n',
        "row 1: each example needs a column `answer_start` of type",
    ),
    "not json": ("xquad", "a.json", '{"data": [\n{,}]}', "is not JSON.*line 2"),
    "not SQuAD's form": ("xquad", "a.json", SHORT_JSON, "the field 'id' is missing, at or after the start of the file"),
    "deep JSON": ("xquad", "a.json", "[" * 100_000, "a.json is not JSON"),
    "a list": ("xquad", "a.json", "[1]", "a value has the wrong type, at or after the start of the file"),
    "not in the context": (
        "xquad",
        "a.json",
        squad(("q", "When?", "1844", 15)),
        "question q: the context does not have the answer '1844'. Correct the answer or the context",
    ),
    "another place": ("xquad", "a.json", squad(("q", "When?", "1843", 15)), "question q: .*'1843' .*answer_start 15"),
    "a pointer": ("xquad", "a.json", POINTER, "Git LFS"),
    "a pointer to a table": ("xnli", "a.parquet", POINTER, "Git LFS"),
    "no table": ("xnli", "a.parquet", "premise\thypothesis\n", "cannot be read as a table"),
    "a web page": ("pos", "a.conllu", "<!DOCTYPE html>\n<html>", "web page"),
    "nothing": ("xnli", "a.jsonl", "", "is empty"),
    "nothing is left": ("pos", "a.conllu", WITHHELD, "has no usable example in de .left-out examples: 1."),
}


@pytest.mark.parametrize("what", GOOD)
def test_files_become_examples(tmp_path: Path, capsys: Any, what: str) -> None:
    task, name, text, expected = GOOD[what]
    (tmp_path / name).write_text(text)
    (tmp_path / f"{name}.xz").write_bytes(lzma.compress(text.encode()))
    for path in (tmp_path / name, tmp_path / f"{name}.xz"):
        examples = read_examples(TASKS[task], path, "de", None)
        assert [(example.texts, example.labels) for example in examples] == expected
        assert re.search(PRINTED.get(what, ""), capsys.readouterr().out)
        assert all(example.languages == ("de", "de") for example in examples)


@pytest.mark.parametrize("what", BAD)
def test_bad_files_are_named_with_the_line(tmp_path: Path, what: str) -> None:
    task, name, text, problem = BAD[what]
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=problem) as raised:
        read_examples(TASKS[task], tmp_path / name, "de", None)
    assert str(tmp_path / name) in str(raised.value)


def test_tables(tmp_path: Path) -> None:
    """A .parquet file has names for the numbers of labels."""
    import datasets

    text = datasets.Value("string")
    features = datasets.Features({"premise": text, "hypothesis": text})
    features["label"] = datasets.ClassLabel(names=["entailment", "neutral"])
    pairs = datasets.Dataset.from_dict(
        {"premise": ["a", "b"], "hypothesis": ["c", "d"], "label": [1, -1]}, features=features
    )
    pairs.to_parquet(tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"is a folder. Use a .jsonl file"):
        read_examples(TASKS["xnli"], tmp_path, "en", None)
    (example,) = read_examples(TASKS["xnli"], tmp_path / "a.parquet", "en", None)
    assert (example.texts, example.labels, example.place) == (("a", "c"), ("neutral",), "row 1")
    tagged = datasets.Features({"id": text, "tokens": datasets.List(text)})
    tagged["ner_tags"] = datasets.List(datasets.ClassLabel(names=["O", "B-PER"]))
    tags = datasets.Dataset.from_dict({"id": ["s7"], "tokens": [["Ann", "ran"]], "ner_tags": [[1, 0]]}, features=tagged)
    tags.to_parquet(tmp_path / "tags.parquet")
    (example,) = read_examples(TASKS["ner"], tmp_path / "tags.parquet", "en", None)
    assert (example.texts, example.labels, example.place) == (("Ann", "ran"), ("B-PER", "O"), "row 1")
    answers = {"text": ["Ada"], "answer_start": [0]}
    question = {"id": "q7", "question": "Who?", "context": "Ada wrote it.", "answers": answers}
    (tmp_path / "a.jsonl").write_text(json.dumps(question))
    (example,) = read_examples(TASKS["xquad"], tmp_path / "a.jsonl", "en", None)
    assert example.place == "question q7"
    (tmp_path / "a.jsonl").write_text(json.dumps(question | {"id": None}))
    (example,) = read_examples(TASKS["xquad"], tmp_path / "a.jsonl", "en", None)
    assert example.place == "row 1"


# Scores


@pytest.mark.parametrize(
    ("task", "language", "text", "normal"),
    [
        ("xquad", "de", "The  Cat's, hat!", "cats hat"),
        ("xquad", "de", "Die «Katze» an apple", "die «katze» apple"),  # ASCII punctuation and English articles alone
        ("mlqa", "de", "Die «Katze» des Hauses", "katze hauses"),
        ("mlqa", "deu_Latn", "Die «Katze» des Hauses", "katze hauses"),
        ("mlqa", "de", "the end", "the end"),
        ("mlqa", "en", "the end—now", "endnow"),
        ("mlqa", "es", "La casa, unas flores", "casa flores"),
        ("mlqa", "vi", "những con mèo", "con mèo"),
        ("mlqa", "arb", "البيت", "بيت"),
        ("mlqa", "hi", "the अंत।", "the अंत"),
        ("mlqa", "zh", "在1997年，香港 Hong Kong。", "在 1997 年 香 港 hong kong"),
        ("mlqa", "cmn_Hans", "在1997年", "在 1997 年"),
    ],
)
def test_answers_are_compared_as_the_scripts_of_squad_and_mlqa_do(
    task: str, language: str, text: str, normal: str
) -> None:
    assert TASKS[task].normalize_answer(text, language) == normal


def test_the_best_of_several_gold_answers_counts() -> None:
    examples = [
        LabelledExample(("?", "..."), answers=(("der Hund", 0), ("ein großer Hund", 0))),
        LabelledExample(("?", "..."), answers=(("1843", 0),)),
    ]
    found = TASKS["mlqa"].score(examples, [["großer Hund"], ["1842"]], "de")
    assert found == {"f1": pytest.approx(0.5), "exact_match": pytest.approx(0.5)}
    found = TASKS["xquad"].score(examples, [["großer Hund"], ["1842"]], "de")
    assert found == {"f1": pytest.approx(0.4), "exact_match": 0.0}
    assert tasks.word_f1("a b b", "b b c") == pytest.approx(2 / 3) and tasks.word_f1("", "") == 0.0


def test_whole_entities_and_single_labels_are_counted() -> None:
    """An I- after another type or O begins an entity, as in conlleval: of 3 entities and 3 predictions, 1 is right."""
    example = LabelledExample(("w",) * 5, ("B-PER", "I-PER", "O", "I-LOC", "B-LOC"))
    found = TASKS["ner"].score([example], [["B-PER", "I-PER", "B-PER", "I-LOC", "I-LOC"]], "en")
    assert found == {"f1": pytest.approx(2 / 6), "precision": pytest.approx(1 / 3), "recall": pytest.approx(1 / 3)}
    words = [LabelledExample(("a", "b"), ("NOUN", "VERB")), LabelledExample(("c",), ("NOUN",))]
    assert TASKS["pos"].score(words, [["NOUN", "NOUN"], ["NOUN"]], "en") == {"accuracy": pytest.approx(2 / 3)}


# From text to what the head says


def logits_of(task: str, maker: SequenceMaker, features: list[Any], labels: list[str]) -> tuple[np.ndarray, Any]:
    """What a random head says of the features, and its model."""
    torch.manual_seed(5)
    model = FineTunedModel(maker, len(labels), TASKS[task].reads).eval()
    torch.nn.init.normal_(model.classifier.weight)
    with torch.no_grad():
        outputs = model(**maker.collate([features]))
    return outputs["logits"].numpy(), model


def test_a_words_tag_is_read_from_its_first_token(maker: SequenceMaker, tokenizer: Tokenizer) -> None:
    """The same as transformers, of one padded sentence at a time, whose tokens are found word by word."""
    words = words_of(tokenizer)
    examples = []
    for i in range(4):
        sentence = tuple(words[(7 * i + 11 * n) % 60] for n in range(3 + i))
        examples.append(LabelledExample(sentence, ("X",) * len(sentence)))
    features = [TASKS["pos"].encode(example, maker, tasks.UPOS)[0] for example in examples]
    found, model = logits_of("pos", maker, features, tasks.UPOS)
    labels = maker.collate([TASKS["pos"].encode(example, maker, tasks.UPOS) for example in examples])["labels"]
    for row, example in enumerate(examples):
        ids = [tokenizer.cls_id]
        firsts = []
        for word in example.texts:
            firsts.append(len(ids))
            ids += tokenizer.hf(word, add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            sentence = torch.tensor([[*ids, tokenizer.sep_id]])
            expected = model(input_ids=sentence, attention_mask=torch.ones_like(sentence))["logits"][0, firsts]
        np.testing.assert_allclose(found[row, features[row].positions], expected, rtol=1e-4, atol=1e-4)
        assert (labels[row] != -100).nonzero().flatten().tolist() == firsts


@pytest.mark.parametrize("pooling", ["cls", "mean", None])
def test_a_pair_is_classified_by_the_state_that_was_pooled_in_training(
    hf: Path, tokenizer: Tokenizer, tmp_path: Path, pooling: str | None
) -> None:
    """A linear layer on the encoder's own state, with nothing random between them; None: there is no 1_Pooling."""
    for file in hf.iterdir():
        (tmp_path / file.name).symlink_to(file)
    if pooling:
        module = {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
        (tmp_path / "modules.json").write_text(json.dumps([module]))
        (tmp_path / "1_Pooling").mkdir()
        modes = {"pooling_mode_cls_token": pooling == "cls", "pooling_mode_mean_tokens": pooling == "mean"}
        (tmp_path / "1_Pooling/config.json").write_text(json.dumps({"word_embedding_dimension": 32} | modes))
    maker = SequenceMaker(ExportedModel(tmp_path), ["en", "de"], 40)
    words = words_of(tokenizer)
    texts = [(" ".join(words[i : i + 3]), " ".join(words[i + 9 : i + 9 + 2 * i])) for i in (1, 2, 3)]
    examples = [LabelledExample(pair, ("b",), languages=("en", "de")) for pair in texts]
    features = [TASKS["xnli"].encode(example, maker, ["a", "b"])[0] for example in examples]
    found, model = logits_of("xnli", maker, features, ["a", "b"])
    lm = AutoModelForMaskedLM.from_pretrained(hf)
    for row, pair in enumerate(texts):
        a, b = (tokenizer.hf(text, add_special_tokens=False)["input_ids"] for text in pair)
        ids = torch.tensor([[tokenizer.cls_id, *a, tokenizer.sep_id, *b, tokenizer.sep_id]])
        types = torch.tensor([[0] * (len(a) + 2) + [1] * (len(b) + 1)])
        with torch.no_grad():
            states = lm(ids, token_type_ids=types, output_hidden_states=True).hidden_states[-1][0]
            ordinary = [i for i in range(len(states)) if i not in (0, len(a) + 1, len(states) - 1)]
            expected = model.classifier(states[ordinary].mean(0) if pooling == "mean" else states[0])
        np.testing.assert_allclose(found[row], expected, rtol=1e-4, atol=1e-4)
    assert not any("pooler" in name for name in model.state_dict())


def test_every_word_of_a_long_sentence_has_one_tag(maker: SequenceMaker, tokenizer: Tokenizer) -> None:
    words = (words_of(tokenizer) * 3)[:100]
    example = LabelledExample(tuple(words), tuple(tasks.UPOS[len(word) % 17] for word in words))
    features = TASKS["pos"].encode(example, maker, tasks.UPOS)
    assert len(features) > 3 and max(len(feature.inputs["input_ids"]) for feature in features) <= 40
    outputs = []
    for feature in features:
        labels = np.maximum([*feature.inputs["labels"], *[0] * 40][:40], 0)
        outputs.append(np.eye(17)[labels])
    assert TASKS["pos"].predict(example, features, outputs, tasks.UPOS) == list(example.labels)


def test_an_answer_is_found_in_a_long_context(maker: SequenceMaker, tokenizer: Tokenizer) -> None:
    """Gold places, said with certainty, are the gold answers again, whichever of the overlapping sequences has them."""
    words = words_of(tokenizer)
    context = " ".join(f"{word}," for word in words)
    answers = [words[0], f"{words[20]}, {words[21]}", words[-1]]
    for i, text in enumerate(answers):
        example = LabelledExample((f"{words[i]} ?", context), answers=((text, context.index(text)),))
        features = TASKS["xquad"].encode(example, maker, [])
        outputs = np.zeros((len(features), 40, 2))
        for row, feature in enumerate(features):
            first, last = feature.inputs["labels"]
            outputs[row, first, 0] = 9.0 if first else 0.0
            outputs[row, last, 1] = 9.0 if first else 0.0
        covered = {span[0] for feature in features for span in feature.spans}
        assert len(covered) == len(tokenizer.encode([context])[0]), "a token of the context is in no sequence"
        assert TASKS["xquad"].predict(example, features, list(outputs), []) == [text]


def test_best_span_is_that_of_all_pairs() -> None:
    draw = np.random.default_rng(0)
    for length in (1, 3, 9):
        logits = draw.normal(size=(length, 2))
        allowed = [(i, j) for i in range(length) for j in range(i, min(i + 4, length))]
        first, last = max(allowed, key=lambda at: logits[at[0], 0] + logits[at[1], 1])
        scores = tasks.span_scores(logits, 4)
        assert scores.max() == scores[first, last] == pytest.approx(logits[first, 0] + logits[last, 1])


# Runs


def text_of(language: str, labels: str = "xy", blank: int = -1) -> list[LabelledExample]:
    examples = []
    for i in range(6):
        texts = (f"{language} a{i}", f"{language} b{i}")
        label = labels[i % len(labels)]
        if i != blank:
            examples.append(LabelledExample(texts, (label,), (), (language, language), Path(language), f"line {i}"))
    return examples


@pytest.mark.parametrize("german", ["de", "deu", "deu_Latn", "de-AT", "ger"])
def test_which_runs_the_texts_allow(german: str) -> None:
    """The source language's serves every test, others their own; translations those of their language."""
    tests = {language: text_of(language) for language in ("en", "de", "fr")}
    train = {"eng_Latn": text_of("en"), german: text_of("de")}
    plan = plan_training(TASKS["xnli"], train, {"fra_Latn": text_of("fr")}, tests, code_switch=False)
    assert [text.settings for text in plan] == [
        {"en": "supervised", "de": "zero-shot", "fr": "zero-shot"},
        {"de": "supervised"},
        {"fr": "translate-train"},
    ]
    assert all(text.labels == ["x", "y"] and len(text.examples) == 6 for text in plan)


def test_two_scripts_are_two_languages() -> None:
    train = {name: text_of(name) for name in ("en", "zh-Hans", "zh-Hant")}
    plan = plan_training(TASKS["xnli"], train, {}, {"zh-Hant": text_of("zh"), "zho_Hans": text_of("zh")}, False)
    zero_shot = {"zh-Hant": "zero-shot", "zho_Hans": "zero-shot"}
    assert [text.settings for text in plan] == [zero_shot, {"zho_Hans": "supervised"}, {"zh-Hant": "supervised"}]


def test_both_halves_of_a_switched_pair_stand_together() -> None:
    """A blank translation takes its original with it, and a blank original its translation."""
    source = {"en": text_of("en", blank=3)}
    translated = {"de": text_of("de", blank=4)}
    plan = plan_training(TASKS["xnli"], source, translated, {"de": text_of("de")}, code_switch=True)
    assert [(example.languages, example.texts) for example in plan[1].examples[4:6]] == [
        (("de", "en"), ("de a2", "en b2")),
        (("en", "de"), ("en a2", "de b2")),
    ]
    assert [example.place[-1] for example in plan[1].examples[::2]] == ["0", "1", "2", "5"]
    with pytest.raises(UserError, match=r"de: line 0 has the label y, but the original in en has the label x"):
        make_code_switched_examples(text_of("en"), text_of("de", labels="yx"))
    with pytest.raises(UserError, match=r"no example of en has a translation in de"):
        make_code_switched_examples(text_of("en")[:2], text_of("de")[2:])


def test_questions_are_switched_with_the_contexts_answers() -> None:
    a = LabelledExample(("who", "Ada wrote"), (), (("Ada", 0),), ("en", "en"))
    b = LabelledExample(("wer", "Es war Ada"), (), (("Ada", 7),), ("de", "de"))
    first, second = make_code_switched_examples([a], [b])
    assert first == LabelledExample(("wer", "Ada wrote"), (), (("Ada", 0),), ("de", "en"))
    assert second == LabelledExample(("who", "Es war Ada"), (), (("Ada", 7),), ("en", "de"))


def test_a_question_that_a_test_has_twice_is_an_error() -> None:
    question = LabelledExample(("who", "Ada wrote"), (), (("Ada", 0),), ("en", "en"), Path("qa.json"), "question 7")
    with pytest.raises(UserError, match=r"qa.json: question 7 occurs 2 times. Write a different id"):
        plan_training(TASKS["xquad"], {"en": [question]}, {}, {"en": [question, question]}, code_switch=False)


def test_cut_examples_are_counted_once(tmp_path: Path, hf: Path, tokenizer: Tokenizer, capsys: Any) -> None:
    """The model has 40 positions; in the test, one pair exceeds 20 tokens, and one fills them."""
    word = words_of(tokenizer)[0]
    (tmp_path / "train.tsv").write_text(f"{word}\t{word}\ta\n{word}\t{word}\tb\n")
    lines = [f"{' '.join([word] * count)}\t{word}\ta\n" for count in (16, 17, 2)]
    (tmp_path / "test.tsv").write_text("".join(lines))
    files = f"--train en={tmp_path}/train.tsv --test en={tmp_path}/test.tsv --out {tmp_path}/out.json"
    line = f"--model {hf} --task xnli {files} --epochs 1 --seeds 0 1 --max_length".split()
    assert command.main([*line, "20"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("test.tsv: 1 of 3 examples are cut. A sequence has at most 20 tokens") == 1
    assert printed.count("examples are cut") == 1
    assert command.main([*line, "41"]) == 2
    assert "--max_length 41: sequences of the model" in capsys.readouterr().err


def test_a_single_step_trains(maker: SequenceMaker, tmp_path: Path) -> None:
    """The first step of a warm-up has the learning rate 0."""
    features = [TASKS["xnli"].encode(example, maker, ["x", "y"]) for example in text_of("en")]
    settings = {"out": tmp_path / "out", "epochs": 1, "lr": 1e-3, "warmup": 0.1, "seed": 0, "batch": 32}
    set_seed(0)
    model = FineTunedModel(maker, 2, "sequence")
    before = model.classifier.weight.detach().clone()
    training.fine_tune(model, maker.collate, features, settings)
    assert not torch.equal(model.classifier.weight.cpu(), before)


def test_means_deviations_delta_and_the_majority() -> None:
    scores = {
        "de zero-shot": {"accuracy": [1 / 3, 1]},
        "de majority": {"accuracy": [2 / 3]},
        "de supervised": {"accuracy": [1, 5 / 6]},
        "en zero-shot": {"accuracy": [1 / 3]},
        "en majority": {"accuracy": [2 / 3]},
    }
    found = summarize_by_language(scores, {"de": text_of("de"), "en": text_of("en")})
    assert found["de zero-shot"] == {
        "examples": 6,
        "accuracy": pytest.approx(2 / 3),
        "accuracy_std": pytest.approx(np.std([1 / 3, 1], ddof=1)),
    }
    assert found["de"] == {
        "zs": pytest.approx(2 / 3),
        "zs_std": pytest.approx(np.std([1 / 3, 1], ddof=1)),
        "majority": pytest.approx(2 / 3),
        "sup": pytest.approx(11 / 12),
        "sup_std": pytest.approx(np.std([1, 5 / 6], ddof=1)),
        "delta": pytest.approx(1 / 4),
        "delta_std": pytest.approx(np.std([2 / 3, -1 / 6], ddof=1)),  # of each seed, supervised less zero-shot
    }
    assert found["en"] == {"zs": pytest.approx(1 / 3), "majority": pytest.approx(2 / 3)}, "one seed"
    (line,) = below_majority_warnings(found)
    assert "en zero-shot: the score 0.333 is below 0.667" in line


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--train en=absent.tsv", "absent.tsv"),
        ("--train de.tsv", "--train de.tsv: .*LANG=FILE"),
        ("--train en=de.tsv en=de.tsv", "each language only once"),
        ("--train fr=de.tsv --source en", "--source is no longer part of xscale"),
        ("--train en=de.tsv de=de.tsv fr=de.tsv", "no test file is in this language. Write --test fr=FILE"),
        (
            "--train en=de.tsv de=de.tsv ger=other.tsv",
            "files for supervised scores have the languages en, de, ger, but two of these names mean the same language",
        ),
        (
            "--train en=de.tsv --test en=other.tsv",
            "other.tsv: line 2 has the label 'y', but the training file de.tsv has only the labels",
        ),
        (
            "--train en=de.tsv --test deu=de.tsv",
            "--test: de and deu are names of the same language. Remove one of the two files",
        ),
        ("--train en=one.tsv", "one.tsv: all 1 examples have the label 'y'"),
        ("--train en=de.tsv --code_switch", "--code_switch needs .* --translated"),
        ("--translated de=de.tsv --code_switch", "--code_switch needs --train"),
        ("--train en=de.tsv --translated de=de.tsv --code_switch --task pos", "one of the tasks xnli"),
        ("--train en=de.tsv --lr nan", "--lr nan"),
        ("--train en=de.tsv --seeds 1 1", "--seeds 1 1"),
        ("--train en=de.tsv --out=", "--out= is empty"),
        ("--train en=de.tsv --predictions x", "--predictions is no longer part of xscale"),
    ],
)
def test_what_a_user_does_wrong_is_said_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, words: str, problem: str
) -> None:
    (tmp_path / "de.tsv").write_text("a\tb\tneutral\nc\td\tentailment\n")
    (tmp_path / "other.tsv").write_text("a\tb\tneutral\nc\td\ty\n")
    (tmp_path / "one.tsv").write_text("a\tb\t-1\nc\td\ty\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [str(launch.ROOT / "xscale/eval/finetune/__main__.py")])
    line = f"--model hf --task xnli --test de=de.tsv --out out.json {words}".split()
    assert command.main(line) == 2
    assert re.search(problem, capsys.readouterr().err)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert command.main(line) == 2 and capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "out.json"), 4, "error: out.json: No space left on device"),
        (NotFinite("the logits are not finite; give a smaller --lr"), 3, "error: the logits are not finite"),
    ],
)
def test_exit_codes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, error: Exception, code: int, said: str
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(command, "measure_transfer", fail)
    assert command.main(f"--model hf --task xnli --train en=a --test en=a --out {tmp_path}/out".split()) == code
    assert said in capsys.readouterr().err


# Whole runs


def test_a_command_trains_and_scores(
    tmp_path: Path, hf: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = words_of(tokenizer)
    for language in ("en", "de"):
        lines = []
        for n in range(9):
            lines.append(f"{' '.join(words[n : n + 1 + 5 * (n % 3)])}\t{words[3 * n]}\t{'ab'[n % 3 > 1]}\n")
        Path(f"{language}.tsv").write_text("".join(lines))
    line = f"--model {hf} --task xnli --train en=en.tsv de=de.tsv --test en=en.tsv de=de.tsv --translated de=de.tsv"
    line += " --code_switch --epochs 1 --batch 4 --test_limit 5 --out out.json"
    assert command.main(line.split()) == 0
    found = json.loads(Path("out.json").read_text())
    summary = found["results"]["xnli"]["de"]
    assert set(summary) == {f"{name}{s}" for name in ("zs", "sup", "tt", "delta") for s in ("", "_std")} | {"majority"}
    assert summary["majority"] == 0.8 and found["results"]["xnli"]["de zero-shot"]["examples"] == 5
    assert all(len(values) == 3 for row in found["seeds"]["xnli"].values() for values in row.values())
    assert len(found["intervals"]["xnli"]["de"]["delta"]) == 2
    assert found["checksums"]["xnli"].keys() == found["results"]["xnli"].keys()
    assert found["checksums"]["xnli"]["de"] == found["checksums"]["xnli"]["de majority"]
    settings = found["settings"]
    assert (
        settings["seeds"] == [0, 1, 2] and settings["epochs"] == 1 and settings["lr"] == pytest.approx(5e-5 * 768 / 32)
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["de.tsv", "en.tsv", "out.json"]
    printed = capsys.readouterr().out
    assert "fine-tuning with the seeds [0, 1, 2]" in printed


def test_seeds_and_settings_decide_a_run(maker: SequenceMaker, hf: Path, tmp_path: Path) -> None:
    """A frozen encoder does not change, and both halves of a switched pair are in one step."""
    task = TASKS["xnli"]
    alone = [task.encode(example, maker, ["x", "y"]) for example in text_of("en")]

    def tuned(seed: int, frozen: bool, groups: list[Any]) -> Any:
        set_seed(seed)
        model = FineTunedModel(maker, 2, task.reads, frozen)
        settings = {"epochs": 1, "lr": 1e-3, "batch": 4, "warmup": 0.1, "seed": seed, "out": tmp_path / "out.json"}
        return training.fine_tune(model, maker.collate, groups, settings)

    heads = [tuned(seed, True, alone).model.classifier.weight for seed in (0, 0, 1)]
    assert torch.equal(heads[0], heads[1]) and not torch.allclose(heads[0], heads[2], atol=0.01)
    probe = tuned(0, True, alone).model.base_model.state_dict()
    whole = tuned(0, False, alone).model.base_model.state_dict()
    before = AutoModelForMaskedLM.from_pretrained(hf).base_model.state_dict()
    assert all(torch.equal(probe[name], before[name]) for name in before)
    assert not all(torch.equal(whole[name], before[name]) for name in before)
    pairs = [alone[0] + alone[1], alone[2] + alone[3], alone[4] + alone[5]]
    assert tuned(0, True, pairs).args.per_device_train_batch_size == 2


@pytest.mark.parametrize("kind", ["bert", "modernbert"])
def test_a_frozen_encoder_is_read_by_a_linear_probe(tmp_path: Path, tokenizer: Tokenizer, kind: str) -> None:
    """In training too, the logits are a linear function of the states that transformers has without dropout."""
    if kind == "bert":
        config: Any = BertConfig(**SHAPE, hidden_dropout_prob=0.5, attention_probs_dropout_prob=0.5)
    else:
        rates = {"attention_dropout": 0.5, "mlp_dropout": 0.5, "embedding_dropout": 0.5}
        config = ModernBertConfig(**SHAPE, **rates, pad_token_id=tokenizer.pad_id)
    config.vocab_size = tokenizer.vocab_size
    AutoModelForMaskedLM.from_config(config).save_pretrained(tmp_path)
    tokenizer.hf.save_pretrained(tmp_path)
    maker = SequenceMaker(ExportedModel(tmp_path), ["en"], 40)
    model = FineTunedModel(maker, 3, "tokens", frozen=True).train()
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {"classifier.weight", "classifier.bias"}
    ids = torch.tensor([tokenizer.hf("the dog sees a cat")["input_ids"]])
    plain = AutoModelForMaskedLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        states = plain.base_model(ids).last_hidden_state
        expected = states @ model.classifier.weight.T + model.classifier.bias
    torch.testing.assert_close(
        model(input_ids=ids, attention_mask=torch.ones_like(ids))["logits"].detach(), expected, rtol=1e-4, atol=1e-4
    )


def test_what_is_not_finite_has_no_score(maker: SequenceMaker) -> None:
    class Failing:
        @staticmethod
        def predict(_: Any) -> Any:
            return type("Output", (), {"predictions": np.full((1, 3, 17), np.nan)})

    with pytest.raises(NotFinite, match="--lr"):
        training.predict_finite_logits(Failing(), [])  # type: ignore[arg-type]


@pytest.mark.slow
def test_two_ranks_learn(tmp_path: Path, tokenizer: Tokenizer) -> None:
    torch.manual_seed(0)
    shape = SHAPE | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(**shape, vocab_size=tokenizer.vocab_size, max_position_embeddings=40)
    AutoModelForMaskedLM.from_config(config).save_pretrained(tmp_path / "hf")
    tokenizer.hf.save_pretrained(tmp_path / "hf")
    words = words_of(tokenizer)
    draw = np.random.default_rng(1)
    sentences = []
    for number in range(45):
        sentences.append([(words[i], tasks.UPOS[i % 5]) for i in draw.integers(0, 60, 3 + number % 5)])
    (tmp_path / "en.conllu").write_text(conllu(sentences))
    line = f"-m xscale.eval.finetune --model {tmp_path}/hf --task pos --train en={tmp_path}/en.conllu "
    line += f"--test en={tmp_path}/en.conllu --epochs 4 --batch 4 --lr 3e-3 --seeds 3 4 --out {tmp_path}/out.json"
    code, printed = launch.fork(2, line.split(), launch.environment())
    assert code == 0, printed[-6000:]
    found = json.loads((tmp_path / "out.json").read_text())["results"]["pos"]["en"]
    assert found["sup"] > 0.5 > found["majority"]
    assert (
        printed.count("learning rate 0.003") == 1
        and "find_unused_parameters" not in printed
        and "Warning" not in printed
    )


def test_transfer_on_real_treebanks(tmp_path: Path, real: Path, hf: Path) -> None:
    """English and German treebanks under codes of three letters: each word has a tag, each language its setting."""
    pos = real / "eval/pos"
    out = tmp_path / "out.json"
    line = (
        f"--model {hf} --task pos --train eng={pos}/en_ewt-ud-dev.conllu.xz --test en={pos}/en_pud-ud-test.conllu.xz "
    )
    line += f"deu={pos}/de_pud-ud-test.conllu.xz --limit 20 --test_limit 20 --epochs 1 --seeds 0 --out {out}"
    assert command.main(line.split()) == 0
    found = json.loads(out.read_text())["results"]["pos"]
    assert {"en supervised", "deu zero-shot"} <= set(found) and 0 < found["deu"]["majority"] < 0.4
