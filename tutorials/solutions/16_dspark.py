# %% [markdown]
# # Solutions to 16 · DSpark
#
# The exercise cells of the chapter, filled. They run on what the chapter defines before them:
# paste one over its blank.

# %% [markdown]
# **1.** The draft is given, so its own chance does not enter. When it is kept for sure, there is
# nothing to normalise.


# %% tags=["exercise"]
def comes_out(p, q, d):
    """p (V,), q (V,) f64 with q[d] > 0, d int -> (V,) f64"""
    kept = min(1.0, p[d] / q[d])
    law = kept * np.eye(len(p))[d]
    if kept < 1:
        rest = np.maximum(p - q, 0)
        law += (1 - kept) * rest / rest.sum()
    return law


check("16.comes_out", comes_out)

# %% [markdown]
# **2.** The first draft that does not raise the rate ends it, whatever comes behind.


# %% tags=["exercise"]
def how_many(survival, steps):
    """survival (B,) non-increasing, steps (B + 1,) -> int"""
    tau, best = 1.0, steps[0]
    for n, a in enumerate(survival):
        tau += a
        if tau * steps[n + 1] <= best:
            return n
        best = tau * steps[n + 1]
    return len(survival)


check("16.how_many", how_many)

# %% [markdown]
# **3.** One range: the ring ends where the block begins. Only the lower edge can be cut.


# %% tags=["exercise"]
def keys_of(length, first, window, block):
    """four ints -> (at most window + block,) int, ascending"""
    return np.arange(max(first, length - window), length + block)


check("16.keys_of", keys_of)
