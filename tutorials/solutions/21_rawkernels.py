# %% [markdown]
# # Solutions to 21 · RawKernels
#
# The exercise cells of the chapter, filled. They run on what the chapter defines before them:
# paste one over its blank.

# %% [markdown]
# **1.** $2(2n + 1)d$ bytes are streams and $y$. The record is $d + d/32$ instead of $2d$: 97,440
# bytes for V4.1, not 102,400.


# %% tags=["exercise"]
def bytes_a_token(n, d, fp8):
    """n streams, width d (a multiple of 32), fp8 bool -> int"""
    return 2 * (2 * n + 1) * d + (d + d // 32 if fp8 else 2 * d)


check("21.bytes_a_token", bytes_a_token)

# %% [markdown]
# **2.** After the first step only 16 different numbers are left, after the second 8. Lane 0 needs
# the lower half of them, and the upper half is what it adds.


# %% tags=["exercise"]
def warp_sum(values):
    """values (32,) f32, a lane each -> f32, the total with the bits of lane 0"""
    while len(values) > 1:
        half = len(values) // 2
        values = values[:half] + values[half:]
    return values[0]


check("21.warp_sum", warp_sum)

# %% [markdown]
# **3.** Four limits, the smallest counts. v3 with its 205 registers runs one block of 256 threads:
# registers decide.


# %% tags=["exercise"]
def blocks_an_sm(registers, threads, shared):
    """registers a thread, threads a block (a multiple of 32), shared bytes a block -> int"""
    a_warp = -(-32 * registers // 256) * 256
    by_registers = 65_536 // (threads // 32 * a_warp)
    return min(by_registers, 2048 // threads, 32, 228 * 1024 // (shared + 1024))


check("21.blocks_an_sm", blocks_an_sm)
