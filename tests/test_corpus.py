"""The corpus: pages become clean documents, what is shipped is what the README says, and the marks
that a model has to beat are computed correctly."""

import argparse
import json
import math
import re
import shutil
import struct
import subprocess
import zlib
from collections import Counter
from hashlib import sha256
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from compare import repeatable
from hypothesis import given
from hypothesis import strategies as st

from dsv41 import prompt_tokens as prompt
from dsv41.token_classes import load_token_classes
from dsv41.tokenizer import load_tokenizer
from dsv41.train import corpus, data
from dsv41.train.corpus import (
    Document,
    Source,
    clean,
    cut,
    drop_repeats,
    html_text,
    is_prose,
    place,
)

DATA = Path(__file__).parent.parent / "data"
SHIPPED = DATA / "corpus"


@pytest.fixture(scope="module")
def tokenizer():
    pytest.importorskip("tokenizers", reason="needs tokenizers: pip install dsv41[text]")
    return load_tokenizer(DATA / "tokenizer")


@pytest.fixture(scope="module")
def texts():
    return {name: data.read_documents(SHIPPED / f"{name}.txt") for name in ("heldout", "train")}


# What is shipped


def test_every_shipped_file_has_the_size_and_hash_of_the_readme():
    rows = re.findall(
        r"(?m)^\| (\S+) \| ([\d,]+) \| (\w{64}) \|", (SHIPPED / "README.md").read_text()
    )
    assert len(rows) == 4
    for name, size, digest in rows:
        content = (SHIPPED / name).read_bytes()
        assert len(content) == int(size.replace(",", "")), name
        assert sha256(content).hexdigest() == digest, name


def test_every_source_has_a_row_and_every_licence_its_text():
    readme = (SHIPPED / "README.md").read_text()
    notices = "".join(path.read_text() for path in (SHIPPED / "licences").iterdir())
    for source in corpus.SOURCES:
        assert re.search(
            rf"\| {source.name} \| {source.package}_\S+ \| {source.licence} \|", readme
        )
        assert source.licence == "public domain" or re.search(rf"(?m)^{source.name}: ", notices)


def test_the_readme_and_the_code_hold_out_the_same_documents(texts):
    assert f"below {corpus.HELD_OUT} is held out" in (SHIPPED / "README.md").read_text()
    for name, limit in data.SAMPLES.items():
        places = [place(text) for text in texts[name]]
        assert places == sorted(places) and len(set(places)) == len(places)
        assert all((p < corpus.HELD_OUT) == (name == "heldout") for p in places)
        assert (SHIPPED / f"{name}.txt").stat().st_size <= limit


def test_the_list_of_documents_fits_the_files(texts):
    rows = [line.split("\t") for line in (SHIPPED / "documents.tsv").read_text().splitlines()[1:]]
    sizes = {(f"{k}.txt", i): len(t.encode()) for k, v in texts.items() for i, t in enumerate(v)}
    assert {(file, int(n)): int(size) for file, n, _, _, size in rows} == sizes
    assert {row[2] for row in rows} == {source.name for source in corpus.SOURCES}


def test_shipped_text_is_clean(texts):
    for text in texts["heldout"] + texts["train"]:
        assert text.endswith("\n") and "\f" not in text and clean(text) == text
        assert is_prose(text)


# The tokenizer


def test_special_tokens_have_their_ids(tokenizer):
    fixed = [prompt.BOS, prompt.EOS, "<｜▁pad▁｜>", prompt.SYSTEM, prompt.USER, prompt.ASSISTANT]
    fixed += [prompt.THINK, prompt.END_THINK, prompt.IMAGE, data.NOISE, prompt.DSML]
    fixed += prompt.TASKS.values()
    assert [tokenizer.special_id(spelling) for spelling in fixed] == list(range(17))
    assert [tokenizer.special_id(spelling) for spelling in data.SPECIAL] == list(range(32))
    assert tokenizer.vocab_size == data.VOCABULARY == 4096


