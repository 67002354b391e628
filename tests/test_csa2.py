"""Full, Reindex and Reuse layers: who writes, who selects, who reads, and what nobody may see."""

import tracemalloc

import numpy as np
import oracles
import pytest
from compare import assert_close, assert_same

from dsv41 import csa2, selection
from dsv41.batch import make_batch
from dsv41.cache import Cache
from dsv41.call import Call, Shared
from dsv41.csa2 import attention, global_rows_of, select
from dsv41.init import random_params
from dsv41.model import Model
from dsv41.projections import grouped_output, low_rank_queries
from dsv41.quant import FLOAT32, OFFICIAL
from dsv41.rope import frequencies, rotate
from dsv41.sparse_attn import rope_sparse_attn, sparse_attn
from dsv41.window import window_index, window_kv

CONFIG = oracles.small_config()
PARAMS = random_params(CONFIG, np.random.default_rng(3))
EXACT = FLOAT32.but(batch_invariant=True)
FULL_2, REINDEX_2, REUSE_2 = (CONFIG.plan[i] for i in (3, 4, 6))
FULL_1, POOL, CONSUMER = (CONFIG.plan[i] for i in (1, 7, 9))


def inputs(tokens, seed=0, config=CONFIG):
    return np.random.default_rng(seed).standard_normal((tokens, config.hidden_size), np.float32)


class Run:
    """Attention sublayers of one request, fed by hand."""

    def __init__(self, tokens, config=CONFIG, numerics=EXACT, trace=None):
        self.cache, self.shared, self.trace = Cache(config, numerics), Shared(), trace
        self.slot = self.cache.add()
        self.cache.reserve(self.slot, tokens)
        batch = make_batch([np.zeros(tokens, int)], [0], [self.slot])
        self.call = Call(batch, self.cache, config, numerics, shared=self.shared, trace=trace)

    def attend(self, layer, x):
        return attention(x, PARAMS["layers"][layer.index]["attn"], layer, self.call)


def window_only(layer, x):
    """The same layer with its window alone, put together from the parts."""
    p, freqs = PARAMS["layers"][layer.index]["attn"], frequencies(CONFIG, layer.ratio)
    batch = make_batch([np.zeros(len(x), int)], [0], [0])
    cache = Cache(CONFIG, EXACT)
    cache.add()
    own = window_kv(x, p, batch.positions, freqs, CONFIG, EXACT)
    ring = cache.window[layer.index][:1].reshape(-1, own.shape[-1])
    window, rows = np.concatenate([ring, own]), window_index(batch, CONFIG.sliding_window)
    _, q = low_rank_queries(x, p, CONFIG, EXACT)
    nothing = cache.no_records(len(x))
    o = rope_sparse_attn(q, batch.positions, freqs, window, rows, *nothing, p["attn_sink"], EXACT)
    return grouped_output(o, p, CONFIG, EXACT)


# ---- what a query sees ------------------------------------------------------------------------


def test_a_prompt_shorter_than_a_group_sees_its_window_alone():
    run, x = Run(1), inputs(1)
    got = run.attend(FULL_2, x)
    assert run.shared.selected[FULL_2.index].tolist() == [[-1, -1, -1]]
    assert_same("window only", got, window_only(FULL_2, x))
    assert not run.cache.main_kv[FULL_2.index].any(), "an entry was written for an open pair"
    assert run.cache.carry[FULL_2.index][run.slot].any(), "the open token left nothing behind"


def test_a_group_is_visible_to_its_last_token_and_not_to_its_first():
    run, x = Run(2), inputs(2)
    got = run.attend(FULL_2, x)
    assert run.shared.selected[FULL_2.index].tolist() == [[-1, -1, -1], [0, -1, -1]]
    alone = window_only(FULL_2, x)
    assert_same("first token", got[:1], alone[:1])
    assert np.abs(got[1] - alone[1]).max() > 0.01


