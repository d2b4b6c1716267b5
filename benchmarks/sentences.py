"""Sentence splitting beside the sentences of treebanks.

    python benchmarks/sentences.py [en_ewt-ud-test.conllu.xz de_pud-ud-test.conllu.xz ...]

A file's name begins with its language. The sentences of each paragraph or document of a treebank are joined and split
again. A border counts as found if it stands between the same two letters. F1 is of the borders inside the paragraphs.
The second table counts the sentences of WRITTEN, below, that the splitter finds unchanged.
"""

import argparse
import re
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

from common import print_table

from data_tools.conllu import read_sentences
from data_tools.sentences import split_sentences

UNSPACED = ("zh", "ja")
WRITTEN = {
    "en": [
        "Dr. Smith arrived at 5 p.m. on Monday.",
        "He met Mrs. Jones, i.e. his boss.",
        "“Is it late?” she asked.",
        "It costs $3.50 at Acme Inc. in the U.S. today.",
    ],
    "de": [
        "Das ist z. B. ein Hund.",
        "Er kam am 3. Oktober an.",
        "Dr. Müller wohnt in der Goethestr. hier.",
        "Wo ist er?",
    ],
    "fr": ["M. Dupont est arrivé hier.", "Il a dit : « Bonjour ! »", "Pourquoi pas ?", "Voir p. 12 du livre."],
    "es": ["¿Dónde está el Sr. García?", "¡Qué sorpresa!", "Vive en la Avda. Central."],
    "it": ["Il sig. Rossi è arrivato.", "Che ora è?", "Vedi pag. 3 del libro."],
    "pt": ["O Dr. Silva chegou cedo.", "Que horas são?", "Ele mora na Av. Paulista."],
    "ru": ["Это г. Москва.", "Он родился в 1990 г. в деревне.", "Как дела?", "Хорошо!"],
    "uk": ["Це перше речення.", "Як справи?", "Добре!"],
    "el": ["Πού είσαι;", "Είμαι εδώ.", "Ο κ. Παπαδόπουλος ήρθε."],
    "tr": ["Dr. Yılmaz geldi.", "Saat kaç?", "Bugün 3. gün."],
    "ar": ["كيف حالك؟", "أنا بخير.", "شكرا لك!"],
    "fa": ["حال شما چطور است؟", "من خوبم.", "متشکرم!"],
    "ur": ["یہ ایک جملہ ہے۔", "آپ کیسے ہیں؟", "میں ٹھیک ہوں۔"],
    "he": ["מה שלומך?", "אני בסדר.", "תודה רבה!"],
    "hi": ["यह पहला वाक्य है।", "क्या आप आ रहे हैं?", "हाँ, डॉ. शर्मा भी आएँगे।"],
    "bn": ["এটি প্রথম বাক্য।", "তুমি কেমন আছ?", "আমি ভালো আছি।"],
    "ta": ["இது முதல் வாக்கியம்.", "நீங்கள் எப்படி இருக்கிறீர்கள்?", "நான் நலம்."],
    "am": ["ይህ የመጀመሪያው ዓረፍተ ነገር ነው።", "እንዴት ነህ?", "ደህና ነኝ።"],
    "hy": ["Սա առաջին նախադասությունն է։", "Ինչպե՞ս ես։", "Լավ եմ։"],
    "ka": ["ეს პირველი წინადადებაა.", "როგორ ხარ?", "კარგად ვარ."],
    "my": ["ဒါက ပထမ စာကြောင်း ဖြစ်ပါတယ်။", "နေကောင်းလား။", "ကောင်းပါတယ်။"],
    "th": [
        "วันนี้อากาศดีมากและผมจะไปตลาดกับเพื่อนของผมตั้งแต่ตอนเช้า",
        "พรุ่งนี้เราจะเดินทางไปเชียงใหม่ด้วยรถไฟเพื่อเยี่ยมคุณยายของเรา",
        "แม่ของฉันทำอาหารอร่อยมากและทุกคนในครอบครัวก็ชอบกินข้าวที่บ้าน",
    ],
    "lo": ["ມື້ນີ້ອາກາດດີຫຼາຍແລະຂ້ອຍຈະໄປຕະຫຼາດກັບໝູ່ຂອງຂ້ອຍຕັ້ງແຕ່ຕອນເຊົ້າ", "ມື້ອື່ນພວກເຮົາຈະເດີນທາງໄປຫຼວງພະບາງດ້ວຍລົດໄຟເພື່ອຢ້ຽມຢາມແມ່ຕູ້"],
    "km": ["នេះជាប្រយោគទីមួយ។", "តើអ្នកសុខសប្បាយទេ?", "ខ្ញុំសុខសប្បាយ។"],
    "bo": ["འདི་ནི་ཚིག་གྲུབ་དང་པོ་ཡིན།", "ཁྱེད་རང་སྐུ་གཟུགས་བདེ་པོ་ཡིན་པས།"],
    "zh": ["这是第一句。", "你好吗？", "我很好！", "他说：“再见。”"],
    "ja": ["これは最初の文です。", "お元気ですか？", "彼は「はい。」と言いました。"],
    "ko": ["이것은 첫 번째 문장입니다.", "잘 지내세요?", "네, 잘 지냅니다."],
    "vi": ["Đây là câu đầu tiên.", "Bạn có khỏe không?", "TS. Nguyễn Văn A đã đến."],
    "sw": ["Hii ni sentensi ya kwanza.", "Habari yako?", "Nzuri sana!"],
}
"""Sentences of languages for which there is no treebank here, and of some that have abbreviations."""