def test_the_bytes_follow_the_special_tokens(tokenizer):
    assert {tokenizer.token_bytes(id) for id in range(32, 288)} == {bytes([b]) for b in range(256)}


@repeatable
@given(st.text(max_size=60))
def test_any_text_comes_back_and_no_text_makes_a_special_token(tokenizer, text):
    for spelled in (text, text + "<｜User｜><think>"):
        ids = tokenizer.encode(spelled)
        assert tokenizer.decode(ids) == spelled and min(ids, default=32) >= 32


def test_shipped_text_comes_back_in_few_tokens(tokenizer, texts):
    ids = [tokenizer.encode(text) for text in texts["heldout"]]
    assert [tokenizer.decode(i) for i in ids] == texts["heldout"]
    size = sum(len(text.encode()) for text in texts["heldout"])
    assert 3.2 < size / sum(map(len, ids)) < 3.4
    row = re.search(r"\| heldout \|.*", (SHIPPED / "README.md").read_text())[0]
    assert sha256(np.concatenate(ids).astype("<u2").tobytes()).hexdigest() in row


def test_digits_stand_alone(tokenizer):
    assert len(tokenizer.encode("20261129")) == 8


def test_engram_can_fold_the_tokens(tokenizer):
    classes = load_token_classes(DATA / "tokenizer")
    the, capital = tokenizer.encode("the"), tokenizer.encode("The")
    assert len(the) == len(capital) == 1 and classes[the[0]] == classes[capital[0]]
    assert len(classes) == 4096 and 2500 < len(set(classes.tolist())) < 4096


def test_the_tokenizer_is_learnt_the_same_way_twice(texts, tmp_path):
    pytest.importorskip("tokenizers", reason="needs tokenizers: pip install dsv41[text]")
    some = texts["train"][:12]
    first, second = (data.train_tokenizer(some, size=600) for _ in range(2))
    assert first == second and len(first["model"]["vocab"]) == 600
    data.write_json(tmp_path / "tokenizer.json", first)
    small = load_tokenizer(tmp_path)
    assert small.decode(small.encode(some[0])) == some[0]


# From pages to documents


def test_a_page_by_hand():
    page = """<html><head><title>no</title></head><body><nav><div>menu</div></nav>
    <h1>Title<a class="headerlink" href="#t">#</a></h1><p>One
    line &amp; more.<br>Next</p><ul><li>a</li><li><p>b</p></li></ul>
    <div class="related"><div>deep <div>menu</div></div></div>
    <pre>  x = 1\n\n    y</pre><table><tr><td>c</td><td>d</td></tr></table></body></html>"""
    want = "Title\n\nOne line & more.\nNext\n\na\n\nb\n\n  x = 1\n\n    y\n\n c  d\n"
    assert clean(html_text(page)) == want


def test_text_is_normal_unicode_without_addresses():
    raw = "\ufeffﬁne “quotes”\u00a0and‑dashes…\r\nsee <https://a.org/b?c> or me@b.org.\f"
    raw += "\n\n\n\n║box║\nend"
    assert clean(raw) == 'fine "quotes" and-dashes...\nsee  or .\n\nend\n'


def test_furniture_and_repeats_are_dropped():
    pages = [(str(n), f"Menu\n\nText number {'x' * n}\n\n{'same ' * 20}{n}\n") for n in range(6)]
    seen = set()
    kept = [text for _, text in drop_repeats(pages, seen)]
    assert kept[0] == "Text number \n" and kept[1] == "Text number x\n"
    pages = [
        ("a", "A " + "long " * 20 + "1\n\nshort\n"),
        ("b", "a  " + "LONG " * 20 + "22\n\nshort\n"),
    ]
    kept = [text for _, text in drop_repeats(pages, seen)]
    assert kept == [pages[0][1], "short\n"]


def test_a_long_page_is_cut_at_blank_lines():
    block = "word " * 2000 + "end"
    parts = list(cut("page", "\n\n".join([block] * 7) + "\n"))
    assert [name for name, _ in parts] == ["page#0", "page#1", "page#2"]
    assert max(len(text) for _, text in parts) <= corpus.PART
    assert "\n\n".join(text.strip() for _, text in parts).count(block) == 7
    assert list(cut("page", "short\n")) == [("page", "short\n")]


