"""What does a model train on here, in which tokens, and what must it beat?

    packages -> corpus.collect -> train.txt, heldout.txt -> tokenizer -> train.bin, heldout.bin

A .txt file is documents with a form feed on a line of its own between them. A .bin file is their
tokens, 16 bits each, end to end; .starts.npy says where each begins. There is no bos or eos in it:
`packing` adds them. The tokenizer is a byte-level BPE of 4,096 tokens in the released file format,
tokens of the prompt format first, digits one by one. `--ship` trains it anew and rewrites data/.

Bits per byte of the held-out text are comparable between any two models: -sum log2 p(token) over
the bytes of the text, eos not counted. Two marks to beat: xz -9, alone and behind the training
text, and an interpolated 5-gram with modified Kneser-Ney discounts over the same tokens (Chen and
Goodman 1998). Source: none for the model's own data, which is not published.
"""

import json
import lzma
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

import numpy as np

from ..tokenizer import load_tokenizer
from .corpus import SOURCES, collect, fetch, split

DATA = Path(__file__).resolve().parents[2] / "data"
SEPARATOR = "\f\n"  # between two documents, each of which ends with a newline
VOCABULARY = 4096
LEARN_FROM = 20_000_000  # bytes of the train split that the tokenizer sees
TABLES = "## Tables\n\n"  # what follows this heading in data/corpus/README.md is generated
SAMPLES = {"heldout": 500_000, "train": 1_000_000}  # bytes shipped at most