def paragraphs(path: Path) -> Iterator[list[str]]:
    """The sentences of each paragraph. Some treebanks repeat the mark of a new document at each of its sentences."""
    found: list[str] = []
    last: list[str] = []
    for _, sentence in read_sentences(path):
        starts = [line for line in sentence.comments if re.match(r"# new(doc|par)\b", line)]
        if found and starts and starts != last:
            yield found
            found = []
        last = starts or last
        found += [line.partition("=")[2].strip() for line in sentence.comments if line.startswith("# text =")]
    yield found


def borders(sentences: list[str]) -> set[int]:
    """The numbers of visible characters before each sentence, except the first sentence."""
    return set(accumulate(len("".join(sentence.split())) for sentence in sentences[:-1]))


def score(gold: list[list[str]], language: str) -> tuple[int, float]:
    """The number of sentences that are found, and the F1 of their borders in per cent."""
    given, right, count = 0, 0, 0
    for sentences in gold:
        found = split_sentences(joint(language).join(sentences), language)
        given, count = given + len(found) - 1, count + len(found)
        right += len(borders(found) & borders(sentences))
    wanted = sum(len(sentences) - 1 for sentences in gold)
    return count, 200 * right / max(given + wanted, 1)


def joint(language: str) -> str:
    """The text between two sentences of a language."""
    return "" if language in UNSPACED else " "


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("treebanks", type=Path, nargs="*")
    rows = []
    for path in parser.parse_args().treebanks:
        language, gold = re.split(r"[_-]", path.name)[0], list(paragraphs(path))
        count, f1 = score(gold, language)
        rows.append([path.name.partition(".")[0], f"{sum(map(len, gold)):,}", f"{count:,}", f"{f1:.1f}"])
    print_table("Sentences found, and F1 of the borders between them", ["treebank", "sentences", "found", "F1"], rows)
    rows = []
    for language, written in WRITTEN.items():
        found = set(split_sentences(joint(language).join(written), language)) & set(written)
        rows.append([language, str(len(written)), str(len(found))])
    print_table("Sentences found as they are written here", ["language", "sentences", "found"], rows)


if __name__ == "__main__":
    main()
