"""Fine-tuning: files, encodings, scores and the plan, each against something that shares no code with it."""

import errno
import json
import lzma
import re
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForMaskedLM, BertConfig

from tests import launch
from tests.rows import one_thread  # noqa: F401
from xscale import files, rng
from xscale.data.tokenizer import Tokenizer
from xscale.errors import NotFinite, UserError
from xscale.eval.finetune import __main__ as command
from xscale.eval.finetune import loop, pairs, qa, squad, tags
from xscale.eval.finetune.loop import Rows, Settings, Tuned, Tuner
from xscale.eval.finetune.runs import Runs, Scores, trainings, write_predictions
from xscale.eval.finetune.task import Data, Encoding, Example, Task
from xscale.eval.model import Exported
from xscale.ranks import Control

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
def model(hf: Path) -> Exported:
    return Exported(hf)


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
    found = pairs.read(path, "de")
    assert [(e.texts, e.gold, e.langs) for e in found] == [
        (("a b", "c"), ("neutral",), ("de", "de")),
        (("d", "e"), ("contradiction",), ("de", "de")),
    ]
    path.write_text(
        "language\tgold_label\tpairID\tsentence1\tsentence2\nde\tneutral\t1\ta\tb\nen\tneutral\t2\tc\td\nde\t-\t3\te\tf\n"
    )
    assert [(e.key, e.texts, e.gold) for e in pairs.read(path, "de")] == [("2", ("a", "b"), ("neutral",))]
    path.write_text("\n a\tb\t0\r\n\r\nc\td\t1\n\n \n")
    assert [(e.key, e.gold) for e in pairs.read(path, "de")] == [("2", ("0",)), ("4", ("1",))]
    path = tmp_path / "a.jsonl"
    path.write_text('{"premise": "a", "hypothesis": "b", "label": -1}\n\n')
    assert [(e.key, e.gold) for e in pairs.read(path, "de")] == [("1", None)], "datasets' word for no label"


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
        assert [(e.key, e.texts, e.gold) for e in pairs.read(tmp_path / name, "en")] == expected, name
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
    "columns": (tags.read_pos, GOOD + "2\tend\tNOUN\n", r"line 2 has 3 columns; CoNLL-U has 10"),
    "number": (tags.read_pos, GOOD + GOOD, r"line 2: '1' 'The' is not word 2"),
    "spaces": (tags.read_pos, GOOD.replace("\t", "  "), r"line 1: the tag '_' is not one of UD's"),
    "tag": (tags.read_pos, "The\tDT\n", r"line 1: the tag 'DT' is not one of UD's"),
    "part of speech": (tags.read_pos, GOOD.replace("DET", "DT"), r"line 1: 'DT' in column 4 is no part of speech"),
    "no sentence": (tags.read_pos, "# nothing\n", r"has no sentence"),
    "bio": (tags.read_ner, "a\tO\nb\tLOC\n", r"line 2: the tag 'LOC' is not O, B-TYPE or I-TYPE"),
    "half a sentence": (tags.read_ner, "a\tO\nb\n", r"from line 1 has words with a tag and words without"),
    "no word": (tags.read_ner, "\tO\n", r"line 1 begins with no word"),
    "two columns": (pairs.read, "a\tb\tneutral\nc\td\n", r"line 2 has 2 columns instead of 3"),
    "one column": (pairs.read, "a\n", r"line 1 has 1 columns instead of 3"),
    "empty sentence": (pairs.read, "a\tb\tneutral\n \td\tneutral\n", r"line 2: a sentence is empty"),
    "not json": (qa.read, '{"data": [\n{,}]}', r"is not JSON.*line 2"),
    "no context": (qa.read, '{"data": [{"paragraphs": [{"qas": []}]}]}', r"data\[0\].paragraphs\[0\] has no 'context'"),
    "a list": (qa.read, '{"data": [[]]}', r"data is not as SQuAD's"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_files_are_named_by_file_and_line(tmp_path: Path, what: str) -> None:
    read, text, problem = BAD[what]
    path = tmp_path / "bad.txt"
    path.write_text(text)
    with pytest.raises(UserError, match=problem) as raised:
        read(path, "en")
    assert str(path) in str(raised.value)


def test_an_answer_that_stands_elsewhere_is_named_by_line(tmp_path: Path) -> None:
    path = squad_file(tmp_path / "a.json", question("q1", "Who?", ("Ada", 0)), question("q2", "When?", ("1843", 15)))
    number = path.read_text().splitlines().index('       "id": "q2",') + 1
    with pytest.raises(UserError, match=rf"line {number}: question 'q2': the answer '1843' does not stand at .* 15"):
        qa.read(path, "en")
    with pytest.raises(UserError, match="question 'q3' has no answer"):
        qa.read(squad_file(tmp_path / "b.json", question("q3", "Who?")), "en")


# Scores


def test_answers_are_compared_as_squads_script_does() -> None:
    for text, normal in {
        "The  Cat's, hat!": "cats hat",
        "an apple a day": "apple day",
        "Die «Katze»": "die «katze»",  # ASCII punctuation and English articles alone
        "theatre": "theatre",
    }.items():
        assert squad.normalized(text) == normal
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
        assert squad.mlqa_normalized(text, language) == normal


def test_the_best_of_several_gold_answers_counts() -> None:
    examples = [
        Example("a", ("de", "de"), ("?", "..."), (("der Hund", 0), ("ein großer Hund", 0))),
        Example("b", ("de", "de"), ("?", "..."), (("1843", 0),)),
    ]
    found = qa.score(examples, ["großer Hund", "1842"], "de", mlqa=True)
    assert found == {"f1": pytest.approx(0.5), "exact_match": pytest.approx(0.5)}
    found = qa.score(examples, ["großer Hund", "1842"], "de")
    assert found == {"f1": pytest.approx((2 * 1 * (2 / 3) / (1 + 2 / 3)) / 2), "exact_match": 0.0}


def entities(sequence: list[str]) -> set[tuple[int, int, str]]:
    """conlleval's: a B-, or an I- after another type or O, begins an entity, which its I- go on."""
    found, start = set(), 0
    for i, tag in enumerate(sequence):
        goes_on = i > 0 and tag.startswith("I-") and sequence[i - 1][2:] == tag[2:] and sequence[i - 1] != "O"
        start = start if goes_on else i
        last = i + 1 == len(sequence) or not (sequence[i + 1].startswith("I-") and sequence[i + 1][2:] == tag[2:])
        if tag != "O" and last:
            found.add((start, i, tag[2:]))
    return found


def test_entities_are_counted_as_brute_force_does() -> None:
    names = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]
    draw = np.random.default_rng(0)
    gold, said = ([[names[i] for i in draw.integers(0, 5, 12)] for _ in range(50)] for _ in range(2))
    examples = [Example(str(i), ("en",), ("w",) * 12, tuple(of)) for i, of in enumerate(gold)]
    right = sum(len(entities(a) & entities(b)) for a, b in zip(gold, said, strict=True))
    wanted, given = (sum(len(entities(of)) for of in side) for side in (gold, said))
    found = tags.score_ner(examples, said, "en")
    assert found["precision"] == pytest.approx(right / given)
    assert found["recall"] == pytest.approx(right / wanted)
    assert found["f1"] == pytest.approx(2 * right / (given + wanted))