@pytest.mark.parametrize(
    "layer, visible",
    [(FULL_2, [0, 1, 1, 2, 2, 3, 3, 4]), (FULL_1, [1, 2, 3, 4, 5, 6, 7, 8])],
    ids=["pairs", "single tokens"],
)
def test_a_query_at_p_sees_the_groups_that_end_by_p(layer, visible):
    """(p + 1) // m; p // m would hide a pair from the token that closes it."""
    config = CONFIG.but(index_topk=8, candidate_topk_blocks=4)
    run = Run(8, config)
    run.attend(layer, inputs(8))
    selected = run.shared.selected[layer.index]
    assert np.sum(selected >= 0, axis=1).tolist() == visible
    for row, count in zip(selected.tolist(), visible, strict=True):
        assert row == [*range(count), *[-1] * (8 - count)]


def test_what_a_key_carries_of_its_position_is_turned_back():
    """One key that is also the value, at position 3; the query is at 5, or at 3 itself."""
    freqs = np.array([1, 0.01], np.float32)  # base 10000, four channels
    v = np.array([[1, 0, 0, 1]], np.float32)
    key = rotate(v, np.array([3]), freqs)
    q, sink = np.zeros((1, 1, 4), np.float32), np.array([-np.inf], np.float32)
    nothing, none = np.zeros((0, 4), np.float32), np.zeros((1, 0), np.int64)
    row = np.array([[0]])

    def output(position):
        args = (q, np.array([position]), freqs, nothing, none, key, row, sink, FLOAT32)
        return rope_sparse_attn(*args)[0]

    want = np.array([[-0.416146837, -0.909297427, 0.019998667, 0.999800007]])
    assert_close("two behind", output(5), want, rel=1e-6, floor=1e-7)
    assert_close("the query's own", output(3), v, rel=1e-6, floor=1e-7)
    plain = sparse_attn(q, nothing, none, key, row, sink, FLOAT32)[0]
    assert np.abs(plain - v).max() > 0.5, "without turning back this test would see nothing"


# ---- who writes, selects, reads ---------------------------------------------------------------


def global_arrays(cache):
    return {
        (kind, source): getattr(cache, kind)[source].copy()
        for kind in ("main_kv", "index")
        for source in cache.ratio
    }


def test_only_full_layers_write_global_kv_and_only_their_own():
    run, x = Run(12), inputs(12)
    for layer in (FULL_1, FULL_2, REINDEX_2, REUSE_2):
        before = global_arrays(run.cache)
        run.attend(layer, x)
        for (kind, source), old in before.items():
            written = not np.array_equal(old, getattr(run.cache, kind)[source])
            assert written == (layer.mode == "full" and source == layer.index), (kind, source)


def test_a_replayed_token_does_not_overwrite_the_entry_it_made():
    """Six tokens are stored; a call from 4 on brings other inputs. Only tokens 6 and 7 are new."""
    run = Run(8)
    first, again = inputs(6), inputs(4, seed=1)
    p = PARAMS["layers"][FULL_2.index]["attn"]
    for x, start in ((first, 0), (again, 4)):
        batch = make_batch([np.zeros(len(x), int)], [start], [run.slot])
        csa2.write_global_kv(x, p, FULL_2, Call(batch, run.cache, CONFIG, EXACT))
        if start == 0:
            before = global_arrays(run.cache)
    whole = Run(8)
    csa2.write_global_kv(np.concatenate([first, again[2:]]), p, FULL_2, whole.call)
    for pool in ("main_kv", "index"):
        got, want = (getattr(r.cache, pool)[FULL_2.index] for r in (run, whole))
        assert_same(f"{pool}, stored", got[:3], before[pool, FULL_2.index][:3])
        assert_same(f"{pool}, all", got[:4], want[:4])


def test_a_reindex_layer_chooses_for_itself_among_the_sources_keys():
    run, x = Run(30), inputs(30)
    run.attend(FULL_2, x)
    run.attend(REINDEX_2, x)
    own, source = (run.shared.selected[i] for i in (REINDEX_2.index, FULL_2.index))
    assert (own != source).any()
    p = PARAMS["layers"][REINDEX_2.index]["attn"]
    p = {**p, "indexer": PARAMS["layers"][FULL_2.index]["attn"]["indexer"]}
    p = {**p, **{k: PARAMS["layers"][FULL_2.index]["attn"][k] for k in ("wq_a", "q_norm")}}
    c_q, _ = low_rank_queries(x, p, CONFIG, EXACT)
    select(x, c_q, p, REINDEX_2, run.call)
    assert_same("the source's queries", run.shared.selected[REINDEX_2.index], source)


