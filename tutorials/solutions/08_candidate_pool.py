# %% [markdown]
# # Solutions to 08 · The candidate pool
#
# The exercise cells of the chapter, filled. They run on what the chapter defines before them:
# paste one over its blank.

# %% [markdown]
# **1.** Only whole blocks are dropped: the one block that may be short is the newest, and it is
# pinned. Subtracting size · budget from the visible entries forgets the gap in it.


# %% tags=["exercise"]
def dropped(visible, size, budget):
    """int, int, int -> int"""
    return size * max(0, -(-visible // size) - budget)


check("08.dropped", dropped)

# %% [markdown]
# **2.** Two padded lists agree in their padding, and counting that flatters the pool in short
# contexts.


# %% tags=["exercise"]
def recall_of(got, want):
    """got (k,) int, want (k,) int, both padded with -1 -> float"""
    wanted = want[want >= 0]
    return np.mean(np.isin(wanted, got)) if len(wanted) else 1.0


check("08.recall_of", recall_of)

# %% [markdown]
# **3.** Floor division maps entry −1 to block −1, and the padding holds a −1 too. So the padding
# of one list finds the padding of the other, unless −1 is ruled out.


# %% tags=["exercise"]
def in_pool(entries, blocks, size):
    """entries (K,) int, -1 among them, blocks (B,) int padded with -1 -> (K,) bool"""
    return (entries >= 0) & np.isin(entries // size, blocks)


check("08.in_pool", in_pool)
