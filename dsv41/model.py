"""How does a token become a logit?

    E = embed[ids]                      one vector per token
    X = (E, E, E, E)                    four equal residual streams, read through A = (1, 0, 0, 0)
    X, A = block(X, A)                  forty times: Engram, attention, MoE (ced.py)
    x = RMSNorm( sum_i A_i X_i )        the last A collapses the streams; nothing is learned here
    logits = x Whead^T                  in float32

`forward` is that, over a Batch and a Cache; `Model` is the thin object around parameters, config
and token classes that a user holds. Source: Transformer.forward in the released
inference/model.py.
"""

from functools import cached_property

import numpy as np

from .batch import make_batch
from .cache import Cache
from .call import Call
from .ced import run_layers
from .checkpoint import Checkpoint, load_params
from .dispatch import beside, errors_at_end
from .engram import BARRIER, hash_rows, look_back, multipliers, table_primes
from .mhc import hc_collapse, initial_streams
from .ops import matmul_rows, rmsnorm, rows
from .quant import OFFICIAL, require_finite_weight
from .tensors import flatten
from .token_classes import load_token_classes
from .tokenizer import load_tokenizer
from .trace import put


def forward(params, call, embedding=None, in_decoder=None, wanted=None):
    """Run the new tokens of `call.batch`, appending to `call.cache` -> logits (rows, V) f32.

    embedding (T, D) f32 replaces the token embeddings (image rows come from a vision tower).
    in_decoder (T,) bool: rows that run through the decoder half (default all); wanted (T,) bool: of
    these, the rows whose logits are computed (default all).
    """
    config, numerics, tokens = call.config, call.numerics, len(call.batch.ids)
    in_decoder = np.ones(tokens, bool) if in_decoder is None else in_decoder
    wanted = in_decoder if wanted is None else wanted & in_decoder
    if embedding is None:
        embedding = rows(params["embed"]["weight"], beside(call.batch.ids, call.cache.like))
    embedding = numerics.store(beside(embedding, call.cache.like))
    put(call.trace, None, "embedding", lambda: embedding)
    streams, pre = initial_streams(embedding, config.hc_mult)
    streams, pre = run_layers(streams, pre, params["layers"], in_decoder, call)
    read = beside(np.flatnonzero(wanted[in_decoder]), call.cache.like)
    streams, pre = streams[read], pre[read]
    x = hc_collapse(streams, pre, numerics)
    x = rmsnorm(x, params["norm"]["weight"], config.rms_norm_eps, numerics)
    put(call.trace, None, "final_x", lambda: x)
    return matmul_rows(x, params["head"]["weight"], numerics)


def engram_rows(config, classes, batch, cache):
    """Table rows (T, columns) of every Engram module; moves the requests' histories on.

    classes (V,) int64: Engram class of every token id.
    """
    if not config.engram_layer_ids:
        return []
    windows = np.zeros((len(batch.ids), config.engram_max_ngram_size), np.int64)
    for slot, at, _, _ in batch.segments():
        own, is_image = classes[batch.ids[at]], batch.is_image[at]
        pad = classes[config.engram_pad_token_id]
        windows[at], history = look_back(own, is_image, cache.history[slot], pad)
        cache.set_history(slot, history, np.where(is_image, BARRIER, own))
    columns = [np.array(column) for column in table_primes(config)]
    return [
        hash_rows(windows, multipliers(config, layer), primes, config.engram_n_heads)
        for layer, primes in zip(config.engram_layer_ids, columns, strict=True)
    ]


