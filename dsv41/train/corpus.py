"""Which text may anybody train on and pass on, and how does it become clean documents?

    package -> files -> plain text -> blocks -> repeats dropped -> documents of at most 32 KB

SOURCES names Debian packages whose text is in the public domain or under a permissive licence. They
are fetched by name and read out of the archive; nothing is installed or unpacked. A block is what
stands between two blank lines. A block that a third of a source's documents share is furniture
(menus, footers); a long block is kept where it first appears in the whole corpus, digits and case
aside. Documents are put in the order of a hash of their text, so every prefix is a fair sample, and
a document is held out when its own hash says so, whatever else is in the corpus. The same packages
give the same bytes. Left out: other languages, lists of names, addresses of the web and of mail.
"""

import gzip
import io
import re
import struct
import subprocess
import tarfile
import unicodedata
import zlib
from collections import Counter
from hashlib import blake2b
from html.parser import HTMLParser
from typing import NamedTuple

HELD_OUT = 0.0115  # share of the documents, by hash
PART = 1 << 15  # characters of a document at most
SHORTEST = 400  # characters; less is a stub
LONG_BLOCK = 60  # characters from which a repeat is dropped
SHARED_BY = 0.3  # share of a source's documents from which a block is furniture
STOPWORDS = frozenset("the of and to a in is that for it as with be this not are or by on".split())
STOPWORD_SHARE = 0.12  # prose has 0.25 and more, a list of names almost none

QUOTES = str.maketrans("‘’‚“”„′″‐‑", "'''\"\"\"'\"--")
ADDRESS = re.compile(r"<?\b(?:(?:https?|ftp|git|news)://|mailto:|www\.)[^\s<>\"')\]]+>?")
MAIL = re.compile(r"<?\b[\w.+-]+@[\w-]+(?:\.[\w-]+)+>?")
HIDDEN = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\xad\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff¶]")
DRAWING = re.compile("(?m)^.*[\u2500-\u259f].*\n?")


class Document(NamedTuple):
    source: str
    name: str  # file in the package, with #1, #2, ... for its later parts
    text: str


class Source(NamedTuple):
    """The files of `package` whose path matches `keep` and not SKIP, read by `read`."""

    name: str
    package: str
    licence: str
    keep: str
    read: object


def collect(folder, progress=print):
    """Packages in `folder`, fetched when missing -> list of Document, in the order of `place`."""
    found, seen = {}, set()
    for source in SOURCES:
        deb = fetch(source.package, folder)
        pages = [(name, clean(text)) for name, text in source.read(members(deb, source.keep))]
        parts = [part for page in drop_repeats(pages, seen) for part in cut(*page)]
        kept = [Document(source.name, name, text) for name, text in parts if is_prose(text)]
        found |= {document.text: document for document in kept}
        progress(f"{source.name}: {len(kept):,} documents from {deb.name}")
    return sorted(found.values(), key=lambda document: place(document.text))


def place(text):
    """Where a document stands in the corpus: a number in [0, 1) from its text alone."""
    return int.from_bytes(blake2b(text.encode(), digest_size=6).digest(), "big") / 2**48


def split(documents):
    """list of Document -> (train, held out)."""
    held_out = [document for document in documents if place(document.text) < HELD_OUT]
    return documents[len(held_out) :], held_out  # they come first, by their order


