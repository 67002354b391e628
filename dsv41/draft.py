"""How can one cheap pass propose the next five tokens? (DSpark's drafter)

The main model's streams, averaged at the inputs of its last three layers, say what it is about to
do:

    ctx_p = RMSNorm( main_proj [f_37 | f_38 | f_39]_p )        for every committed position p

Three window-only blocks (parameters mtp.0 .. mtp.2) turn ctx into window KV, one ring per block,
without queries. A draft is one pass of these blocks over [anchor, noise, noise, ..] at positions
L, L+1, ..; the anchor is the newest token, which the main model has not processed yet. All of
these positions share one key set: the ring (the W positions before L) and the block itself, in
both directions. Then

    z_k = head RMSNorm(h_k) + W2 W1[prev]      the Markov head knows the token before it
    c_k = w . [h_k | W1[prev]]                 logit of "d_k is accepted if all before it are"

and d_k is drawn from z_k, left to right. Slot k predicts the token at position L + 1 + k. Source:
report, section 2.4.3; the DSpark paper (arXiv 2607.05147); inference/model.py. Left out:
temperatures for c, which the release does not ship.
"""

from dataclasses import dataclass

import numpy as np

from .ced import sublayers
from .mhc import hc_collapse, initial_streams
from .moe import moe_experts, route
from .ops import linear_fp8, matmul_rows, rmsnorm, rows, sigmoid
from .plan import Layer
from .projections import grouped_output, low_rank_queries
from .rope import frequencies
from .sparse_attn import rope_sparse_attn
from .window import window_kv


@dataclass(frozen=True)
class Draft:
    """Proposals for one request: tokens (B,), their distributions' logits (B, V), survival (B,)."""

    tokens: np.ndarray
    logits: np.ndarray
    confidence: np.ndarray  # logits of acceptance, given that all before were accepted

    @property
    def survival(self):
        """(B,) probability that the draft is accepted up to and including each token."""
        return np.cumprod(sigmoid(self.confidence))


class Drafter:
    """DSpark's blocks and the window rings of the requests of one cache."""

    def __init__(self, model, cache):
        config = model.config
        if "mtp" not in model.params:
            raise ValueError('draft: the model was loaded without its drafter, parts=("dspark",)')
        if config.dspark_block_size >= config.sliding_window:
            raise ValueError(
                f"dspark_block_size: {config.dspark_block_size} drafts and their anchor do not fit "
                f"into a window of {config.sliding_window}"
            )
        self.model, self.cache, self.config = model, cache, config
        self.stages = [model.params["mtp"][n] for n in range(config.num_nextn_predict_layers)]
        self.rings = [{} for _ in self.stages]  # per stage, slot -> (W, Z)
        self.first = {}  # slot -> first position whose features exist

    def observe(self, slot, positions, features):
        """Commit positions (t,) ascending with their features (t, layers * D) to the rings."""
        p, config, numerics = self.stages[0], self.config, self.cache.numerics
        context = linear_fp8(features, p["main_proj"]["weight"], numerics)
        context = rmsnorm(context, p["main_norm"]["weight"], config.rms_norm_eps, numerics)
        freqs, width = frequencies(config, 0), config.sliding_window
        recent = positions >= positions[-1] + 1 - width
        for ring, stage in zip(self.rings, self.stages, strict=True):
            kv = window_kv(context, stage["attn"], positions, freqs, config, numerics)
            rows_of = ring.setdefault(
                slot, numerics.window_kv.new_records((width,), config.head_dim)
            )
            rows_of[positions[recent] % width] = kv[recent]
        self.first.setdefault(slot, int(positions[0]))

    def forget(self, slot):
        """The request has ended, or its features were lost: start anew with the next `observe`."""
        self.first.pop(slot, None)
        for ring in self.rings:
            ring.pop(slot, None)

    def take(self, slot):
        """The request's rings, for `give` when it comes back in another slot, or None."""
        if slot not in self.first:
            return None
        return self.first[slot], [ring[slot] for ring in self.rings]

    def give(self, slot, saved):
        """Put back what `take` returned."""
        self.first[slot] = saved[0]
        for ring, rows_of in zip(self.rings, saved[1], strict=True):
            ring[slot] = rows_of

    def hidden(self, slots, anchors, trace=None):
        """One pass over the blocks of all requests -> h (R, B, D) f32 before the norm."""
        config, numerics, size = self.config, self.cache.numerics, self.config.dspark_block_size
        ids = np.full((len(slots), size), config.dspark_noise_token_id)
        ids[:, 0] = anchors
        starts = np.array([self.cache.length[slot] for slot in slots])
        positions = (starts[:, None] + np.arange(size)).ravel()
        embedding = numerics.store(rows(self.model.params["embed"]["weight"], ids.ravel()))
        streams, pre = initial_streams(embedding, config.hc_mult)
        pass_ = _Pass(self, slots, positions, trace)
        for stage, p in enumerate(self.stages):
            layer = Layer(stage, 0, "swa", None, None, None, None, "draft")
            functions = pass_.attention, pass_.moe
            streams, pre, _ = sublayers(streams, pre, functions, p, layer, pass_)
        return hc_collapse(streams, pre, numerics).reshape(len(slots), size, -1)

    def base_logits(self, hidden):
        """h (T, D) -> logits (T, V) before the Markov bias; the head is the main model's."""
        norm = self.stages[-1]["norm"]["weight"]
        x = rmsnorm(hidden, norm, self.config.rms_norm_eps, self.cache.numerics)
        return matmul_rows(x, self.model.params["head"]["weight"], self.cache.numerics)

    def propose(self, slots, anchors, choose):
        """Draft for several requests at once -> list of Draft.

        anchors: the newest token of each; choose(i, logits (V,)) -> token id for request i.
        """
        hidden = self.hidden(slots, anchors)
        base = self.base_logits(hidden.reshape(-1, hidden.shape[-1])).reshape(*hidden.shape[:2], -1)
        return [
            self._chain(anchor, hidden[i], base[i], lambda z, i=i: choose(i, z))
            for i, anchor in enumerate(anchors)
        ]

    def _chain(self, anchor, hidden, base, choose):
        """The Markov head, left to right: hidden (B, D), base (B, V) -> Draft."""
        head, numerics = self.stages[-1], self.cache.numerics
        embed, out = (head["markov_head"][name]["weight"] for name in ("embed", "head"))
        judge = head.get("confidence_head")  # without one, every draft counts as sure
        logits, confidence, tokens, before = [], [], [], anchor
        for h, u in zip(hidden, base, strict=True):
            e = rows(embed, np.array([before]))
            z = u + matmul_rows(e, out, numerics)[0]
            both = np.concatenate([h[None], e], axis=1)
            c = matmul_rows(both, judge["proj"]["weight"], numerics)[0, 0] if judge else np.inf
            before = choose(z)
            logits.append(z)
            confidence.append(c)
            tokens.append(before)
        return Draft(np.array(tokens), np.stack(logits), np.array(confidence, np.float32))


