# %% [markdown]
# # Solutions to 20 · A first Numba CUDA kernel
#
# The exercise cells of the chapter, filled. They run on what the chapter defines before them:
# paste one over its blank.

# %% [markdown]
# **1.** A lane touches the sectors from its first byte to its last. A set counts each once.


# %% tags=["exercise"]
def sectors(first, stride, size):
    """-> int"""
    starts = [first + stride * t for t in range(32)]
    return len({at // 32 for start in starts for at in range(start, start + size)})


check("20.sectors", sectors)

# %% [markdown]
# **2.** The multiples of `pitch` modulo 32 repeat after $32 / \gcd(\mathrm{pitch}, 32)$ lanes, so
# that many lanes share the work and the divisor is the answer. An odd pitch has no conflict: that
# is why tiles are padded by one word.


# %% tags=["exercise"]
def column_rounds(pitch):
    """pitch: words from row to row -> int, rounds of the request"""
    return int(np.gcd(pitch, 32))


check("20.column_rounds", column_rounds)

# %% [markdown]
# **3.** A byte holds channels $2b$ and $2b + 1$, both of group $b / 8$. The product of a size and a
# scale is exact.


# %% tags=["exercise"]
def unpack(records):
    """records (rows, 288) uint8 -> (rows, 512) f32: out is filled by a kernel, then returned"""
    out = np.zeros((len(records), 512), np.float32)
    sizes = tuple(np.float32(SIZES))

    @cuda.jit
    def two_numbers(records, out):
        i = cuda.grid(1)
        if i >= 256 * len(records):
            return
        row, b = i // 256, i % 256
        scale = e4m3_value(np.uint32(records[row, 256 + b // 8]))
        for j in range(2):
            code = (np.uint32(records[row, b]) >> np.uint32(4 * j)) & np.uint32(15)
            size = sizes[code & np.uint32(7)] * scale
            out[row, 2 * b + j] = -size if code > np.uint32(7) else size

    two_numbers[2 * len(records), 128](records, out)
    return out


check("20.unpack", unpack)