def test_accuracy_and_f1_of_words_and_pairs() -> None:
    words = [Example("1", ("en",), ("a", "b"), ("NOUN", "VERB")), Example("2", ("en",), ("c",), ("NOUN",))]
    found = tags.score_pos(words, [["NOUN", "NOUN"], ["NOUN"]], "en")
    assert found == {"accuracy": pytest.approx(2 / 3), "macro_f1": pytest.approx((4 / 5 + 0) / 2)}
    couples = [Example(str(i), ("en", "en"), ("a", "b"), (label,)) for i, label in enumerate("xxy")]
    found = pairs.score(couples, ["x", "y", "y"], "en")
    assert found == {"accuracy": pytest.approx(2 / 3), "macro_f1": pytest.approx((2 / 3 + 2 / 3) / 2)}


# From text to what the head says


def rows_of(model: Exported, longest: int = 40) -> Rows:
    return Rows(model, model.numbers_of(["en", "de"]), longest)


def said(model: Exported, hf: Path, task: Task, features: list[Any], outputs: int) -> tuple[list[torch.Tensor], Tuned]:
    """What the head says of each feature."""
    module = Tuned(model.encoder, outputs, task.loss, seed=5).eval()
    inputs, counts = rows_of(model)(features, torch.device("cpu"))
    with torch.no_grad():
        return list(module(inputs, counts)[1].split(counts)), module


