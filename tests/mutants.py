"""Deliberate bugs, each a small change to the source, that the checks below must reject.

A mutant is (name, file, text, replacement). The package is copied, changed and imported under
another name; `complaints` runs a short version of the suite against it and lists what it finds
wrong. The unchanged package must have no complaint, every mutant at least one.
"""

import importlib
import shutil
import sys
from pathlib import Path

import numpy as np
from reference import GOLDEN, PROMPT, arrays

SOURCE = Path(__file__).parent.parent / "dsv41"

MUTANTS = [
    # number formats
    ("bf16 truncates", "formats.py", "(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))", "bits"),
    ("bf16 ties go up", "formats.py", "((bits >> np.uint32(16)) & np.uint32(1))", "np.uint32(1)"),
    ("FP4 and FP8 round half up", "formats.py", "np.copysign((magnitude + c) - c, x)", "np.copysign((magnitude * (1 + np.float32(2**-22)) + c) - c, x)"),
    ("minifloat ties go away from zero", "formats.py", "- np.uint32(1) + odd) >> drop", "+ np.uint32(0) * odd) >> drop"),
    ("subnormals round half up", "formats.py", "np.rint(np.where(is_small, magnitude, np.float32(0)) * step)", "np.floor(np.where(is_small, magnitude, np.float32(0)) * step + np.float32(0.5))"),
    ("high nibble first", "formats.py", "codes[..., 0::2] | (codes[..., 1::2] <<", "codes[..., 1::2] | (codes[..., 0::2] <<"),
    ("E8M0 by floor", "formats.py", "+ has_fraction.astype(np.uint32)", "+ 0 * has_fraction.astype(np.uint32)"),
    ("E8M0 byte 0 is zero", "formats.py", "np.uint32(0x00400000)", "np.uint32(0)"),
    ("scale by reciprocal", "quant.py", "return grouped / self._decode_scale(scales)[..., None], scales", "return grouped * (1 / self._decode_scale(scales)[..., None]), scales"),
    ("main KV groups of 32", "quant.py", 'E2M1, group=16, scale="e4m3"', 'E2M1, group=32, scale="e4m3"'),
    ("main KV scale is a power of two", "quant.py", 'E2M1, group=16, scale="e4m3"', 'E2M1, group=16, scale="e8m0"'),
    ("weight tiles are rows", "quant.py", ".repeat(TILE, axis=0).repeat(TILE, axis=1)", ".repeat(TILE, axis=1).repeat(TILE, axis=0)[::-1]"),
    # small operations
    ("gate clamp on both sides", "ops.py", "gate = np.minimum(gate, np.float32(limit))", "gate = np.clip(gate, -np.float32(limit), np.float32(limit))"),
    ("no clamp", "ops.py", "    if limit:\n", "    if False:\n"),
    ("router without the root", "ops.py", "np.sqrt(softplus))", "softplus)"),
    # position
    ("half-split pairs", "rope.py", "turning[..., 0::2], turning[..., 1::2]", "turning[..., :pairs], turning[..., pairs:]"),
    ("one base for all layers", "rope.py", "base = config.compress_rope_theta if ratio else config.rope_theta", "base = config.rope_theta"),
    ("no YaRN", "rope.py", "freqs = _yarn(freqs, config, base) if ratio else freqs", "pass"),
    ("output not rotated back", "sparse_attn.py", "numerics.store(rotate(o, positions, freqs, inverse=True))", "o"),
    ("first channels rotate", "rope.py", "turning = x[..., -2 * pairs :]", "turning = x[..., : 2 * pairs]"),
    # window and attention
    ("window one too long", "window.py", "np.arange(width - 1, -1, -1, like=batch.positions)", "np.arange(width, 0, -1)"),
    ("window does not see the token itself", "window.py", "rows = np.where(in_call, own_row, ring_row)", "rows = np.where(positions < batch.positions[:, None], np.where(in_call, own_row, ring_row), -1)"),
    ("ring written one row late", "cache.py", "batch.positions[recent] % width\n", "(batch.positions[recent] + 1) % width\n"),
    ("ring shared by all requests", "csa2.py", "cache.window[layer.index][batch.slots]", "cache.window[layer.index][batch.slots * 0]"),
    ("sink is scaled", "sparse_attn.py", "np.exp(sink[:, None] - top)", "np.exp(sink[:, None] * scale - top)"),
    ("no sink", "sparse_attn.py", "total = total + np.exp(sink[:, None] - top)", "pass"),
    ("-1 reads the last row", "sparse_attn.py", "valid = rows >= 0\n", "valid = rows >= -1\n    rows = np.where(rows < 0, len(records) - 1, rows)\n    used, where = np.unique(rows, return_inverse=True)\n"),
    ("probabilities stay float32", "sparse_attn.py", "numerics.store(p) @ rows", "p @ rows"),
    ("window KV before rotation", "window.py", "numerics.store(rotate(latent, positions, freqs))", "latent"),
    ("norm per query head", "projections.py", "return c_q, q.reshape(-1, config.num_attention_heads, config.head_dim)", "q = q.reshape(-1, config.num_attention_heads, config.head_dim)\n    return c_q, q / np.sqrt(np.mean(q * q, axis=-1, keepdims=True))"),
    ("output groups interleaved", "projections.py", "o = o.reshape(tokens, groups, heads // groups * channels)", "o = o.reshape(tokens, -1, groups, channels).transpose(0, 2, 1, 3).reshape(tokens, groups, -1)"),
    # compression
    ("pooling averages", "compress.py", "weights = np.exp(g - np.max(g, axis=1, keepdims=True))", "weights = np.exp(g * 0)"),
    ("one gate per token", "compress.py", "weights = np.exp(g - np.max(g, axis=1, keepdims=True))", "weights = np.exp(np.mean(g, axis=2, keepdims=True) + 0 * g)"),
    ("pairs restart at a chunk", "compress.py", "        if pending:\n", "        if False:\n"),
    ("entry rotated at its last token", "csa2.py", "kv = main_kv(latent, positions,", "kv = main_kv(latent, positions + layer.ratio - 1,"),
    ("entry seen before its group closes", "csa2.py", "visible = (here.positions + 1) // layer.ratio", "visible = (here.positions + 2) // layer.ratio"),
    ("entry seen one token late", "csa2.py", "visible = (here.positions + 1) // layer.ratio", "visible = here.positions // layer.ratio"),
    # selection
    ("no relu", "indexer.py", "np.maximum(numerics.store(dots), np.float32(0))", "numerics.store(dots)"),
    ("relu after the weights", "indexer.py", "np.maximum(numerics.store(dots), np.float32(0)) * w[:, :, None]", "np.maximum(numerics.store(dots) * w[:, :, None], np.float32(0))"),
    ("ties from the right", "indexer.py", "np.cumsum(equal, axis=1) <= room", "np.cumsum(equal[:, ::-1], axis=1)[:, ::-1] <= room"),
    ("newest block not pinned", "indexer.py", "return np.where(is_newest, np.float32(np.inf), best)", "return best"),
    ("pool ignored", "plan.py", 'candidates = "publish" if index == pool else "consume"', 'candidates = "publish" if index == pool else None'),
    ("reuse reads its KV source's top-k", "csa2.py", "entries = call.shared.selected[layer.index_source]", "entries = call.shared.selected[layer.kv_source]"),
    ("index keys of the last source", "csa2.py", "keys = call.cache.index_keys(layer.kv_source, slot, end // layer.ratio)", "keys = call.cache.index_keys(max(call.cache.ratio) if end % 2 else layer.kv_source, slot, end // layer.ratio)"),
    ("index keys after rotation of the latent", "csa2.py", "keys = indexer.index_keys(latent, p", "from .rope import rotate\n    keys = indexer.index_keys(rotate(latent, positions, freqs), p"),
    # streams
    ("pre used at once", "ced.py", "x = hc_collapse(streams, pre, numerics)", "x = hc_collapse(streams, new_pre, numerics)"),
    ("comb contracted over its second axis", "mhc.py", "comb.transpose(0, 2, 1) @", "comb @"),
    ("rows normalised last", "mhc.py", "    return b\n", "    return b / (b @ ones + eps)\n"),
    ("post without its factor 2", "mhc.py", "post = 2 * sigmoid", "post = sigmoid"),
    ("pre without eps", "mhc.py", "+ base[:s]) + np.float32(config.hc_eps)", "+ base[:s])"),
    ("one statistic per stream", "mhc.py", "mean_square = np.mean(flat * flat, axis=-1, keepdims=True)", "mean_square = np.mean(streams[:, 0] ** 2, axis=-1, keepdims=True)"),
    # experts
    ("bias weighs", "moe.py", "weight = np.take_along_axis(scores, chosen, axis=1)", "weight = np.take_along_axis(biased, chosen, axis=1)"),
    ("no routing factor", "moe.py", "weight * np.float32(factor), biased", "weight, biased"),
    ("images use the text bias", "moe.py", "bias = np.where(is_image[:, None], p[\"bias_vl\"], bias)", "bias = bias + np.float32(0)"),
    ("router weight on the output", "moe.py", "    return linear_fp8(numerics.store(hidden), p[\"w2\"][\"weight\"], numerics)", "    hidden = hidden if weight is None else hidden / weight[:, None]\n    out = linear_fp8(numerics.store(hidden), p[\"w2\"][\"weight\"], numerics)\n    return out if weight is None else out * weight[:, None]"),
    # Engram
    ("image is no barrier for older tokens", "engram.py", "stopped = np.cumsum(windows == BARRIER, axis=1) > 0", "stopped = windows == BARRIER"),
    ("history lost at a chunk", "engram.py", "return np.where(stopped, pad, windows), line[len(line) - size + 1 :]", "return np.where(stopped, pad, windows), history"),
    ("oldest token first", "engram.py", "back = np.arange(size - 1, -1, -1)", "back = np.arange(size)"),
    ("raw ids hashed", "model.py", "own, is_image = classes[batch.ids[at]],", "own, is_image = batch.ids[at],"),
    ("primes restart per module", "engram.py", "        columns = []\n", "        columns, used = [], set()\n"),
    ("gate without the root", "engram.py", "sigmoid(np.sign(dot) * root)", "sigmoid(dot)"),
    ("gate open in images", "engram.py", "gate = np.where(is_image[:, None], np.float32(0), sigmoid(np.sign(dot) * root))", "gate = sigmoid(np.sign(dot) * root)"),
    ("Engram changes the carried pre", "ced.py", "        streams = remember(streams, p[\"engram\"], layer, call)\n", "        streams = remember(streams, p[\"engram\"], layer, call)\n        pre = hc_coefficients(streams, *[p[f\"hc_attn_{x}\"] for x in (\"fn\", \"base\", \"scale\")], call.config, call.numerics)[0]\n"),
    ("letters keep their case", "token_classes.py", "c.lower() for c in folded", "c for c in folded"),
    # model
    ("final norm skipped", "model.py", "x = rmsnorm(x, params[\"norm\"][\"weight\"], config.rms_norm_eps, numerics)", "x = x + np.float32(0)"),
    ("pages of two requests overlap", "cache.py", "self.free_pages.popleft() for", "self.free_pages[0] for"),
]  # fmt: skip


