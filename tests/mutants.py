"""Deliberate bugs, each a small change to the source, that the checks below must reject.

A mutant is (name, file, text, replacement). The package is copied, changed and imported under
another name; `complaints` runs a short version of the suite against it and yields what it finds
wrong. The unchanged package must have no complaint, every mutant at least one. MUTANTS change the
model, SERVING changes how it is run: drafts, rollback, replay, stored prefixes, batching.
"""

import functools
import importlib
import shutil
import sys
from itertools import product
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
    ("scale by reciprocal", "quant.py", "return grouped / self.decode_scale(scales)[..., None], scales", "return grouped * (1 / self.decode_scale(scales)[..., None]), scales"),
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
    ("pairs restart at a chunk", "compress.py", "([cache.carry[source]", "([0 * cache.carry[source]"),
    ("entry rotated at its last token", "csa2.py", "kv = main_kv(latent, positions,", "kv = main_kv(latent, positions + layer.ratio - 1,"),
    ("entry seen before its group closes", "csa2.py", "(b.positions + 1) // ratio", "(b.positions + 2) // ratio"),
    ("entry seen one token late", "csa2.py", "(b.positions + 1) // ratio", "b.positions // ratio"),
    # selection
    ("no relu", "indexer.py", "np.maximum(numerics.store(dots), np.float32(0))", "numerics.store(dots)"),
    ("relu after the weights", "indexer.py", "np.maximum(numerics.store(dots), np.float32(0)) * w[:, :, None]", "np.maximum(numerics.store(dots) * w[:, :, None], np.float32(0))"),
    ("ties from the right", "indexer.py", "np.cumsum(equal, axis=1) <= room", "np.cumsum(equal[:, ::-1], axis=1)[:, ::-1] <= room"),
    ("newest block not pinned", "indexer.py", "return np.where(is_newest, np.float32(np.inf), best)", "return best"),
    ("pool ignored", "plan.py", 'candidates = "publish" if index == pool else "consume"', 'candidates = "publish" if index == pool else None'),
    ("reuse reads its KV source's top-k", "csa2.py", "call.shared.selected[layer.index_source]", "call.shared.selected[layer.kv_source]"),
    ("index keys of the last source", "csa2.py", "cache.index[layer.kv_source]", "cache.index[max(cache.ratio)]"),
    ("index keys after rotation of the latent", "csa2.py", "keys = indexer.index_keys(latent, p", "from .rope import rotate\n    keys = indexer.index_keys(rotate(latent, positions, freqs), p"),
    # streams
    ("pre used at once by attention", "ced.py", "hc_collapse(streams, pre, numerics), norm", "hc_collapse(streams, hc_coefficients(streams, *mixing, config, numerics)[0], numerics), norm"),
    ("pre used at once by the MoE", "mhc.py", "x = hc_collapse(streams, pre, numerics)", "x = hc_collapse(streams, hc_coefficients(streams, fn, base, scale, config, numerics)[0], numerics)"),
    ("comb contracted over its second axis", "mhc.py", "comb.transpose(0, 2, 1) @", "comb @"),
    ("rows normalised last", "mhc.py", "    return b\n", "    return b / (b @ ones + eps)\n"),
    ("post without its factor 2", "mhc.py", "post = 2 * sigmoid", "post = sigmoid"),
    ("pre without eps", "mhc.py", "+ base[:s]) + np.float32(config.hc_eps)", "+ base[:s])"),
    ("one statistic per stream", "mhc.py", "mean_square(flat)", "mean_square(streams[:, 0])"),
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

