"""What is each part of a trained model worth?

One part at a time is taken away or made exact, and the model is asked the same questions again:

    caches in float32        bits per byte of held-out text, as shipped and with wider records
    no Engram, no pool       the same, without the memory's sum; with every entry a candidate
    other entries            the same size of selection, drawn by chance; and none at all
    recall                   a value named once, asked for again so many tokens later
    replay                   KL(exact || bounded replay) of the next tokens, beside KL(exact || only
                             the last window of the text), and how often the best token is the same
    drafts                   tokens kept per verification and tokens/s, greedy and drawn
    experts                  the smallest and largest share of a routed expert, 1 = even

Bits per byte are -sum log2 p over the tokens of a text by its bytes; documents are cut at `length`
tokens, a later piece starting with the last token of the one before. Nothing is trained here, so a
part that others have learned to rely on looks dearer than it would be in a model trained without.
`python -m dsv41 worth DIR` prints a table of it (worth_table.py). Source: none.
"""

import time

import numpy as np

from .engine import Engine
from .model import Model
from .quant import FLOAT, FLOAT32, OFFICIAL
from .replay import begin_replay
from .sampling import Sampling

CACHES = {
    "window KV in float32": OFFICIAL.but(window_kv=FLOAT),
    "main KV in float32": OFFICIAL.but(main_kv=FLOAT),
    "index keys in float32": OFFICIAL.but(index=FLOAT),
    "all caches in float32": OFFICIAL.but(window_kv=FLOAT, main_kv=FLOAT, index=FLOAT),
    "nothing rounded": FLOAT32,
}


# ---- the model without a part -------------------------------------------------------------------


def without_engram(model):
    """The model with the Engram modules' projections at zero: they add nothing to the streams."""
    layers = dict(model.params["layers"])
    for index in model.config.engram_layer_ids:
        engram = dict(layers[index]["engram"])
        shape = engram["wkv"]["weight"].shape
        engram["wkv"] = {"weight": np.zeros(shape, np.float32)}
        layers[index] = layers[index] | {"engram": engram}
    return Model(model.config, model.params | {"layers": layers}, model.classes, model.directory)


def without_pool(model):
    """The model whose later index sources score every entry, not those of the candidate pool."""
    config = model.config.but(candidate_source_layer_id=None)
    return Model(config, model.params, model.classes, model.directory)


def chance(generator):
    """-> ops that select as many entries as the real ones do, whichever."""

    def choose_anywhere(q, w, entries, k, pool, numerics, watch=None):
        chosen = _any_entries(generator, entries.reach, k)
        return chosen, None if pool is None else _any_blocks(entries.reach, *pool)

    def choose_in_pool(q, w, entries, blocks, block_size, k, numerics, watch=None):
        return _any_entries(generator, entries.reach, k)

    return {"choose_anywhere": choose_anywhere, "choose_in_pool": choose_in_pool}


def nothing():
    """-> ops that select no entry: the model sees its windows only."""

    def choose_anywhere(q, w, entries, k, pool, numerics, watch=None):
        none = np.full((len(q), k), -1)
        return none, None if pool is None else np.full((len(q), pool[1]), -1)

    def choose_in_pool(q, w, entries, blocks, block_size, k, numerics, watch=None):
        return np.full((len(q), k), -1)

    return {"choose_anywhere": choose_anywhere, "choose_in_pool": choose_in_pool}


def _any_entries(generator, reach, k):
    """(T, k): up to k distinct entries below reach (T,), ascending, -1 padded."""
    chosen = np.full((len(reach), k), -1)
    for row, seen in zip(chosen, reach.tolist(), strict=True):
        some = np.sort(generator.permutation(seen)[:k])
        row[: len(some)] = some
    return chosen


def _any_blocks(reach, size, count):
    """(T, count): the newest blocks; whoever reads them is replaced too."""
    newest = (reach - 1) // size
    blocks = newest[:, None] - np.arange(count)
    return np.sort(np.where(blocks >= 0, blocks, -1), axis=1)


# ---- questions ----------------------------------------------------------------------------------


def pieces(documents, length, bos, eos):
    """Lists of ids -> arrays of at most `length` ids; every token but bos is predicted once."""
    out = []
    for ids in documents:
        whole = np.concatenate([[bos], ids, [eos]]).astype(np.int64)
        out += [whole[at : at + length] for at in range(0, len(whole) - 1, length - 1)]
    return out