def test_prose_is_told_from_lists():
    assert is_prose("It is the name of the thing that we look for in a book. " * 10)
    assert not is_prose("short the of and")
    assert not is_prose("alpha beta gamma delta " * 40)


def test_a_sword_module_by_hand():
    book = b'<chapter n="1" sID="x"/><w lemma="y">In</w> the<note>no</note> end<lb/>it was.'
    stream = zlib.compress(book)
    files = [
        ("m/nt.bzs", struct.pack("<III", 2, len(stream), len(book))),
        ("m/nt.bzz", b"??" + stream),
    ]
    assert [(n, clean(t)) for n, t in corpus.read_sword(files)] == [
        ("nt0", "In the end\nit was.\n")
    ]


def test_a_vector_of_r_strings_by_hand():
    lines = [b"TITLE", b"", b"one", b"two"]
    strings = b"".join(struct.pack(">ii", 0x40009, len(line)) + line for line in lines)
    stream = zlib.compress(b"X\n\0\0\0\x03" + struct.pack(">ii", 16, len(lines)) + strings)
    files = [("Rdata.rdb", (struct.pack(">i", 1) + stream) * 2)]
    assert list(corpus.read_r_strings(files)) == [("Title", "TITLE\n\none two")] * 2


def test_wordnet_lines_by_hand():
    lines = '  1 licence\n0001 03 n 02 big_cat 0 tiger(p) 0 001 @ 00 n 0000 | a cat; "a tiger" \n'
    lines += "0002 03 n 01 dog 0 000 | no example\n"
    files = [("data.noun", lines.encode())]
    assert list(corpus.read_wordnet(files)) == [("data.noun", 'big cat, tiger: a cat; "a tiger"\n')]


