# %% [markdown]
# # Solutions to 14 · The KV cache
#
# The exercise cells of the chapter, filled. They run on what the chapter defines before them:
# paste one over its blank.

# %% [markdown]
# **1.** Only KV sources own records, and each of them owns a key as well. The index sources do not
# enter.


# %% tags=["exercise"]
def plan_bytes(ratios, kv_sources, index_sources):
    """list of m by layer, list, list -> float, bytes per token"""
    return sum((MAIN + KEY) / ratios[s] for s in kv_sources)


check("14.plan_bytes", plan_bytes)

# %% [markdown]
# **2.** Pages are whole: round up. A page holds 890 bytes for each of its tokens, used or not.


# %% tags=["exercise"]
def request_bytes(n, page_tokens):
    """n >= 1 tokens, even page size -> int"""
    pages = -(-n // page_tokens)
    return fixed + 890 * page_tokens * pages


check("14.request_bytes", request_bytes)

# %% [markdown]
# **3.** Totals lie on a line, shares per token do not. Multiply first, then fit.


# %% tags=["exercise"]
def fixed_and_slope(lengths, per_token):
    """lengths (N,), reported bytes per token (N,) -> [fixed bytes, bytes of one more token]"""
    slope, constant = np.polyfit(lengths, lengths * per_token, 1)
    return [constant, slope]


check("14.fixed_and_slope", fixed_and_slope)
