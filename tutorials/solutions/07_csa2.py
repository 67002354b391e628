# %% [markdown]
# # Solutions to 07 · CSA2
#
# The exercise cells of the chapter, filled. They run on what the chapter defines before them:
# paste one over its blank.

# %% [markdown]
# **1.** The chapter's rule. A ratio of 0 comes first: such a layer has no source even when one lies
# before it.


# %% tags=["exercise"]
def two_sources(layer, ratios, kv_sources, index_sources):
    """int, list, list, list -> [KV source, index source]"""
    if ratios[layer] == 0:
        return [-1, -1]
    return [max((s for s in ids if s <= layer), default=-1) for ids in (kv_sources, index_sources)]


check("07.two_sources", two_sources)

# %% [markdown]
# **2.** Only the visibility is new; `choose` does the rest. Scores of invisible entries are there,
# and they may be the best ones.


# %% tags=["exercise"]
def entries_of(scores, position, ratio, k):
    """scores (N,) f32, also of entries that are not visible -> (k,) int, ascending, -1 padded"""
    return choose(scores, (position + 1) // ratio, k)


check("07.entries_of", entries_of)

# %% [markdown]
# **3.** Three Full layers scan half as many entries as tokens, one scans all, and four Reindex
# layers scan at most 2,048 blocks of 8.


# %% tags=["exercise"]
def keys_read(n):
    """n tokens -> int"""
    return 3 * (n // 2) + n + 4 * min(n, 2048 * 8)


check("07.keys_read", keys_read)
