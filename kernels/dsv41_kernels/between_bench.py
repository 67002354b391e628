"""The ops between the large ones, of inference and of training, each measured at one size.

A maker below gives an op's NumPy arguments for so many tokens (or arrays); each op's folder has a
bench.py that asks here for its cases. The check compares all that the kernel returned or changed
with the definition in float64 on the same numbers; `cupy text` is the definition on CuPy arrays.
The least bytes are every array once, read or written, and those that are changed twice.
"""

from functools import partial

import cupy
import numpy as np

import dsv41.cache
import dsv41.model
import dsv41.train.loop  # noqa: F401, these modules' definitions enter OPS
from dsv41.dispatch import OPS, find_kernel
from dsv41.quant import FLOAT32

from .bench import Case

RELEASED, MINI = 5120, 128  # channels of a row
ROUTED = 384  # experts of the released model
HEADS, CHANNELS, PAIRS = 64, 512, 32  # attention of the released model
EXPERTS, CHOSEN, HIDDEN, LIMIT = 16, 2, 64, 10.0  # of the miniature
ARRAY = 8192  # numbers of an array of the optimizer's lists
MAY_DIFFER = 1e-5  # of the largest number of a result


class Random:
    """Random arguments: `random(3, 4)` is a float32 array of that shape."""

    def __init__(self):
        self.rng = np.random.default_rng(0)

    def __call__(self, *shape):
        return self.rng.standard_normal(shape, np.float32)

    def positive(self, *shape):
        return np.abs(self(*shape)) + np.float32(0.1)

    def choices(self, tokens):
        """(T, k) experts, none of them twice."""
        return np.argsort(self(tokens, EXPERTS), axis=1)[:, :CHOSEN]

    def arrays(self, count):
        return [self(ARRAY) for _ in range(count)]

    def experts(self):
        """Parameters of a layer's experts and the shared one."""

        def one():
            sizes = {"w1": (HIDDEN, MINI), "w3": (HIDDEN, MINI), "w2": (MINI, HIDDEN)}
            return {name: {"weight": self(*size) / 8} for name, size in sizes.items()}

        return {"experts": {e: one() for e in range(EXPERTS)}, "shared_experts": one()}


def gate(random):
    """Parameters of the released model's router."""
    return {"weight": random(ROUTED, RELEASED) / 64, "bias": random(ROUTED) / 8}


def listed(random, tokens):
    """Scores and entries of a pool of 16,384, -1 among them, and what is visible."""
    entries = np.sort(random.rng.integers(0, 1 << 20, (tokens, 16_384)), axis=1)
    entries[:, ::97] = -1
    return random(*entries.shape), entries, np.full(tokens, 1 << 19)


def attention(random, tokens):
    """What `sparse_attn_backward` gets in training, with positions."""
    from .sparse_attn.bench import training_inputs

    q, *reads = (cupy.asnumpy(x) for x in training_inputs(tokens, FLOAT32))
    freqs = np.float32(160_000.0 ** -(np.arange(8) / 8))
    return random(*q.shape), q, np.arange(tokens) % 1024, freqs, *reads, FLOAT32


def optimizer(random, count):
    """Everything that `adamw_steps` takes for so many arrays."""
    weights, ms, grads = (random.arrays(count) for _ in range(3))
    vs = [random.positive(ARRAY) for _ in range(count)]
    steps, rates, decays = [7] * count, [1e-3] * count, [0.1] * count
    return weights, ms, vs, steps, grads, rates, decays, (0.9, 0.95), 1e-8


def paged(random, tokens):
    """Entries of requests that own 8,192 pages of 32 entries each."""
    rng = random.rng
    entries = rng.integers(-1, 8192 * 32, (tokens, 512))
    pages = rng.permutation(tokens * 8192).reshape(tokens, 8192)
    return entries, pages, np.arange(tokens)[:, None], 32


def experts_of(random, tokens, *before):
    more = random.choices(tokens), random.positive(tokens, CHOSEN), LIMIT, FLOAT32
    return *before, random(tokens, MINI), random.experts(), *more