NOISE = "<｜noise｜>"  # what a DSpark block holds where the draft is not known yet
SPECIAL = (
    f"""<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜▁pad▁｜> <｜System｜> <｜User｜>
    <｜Assistant｜> <think> </think> <｜deepseek_image｜> {NOISE} ｜DSML｜ <｜action｜>
    <｜query｜> <｜authority｜> <｜domain｜> <｜title｜> <｜read_url｜>"""
).split()
SPECIAL += [f"<｜place▁holder▁no▁{n}｜>" for n in range(32 - len(SPECIAL))]
WORDS = (  # the released rules, but digits one by one: 1,000 numbers would be a quarter of it
    r"\p{N}",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


def main_data(arguments):
    """The command: arguments.out (Path), .ship and .baselines (bool)."""
    manifest = build(arguments.out, arguments.ship)
    print(table(manifest))
    if arguments.baselines:
        for name, bits in baselines(arguments.out).items():
            print(f"{name:<40}{bits:8.4f} bits per byte of the held-out text")


def build(out, ship=False, progress=print):
    """Write the corpus into `out`; the same packages give the same bytes. -> the manifest."""
    parts = dict(zip(("train", "heldout"), split(collect(out / "packages", progress)), strict=True))
    if ship:
        texts = [document.text for document in prefix(parts["train"], LEARN_FROM)]
        save_tokenizer(train_tokenizer(texts), DATA / "tokenizer")
    tokenizer = load_tokenizer(DATA / "tokenizer")
    manifest = {"sources": describe(parts, out / "packages")}
    for name, documents in parts.items():
        manifest[name] = write_split(out, name, documents, tokenizer)
        progress(f"{name}: {manifest[name]['tokens']:,} tokens")
    manifest["tokenizer.json"] = digest(DATA / "tokenizer" / "tokenizer.json")
    write_json(out / "manifest.json", manifest)
    if ship:
        write_samples(parts, manifest)
    return manifest


def prefix(documents, limit):
    """The first documents that take at most `limit` bytes with their separators."""
    sizes = np.cumsum([len(document.text.encode()) + len(SEPARATOR) for document in documents])
    return documents[: np.searchsorted(sizes, limit, side="right")]


def describe(parts, packages):
    """One dict a source: licence, package and its hash, documents and bytes of both splits."""
    rows = []
    everything = [document for documents in parts.values() for document in documents]
    for source in SOURCES:
        deb = fetch(source.package, packages)
        own = [document for document in everything if document.source == source.name]
        row = {"source": source.name, "licence": source.licence, "package": deb.name}
        row |= {"sha256": digest(deb), "documents": len(own)}
        rows.append(row | {"bytes": sum(len(document.text.encode()) for document in own)})
    return rows


def table(manifest):
    """The manifest as lines: source, licence, documents, bytes; then both splits."""
    line = "{source:<12}{licence:<31}{documents:>8,}{bytes:>13,}  {package}".format
    head = f"{'source':<12}{'licence':<31}{'documents':>8}{'bytes':>13}  package"
    splits = [
        f"{name}: {part['documents']:,} documents, {part['bytes']:,} bytes, {part['tokens']:,} "
        f"tokens, {part['bytes'] / part['tokens']:.3f} bytes per token"
        for name, part in manifest.items()
        if name in SAMPLES
    ]
    return "\n".join([head, *(line(**row) for row in manifest["sources"]), *splits])


def write_split(out, name, documents, tokenizer):
    """Write name.txt, name.bin and name.starts.npy -> their sizes and hashes."""
    texts = [document.text for document in documents]
    write_documents(out / f"{name}.txt", texts)
    ids = [np.array(tokenizer.encode(text), "<u2") for text in texts]
    (out / f"{name}.bin").write_bytes(np.concatenate(ids).tobytes())
    np.save(out / f"{name}.starts.npy", np.cumsum([0, *map(len, ids)]))
    files = {f"{name}.{kind}": digest(out / f"{name}.{kind}") for kind in ("txt", "bin")}
    size, tokens = sum(len(text.encode()) for text in texts), sum(map(len, ids))
    return {"documents": len(texts), "bytes": size, "tokens": tokens, "sha256": files}


def load_ids(folder, name):
    """ "train" or "heldout" -> list of documents, each a (n,) uint16 view of the mapped file."""
    if not (Path(folder) / f"{name}.starts.npy").exists():
        raise ValueError(f"corpus: no {name} documents in {folder}; run python -m dsv41 data")
    starts = np.load(Path(folder) / f"{name}.starts.npy")
    if len(starts) < 2 or starts[-1] == 0:
        raise ValueError(f"corpus: the {name} documents in {folder} are empty")
    ids = np.memmap(Path(folder) / f"{name}.bin", "<u2", mode="r")
    return [ids[a:b] for a, b in pairwise(starts.tolist())]


def write_documents(path, texts):
    """Documents, each ending with a newline, into one file."""
    path.write_bytes(SEPARATOR.join(texts).encode())


def read_documents(path):
    """The texts of a file that `write_documents` wrote."""
    return Path(path).read_bytes().decode().split(SEPARATOR)


def digest(path):
    """sha256 of a file, in hex."""
    return sha256(path.read_bytes()).hexdigest()


def write_json(path, value):
    """One line an entry, newline at the end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def train_tokenizer(texts, size=VOCABULARY):
    """list of str -> a parsed tokenizer.json: special tokens, 256 bytes, merges."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    splits = [pre_tokenizers.Split(Regex(words), "isolated") for words in WORDS]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=SPECIAL,
        initial_alphabet=level.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    parsed = json.loads(tokenizer.to_str())
    parsed["model"]["merges"] = [" ".join(pair) for pair in parsed["model"]["merges"]]
    return parsed


def save_tokenizer(parsed, folder):
    """Write tokenizer.json, as the release spells it."""
    write_json(folder / "tokenizer.json", parsed)


def write_samples(parts, manifest):
    """Into data/corpus: the first documents of both splits, where each comes from, the tables."""
    folder, origins = DATA / "corpus", ["file\tnumber\tsource\tname\tbytes"]
    folder.mkdir(parents=True, exist_ok=True)
    for name, limit in SAMPLES.items():
        documents = prefix(parts[name], limit)
        write_documents(folder / f"{name}.txt", [document.text for document in documents])
        for number, (source, path, text) in enumerate(documents):
            origins.append(f"{name}.txt\t{number}\t{source}\t{path}\t{len(text.encode())}")
    (folder / "documents.tsv").write_text("\n".join(origins) + "\n", encoding="utf-8")
    write_tables(folder / "README.md", manifest)


def write_tables(path, manifest):
    """Everything behind TABLES in the README: sources, shipped files, splits."""
    lines = ["| source | package | licence | documents | bytes |", "| --- " * 5 + "|"]
    row = "| {source} | {package} | {licence} | {documents:,} | {bytes:,} |".format
    lines += [row(**source) for source in manifest["sources"]]
    lines += ["", "| file | bytes | sha256 |", "| --- " * 3 + "|"]
    for name in ("heldout.txt", "train.txt", "documents.tsv", "../tokenizer/tokenizer.json"):
        file = path.parent / name
        lines.append(f"| {name} | {file.stat().st_size:,} | {digest(file)} |")
    lines += [
        "",
        "| split | documents | bytes | tokens | sha256 of the tokens |",
        "| --- " * 5 + "|",
    ]
    row = "| {} | {documents:,} | {bytes:,} | {tokens:,} | {} |".format
    for name in ("train", "heldout"):
        lines.append(row(name, manifest[name]["sha256"][f"{name}.bin"], **manifest[name]))
    head = path.read_text(encoding="utf-8").split(TABLES)[0]
    path.write_text(head + TABLES + "\n".join(lines) + "\n", encoding="utf-8")


def baselines(out):
    """Bits per byte of the held-out text: xz alone, xz behind the training text, 5-gram."""
    train, held_out = ((out / f"{name}.txt").read_bytes() for name in ("train", "heldout"))
    size = len("".join(read_documents(out / "heldout.txt")).encode())
    behind = _xz(train + held_out) - _xz(train)
    model = FiveGram(load_ids(out, "train"), VOCABULARY)
    bits = -sum(np.sum(np.log2(model.probabilities(ids))) for ids in load_ids(out, "heldout"))
    return {
        "xz -9": 8 * _xz(held_out) / size,
        "xz -9 behind the training text": 8 * behind / size,
        "5-gram, modified Kneser-Ney, tokens": bits / size,
    }


def _xz(data):
    return len(lzma.compress(data, preset=9))


class FiveGram:
    """p(token | four before), mixed with shorter contexts; before a document stand four id 0.

    An n-gram is a number in base V, so V**5 must fit 63 bits. Shorter n-grams are counted by how
    many different tokens stand before them, not by how often they occur.
    """

    def __init__(self, documents, vocabulary, order=5):
        self.base, self.order, self.tables = vocabulary, order, []
        grams = np.concatenate([self._grams(ids) for ids in documents])
        for n in range(order, 0, -1):
            keys, counts = np.unique(grams, return_counts=True)
            taken = _discounts(counts)[np.minimum(counts, 3)]
            contexts, first = np.unique(keys // vocabulary, return_index=True)
            totals, freed = np.add.reduceat(counts, first), np.add.reduceat(taken, first)
            self.tables.append((keys, counts - taken, contexts, totals, freed))
            grams = keys % vocabulary ** (n - 1)

    def _grams(self, ids):
        """ids (n,) -> (n,) int64: each token with the four before it."""
        padded = np.concatenate([np.zeros(self.order - 1, np.int64), ids])
        power = self.base ** np.arange(self.order - 1, -1, -1)
        return sum(padded[k : k + len(ids)] * power[k] for k in range(self.order))

    def probabilities(self, ids):
        """ids (n,) of one document -> (n,) float64: of each token, given those before it."""
        return self.of_grams(self._grams(ids))

    def of_grams(self, grams):
        """grams (n,) int64 -> (n,): of the last token of each, given the others."""
        p = np.full(len(grams), 1 / self.base)
        for n, (keys, kept, contexts, totals, freed) in enumerate(reversed(self.tables), 1):
            gram = grams % self.base**n
            row, seen = _find(contexts, gram // self.base)
            at, counted = _find(keys, gram)
            mixed = (np.where(counted, kept[at], 0) + freed[row] * p) / totals[row]
            p = np.where(seen, mixed, p)
        return p


def _find(table, keys):
    """Sorted table, keys -> row of each key, and whether it is there."""
    at = np.minimum(np.searchsorted(table, keys), len(table) - 1)
    return at, table[at] == keys


def _discounts(counts):
    """(4,): what a count of 0, 1, 2, 3 or more gives away to tokens not seen in its context."""
    n = np.bincount(np.minimum(counts, 5), minlength=6)
    if not np.all(n[1:5]):
        return np.array([0, 0.5, 0.5, 0.5])  # too little text to estimate them
    y = n[1] / (n[1] + 2 * n[2])
    return np.array([0, *(k - (k + 1) * y * n[k + 1] / n[k] for k in (1, 2, 3))])