def test_a_words_tag_is_read_from_its_first_token(model: Exported, hf: Path, tokenizer: Tokenizer) -> None:
    """The same as transformers, of one padded sentence at a time, whose tokens are found word by word."""
    words = words_of(tokenizer)
    sentences = [[words[(7 * i + 11 * n) % 60] for n in range(3 + i)] for i in range(4)]
    examples = [Example(str(i), ("en",), tuple(s), None) for i, s in enumerate(sentences)]
    features = tags.POS.encode(examples, Encoding(model.tokenizer, 40, tags.UPOS))
    found, module = said(model, hf, tags.POS, features, 17)
    plain = AutoModelForMaskedLM.from_pretrained(hf).base_model.eval()
    cut = 0
    for sentence, logits in zip(sentences, found, strict=True):
        ids, firsts = [tokenizer.cls_id], []
        for word in sentence:
            firsts.append(len(ids))
            ids += tokenizer.hf(word, add_special_tokens=False)["input_ids"]
            cut += len(ids) - firsts[-1] > 1
        with torch.no_grad():
            states = plain(torch.tensor([[*ids, tokenizer.sep_id]])).last_hidden_state[0]
            expected = F.linear(states[firsts], module.head.weight, module.head.bias)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert cut, "no word has several tokens"


def test_a_pair_is_read_from_cls(
    model: Exported, hf: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pairs, "AT_ONCE", 2)
    words = words_of(tokenizer)
    texts = [(" ".join(words[i : i + 3]), " ".join(words[i + 9 : i + 9 + 2 * i])) for i in (1, 2, 3)]
    examples = [Example(str(i), ("en", "de"), pair, ("b",)) for i, pair in enumerate(texts)]
    features = pairs.encode(examples, Encoding(model.tokenizer, 40, ["a", "b"]))
    found, module = said(model, hf, command.TASKS["xnli"], features, 2)
    plain = AutoModelForMaskedLM.from_pretrained(hf).base_model.eval()
    for pair, logits in zip(texts, found, strict=True):
        a, b = (tokenizer.hf(text, add_special_tokens=False)["input_ids"] for text in pair)
        ids = [tokenizer.cls_id, *a, tokenizer.sep_id, *b, tokenizer.sep_id]
        types = [0] * (len(a) + 2) + [1] * (len(b) + 1)
        with torch.no_grad():
            states = plain(torch.tensor([ids]), token_type_ids=torch.tensor([types])).last_hidden_state[0, :1]
        torch.testing.assert_close(logits, F.linear(states, module.head.weight, module.head.bias), rtol=1e-4, atol=1e-4)
    assert [(feature.example, feature.labels.tolist()) for feature in features] == [(0, [1]), (1, [1]), (2, [1])]


def test_every_word_of_a_long_sentence_has_one_tag(model: Exported, tokenizer: Tokenizer) -> None:
    words = (words_of(tokenizer) * 3)[:100]
    gold = tuple(tags.UPOS[len(word) % 17] for word in words)
    features = tags.POS.encode([Example("1", ("en",), tuple(words), gold)], Encoding(model.tokenizer, 20, tags.UPOS))
    assert len(features) > 5
    assert all(feature.tokens <= 18 and len(feature.places) == feature.targets for feature in features)
    logits = [np.eye(17)[feature.labels] for feature in features]
    assert tags.predict([Example("1", ("en",), tuple(words), gold)], features, logits, tags.UPOS) == [list(gold)]


def test_an_answer_is_found_in_a_long_context(model: Exported, tokenizer: Tokenizer) -> None:
    """Gold places, said with certainty, are the gold answers again, whichever of the overlapping sequences has them."""
    words = words_of(tokenizer)
    context = " ".join(f"{word}," for word in words)
    answers = [words[0], f"{words[20]}, {words[21]}", words[-1]]
    examples = [
        Example(str(i), ("en", "en"), (f"{words[i]} ?", context), ((text, context.index(text)),))
        for i, text in enumerate(answers)
    ]
    features = qa.encode(examples, Encoding(model.tokenizer, 40, qa.labels([])))
    logits = []
    for feature in features:
        of_feature = np.zeros((len(feature.places), 2))
        of_feature[feature.labels[0], 0] = of_feature[feature.labels[1], 1] = 9.0 if feature.labels[0] else 0.0
        logits.append(of_feature)
        first, second = (ids.tolist() for ids in feature.ids)
        whole = [tokenizer.cls_id, *first, tokenizer.sep_id, *second, tokenizer.sep_id]
        assert [whole[place] for place in feature.places] == [tokenizer.cls_id, *second]
    covered = {int(start) for f in features if f.example == 0 and f.spans is not None for start in f.spans[:, 0]}
    assert len(covered) == len(tokenizer.encode([context])[0]), "a token of the context is in no sequence"
    assert qa.predict(examples, features, logits, []) == answers


