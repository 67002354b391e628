# %% [markdown]
# # Solutions to 10 · Hyper-connections
#
# The exercise cells of the chapter, filled. They run on what the chapter defines before them:
# paste one over its blank.

# %% [markdown]
# **1.** One mean over all $4 D$ numbers. eps is added to pre only, after the sigmoid; the factor 2
# belongs to post only.


# %% tags=["exercise"]
def pre_post(streams, fn, base, scale):
    """streams (4, D), fn (24, 4 D), base (24,), scale (3,), all f32 -> (2, 4): pre, post"""
    v = streams.reshape(-1)  # stream 0 first
    u = fn[:8] @ v / np.sqrt(np.mean(v * v))
    pre = sigmoid(scale[0] * u[:4] + base[:4]) + np.float32(1e-6)
    return np.stack([pre, 2 * sigmoid(scale[1] * u[4:] + base[4:8])])


check("10.pre_post", pre_post)

# %% [markdown]
# **2.** Collapse first, with the A that is carried. Then take over the new A, for the next sublayer
# or for the head.


# %% tags=["exercise"]
def head_input(embedding, pres, posts, combs):
    """embedding (D,), pres (L, 4), posts (L, 4), combs (L, 4, 4) [from, to] -> (D,)"""
    streams = np.repeat(embedding[None], 4, axis=0)  # (4, D)
    pre = np.float32([1, 0, 0, 0])
    for next_pre, post, comb in zip(pres, posts, combs, strict=True):
        y = (pre @ streams)[::-1]
        streams = post[:, None] * y + comb.T @ streams
        pre = next_pre
    return pre @ streams


check("10.head_input", head_input)
