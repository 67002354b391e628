# %% [markdown]
# # Solutions to 23 · Measuring
#
# The exercise cells of the chapter, filled. They run on what the chapter defines before them:
# paste one over its blank.

# %% [markdown]
# **1.** $2 T N K / r \ge (w N K + 2 T (N + K)) / b$, solved for $T$. The wider the layer, the
# nearer to $w r / 2 b$: 91 tokens for a byte a number. Narrow layers never get there.


# %% tags=["exercise"]
def tokens_to_ridge(rows, columns, weight_bytes, rate, bandwidth):
    """rows N, columns K, rate in operations/s, bandwidth in bytes/s -> int, or -1 for never"""
    a_token = 2 * rows * columns / rate - 2 * (rows + columns) / bandwidth
    if a_token <= 0:
        return -1
    return int(np.ceil(rows * columns * weight_bytes / bandwidth / a_token))


check("23.tokens_to_ridge", tokens_to_ridge)

# %% [markdown]
# **2.** Waves times SMs is what could have run.


# %% tags=["exercise"]
def used_share(blocks, sms):
    """blocks, sms int, at least 1 -> float, 0 .. 1"""
    waves = -(-blocks // sms)
    return blocks / (waves * sms)


check("23.used_share", used_share)

# %% [markdown]
# **3.** One block too many, and everything misses every time. That is why the orange line of the
# chapter jumps.


# %% tags=["exercise"]
def missed(blocks, capacity, rounds):
    """blocks, capacity, rounds int, at least 1 -> int"""
    return blocks if blocks <= capacity else blocks * rounds


check("23.missed", missed)