def test_best_span_is_that_of_all_pairs() -> None:
    draw = np.random.default_rng(0)
    for length in (1, 3, 9):
        logits = draw.normal(size=(length, 2))
        allowed = [(i, j) for i in range(length) for j in range(i, min(i + 4, length))]
        best = max(allowed, key=lambda at: logits[at[0], 0] + logits[at[1], 1])
        assert qa.best_span(logits, 4)[1:] == best


def test_the_loss_of_a_span_is_the_mean_of_two_cross_entropies() -> None:
    torch.manual_seed(0)
    logits, counts, labels = torch.randn(9, 2), [4, 5], torch.tensor([1, 3, 0, 0])
    expected = sum(
        F.cross_entropy(part[None, :, side], labels[2 * n + side][None]) / 2
        for n, part in enumerate(logits.split(counts))
        for side in (0, 1)
    )
    torch.testing.assert_close(qa.loss(logits, labels, counts), expected)


def test_a_step_is_the_mean_over_the_targets_of_all_ranks(
    model: Exported, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients, of which DeepSpeed takes the mean of ranks; AdamW and clipping hide how large they are."""
    monkeypatch.setattr(loop, "one_reduction", nullcontext)
    monkeypatch.setattr(loop, "take_step", lambda engine: True)
    words = words_of(tokenizer)
    examples = [Example(str(n), ("en",), tuple(words[n : 3 * n + 2]), ("NOUN",) * (2 * n + 2)) for n in range(5)]
    features = tags.encode(examples, Encoding(model.tokenizer, 40, tags.UPOS))
    module = Tuned(model.encoder, 17, tags.POS.loss, seed=0).eval()

    class Engine(SimpleNamespace):
        def __call__(self, *given: Any) -> Any:
            return module(*given)

    engine = Engine(device=torch.device("cpu"), backward=lambda loss: loss.backward())
    total = 0.0
    for rank in (0, 1, 2):
        control: Any = SimpleNamespace(rank=rank, size=3)
        tuner = Tuner(model, tags.POS, Settings(), {}, Path(), rows_of(model), control, print)
        total += tuner.step(engine, features, (0, 0, 0))
    weights = {name: weight for name, weight in module.named_parameters() if weight.grad is not None}
    summed = {name: weight.grad.clone() for name, weight in weights.items() if weight.grad is not None}
    module.zero_grad()
    losses = torch.cat([module(*rows_of(model)([feature], torch.device("cpu")))[0][None] for feature in features])
    (losses.sum() / sum(len(example.texts) for example in examples)).backward()
    assert total == pytest.approx(losses.sum().item(), rel=1e-5)
    assert len(weights) > 30
    for name, weight in weights.items():
        torch.testing.assert_close(summed[name] / 3, weight.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("full", [True, False])
def test_a_disk_without_room_ends_no_run(
    tmp_path: Path, model: Exported, monkeypatch: pytest.MonkeyPatch, full: bool
) -> None:
    """The checkpoint is left out, what was there stays, and it is said."""

    def fail(*given: Any) -> None:
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        finally:
            raise RuntimeError("unexpected pos 15552 vs 15446")  # as torch does

    if full:
        monkeypatch.setattr(torch, "save", fail)
    monkeypatch.setattr(loop, "take", lambda *given, copies: SimpleNamespace(taken={"a.pt": {"x": 1}}))
    said: list[str] = []
    tuner = Tuner(model, tags.POS, Settings(), {}, Path(), rows_of(model), Control(), said.append)
    (tmp_path / "epoch_1_of_1_ranks").mkdir()
    tuner.save(None, tmp_path, 2, "en, seed 0")
    assert [path.name for path in tmp_path.iterdir()] == [f"epoch_{1 if full else 2}_of_1_ranks"]
    assert [line.partition(" (")[0] for line in said] == ["en, seed 0: epoch 2 is not kept"] * full
    assert all("No space left on device" in line for line in said)


def test_what_is_not_finite_has_no_score(model: Exported, monkeypatch: pytest.MonkeyPatch) -> None:
    examples = [Example("1", ("en",), ("word",), ("NOUN",))]
    features = tags.encode(examples, Encoding(model.tokenizer, 40, tags.UPOS))
    module = Tuned(model.encoder, 17, tags.POS.loss, seed=0)
    torch.nn.init.constant_(module.head.bias, float("nan"))
    tuner = Tuner(model, tags.POS, Settings(), {}, Path(), rows_of(model), Control(), print)
    with pytest.raises(NotFinite, match="take a smaller --lr"):
        tuner.predict(SimpleNamespace(module=module, device=torch.device("cpu")), features)


# Runs


def data(language: str, labels: str = "xy", shift: int = 0) -> Data:
    examples = [
        Example(
            str(i), (language, language), (f"{language} a{i + shift}", f"{language} b{i}"), (labels[i % len(labels)],)
        )
        for i in range(6)
    ]
    return Data(Path(f"{language}.tsv"), language, examples)


def test_which_runs_the_texts_allow() -> None:
    """The source language's serves every test, others their own; translations those of their language."""
    task = command.TASKS["xnli"]
    tests = {language: data(language) for language in ("en", "de", "fr")}
    train = {"en": data("en"), "de": data("de")}
    found = trainings(task, train, {"fr": data("fr")}, tests, "en", code_switch=False)
    assert [(training.name, training.tests) for training in found] == [
        ("en", {"en": "supervised", "de": "zero-shot", "fr": "zero-shot"}),
        ("de", {"de": "supervised"}),
        ("fr translate-train", {"fr": "translate-train"}),
    ]


def test_both_halves_of_a_switched_pair_stand_together() -> None:
    task, tests = command.TASKS["pawsx"], {"de": data("de")}
    found = trainings(task, {"en": data("en")}, {"de": data("de")}, tests, "en", code_switch=True)[1]
    assert [(e.langs, e.texts) for e in found.groups[2]] == [
        (("de", "en"), ("de a2", "en b2")),
        (("en", "de"), ("en a2", "de b2")),
    ]
    other = data("de", labels="yx")
    with pytest.raises(UserError, match=r"de.tsv does not translate en.tsv: line 0: its label is"):
        trainings(task, {"en": data("en")}, {"de": other}, tests, "en", code_switch=True)


def test_questions_are_switched_with_the_contexts_answers() -> None:
    a = Example("q", ("en", "en"), ("who", "Ada wrote"), (("Ada", 0),))
    b = Example("q", ("de", "de"), ("wer", "Es war Ada"), (("Ada", 7),))
    assert [(e.texts, e.gold) for e in qa.switch(a, b)] == [
        (("wer", "Ada wrote"), (("Ada", 0),)),
        (("who", "Es war Ada"), (("Ada", 7),)),
    ]


def test_a_label_that_occurs_only_in_a_test_is_an_error() -> None:
    task, tests = command.TASKS["xnli"], {"en": data("en"), "de": data("de", labels="xyz")}
    with pytest.raises(UserError, match=r"de.tsv: line 2: the label 'z' is nowhere in en.tsv, which has x, y"):
        trainings(task, {"en": data("en")}, {}, tests, "en", code_switch=False)


def test_one_part_of_speech_is_nothing_to_learn_from() -> None:
    one = Data(Path("en.conllu"), "en", [Example("1", ("en",), ("a", "b"), ("NOUN", "NOUN"))])
    with pytest.raises(UserError, match=r"en.conllu has one label alone, NOUN"):
        trainings(tags.POS, {"en": one}, {}, {"en": one}, "en", code_switch=False)


def test_means_deviations_delta_and_the_majority() -> None:
    task, tests = command.TASKS["xnli"], {"en": data("en", "xxy"), "de": data("de", "xxy")}
    plan = trainings(task, {"en": data("en", "xxy"), "de": data("de")}, {}, tests, "en", code_switch=False)
    scores = Scores(task, tests)
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
    }
    assert scores.summary["en"]["sup"] == 1.0
    alone = Scores(task, tests)
    alone.add(plan[1], {"de": [right]})
    assert alone.summary["de"] == {"sup": 1.0, "majority": pytest.approx(2 / 3)}, "one seed has no deviation"
    assert not any(name.endswith("_std") for name in alone.rows["de supervised"])