def bits_per_byte(model, parts, text_bytes, numerics=OFFICIAL):
    """Held-out pieces -> bits per byte; eos is not text and does not count."""
    nats = 0.0
    for ids in parts:
        targets = ids[1:]
        log_p = np.log(_probabilities(model.logits(ids[:-1], numerics)))
        found = log_p[np.arange(len(targets)), targets]
        nats -= float(np.sum(found[targets != model.config.eos_token_id]))
    return nats / np.log(2) / text_bytes


def recall(model, asked, numerics=OFFICIAL):
    """list of recall.Recall with one answer each -> {distance: share of right answers}."""
    from .train.recall import accuracy

    guesses = []
    for one in asked:
        cache = model.new_cache(numerics)
        prompt = [model.config.bos_token_id, *one.ids[:-1]]
        logits = model.step(cache, [model.open(cache)], [prompt], tails=[1])
        guesses.append(np.argmax(logits, axis=1))
    return accuracy(asked, guesses)


def replay(model, texts, after=32, numerics=OFFICIAL):
    """texts: ids arrays; the last `after` tokens are predicted behind a stored prefix.

    -> mean KL(exact || bounded replay), mean KL(exact || the last window alone), and the share of
    positions where exact and replayed model have the same best token.
    """
    window, found = model.config.sliding_window, []
    for ids in texts:
        hit = (len(ids) - after) // 2 * 2
        exact = _tail(model, [ids], after, numerics)
        cache = model.new_cache(numerics)
        slot = model.open(cache)
        model.step(cache, [slot], [ids[:hit]], tails=[1])
        start = begin_replay(model, cache, slot, ids, hit)
        again = model.step(cache, [slot], [ids[start:]], tails=[after])
        alone = _tail(model, [ids[hit - window :]], after, numerics)
        p, q, r = (_probabilities(logits) for logits in (exact, again, alone))
        same = np.mean(np.argmax(p, axis=1) == np.argmax(q, axis=1))
        found.append((_divergence(p, q), _divergence(p, r), same))
    return tuple(float(x) for x in np.mean(found, axis=0))


def drafts(model, prompts, tokens, temperature, numerics=OFFICIAL):
    """Continue prompts with and without drafts -> mean drafts kept per verification, tokens/s with
    them, tokens/s without.
    """
    kept, rates = [], []
    for draft in (True, False):
        engine = Engine(model, numerics, draft=draft)
        began, count = 0.0, 0
        for seed, prompt in enumerate(prompts):
            request = engine.submit(prompt, tokens, Sampling(temperature, 1.0, seed), stop=())
            list(engine.run())
            began += time.perf_counter() - request.first_token
            count += len(request.tokens) - 1
            kept += request.accepted
        rates.append(count / began)
    return float(np.mean(kept)), *rates


def expert_shares(model, parts, numerics=OFFICIAL):
    """Held-out pieces -> smallest and largest share of a routed expert in any layer; 1 is even."""
    layers, experts = range(model.config.num_hidden_layers), model.config.n_routed_experts
    load = np.zeros((len(layers), experts))
    for ids in parts:
        trace = {}
        model.logits(ids, numerics, trace)
        load += [
            np.bincount(trace[f"L{n:02d}.moe.expert"].ravel(), minlength=experts) for n in layers
        ]
    shares = load / np.sum(load, axis=1, keepdims=True) * experts
    return float(shares.min()), float(shares.max())


def _tail(model, requests, count, numerics):
    """Logits of the last `count` rows of one request, read from its beginning."""
    cache = model.new_cache(numerics)
    return model.step(cache, [model.open(cache)], requests, tails=[count])


def _probabilities(logits):
    """(n, V) f32 -> (n, V) float64, sums 1."""
    z = logits.astype(np.float64)
    p = np.exp(z - np.max(z, axis=1, keepdims=True))
    return p / np.sum(p, axis=1, keepdims=True)


def _divergence(p, q):
    """Mean KL(p || q) over rows, nats."""
    return float(np.mean(np.sum(p * (np.log(p) - np.log(q)), axis=1)))
