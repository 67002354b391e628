"""Can a model say again what it read thousands of tokens ago?

    ... text [set happy turtle = wisdom] text, other facts [get happy turtle = wisdom] text ...

A fact has a key of two words and a value of one, each word a single token. Facts stand among real
text; nothing but the line with `set` says what the line with `get` must hold. `document` makes
training text with questions at all distances. `probe` makes one question at an exact distance, from
the value's token to the answer's, with a fixed number of facts whatever the distance, so that only
the distance gets harder. A blind guess is right once in 64 times; naming any value that was shown,
once in the number of facts. Source: associative recall, as in Olsson et al. 2022 and Arora et al.
2023.
"""

from typing import NamedTuple

import numpy as np

DISTANCES = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
FIRST = """early easy happy holy little living ready simple empty equal double single fixed global
great important numeric original primary shared temporary virtual good bad old new young large small
short strong free""".split()
SECOND = """body church city column console cursor database domain face family field gospel header
house integer letter library machine module object owner page parser queue server storage table tree
turtle window word man""".split()
VALUES = """answer archive bytes certificate children control data days death dictionary difference
directory example eyes failure fire future glory gold half heart idea knowledge language life light
love member memory mercy message model nature number operation option people platform point policy
prayer protocol range record release response role rule sequence soul source space string style
system thing thousand voice warning water wisdom woman work world""".split()


class Words(NamedTuple):
    """What facts are made of, as token ids."""

    first: np.ndarray  # of a key
    second: np.ndarray  # of a key
    values: np.ndarray
    set: list
    get: list
    equals: list
    end: list

    @property
    def size(self):
        """Tokens of a fact, and of a question with its answer."""
        return len(self.set) + 2 + len(self.equals) + 1 + len(self.end)


class Recall(NamedTuple):
    """ids (n,) int64, no bos; ids[answers] follow from what stands `distances` tokens earlier."""

    ids: np.ndarray
    answers: np.ndarray  # (q,) positions
    distances: np.ndarray  # (q,)


def words_of(tokenizer):
    """The Words in a tokenizer's ids. ValueError for a word that is more than one token."""
    kinds = []
    for spelled in (FIRST, SECOND, VALUES):
        ids = [tokenizer.encode(" " + word) for word in spelled]
        if max(map(len, ids)) > 1:
            bad = next(word for word, found in zip(spelled, ids, strict=True) if len(found) > 1)
            raise ValueError(f"tokenizer: {bad!r} is more than one token")
        kinds.append(np.array(ids)[:, 0])
    parts = [tokenizer.encode(text) for text in ("\n[set", "\n[get", " =", "]\n")]
    if len(parts[0]) != len(parts[1]):
        raise ValueError("tokenizer: set and get differ in their number of tokens")
    return Words(*kinds, *parts)


def document(generator, words, filler, length, facts, questions):
    """filler (n,) ids of text -> Recall of `length` tokens with that many facts and questions.

    A question asks for any fact, anywhere behind it, so distances range up to `length`.
    """
    keys, values = _draw(generator, words, facts)
    stated, asked = generator.random(facts), generator.integers(facts, size=questions)
    later = stated[asked] + generator.random(questions) * (1 - stated[asked])
    order = np.argsort(np.concatenate([stated, later]), kind="stable")
    about = np.concatenate([np.arange(facts), asked])  # the fact of each line
    lines = [_line(words, n >= facts, keys[about[n]], values[about[n]]) for n in order]
    ids, starts = _weave(generator, filler, lines, length)
    value_at = np.empty(len(order), np.int64)
    value_at[order] = starts + words.size - len(words.end) - 1
    answers = value_at[facts:]
    by_place = np.argsort(answers)
    return Recall(ids, answers[by_place], (answers - value_at[asked])[by_place])


def probe(generator, words, filler, distance, facts=16):
    """-> Recall whose last token is the one answer, `distance` tokens behind its value.

    Half of what lies between is facts at most; the others stand in front, among as much text.
    """
    keys, values = _draw(generator, words, facts)
    between = distance - words.size
    if between < 0:
        raise ValueError(f"distance: expected {words.size} or more tokens, got {distance}")
    lines = [_line(words, False, *fact) for fact in zip(keys, values, strict=True)]
    inside = 1 + min(facts - 1, between // (2 * words.size))
    front, _ = _weave(generator, filler, lines[inside:], 2 * words.size * facts)
    text, _ = _weave(generator, filler, lines[1:inside], between)
    question = _line(words, True, keys[0], values[0])[: -len(words.end)]
    ids = np.concatenate([front, lines[0], text, question])
    return Recall(ids, np.array([len(ids) - 1]), np.array([distance]))


def probes(generator, words, filler, distances=DISTANCES, count=64, facts=16):
    """`count` probes for each distance, in that order."""
    return [probe(generator, words, filler, d, facts) for d in distances for _ in range(count)]


def chance(words, facts=16):
    """(blind guess, guess among the values that were shown): share of right answers."""
    return 1 / len(words.values), 1 / facts


def accuracy(asked, guesses):
    """list of Recall, for each the guessed ids (q,) -> {distance: share of right answers}."""
    distances = np.concatenate([recall.distances for recall in asked])
    right = np.concatenate(
        [recall.ids[recall.answers] == guess for recall, guess in zip(asked, guesses, strict=True)]
    )
    return {int(d): float(np.mean(right[distances == d])) for d in np.unique(distances)}


def _draw(generator, words, facts):
    """Keys (facts, 2) and values (facts,); no word comes twice."""
    most = min(len(words.first), len(words.second), len(words.values))
    if facts > most:
        raise ValueError(f"facts: the words are enough for {most}, not for {facts}")
    drawn = [generator.choice(ids, facts, replace=False) for ids in words[:3]]
    return np.stack(drawn[:2], axis=1), drawn[2]


def _line(words, is_question, key, value):
    start = words.get if is_question else words.set
    return np.array([*start, *key, *words.equals, value, *words.end], np.int64)


def _weave(generator, filler, lines, size):
    """The lines, in order, at random places of a text -> ids (size,), where each line starts."""
    lengths = np.array([len(line) for line in lines], np.int64)
    rest = size - int(np.sum(lengths))
    if rest < 0:
        raise ValueError(f"length: {size} tokens cannot hold {len(lines)} facts and questions")
    if rest > len(filler):
        raise ValueError(f"filler: {rest} tokens needed, {len(filler)} there")
    start = generator.integers(len(filler) - rest + 1)
    text = np.asarray(filler[start : start + rest], np.int64)
    cuts = np.sort(generator.integers(rest + 1, size=len(lines)))
    pieces = [
        piece for pair in zip(np.split(text, cuts), [*lines, []], strict=True) for piece in pair
    ]
    return np.concatenate(pieces).astype(np.int64), cuts + np.cumsum(lengths) - lengths