def test_text_is_tokenised_once_for_all_seeds_and_languages(tmp_path: Path, model: Exported) -> None:
    """What was predicted before is neither trained nor predicted again."""
    calls, fits = [], []
    tests = {language: data(language) for language in ("en", "de", "fr", "es")}

    def encode(examples: list[Example], encoding: Encoding) -> list[Any]:
        calls.append(len(examples))
        return pairs.encode(examples, encoding)

    class Fake:
        """Says for every pair that it is of the first label; the order of its seeds is the file's."""

        task, settings, ds_config = replace(command.TASKS["xnli"], encode=encode), Settings(), {}
        rows, control = rows_of(model), Control()

        def fit(self, units: list[list[Any]], outputs: int, seed: int, folder: Path, name: str) -> int:
            fits.append((name, len(units), outputs))
            (folder / "epoch_1_of_1_ranks").mkdir(parents=True)
            return seed

        def tell(self, line: str) -> None:
            pass

        def predict(self, engine: int, features: list[Any]) -> list[np.ndarray]:
            return [np.array([[1.0 - engine, 0.5]]) for _ in features]

    fake: Any = Fake()
    fake.model = model
    (training,) = trainings(fake.task, {"en": data("en")}, {}, tests, "en", code_switch=False)
    for seeds in ([0, 1], [0, 1, 2]):
        found = Runs(fake, tests, tmp_path, "weights").predictions(training, seeds)
        assert {language: [of_seed[0] for of_seed in seeds] for language, seeds in found.items()} == dict.fromkeys(
            tests, ["x", "y", "y"][: len(seeds)]
        )
    assert calls == [6] * 5 * 2  # four tests and the training text, by each of both commands
    assert fits == [(f"en, seed {seed}", 6, 2) for seed in (0, 1, 2)]
    assert not list(tmp_path.rglob("epoch_*"))
    Runs(fake, tests, tmp_path, "other weights").predictions(training, [0])
    assert len(fits) == 4


