"""Fine-tuning: files, encodings, scores and the plan, each against something that shares no code with it."""

import errno
import json
import lzma
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    BertConfig,
)

from tests import launch
from tests.rows import one_thread  # noqa: F401
from xscale.data.tokenizer import Tokenizer
from xscale.errors import NotFinite, UserError
from xscale.eval.finetune import __main__ as command
from xscale.eval.finetune import classification, measure, qa, squad, tags
from xscale.eval.finetune.task import LabelledExample, Task, TaskData
from xscale.eval.finetune.training import Collator, FineTuner, FineTuneSettings
from xscale.eval.finetune.transfer import (
    TransferTable,
    plan_training,
    predict_majority,
    switch_codes,
    write_predictions,
)
from xscale.eval.model import ExportedModel

SETTINGS = FineTuneSettings(epochs=3, lr=5e-5, batch=32, max_length=40, warmup=0.1)
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
def model(hf: Path) -> ExportedModel:
    return ExportedModel(hf)


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


# Files


def test_conllu_has_words_alone(tmp_path: Path) -> None:
    sentences = [[("The", "DET"), ("end", "NOUN"), (".", "PUNCT")], [("Go", "VERB"), ("on", "ADV")]]
    path = tmp_path / "a.conllu.xz"
    path.write_bytes(lzma.compress(conllu(sentences).encode()))
    found = tags.read_pos(path, "en")
    assert [list(zip(e.texts, e.gold or (), strict=True)) for e in found] == sentences
    assert [e.langs for e in found] == [("en",), ("en",)]