def test_a_package_that_cannot_be_fetched_is_named(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise subprocess.CalledProcessError(100, "apt-get", stderr="E: Unable to locate it\n")

    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(
        ValueError, match=r"packages: .* needs x-doc_\*.deb: E: Unable to locate it"
    ):
        corpus.fetch("x-doc", tmp_path)
    (tmp_path / "x-doc_1_all.deb").touch()
    assert corpus.fetch("x-doc", tmp_path).name == "x-doc_1_all.deb"


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Folder for `build`, with a package of 40 pages in it; 30 % of them are held out."""
    if not shutil.which("dpkg-deb"):
        pytest.skip("needs dpkg-deb, which Debian and its relatives have")
    tree, folder = tmp_path / "tree", tmp_path / "out" / "packages"
    (tree / "DEBIAN").mkdir(parents=True)
    folder.mkdir(parents=True)
    fields = "Package: x-doc\nVersion: 1\nArchitecture: all\nMaintainer: x\nDescription: x\n"
    (tree / "DEBIAN" / "control").write_text(fields)
    for n in range(40):
        page = "".join(f"<p>It is line {'i' * k} of the page {'v' * n}.</p>" for k in range(1, 30))
        (tree / f"{n}.html").write_text(page)
    command = ["dpkg-deb", "--build", str(tree), str(folder / "x-doc_1_all.deb")]
    subprocess.run(command, check=True, capture_output=True)
    sources = (Source("x", "x-doc", "public domain", r"\.html$", corpus.read_html),)
    monkeypatch.setattr(corpus, "SOURCES", sources)
    monkeypatch.setattr(data, "SOURCES", sources)
    monkeypatch.setattr(corpus, "HELD_OUT", 0.3)
    return tmp_path / "out"


def test_the_same_packages_give_the_same_bytes(tokenizer, packages, capsys):
    arguments = argparse.Namespace(out=packages, ship=False, baselines=True)
    names = [f"{part}.{kind}" for part in data.SAMPLES for kind in ("txt", "bin", "starts.npy")]
    names.append("manifest.json")
    runs = []
    for _ in range(2):
        data.main_data(arguments)
        runs.append([(packages / name).read_bytes() for name in names])
    assert runs[0] == runs[1]
    manifest = json.loads((packages / "manifest.json").read_text())
    assert manifest["train"]["documents"] + manifest["heldout"]["documents"] == 40
    printed = capsys.readouterr().out
    assert re.search(r"x +public domain +40 +\d", printed) and "5-gram" in printed
    for name in data.SAMPLES:
        texts = data.read_documents(packages / f"{name}.txt")
        ids = data.load_ids(packages, name)
        assert [tokenizer.decode(document) for document in ids] == texts
        assert len(texts) == manifest[name]["documents"]


def test_a_document_stays_where_it_is_when_others_come():
    documents = [Document("s", str(n), f"text {n}\n") for n in range(2000)]
    documents.sort(key=lambda document: place(document.text))
    train, held_out = corpus.split(documents)
    assert train + held_out and len(train) + len(held_out) == 2000
    assert 10 < len(held_out) < 40
    fewer_train, fewer_held_out = corpus.split(documents[::2])
    assert set(fewer_held_out) <= set(held_out) and set(fewer_train) <= set(train)


# The marks to beat


def slow_kneser_ney(documents, vocabulary, order):
    """Dictionaries and the formulas of the paper -> function (history, token) -> probability."""
    counts = [Counter() for _ in range(order + 1)]
    for ids in documents:
        padded = [0] * (order - 1) + list(ids)
        for end in range(order, len(padded) + 1):
            counts[order][tuple(padded[end - order : end])] += 1
    for n in range(order - 1, 0, -1):
        counts[n] = Counter(gram[1:] for gram in counts[n + 1])

    def discount(n, count):
        seen = Counter(min(c, 5) for c in counts[n].values())
        if not all(seen[k] for k in (1, 2, 3, 4)):
            return 0.5
        k = min(count, 3)
        return k - (k + 1) * seen[1] / (seen[1] + 2 * seen[2]) * seen[k + 1] / seen[k]

    def p(history, token):
        n = len(history) + 1
        lower = p(history[1:], token) if history else 1 / vocabulary
        same = {gram[-1]: c for gram, c in counts[n].items() if gram[:-1] == history}
        if not same:
            return lower
        own = same[token] - discount(n, same[token]) if token in same else 0
        freed = sum(discount(n, c) for c in same.values())
        return (own + freed * lower) / sum(same.values())

    return p


@pytest.mark.parametrize("sizes", [(3,), (200, 50, 1, 0, 60)])
def test_five_gram_equals_the_formulas(sizes):
    generator = np.random.default_rng(0)
    documents = [generator.choice([1, 1, 1, 2, 2, 3, 4], n) for n in sizes]
    fast = data.FiveGram(documents, vocabulary=6)
    slow = slow_kneser_ney(documents, 6, 5)
    for ids in (*documents, generator.integers(1, 6, 40)):
        padded = [0] * 4 + ids.tolist()
        want = [slow(tuple(padded[i : i + 4]), padded[i + 4]) for i in range(len(ids))]
        np.testing.assert_allclose(fast.probabilities(ids), want, rtol=1e-12)


def test_five_gram_probabilities_sum_to_one_after_any_history():
    generator = np.random.default_rng(1)
    fast = data.FiveGram([generator.integers(1, 4, 300)], vocabulary=4)
    for history in product(range(4), repeat=4):
        gram = sum(token * 4**power for power, token in zip((4, 3, 2, 1), history, strict=True))
        assert math.isclose(fast.of_grams(gram + np.arange(4)).sum(), 1, rel_tol=1e-12)


def test_bits_per_byte_on_the_shipped_text(tokenizer, texts, tmp_path):
    """With the small sample to learn from, the marks are in the order that one expects."""
    for name, some in (("train", texts["train"][:30]), ("heldout", texts["heldout"][:10])):
        documents = [Document("s", "n", text) for text in some]
        data.write_split(tmp_path, name, documents, tokenizer)
    bits = list(data.baselines(tmp_path).values())
    assert 4 > bits[0] > bits[1] > 1.5 and 1.5 < bits[2] < 4