# name: tokens or arrays, what they are, and the arguments of so many
INPUTS = {
    "adamw_steps": (600, f"arrays of {ARRAY}", optimizer),
    "balance_loss": (
        32_768,
        f"tokens, {EXPERTS} experts",
        lambda r, n: (r.positive(n, EXPERTS), r.choices(n), np.arange(n) // 1024, -(-n // 1024)),
    ),
    "moe_experts": (32_768, f"tokens, {EXPERTS} experts of {MINI} x {HIDDEN}", experts_of),
    "moe_experts_backward": (
        32_768,
        f"tokens, {EXPERTS} experts of {MINI} x {HIDDEN}",
        lambda r, n: experts_of(r, n, r(n, MINI)),
    ),
    "nesterov_all": (600, f"arrays of {ARRAY}", lambda r, n: (r.arrays(n), r.arrays(n), 0.95)),
    "paged_rows": (64, "requests, 512 entries each", paged),
    "pool_topk": (64, "queries, top-512 of 16,384", lambda r, n: (*listed(r, n), 512)),
    "rmsnorm": (
        4096,
        f"rows of {RELEASED}",
        lambda r, n: (r(n, RELEASED), r(RELEASED), 1e-6, FLOAT32),
    ),
    "rmsnorm_backward": (
        32_768,
        f"rows of {MINI}",
        lambda r, n: (r(n, MINI), r(n, MINI), r(MINI), 1e-6),
    ),
    "rope_sparse_attn_backward": (32_768, "tokens, 8 heads x 64, 64 + 64 rows", attention),
    "rotate": (
        4096,
        f"tokens, {HEADS} heads x {CHANNELS}",
        lambda r, n: (
            r(n, HEADS, CHANNELS),
            np.arange(n),
            np.float32(160_000.0 ** -(np.arange(PAIRS) / PAIRS)),
        ),
    ),
    "round_bf16": (4096, f"rows of {RELEASED}", lambda r, n: (r(n, RELEASED),)),
    "route": (
        4096,
        f"tokens of {RELEASED}, 6 of {ROUTED} experts",
        lambda r, n: (r(n, RELEASED), gate(r), np.zeros(n, bool), 6, 1.5, True, FLOAT32),
    ),
    "route_backward": (
        32_768,
        f"tokens of {MINI}, {CHOSEN} of {EXPERTS} experts",
        lambda r, n: (
            *(r(n, CHOSEN), r(n, EXPERTS), r(n, MINI), {"weight": r(EXPERTS, MINI) / 8}),
            *(r.choices(n), 1.5, True, FLOAT32),
        ),
    ),
    "scale_add": (
        600,
        f"arrays of {ARRAY}",
        lambda r, n: (r.arrays(n), [0.9] * n, r.arrays(n), [0.1] * n),
    ),
    "scale_all": (600, f"arrays of {ARRAY}", lambda r, n: (r.arrays(n), 0.999)),
    "sinkhorn_backward": (
        32_768,
        "matrices of 4 x 4",
        lambda r, n: (r(n, 4, 4), r(n, 4, 4), 20, 1e-6),
    ),
    "square_sums": (600, f"arrays of {ARRAY}", lambda r, n: (r.arrays(n),)),
    "swiglu": (4096, "rows of 2048", lambda r, n: (r(n, 2048), r(n, 2048), LIMIT)),
    "swiglu_backward": (
        32_768,
        f"rows of {HIDDEN}",
        lambda r, n: (r(n, HIDDEN), r(n, HIDDEN), r(n, HIDDEN), LIMIT),
    ),
}
CHANGED = {"adamw_steps": 3, "nesterov_all": 1, "scale_add": 1, "scale_all": 1}  # first arguments
VERSION = {"pool_topk": "v2"}  # of rows that short, which v2 holds in registers
READ_IN_PART = {"paged_rows": 1}  # this argument: a number for each of the first one's
SMALL = 64  # tokens or arrays that are compared with float64


def leaves(tree):
    """All arrays in nested tuples, lists and dicts."""
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, tuple | list):
        return [x for part in tree for x in leaves(part)]
    return [tree] if isinstance(tree, np.ndarray | cupy.ndarray | np.generic) else []


def changed(tree, function):
    """The same nest with function(array) for each array."""
    if isinstance(tree, dict):
        return {key: changed(part, function) for key, part in tree.items()}
    if isinstance(tree, tuple | list):
        return type(tree)(changed(part, function) for part in tree)
    return function(tree) if isinstance(tree, np.ndarray) else tree


def wide(x):
    return x.astype(np.float64) if x.dtype == np.float32 else x.copy()


def error(op, function):
    """The largest difference of a result or of a changed argument, as a share of its largest."""
    arguments = INPUTS[op][2](Random(), SMALL)
    exact, ours = changed(arguments, wide), there(op, arguments)
    want = leaves((OPS[op](*exact), exact))
    got = [cupy.asnumpy(x) for x in leaves((function(*ours), ours))]
    worst = 0.0
    for g, w in zip(got, want, strict=True):
        if w.dtype.kind == "f":
            worst = max(worst, float(np.abs(g - w).max() / np.abs(w).max()))
        else:
            assert np.array_equal(g, w), f"{op}: other numbers"
    assert worst < MAY_DIFFER, f"{op}: {worst}"
    return worst


def there(op, arguments):
    """The arguments on the GPU; frequencies are a constant that stays on the host."""
    stays = {"rotate": 2, "rope_sparse_attn_backward": 3}.get(op)
    return tuple(x if i == stays else changed(x, cupy.asarray) for i, x in enumerate(arguments))


def cases(op, quick=False):
    """The kernel beside the text on CuPy arrays."""
    count, what, make = INPUTS[op]
    count, kernel = SMALL if quick else count, find_kernel(op, "cupy")
    arguments = there(op, make(Random(), count))
    moved = leaves((arguments, kernel(*arguments), arguments[: CHANGED.get(op, 0)]))
    size = sum(x.nbytes for x in moved)
    if op in READ_IN_PART:
        size += arguments[0].nbytes - arguments[READ_IN_PART[op]].nbytes
    for version, function in {VERSION.get(op, "v1"): kernel, "cupy text": OPS[op]}.items():
        yield Case(
            op=op,
            version=version,
            shape=f"{count} {what}",
            call=partial(function, *arguments),
            check=partial(error, op, function),
            bytes=size,
            flops=flops(op, count),
        )


def flops(op, tokens):
    """Of matrix products; forward again and two gradients are three times as many."""
    experts = 6 * MINI * HIDDEN * (CHOSEN + 1) * tokens
    return {
        "moe_experts": experts,
        "moe_experts_backward": 3 * experts,
        "route": 2 * tokens * RELEASED * ROUTED,
        "route_backward": 6 * tokens * MINI * EXPERTS,
    }.get(op, 0)