def test_predictions_as_xtreme_reads_them(tmp_path: Path) -> None:
    """Its readers: a label a line; a tag a line with a blank line behind each sentence; an object of answers by id."""
    tests = {"en": data("en"), "de": data("de")}
    task = command.TASKS["xnli"]
    (training,) = trainings(task, {"en": data("en")}, {}, tests, "en", code_switch=False)
    write_predictions(tmp_path, task, training, tests, {"en": [["x"] * 6], "de": [["y", *"xxxxx"]]}, [7])
    written = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.*sv"))
    modes = ("supervised.seed_7/xnli/test-en", "zero-shot.seed_7/xnli/test-de", "zero-shot.seed_7/xnli/test-en")
    assert written == [f"{name}.tsv" for name in modes]
    assert (tmp_path / written[1]).read_text().splitlines() == ["y", *"xxxxx"]
    assert tags.write([], [["B-LOC", "I-LOC"], ["O"]]) == "B-LOC\nI-LOC\n\nO\n\n"
    questions = [Example(key, ("zh", "zh"), ("?", "香港"), None) for key in "ab"]
    assert json.loads(qa.write(questions, ["香港", ""])) == {"a": "香港", "b": ""}


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--train en=absent.tsv", "absent.tsv does not exist"),
        ("--train de.tsv", "--train de.tsv: needs the form LANG=FILE"),
        ("--train en=de.tsv en=de.tsv", "each language once"),
        ("--train fr=de.tsv --source en", "--source en is none of --train's languages: fr"),
        ("--train en=de.tsv de=de.tsv fr=de.tsv", "--train fr=.*de.tsv serves no test: give --test fr=FILE"),
        ("--train en=bare.tsv", "bare.tsv: line 1 has no label; training text needs one"),
        ("--train en=de.tsv --test de=bare.tsv", "bare.tsv has examples without labels; --predictions DIR"),
        ("--train en=one.tsv", "one.tsv has one label alone, neutral"),
        ("--train en=de.tsv --code_switch", "--code_switch needs --translated"),
        ("--translated de=de.tsv --code_switch", "--code_switch needs --train of the source language"),
        ("--train en=one.tsv --translated de=de.tsv --code_switch", "line or question 2 is not in .*one.tsv"),
        ("--train en=de.tsv --lr nan", "--lr nan must be positive"),
        ("--train en=de.tsv --predictions de.tsv", "de.tsv/predictions.json cannot be written"),
        ("--train en=de.tsv --work de.tsv", "de.tsv/predictions.json cannot be written"),
        ("--train en=de.tsv --seeds 1 1", "--seeds 1 1: seeds are different numbers"),
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

    monkeypatch.setattr(command, "measure", fail)
    assert command.main(f"--model hf --task xnli --train en=a --test en=a --out {tmp_path}/out".split()) == code
    assert said in capsys.readouterr().err


