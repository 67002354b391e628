# %% [markdown]
# # Solutions to 01 · Number formats
#
# The exercise cells of the chapter, filled. They run on what the chapter defines before them:
# paste one over its blank.

# %% [markdown]
# **1.** The equation as it stands. Only the topmost exponent is special.


# %% tags=["exercise"]
def e5m2(code):
    """code 0..255 -> float"""
    E, M = (code >> 2) % 32, code % 4
    if E == 31:
        return np.nan if M else (-1) ** (code >> 7) * np.inf
    return (-1) ** (code >> 7) * 2.0 ** (max(E, 1) - 15) * ((E > 0) + M / 4)


check("01.e5m2", e5m2)

# %% [markdown]
# **2.** The exponent field is already biased by 127, as E8M0 is. One more if any mantissa bit is
# set.


# %% tags=["exercise"]
def scale_byte(block):
    """block (32,) f32, not all zero -> int, the byte E that means 2^(E - 127)"""
    top = np.abs(block).max() * np.float32(1 / 6)  # as the released kernel does it
    bits = int(top.view(np.uint32))
    return (bits >> 23) + ((bits & 0x7FFFFF) != 0)


check("01.scale_byte", scale_byte)

# %% [markdown]
# **3.** Unpack with the low nibble first, look the codes up, repeat each scale over its 32
# channels.


# %% tags=["exercise"]
def read_key(record):
    """record (68,) uint8 -> (128,) f32"""
    scales = np.exp2(record[64:].astype(np.float32) - 127)
    return e2m1[unpack(record[:64])] * scales.repeat(32)


check("01.read_key", read_key)
