# %% [markdown]
# # Solutions to 19 · Training the miniature
#
# The exercise cells of the chapter, filled. They run on what the chapter defines before them:
# paste one over its blank.

# %% [markdown]
# **1.** Subtract the largest logit, or `exp` overflows. Nats become bits by ln 2.


# %% tags=["exercise"]
def text_bits(logits, targets, eos, text_bytes):
    """logits (n, V) f64, targets (n,) int -> float, bits per byte; eos is not text"""
    z = logits - logits.max(axis=1, keepdims=True)
    nats = np.log(np.exp(z).sum(axis=1)) - z[np.arange(len(targets)), targets]
    return nats[targets != eos].sum() / np.log(2) / text_bytes


check("19.text_bits", text_bits)

# %% [markdown]
# **2.** A target needs a next token in the same segment. Padding has segment −1 on both sides of
# such an edge, so it needs a condition of its own.


# %% tags=["exercise"]
def next_tokens(ids, segments):
    """ids, segments (L,) int, segment -1 is padding -> targets (L,) int, -1 where none"""
    targets = np.full(len(ids), -1)
    inside = (segments[1:] == segments[:-1]) & (segments[1:] >= 0)
    targets[:-1][inside] = ids[1:][inside]
    return targets


check("19.next_tokens", next_tokens)

# %% [markdown]
# **3.** A mean times its count is a sum. Sums add up.


# %% tags=["exercise"]
def whole_gradient(grads, counts):
    """grads (m, n) f64, each the mean over the counts (m,) tokens of a pass -> (n,)"""
    return counts @ grads / counts.sum()


check("19.whole_gradient", whole_gradient)