SERVING = [
    # taking tokens back
    ("ring rows not restored", "rollback.py", "ring[slot, undone % width] = rows[undone - saved.length]", "pass"),
    ("ring rows of other tokens restored", "rollback.py", "rows[undone - saved.length]", "rows[: len(undone)]"),
    ("carry of the token after", "rollback.py", "seen[kept : kept + 1]", "seen[-1:]"),
    ("carry of the token before", "rollback.py", "seen[kept : kept + 1]", "seen[max(kept - 1, 0) :][:1]"),
    ("carry not restored", "rollback.py", "if length % cache.ratio[source]:", "if False:"),
    ("history not restored", "rollback.py", "if saved.classes:", "if False:"),
    ("history one token late", "rollback.py", "line[kept : kept + len(saved.history)]", "line[-len(saved.history) :]"),
    ("pages not given back", "rollback.py", "    cache.trim(slot)\n", ""),
    ("one page too many given back", "cache.py", "used = self._page_count(self.length[slot])", "used = self._page_count(self.length[slot]) - 1"),
    ("written not lowered", "rollback.py", "written[slot] = min(written[slot], length)", "pass"),
    ("length not lowered", "rollback.py", "    cache.length[slot] = length\n    cache.trim(slot)", "    cache.trim(slot)"),
    ("mark stays", "rollback.py", "    del cache.marks[slot]\n", ""),
    ("restored without its rings", "rollback.py", "        ring[slot] = rows\n", "        pass\n"),
    ("restored without its carry", "rollback.py", "        cache.carry[s][slot] = carry\n", "        pass\n"),
    ("restored without its history", "rollback.py", "= saved.length, saved.history", "= saved.length, cache.history[slot]"),
    ("restored without its floor", "rollback.py", "cache.floor[half][slot] = floor", "pass"),
    ("snapshot shares the rings", "rollback.py", "rings=[ring[slot].copy() for ring in cache.window]", "rings=[ring[slot] for ring in cache.window]"),
    # replay
    ("replay starts one token late", "replay.py", "max(0, hit - back)", "max(0, hit - back + 1)"),
    ("replay starts one token early", "replay.py", "max(0, hit - back)", "max(0, hit - back - 1)"),
    ("hit not cut to pairs", "replay.py", "return tokens // step * step", "return tokens"),
    ("exact replay of one window", "replay.py", "config.num_hidden_layers if exact else 1", "1"),
    ("replay without a floor", "replay.py", "cache.floor[half][slot] = first", "pass"),
    ("history is padding", "replay.py", "before = np.asarray(ids[max(0, start - size) : start], np.int64)", "before = np.zeros(0, np.int64)"),
    ("history of the tokens after", "replay.py", "ids[max(0, start - size) : start], np.int64", "ids[max(0, start - size) + 1 : start + 1], np.int64"),
    ("decoder tail one token short", "replay.py", "total - config.sliding_window, 0)", "total - config.sliding_window + 1, 0)"),
    ("decoder tail one token long", "replay.py", "total - config.sliding_window, 0)", "total - config.sliding_window - 1, 0)"),
    # the cache of a call
    ("half a window is kept", "cache.py", "batch.positions >= ends - width", "batch.positions >= ends - width // 2"),
    ("decoder without a floor", "cache.py", "= min(int(position), end)", "= 0"),
    ("decoder floor one token late", "cache.py", "= min(int(position), end)", "= min(int(position) + 1, end)"),
    ("replayed tokens write global KV", "cache.py", "return batch.positions >= written[batch.order]", "return batch.positions >= written[batch.order] * 0"),
    ("decoder KV of the tail alone", "ced.py", "write_decoder_kv(streams, pre, layers[decoder[0].index], decoder[0], call)\n", "write_decoder_kv(streams[in_decoder], pre[in_decoder], layers[decoder[0].index], decoder[0], call.only(in_decoder))\n"),
    ("all rows are decoded", "cache.py", "return batch.positions >= decoder_from[batch.order]", "return batch.positions >= 0"),
    ("first row of the tail not decoded", "cache.py", "return batch.positions >= decoder_from[batch.order]", "return batch.positions > decoder_from[batch.order]"),
    # stored prefixes
    ("windows of tokens taken back", "prefix.py", " and length == cache.length[slot]:", ":"),
    ("key without the blocks before", "prefix.py", "_hash(chain + ids", "_hash(start + ids"),
    ("key of a block that is not whole", "prefix.py", "len(ids) // block * block, block", "len(ids), block"),
    ("no token left to feed", "prefix.py", "ids[: len(ids) - 1]", "ids"),
    ("pool without a decoder floor", "prefix.py", '"decoder": hit}', '"decoder": 0}'),
    ("pooled rings are shared", "prefix.py", "cache.window[layer][slot].copy()", "cache.window[layer][slot]"),
    ("windows of the block before", "prefix.py", "rows = np.arange(length - block, length)", "rows = np.arange(length - block - 1, length - 1)"),
    ("a block is one token further", "prefix.py", "hit, keys = found * cache.page_tokens, keys[:found]", "hit, keys = found * cache.page_tokens - 2, keys[:found]"),
    # drafts
    ("block one position early", "draft.py", "(starts[:, None] + np.arange(size))", "(starts[:, None] - 1 + np.arange(size))"),
    ("keys slide within a block", "draft.py", "return np.repeat(np.concatenate([ring, block], axis=1), size, axis=0)", "return np.where(np.arange(width + size) < np.tile(np.arange(size), count)[:, None], -1, np.repeat(np.concatenate([ring, block], axis=1), size, axis=0))"),
    ("a block looks backwards alone", "draft.py", "return np.repeat(np.concatenate([ring, block], axis=1), size, axis=0)", "return np.where(np.arange(width + size) > width + np.tile(np.arange(size), count)[:, None], -1, np.repeat(np.concatenate([ring, block], axis=1), size, axis=0))"),
    ("no Markov term at slot 0", "draft.py", "matmul_rows(e, out, numerics)[0]", "matmul_rows(e, out, numerics)[0] * bool(tokens)"),
    ("Markov term of the anchor", "draft.py", "rows(embed, np.array([before]))", "rows(embed, np.array([anchor]))"),
    ("confidence of the drafted token", "draft.py", "np.concatenate([h[None], e], axis=1)", "np.concatenate([h[None], rows(embed, np.array([choose(z)]))], axis=1)"),
    ("anchor is noise", "draft.py", "ids[:, 0] = anchors", "pass"),
    ("features behind the block", "ced.py", "        call.features.append(call.numerics.store(np.mean(streams, axis=1)))", "        after, _, _ = sublayers(streams, pre, (attention, moe), p, layer, call)\n        call.features.append(call.numerics.store(np.mean(after, axis=1)))"),
    ("features of one stream", "ced.py", "np.mean(streams, axis=1)", "streams[:, 0]"),
    ("drafter reads before its first feature", "draft.py", "before >= firsts[:, None]", "before >= 0"),
    ("drafter's ring of all requests", "draft.py", "request * width + before % width", "before % width"),
    # choosing tokens
    ("a token of probability 0 is kept", "sampling.py", "generator.random() * q[token] < p[token]", "generator.random() * q[token] <= p[token]"),
    ("accepted by q / p", "sampling.py", "q[token] < p[token]", "p[token] < q[token]"),
    ("residual not subtracted", "sampling.py", "np.maximum(p - q, 0)", "p"),
    ("residual of the other sign", "sampling.py", "np.maximum(p - q, 0)", "np.maximum(q - p, 0)"),
    ("bonus from the row before", "sampling.py", "draw(target[len(tokens)], generator)", "draw(target[len(tokens) - 1], generator)"),
    ("a token of probability 0 is drawn", "sampling.py", 'side="right"', 'side="left"'),
    ("top-p keeps one more", "sampling.py", "covered[:-1] >= sampling.top_p", "covered[:-1] > sampling.top_p"),
    ("scheduler looks further", "schedule.py", "            break\n", "            continue\n"),
    ("scheduler forgets the others", "schedule.py", "float(len(survival) + others)", "float(len(survival))"),
    # engine
    ("stop inside a draft ignored", "engine.py", "if token in request.stop:", "if token in request.stop and token == new[-1]:"),
    ("drafts beyond max_tokens", "engine.py", "r.max_tokens - len(r.tokens) - 1 for", "r.max_tokens - len(r.tokens) for"),
    ("bonus dropped", "engine.py", "return [*proposal.tokens[:kept], token]", "return [*proposal.tokens[:kept]] or [token]"),
    ("all drafts kept", "engine.py", "- len(proposal.tokens) + kept", "- len(proposal.tokens) * 0"),
    ("refused tokens observed", "engine.py", "positions[: kept + 1], rows[: kept + 1]", "positions, rows"),
    ("the end of a chunk is decoded", "engine.py", "decoder_start(len(request.prompt), start", "decoder_start(self.cache.length[request.slot] + 8, start"),
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


def complaints(package, checks=None):
    """Yield what a short version of the suite finds wrong with an imported copy of dsv41."""
    for check in checks or (*MODEL_CHECKS, *SERVING_CHECKS):
        try:
            yield from check(package)
        except Exception as error:  # a crash is a complaint too
            yield f"{check.__name__}: {type(error).__name__}: {error}"


def module(package, name):
    return importlib.import_module(f"{package.__name__}.{name}")


@functools.lru_cache(maxsize=1)
def loaded(package):
    return package.load(GOLDEN)


def formats(package):
    """Ties, subnormals, nibbles and tiny scales, which the prompt may not exercise."""
    quant, formats = module(package, "quant"), module(package, "formats")
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
    verify = module(package, "verify")
    model = loaded(package)
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
    model = loaded(package)
    embedding, types = stored["fp32.embedding"], stored["token_types"]
    got = model.logits(stored["ids"], package.FLOAT32, token_types=types, embedding=embedding)
    if not np.abs(got - stored["fp32.logits"]).max() < 5e-5:
        yield "image prompt"


def barrier(package):
    """A single image position hides every older token from Engram."""
    engram = module(package, "engram")
    is_image = np.array([False, False, True, False])
    history = np.array([2, 2, 2])
    windows, _ = engram.look_back(np.array([5, 6, 7, 8]), is_image, history, 2)
    if windows[3].tolist() != [8, 2, 2, 2]:
        yield "barrier"


def chunks(package):
    """Two requests in uneven pieces give the bits of one call each."""
    model = loaded(package)
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
    indexer = module(package, "indexer")
    scores = np.array([[1, 5, 5, 5, 5, 0]], np.float32)
    if indexer.index_topk(scores, np.array([6]), 3).tolist() != [[1, 2, 3]]:
        yield "ties"


# ---- how the model is run ---------------------------------------------------------------------


WINDOW, PAGE = 8, 8  # the reference model's window; tokens of a stored block


def some_ids(count, seed=0):
    return np.random.default_rng(seed).integers(3, 280, count)


def invariant(package):
    return package.FLOAT32.but(batch_invariant=True)


def opened(package, page_tokens=64):
    """-> the model, an empty cache and the slot of a request in it."""
    model = loaded(package)
    cache = model.new_cache(invariant(package), page_tokens)
    return model, cache, model.open(cache)


def entries(cache, slot, tokens):
    """All main KV and index keys of the request's first `tokens` tokens."""
    for source, ratio in cache.ratio.items():
        rows = cache.rows(source, slot, np.arange(tokens // ratio))
        yield cache.main_kv[source][rows]
        yield cache.index[source][rows]


def same(ours, theirs):
    return all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))


class Script:
    """A generator of scripted numbers; what is beyond the script is 0."""

    def __init__(self, numbers):
        self.numbers, self.used = numbers, 0

    def random(self):
        self.used += 1
        return self.numbers[self.used - 1] if self.used <= len(self.numbers) else 0.0


def law(package):
    """Every outcome of two drafts over three tokens: each row of output has the target's law."""
    sampling = module(package, "sampling")
    target = np.array([[2, 3, 3], [1, 2, 5], [5, 2, 1]]) / 8
    drafted = np.array([[4, 2, 2], [4, 2, 2]]) / 8
    grid = (np.arange(8) + 0.5) / 8
    found = np.zeros((3, 3, 3))  # row, token there, token before
    for tokens in product(range(3), repeat=2):
        chance = drafted[0, tokens[0]] * drafted[1, tokens[1]]
        for numbers in product(grid, repeat=3):
            kept, token = sampling.verify(target, drafted, tokens, Script(numbers))
            text = [*tokens[:kept], token]
            for row, token in enumerate(text):
                found[row, token, text[row - 1] if row else 0] += chance / 8**3
    for row in range(3):
        share = found[row] / np.maximum(found[row].sum(axis=0), 1e-9)
        for before in range(3 if row else 1):
            if np.abs(share[:, before] - target[row]).max() > 1e-12:
                yield f"law of row {row} behind {before}"
    certain = np.eye(3)
    if sampling.verify(certain[[1, 2]], np.array([[0.5, 0.5, 0]]), [0], Script([]))[0]:
        yield "kept what cannot be"
    if sampling.draw(certain[1], Script([])) != 1:
        yield "drew what cannot be"
    halves = sampling.distribution(np.zeros(4), sampling.Sampling(1.0, 0.5))
    if halves.tolist() != [0.5, 0.5, 0, 0]:
        yield "top-p"


def scheduler(package):
    lengths = module(package, "schedule").draft_lengths
    speed = {1: 1.0, 2: 0.6, 3: 0.9, 4: 0.9}
    if lengths([np.array([0.5, 0.45])], lambda n: speed[n]).tolist() != [0]:
        yield "the scheduler went past a loss"
    if lengths([np.array([0.9])], lambda n: 1 / max(n, 2)).tolist() != [1]:
        yield "a draft that costs nothing"
    if lengths([np.array([0.9])], lambda n: 1 / max(n, 2), others=1).tolist() != [0]:
        yield "others in the step"


def state(cache, slot):
    """All that a request's next token may depend on."""
    length = cache.length[slot]
    yield [length, len(cache.pages[slot]), *(w[slot] for w in cache.written.values())]
    yield [slot in cache.marks, *(floor[slot] for floor in cache.floor.values())]
    yield cache.history[slot].copy()
    for ring in cache.window:
        yield ring[slot].copy()
    for source, carry in cache.carry.items():
        yield carry[slot].copy() if length % cache.ratio[source] else []


def taking_back(package):
    """Five tokens run and taken back leave the state of never having run them."""
    rollback, ids = module(package, "rollback"), some_ids(20)
    model, plain, one = opened(package, page_tokens=2)
    model.step(plain, [one], [ids[:13]])
    states = {}
    for end in range(14, 20):
        model.step(plain, [one], [ids[end - 1 : end]])
        states[end] = list(state(plain, one))
    model, cache, slot = opened(package, page_tokens=2)
    model.step(cache, [slot], [ids[:14]])
    for kept in (0, 1, 2, 3, 5):
        before = cache.length[slot]
        rollback.mark(cache, slot, 5)
        model.step(cache, [slot], [ids[before : before + 5]])
        rollback.rollback(cache, slot, min(14 + kept, before + 5))
        if not same(states[14 + kept], state(cache, slot)):
            yield f"state after going back to {14 + kept}"
            return
        rollback.mark(cache, slot, 5)
        rollback.rollback(cache, slot, cache.length[slot])
    saved = rollback.snapshot(cache, slot)
    cache.floor["decoder"][slot] = 3
    floored = rollback.snapshot(cache, slot)
    cache.release(slot)
    model.step(cache, [model.open(cache)], [some_ids(30, 1)])
    back = rollback.restore(cache, saved)
    if not same(states[19], state(cache, back)):
        yield "state after coming back"
    if not same(entries(plain, one, 19), entries(cache, back, 19)):
        yield "global KV after coming back"
    if cache.floor["decoder"][rollback.restore(cache, floored)] != 3:
        yield "floor after coming back"


def replays(package):
    """Where a hit begins again, and that it reads no window before that."""
    replay, ids = module(package, "replay"), some_ids(24)
    model, cache, slot = opened(package)
    config = model.config
    if [replay.hit_length(n, config) for n in (3, 4, 8, 9)] != [2, 4, 8, 8]:
        yield "hits"
    starts = [replay.replay_start(n, config) for n in (2, 8, 10, 20)]
    if starts != [0, 0, 2, 12] or replay.replay_start(100, config, True) != 100 - 9 * WINDOW:
        yield "starts"
    if [replay.decoder_start(*n, config) for n in ((5, 0), (9, 0), (20, 14))] != [0, 1, 14]:
        yield "decoder starts"
    model.step(cache, [slot], [ids[:21]])
    before = [a.copy() for a in entries(cache, slot, 20)]
    start = replay.begin_replay(model, cache, slot, ids, 20)
    if cache.history[slot].tolist() != model.classes[ids[start - 3 : start]].tolist():
        yield "history"
    for ring in cache.window:
        ring[slot] = np.nan
    logits = model.step(cache, [slot], [ids[start:]])
    if not np.isfinite(logits).all():
        yield "replay read an older window"
    if not same(before, entries(cache, slot, 20)):
        yield "replay changed stored records"


def bounded_prefill(package):
    """The work of a bounded prefill, its global KV, and what its decoder may read."""
    ids = some_ids(29)
    model, cache, slot = opened(package)
    model.step(cache, [slot], [ids])
    want = list(entries(cache, slot, 29))
    model, cache, slot = opened(package)
    for begin, end in ((0, 10), (10, 25), (25, 29)):
        for layer in range(5, 9):  # what the decoder half has not written yet
            cache.window[layer][slot, np.arange(max(begin, 21), 29) % WINDOW] = np.nan
        logits = model.step(cache, [slot], [ids[begin:end]], decoder_from=[21], tails=[1])
    if not np.isfinite(logits).all():
        yield "the decoder read what was never written"
    if cache.work != {"encoder": 5 * 29, "decoder": 4 * WINDOW} or cache.floor["decoder"] != [21]:
        yield "work"
    if not same(want, entries(cache, slot, 29)):
        yield "global KV"


class Memory(dict):
    """A store in a dictionary."""

    def longest(self, keys):
        return next((n for n, key in enumerate(keys) if key not in self), len(keys))

    def put(self, key, payload):
        self[key] = bytes(payload)

    def put_many(self, items):
        self.update((key, bytes(payload)) for key, payload in items)


def prefixes(package):
    """Resumed requests of the exact strategies go on with the very bits of a plain one."""
    prefix, ids = module(package, "prefix"), some_ids(27).tolist()
    numerics = invariant(package)
    keys = prefix.block_keys([*range(16), 1], 8), prefix.block_keys([9, *range(1, 16)], 8)
    if len(keys[0]) != 2 or set(keys[0]) & set(keys[1]):
        yield "keys"
    want = loaded(package).logits(ids, numerics)
    for strategy in ("full", "zero"):
        model, cache, slot = opened(package, PAGE)
        stored = prefix.PrefixCache(model, Memory(), strategy)
        for begin, end in ((0, 8), (8, 16), (16, 27)):  # the last step was a draft of 24 ..
            model.step(cache, [slot], [ids[begin:end]])
            stored.save(cache, slot, ids[: min(end, 24)])
        for length in (27, 24, 17):
            again = model.open(cache)
            resumed = stored.resume(cache, again, ids[:length])
            if resumed.hit != (length - 1) // PAGE * PAGE:
                yield f"hit of {length}"
            logits = model.step(cache, [again], [ids[resumed.start : length]])
            if not np.array_equal(logits[-1], want[length - 1]):
                yield f"{strategy}: a hit of {resumed.hit} changed what follows"


def pooled(package):
    """Pooled encoder windows, with nothing of the decoder's."""
    ids = some_ids(17).tolist()
    model, cache, slot = opened(package, PAGE)
    pool = module(package, "window_pool").WindowPool(60, 1 << 20)
    stored = module(package, "prefix").PrefixCache(model, Memory(), pool=pool)
    model.step(cache, [slot], [ids[:16]])
    stored.save(cache, slot, ids[:16])
    rings = [ring[slot].copy() for ring in cache.window]
    for ring in cache.window:
        ring[slot] = np.nan
    resumed = stored.resume(cache, slot, ids)
    if (resumed.hit, resumed.start, resumed.windows) != (16, 16, "pool"):
        yield "pool"
    if not same([ring[slot] for ring in cache.window][:5], rings[:5]):
        yield "pooled rings"
    if not np.isfinite(model.step(cache, [slot], [ids[16:]])).all():
        yield "decoder windows that nobody wrote"


def drafts(package):
    """The reference's first draft, alone and beside another request; drafting from few features."""
    stored, ids = arrays("dspark"), arrays("prompt_fp32")["ids"][0]
    drafter_of = module(package, "draft").Drafter
    model, cache, slot = opened(package)
    drafter, features = drafter_of(model, cache), []
    model.step(cache, [slot], [ids[: PROMPT + 1]], features=features)
    features = np.concatenate(features, axis=1)
    if not np.abs(features[-1] - stored["fp32.step.features"][0]).max() < 5e-5:
        yield "features"
    other = model.open(cache)
    model.step(cache, [other], [ids[:3]])
    drafter.observe(other, np.arange(3), features[:3])
    drafter.observe(slot, np.arange(PROMPT + 1), features)
    anchor = stored["fp32.step.anchor"][0]
    _, proposal = drafter.propose([other, slot], [5, anchor], lambda i, z: int(np.argmax(z)))
    for name, ours in (("logits", proposal.logits), ("confidence", proposal.confidence)):
        if not np.abs(ours - stored[f"fp32.step.{name}"][0]).max() < 5e-5:
            yield f"draft {name}"
    if [anchor, *proposal.tokens] != stored["fp32.step.drafts"][0].tolist():
        yield "drafts"
    drafter.forget(slot)
    drafter.observe(slot, np.arange(PROMPT - 2, PROMPT + 1), features[-3:])
    for ring in drafter.rings:
        ring[slot][np.arange(PROMPT + 1, PROMPT + 6) % WINDOW] = np.nan
    if not np.isfinite(drafter.hidden([slot], [anchor])).all():
        yield "a draft read features that nobody observed"


def engine(package):
    """Drafted, chunked and preempted text is the plain text; a draft ends where it has to."""
    prompts = [some_ids(21).tolist(), some_ids(9, 1).tolist()]

    def start(max_tokens=7, stop=(), guess=None, **options):
        made = module(package, "engine").Engine(loaded(package), invariant(package), **options)
        requests = [made.submit(p, max_tokens, stop=stop) for p in prompts]
        if guess:
            made.drafter.propose = functools.partial(guess, requests)
        return made, requests

    made, plain = start()
    for _ in made.run():
        pass
    texts = [r.tokens for r in plain]
    if made.cache.work != {"encoder": 5 * (21 + 9 + 2 * 6), "decoder": 4 * (2 * WINDOW + 2 * 6)}:
        yield "work of plain text"
    draft = module(package, "draft").Draft

    def guess(wrong, requests, slots, anchors, choose):
        """The plain text, wrong in one place."""
        proposals = []
        for i, slot in enumerate(slots):
            at = next(n for n, r in enumerate(requests) if r.slot == slot)
            tokens = (texts[at] + [0] * 4)[len(requests[at].tokens) :][:4]
            tokens[wrong:] = [7] * len(tokens[wrong:])
            logits = np.eye(288)[tokens]
            drawn = np.array([choose(i, z) for z in logits])
            proposals.append(draft(drawn, logits, np.zeros(4, np.float32)))
        return proposals

    for wrong in (4, 2, 0):
        made, requests = start(guess=functools.partial(guess, wrong), draft=True, chunk=5 + wrong)
        seen, observe = {0: [], 1: []}, made.drafter.observe

        def noting(slot, positions, features, seen=seen, observe=observe):
            seen[slot].extend(positions.tolist())
            observe(slot, positions, features)

        made.drafter.observe = noting
        for written, _ in enumerate(made.run()):
            if wrong == 2 and written == 2:
                made.preempt(requests[0] if requests[0] in made.running else requests[1])
        if [r.tokens for r in requests] != texts:
            yield f"text with drafts right up to {wrong}"
        if wrong != 2 and any((np.diff(positions) != 1).any() for positions in seen.values()):
            yield "observed positions"
    made, requests = start(4, guess=functools.partial(guess, 4), draft=True)
    for _ in made.run():
        pass
    if made.cache.work["encoder"] != 5 * (21 + 9 + 2 * 3):
        yield "drafts that cannot be kept were run"
    made, requests = start(stop=[texts[0][2]], guess=functools.partial(guess, 4), draft=True)
    for _ in made.run():
        pass
    first = texts[0].index(texts[0][2]) + 1
    if requests[0].tokens != texts[0][:first] or requests[0].finish != "stop":
        yield "a stop token inside a draft"


MODEL_CHECKS = (formats, prompt, images, barrier, chunks, tie_rule)
SERVING_CHECKS = (
    *(law, scheduler, replays, taking_back, bounded_prefill, pooled, prefixes, drafts, engine),
)