def build(directory, name, file=None, text=None, replacement=None):
    """Copy the package into `directory` as `name`, with one replacement, and import it."""
    shutil.copytree(SOURCE, directory / name, ignore=shutil.ignore_patterns("__pycache__"))
    if file is not None:
        source = (directory / name / file).read_text()
        assert source.count(text) >= 1, f"{file} no longer contains {text!r}"
        (directory / name / file).write_text(source.replace(text, replacement, 1))
    sys.path.insert(0, str(directory))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(directory))


def complaints(package):
    """What a short version of the suite finds wrong with an imported copy of dsv41."""
    found = []
    for check in (formats, prompt, images, barrier, chunks, tie_rule):
        try:
            found += check(package)
        except Exception as error:  # a crash is a complaint too
            found.append(f"{check.__name__}: {type(error).__name__}: {error}")
    return found


def formats(package):
    """Ties, subnormals, nibbles and tiny scales, which the prompt may not exercise."""
    quant, formats = (
        importlib.import_module(f"{package.__name__}.{n}") for n in ("quant", "formats")
    )
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
    if formats.E2M1.encode(ties).tolist() != [0, 2, 2, 4, 4, 6, 6]:
        yield "E2M1 ties"
    halves = np.array([1.00390625, 1.01171875], np.float32)
    if formats.round_bf16(halves).tolist() != [1.0, 1.015625]:
        yield "bf16 ties"
    if formats.decode_bf16(formats.encode_bf16(halves)).tolist() != [1.0, 1.015625]:
        yield "bf16 bits"
    if formats.E2M1.round(ties).tolist() != [0, 1, 1, 2, 2, 4, 4]:
        yield "E2M1 rounding"
    if formats.pack_nibbles(np.arange(4, dtype=np.uint8)).tolist() != [0x10, 0x32]:
        yield "nibbles"
    if formats.decode_e8m0(np.array([0], np.uint8))[0] != np.float32(2.0**-127):
        yield "smallest E8M0"
    rng = np.random.default_rng(0)
    w = rng.standard_normal((64, 96), dtype=np.float32) * np.repeat([1, 8], 32)[:, None]
    w = w.astype(np.float32)
    if np.abs(quant.dequantize_tiles(*quant.quantize_tiles(w)) - w).max() > 3:
        yield "tiles"
    for s in np.unique(formats.E4M3.decode(np.arange(1, 126, dtype=np.uint8))):
        group = np.concatenate([[6], np.tile(ties, 3)[:15]]).astype(np.float32) * s
        codes, _ = quant.MAIN_KV_FP4.quantize(group)
        if codes[1:8].tolist() != [0, 2, 2, 4, 4, 6, 6]:
            yield f"ties at scale {s}"
            return


