"""How many kernels does a layer launch, in a prefill and in a decode step?

    python -m dsv41_kernels.launches [DIRECTORY]

For one token a launch costs more than most of the work behind it, so the technical report of V4.1
counts: 15 kernels during prefill and 11 during decode in a layer that reuses another's selection.
Here every kernel counts that the GPU ran between the beginning and the end of a layer, whoever
launched it: ours, CuPy's elementwise ones, a library's products. The GPU's own records say which,
read by PyTorch's profiler; an empty kernel before and behind every layer tells layers apart.
Copies are counted beside; one to the host in the middle of a step would be a wait. The model is a
tiny one with every mechanism, or the one in DIRECTORY.
"""

import sys
from collections import Counter
from contextlib import contextmanager
from functools import partial

import numpy as np

from dsv41 import OFFICIAL, ced

from . import commands
from .busy import names_in_order
from .launch import kernel
from .sanitize import kernel_names, tiny

MARKER = "layer_marker"  # of bench.cu
REPORTED = {"prefill": 15, "decode": 11}  # a layer in mode reuse, technical report, section 1
PROMPT = 64


def mark():
    """Leave a mark in the GPU's records."""
    kernel("bench.cu", MARKER)((1,), (1,), ())


@contextmanager
def marked_layers(mark=mark):
    """Inside a with block every layer of a model has a mark in front and behind."""
    block = ced.block

    def between_marks(*arguments):
        mark()
        out = block(*arguments)
        mark()
        return out

    ced.block = between_marks
    try:
        yield
    finally:
        ced.block = block


def by_layer(names):
    """Names in the order in which the GPU ran them, marks among them -> one list for each layer,
    and a list of all that ran outside of layers.
    """
    parts = [[]]
    for name in names:
        if name == MARKER:
            parts.append([])
        else:
            parts[-1].append(name)
    return parts[1::2], [name for part in parts[0::2] for name in part]


def steps(model, watch=names_in_order, mark=mark):
    """Prefill of a prompt, and one decode step -> {"prefill": names, "decode": names}."""

    def run(cache, slot, ids):
        with marked_layers(mark):
            model.step(cache, [slot], [ids])

    prompt, found = np.arange(PROMPT) % 50 + 3, {}
    for watching in (lambda work: work(), watch):  # the first time compiles and fills the pool
        cache = model.new_cache(OFFICIAL)
        slot = model.open(cache)
        found["prefill"] = watching(partial(run, cache, slot, prompt))
        found["decode"] = watching(partial(run, cache, slot, prompt[:1]))
    return found


def tally(names, own):
    """-> Counter of kernels, of ours among them, of copies and of those that go to the host."""
    count = Counter()
    for name in names:
        copy = name.startswith(("Memcpy", "Memset"))
        count["copies" if copy else "kernels"] += 1
        count["ours"] += name in own
        count["to host"] += copy and "DtoH" in name
    return count


def table(model, found, out=print):
    """Print what `steps` found, layer by layer."""
    own = {name for _, name in kernel_names()}
    columns = ("kernels", "ours", "copies", "to host")
    for what, names in found.items():
        layers, outside = by_layer(names)
        plan = model.config.plan
        out(f"{what}, {PROMPT if what == 'prefill' else 1} tokens of one request")
        out(f"{'layer':<22}" + "".join(f"{c:>9}" for c in columns))
        counts = [tally(part, own) for part in layers]
        for layer, count in zip(plan, counts, strict=True):
            kind = f"{layer.index} {layer.mode}" + (" engram" if layer.engram is not None else "")
            out(f"{kind:<22}" + "".join(f"{count[c]:>9}" for c in columns))
        rest = tally(outside, own)
        out(f"{'outside of layers':<22}" + "".join(f"{rest[c]:>9}" for c in columns))
        reuse = [c["kernels"] for p, c in zip(plan, counts, strict=True) if _plain_reuse(p)]
        if reuse:
            seen = " to ".join(str(n) for n in sorted({min(reuse), max(reuse)}))
            out(f"a layer in mode reuse: {seen} kernels; the technical report: {REPORTED[what]}\n")


def _plain_reuse(layer):
    return layer.mode == "reuse" and layer.engram is None


def report(model=None, out=print):
    """Print the launches of a step of `model`, or of a tiny one; needs a GPU and PyTorch."""
    if model is None:
        from dsv41.init import random_params
        from dsv41.model import Model

        config, classes = tiny()
        model = Model(config, random_params(config, np.random.default_rng(0)), classes)
    try:
        found = steps(model.to("cuda"))
    except ImportError as error:
        out(f"launches are not counted: {error}")
        return
    table(model, found, out)


def main(argv=None):
    parser = commands.parser("launches", __doc__)
    parser.add_argument("directory", nargs="?", help="a model in the released layout")
    arguments = parser.parse_args(argv)
    import dsv41

    try:
        report(dsv41.load(arguments.directory) if arguments.directory else None)
    except (ImportError, OSError, ValueError) as error:
        print(f"launches: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
