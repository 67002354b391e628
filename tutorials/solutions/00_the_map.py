# %% [markdown]
# # Solutions to 00 · The map
#
# The exercise cells of the chapter, filled. They run on what the chapter defines before them:
# paste one over its blank.

# %% [markdown]
# **1.** The window and the entries may overlap: an entry can stand for tokens that are still near.


# %% tags=["exercise"]
def tokens_read(t, window, entries, m):
    """t, window, m int, entries (K,) int -> ascending positions, int array"""
    near = np.arange(max(0, t - window + 1), t + 1)
    far = [entry * m + i for entry in entries if entry >= 0 for i in range(m)]
    return np.unique([*near, *far])


check("00.tokens_read", tokens_read)

# %% [markdown]
# **2.** The router looks at all experts, so it counts in full. Of the experts only those that run
# count, the shared one among them.


# %% tags=["exercise"]
def multiplied(hidden, width, experts, active):
    """sizes of the vector and of an expert's inside, how many experts, how many chosen -> int"""
    return experts * hidden + (active + 1) * 3 * hidden * width


check("00.multiplied", multiplied)

# %% [markdown]
# **3.** `side="right"` skips sums that are equal to $u$. So $u = 0$ never picks a token with
# probability 0.


# %% tags=["exercise"]
def next_token(logits, temperature, u):
    """logits (V,) f64 -> int"""
    if temperature == 0:
        return int(np.argmax(logits))
    weight = np.exp((logits - logits.max()) / temperature)
    return int(np.searchsorted(np.cumsum(weight / weight.sum()), u, side="right"))


check("00.next_token", next_token)