def test_a_reuse_layer_reads_its_own_index_sources_choice_only():
    x = inputs(20)

    def output(change=None):
        run = Run(20)
        for layer in (FULL_1, FULL_2, REINDEX_2):
            run.attend(layer, x)
        if change is not None:
            run.shared.selected[change][:] = -1
        return run.attend(REUSE_2, x)

    assert REUSE_2.index_source == REINDEX_2.index
    usual = output()
    assert_same("another source's choice", output(FULL_2.index), usual)
    assert_same("another source's choice", output(FULL_1.index), usual)
    assert_same("nothing chosen", output(REINDEX_2.index), window_only(REUSE_2, x))


def test_entry_numbers_become_rows_of_the_requests_own_pages():
    cache = Cache(CONFIG, FLOAT32, page_tokens=2)
    a, b = cache.add(), cache.add()
    for length in (2, 4, 6):  # pages alternate between the two
        cache.reserve(a, length)
        cache.reserve(b, length)
    batch = make_batch([[0, 0], [0]], [4, 4], [b, a])
    shared = Shared(selected={FULL_2.index: np.array([[0, 2], [1, -1], [2, 0]])})
    call = Call(batch, cache, CONFIG, FLOAT32, shared=shared)
    pool, rows = global_rows_of(FULL_2, call)
    assert pool is cache.main_kv[FULL_2.index]
    assert cache.pages[a] == [0, 2, 4] and cache.pages[b] == [1, 3, 5]
    assert rows.tolist() == [[1, 5], [3, -1], [4, 0]]


# ---- the pool ---------------------------------------------------------------------------------