def test_a_broken_checkpoint_is_trained_again(tmp_path: Path, model: Exported) -> None:
    """Whatever is wrong with it; a sound one is loaded."""
    loaded, said = [], []
    engine: Any = SimpleNamespace(load_checkpoint=lambda folder, tag: loaded.append(tag))
    tuner = Tuner(model, tags.POS, Settings(), {}, Path(), rows_of(model), Control(), said.append)

    def kept() -> Path:
        partial = tmp_path / "epoch_2_of_1_ranks.incomplete"
        (partial / "deep").mkdir(parents=True)
        (partial / "weights.pt").write_bytes(b"weights")
        (partial / "deep" / "optimizer.pt").write_bytes(b"moments")
        loop.settle(partial, tmp_path / "epoch_2_of_1_ranks")
        return tmp_path / "epoch_2_of_1_ranks"

    kept()
    assert tuner.load(engine, tmp_path) == 2 and loaded == ["epoch_2_of_1_ranks"] and not said
    breaks: dict[str, Callable[[Path], Any]] = {
        "deep/optimizer.pt: not what was written": lambda path: (path / "deep/optimizer.pt").write_bytes(b"momenta"),
        "weights.pt": lambda path: (path / "weights.pt").unlink(),
        "hashes.json": lambda path: (path / "hashes.json").unlink(),
        "Expecting value": lambda path: (path / "hashes.json").write_text("half"),
    }
    for what, damage in breaks.items():
        files.remove(tmp_path / "epoch_2_of_1_ranks")
        damage(kept())
        assert tuner.load(engine, tmp_path) == 0 and len(loaded) == 1
        line = said.pop()
        assert line.startswith(f"{tmp_path}/epoch_2_of_1_ranks is not usable (") and what in line and "again" in line
        assert not list(tmp_path.iterdir())


def test_two_commands_do_not_share_a_work_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LOCK_SECONDS", 1)
    first = command.take_work(tmp_path / "pos.runs")
    with pytest.raises(UserError, match=r"pos.runs is being trained by another process \(host .*, process \d+\)"):
        command.take_work(tmp_path / "pos.runs")
    first.close()
    command.take_work(tmp_path / "pos.runs")


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


EPOCHS, BATCH, LR, SEED = 4, 4, 3e-3, 3


def arguments(model: Path, tagged: Path, out: Path, seeds: str = f"{SEED}") -> list[str]:
    texts = f"--train en={tagged}/en.conllu --test en={tagged}/en.conllu de={tagged}/de.conllu"
    settings = f"--epochs {EPOCHS} --batch {BATCH} --lr {LR} --seeds {seeds}"
    return f"xscale.eval.finetune --model {model} --task pos {texts} {settings} --out {out}".split()


def losses(output: str) -> list[tuple[str, float]]:
    return re.findall(r"(en, seed \d+: epoch \d+/\d+)  loss ([\d.]+)", output)


@pytest.mark.slow
def test_a_run_that_was_killed_ends_as_one_that_was_not(tmp_path: Path, tagged: Path, tokenizer: Tokenizer) -> None:
    """On 2 ranks, with dropout: killed behind the first epoch that is kept, and started again."""
    model, out = exported(tmp_path / "hf", tokenizer, 0.1), tmp_path / "killed.json"
    whole = launch.run(2, arguments(model, tagged, tmp_path / "whole.json", "0 1"), "deepspeed", "--module")
    process = launch.start(2, arguments(model, tagged, out, "0 1"), "torchrun", "-m")
    while process.poll() is None and not list(tmp_path.glob("killed.runs/*/epoch_[1-9]_of_2_ranks")):
        time.sleep(0.002)
    launch.kill(process)
    assert not out.exists()
    again = losses(launch.run(2, arguments(model, tagged, out, "0 1"), "torchrun", "-m"))
    assert len(losses(whole)) == 2 * EPOCHS > len(again), "it began anew"
    assert again == losses(whole)[-len(again) :]
    found = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in ("whole", "killed")}
    assert found["whole"]["results"] == found["killed"]["results"]
    assert found["whole"]["results"]["pos"]["en"]["sup"] > 0.5 > found["whole"]["results"]["pos"]["en"]["majority"]
    predictions = [sorted(tmp_path.glob(f"{name}.runs/*/predictions.json")) for name in ("whole", "killed")]
    assert [path.read_bytes() for path in predictions[0]] == [path.read_bytes() for path in predictions[1]]
    assert len(predictions[0]) == 2
    assert not list(tmp_path.glob("*.runs/*/epoch_*")), "checkpoints are left"