def test_entities_of_panx_wikiann_and_without_tags(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text("en:New\tB-LOC\nen:York\tI-LOC\n\n\nen:by\tO\n")
    assert [(e.texts, e.gold) for e in tags.read_ner(path, "en")] == [
        (("New", "York"), ("B-LOC", "I-LOC")),
        (("by",), ("O",)),
    ]
    assert tags.read_ner(path, "eng") == [e._replace(langs=("eng",)) for e in tags.read_ner(path, "en")]
    path.write_text("en:New\tB-LOC\nYork:\tI-LOC\n")  # no prefix: not all words have it
    assert [e.texts for e in tags.read_ner(path, "en")] == [("en:New", "York:")]
    path.write_text("New\nYork\n\nby\n")
    assert [(e.texts, e.gold) for e in tags.read_ner(path, "en")] == [(("New", "York"), None), (("by",), None)]


def test_parts_of_speech_in_columns_as_in_xtremes_folders(tmp_path: Path) -> None:
    path = tmp_path / "train-en.tsv"
    path.write_text("The\tDET\nend\tNOUN\n\nGo\tVERB\n\n")
    assert [(e.texts, e.gold) for e in tags.read_pos(path, "en")] == [
        (("The", "end"), ("DET", "NOUN")),
        (("Go",), ("VERB",)),
    ]
    path.write_text("The\nend\n\nGo\n")
    assert [(e.texts, e.gold) for e in tags.read_pos(path, "en")] == [(("The", "end"), None), (("Go",), None)]
    path.write_text("# a comment\n" + GOOD)
    assert [e.texts for e in tags.read_pos(path, "en")] == [("The",)], "CoNLL-U of another name"


def test_pairs_by_columns_or_by_a_header(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text("a b\tc\tneutral\nd\te\tcontradictory\n")
    found = classification.read(path, "de")
    assert [(e.texts, e.gold, e.langs) for e in found] == [
        (("a b", "c"), ("neutral",), ("de", "de")),
        (("d", "e"), ("contradiction",), ("de", "de")),
    ]
    path.write_text(
        "language\tgold_label\tpairID\tsentence1\tsentence2\nde\tneutral\t1\ta\tb\nen\tneutral\t2\tc\td\nde\t-\t3\te\tf\n"
    )
    assert [(e.key, e.texts, e.gold) for e in classification.read(path, "de")] == [("2", ("a", "b"), ("neutral",))]
    path.write_text("\n a\tb\t0\r\n\r\nc\td\t1\n\n \n")
    assert [(e.key, e.gold) for e in classification.read(path, "de")] == [("2", ("0",)), ("4", ("1",))]
    path = tmp_path / "a.jsonl"
    path.write_text('{"premise": "a", "hypothesis": "b", "label": -1}\n\n')
    assert [(e.key, e.gold) for e in classification.read(path, "de")] == [("1", None)], "datasets' word for no label"


def test_local_data_sets(tmp_path: Path) -> None:
    """save_to_disk's folder, .parquet and .jsonl.xz give the same examples, with names for the numbers of labels."""
    import datasets
    from pyarrow import parquet

    label = datasets.ClassLabel(names=["entailment", "neutral"])
    features = datasets.Features({"premise": datasets.Value("string"), "hypothesis": datasets.Value("string")})
    features["label"] = label
    rows = {"premise": ["a", "b"], "hypothesis": ["c", "d"], "label": [1, 0]}
    made = datasets.Dataset.from_dict(rows, features=features)
    made.save_to_disk(tmp_path / "disk")
    (tmp_path / "folder").mkdir()
    parquet.write_table(made.data.table, tmp_path / "folder" / "train.parquet")
    named = [{"premise": "a", "hypothesis": "c", "label": "neutral"}, {"premise": "b", "hypothesis": "d"}]
    named[1]["label"] = "entailment"
    lines = "".join(json.dumps(row) + "\n" for row in named)
    (tmp_path / "c.jsonl.xz").write_bytes(lzma.compress(lines.encode()))
    expected = [("1", ("a", "c"), ("neutral",)), ("2", ("b", "d"), ("entailment",))]
    for name in ("disk", "folder", "folder/train.parquet", "c.jsonl.xz"):
        assert [(e.key, e.texts, e.gold) for e in classification.read(tmp_path / name, "en")] == expected, name
    tagged = datasets.Features({"tokens": datasets.List(datasets.Value("string"))})
    tagged["ner_tags"] = datasets.List(datasets.ClassLabel(names=["O", "B-PER"]))
    made = datasets.Dataset.from_dict({"tokens": [["Ann", "ran"]], "ner_tags": [[1, 0]]}, features=tagged)
    made.save_to_disk(tmp_path / "tags")
    assert [(e.texts, e.gold) for e in tags.read_ner(tmp_path / "tags", "en")] == [(("Ann", "ran"), ("B-PER", "O"))]


def squad_file(path: Path, *questions: dict[str, Any], context: str = "Ada wrote it in 1843.") -> Path:
    tree = {"data": [{"title": "t", "paragraphs": [{"context": context, "qas": list(questions)}]}]}
    path.write_text(json.dumps(tree, indent=1))
    return path


def question(key: str, text: str, *answers: tuple[str, int]) -> dict[str, Any]:
    return {"id": key, "question": text, "answers": [{"text": a, "answer_start": at} for a, at in answers]}


def test_questions_of_squad(tmp_path: Path) -> None:
    path = squad_file(tmp_path / "a.json", question("q1", "Who?", ("Ada", 0)), question("q2", "When?", ("1843", 16)))
    assert [(e.key, e.texts, e.gold) for e in qa.read(path, "en")] == [
        ("q1", ("Who?", "Ada wrote it in 1843."), (("Ada", 0),)),
        ("q2", ("When?", "Ada wrote it in 1843."), (("1843", 16),)),
    ]


GOOD = "1\tThe\t_\tDET\t_\t_\t_\t_\t_\t_\n"
BAD = {
    "columns": (tags.read_pos, GOOD + "2\tend\tNOUN\n", r"line 2 .*3 columns.*10"),
    "number": (tags.read_pos, GOOD + GOOD, r"line 2: .*'1'.*'The'"),
    "spaces": (tags.read_pos, GOOD.replace("\t", "  "), r"line 1.*'_'.*NOUN"),
    "tag": (tags.read_pos, "The\tDT\n", r"line 1.*'DT'.*NOUN"),
    "part of speech": (tags.read_pos, GOOD.replace("DET", "DT"), r"line 1.*'DT'.*NOUN"),
    "no sentence": (tags.read_pos, "# nothing\n", r"has no sentence"),
    "bio": (tags.read_ner, "a\tO\nb\tLOC\n", r"line 2.*'LOC'.*B-TYPE"),
    "half a sentence": (tags.read_ner, "a\tO\nb\n", r"line 1 .*fix"),
    "no word": (tags.read_ner, "\tO\n", r"line 1 .*`word<TAB>tag`"),
    "two columns": (classification.read, "a\tb\tneutral\nc\td\n", r"line 2 .*2 columns.*3"),
    "one column": (classification.read, "a\n", r"line 1 .*1 columns.*label"),
    "empty sentence": (classification.read, "a\tb\tneutral\n \td\tneutral\n", r"line 2.*empty"),
    "not json": (qa.read, '{"data": [\n{,}]}', r"is not JSON.*line 2"),
    "no context": (qa.read, '{"data": [{"paragraphs": [{"qas": []}]}]}', r"paragraphs\[0\].*'context'"),
    "a list": (qa.read, '{"data": [[]]}', r"data .*SQuAD 1.1"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_files_are_named_by_file_and_line(tmp_path: Path, what: str) -> None:
    read, text, problem = BAD[what]
    path = tmp_path / "bad.txt"
    path.write_text(text)
    with pytest.raises(UserError, match=problem) as raised:
        read(path, "en")
    assert str(path) in str(raised.value)


def test_an_answer_that_stands_elsewhere_is_named(tmp_path: Path) -> None:
    path = squad_file(tmp_path / "a.json", question("q1", "Who?", ("Ada", 0)), question("q2", "When?", ("1843", 15)))
    with pytest.raises(UserError, match=r"a\.json.*'q2'.*'1843'.*answer_start 15"):
        qa.read(path, "en")
    with pytest.raises(UserError, match=r"b\.json.*'q3' has no answer"):
        qa.read(squad_file(tmp_path / "b.json", question("q3", "Who?")), "en")


# Scores


def test_answers_are_compared_as_squads_script_does() -> None:
    for text, normal in {
        "The  Cat's, hat!": "cats hat",
        "an apple a day": "apple day",
        "Die «Katze»": "die «katze»",  # ASCII punctuation and English articles alone
        "theatre": "theatre",
    }.items():
        assert squad.normalize(text) == normal
    for said, gold, f1 in [
        ("cats hat", "cats", 2 / 3),
        ("a b b", "b b c", 2 / 3),
        ("", "", 0.0),  # as the script has it: no word is shared
        ("x", "y", 0.0),
    ]:
        assert squad.f1(said, gold) == pytest.approx(f1)


def test_answers_are_compared_as_mlqas_script_does() -> None:
    for language, text, normal in [
        ("de", "Die «Katze» des Hauses", "katze hauses"),
        ("de", "the end", "the end"),
        ("en", "the end—now", "endnow"),
        ("es", "La casa, unas flores", "casa flores"),
        ("vi", "những con mèo", "con mèo"),
        ("ar", "البيت", "بيت"),
        ("hi", "the अंत।", "the अंत"),
        ("zh", "在1997年，香港 Hong Kong。", "在 1997 年 香 港 hong kong"),
    ]:
        assert squad.normalize_mlqa(text, language) == normal


def test_the_best_of_several_gold_answers_counts() -> None:
    examples = [
        LabelledExample("a", ("de", "de"), ("?", "..."), (("der Hund", 0), ("ein großer Hund", 0))),
        LabelledExample("b", ("de", "de"), ("?", "..."), (("1843", 0),)),
    ]
    found = qa.score(examples, ["großer Hund", "1842"], "de", mlqa=True)
    assert found == {"f1": pytest.approx(0.5), "exact_match": pytest.approx(0.5)}
    found = qa.score(examples, ["großer Hund", "1842"], "de")
    assert found == {"f1": pytest.approx((2 * 1 * (2 / 3) / (1 + 2 / 3)) / 2), "exact_match": 0.0}


def entities(sequence: list[str]) -> set[tuple[int, int, str]]:
    """conlleval's: a B-, or an I- after another type or O, begins an entity, which its I- go on."""
    found, start = set(), 0
    for i, tag in enumerate(sequence):
        continues_document = (
            i > 0 and tag.startswith("I-") and sequence[i - 1][2:] == tag[2:] and sequence[i - 1] != "O"
        )
        start = start if continues_document else i
        last = i + 1 == len(sequence) or not (sequence[i + 1].startswith("I-") and sequence[i + 1][2:] == tag[2:])
        if tag != "O" and last:
            found.add((start, i, tag[2:]))
    return found


def test_entities_are_counted_as_brute_force_does() -> None:
    names = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]
    draw = np.random.default_rng(0)
    gold, said = ([[names[i] for i in draw.integers(0, 5, 12)] for _ in range(50)] for _ in range(2))
    examples = [LabelledExample(str(i), ("en",), ("w",) * 12, tuple(of)) for i, of in enumerate(gold)]
    right = sum(len(entities(a) & entities(b)) for a, b in zip(gold, said, strict=True))
    wanted, given = (sum(len(entities(of)) for of in side) for side in (gold, said))
    found = tags.score_ner(examples, said, "en")
    assert found["precision"] == pytest.approx(right / given)
    assert found["recall"] == pytest.approx(right / wanted)
    assert found["f1"] == pytest.approx(2 * right / (given + wanted))


def test_accuracy_and_f1_of_words_and_pairs() -> None:
    words = [
        LabelledExample("1", ("en",), ("a", "b"), ("NOUN", "VERB")),
        LabelledExample("2", ("en",), ("c",), ("NOUN",)),
    ]
    found = tags.score_pos(words, [["NOUN", "NOUN"], ["NOUN"]], "en")
    assert found == {
        "accuracy": pytest.approx(2 / 3),
        "macro_f1": pytest.approx((4 / 5 + 0) / 2),
        "xtreme_f1": pytest.approx(2 / 5),  # two nouns in a row are one: 1 right of 2 said and of 3 that are there
    }
    couples = [LabelledExample(str(i), ("en", "en"), ("a", "b"), (label,)) for i, label in enumerate("xxy")]
    found = classification.score(couples, ["x", "y", "y"], "en")
    assert found == {"accuracy": pytest.approx(2 / 3), "macro_f1": pytest.approx((2 / 3 + 2 / 3) / 2)}


# From text to what the head says


def said(model: ExportedModel, task: Task, features: list[Any], labels: list[str]) -> tuple[list[np.ndarray], Any]:
    """What the head says of each feature, and transformers' model; its head is drawn with seed 5."""
    collator = Collator(model, ["en", "de"], task.head_labels)
    torch.manual_seed(5)
    whole = FineTuner(task, SETTINGS, collator, Path()).load_model(labels).eval()
    torch.nn.init.normal_(whole.classifier.weight)
    with torch.no_grad():
        outputs = whole(**collator([[feature] for feature in features], with_labels=False)).logits.numpy()
    return [task.select_logits(outputs, number, feature) for number, feature in enumerate(features)], whole


def test_a_words_tag_is_read_from_its_first_token(model: ExportedModel, tokenizer: Tokenizer) -> None:
    """The same as transformers, of one padded sentence at a time, whose tokens are found word by word."""
    words = words_of(tokenizer)
    sentences = [[words[(7 * i + 11 * n) % 60] for n in range(3 + i)] for i in range(4)]
    examples = [LabelledExample(str(i), ("en",), tuple(s), None) for i, s in enumerate(sentences)]
    features = tags.POS.encode(examples, model.tokenizer, 40, tags.UPOS)
    found, whole = said(model, tags.POS, features, tags.UPOS)
    cut = 0
    for sentence, logits in zip(sentences, found, strict=True):
        ids, firsts = [tokenizer.cls_id], []
        for word in sentence:
            firsts.append(len(ids))
            ids += tokenizer.hf(word, add_special_tokens=False)["input_ids"]
            cut += len(ids) - firsts[-1] > 1
        with torch.no_grad():
            expected = whole(torch.tensor([[*ids, tokenizer.sep_id]])).logits[0, firsts]
        torch.testing.assert_close(torch.from_numpy(logits), expected, rtol=1e-4, atol=1e-4)
    assert cut, "no word has several tokens"


def test_a_pair_is_read_with_its_token_types(
    model: ExportedModel, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(classification, "TOKENIZER_BATCH", 2)
    words = words_of(tokenizer)
    texts = [(" ".join(words[i : i + 3]), " ".join(words[i + 9 : i + 9 + 2 * i])) for i in (1, 2, 3)]
    examples = [LabelledExample(str(i), ("en", "de"), pair, ("b",)) for i, pair in enumerate(texts)]
    features = classification.encode(examples, model.tokenizer, 40, ["a", "b"])
    found, whole = said(model, measure.TASKS["xnli"], features, ["a", "b"])
    for pair, logits in zip(texts, found, strict=True):
        a, b = (tokenizer.hf(text, add_special_tokens=False)["input_ids"] for text in pair)
        ids = [tokenizer.cls_id, *a, tokenizer.sep_id, *b, tokenizer.sep_id]
        types = [0] * (len(a) + 2) + [1] * (len(b) + 1)
        with torch.no_grad():
            expected = whole(torch.tensor([ids]), token_type_ids=torch.tensor([types])).logits
        torch.testing.assert_close(torch.from_numpy(logits), expected, rtol=1e-4, atol=1e-4)
    assert [(feature.example_index, feature.labels.tolist()) for feature in features] == [(0, [1]), (1, [1]), (2, [1])]


def test_every_word_of_a_long_sentence_has_one_tag(model: ExportedModel, tokenizer: Tokenizer) -> None:
    words = (words_of(tokenizer) * 3)[:100]
    gold = tuple(tags.UPOS[len(word) % 17] for word in words)
    features = tags.POS.encode([LabelledExample("1", ("en",), tuple(words), gold)], model.tokenizer, 20, tags.UPOS)
    assert len(features) > 5
    assert all(feature.num_tokens <= 18 and len(feature.positions) == len(feature.labels) for feature in features)
    logits = [np.eye(17)[feature.labels] for feature in features]
    assert tags.predict([LabelledExample("1", ("en",), tuple(words), gold)], features, logits, tags.UPOS) == [
        list(gold)
    ]


def test_an_answer_is_found_in_a_long_context(model: ExportedModel, tokenizer: Tokenizer) -> None:
    """Gold places, said with certainty, are the gold answers again, whichever of the overlapping sequences has them."""
    words = words_of(tokenizer)
    context = " ".join(f"{word}," for word in words)
    answers = [words[0], f"{words[20]}, {words[21]}", words[-1]]
    examples = [
        LabelledExample(str(i), ("en", "en"), (f"{words[i]} ?", context), ((text, context.index(text)),))
        for i, text in enumerate(answers)
    ]
    features = qa.encode(examples, model.tokenizer, 40, qa.XQUAD.list_labels([]))
    logits = []
    for feature in features:
        of_feature = np.zeros((len(feature.positions), 2))
        of_feature[feature.labels[0], 0] = of_feature[feature.labels[1], 1] = 9.0 if feature.labels[0] else 0.0
        logits.append(of_feature)
        first, second = (ids.tolist() for ids in feature.ids)
        whole = [tokenizer.cls_id, *first, tokenizer.sep_id, *second, tokenizer.sep_id]
        assert [whole[place] for place in feature.positions] == [tokenizer.cls_id, *second]
    covered = {int(start) for f in features if f.example_index == 0 and f.spans is not None for start in f.spans[:, 0]}
    assert len(covered) == len(tokenizer.encode([context])[0]), "a token of the context is in no sequence"
    assert qa.predict(examples, features, logits, []) == answers


def test_best_span_is_that_of_all_pairs() -> None:
    draw = np.random.default_rng(0)
    for length in (1, 3, 9):
        logits = draw.normal(size=(length, 2))
        allowed = [(i, j) for i in range(length) for j in range(i, min(i + 4, length))]
        best = max(allowed, key=lambda at: logits[at[0], 0] + logits[at[1], 1])
        assert qa.best_span(logits, 4)[1:] == best


def test_labels_stand_where_the_heads_look(model: ExportedModel, tokenizer: Tokenizer) -> None:
    """At each word's first token and nowhere else; an answer at its first and last token, or at [CLS]."""
    words = words_of(tokenizer)[36:44]
    sentences = [
        LabelledExample(str(n), ("en",), tuple(words[: n + 3]), ("NOUN", "VERB", "X", "ADJ", "ADV")[: n + 3])
        for n in (0, 2)
    ]
    features = tags.encode(sentences, model.tokenizer, 40, tags.UPOS)
    batch = Collator(model, ["en"], tags.head_labels)([[feature] for feature in features])
    for row, sentence in enumerate(sentences):
        expected = [-100]
        for word, tag in zip(sentence.texts, sentence.gold or (), strict=True):
            expected += [tags.UPOS.index(tag), *[-100] * (len(tokenizer.encode_inside([word])[0]) - 1)]
        padding = batch["labels"].shape[1] - len(expected)
        assert batch["labels"][row].tolist() == [*expected, *[-100] * padding]
        assert batch["attention_mask"][row].sum() == len(expected) + 1
    context = " ".join(words)
    asked = [
        LabelledExample(key, ("en", "en"), (words[0], context), ((words[at], context.index(words[at])),))
        for key, at in (("a", 1), ("b", 7))
    ]
    features = qa.encode(asked, model.tokenizer, 14, [])
    batch = Collator(model, ["en"], qa.head_labels)([[feature] for feature in features])
    found = {"a": set[str](), "b": set[str]()}
    for ids, start, end, feature in zip(
        batch["input_ids"], batch["start_positions"], batch["end_positions"], features, strict=True
    ):
        if start:
            found[asked[feature.example_index].key].add(tokenizer.hf.decode(ids[start : end + 1]).replace(" ", ""))
        else:
            assert end == 0
    assert found == {"a": {words[1]}, "b": {words[7]}}


def test_what_is_not_finite_has_no_score(model: ExportedModel) -> None:
    features = tags.encode([LabelledExample("1", ("en",), ("word",), None)], model.tokenizer, 40, tags.UPOS)
    collator = Collator(model, ["en"], tags.head_labels)
    tuner = FineTuner(tags.POS, SETTINGS, collator, Path())
    said = np.full((1, 3, 17), np.nan)
    trainer: Any = SimpleNamespace(predict=lambda features: SimpleNamespace(predictions=said))
    with pytest.raises(NotFinite, match="--lr"):
        tuner.predict_logits(trainer, features)


def test_settings_and_seed_decide_a_run(model: ExportedModel, tmp_path: Path) -> None:
    examples = [LabelledExample(str(n), ("en", "en"), (f"word {n}", "end"), ("ab"[n % 2],)) for n in range(4)]
    features = classification.encode(examples, model.tokenizer, 40, ["a", "b"])
    collator = Collator(model, ["en"], classification.head_labels)
    tuner = FineTuner(classification.XNLI, replace(SETTINGS, warmup=7.0), collator, tmp_path)
    given = tuner.training_arguments([features[:2], features[2:]], 5)
    assert (given.warmup_steps, given.learning_rate, given.num_train_epochs, given.seed) == (7, 5e-5, 3, 5)
    assert given.per_device_train_batch_size == 16, "32 sequences are 16 groups of 2"
    heads = [tuner.train([[f] for f in features], ["a", "b"], seed).model.classifier.weight for seed in (0, 0, 1)]
    assert torch.equal(heads[0], heads[1]) and not torch.allclose(heads[0], heads[2], atol=0.01)


# Runs


def data(language: str, labels: str = "xy", shift: int = 0) -> TaskData:
    examples = [
        LabelledExample(
            str(i), (language, language), (f"{language} a{i + shift}", f"{language} b{i}"), (labels[i % len(labels)],)
        )
        for i in range(6)
    ]
    return TaskData(Path(f"{language}.tsv"), language, examples)


def test_which_runs_the_texts_allow() -> None:
    """The source language's serves every test, others their own; translations those of their language."""
    task = measure.TASKS["xnli"]
    tests = {language: data(language) for language in ("en", "de", "fr")}
    train = {"en": data("en"), "de": data("de")}
    found = plan_training(task, train, {"fr": data("fr")}, tests, "en", code_switch=False)
    assert [(training.name, training.tests) for training in found] == [
        ("en", {"en": "supervised", "de": "zero-shot", "fr": "zero-shot"}),
        ("de", {"de": "supervised"}),
        ("fr translate-train", {"fr": "translate-train"}),
    ]


def test_both_halves_of_a_switched_pair_stand_together() -> None:
    task, tests = measure.TASKS["pawsx"], {"de": data("de")}
    found = plan_training(task, {"en": data("en")}, {"de": data("de")}, tests, "en", code_switch=True)[1]
    assert [(e.langs, e.texts) for e in found.groups[2]] == [
        (("de", "en"), ("de a2", "en b2")),
        (("en", "de"), ("en a2", "de b2")),
    ]
    other = data("de", labels="yx")
    with pytest.raises(UserError, match=r"de.tsv.*en.tsv: line 0"):
        plan_training(task, {"en": data("en")}, {"de": other}, tests, "en", code_switch=True)


def test_questions_are_switched_with_the_contexts_answers() -> None:
    a = LabelledExample("q", ("en", "en"), ("who", "Ada wrote"), (("Ada", 0),))
    b = LabelledExample("q", ("de", "de"), ("wer", "Es war Ada"), (("Ada", 7),))
    source, translated = TaskData(Path("en.json"), "en", [a]), TaskData(Path("de.json"), "de", [b])
    ((first, second),) = switch_codes(qa.XQUAD, source, translated)
    assert first == LabelledExample("q", ("de", "en"), ("wer", "Ada wrote"), (("Ada", 0),))
    assert second == LabelledExample("q", ("en", "de"), ("who", "Es war Ada"), (("Ada", 7),))


def test_a_label_that_occurs_only_in_a_test_is_an_error() -> None:
    task, tests = measure.TASKS["xnli"], {"en": data("en"), "de": data("de", labels="xyz")}
    with pytest.raises(UserError, match=r"de.tsv: line 2.*'z'.*en.tsv.*x, y"):
        plan_training(task, {"en": data("en")}, {}, tests, "en", code_switch=False)


def test_one_part_of_speech_is_nothing_to_learn_from() -> None:
    one = TaskData(Path("en.conllu"), "en", [LabelledExample("1", ("en",), ("a", "b"), ("NOUN", "NOUN"))])
    with pytest.raises(UserError, match=r"en\.conllu.*NOUN"):
        plan_training(tags.POS, {"en": one}, {}, {"en": one}, "en", code_switch=False)


def test_means_deviations_delta_and_the_majority() -> None:
    task, tests = measure.TASKS["xnli"], {"en": data("en", "xxy"), "de": data("de", "xxy")}
    plan = plan_training(task, {"en": data("en", "xxy"), "de": data("de")}, {}, tests, "en", code_switch=False)
    scores = TransferTable(task, tests)
    right = [e.gold[0] for e in tests["de"].examples if e.gold]
    scores.add(plan[0], {"en": [right, right], "de": [["x"] * 6, right]})
    scores.add(plan[1], {"de": [right, [*right[:5], "x"]]})
    assert scores.seeds["de zero-shot"]["accuracy"] == pytest.approx([2 / 3, 1])
    assert scores.summary["de"] == {
        "zs": pytest.approx(5 / 6),
        "zs_std": pytest.approx(np.std([2 / 3, 1], ddof=1)),
        "majority": pytest.approx(2 / 3),
        "sup": pytest.approx(11 / 12),
        "sup_std": pytest.approx(np.std([1, 5 / 6], ddof=1)),
        "delta": pytest.approx(1 / 12),
        "delta_std": pytest.approx(np.std([1 / 3, -1 / 6], ddof=1)),  # of each seed, supervised less zero-shot
    }
    assert scores.summary["en"]["sup"] == 1.0
    alone = TransferTable(task, tests)
    alone.add(plan[1], {"de": [right]})
    assert alone.summary["de"] == {"sup": 1.0, "majority": pytest.approx(2 / 3)}, "one seed has no deviation"
    assert not any(name.endswith("_std") for name in alone.rows["de supervised"])


def test_predictions_as_xtreme_reads_them(tmp_path: Path) -> None:
    """Its readers: a label a line; a tag a line with a blank line behind each sentence; an object of answers by id."""
    tests = {"en": data("en"), "de": data("de")}
    task = measure.TASKS["xnli"]
    (training,) = plan_training(task, {"en": data("en")}, {}, tests, "en", code_switch=False)
    write_predictions(tmp_path, task, training, tests, {"en": [["x"] * 6], "de": [["y", *"xxxxx"]]}, [7])
    written = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.*sv"))
    modes = ("supervised.seed_7/xnli/test-en", "zero-shot.seed_7/xnli/test-de", "zero-shot.seed_7/xnli/test-en")
    assert written == [f"{name}.tsv" for name in modes]
    assert (tmp_path / written[1]).read_text().splitlines() == ["y", *"xxxxx"]
    assert tags.format_predictions([], [["B-LOC", "I-LOC"], ["O"]]) == "B-LOC\nI-LOC\n\nO\n\n"
    questions = [LabelledExample(key, ("zh", "zh"), ("?", "香港"), None) for key in "ab"]
    assert json.loads(qa.format_predictions(questions, ["香港", ""])) == {"a": "香港", "b": ""}


def test_the_page_has_xtremes_names() -> None:
    """The page names the tasks whose folder in XTREME has another name."""
    rows = [line for line in (launch.ROOT / "docs" / "fine-tuning.md").read_text().splitlines() if line[:3] == "| `"]
    for name, task in measure.TASKS.items():
        (row,) = [row for row in rows if f"`{name}`" in row.split("|")[1]]
        assert f"`{task.xtreme_folder}`" in row.split("|")[1]


def test_intents_of_multiatis(tmp_path: Path) -> None:
    """Columns as its files have them. An intent that only a test has counts as wrong, for MultiATIS++ alone."""
    head, of = "id\tutterance\tslot_labels\tintent\n", dict[str, TaskData]()
    for part, intents in (("train", "ab"), ("test", "abc")):
        (tmp_path / f"{part}_DE.tsv").write_text(head + "".join(f"{n}\tzeig flüge\tO O\t{n}\n" for n in intents))
        of |= measure.read_files(measure.TASKS["multiatis"], [f"de={tmp_path}/{part}_DE.tsv"], f"--{part}", None)
        data = of["de"]
        assert [(e.texts, e.gold) for e in data.examples] == [(("zeig flüge",), (n,)) for n in intents]
        of[part] = data
    task = measure.TASKS["multiatis"]
    plan_training(task, {"de": of["train"]}, {}, {"de": of["test"]}, "de", False)
    assert task.score(of["test"].examples, ["a", "b", "a"], "de")["accuracy"] == pytest.approx(2 / 3)
    with pytest.raises(UserError, match="'c' is nowhere in"):
        plan_training(measure.TASKS["massive"], {"de": of["train"]}, {}, {"de": of["test"]}, "de", False)


def test_sentences_of_sib200_taxi1500_and_massive(tmp_path: Path, model: ExportedModel) -> None:
    """Header and columns as their files have them; a long sentence is cut at its end."""
    path, read = tmp_path / "test.tsv", measure.TASKS["sib200"].read
    path.write_text('index_id\tcategory\ttext\n7\tscience/technology\tA "mix" of\n9\ttravel\tgo\n')
    found = read(path, "de")
    assert [(e.key, e.langs, e.texts, e.gold) for e in found] == [
        ("2", ("de",), ('A "mix" of',), ("science/technology",)),
        ("3", ("de",), ("go",), ("travel",)),
    ]
    for head in ("id\tlabel\tverse\n", ""):
        path.write_text(head + "40001\tGrace\tHe said\n")
        assert [(e.texts, e.gold) for e in measure.TASKS["taxi1500"].read(path, "de")] == [(("He said",), ("Grace",))]
    path.write_text("7\tA mix of\ttravel\n")
    with pytest.raises(UserError, match=r"test\.tsv: line 1 has 3 columns instead of 2: `sentence<TAB>label`"):
        read(path, "de")
    lines = [{"id": str(n), "locale": "de-DE", "partition": part, "intent": "alarm_set", "utt": part}
             for n, part in enumerate(("train", "dev", "test"))]  # fmt: skip
    (tmp_path / "de-DE.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for option, part in (("--train", "train"), ("--test", "test")):
        data = measure.read_files(measure.TASKS["massive"], [f"de={tmp_path}/de-DE.jsonl"], option, None)["de"]
        assert [(e.texts, e.gold) for e in data.examples] == [((part,), ("alarm_set",))]
    path.write_text("one\ta\ntwo\n")
    with pytest.raises(UserError, match=r"test\.tsv: line 2 has 1 columns"):
        read(path, "de")
    words = words_of(model.tokenizer)
    examples = [LabelledExample("1", ("en",), (" ".join(words[:30]),), ("a",))]
    (feature,) = classification.encode(examples, model.tokenizer, 12, ["a"])
    assert feature.ids[0].tolist() == model.tokenizer.encode([examples[0].texts[0]])[0][:10]
    majority = predict_majority(measure.TASKS["sib200"], found, found)
    assert majority == ["science/technology"] * 2 and classification.score(found, majority, "de")["accuracy"] == 0.5


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--train en=absent.tsv", "absent.tsv"),
        ("--train de.tsv", "--train de.tsv: .*LANG=FILE"),
        ("--train en=de.tsv en=de.tsv", "each language once"),
        ("--train fr=de.tsv --source en", "--source en .*--train.*fr"),
        ("--train en=de.tsv de=de.tsv fr=de.tsv", "--train fr=.*--test fr=FILE"),
        ("--train en=bare.tsv", "bare.tsv: line 1 .*label"),
        ("--train en=de.tsv --test de=bare.tsv", "bare.tsv .*--predictions DIR"),
        ("--train en=one.tsv", "one.tsv .*neutral"),
        ("--train en=de.tsv --code_switch", "--code_switch needs --translated"),
        ("--translated de=de.tsv --code_switch", "--code_switch needs --train"),
        ("--train en=one.tsv --translated de=de.tsv --code_switch", "2 is not in .*one.tsv"),
        ("--train en=de.tsv --translated de=one.tsv --code_switch", "one.tsv lacks line or question 2"),
        ("--train deu=de.tsv", "deu=.*--test de are .*one language"),
        ("--train en=de.tsv --lr nan", "--lr nan"),
        ("--train en=de.tsv --predictions de.tsv", "de.tsv/predictions.json"),
        ("--train en=de.tsv --seeds 1 1", "--seeds 1 1"),
        ("--train en=de.tsv --keep=", "--keep= is empty"),
    ],
)
def test_what_a_user_does_wrong_is_said_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, words: str, problem: str
) -> None:
    (tmp_path / "de.tsv").write_text("a\tb\tneutral\nc\td\tentailment\n")
    (tmp_path / "one.tsv").write_text("a\tb\tneutral\n")
    (tmp_path / "bare.tsv").write_text("a\tb\nc\td\n")
    monkeypatch.chdir(tmp_path)
    given = f"--model hf --task xnli --test de=de.tsv --out out.json {words}"
    assert command.main(given.split()) == 2
    assert re.search(problem, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "out.json"), 4, "error: out.json: No space left on device"),
        (NotFinite("the loss of epoch 1 is nan; take a smaller --lr"), 3, "error: the loss of epoch 1 is nan"),
    ],
)
def test_exit_codes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, error: Exception, code: int, said: str
) -> None:
    def fail(*given: Any) -> None:
        raise error

    monkeypatch.setattr(command, "measure_transfer", fail)
    assert command.main(f"--model hf --task xnli --train en=a --test en=a --out {tmp_path}/out".split()) == code
    assert said in capsys.readouterr().err


