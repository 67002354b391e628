# %% [markdown]
# # Solutions to 22 · Tensor cores
#
# The exercise cells of the chapter, filled. They run on what the chapter defines before them:
# paste one over its blank.

# %% [markdown]
# **1.** Eight rows and four pairs of columns are 32 lanes. The lower eight rows are the same lanes
# again, two registers further on.


# %% tags=["exercise"]
def holder(row, column):
    """row 0 .. 15, column 0 .. 7 -> (lane, register)"""
    return 4 * (row % 8) + column // 2, row // 8 * 2 + column % 2


check("22.holder", holder)

# %% [markdown]
# **2.** What `place_e4m3` does to two codes at a time.


# %% tags=["exercise"]
def placed(code):
    """code 0 .. 255 int -> int, 16 bits"""
    return (code & 0x80) << 8 | (code & 0x7F) << 4


check("22.placed", placed)

# %% [markdown]
# **3.** With such numbers "the k best" are the k largest, and a tie cannot happen. It costs eight
# rounds of counting instead of four, so the kernels use it only where few candidates are left.


# %% tags=["exercise"]
def choice(key, entry):
    """key int, 32 bits; entry int, below 2^32 -> int, 64 bits"""
    return key << 32 | 0xFFFFFFFF - entry


check("22.choice", choice)