class _Pass:
    """One draft pass, in the shape that `ced.sublayer` expects of a call."""

    def __init__(self, drafter, slots, positions, trace):
        self.drafter, self.slots, self.positions, self.trace = drafter, slots, positions, trace
        self.config, self.numerics = drafter.config, drafter.cache.numerics
        self.size = self.config.dspark_block_size

    def attention(self, x, p, layer, _):
        """Every row of a block reads the ring before the block, and the whole block."""
        config, numerics, stage = self.config, self.numerics, layer.index
        freqs = frequencies(config, 0)
        _, q = low_rank_queries(x, p, config, numerics)
        own = window_kv(x, p, self.positions, freqs, config, numerics)
        rings = [self.drafter.rings[stage][slot] for slot in self.slots]
        window = np.concatenate([*rings, own])
        nothing = self.drafter.cache.no_records(len(x))
        o = rope_sparse_attn(
            q, self.positions, freqs, window, self.key_rows(), *nothing, p["attn_sink"], numerics
        )
        return grouped_output(o, p, config, numerics)

    def key_rows(self):
        """(R * B, W + B) rows of [rings | blocks]; the lower edge does not slide within a block."""
        width, count, size = self.config.sliding_window, len(self.slots), self.size
        starts = self.positions[::size]
        firsts = np.array([self.drafter.first[slot] for slot in self.slots])
        before = starts[:, None] + np.arange(-width, 0)  # (R, W)
        request = np.arange(count)[:, None]
        ring = np.where(before >= firsts[:, None], request * width + before % width, -1)
        block = count * width + request * size + np.arange(size)
        return np.repeat(np.concatenate([ring, block], axis=1), size, axis=0)

    def moe(self, x, p, layer, _):
        """The draft's smaller MoE; drafts count as text."""
        config, text = self.config, np.zeros(len(x), bool, like=x)
        chosen, weight, _ = route(
            x,
            p["gate"],
            text,
            config.dspark_num_experts_per_tok,
            config.routed_scaling_factor,
            config.norm_topk_prob,
            self.numerics,
        )
        return moe_experts(x, p, chosen, weight, config.swiglu_limit, self.numerics)
