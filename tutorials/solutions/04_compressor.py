# %% [markdown]
# # Solutions to 04 · The compressor
#
# The exercise cells of the chapter, filled. They run on what the chapter defines before them:
# paste one over its blank.

# %% [markdown]
# **1.** The exponent is never positive, so nothing overflows. The smaller gate's token gets the
# smaller weight.


# %% tags=["exercise"]
def pool_pair(u0, u1, g0, g1):
    """all (C,) f32 -> (C,) f32"""
    e = np.exp(-np.abs(g0 - g1))
    winner, loser = np.where(g0 >= g1, u0, u1), np.where(g0 >= g1, u1, u0)
    return (winner + e * loser) / (1 + e)


check("04.pool_pair", pool_pair)

# %% [markdown]
# **2.** A larger gate moves the mix toward its own candidate: weight times distance from the
# mix. In each channel the gradients of a group sum to 0.


# %% tags=["exercise"]
def gate_gradient(d, u, g):
    """d (C,), u, g (m, C), f64 -> (m, C)"""
    a = np.exp(g - g.max(axis=0))
    a /= a.sum(axis=0)
    return a * (u - np.sum(a * u, axis=0)) * d


check("04.gate_gradient", gate_gradient)

# %% [markdown]
# **3.** An open pair has no entry yet. The average is 890 bytes a token, reached at even
# lengths.


# %% tags=["exercise"]
def global_bytes(n):
    """n tokens -> int"""
    return (3 * (n // 2) + n) * (288 + 68)


check("04.global_bytes", global_bytes)