class Model:
    """Parameters, config and token classes, with the calls a user wants.

    `params` are nested dicts spelled like the checkpoint's tensor names; `classes` (V,) int64 is
    needed by models with Engram.
    """

    def __init__(self, config, params, classes=None, directory=None, like=None):
        self.config, self.params, self.directory, self.like = config, params, directory, like
        for name, leaf in flatten(params).items():
            if isinstance(leaf, np.ndarray) and leaf.dtype.kind == "f":
                require_finite_weight(leaf, name)
        self.classes = _checked_classes(config, classes)

    def logits(
        self,
        ids,
        numerics=OFFICIAL,
        trace=None,
        *,
        batch_invariant=False,
        token_types=None,
        embedding=None,
    ):
        """Logits after every token of one or several requests, each from its own beginning.

        ids: (T,) ints, or (R, T) ints, or a list of R sequences of ints of any lengths.
        token_types: the same nesting, -1 text, >= 0 image span; embedding (rows, D) f32 replaces
        the embeddings of all rows. -> (T, V), (R, T, V) or (sum of lengths, V) float32, in order.
        """
        requests, shape = _as_requests(ids)
        types = None if token_types is None else _as_requests(token_types)[0]
        if batch_invariant:
            numerics = numerics.but(batch_invariant=True)
        cache = self.new_cache(numerics)
        slots = [self.open(cache) for _ in requests]
        out = self.step(cache, slots, requests, types, embedding, trace)
        return out.reshape((*shape, -1))

    def generate(self, prompt, max_tokens=64, *, temperature=0.0, top_p=1.0, seed=0, **options):
        """Continue `prompt`, text or token ids, and yield the text piece by piece.

        options: those of engine.Engine (numerics, exact, draft, prefix, chunk, ...) and `stop`,
        token ids that end the text (default: the config's eos).
        """
        from .generate import stream_text
        from .sampling import Sampling

        sampling = Sampling(temperature, top_p, seed)
        return stream_text(self, prompt, max_tokens, sampling, **options)

    def to(self, device):
        """The model with its parameters on `device`: "cuda", which needs CuPy (extra cuda13)."""
        if device != "cuda":
            raise ValueError(f'device: expected "cuda", got {device!r}')
        from dsv41_kernels.device import cuda_like, to_cuda

        params = to_cuda(self.params)
        return Model(self.config, params, self.classes, self.directory, cuda_like())

    def ledger(self, context=1_000_000):
        """Parameters, cache bytes and FLOPs of this model at a context length, as a text table."""
        from .ledger_tables import breakdown

        return breakdown(self.config, (context,))

    @cached_property
    def tokenizer(self):
        """The tokenizer of the directory that the model was loaded from."""
        if self.directory is None:
            raise ValueError(
                "tokenizer: this model was not loaded from a directory; pass token ids"
            )
        return load_tokenizer(self.directory)

    def new_cache(self, numerics=OFFICIAL, page_tokens=64):
        """An empty cache for this model; requests are opened in it with `open`."""
        return Cache(self.config, numerics, page_tokens, self.like)

    def open(self, cache):
        """Open a request in `cache` -> its slot."""
        pad = self.classes[self.config.engram_pad_token_id] if self.config.engram_layer_ids else 0
        return cache.add(pad)

    def step(
        self,
        cache,
        slots,
        requests,
        token_types=None,
        embedding=None,
        trace=None,
        *,
        decoder_from=None,
        tails=None,
        features=None,
    ):
        """Feed each request its next tokens: requests[i] (>= 1 ids) to slots[i] -> logits.

        Prefill, chunked prefill, decode and the verification of drafts are all this call.
        decoder_from: per request, the position from which tokens run through the decoder half
        (default: all). tails: per request, for how many of its last decoded tokens logits are
        wanted (default: all). -> (rows, V) f32, requests in order. features: a list that gets
        the drafter's inputs, one (decoded rows, D) array per target layer.
        """
        requests = [self.check_ids(r) for r in requests]
        types = _checked_types(token_types, requests)
        embedding = _checked_embedding(embedding, sum(map(len, requests)), self.config)
        starts = _checked_starts(cache, slots, requests)
        batch = make_batch(requests, starts, slots, types)
        try:
            in_decoder = cache.begin(batch, decoder_from)
            memory = engram_rows(self.config, self.classes, batch, cache)
            watch = {"trace": trace, "features": features}
            call = Call(batch, cache, self.config, cache.numerics, memory, **watch)
            with errors_at_end():
                logits = forward(self.params, call, embedding, in_decoder, _tail_rows(batch, tails))
        except BaseException:
            cache.broken.update(slots)  # rings and carries have moved on, lengths have not
            raise
        cache.advance(batch)
        return logits

    def check_ids(self, ids):
        """ids of one request -> (T,) int64; ValueError when empty, not integer or out of range."""
        ids, size = np.asarray(ids), self.config.vocab_size
        if self.classes is not None:
            size = min(size, len(self.classes))  # an id without a class has no place in Engram
        if ids.ndim != 1 or ids.size == 0:
            raise ValueError(f"ids: a request needs at least one token id, got shape {ids.shape}")
        if not np.issubdtype(ids.dtype, np.integer):
            raise ValueError(f"ids: expected integers, got {ids.dtype}")
        wrong = (ids < 0) | (ids >= size)
        if wrong.any():
            at = int(np.argmax(wrong))
            raise ValueError(f"ids: {ids[at]} at {at} is outside 0 .. {size - 1}")
        return ids.astype(np.int64)