def fetch(package, folder):
    """Path of the package's .deb in `folder`; apt-get brings it when it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    if not list(folder.glob(f"{package}_*.deb")):
        command = ["apt-get", "download", package]
        try:
            subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            reason = (getattr(error, "stderr", "") or str(error)).strip().splitlines()[-1]
            raise ValueError(f"packages: {folder} needs {package}_*.deb: {reason}") from None
    return max(folder.glob(f"{package}_*.deb"))


def members(deb, keep):
    """Yield (path, bytes) of an archive's files, by path; gzip is undone."""
    command = ["dpkg-deb", "--fsys-tarfile", str(deb)]
    packed = subprocess.run(command, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        for member in sorted(archive.getmembers(), key=lambda m: m.name):
            path = member.name
            if member.isfile() and re.search(keep, path) and not re.search(SKIP, path):
                data = archive.extractfile(member).read()
                yield path, gzip.decompress(data) if path.endswith((".gz", ".dz")) else data


def read_html(files):
    """(path, bytes) pairs -> (name, text) pairs, as every reader: one a page."""
    for path, data in files:
        yield _name(path), html_text(data.decode(errors="replace"))


def read_plain(files):
    """One text a file, without a margin of up to three blanks."""
    for path, data in files:
        yield _name(path), unwrap(re.sub(r"(?m)^ {1,3}(?=\S)", "", data.decode(errors="replace")))


def read_sword(files):
    """A module of the SWORD project: *s lists the zlib streams (offset, size, full size) of *z.

    A stream is a book, marked up in OSIS.
    """
    files = dict(files)
    for path, index in files.items():
        if path.endswith("zs"):
            packed = files[path[:-1] + "z"]
            for number, (offset, size, _) in enumerate(struct.iter_unpack("<III", index)):
                book = zlib.decompress(packed[offset : offset + size]).decode()
                yield f"{_name(path)[:2]}{number}", html_text(book)


def read_r_strings(files):
    """A database of R objects: for each vector of strings, 4 bytes of length and a zlib stream.

    In the stream, type 16 and a count open the vector; a string has 4 bytes of flags, 4 of length.
    """
    for _, data in files:
        while data:
            stream = zlib.decompressobj()
            raw, data = stream.decompress(data[4:]), stream.unused_data
            at = raw.index(b"\0\0\0\x10") + 8
            lines = []
            for _ in range(int.from_bytes(raw[at - 4 : at], "big")):
                end = at + 8 + int.from_bytes(raw[at + 4 : at + 8], "big")
                lines.append(raw[at + 8 : end].decode())
                at = end
            yield lines[0].title(), unwrap("\n".join(lines))


def read_wordnet(files):
    """The meanings that come with an example, a line each: words: gloss; "example"."""
    for path, data in files:
        lines = []
        for line in data.decode().splitlines():
            if not line.startswith(" ") and '; "' in line:
                fields, gloss = line.split(" | ", 1)
                fields = fields.split()
                words = fields[4 : 4 + 2 * int(fields[3], 16) : 2]
                words = [re.sub(r"\(\w+\)$", "", word).replace("_", " ") for word in words]
                lines.append(f"{', '.join(words)}: {gloss.strip()}\n")
        yield _name(path), "".join(lines)


def _name(path):
    return path.rsplit("/", 1)[-1]


def unwrap(text):
    """Join the lines of a paragraph; an indented line stays a line."""
    return re.sub(r"(?<=\S)\n(?=\S)", " ", re.sub(r"[ \t\r]+\n", "\n", text))


def html_text(page):
    """A page in HTML, or in OSIS, whose tags are close enough -> plain text."""
    parser = _Text()
    parser.feed(page)
    parser.close()
    return "".join(parser.out)


class _Text(HTMLParser):
    """Collects text: a blank line between paragraphs, code as it stands, no furniture."""

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.out, self.code = [""], 0
        self.skipping, self.depth = None, 0  # an element whose text is dropped, and its nesting

    def handle_starttag(self, tag, attributes):
        classes = (dict(attributes).get("class") or "").split()
        if self.skipping:
            self.depth += tag == self.skipping
        elif tag not in VOID and (tag in DROPPED or FURNITURE.intersection(classes)):
            self.skipping, self.depth = tag, 1
        else:
            self.code += tag == "pre"
            self._break(tag)

    def handle_startendtag(self, tag, attributes):
        if not self.skipping:
            self._break(tag)

    def handle_endtag(self, tag):
        if not self.skipping:
            self.code -= tag == "pre"
            self._break(tag)
        elif tag == self.skipping:
            self.depth -= 1
            self.skipping = self.skipping if self.depth else None

    def handle_data(self, data):
        if self.skipping:
            return
        if not self.code:
            data = re.sub(r"\s+", " ", data)
            data = data.lstrip() if self.out[-1].endswith("\n") else data
        if data:
            self.out.append(data)

    def _break(self, tag):
        if tag in PARAGRAPHS:
            self.out.append("\n\n")
        elif tag in LINES and not self.out[-1].endswith("\n"):
            self.out.append("\n")
        elif tag in CELLS:
            self.out.append(" ")


def clean(text):
    """Normal Unicode, straight quotes, no addresses, no drawings, one blank line in a row."""
    text = unicodedata.normalize("NFKC", HIDDEN.sub("", text)).translate(QUOTES)
    text = DRAWING.sub("", MAIL.sub("", ADDRESS.sub("", text)))
    text = re.sub(r"[ \t]+\n", "\n", text.expandtabs(4))
    text = re.sub(r"(?<=\S) {2,}(?=\S)", "  ", text)  # columns
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def drop_repeats(pages, seen):
    """(name, text) of one source -> without furniture and without blocks in `seen`, which grows."""
    split = [(name, text.strip().split("\n\n")) for name, text in pages]
    pages_with = Counter(key for _, blocks in split for key in set(map(_key, blocks)))
    furniture = {k for k, n in pages_with.items() if n >= 5 and n > SHARED_BY * len(split)}
    for name, blocks in split:
        kept = []
        for block, key in zip(blocks, map(_key, blocks), strict=True):
            if key not in furniture and key not in seen:
                kept.append(block)
                if len(block) >= LONG_BLOCK:
                    seen.add(key)
        yield name, "\n\n".join(kept) + "\n"


def _key(block):
    """Equal for blocks that differ in numbers, case and spacing only."""
    return " ".join(re.sub(r"\d+", "0", block.casefold()).split())


def cut(name, text):
    """Yield (name, text) of parts of at most PART characters; a longer block is a part."""
    pieces = re.split(r"(?<=\n\n)" if "\n\n" in text else r"(?<=\n)", text)
    part, number = "", 0
    for piece in pieces:
        if part and len(part) + len(piece) > PART:
            yield f"{name}#{number}", part.strip() + "\n"
            part, number = "", number + 1
        part += piece
    yield f"{name}#{number}" if number else name, part.strip() + "\n"


def is_prose(text):
    """Is it long enough, English, and mostly sentences?"""
    words = re.findall(r"[a-z]+", text.casefold())
    return len(text) >= SHORTEST and sum(
        word in STOPWORDS for word in words
    ) >= STOPWORD_SHARE * len(words)


DROPPED = set("script style nav head header footer button select svg details note".split())
FURNITURE = set(  # classes that the manuals give to menus, link marks and jump lists
    """sphinxsidebar related headerlink navheader navfooter toc toctree-wrapper quickview up top
    bottomlang toplang fancyformat searchmenu mainmenu nosearch tblclose lineno mark
    srclink api_stability comments_section""".split()
)
PARAGRAPHS = set("p div h1 h2 h3 h4 h5 h6 pre table ul ol dl blockquote section chapter".split())
PARAGRAPHS |= {"title"}
LINES = set("li dt dd tr br row l lb lg".split())
CELLS = {"td", "th", "cell"}
VOID = set("area base br col hr img input link meta wbr milestone".split())
SKIP = (
    r"/(_static|_modules|_downloads|hlp|AMDGPU)/|(genindex|modindex|bookindex|keyword_index|doclist|"
    r"index-\w+|/(search|contents|all|changelog|toc|quickreference|directives|sitemap))\.html|AMDGPUU"
)
LLVM = "Apache-2.0 WITH LLVM-exception"
SOURCES = (
    Source("python", "python3.11-doc", "PSF-2.0", r"/html/.*\.html$", read_html),
    Source("postgresql", "postgresql-doc-15", "PostgreSQL", r"\.html$", read_html),
    Source("sqlite", "sqlite3-doc", "public domain", r"/sqlite3/.*\.html$", read_html),
    Source("django", "python-django-doc", "BSD-3-Clause", r"/html/.*\.html$", read_html),
    Source("apache", "apache2-doc", "Apache-2.0", r"/manual/en/.*\.html$", read_html),
    Source("llvm", "llvm-15-doc", LLVM, r"/html/.*\.html$", read_html),
    Source("node", "nodejs-doc", "MIT", r"/api/.*\.html$", read_html),
    Source("wordnet", "wordnet-base", "WordNet-3.0", r"/data\.(adj|adv|noun|verb)$", read_wordnet),
    Source("austen", "r-cran-janeaustenr", "public domain", r"/data/Rdata\.rdb$", read_r_strings),
    Source("bible", "sword-text-web", "public domain", r"\.bz[sz]$", read_sword),
    Source("henry", "sword-comm-mhcc", "public domain", r"\.bz[sz]$", read_sword),
    Source("jargon", "jargon-text", "public domain", r"/jargon\.txt\.gz$", read_plain),
    Source("devil", "dict-devil", "public domain", r"/devil\.dict\.dz$", read_plain),
)
