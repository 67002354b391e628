# %% [markdown]
# # Solutions to 13 · The whole model
#
# The exercise cells of the chapter, filled. They run on what the chapter defines before them:
# paste one over its blank.

# %% [markdown]
# **1.** The loops of the chapter, with a token axis. The eps keeps a token of zeros at zero
# instead of 0/0.


# %% tags=["exercise"]
def to_logits(streams, pre, weight, head):
    """streams (T, S, D), pre (T, S), weight (D,), head (V, D), all f32 -> (T, V) f32"""
    x = (pre[:, None, :] @ streams)[:, 0]
    x = x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + np.float32(eps)) * weight
    return x @ head.T


check("13.to_logits", to_logits)

# %% [markdown]
# **2.** Ask what agrees, not what departs: a comparison with NaN is False, so NaN never agrees.
# Equal values come first, because −inf − (−inf) is NaN.


# %% tags=["exercise"]
def first_departure(ours, theirs, limit):
    """ours, theirs (layers, T, N) f32 -> int"""
    with np.errstate(invalid="ignore"):
        agree = (ours == theirs) | (np.abs(ours - theirs) <= limit)
    wrong = ~agree.all(axis=(1, 2))
    return int(np.argmax(wrong)) if wrong.any() else -1


check("13.first_departure", first_departure)

# %% [markdown]
# **3.** Sign and magnitude are stored apart, so one less in the upper half is one step closer to
# zero for either sign. It also crosses a power of two, where the step halves.


# %% tags=["exercise"]
def step_closer(x):
    """x (N,) f32, all bf16 values -> (N,) f32, their neighbours toward zero in bf16"""
    return (x.view(np.uint32) - np.uint32(1 << 16)).view(np.float32)


check("13.step_closer", step_closer)
