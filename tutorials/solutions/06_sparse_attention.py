# %% [markdown]
# # Solutions to 06 · Sparse attention as a gather
#
# The exercise cells of the chapter, filled. They run on what the chapter defines before them:
# paste one over its blank.

# %% [markdown]
# **1.** `np.maximum` makes every index legal, `np.where` drops what it fetched for a −1.
# Multiplying by the mask would not do: 0 · NaN is NaN.


# %% tags=["exercise"]
def fetch(records, rows):
    """records (N, C) f32, rows (n,) int -> (n, C) f32"""
    return np.where(rows[:, None] >= 0, records[np.maximum(rows, 0)], np.float32(0))


check("06.fetch", fetch)

# %% [markdown]
# **2.** One maximum for everything, the sink included, so that no exponential exceeds 1.


# %% tags=["exercise"]
def one_softmax(near_scores, near_values, far_scores, far_values, sink):
    """scores and values (n,) and (m,) f32, already scaled; sink f32 -> float"""
    s = np.concatenate([near_scores, far_scores])
    top = max(s.max(), sink)
    p = np.exp(s - top)
    return p @ np.concatenate([near_values, far_values]) / (p.sum() + np.exp(sink - top))


check("06.one_softmax", one_softmax)

# %% [markdown]
# **3.** The step between two chunks: scale both parts to the common maximum, then add. An empty
# half is scaled by $e^{-10^{30}} = 0$.


# %% tags=["exercise"]
def merge(M1, Z1, A1, M2, Z2, A2):
    """M, Z floats, A (C,) f64 -> (C,) f64"""
    M = max(M1, M2)
    first, second = np.exp(M1 - M), np.exp(M2 - M)
    return (first * A1 + second * A2) / (first * Z1 + second * Z2)


check("06.merge", merge)