def _tail_rows(batch, tails):
    """(T,) bool: the last tails[i] rows of request i; None for all."""
    if tails is None:
        return None
    ends = (batch.starts + batch.lengths[batch.order]) - batch.positions  # 1 for the last row
    return ends <= np.asarray(tails)[batch.order]


def load(directory, **options):
    """Open a checkpoint directory in the released layout -> Model.

    options: those of checkpoint.load_params; `parts` defaults to the text model and its drafter.
    """
    checkpoint = Checkpoint(directory)
    drafts = ("dspark",) if checkpoint.config.num_nextn_predict_layers else ()
    params = load_params(checkpoint, **{"parts": ("text", *drafts), **options})
    classes = None
    if checkpoint.config.engram_layer_ids:
        classes = load_token_classes(directory)
    return Model(checkpoint.config, params, classes, directory)


# ---- what a caller may pass ------------------------------------------------------------------


def _as_requests(ids):
    """ids as the docstring of `Model.logits` allows -> list of 1-D sequences, leading shape."""
    if isinstance(ids, list | tuple) and len(ids) and np.ndim(ids[0]) == 1:
        return list(ids), (sum(len(request) for request in ids),)
    ids = np.asarray(ids)
    if ids.ndim not in (1, 2):
        raise ValueError(f"ids: expected one or two axes of token ids, got shape {ids.shape}")
    return ([ids] if ids.ndim == 1 else list(ids)), ids.shape


def _checked_starts(cache, slots, requests):
    if len(slots) != len(requests) or len(set(slots)) != len(slots) or not requests:
        raise ValueError(
            f"slots: expected one distinct slot per request, got {list(slots)} "
            f"for {len(requests)} requests"
        )
    limit = cache.config.max_position_embeddings
    for slot, request in zip(slots, requests, strict=True):
        cache.require_open(slot)
        if cache.length[slot] + len(request) > limit:
            raise ValueError(
                f"ids: {cache.length[slot]} tokens and {len(request)} more exceed "
                f"max_position_embeddings {limit}"
            )
    return [cache.length[slot] for slot in slots]


def _checked_types(types, requests):
    if types is None:
        return None
    types = [np.asarray(t) for t in types]
    if [t.shape for t in types] != [r.shape for r in requests]:
        raise ValueError("token_types: expected the same lengths as ids")
    return types


def _checked_embedding(embedding, tokens, config):
    shape = (tokens, config.hidden_size)
    if embedding is not None and np.shape(embedding) != shape:
        raise ValueError(f"embedding: expected shape {shape}, got {np.shape(embedding)}")
    return embedding


def _checked_classes(config, classes):
    if not config.engram_layer_ids:
        return None
    if classes is None:
        raise ValueError("classes: a model with Engram needs the class of every token id")
    table_primes(config)  # refuses row counts that the hash does not address
    classes = np.asarray(classes, np.int64)
    count = config.engram_compressed_vocab_size
    in_range = classes.ndim == 1 and classes.size and 0 <= classes.min() <= classes.max() < count
    if not in_range or len(classes) > config.vocab_size:
        raise ValueError(
            f"classes: expected up to {config.vocab_size} ids in "
            f"{config.engram_compressed_vocab_size} classes, "
            f"got shape {classes.shape} from {classes.min(initial=0)} to {classes.max(initial=0)}"
        )
    return classes