def _departures(package, stem, numerics, **options):
    stored, trace = arrays(stem), {}
    verify = importlib.import_module(f"{package.__name__}.verify")
    model = package.load(GOLDEN)
    trace["logits"] = model.logits(stored["ids"][0, :PROMPT], numerics, trace, **options)
    for name, value in trace.items():
        theirs = stored.get(name)
        if theirs is not None:
            theirs = theirs[0] if name == "logits" else theirs
            departure = verify.compare(name, value, theirs, numerics)
            if not departure.within:
                yield str(departure)


def prompt(package):
    """Both reference prompts, every stored tensor."""
    yield from _departures(package, "prompt_fp32", package.FLOAT32)
    yield from _departures(package, "prompt_bf16q", package.OFFICIAL)


def images(package):
    stored = arrays("vision")
    model = package.load(GOLDEN)
    embedding, types = stored["fp32.embedding"], stored["token_types"]
    got = model.logits(stored["ids"], package.FLOAT32, token_types=types, embedding=embedding)
    if not np.abs(got - stored["fp32.logits"]).max() < 5e-5:
        yield "image prompt"


def barrier(package):
    """A single image position hides every older token from Engram."""
    engram = importlib.import_module(f"{package.__name__}.engram")
    is_image = np.array([False, False, True, False])
    history = np.array([2, 2, 2])
    windows, _ = engram.look_back(np.array([5, 6, 7, 8]), is_image, history, 2)
    if windows[3].tolist() != [8, 2, 2, 2]:
        yield "barrier"


def chunks(package):
    """Two requests in uneven pieces give the bits of one call each."""
    model = package.load(GOLDEN)
    numerics = package.OFFICIAL.but(batch_invariant=True)
    requests = [np.random.default_rng(n).integers(3, 280, n) for n in (61, 70)]
    cache = model.new_cache(numerics)
    slots = [model.open(cache) for _ in requests]
    pieces = []
    for begin, end in ((0, 5), (5, 6), (6, 29), (29, 30), (30, 31), (31, 61)):
        out = model.step(cache, slots, [r[begin:end] for r in requests])
        pieces.append(np.split(out, 2))
    for row, request in enumerate(requests):
        whole = model.logits(request[:61], numerics)
        if not np.array_equal(np.concatenate([p[row] for p in pieces]), whole):
            yield f"chunks of request {row}"


def tie_rule(package):
    indexer = importlib.import_module(f"{package.__name__}.indexer")
    scores = np.array([[1, 5, 5, 5, 5, 0]], np.float32)
    if indexer.index_topk(scores, np.array([6]), 3).tolist() != [[1, 2, 3]]:
        yield "ties"