def test_a_layer_behind_the_pool_chooses_inside_it():
    run, x = Run(30), inputs(30)
    run.attend(POOL, x)
    everywhere = run.shared.selected[POOL.index]
    run.attend(CONSUMER, x)
    pool, chosen = run.shared.pool, run.shared.selected[CONSUMER.index]
    size = CONFIG.candidate_block_size
    for t in range(30):
        blocks = {b for b in pool[t].tolist() if b >= 0}
        assert len(blocks) <= CONFIG.candidate_topk_blocks and t // size in blocks
        assert {j // size for j in chosen[t].tolist() if j >= 0} <= blocks
    outside = [
        any(j // size not in pool[t] for j in everywhere[t].tolist() if j >= 0) for t in range(30)
    ]
    assert not any(outside[:6]), "a pool that holds every block excludes nothing"


def test_entries_outside_a_short_pool_do_not_come_back():
    """Seven visible entries, a pool of one block of two, room for three: two are returned."""
    run, x = Run(7), inputs(7)
    run.attend(POOL, x)
    run.shared.pool[:] = -1
    run.shared.pool[:, 0] = np.arange(7) // 2
    run.attend(CONSUMER, x)
    want = [[0, -1], [0, 1], [2, -1], [2, 3], [4, -1], [4, 5], [6, -1]]
    assert run.shared.selected[CONSUMER.index].tolist() == [[*row, -1] for row in want]


def test_queries_in_blocks_choose_what_they_choose_at_once(monkeypatch):
    x = inputs(33)
    layers = (FULL_1, FULL_2, REINDEX_2, POOL, CONSUMER)
    at_once, in_blocks = Run(33, trace={}), Run(33, trace={})
    for layer in layers:
        at_once.attend(layer, x)
    monkeypatch.setattr(selection, "block_elements", lambda x: 400)
    for layer in layers:
        in_blocks.attend(layer, x)
    for index, want in at_once.shared.selected.items():
        assert_same(f"choices of layer {index}", in_blocks.shared.selected[index], want)
    for name, want in at_once.trace.items():
        assert_same(name, in_blocks.trace[name], want)


@pytest.mark.parametrize("layers", [[FULL_1], [POOL, CONSUMER]], ids=["anywhere", "in the pool"])
def test_selection_never_holds_a_row_of_scores_per_query(monkeypatch, layers):
    """With blocks of 64 KiB the peak grows with the prompt, not with its square."""
    monkeypatch.setattr(selection, "block_elements", lambda x: 1 << 14)
    tokens = 1500
    x = inputs(tokens)
    run = Run(tokens, numerics=FLOAT32)
    for layer in layers[:-1]:
        run.attend(layer, x)
    layer = layers[-1]
    p = PARAMS["layers"][layer.index]["attn"]
    if layer.mode == "full":
        run.attend(layer, x)  # its keys are in the cache now
    c_q, _ = low_rank_queries(x, p, CONFIG, FLOAT32)
    tracemalloc.start()
    select(x, c_q, p, layer, run.call)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 0.5 * 4 * tokens**2, f"{peak / 1e6:.1f} MB"


# ---- several requests -------------------------------------------------------------------------

REUSED = oracles.small_config(
    num_hidden_layers=3,
    compress_ratios=(2, 2, 2),
    kv_source_layer_ids=(0,),
    index_source_layer_ids=(0,),
    candidate_source_layer_id=None,
    engram_layer_ids=(1,),
    engram_num_embeddings=(112,),
    index_topk=4,
)


@pytest.fixture(scope="module")
def reusing():
    params = random_params(REUSED, np.random.default_rng(0))
    return Model(REUSED, params, oracles.small_classes(REUSED))


def tokens(length, seed):
    return np.random.default_rng(seed).integers(0, 60, length)


@pytest.mark.parametrize("numerics", [FLOAT32, OFFICIAL], ids=["float32", "official"])
def test_a_freed_slot_leaves_no_index_behind(reusing, numerics):
    """Forty tokens, then nine in the same slot and pages: the last sees entries 0 to 3 only."""
    cache, trace = reusing.new_cache(numerics), {}
    first = reusing.open(cache)
    reusing.step(cache, [first], [tokens(40, 1)])
    cache.release(first)
    second = reusing.open(cache)
    assert second == first
    got = reusing.step(cache, [second], [tokens(9, 2)], trace=trace)
    chosen = trace["L00.idx.topk"]
    assert set(chosen.ravel().tolist()) <= {-1, 0, 1, 2, 3} and chosen[-1].tolist() == [0, 1, 2, 3]
    assert_same("fresh engine", got, reusing.logits(tokens(9, 2), numerics))


@pytest.mark.parametrize("numerics", [FLOAT32, OFFICIAL], ids=["float32", "official"])
def test_requests_that_swap_rows_between_two_steps_go_on_as_alone(reusing, numerics):
    exact = numerics.but(batch_invariant=True)
    prompts, more = (tokens(40, 1), tokens(9, 2)), (tokens(6, 3), tokens(6, 4))
    alone = [
        reusing.logits(np.concatenate(pair), exact)[len(pair[0]) :]
        for pair in zip(prompts, more, strict=True)
    ]
    cache = reusing.new_cache(exact)
    slots = [reusing.open(cache), reusing.open(cache)]
    reusing.step(cache, slots, list(prompts))
    for step in range(6):
        order = (0, 1) if step % 2 == 0 else (1, 0)
        fed = [more[who][step : step + 1] for who in order]
        got = reusing.step(cache, [slots[who] for who in order], fed)
        for row, who in enumerate(order):
            assert_same(f"request {who}, step {step}", got[row], alone[who][step])


def test_a_row_has_the_same_bits_in_every_batch_and_every_time():
    """Sizes 1, 2, 3 and 8, the request at every place, decoding next to long prompts."""
    model = Model(CONFIG, PARAMS, oracles.small_classes(CONFIG))
    mine = tokens(11, 5)
    alone = model.logits(mine, EXACT)
    for size in (1, 2, 3, 8):
        others = [tokens(1 + 5 * i % 13, 10 + i) for i in range(size - 1)]
        for place in {0, size // 2, size - 1}:
            batch = [*others[:place], mine, *others[place:]]
            begin = sum(len(r) for r in batch[:place])
            got = model.logits(batch, EXACT)[begin : begin + len(mine)]
            assert_same(f"place {place} of {size}", got, alone)
    for _ in range(2):
        assert_same("again", model.logits(mine, EXACT), alone)


def test_nothing_crosses_the_edge_between_two_packed_documents():
    """Lengths 3 and 4: one and two entries, none across the edge, everything else as alone."""
    model = Model(CONFIG, PARAMS, oracles.small_classes(CONFIG))
    documents = [tokens(3, 0), tokens(4, 1)]
    cache = model.new_cache(EXACT)
    slots = [model.open(cache), model.open(cache)]
    packed, trace = {}, []
    got = model.step(cache, slots, documents, trace=packed)
    begin = 0
    for document in documents:
        trace.append({})
        want = model.logits(document, EXACT, trace[-1])
        assert_same("logits", got[begin : begin + len(document)], want)
        begin += len(document)
    assert [len(t["L03.cmp.latent"]) for t in trace] == [1, 2]
    both = np.concatenate([t["L03.cmp.latent"] for t in trace])
    assert_same("latents", packed["L03.cmp.latent"], both)
    for name in ("L03.engram.rows", "L03.idx.topk", "L09.idx.topk"):
        assert_same(name, packed[name], np.concatenate([t[name] for t in trace]))
    assert cache.carry[3][slots[0]].any() and not cache.carry[3][slots[1]].any()


# ---- the future -------------------------------------------------------------------------------

SWA = dict(
    num_hidden_layers=1,
    candidate_source_layer_id=None,
    engram_layer_ids=(),
    engram_num_embeddings=(),
)
PATHS = {
    "window": dict(SWA, compress_ratios=(0,), kv_source_layer_ids=(), index_source_layer_ids=()),
    "pairs": dict(
        SWA,
        compress_ratios=(2,),
        kv_source_layer_ids=(0,),
        index_source_layer_ids=(0,),
        sliding_window=1,
    ),
    "single tokens": dict(
        SWA,
        compress_ratios=(1,),
        kv_source_layer_ids=(0,),
        index_source_layer_ids=(0,),
        sliding_window=1,
    ),
    "Engram": dict(
        SWA,
        compress_ratios=(0,),
        kv_source_layer_ids=(),
        index_source_layer_ids=(),
        sliding_window=1,
        engram_layer_ids=(0,),
        engram_num_embeddings=(112,),
    ),
    "everything": {},
}


@pytest.mark.parametrize("path", PATHS)
def test_a_future_token_changes_nothing_earlier(path):
    """And it does change what comes after it, on this path alone, so the check is not empty."""
    config = oracles.small_config(**PATHS[path])
    params, classes = random_params(config, np.random.default_rng(0)), oracles.small_classes(config)
    model = Model(config, params, classes)
    ids = tokens(17, 6)
    usual = model.logits(ids, EXACT)
    reached = set()
    for t in (0, 1, 6, 7, 12, 16):
        other = ids.copy()
        other[t] = (ids[t] + 1) % 60
        got = model.logits(other, EXACT)
        assert_same(f"before {t}", got[:t], usual[:t])
        assert not np.array_equal(got[t], usual[t])
        reached |= {p - t for p in range(t + 1, 17) if not np.array_equal(got[p], usual[p])}
    assert 1 in reached, "no later token noticed"
    if path == "window":
        assert max(reached) == config.sliding_window - 1
    if path == "Engram":
        assert max(reached) == config.engram_max_ngram_size - 1
    if path in ("pairs", "single tokens"):
        assert max(reached) > 5


@pytest.mark.parametrize("layers", [[FULL_1], [FULL_2], [FULL_2, REINDEX_2], [POOL, CONSUMER]])
def test_a_future_input_changes_no_earlier_choice(layers):
    x = inputs(19)
    usual = Run(19)
    for layer in layers:
        want = usual.attend(layer, x)
    for t in (1, 8, 9, 18):
        run, other = Run(19), x.copy()
        other[t] = 3 * x[(t + 5) % 19]
        for layer in layers:
            got = run.attend(layer, other)
        assert_same(f"output before {t}", got[:t], want[:t])
        for layer in layers:
            chosen, before = (r.shared.selected[layer.index][:t] for r in (run, usual))
            assert_same(f"choices of layer {layer.index} before {t}", chosen, before)
        if usual.shared.pool is not None:
            assert_same(f"pool before {t}", run.shared.pool[:t], usual.shared.pool[:t])
