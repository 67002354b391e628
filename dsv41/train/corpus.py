"""Which text may anybody train on and pass on, and how does it become clean documents?

    package -> files -> plain text -> blocks -> repeats dropped -> documents of at most 64 KB

SOURCES names Debian packages whose text is in the public domain or under a permissive licence. They
are fetched by name and read out of the archive; nothing is installed or unpacked. A block is what
stands between two blank lines. A block that a third of a source's documents share is furniture
(menus, footers); a long block is kept where it first appears in the whole corpus, digits and case
aside. Documents are put in the order of a hash of their text, so every prefix is a fair sample, and
a document is held out when its own hash says so, whatever else is in the corpus. The same packages
give the same bytes. Left out: other languages, tables of symbols, addresses of the web and of mail.
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

HELD_OUT = 0.008  # share of the documents, by hash
PART = 1 << 16  # characters of a document at most
SHORTEST = 400  # characters: less is a stub
LONG_BLOCK = 60  # characters from which a repeat is dropped
SHARED_BY = 0.3  # of a source's documents: then a block is furniture
STOPWORDS = frozenset("the of and to a in is that for it as with be this not are or by on".split())
STOPWORD_SHARE = 0.12  # English prose has 0.25 and more, an index of names almost none
QUOTES = str.maketrans("‘’‚“”„′″\u2010\u2011", "'''\"\"\"'\"--", "\u00ad\u200b\u200c\u200d\u2060\ufeff¶")
ADDRESS = re.compile(r"<?\b(?:https?|ftp|news|git|mailto)://?[^\s<>\"')\]]+>?|<?\b[\w.+-]+@[\w-]+\.[\w.-]+>?")


class Source(NamedTuple):
    """Files of `package` whose path matches `keep` and not `skip`, read by `read`."""

    name: str
    package: str
    licence: str
    read: object
    keep: str
    skip: str = "$^"


class Document(NamedTuple):
    source: str
    name: str
    text: str


def documents(folder, sources=None, progress=print):
    """Packages in `folder`, fetched if missing -> list of Document in the order of their hash."""
    found, seen = [], set()
    for source in SOURCES if sources is None else sources:
        deb = fetch(source.package, folder)
        raw = [(name, clean(text)) for name, text in source.read(files(deb, source))]
        texts = drop_repeats(raw, seen)
        parts = [Document(source.name, *part) for pair in texts for part in cut(*pair)]
        parts = [part for part in parts if is_prose(part.text)]
        found += {part.text: part for part in parts}.values()
        progress(f"{source.name:<14}{len(raw):>6} files {len(parts):>6} documents  {deb.name}")
    return sorted(found, key=lambda document: (place(document.text), document.text))


def place(text):
    """Where a document stands in the corpus: a number in [0, 1) from its text alone."""
    return int.from_bytes(blake2b(text.encode(), digest_size=6).digest(), "big") / 2**48


def split(found):
    """Documents -> (train, held out)."""
    held_out = [d for d in found if place(d.text) < HELD_OUT]
    return [d for d in found if place(d.text) >= HELD_OUT], held_out


# --- packages


def fetch(package, folder):
    """Path of the package's .deb in `folder`; apt-get brings it when it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    have = sorted(folder.glob(f"{package}_*.deb"))
    if not have:
        command = ["apt-get", "download", package]
        try:
            subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
        except (FileNotFoundError, subprocess.CalledProcessError) as error:
            reason = (getattr(error, "stderr", "") or str(error)).strip().splitlines()[-1]
            raise ValueError(f"packages: put {package}_*.deb into {folder} ({reason})") from None
        have = sorted(folder.glob(f"{package}_*.deb"))
    return have[-1]


