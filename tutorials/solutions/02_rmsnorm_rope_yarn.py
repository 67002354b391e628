# %% [markdown]
# # Solutions to 02 · RMSNorm, RoPE, YaRN, inverse rotation
#
# The exercise cells of the chapter, filled. They run on what the chapter defines before them:
# paste one over its blank.

# %% [markdown]
# **1.** Only the distance counts, so the query takes all of it and the key stays where it is. The
# distance may be negative.


# %% tags=["exercise"]
def one_turn(q, k, t, s, freqs):
    """q, k (64,) f32, t and s int, freqs (32,) f32 -> float, the dot product after turning"""
    return float(rotate(q[None], np.array([t - s]), freqs)[0] @ k)


check("02.one_turn", one_turn)

# %% [markdown]
# **2.** A negated position negates the angle and nothing else: float32 rounds both signs alike. All
# heads of a token share its position.


# %% tags=["exercise"]
def turned_back(o, t, freqs):
    """o (H, C) f32, one token's heads; t int; freqs (U,) f32 -> (H, C) f32"""
    return rotate(o[None], np.array([-t]), freqs)[0]


check("02.turned_back", turned_back)

# %% [markdown]
# **3.** The even channels are the real parts and come first, the odd ones are the imaginary parts.
# Applied to queries and keys alike, this changes no dot product.


# %% tags=["exercise"]
def for_halves(x):
    """x (64,) f32, neighbours are pairs -> (64,) f32, channels i and i + 32 are pairs"""
    return np.concatenate([x[0::2], x[1::2]])


check("02.for_halves", for_halves)
