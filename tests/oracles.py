"""A second, slow model: float64, one token at a time, every key list written out.

Nothing here shares text with the package. Each mechanism is spelled from its definition with loops
over tokens, heads and channels, and the whole prompt is held in Python lists, so there is no cache,
no page, no batch and no chunk to get wrong. `forward` runs one request from its beginning through
every layer; the small functions above it are also the references of single mechanisms.

Choices (top-k, pool, experts) are made in float64. `margin` is the smallest distance in score of
any choice to a different one: a float32 model is held to the same choices where it is not tiny.
"""

import itertools
import math
from types import SimpleNamespace

import numpy as np

from dsv41.config import RopeScaling
from dsv41.presets import preset

# ---- the model that the tests use where the golden one would hide a shape ---------------------


def small_config(**changes):
    """Eleven layers unlike the golden nine: odd sizes, ratio-1 sources in both halves, a Reindex
    layer without a pool, a window-only layer between compressed ones, Engram in the decoder half.
    """
    base = dict(
        vocab_size=61,
        hidden_size=32,
        moe_intermediate_size=32,
        num_hidden_layers=11,
        num_attention_heads=2,
        head_dim=32,
        qk_rope_head_dim=8,
        q_lora_rank=32,
        o_lora_rank=16,
        o_groups=2,
        rope_scaling=RopeScaling(64, factor=4, beta_fast=4, beta_slow=1),
        n_routed_experts=5,
        num_experts_per_tok=2,
        sliding_window=5,
        compress_ratios=(0, 1, 1, 2, 2, 0, 2, 1, 1, 1, 1),
        kv_source_layer_ids=(1, 3, 7),
        index_source_layer_ids=(1, 3, 4, 7, 9),
        index_n_heads=3,
        index_head_dim=32,
        index_topk=3,
        candidate_source_layer_id=7,
        candidate_topk_blocks=3,
        candidate_block_size=2,
        hc_mult=3,
        hc_sinkhorn_iters=7,
        engram_layer_ids=(3, 9),
        engram_max_ngram_size=3,
        engram_n_heads=3,
        engram_vocab_size=11,
        engram_num_embeddings=(112, 252),
        engram_compressed_vocab_size=40,
        num_nextn_predict_layers=0,
        dspark_target_layer_ids=(),
        image_token_id=60,
    )
    return preset("tiny").but(**{**base, **changes})


def small_classes(config):
    """Token classes with many shared ones, as the released folding has."""
    return np.arange(config.vocab_size) * 7 % config.engram_compressed_vocab_size


# ---- vectors ----------------------------------------------------------------------------------


