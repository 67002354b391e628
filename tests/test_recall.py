"""Recall: the text itself holds the answer, at the distance that is claimed."""

import re
from pathlib import Path

import numpy as np
import pytest

from dsv41.tokenizer import load_tokenizer
from dsv41.train.data import read_documents
from dsv41.train.recall import accuracy, chance, document, probe, probes, words_of

DATA = Path(__file__).parent.parent / "data"
FACT = re.compile(r"\n\[(set|get) (\w+ \w+) = (\w+)(?:\]\n|$)")


@pytest.fixture(scope="module")
def tokenizer():
    pytest.importorskip("tokenizers", reason="needs tokenizers: pip install dsv41[text]")
    return load_tokenizer(DATA / "tokenizer")


@pytest.fixture(scope="module")
def words(tokenizer):
    return words_of(tokenizer)


@pytest.fixture(scope="module")
def filler(tokenizer):
    """About 12,000 tokens of held-out text."""
    texts = read_documents(DATA / "corpus" / "heldout.txt")
    return np.array(tokenizer.encode("".join(texts[:4])[:40_000]))


def facts_in(text):
    """{key: [values]} of the lines with set, then with get, in order."""
    found = {"set": {}, "get": {}}
    for kind, key, value in FACT.findall(text):
        found[kind].setdefault(key, []).append(value)
    return found["set"], found["get"]


@pytest.mark.parametrize("seed", range(5))
def test_every_question_of_a_document_is_answered_by_its_text(tokenizer, words, filler, seed):
    made = document(np.random.default_rng(seed), words, filler, 3000, facts=20, questions=15)
    assert len(made.ids) == 3000 and len(made.answers) == 15
    for answer, distance in zip(made.answers, made.distances, strict=True):
        stated, asked = facts_in(tokenizer.decode(made.ids[: answer + 1]))
        key, value = list(FACT.finditer(tokenizer.decode(made.ids[: answer + 1])))[-1].groups()[1:]
        assert stated[key] == [value] and asked[key][-1] == value
        assert tokenizer.decode([made.ids[answer]]) == " " + value
        assert made.ids[answer - distance] == made.ids[answer]
        assert words.set[-1] in made.ids[answer - distance - words.size : answer - distance]
    assert np.all(np.diff(made.answers) > 0)


@pytest.mark.parametrize("distance", [8, 9, 64, 65, 500, 4096, 8192])
def test_a_probe_asks_once_at_its_distance(tokenizer, words, filler, distance):
    made = probe(np.random.default_rng(distance), words, filler, distance)
    assert made.answers.tolist() == [len(made.ids) - 1] and made.distances.tolist() == [distance]
    stated, asked = facts_in(tokenizer.decode(made.ids))
    ((key, value),) = asked.items()
    assert stated[key] == value and len(stated) == 16
    assert len({v for values in stated.values() for v in values}) == 16, "one value each"
    assert made.ids[-1 - distance] == made.ids[-1]
    assert np.sum(made.ids == made.ids[-1]) >= 2


def test_only_the_distance_differs_between_probes(words, filler):
    generator = np.random.default_rng(0)
    lengths = [len(probe(generator, words, filler, d).ids) - d for d in (8, 64, 1000, 4096)]
    assert len(set(lengths)) == 1


def test_the_same_generator_makes_the_same_questions(words, filler):
    def made():
        return probes(np.random.default_rng(3), words, filler, (64, 256), count=3)

    for a, b in zip(made(), made(), strict=True):
        assert np.array_equal(a.ids, b.ids)
    assert [p.distances[0] for p in made()] == [64] * 3 + [256] * 3


def test_chance_is_what_guessing_gives(words, filler):
    """A guess among the shown values is right once in 16, a blind one once in 64."""
    generator = np.random.default_rng(1)
    asked = probes(generator, words, filler, (200, 400), count=400)
    shown = [np.intersect1d(p.ids[:-1], words.values) for p in asked]
    assert min(map(len, shown)) >= 16, "a value may also stand in the text"
    guesses = [np.array([p.ids[-1 - 200]]) for p in asked]
    found = accuracy(asked, guesses)
    assert found[200] == 1.0 and found[400] < 0.05
    blind = [generator.choice(words.values, 1) for _ in asked]
    assert np.mean(list(accuracy(asked, blind).values())) < 3 * chance(words)[0]
    assert chance(words) == (1 / 64, 1 / 16)


def test_the_words_are_whole_words_and_have_one_role(tokenizer, words):
    spelled = [[tokenizer.decode([i]) for i in ids] for ids in words[:3]]
    assert list(map(len, spelled)) == [32, 32, 64]
    assert len({word for kind in spelled for word in kind}) == 128


def test_what_cannot_be_made_is_refused(words, filler):
    generator = np.random.default_rng(0)
    with pytest.raises(ValueError, match="distance: expected 8 or more tokens, got 7"):
        probe(generator, words, filler, 7)
    with pytest.raises(ValueError, match="facts: the words are enough for 32, not for 33"):
        document(generator, words, filler, 3000, 33, 1)
    with pytest.raises(ValueError, match="length: 40 tokens cannot hold 6 facts and questions"):
        document(generator, words, filler, 40, 3, 3)
    with pytest.raises(ValueError, match=r"filler: \d+ tokens needed, 10 there"):
        probe(generator, words, filler[:10], 64)
