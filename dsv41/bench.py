"""How fast is the plain text on this machine, and what does batch invariance cost?

Random weights of two sizes, "tiny" and about ten million parameters, run a prefill and a decode
under each numerics, with and without `batch_invariant`. Tokens per second are the best of several
runs; peak memory is what NumPy held at most during a prefill (tracemalloc, measured in a run of
its own). Then decode against context: the caches of requests of 1K, 8K and 64K tokens are filled
with random records, as reading such prompts would take long, and a token is decoded behind each.
Attention does the same work everywhere; what grows is the scan over the index keys of the layers
that select from a whole source. Nothing here is a test: another machine prints other numbers.
"""

import time
import tracemalloc

import numpy as np

from .init import random_params
from .ledger import parameters
from .model import Model
from .presets import preset
from .quant import FLOAT32, OFFICIAL


def ten_million():
    """The tiny plan with wider layers and more experts: about ten million parameters."""
    return preset("tiny").but(
        hidden_size=256,
        moe_intermediate_size=128,
        n_routed_experts=8,
        head_dim=128,
        qk_rope_head_dim=32,
        index_topk=32,
        candidate_topk_blocks=16,
        sliding_window=64,
        q_lora_rank=128,
        o_lora_rank=64,
        vocab_size=1024,
    )


def random_model(config, seed=0):
    """A model with random weights and one Engram class per token id."""
    params = random_params(config, np.random.default_rng(seed))
    classes = np.arange(config.vocab_size) % config.engram_compressed_vocab_size
    return Model(config, params, classes)


def measure(model, numerics, prompt, steps, repeats=3):
    """-> tokens/s, best of `repeats`, of a prefill through all layers, of one whose decoder half
    runs the last window only, and of decode; and the peak bytes of the first.
    """
    ids = np.random.default_rng(1).integers(0, model.config.vocab_size, prompt + steps)
    prefill, bounded, decode = 0.0, 0.0, 0.0
    tail = max(0, prompt - model.config.sliding_window)
    for _ in range(repeats):
        cache = model.new_cache(numerics)
        slots = [model.open(cache)]
        start = time.perf_counter()
        model.step(cache, slots, [ids[:prompt]], tails=[1])
        middle = time.perf_counter()
        for i in ids[prompt:]:
            model.step(cache, slots, [[i]])
        end = time.perf_counter()
        other = model.open(cache)
        model.step(cache, [other], [ids[:prompt]], tails=[1], decoder_from=[tail])
        bounded = max(bounded, prompt / (time.perf_counter() - end))
        prefill, decode = (
            max(prefill, prompt / (middle - start)),
            max(decode, steps / (end - middle)),
        )
    return prefill, bounded, decode, _peak(model, numerics, ids[:prompt])


def _peak(model, numerics, ids):
    tracemalloc.start()
    try:
        cache = model.new_cache(numerics)
        model.step(cache, [model.open(cache)], [ids])
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def report(prompt=1024, steps=32):
    """Yield the lines of the benchmark's table as they are measured."""
    for name, count in (("prompt", prompt), ("steps", steps)):
        if count < 1:
            raise ValueError(f"{name}: expected a positive number of tokens, got {count}")
    yield f"prefill of {prompt:,} tokens, then {steps} decode steps of one request"
    names = f"{'prefill':>12}{'bounded':>12}{'decode':>12}{'peak':>10}"
    yield f"{'model':<8}{'numerics':<10}{'invariant':<11}{names}"
    for name, config in (("tiny", preset("tiny")), ("10M", ten_million())):
        model = random_model(config)
        for numerics in (FLOAT32, OFFICIAL):
            for invariant in (False, True):
                chosen = numerics.but(batch_invariant=invariant)
                prefill, bounded, decode, peak = measure(model, chosen, prompt, steps)
                yield (
                    f"{name:<8}{numerics.name:<10}{'yes' if invariant else 'no':<11}"
                    f"{prefill:>8,.0f} t/s{bounded:>8,.0f} t/s{decode:>8,.1f} t/s"
                    f"{peak / 1e6:>7,.0f} MB"
                )
        yield f"{name}: {parameters(config).backbone:,} parameters beside the Engram tables"


def fill(cache, slot, length, seed=0):
    """Give an open request the global KV and windows of `length` tokens: random records."""
    rng, config = np.random.default_rng(seed), cache.config
    cache.reserve(slot, length + 1)
    kinds = (
        (cache.main_kv, "main_kv", config.head_dim),
        (cache.index, "index", config.index_head_dim),
    )
    for pools, kind, channels in kinds:
        for source, ratio in cache.ratio.items():
            some = rng.standard_normal((256, channels), dtype=np.float32)
            records = getattr(cache.numerics, kind).encode(some)
            rows = cache.rows(source, slot, np.arange(length // ratio))
            pools[source][rows] = records[np.arange(len(rows)) % len(records)]
            cache.written[source][slot] = length
    for ring in cache.window:
        some = rng.standard_normal((config.sliding_window, config.head_dim), dtype=np.float32)
        ring[slot] = cache.numerics.window_kv.encode(some)
    cache.length[slot] = length


def decode_by_context(model, numerics, length, steps):
    """Decode tokens/s of one request behind `length` tokens, the best of `steps` single steps."""
    cache = model.new_cache(numerics)
    slot = model.open(cache)
    fill(cache, slot, length)
    seconds = []
    for token in range(steps):
        start = time.perf_counter()
        model.step(cache, [slot], [[token]])
        seconds.append(time.perf_counter() - start)
    return 1 / min(seconds)


def context_report(contexts=(1024, 8192, 65_536), steps=8):
    """Yield the lines of decode speed against context, for the 10M model."""
    model = random_model(ten_million())
    yield f"{'10M, tokens of context':<26}" + "".join(f"{c:>12,}" for c in contexts)
    for numerics in (FLOAT32, OFFICIAL):
        speeds = [decode_by_context(model, numerics, c, steps) for c in contexts]
        yield f"{numerics.name + ' decode':<26}" + "".join(f"{s:>8.1f} t/s" for s in speeds)
