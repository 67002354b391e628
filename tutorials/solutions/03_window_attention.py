# %% [markdown]
# # Solutions to 03 · Window attention with a sink and one shared latent
#
# The exercise cells of the chapter, filled. They run on what the chapter defines before them:
# paste one over its blank.

# %% [markdown]
# **1.** Row `r` lies some steps before the row of the newest token, around the ring. If that
# leads before the first token, the row is not written yet.


# %% tags=["exercise"]
def token_in(r, n, width):
    """row r of a ring of `width`, n tokens written -> int, a position, or -1"""
    newest = n - 1
    return max(newest - (newest - r) % width, -1)


check("03.token_in", token_in)

# %% [markdown]
# **2.** The same list as in `window_rows`, each position modulo the width. The mask comes last:
# −1 modulo the width is a row that exists.


# %% tags=["exercise"]
def decode_rows(t, width):
    """t int, width int -> (width,) int, rows of the ring"""
    positions = max(t - width + 1, 0) + np.arange(width)
    return np.where(positions <= t, positions % width, -1)


check("03.decode_rows", decode_rows)

# %% [markdown]
# **3.** The old denominator is $e^L$, the new one $e^L + e^{\mathrm{sink}}$. Their quotient stays
# a difference of logarithms until the end, so nothing overflows.


# %% tags=["exercise"]
def add_sink(o, L, sink):
    """o (H, C) f64 without sink, L (H,) f64, sink (H,) f64 -> (H, C) f64 with it"""
    return o * np.exp(L - np.logaddexp(L, sink))[:, None]


check("03.add_sink", add_sink)