def norm(x, weight, eps):
    """RMSNorm of one vector."""
    x = np.asarray(x, np.float64)
    return x / math.sqrt(sum(v * v for v in x) / len(x) + eps) * weight


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def frequencies(config, ratio):
    """Radians per token of every channel pair."""
    dim = config.qk_rope_head_dim
    base = config.compress_rope_theta if ratio else config.rope_theta
    freqs = [base ** (-2 * i / dim) for i in range(dim // 2)]
    if ratio == 0:
        return freqs
    scaling = config.rope_scaling

    def turning(turns):
        original = scaling.original_max_position_embeddings
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(turning(scaling.beta_fast)), 0)
    high = min(math.ceil(turning(scaling.beta_slow)), dim - 1)
    slowed = []
    for i, f in enumerate(freqs):
        ramp = min(max((i - low) / (high - low), 0), 1)
        slowed.append(f * (1 - ramp) + f / scaling.factor * ramp)
    return slowed


def rotated(x, position, freqs, sign=1):
    """The last 2 * len(freqs) channels of a vector, as complex neighbours, turned by position."""
    out = np.array(x, np.float64)
    first = len(out) - 2 * len(freqs)
    for i, f in enumerate(freqs):
        at = first + 2 * i
        z = complex(out[at], out[at + 1]) * np.exp(1j * sign * position * f)
        out[at], out[at + 1] = z.real, z.imag
    return out


# ---- compressor, indexer, attention -----------------------------------------------------------


def pooled(u, g):
    """u, g: the m candidate and gate vectors of a group -> one vector, a softmax per channel."""
    out = []
    for c in range(len(u[0])):
        top = max(gate[c] for gate in g)
        weights = [math.exp(gate[c] - top) for gate in g]
        out.append(sum(w * v[c] for w, v in zip(weights, u, strict=True)) / sum(weights))
    return np.array(out)


def latents(xs, p, ratio, eps):
    """xs: the input vectors of all tokens -> one latent per whole group."""
    u = [p["wkv"]["weight"] @ x for x in xs]
    found = []
    for j in range(len(xs) // ratio):
        group = members(j, ratio)
        if ratio == 1:
            value = u[j]
        else:
            gates = [p["wgate"]["weight"] @ xs[t] for t in group]
            value = pooled([u[t] for t in group], gates)
        found.append(norm(value, p["norm"]["weight"], eps))
    return found


def members(entry, ratio):
    """Tokens that make up an entry."""
    return range(entry * ratio, (entry + 1) * ratio)


def seen_entries(position, ratio, count):
    """Entries whose every token lies at or before `position`."""
    return [
        j for j in range(count) if all(t <= position for t in range(j * ratio, (j + 1) * ratio))
    ]


def entry_score(q, w, key):
    """q (heads, channels), w (heads,), one key -> score: relu per head, weighted afterwards."""
    return sum(w[a] * max(float(np.dot(q[a], key)), 0.0) for a in range(len(w)))


def best(scores, k):
    """scores: {number: score} -> the k best numbers, ascending; equal scores: lower number."""
    eligible = [j for j in scores if scores[j] > -math.inf]
    return sorted(sorted(eligible, key=lambda j: (-scores[j], j))[:k])


def pool_blocks(scores, seen, block_size, budget):
    """scores: {entry: score} of the entries `seen` -> kept block numbers, ascending."""
    block = {}
    for j in seen:
        block[j // block_size] = max(block.get(j // block_size, -math.inf), scores[j])
    if seen:
        block[max(seen) // block_size] = math.inf
    return best(block, budget)


def attend(q, keys, sink):
    """q (heads, channels), keys: list of vectors that are also the values, sink (heads,)."""
    out = np.zeros_like(q)
    for h in range(len(q)):
        logits = [float(np.dot(q[h], key)) / math.sqrt(len(key)) for key in keys]
        top = max([*logits, sink[h]])
        weights = [math.exp(s - top) for s in logits]
        total = sum(weights) + math.exp(sink[h] - top)
        for weight, key in zip(weights, keys, strict=True):
            out[h] += weight / total * key
    return out


# ---- residual streams, experts ----------------------------------------------------------------


def doubly_stochastic(logits, iterations, eps):
    """Sinkhorn: rows by softmax, then columns, then (iterations - 1) times rows and columns."""
    n = len(logits)
    b = np.zeros((n, n))
    for j in range(n):
        weights = [math.exp(v - max(logits[j])) for v in logits[j]]
        for k in range(n):
            b[j, k] = weights[k] / sum(weights) + eps
    for step in range(iterations):
        if step:
            for j in range(n):
                b[j] = b[j] / (sum(b[j]) + eps)
        for k in range(n):
            b[:, k] = b[:, k] / (sum(b[:, k]) + eps)
    return b


def mixing(streams, p, name, config):
    """streams (S, D) of one token -> pre (S,), post (S,), comb (S, S)."""
    s, scale, base = config.hc_mult, p[f"hc_{name}_scale"], p[f"hc_{name}_base"]
    flat = np.concatenate(list(streams))
    u = p[f"hc_{name}_fn"] @ flat / math.sqrt(np.mean(flat**2) + config.rms_norm_eps)
    pre = np.array([sigmoid(scale[0] * u[i] + base[i]) + config.hc_eps for i in range(s)])
    post = np.array([2 * sigmoid(scale[1] * u[s + i] + base[s + i]) for i in range(s)])
    mix = np.zeros((s, s))
    for j in range(s):
        for k in range(s):
            at = 2 * s + s * j + k
            mix[j, k] = scale[2] * u[at] + base[at]
    return pre, post, doubly_stochastic(mix, config.hc_sinkhorn_iters, config.hc_eps)


def updated(streams, y, post, comb):
    """New streams: k receives post[k] of y and comb[j, k] of every old stream j."""
    out = []
    for k in range(len(streams)):
        out.append(post[k] * y + sum(comb[j, k] * streams[j] for j in range(len(streams))))
    return np.array(out)


def expert(x, p, limit, weight=1.0):
    gate, up = p["w1"]["weight"] @ x, p["w3"]["weight"] @ x
    if limit:
        gate = np.array([min(v, limit) for v in gate])
        up = np.array([min(max(v, -limit), limit) for v in up])
    hidden = np.array([v * sigmoid(v) for v in gate]) * up * weight
    return p["w2"]["weight"] @ hidden


def experts(x, p, is_image, config, margins):
    """One token's MoE: -> output and the chosen experts, best biased score first."""
    logits = p["gate"]["weight"] @ x
    score = [math.sqrt(math.log1p(math.exp(v))) for v in logits]
    bias = p["gate"]["bias_vl"] if is_image and "bias_vl" in p["gate"] else p["gate"]["bias"]
    biased = [s + b for s, b in zip(score, bias, strict=True)]
    k = config.num_experts_per_tok
    order = sorted(range(len(biased)), key=lambda e: (-biased[e], e))
    ranked = [biased[e] for e in order[: k + 1]]
    margins += [a - b for a, b in itertools.pairwise(ranked)]
    chosen = order[:k]
    total = sum(score[e] for e in chosen) + 1e-20
    if k == 1 or not config.norm_topk_prob:
        total = 1.0
    y = np.zeros_like(x)
    for e in chosen:
        weight = score[e] / total * config.routed_scaling_factor
        y = y + expert(x, p["experts"][e], config.swiglu_limit, weight)
    if config.n_shared_experts:
        y = y + expert(x, p["shared_experts"], config.swiglu_limit)
    return y, chosen


# ---- Engram -----------------------------------------------------------------------------------


def e4m3(code):
    """The number of one E4M3 byte."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = code >> 3 & 15, code & 7
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)


def primes_from(config):
    """Every module's primes, column by column."""
    taken, modules = set(), []
    for _ in config.engram_layer_ids:
        columns = []
        for _ in range(2, config.engram_max_ngram_size + 1):
            n = config.engram_vocab_size - 1
            for _ in range(config.engram_n_heads):
                n += 1
                while n in taken or n < 2 or any(n % d == 0 for d in range(2, math.isqrt(n) + 1)):
                    n += 1
                taken.add(n)
                columns.append(n)
        modules.append(columns)
    return modules


def draw_multipliers(config, layer):
    bound = (2**63 - 1) // config.engram_compressed_vocab_size // 2
    draw = np.random.default_rng(10007 * layer)
    r = draw.integers(0, bound, size=config.engram_max_ngram_size, dtype=np.int64)
    return [2 * int(v) + 1 for v in r]


def ngram(classes, ids, types, t, size, pad):
    """Classes of token t and the size - 1 before it, newest first; nothing behind a barrier."""
    window, stopped = [], False
    for back in range(size):
        stopped = stopped or t - back < 0 or types[t - back] >= 0
        window.append(pad if stopped else int(classes[ids[t - back]]))
    return window


def hashed(window, multipliers, primes, heads):
    """One n-gram window -> its table rows, in Python's unbounded integers."""
    rows, offset, mix = [], 0, window[0] * multipliers[0]
    for order in range(1, len(window)):
        mix ^= window[order] * multipliers[order]
        for head in range(heads):
            prime = primes[(order - 1) * heads + head]
            rows.append(mix % prime + offset)
            offset += prime
    return rows


def table_row(table, row):
    """Decode one row: a scale per 32 channels."""
    codes, scales = table["weight"][row], table["scale"][row]
    return [e4m3(int(c)) * 2.0 ** (int(scales[i // 32]) - 127) for i, c in enumerate(codes)]


def injected(streams, rows, p, is_image, config):
    """streams (S, D) of one token -> streams after Engram, and the gates (S,)."""
    if is_image:
        return streams, np.zeros(len(streams))
    memory = np.array([v for row in rows for v in table_row(p["embed"], row)])
    kv = p["wkv"]["weight"] @ memory
    width = config.hidden_size
    value = kv[len(streams) * width :]
    out, gates = [], []
    for s, x in enumerate(streams):
        query = norm(x, p["q_weight"][s], config.rms_norm_eps)
        key = norm(kv[s * width : (s + 1) * width], p["k_weight"][s], config.rms_norm_eps)
        gates.append(gate_of(float(np.dot(query, key)) / math.sqrt(width)))
        out.append(x + gates[-1] * value)
    return np.array(out), np.array(gates)


def gate_of(dot):
    """Signed square root, floored, through a sigmoid; exactly one half at zero."""
    sign = math.copysign(1, dot) if dot else 0
    return sigmoid(sign * math.sqrt(max(abs(dot), 1e-6)))


# ---- the whole model --------------------------------------------------------------------------


def forward(params, config, classes, ids, types=None, embedding=None):
    """One request from its beginning.

    params: nested like the checkpoint's names; ids: list of ints; types: -1 text, >= 0 image;
    embedding: vectors in place of the token embeddings. Returns logits (T, V) and, by layer,
    selected and pool (lists of lists), experts, engram_rows, gates, x_out; and the margin.
    """
    p = as_float64(params)
    ids = [int(i) for i in ids]
    types = [-1] * len(ids) if types is None else [int(t) for t in types]
    embed = p["embed"]["weight"] if embedding is None else np.asarray(embedding, np.float64)
    start = [embed[i] for i in ids] if embedding is None else list(embed)
    streams = [np.array([e] * config.hc_mult) for e in start]
    pre = [np.eye(config.hc_mult)[0] for _ in ids]
    run = SimpleNamespace(
        config=config, types=types, keys={}, entries={}, selected={}, pool={}, experts={}
    )
    run.engram_rows, run.gates, run.x_out, run.margins = {}, {}, {}, []
    for layer in range(config.num_hidden_layers):
        here = p["layers"][layer]
        if layer in config.engram_layer_ids:
            streams = _engram_layer(streams, here["engram"], layer, run, classes, ids)
        for name in ("attn", "ffn"):
            mix = [mixing(x, here, name, config) for x in streams]
            xs = [_collapsed(x, a) for x, a in zip(streams, pre, strict=True)]
            xs = [norm(x, here[f"{name}_norm"]["weight"], config.rms_norm_eps) for x in xs]
            if name == "attn":
                ys = _attention_layer(xs, here["attn"], layer, run)
            else:
                ys = _expert_layer(xs, here["ffn"], layer, run)
            streams = [
                updated(x, y, post, comb)
                for x, y, (_, post, comb) in zip(streams, ys, mix, strict=True)
            ]
            pre = [a for a, _, _ in mix]
        run.x_out[layer] = np.array(streams)
    final = [_collapsed(x, a) for x, a in zip(streams, pre, strict=True)]
    final = [norm(x, p["norm"]["weight"], config.rms_norm_eps) for x in final]
    run.logits = np.array([p["head"]["weight"] @ x for x in final])
    run.margin = min(run.margins)
    return run


def _collapsed(streams, pre):
    return sum(a * x for a, x in zip(pre, streams, strict=True))


def _engram_layer(streams, p, layer, run, classes, ids):
    c = run.config
    primes = primes_from(c)[c.engram_layer_ids.index(layer)]
    multipliers = draw_multipliers(c, layer)
    pad = int(classes[c.engram_pad_token_id])
    out, run.engram_rows[layer], run.gates[layer] = [], [], []
    for t, x in enumerate(streams):
        window = ngram(classes, ids, run.types, t, c.engram_max_ngram_size, pad)
        rows = hashed(window, multipliers, primes, c.engram_n_heads)
        after, gate = injected(x, rows, p, run.types[t] >= 0, c)
        out.append(after)
        run.engram_rows[layer].append(rows)
        run.gates[layer].append(gate)
    return out


def _attention_layer(xs, p, layer, run):
    c = run.config
    ratio, eps = c.compress_ratios[layer], c.rms_norm_eps
    freqs = frequencies(c, ratio)
    query_latents = [norm(p["wq_a"]["weight"] @ x, p["q_norm"]["weight"], eps) for x in xs]
    near = []
    for t, x in enumerate(xs):
        near.append(rotated(norm(p["wkv"]["weight"] @ x, p["kv_norm"]["weight"], eps), t, freqs))
    if ratio and layer in c.kv_source_layer_ids:
        _new_entries(xs, p, layer, run, freqs)
    if ratio and layer in c.index_source_layer_ids:
        _select(xs, query_latents, p["indexer"], layer, run, freqs)
    out = []
    for t in range(len(xs)):
        keys = near[max(0, t - c.sliding_window + 1) : t + 1]
        if ratio:
            far = run.entries[_nearest(c.kv_source_layer_ids, layer)]
            chosen = run.selected[_nearest(c.index_source_layer_ids, layer)][t]
            keys = keys + [far[j] for j in chosen]
        q = (p["wq_b"]["weight"] @ query_latents[t]).reshape(c.num_attention_heads, c.head_dim)
        q = np.array([rotated(head, t, freqs) for head in q])
        o = attend(q, keys, p["attn_sink"])
        o = np.array([rotated(head, t, freqs, sign=-1) for head in o])
        out.append(_grouped_output(o, p, c))
    return out


def _nearest(sources, layer):
    return max(s for s in sources if s <= layer)


def _new_entries(xs, p, layer, run, freqs):
    c, ratio = run.config, run.config.compress_ratios[layer]
    found = latents(xs, p["compressor"], ratio, c.rms_norm_eps)
    run.entries[layer] = [rotated(v, j * ratio, freqs) for j, v in enumerate(found)]
    run.keys[layer] = []
    for j, latent in enumerate(found):
        index = p["indexer"]
        key = norm(index["wk"]["weight"] @ latent, index["k_norm"]["weight"], c.rms_norm_eps)
        run.keys[layer].append(rotated(key, j * ratio, freqs))


def _select(xs, query_latents, p, layer, run, freqs):
    c, ratio = run.config, run.config.compress_ratios[layer]
    keys = run.keys[_nearest(c.kv_source_layer_ids, layer)]
    publisher = c.candidate_source_layer_id
    consumes = publisher is not None and layer > publisher
    run.selected[layer] = []
    if layer == publisher:
        run.pool[layer] = []
    for t, x in enumerate(xs):
        q = (p["wq_b"]["weight"] @ query_latents[t]).reshape(c.index_n_heads, c.index_head_dim)
        q = np.array([rotated(head, t, freqs) for head in q])
        w = p["weights_proj"]["weight"] @ x / math.sqrt(c.index_head_dim * c.index_n_heads)
        seen = seen_entries(t, ratio, len(keys))
        if consumes:
            allowed = run.pool[publisher][t]
            seen = [j for j in seen if j // c.candidate_block_size in allowed]
        scores = {j: entry_score(q, w, keys[j]) for j in seen}
        run.selected[layer].append(best(scores, c.index_topk))
        run.margins.append(_gap(list(scores.values()), c.index_topk))
        if layer == publisher:
            blocks = pool_blocks(scores, seen, c.candidate_block_size, c.candidate_topk_blocks)
            run.pool[layer].append(blocks)
            run.margins.append(_pool_gap(scores, blocks, c.candidate_block_size))


def _gap(scores, k):
    """Distance between the last score taken and the first one left, inf when none is left.

    Scores equal to the last bit (0, where no head responds) are a tie that the rule decides.
    """
    ordered = sorted(scores, reverse=True)
    gap = ordered[k - 1] - ordered[k] if len(ordered) > k else math.inf
    return gap or math.inf


def _pool_gap(scores, blocks, size):
    """The same for the pool: worst block taken for its score against the best one left."""
    top = {}
    for j, score in scores.items():
        top[j // size] = max(top.get(j // size, -math.inf), score)
    taken = [top[b] for b in blocks if b != max(top)]
    left = [top[b] for b in top if b not in blocks]
    gap = min(taken) - max(left) if taken and left else math.inf
    return gap or math.inf


def _grouped_output(o, p, c):
    per_group = c.num_attention_heads // c.o_groups
    wo_a = p["wo_a"]["weight"].reshape(c.o_groups, c.o_lora_rank, per_group * c.head_dim)
    z = []
    for g in range(c.o_groups):
        z.append(wo_a[g] @ o[g * per_group : (g + 1) * per_group].reshape(-1))
    return p["wo_b"]["weight"] @ np.concatenate(z)


def _expert_layer(xs, p, layer, run):
    run.experts[layer], ys = [], []
    for x, kind in zip(xs, run.types, strict=True):
        y, chosen = experts(x, p, kind >= 0, run.config, run.margins)
        ys.append(y)
        run.experts[layer].append(chosen)
    return ys


def as_float64(params):
    """Nested dicts with every weight as float64; Engram tables stay bytes."""
    out = {}
    for key, value in params.items():
        if key == "embed" and "scale" in value:
            out[key] = value
        elif isinstance(value, dict):
            out[key] = as_float64(value)
        else:
            out[key] = np.asarray(value.dense() if hasattr(value, "dense") else value, np.float64)
    return out
