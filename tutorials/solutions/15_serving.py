# %% [markdown]
# # Solutions to 15 · Serving
#
# The exercise cells of the chapter, filled. They run on what the chapter defines before them:
# paste one over its blank.

# %% [markdown]
# **1.** The new tokens always run. In front of them stands what the windows need, and never more
# than the hit itself.


# %% tags=["exercise"]
def tokens_run(strategy, total, hit, period):
    """strategy str; total, hit, period int, period <= hit < total -> int"""
    again = {"bounded": 128, "zero": 128 * 40, "periodic": hit % period, "full": 0}[strategy]
    return total - hit + min(hit, again)


check("15.tokens_run", tokens_run)

# %% [markdown]
# **2.** Count equal tokens from the front, but not the prompt's last one. Then cut to whole blocks.


# %% tags=["exercise"]
def usable(prompt, earlier, block):
    """prompt (T,), earlier (N,) lists of ids, block int -> int, tokens of the prompt"""
    count = 0
    while count < min(len(prompt) - 1, len(earlier)) and prompt[count] == earlier[count]:
        count += 1
    return count // block * block


check("15.usable", usable)

# %% [markdown]
# **3.** A page holds 8 / ratio entries. The quotient picks the page, the rest the place in it.


# %% tags=["exercise"]
def pool_row(pages, entry, ratio):
    """pages: the request's page numbers in order; entry, ratio int -> int, row of the pool"""
    per_page = 8 // ratio
    return -1 if entry < 0 else pages[entry // per_page] * per_page + entry % per_page


check("15.pool_row", pool_row)
