"""A public encoder's tokenizer keeps the ids of its own tokenizer.json, in training and in the export.

transformers builds the normaliser of some classes itself, and drops that of tokenizer.json.
"""

import itertools
import json
import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoModelForMaskedLM, AutoTokenizer, BertConfig, RobertaConfig, XLMRobertaConfig

from xscale.data.tokenizer import Tokenizer, load_transformers_tokenizer
from xscale.eval.sentence_files import PoolingChoice
from xscale.export import write_exported_model

SENTENCES = [
    "Ｆｕｌｌ　ｗｉｄｔｈ, Ünïcode e\u0301 and “quotes” – 1½ ﬁne!",
    "Всё счастливые семьи похожи друг на друга?",
    "Όλα τα ευτυχισμένα σπίτια μοιάζουν μεταξύ τους·",
    "كل العائلات السعيدة تتشابه، أليس كذلك؟",
    "כל המשפחות המאושרות דומות זו לזו.",
    "सभी सुखी परिवार एक जैसे होते हैं।",
    "ครอบครัวที่มีความสุขล้วนเหมือนกัน",
    "幸福的家庭都是相似的，对吗？",
    "幸福な家庭はどれも似たものだ！ｶﾞｷﾞ",
    "행복한 가정은 모두 엇비슷하다.",
    "ყველა ბედნიერი ოჯახი ერთმანეთს ჰგავს;",
]
"""Ten scripts and more, with characters that normalisers change."""


def lines() -> list[str]:
    """1,000 lines, each of a few words of one or two of the sentences."""
    generator = random.Random(0)
    made = [*SENTENCES]
    while len(made) < 1000:
        words = [word for sentence in generator.sample(SENTENCES, 2) for word in sentence.split(" ")]
        made.append(" ".join(generator.sample(words, min(len(words), 6))))
    return made


def wordpiece() -> tuple[Backend, dict[str, str]]:
    """Neither lower case nor without accents, which BertTokenizer makes of every text."""
    backend = Backend(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=False, strip_accents=False)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    backend.train_from_iterator(lines(), trainers.WordPieceTrainer(vocab_size=900, special_tokens=special))
    ends = [(token, backend.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
    )
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    return backend, dict(zip(names, special, strict=True))


def unigram() -> tuple[Backend, dict[str, str]]:
    backend = Backend(models.Unigram())
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace("  ", " ")])
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trainer = trainers.UnigramTrainer(vocab_size=900, special_tokens=special, unk_token="<unk>", show_progress=False)
    backend.train_from_iterator(lines(), trainer)
    return with_template(backend), roberta_names()


def byte_level() -> tuple[Backend, dict[str, str]]:
    backend = Backend(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=special, initial_alphabet=alphabet)
    backend.train_from_iterator(lines(), trainer)
    return with_template(backend), roberta_names()


def with_template(backend: Backend) -> Backend:
    ends = [(token, backend.token_to_id(token)) for token in ("<s>", "</s>")]
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=ends
    )
    return backend


def roberta_names() -> dict[str, str]:
    tokens = {
        "bos": "<s>",
        "pad": "<pad>",
        "eos": "</s>",
        "unk": "<unk>",
        "mask": "<mask>",
        "cls": "<s>",
        "sep": "</s>",
    }
    return {f"{use}_token": token for use, token in tokens.items()}


KINDS = {
    "wordpiece": (wordpiece, "BertTokenizer", BertConfig),
    "unigram": (unigram, "XLMRobertaTokenizer", XLMRobertaConfig),
    "byte-level": (byte_level, "RobertaTokenizer", RobertaConfig),
}


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_tokenizer_json(tmp_path: Path, kind: str) -> None:
    """Of 1,000 lines, alone and in pairs: as loaded, as exported, and as loaded from the export."""
    make, class_name, config_class = KINDS[kind]
    backend, special = make()
    config = config_class(
        vocab_size=backend.get_vocab_size(), hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=64, pad_token_id=backend.token_to_id(special["pad_token"]),
    )  # fmt: skip
    model = tmp_path / "model"
    lm = AutoModelForMaskedLM.from_config(config)
    lm.save_pretrained(model)
    backend.save(str(model / "tokenizer.json"))
    (model / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": class_name} | special))

    loaded = Tokenizer(model)
    write_exported_model(tmp_path / "hf", lm, model, PoolingChoice("mean", "the default"))
    exported = AutoTokenizer.from_pretrained(tmp_path / "hf")
    texts = lines()
    pairs = list(itertools.pairwise(texts))
    expected = [encoding.ids for encoding in backend.encode_batch(texts, add_special_tokens=False)]
    assert loaded.encode(texts) == expected
    assert Tokenizer(tmp_path / "hf").encode(texts) == expected
    assert exported(texts, add_special_tokens=False)["input_ids"] == expected
    expected = [encoding.ids for encoding in backend.encode_batch(pairs)]
    assert exported(*map(list, zip(*pairs, strict=True)))["input_ids"] == expected
    assert loaded.mask_id == exported.mask_token_id == backend.token_to_id(special["mask_token"])
    assert {*loaded.hf.all_special_tokens} == {*special.values()}
    loaded.hf.save_pretrained(tmp_path / "checkpoint")
    assert Tokenizer(tmp_path / "checkpoint").fingerprint == loaded.fingerprint


def test_a_tokenizer_that_needs_no_repair_is_left_as_it_is(demo: Path) -> None:
    found = load_transformers_tokenizer(demo / "tokenizer")
    assert type(found) is type(AutoTokenizer.from_pretrained(demo / "tokenizer"))
    assert found.backend_tokenizer.to_str() == Backend.from_file(str(demo / "tokenizer/tokenizer.json")).to_str()
