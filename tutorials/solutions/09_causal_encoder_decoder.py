# %% [markdown]
# # Solutions to 09 · The causal encoder–decoder
#
# The exercise cells of the chapter, filled. They run on what the chapter defines before them:
# paste one over its blank.

# %% [markdown]
# **1.** Both halves have 20 layers, so they cancel. A prompt shorter than the window is its own
# tail, and nothing is saved.


# %% tags=["exercise"]
def layers_run(n):
    """n tokens -> float"""
    return (20 * n + 20 * min(n, 128)) / (40 * n)


check("09.layers_run", layers_run)

# %% [markdown]
# **2.** The last window, but never a token that has run already, and never one before the prompt.


# %% tags=["exercise"]
def first_decoded(total, start, window):
    """tokens in all, first new token, window -> int"""
    return max(start, total - window, 0)


check("09.first_decoded", first_decoded)

# %% [markdown]
# **3.** The window's own edge, or the start of the replay, whichever is later. The query's own key
# belongs to it.


# %% tags=["exercise"]
def window_keys(i, s, window):
    """query, start of the replay, window -> (up to window,) int"""
    return np.arange(max(s, i - window + 1), i + 1)


check("09.window_keys", window_keys)