@pytest.mark.slow
def test_the_loop_equals_plain_pytorch(tmp_path: Path, tagged: Path, tokenizer: Tokenizer) -> None:
    """Without dropout, 2 ranks, 45 sentences by 4: losses and predictions of one process, padded batches, AdamW."""
    path, out = exported(tmp_path / "hf", tokenizer, 0.0), tmp_path / "out.json"
    output = launch.run(2, arguments(path, tagged, out), "torchrun", "-m")
    texts = {language: tags.read_pos(tagged / f"{language}.conllu", language) for language in ("en", "de")}
    model, mean_losses = plain_loop(path, texts["en"], tokenizer)
    assert [float(loss) for _, loss in losses(output)] == pytest.approx(mean_losses, rel=1e-4)
    (made,) = tmp_path.glob("out.runs/*/predictions.json")
    found = json.loads(made.read_text())
    with torch.no_grad():
        for language, examples in texts.items():
            plain = [model([e], tokenizer)[0].argmax(1).tolist() for e in examples]
            same = [tags.UPOS.index(tag) for of in found[language] for tag in of] == [n for of in plain for n in of]
            assert same, language


class Plain(torch.nn.Module):
    """transformers' encoder and a linear head."""

    def __init__(self, path: Path):
        super().__init__()
        self.encoder = AutoModelForMaskedLM.from_pretrained(path).base_model
        torch.manual_seed(rng.torch_seed(SEED, "finetune", "head"))
        self.head = torch.nn.Linear(SHAPE["hidden_size"], len(tags.UPOS))
        torch.nn.init.normal_(self.head.weight, std=0.02)
        torch.nn.init.zeros_(self.head.bias)

    def forward(self, examples: list[Example], tokenizer: Tokenizer) -> tuple[torch.Tensor, list[str]]:
        """Logits and tags of all words."""
        given = [list(example.texts) for example in examples]
        inputs = tokenizer.hf(given, is_split_into_words=True, padding=True, return_tensors="pt")
        states = self.encoder(**inputs).last_hidden_state
        firsts = []
        for i in range(len(given)):
            of_tokens = inputs.word_ids(i)
            firsts += [(i, of_tokens.index(word)) for word in range(len(given[i]))]
        rows, places = zip(*firsts, strict=True)
        return self.head(states[list(rows), list(places)]), [tag for e in examples for tag in e.gold or ()]


def plain_loop(path: Path, train: list[Example], tokenizer: Tokenizer) -> tuple[Plain, list[float]]:
    """Means over the words of each epoch."""
    model = Plain(path).train()
    matrices, vectors = ([p for p in model.parameters() if (p.ndim > 1) == wanted] for wanted in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR)
    steps = EPOCHS * -(-len(train) // BATCH)
    warmup, step, means = max(round(0.1 * steps), 2), 0, []
    for epoch in range(EPOCHS):
        order = rng.permutation(rng.key(SEED, "finetune", epoch), len(train)).tolist()
        total = words = 0.0
        for start in range(0, len(train), BATCH):
            logits, gold = model([train[i] for i in order[start : start + BATCH]], tokenizer)
            loss = F.cross_entropy(logits, torch.tensor([tags.UPOS.index(tag) for tag in gold]))
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            done = max(step - 1, 0)  # DeepSpeed's counter starts one step late
            for group in optimizer.param_groups:
                group["lr"] = LR * (done / warmup if done < warmup else (steps - done) / (steps - warmup))
            optimizer.step()
            step, total, words = step + 1, total + loss.item() * len(gold), words + len(gold)
        means.append(total / words)
    return model.eval(), means
