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
from hashlib import blake2b, sha256
from html.parser import HTMLParser
from typing import NamedTuple

HELD_OUT = 0.0085  # share of the documents, by hash
PART = 1 << 15  # characters of a document at most
SHORTEST = 400  # characters; less is a stub
LONG_BLOCK = 60  # characters from which a repeat is dropped
SHARED_BY = 0.3  # share of a source's documents from which a block is furniture
STOPWORDS = frozenset("the of and to a in is that for it as with be this not are or by on".split())
STOPWORD_SHARE = 0.12  # prose has 0.25 and more, a list of names almost none

QUOTES = str.maketrans("‘’‚“”„′″‐‑", "'''\"\"\"'\"--")
ADDRESS = re.compile(r"<?\b(?:(?:https?|ftp|git|news)://|mailto:)[^\s<>\"')\]]+>?")
MAIL = re.compile(r"<?\b[\w.+-]+@[\w-]+(?:\.[\w-]+)+>?")
INVISIBLE = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\xad¶\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]")
DRAWING = re.compile("(?m)^.*[\u2500-\u259f].*\n?")


class Source(NamedTuple):
    """The files of `package` whose path matches `keep` and not SKIP, read by `read`."""

    name: str
    package: str
    licence: str
    read: object
    keep: str


class Document(NamedTuple):
    source: str
    name: str  # file in the package, with #1, #2, ... for its later parts
    text: str


def collect(folder, progress=print):
    """Packages in `folder`, fetched when missing -> (documents in order, one dict a source)."""
    found, table, seen = {}, [], set()
    for source in SOURCES:
        deb = fetch(source.package, folder)
        pages = [(name, clean(text)) for name, text in source.read(members(deb, source.keep))]
        parts = [part for page in drop_repeats(pages, seen) for part in cut(*page)]
        kept = [Document(source.name, name, text) for name, text in parts if is_prose(text)]
        found |= {document.text: document for document in kept}
        row = {"source": source.name, "licence": source.licence, "package": deb.name}
        row |= {"sha256": sha256(deb.read_bytes()).hexdigest(), "documents": len(kept)}
        table.append(row | {"bytes": sum(len(document.text.encode()) for document in kept)})
        progress("{source:<12}{licence:<31}{documents:>6,}{bytes:>12,}  {package}".format(**row, **table[-1]) if 0 else format_row(table[-1]))
    return sorted(found.values(), key=lambda document: place(document.text)), table