def files(deb, source):
    """Yield (path, bytes) of the archive's files that the source wants, by path."""
    command = ["dpkg-deb", "--fsys-tarfile", str(deb)]
    packed = subprocess.run(command, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        members = [m for m in archive.getmembers() if m.isfile()]
        for member in sorted(members, key=lambda m: m.name):
            if re.search(source.keep, member.name) and not re.search(source.skip, member.name):
                data = archive.extractfile(member).read()
                is_packed = member.name.endswith((".gz", ".dz"))
                yield member.name, gzip.decompress(data) if is_packed else data


# --- readers: (path, bytes) pairs -> (name, text) pairs


def read_html(members):
    """One document a page."""
    for path, data in members:
        yield path.rsplit("/", 1)[-1], html_text(data.decode("utf-8", errors="replace"))


def read_plain(members):
    """One document a file; lines that end inside a sentence are joined."""
    for path, data in members:
        text = data.decode("utf-8", errors="replace")
        yield path.rsplit("/", 1)[-1], unwrap(text)


def read_sword(members):
    """A module of the SWORD project: .?zs lists zlib streams (offset, size, full size) in .?zz.

    One stream is a book or a chapter, marked up in OSIS.
    """
    data = dict(members)
    for path in data:
        if path.endswith("zs"):
            packed = data[path[:-1] + "z"]
            for number, (offset, size, _) in enumerate(struct.iter_unpack("<III", data[path])):
                text = zlib.decompress(packed[offset : offset + size]).decode()
                yield f"{path[-6:-4]}{number}", html_text(text)


def read_r_strings(members):
    """A database of R objects: 4 bytes of length and a zlib stream for each vector of lines.

    In the stream, type 16 and a count open a vector; each string has flags, length, bytes.
    """
    for path, data in members:
        while data:
            stream = zlib.decompressobj()
            raw, data = stream.decompress(data[4:]), stream.unused_data
            at = raw.index(b"\0\0\0\x10") + 8
            lines = []
            for _ in range(struct.unpack(">i", raw[at - 4 : at])[0]):
                size = struct.unpack(">i", raw[at + 4 : at + 8])[0]
                lines.append(raw[at + 8 : at + 8 + size].decode())
                at += 8 + size
            yield f"{path.rsplit('/', 1)[-1]}:{lines[0]}", unwrap("\n".join(lines))


def read_wordnet(members):
    """Glosses that come with an example, one line a meaning; one document for each file."""
    for path, data in members:
        lines = []
        for line in data.decode().splitlines():
            if not line.startswith(" ") and '; "' in line:
                fields, gloss = line.split(" | ", 1)
                fields = fields.split()
                words = fields[4 : 4 + 2 * int(fields[3], 16) : 2]
                spelled = ", ".join(re.sub(r"\(\w+\)$", "", w).replace("_", " ") for w in words)
                lines.append(f"{spelled}: {gloss.strip()}")
        yield path.rsplit("/", 1)[-1], "\n".join(lines)


def unwrap(text):
    """Join the lines of a paragraph; indented lines stay lines."""
    return re.sub(r"(?<=\S)\n(?=\S)", " ", re.sub(r"[ \t\r]+\n", "\n", text))


SKIPPED = {"script", "style", "nav", "head", "header", "footer", "button", "note", "svg", "select"}
FURNITURE = re.compile(
    r"(sphinxsidebar|related|footer|headerlink|navheader|navfooter|mark|menu|toc|toctree-wrapper|"
    r"quickview|up|top|bottomlang|toplang|page-header|preamble|genindextable|breadcrumb|"
    r"fancyformat|searchmenu|mainmenu|nosearch|tblclose|highlight-links|lineno|api_stability|"
    r"srclink|js-flavor-selector|comments_section|retired)"
)
PARAGRAPHS = set("p div h1 h2 h3 h4 h5 h6 pre table ul ol dl blockquote section title chapter".split())
LINES = {"li", "dt", "dd", "tr", "br", "row", "l", "lb", "lg"}
VOID = set("br hr img input meta link col area base wbr milestone".split())


class _Text(HTMLParser):
    """Collects the text of a page: a blank line between paragraphs, code as it stands."""

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.out, self.skipping, self.depth, self.code = [], None, 0, 0

    def handle_starttag(self, tag, attributes):
        if self.skipping:
            self.depth += tag == self.skipping
            return
        names = next((v or "" for k, v in attributes if k == "class"), "").split()
        if tag not in VOID and (tag in SKIPPED or any(map(FURNITURE.fullmatch, names))):
            self.skipping, self.depth = tag, 1
            return
        self.code += tag == "pre"
        self._break(tag)

    def handle_startendtag(self, tag, attributes):
        if not self.skipping:
            self._break(tag)

    def handle_endtag(self, tag):
        if self.skipping:
            self.depth -= tag == self.skipping
            if not self.depth:
                self.skipping = None
            return
        self.code -= tag == "pre"
        self._break(tag)

    def handle_data(self, data):
        if not self.skipping:
            self.out.append(data if self.code else re.sub(r"\s+", " ", data))

    def _break(self, tag):
        if tag in PARAGRAPHS:
            self.out.append("\n\n")
        elif tag in LINES:
            self.out.append("\n")
        elif tag in ("td", "th", "cell"):
            self.out.append(" ")


def html_text(page):
    """A page in HTML (or OSIS, whose tags are close enough) -> plain text."""
    parser = _Text()
    parser.feed(page)
    parser.close()
    return "".join(parser.out)


# --- cleaning


def clean(text):
    """Normal Unicode, straight quotes, no addresses, at most one blank line in a row."""
    text = unicodedata.normalize("NFKC", text).translate(QUOTES)
    text = "".join(c for c in ADDRESS.sub("", text) if c in "\n\t" or unicodedata.category(c)[0] != "C")
    text = re.sub(r"[ \t]+\n", "\n", text.expandtabs(4))
    text = re.sub(r"(?<=\n) (?=\S)", "", re.sub(r"(?<=\S) {2,}(?=\S)", "  ", text))
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def drop_repeats(pairs, seen):
    """(name, text) pairs of one source -> pairs without furniture and without blocks in `seen`."""
    blocks = [(name, text.strip().split("\n\n")) for name, text in pairs]
    shared = Counter(key for _, page in blocks for key in {_key(block) for block in page})
    furniture = {k for k, n in shared.items() if n >= 5 and n > SHARED_BY * len(blocks)}
    for name, page in blocks:
        kept = []
        for block in page:
            key = _key(block)
            if key not in furniture and key not in seen:
                kept.append(block)
                if len(block) >= LONG_BLOCK:
                    seen.add(key)
        yield name, "\n\n".join(kept) + "\n"


def _key(block):
    """What two blocks have in common that differ in numbers, case and spacing only."""
    return " ".join(re.sub(r"\d+", "0", block.casefold()).split())


def cut(name, text):
    """Yield (name, text) parts of at most PART characters, cut at blank lines, else at lines."""
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
    share = sum(word in STOPWORDS for word in words) / max(len(words), 1)
    return len(text) >= SHORTEST and share >= STOPWORD_SHARE


INDEX = r"genindex|search\.html|py-modindex|contents\.html|modindex|/index-|bookindex"
SOURCES = (
    Source("python", "python3.11-doc", "PSF-2.0", read_html, r"/html/.*\.html$", INDEX + "|_static|/download"),
    Source("postgresql", "postgresql-doc-15", "PostgreSQL", read_html, r"\.html$", INDEX),
    Source("sqlite", "sqlite3-doc", "public domain", read_html, r"/sqlite3/.*\.html$", INDEX + "|keyword_index|doclist|hlp/|toc"),
    Source("django", "python-django-doc", "BSD-3-Clause", read_html, r"/html/.*\.html$", INDEX + "|_modules|_static"),
    Source("apache", "apache2-doc", "Apache-2.0", read_html, r"/manual/en/.*\.html$", INDEX + "|quickreference|directives|sitemap"),
    Source("llvm", "llvm-15-doc", "Apache-2.0 WITH LLVM-exception", read_html, r"/html/.*\.html$", INDEX + "|AMDGPU/|_static"),
    Source("node", "nodejs-doc", "MIT", read_html, r"/api/.*\.html$", INDEX + r"|all\.html"),
    Source("wordnet", "wordnet-base", "WordNet-3.0", read_wordnet, r"/data\.(adj|adv|noun|verb)$"),
    Source("austen", "r-cran-janeaustenr", "public domain", read_r_strings, r"/data/Rdata\.rdb$"),
    Source("bible", "sword-text-web", "public domain", read_sword, r"\.bz[sz]$"),
    Source("henry", "sword-comm-mhcc", "public domain", read_sword, r"\.bz[sz]$"),
    Source("jargon", "jargon-text", "public domain", read_plain, r"jargon\.txt\.gz$"),
    Source("devil", "dict-devil", "public domain", read_plain, r"devil\.dict\.dz$"),
)