# Whole runs


@pytest.fixture(scope="module")
def tagged(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    """en.conllu to train on, de.conllu to test, with tags that follow from the words."""
    folder, words, draw = tmp_path_factory.mktemp("tagged"), words_of(tokenizer), np.random.default_rng(1)
    for name, count in (("en", 45), ("de", 20)):
        drawn = [draw.integers(0, 60, 3 + number % 5) for number in range(count)]
        text = conllu([[(words[i], tags.UPOS[i % 5]) for i in sentence] for sentence in drawn])
        (folder / f"{name}.conllu").write_text(text)
    return folder


def exported(folder: Path, tokenizer: Tokenizer, dropout: float) -> Path:
    torch.manual_seed(0)
    shape = SHAPE | {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    config = BertConfig(**shape, vocab_size=tokenizer.vocab_size, max_position_embeddings=40)
    AutoModelForMaskedLM.from_config(config).save_pretrained(folder)
    tokenizer.hf.save_pretrained(folder)
    return folder


def test_a_command_trains_scores_and_keeps_models(
    tmp_path: Path, hf: Path, model: ExportedModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From what is kept, transformers predicts what the command has predicted."""
    monkeypatch.setattr(command.ranks, "join_process_group", lambda process: None)
    # Without a launcher's variables, accelerate leaves no process group behind for the tests that come after.
    monkeypatch.setattr(command.ranks, "read_launcher", lambda: command.Process(0, 1, 0, 1))
    monkeypatch.chdir(tmp_path)
    words = words_of(model.tokenizer)
    for language in ("en", "de"):
        pairs_of = [(" ".join(words[n : n + 1 + 5 * (n % 3)]), words[3 * n]) for n in range(9)]
        lines = [f"{a}\t{b}\t{'ab'[n % 3 > 1]}\n" for n, (a, b) in enumerate(pairs_of)]
        Path(f"{language}.tsv").write_text("".join(lines))
    given = f"--model {hf} --task xnli --train en=en.tsv de=de.tsv --test en=en.tsv de=de.tsv --translated de=de.tsv"
    given += (
        " --code_switch --seeds 0 1 --epochs 1 --batch 4 --test_limit 5 --out out.json --keep kept --predictions said"
    )
    assert command.main(given.split()) == 0
    found = json.loads(Path("out.json").read_text())
    summary = found["results"]["xnli"]["de"]
    assert set(summary) == {f"{name}{s}" for name in ("zs", "sup", "tt", "delta") for s in ("", "_std")} | {"majority"}
    assert summary["majority"] == 0.8 and found["results"]["xnli"]["de zero-shot"]["examples"] == 5
    assert all(len(values) == 2 for row in found["seeds"]["xnli"].values() for values in row.values())
    assert (found["settings"]["seeds"], found["settings"]["lr"], found["settings"]["epochs"]) == ([0, 1], 5e-5, 1)
    names = [f"{name}.seed_{seed}" for name in ("de", "de_translate-train_code-switched", "en") for seed in (0, 1)]
    assert sorted(path.name for path in Path("kept").iterdir()) == names
    card = ModelCard.load("kept/en.seed_1/README.md").data
    of_card = {(one.dataset_name, one.metric_type): one.metric_value for one in card.eval_results}
    seeds = found["seeds"]["xnli"]["de zero-shot"]["accuracy"]
    assert of_card["de zero-shot", "accuracy"] == pytest.approx(seeds[1]) and card.pipeline_tag == "text-classification"
    tuned = AutoModelForSequenceClassification.from_pretrained("kept/en.seed_1").eval()
    reader = AutoTokenizer.from_pretrained("kept/en.seed_1")
    texts = [line.split("\t")[:2] for line in Path("de.tsv").read_text().splitlines()[:5]]
    with torch.no_grad():
        said = [
            int(tuned(**reader(*pair, return_tensors="pt", return_token_type_ids=True)).logits.argmax())
            for pair in texts
        ]
    predicted = Path("said/zero-shot.seed_1/xnli/test-de.tsv").read_text().split()
    assert [tuned.config.id2label[label] for label in said] == predicted and set(predicted) == {"a", "b"}
    assert "supervised - zero-shot" in capsys.readouterr().out


def arguments(model: Path, tagged: Path, out: Path, *more: object) -> list[str]:
    texts = f"--train en={tagged}/en.conllu --test en={tagged}/en.conllu de={tagged}/de.conllu"
    given = f"xscale.eval.finetune --model {model} --task pos {texts} --epochs 4 --batch 4 --lr 3e-3 --out {out}"
    return [*given.split(), *map(str, more)]


@pytest.mark.slow
def test_several_ranks_learn_and_keep_a_model(tmp_path: Path, tagged: Path, tokenizer: Tokenizer) -> None:
    """Two ranks fine-tune with DeepSpeed's engine, and with DistributedDataParallel, which warns of nothing."""
    model, out, keep = exported(tmp_path / "hf", tokenizer, 0.0), tmp_path / "out.json", tmp_path / "kept"
    config = launch.ROOT / "ds_configs/zero2_cpu.json"
    words = arguments(model, tagged, out, "--seeds", 3, 4, "--ds_config", config, "--keep", keep)
    code, printed = launch.fork(2, ["-m", *words], launch.environment())
    assert code == 0, printed[-6000:]
    found = json.loads(out.read_text())["results"]["pos"]["en"]
    assert found["sup"] > 0.5 > found["majority"]
    kept = {file.name: file.stat().st_mode & 0o777 for file in (keep / "en.seed_4").iterdir()}
    (tmp_path / "new").touch()
    mode = (tmp_path / "new").stat().st_mode & 0o777
    names = ["README.md", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert kept == dict.fromkeys(names, mode)
    assert AutoModelForTokenClassification.from_pretrained(keep / "en.seed_4").config.id2label[0] == tags.UPOS[0]
    words = ["-m", *arguments(model, tagged, tmp_path / "plain.json", "--seeds", 3)]
    code, printed = launch.fork(2, words, launch.environment())
    assert code == 0, printed[-6000:]
    assert json.loads((tmp_path / "plain.json").read_text())["results"]["pos"]["en"]["sup"] > 0.5
    assert "find_unused_parameters" not in printed and "Warning" not in printed
