# %% [markdown]
# # 20 · A first Numba CUDA kernel: FP4 packing
#
# **How does one line of NumPy become a million threads, and what does it take to be limited by
# memory only?**
#
# Every token leaves a record of 288 bytes in the main KV cache: 512 numbers in FP4, 16 of them
# sharing a scale. This chapter packs such records on a GPU, in Python. It begins with one thread,
# goes to one thread for 16 numbers, and then looks at what the memory gets to see.
#
# You need [chapter 01](01_number_formats.ipynb). 30 minutes. Three exercises at the end.
#
# Install, in a checkout: `pip install -e ".[notebooks,simulator]"`. Then open this page in Jupyter,
# or run `python tutorials/20_first_numba_kernel.py`.
#
# **No GPU is needed, and none is used.** All kernels of this page run in Numba's simulator, where
# a GPU thread is a Python thread. It shows what a kernel computes and which bytes it asks for. It
# says nothing about time. Times come from files in `kernels/results`, measured on the GPU that
# they name.
#
# Sources: the CUDA C++ Programming Guide, chapters "Programming Model" and "Performance
# Guidelines", for warps, sectors and banks; Numba's CUDA manual. The modules that this page
# arrives at: [quant.fp4_pack](../dsv41/quant.py#fp4_pack), the definition, and
# [numba_records.py](../kernels/dsv41_kernels/numba_records.py), the kernels.

# %%
import os

os.environ["NUMBA_ENABLE_CUDASIM"] = "1"  # read when numba is imported: simulate, GPU or not

import threading
import warnings

import numpy as np

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # numba-cuda's own, from NumPy 2.5 on
    import numba
    from numba import cuda

from lib.measured import report
from lib.page import BLUE, FAINT, GREY, ORANGE, check, close, figure, same, versions

versions("matplotlib", "numba", "numba-cuda")
assert numba.config.ENABLE_CUDASIM, "this page runs in the simulator"

# %% [markdown]
# ## The work, by hand
#
# Sixteen neighbours $x_i$ become 8 bytes of codes and one byte of scale:
#
# $$s = \mathrm{E4M3}(\max|x_i| / 6), \qquad c_i = \mathrm{E2M1}(x_i / s)$$
#
# E2M1 has eight sizes: 0, ½, 1, 1½, 2, 3, 4, 6. The nearest one wins, a tie goes to the even code.
# Two codes share a byte, the even channel in the low half.

# %%
from dsv41.formats import E2M1, E4M3, decode_bf16, encode_bf16, round_bf16
from dsv41.quant import INDEX_FP4, MAIN_KV_FP4, fp4_pack

SIZES = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
x = [0, 1, 2.4, 3, 4, 5, 8, 12, -0.0, -1, -2, -3.4, -5, -6, -9, -11]

s = float(E4M3.decode(E4M3.encode(np.float32([max(abs(v) for v in x) / 6])))[0])
codes = []
for v in x:
    distances = [abs(abs(v) / s - size) for size in SIZES]
    near = [k for k in range(8) if distances[k] == min(distances)]  # two of them in a tie
    codes.append(next(k for k in near if len(near) == 1 or k % 2 == 0) + 8 * (str(v)[0] == "-"))
by_hand = [codes[i] | codes[i + 1] << 4 for i in range(0, 16, 2)]
by_hand.append(int(E4M3.encode(np.float32([s]))[0]))
print("scale", s, "  codes", codes)
print("bytes", " ".join(f"{byte:02x}" for byte in by_hand))
defined = fp4_pack(np.float32([x]), MAIN_KV_FP4)[0]
same("a group by hand = the definition", np.uint8(by_hand), defined)
assert codes[5] == 4 and codes[12] == 12, "5 / 2 is a tie between 2 and 3: the even code, 2"

# %% [markdown]
# ## A kernel is what one thread does
#
# A kernel is a function without a return value that *many* threads run. Each asks for its number,
# takes its share of the work, and stores it. A launch names the number of blocks and of threads in
# a block. Thread $t$ of block $b$ has number $b \cdot \text{threads} + t$, which is `cuda.grid(1)`.
#
# Ten numbers, blocks of four threads: three blocks, twelve threads. The last two must do nothing.


# %%
@cuda.jit
def who(out, count):
    i = cuda.grid(1)
    if i < count:
        out[i] = 100 * cuda.blockIdx.x + cuda.threadIdx.x


numbers = np.zeros(10, np.int32)
blocks = -(-10 // 4)  # rounded up
who[blocks, 4](numbers, 10)
print(numbers)
same("three blocks of four", numbers, [0, 1, 2, 3, 100, 101, 102, 103, 200, 201])

# %% [markdown]
# **Break it.** Leave the guard out. Memory does not end where an array ends: here two numbers of
# somebody else lie behind the ten.


# %% tags=["break"]
@cuda.jit
def who_unguarded(out):
    i = cuda.grid(1)
    out[i] = 100 * cuda.blockIdx.x + cuda.threadIdx.x


memory = np.full(12, -7, np.int32)  # our ten numbers, and two of a neighbour
who_unguarded[blocks, 4](memory)
print("ours:", memory[:10], "  the neighbour's:", memory[10:])
same("our ten are right", memory[:10], numbers)
assert list(memory[10:]) == [202, 203], "and the neighbour's two are gone"

# %% [markdown]
# ## From one thread to a thread for each group
#
# Groups do not depend on each other. So a thread for each group, and the loop over groups is
# gone. What a thread does with its group is the loop from above, on the bits of bf16 numbers.
#
# `code_of` and `e4m3_value` are device functions of the package: they make and read the scale's
# byte. We build the first one ourselves further below.

# %%
from dsv41_kernels.numba_formats import code_of, e4m3_value, float_of

E4M3_AS = (np.uint32(3), np.uint32(121), np.float32(448))  # mantissa bits, exponent, largest
FLOOR, SIX = np.float32(MAIN_KV_FP4.floor), np.float32(6)
MIDPOINTS = tuple(np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5]))
U16 = np.uint32(16)


@cuda.jit(device=True)
def nearest(m):  # m >= 0 -> code 0 .. 7
    code = np.uint32(0)
    for k in range(7):
        if m > MIDPOINTS[k] or (m == MIDPOINTS[k] and k % 2 == 1):
            code = np.uint32(k + 1)
    return code


@cuda.jit(device=True)
def pack_group(bits, records, g):  # bits: bf16 as uint16
    amax = np.float32(0)
    for i in range(16):
        amax = max(amax, abs(float_of(np.uint32(bits[16 * g + i]) << U16)))
    byte = code_of(max(amax, FLOOR) / SIX, *E4M3_AS)
    scale, row, at = e4m3_value(byte), g // 32, g % 32
    for i in range(0, 16, 2):
        pair = np.uint32(0)
        for j in range(2):
            word = np.uint32(bits[16 * g + i + j])
            code = nearest(abs(float_of(word << U16)) / scale) | (word >> np.uint32(15)) << 3
            pair |= code << np.uint32(4 * j)
        records[row, 8 * at + i // 2] = pair
    records[row, 256 + at] = byte


@cuda.jit
def one_thread(bits, records, groups):
    for g in range(groups):
        pack_group(bits, records, g)


@cuda.jit
def thread_a_group(bits, records, groups):
    g = cuda.grid(1)
    if g < groups:
        pack_group(bits, records, g)


rng = np.random.default_rng(1)
rows, groups = 3, 3 * 32
values = round_bf16(rng.standard_normal((rows, 512)).astype("f4") * np.float32([[1], [50], [1e-4]]))
values[0, 5], values[1, :16] = -0.0, 0
bits = encode_bf16(values).reshape(-1)  # uint16
want = fp4_pack(values, MAIN_KV_FP4)  # (3, 288)


def run(kernel, blocks, threads, *inputs):
    records = np.zeros((rows, 288), np.uint8)
    kernel[blocks, threads](*inputs, records, groups)
    return records


same("one thread, 96 groups", run(one_thread, 1, 1, bits), want)
same("96 threads in 2 blocks of 64", run(thread_a_group, 2, 64, bits), want)

# %% [markdown]
# ## What the memory sees
#
# Threads do not ask one by one. 32 of them, a *warp*, execute an instruction together. Their 32
# addresses become one request. Memory comes in *sectors* of 32 bytes: a request costs as many trips
# as it touches sectors, whether a lane wants 2 bytes of one or all 32.
#
# The simulator lets us look. `Traced` is an array that writes down who asks for which byte. The
# $n$-th access of the 32 lanes of a warp is one request.


# %%
class Traced:
    """An array that remembers (block, thread, first byte) of every access."""

    def __init__(self, array):
        self.array, self.log = array, []

    def _note(self, at):
        at = np.ravel_multi_index(at, self.array.shape) if isinstance(at, tuple) else at
        me = threading.current_thread()  # the simulator's thread is the GPU's
        self.log.append((me.blockIdx.x, me.thread_id, int(at) * self.array.itemsize))

    def __getitem__(self, at):
        self._note(at)
        return self.array[at]

    def __setitem__(self, at, value):
        self._note(at)
        self.array[at] = value

    def requests(self):
        """-> list of address lists: access n of a warp's lanes, in order of warp and n."""
        seen, found = {}, {}
        for block, thread, address in self.log:
            n = seen[block, thread] = seen.get((block, thread), -1) + 1
            found.setdefault((block, thread // 32, n), []).append(address)
        return [found[key] for key in sorted(found)]


def trips(requests):
    return sum(len({address // 32 for address in request}) for request in requests)


def look(name, kernel, threads, *arrays):
    """Pack one row with traced arrays -> the first array's requests; prints the trips."""
    inputs, records = [Traced(a) for a in arrays], Traced(np.zeros((1, 288), np.uint8))
    kernel[1, threads](*inputs, records, 32)
    same(f"{name}: the right record", records.array[0], want[0])
    reads = inputs[0].requests()
    print(f"  reads  {len(reads):3} requests, {trips(reads):3} trips for 1,024 bytes = 32 sectors")
    return reads, trips(reads)


row = bits[:512]
alone, alone_trips = look("one thread", one_thread, 1, row)
by_group, by_group_trips = look("a thread a group", thread_a_group, 32, row)
assert alone_trips == 1024, "2 passes x 512 numbers, a trip each"
assert by_group_trips == 32 * 32, "32 requests, and each touches all 32 sectors"

# %% [markdown]
# A thread for each group asks 32 times, and every time for 2 bytes of *each* sector of the row.
# Lane 0 wants bytes 0 and 1, lane 1 bytes 32 and 33. The trips are as many as before, 1,024 for 32
# sectors. (On a GPU a repeat may hit the L1 cache; the simulator has none to show. It is a trip all
# the same.)
#
# ## Eight bytes at a time
#
# See the same memory as numbers of 8 bytes. One load brings four channels, and they stay in
# registers: no second pass over the array. Eight code bytes leave as one number, too.

# %%
U64_16 = np.uint64(16)


@cuda.jit(device=True)
def pack_four_words(w, words, records, g):  # w: four uint64 of four bf16 each
    x = cuda.local.array(16, np.uint32)
    amax = np.float32(0)
    for i in range(16):
        x[i] = np.uint32((w[i // 4] >> (U64_16 * np.uint64(i % 4))) & np.uint64(0xFFFF))
        amax = max(amax, abs(float_of(np.uint32(x[i] << U16))))
    byte = code_of(max(amax, FLOOR) / SIX, *E4M3_AS)
    scale, out = e4m3_value(byte), np.uint64(0)
    for i in range(16):
        code = nearest(abs(float_of(np.uint32(x[i] << U16))) / scale) | (x[i] >> np.uint32(15)) << 3
        out |= np.uint64(code) << np.uint64(4 * i)
    words[g // 32, g % 32] = out
    records[g // 32, 256 + g % 32] = byte


@cuda.jit
def wide_loads(wide, words, records, groups):
    g = cuda.grid(1)
    if g < groups:
        w = cuda.local.array(4, np.uint64)
        for i in range(4):
            w[i] = wide[4 * g + i]
        pack_four_words(w, words, records, g)


def look_at_words(name, kernel, threads):
    """As `look`, for kernels that read and write 8 bytes at a time."""
    codes, scales = np.zeros((1, 36), np.uint64), np.zeros((1, 288), np.uint8)
    wide, words = Traced(row.view(np.uint64)), Traced(codes)
    kernel[1, threads](wide, words, scales, 32)
    record = codes.view(np.uint8) | scales  # two views of one memory on a GPU
    same(f"{name}: the right record", record[0], want[0])
    reads, writes = wide.requests(), words.requests()
    for what, requests, size in (("reads", reads, 32), ("writes", writes, 8)):
        print(f"  {what:6} {len(requests):3} requests, {trips(requests):3} trips", end="")
        print(f" for {size} sectors")
    return reads, trips(reads)


four_loads, four_loads_trips = look_at_words("8 bytes a load", wide_loads, 32)
assert four_loads_trips == 4 * 32, "4 requests, each still touches all 32 sectors"

# %% [markdown]
# ## Neighbours read neighbours
#
# Still four trips for each sector, because lane 1 begins where lane 0 ends. Let the lanes stand
# side by side instead: in request $i$ lane $t$ takes word $32 i + t$. Then a request is 256
# neighbouring bytes, 8 sectors, all of them used. But now a lane holds words of *other* groups.
#
# *Shared memory* is where the threads of a block exchange them. Store, wait for everybody, read
# your own. `cuda.syncthreads()` is the wait. (`swap` changes places within a group of four; the
# next section says what for.)


# %%
@cuda.jit(device=True)
def swap(k):
    return k ^ ((k >> 4) & 3)  # word k of the tile: k // 4 is its group


@cuda.jit
def side_by_side(wide, words, records, groups):  # 32 threads a block
    tile = cuda.shared.array(128, np.uint64)
    t, first = cuda.threadIdx.x, 32 * cuda.blockIdx.x
    for i in range(4):
        k = 32 * i + t
        if 4 * first + k < 4 * groups:
            tile[swap(k)] = wide[4 * first + k]
    cuda.syncthreads()
    if first + t < groups:
        w = cuda.local.array(4, np.uint64)
        for i in range(4):
            w[i] = tile[swap(4 * t + i)]
        pack_four_words(w, words, records, first + t)


neighbours, neighbours_trips = look_at_words("side by side", side_by_side, 32)
assert neighbours_trips == 32, "every sector once: the least there is"

# %%
kinds = (
    ("a thread a group: 2 bytes of every sector", by_group, 2, ORANGE),
    ("8 bytes a load: a quarter of every sector", four_loads, 8, GREY),
    ("side by side: 8 whole sectors", neighbours, 8, BLUE),
)
with figure("First request of a warp: what it touches, what it uses", 3, sharex=True) as axes:
    for ax, (name, requests, size, colour) in zip(axes, kinds, strict=True):
        touched = {32 * (address // 32) for address in requests[0]}
        ax.broken_barh([(start, 32) for start in sorted(touched)], (0, 1), color=FAINT)
        ax.broken_barh([(address, size) for address in requests[0]], (0, 1), color=colour)
        ax.text(0, 1.15, name, color=colour, fontweight="bold")
        ax.set(yticks=[], xlim=(0, 1024), ylim=(0, 1.6), xticks=range(0, 1025, 128))
        used = len(requests[0]) * size
        print(f"{name:44} {len(touched):2} sectors, {used:3} of {32 * len(touched):4} bytes used")
    axes[-1].set_xlabel("byte of the row")
assert len({a // 32 for a in neighbours[0]}) * 32 == 32 * 8, "side by side uses every byte"

# %% [markdown]
# **Break it.** Take the barrier out. Warps run in any order, and one order is: warp 0 runs to its
# end before warp 1 begins. Two warps that share a tile, in that order, re-enacted in NumPy.


# %% tags=["break"]
def two_warps(wide, barrier):
    """Which words each of 64 threads ends up with; wide (256,)."""
    tile, got = np.zeros(256, np.uint64), np.zeros((64, 4), np.uint64)

    def store(warp):
        for t in range(32 * warp, 32 * warp + 32):
            tile[t::64] = wide[t::64]

    def read(warp):
        got[32 * warp : 32 * warp + 32] = tile.reshape(64, 4)[32 * warp : 32 * warp + 32]

    order = [(store, 0), (store, 1), (read, 0), (read, 1)]
    for step, warp in order if barrier else [order[0], order[2], order[1], order[3]]:
        step(warp)
    return got


wide = bits[:1024].view(np.uint64)
right, wrong = two_warps(wide, True), two_warps(wide, False)
same("with the barrier: everybody's own words", right, wide.reshape(64, 4))
for thread in (0, 8, 40):
    given = "  ".join(f"{decode_bf16(wrong[thread].view(np.uint16))[4 * i]:7.3f}" for i in range(4))
    print(f"thread {thread:2}, first number of each word, no barrier: {given}")
lost = int((wrong != right).any(axis=1).sum())
assert lost == 16, "16 threads of warp 0 find zeros, where warp 1 has not stored yet"

# %% [markdown]
# ## Eight lanes at one door
#
# Shared memory has 32 *banks*, 4 bytes wide each; word $w$ lives in bank $w \bmod 32$. A bank
# serves one word at a time. 32 lanes with 8 bytes each are 64 words: two rounds at best. How many
# it takes is the largest number of different words in one bank.
#
# Storing side by side is perfect. Reading your own group is not: lane $t$ begins at word $8t$, and
# 32 lanes meet at 8 banks. A permutation of the places, the same for storing and reading, spreads
# them.


# %%
def rounds(places):
    """places (32,) of 8-byte words -> rounds of a request"""
    words = np.unique(np.concatenate([2 * places, 2 * places + 1]))
    return int(np.bincount(words % 32).max())


lanes = np.arange(32)
layouts = {
    "as it comes": lambda k: k,
    "one word of padding per group": lambda k: k + k // 4,
    "swap": lambda k: k ^ ((k >> 4) & 3),
}
cost = {}
for name, place in layouts.items():
    stores = [rounds(place(32 * i + lanes)) for i in range(4)]
    loads = [rounds(place(4 * lanes + i)) for i in range(4)]
    cost[name] = sum(stores) + sum(loads)
    print(f"{name:30} stores {stores}  loads {loads}  together {cost[name]}")
assert cost["swap"] == 2 * 8, "8 requests of 256 bytes, two rounds each: nobody waits"
assert cost["as it comes"] > 2 * cost["swap"], "without it, more than twice as many"
words = np.arange(128)
same("swap loses no word", np.sort(words ^ ((words >> 4) & 3)), words)

# %% [markdown]
# ## The grid in the last bits of a sum
#
# Seven comparisons per number is a lot of work. A float32 addition rounds by itself: the sum has
# 24 bits, and what does not fit is rounded to nearest, ties to even. Choose the other summand so
# large that the last bit of the sum is worth one step of E2M1. Then the last bits *are* the code.
# For $m$ between $2^e$ and $2^{e+1}$ a step is $2^{e-1}$, so the summand is $2^{e+22}$.


# %%
def by_adding(m):
    """m (...) f32 >= 0 -> E2M1 codes uint32"""
    m = np.minimum(m, SIX)
    power = np.maximum(m.view("u4") & np.uint32(0x7F800000), np.uint32(127 << 23))  # 2^e >= 1
    large = power + np.uint32(22 << 23)
    steps = (m + large.view("f4")).view("u4") - large
    return steps + (((power >> np.uint32(23)) - np.uint32(127)) << np.uint32(1))


for m in (0.7, 2.4, 2.5, 3.5, 5.0):
    m = np.float32([m])
    large = np.float32(2 ** (max(np.floor(np.log2(m[0])), 0) + 22))
    print(f"{m[0]:.1f} + {large:>10.0f} = {(m + large)[0]:>12.1f}   code {by_adding(m)[0]}", end="")
    print(f" = {SIZES[by_adding(m)[0]]}")
every = decode_bf16(np.arange(0x7F80, dtype=np.uint16))  # all finite bf16 from 0 on
encoded = np.uint32(E2M1.encode(every))
same("every bf16 number: the codes of the definition", by_adding(every), encoded)
ties = np.float32(MIDPOINTS)
around = np.concatenate([np.nextafter(ties, np.float32(0)), ties, np.nextafter(ties, SIX)])
compared = [nearest.fn(m) for m in around]
same("ties and their neighbours = seven comparisons", by_adding(around), np.uint32(compared))

# %% [markdown]
# ## A division that must not become a product
#
# A GPU has no instruction for $x / s$: a correctly rounded division is a little program, a product
# is one instruction. So: $1/s$ once per group, then 16 products?
#
# **Break it.** $1/s$ is rounded, the product is off by a last bit, and a number that *was* a tie is
# none any more. Take every E4M3 scale and every tie of E2M1:

# %% tags=["break"]
scales = E4M3.table[1:127]  # all positive ones
x = (scales[:, None] * ties).astype("f4")  # (126, 7), exact products
inverse = np.float32(1) / scales
exact, product = by_adding(x / scales[:, None]), by_adding(x * inverse[:, None])
wrong = exact != product
i, k = np.argwhere(wrong)[0]
print(f"scale {scales[i]:g}, x = {x[i, k]:g}: x / s = {(x[i] / scales[i])[k]:.9g}", end="")
print(f" -> {SIZES[exact[i, k]]},  x * (1/s) = {(x[i] * inverse[i])[k]:.9g} -> ", end="")
print(SIZES[product[i, k]])
print(f"{wrong.sum()} of {wrong.size} ties go to the wrong neighbour")
assert wrong.sum() == 42, "one tie in twenty is lost"

# %% [markdown]
# The repair uses what we know: $x$ is bf16 and has 8 significant bits, $s$ has 4. So a quotient is
# either a tie or well away from it; the next cell finds how far. Round the product to 13 bits: ties
# become ties again, and nothing else moves across one. Every scale with every bf16 number that it
# can meet:


# %%
def snapped(product):
    bits = product.view("u4") + np.uint32(0x400)
    return (bits & np.uint32(0xFFFFF800)).view("f4")


tried, away = 0, np.inf
for s, r in zip(scales, inverse, strict=True):
    x = every[(every <= 7 * s) & (every > s / 16)]  # below s / 4 every code is 0
    assert (by_adding(snapped(x * r)) == by_adding(x / s)).all(), "the codes of the division"
    tried += len(x)
    far = np.abs(x[:, None] / s.astype("f8") - ties) / ties  # exact enough in float64
    away = min(away, far[far > 1e-9].min())
print(f"{tried:,} pairs of scale and number; what is no tie is at least 1/{1 / away:.0f} away")
assert away > 2.0**-9, "16 times as far as rounding to 13 bits moves a number"
assert (by_adding(snapped(scales[:, None] * ties * inverse[:, None])) == exact).all(), "all ties"

# %% [markdown]
# ## Where the simulator is too kind
#
# In the simulator a thread is Python and NumPy. The compiler has rules of its own: a `uint32` plus
# a plain `1` is 64 bits wide, a `float32` times a plain `2.0` is a `float64`, and GPUs have few
# units for those. NumPy keeps both at 32 bits, so every test in the simulator passes. Numba's
# compiler for the CPU has the same typing rules, and tells:


# %%
def compiled_type(function, argument):
    compiled = numba.njit(function)
    compiled(argument)
    return str(compiled.nopython_signatures[0].return_type)


u, f = np.uint32(3), np.float32(3)
one, two = np.uint32(1), np.float32(2)
table = [
    ("x + 1", lambda x: x + 1, u),
    ("x + np.uint32(1)", lambda x: np.uint32(x + one), u),
    ("x * 2.0", lambda x: x * 2.0, f),
    ("x * np.float32(2)", lambda x: x * two, f),
]
types = {}
for text, function, argument in table:
    types[text] = compiled_type(function, argument)
    print(f"{text:18} NumPy {np.dtype(type(function(argument))).name:8} Numba {types[text]}")
assert types["x + 1"] == "int64" and types["x * 2.0"] == "float64", "twice as wide"
assert types["x + np.uint32(1)"] == "uint32" and types["x * np.float32(2)"] == "float32"

# %% [markdown]
# That is why [numba_formats.py](../kernels/dsv41_kernels/numba_formats.py) names a type with every
# constant. `code_of` there is our `by_adding`, for any small float.
#
# ## Errors from a million threads
#
# A kernel cannot raise. A group with NaN or inf has no scale, so its thread leaves a note in one
# word of memory, by an atomic maximum: of all notes the first position survives. The wrapper reads
# the word and raises what the definition raises.

# %%
from dsv41.dispatch import use

bad = values.copy()
bad[2, 7], bad[1, 40] = np.nan, np.inf
messages = []
for backend in ("numpy", "numba"):
    with use(backend), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the simulated threads go on with NaN
        try:
            fp4_pack(bad, MAIN_KV_FP4)
        except ValueError as error:
            messages.append(str(error))
            print(f"{backend}: {error}")
assert len(messages) == 2 and messages[0] == messages[1], "one message, whoever finds it"
assert "(1, 40)" in messages[0], "the first position, not the first to finish"

# %% [markdown]
# ## The floor
#
# What must move: 1,024 bytes in, 288 out. NVIDIA's data sheet of the H200 SXM gives 4.8 TB/s of
# memory bandwidth and 67 TFLOP/s in float32, which counts a multiply-add as two. So there is room
# for a few operations per number, and beyond them arithmetic is the limit.
#
# One more number explains why a million threads and not a thousand. An answer takes a while. Say
# half a microsecond, an assumption and no measurement. Then this many sectors must be on their way
# at any moment:

# %%
moved = 2**20 * (1024 + 288)
floor_us = moved / 4.8e12 * 1e6
numbers_per_second = 4.8e12 / ((1024 + 288) / 512)
operations = 67e12 / 2 / numbers_per_second
in_flight = 4.8e12 * 0.5e-6 / 32
print(f"2^20 rows: {moved / 1e9:.3f} GB, at least {floor_us:.0f} µs at 4.8 TB/s")
print(f"{operations:.1f} operations per number are free")
print(f"{in_flight:,.0f} sectors in flight, for an answer after 0.5 µs")
close("288 bytes and 1,024 are all", moved, 1.376e9, within=1e6)
assert 17 < operations < 19, "about 18 operations while memory delivers a number"
assert in_flight > 32 * 132 * 16, "more than 16 warps with a load each, on all 132 SMs"
print()
found = report("fp4_pack")
assert all(r["error"] == 0 for r in found), "what was timed was checked first, bit for bit"

# %% [markdown]
# That is what the [ladder in CUDA C++](../kernels/dsv41_kernels/fp4_pack/kernel.cu) does about it:
# v1 is our thread for each group, v2 loads 16 bytes at a time and has no division, v3 rounds two
# numbers with one instruction. [Chapter 21](21_rawkernels.ipynb) reads such sources.
#
# ## The module gives the same numbers
#
# [numba_records.pack_kernel](../kernels/dsv41_kernels/numba_records.py#pack_kernel) goes on where
# we stop. A thread still packs 16 numbers, for every format; sizes are constants of a closure, so
# the compiler unrolls the loops. But it loads 16 bytes at a time, so that two requests touch every
# sector of a group, and the second finds in the cache what the first has fetched: no tile, no
# barrier. And two bf16 stay in one word of 32 bits, so that one instruction rounds both.
# [numba_instructions.py](../kernels/dsv41_kernels/numba_instructions.py) hands Numba the
# instructions it has no name for, each with its meaning in Python for this simulator.

# %%
import ml_dtypes

from dsv41_kernels.fp4_pack.numba_op import fp4_pack as packed_by_numba


def run_words(kernel, blocks, threads):
    words, scales = np.zeros((rows, 36), np.uint64), np.zeros((rows, 288), np.uint8)
    kernel[blocks, threads](bits.view(np.uint64), words, scales, groups)
    return words.view(np.uint8) | scales


module = packed_by_numba(values.astype(ml_dtypes.bfloat16), MAIN_KV_FP4)
same("the module's kernel = the definition", module, want)
same("one thread = the module's", run(one_thread, 1, 1, bits), module)
same("a thread a group = the module's", run(thread_a_group, 3, 32, bits), module)
same("8 bytes a load = the module's", run_words(wide_loads, 2, 64), module)
same("side by side = the module's", run_words(side_by_side, 3, 32), module)
fine = values + np.float32(1e-3)  # float32 that is no bf16
same("float32 rows, too", packed_by_numba(fine, MAIN_KV_FP4), fp4_pack(fine, MAIN_KV_FP4))
keys = values[:, :128]
same("and index keys: 68 bytes", packed_by_numba(keys, INDEX_FP4), fp4_pack(keys, INDEX_FP4))

# %% [markdown]
# ## Exercises
#
# Replace each `...`. `check` tries your answer on fresh inputs.
#
# 1. Lane $t$ of a warp asks for `size` bytes from byte `first + stride * t` on. How many sectors of
#    32 bytes does the request touch? Starts need not be aligned.
# 2. A tile of float32 has rows of `pitch` words. 32 lanes read one column, a lane a row. How many
#    rounds do the banks need?
# 3. The way back, with a kernel of your own: one thread for each code byte writes two numbers.


# %% tags=["exercise"]
def sectors(first, stride, size):
    """-> int"""
    return ...


check("20.sectors", sectors)


# %% tags=["exercise"]
def column_rounds(pitch):
    """pitch: words from row to row -> int, rounds of the request"""
    return ...


check("20.column_rounds", column_rounds)


# %% tags=["exercise"]
def unpack(records):
    """records (rows, 288) uint8 -> (rows, 512) f32: out is filled by a kernel, then returned"""
    out = np.zeros((len(records), 512), np.float32)
    return ...


check("20.unpack", unpack)

# %% [markdown]
# ## What we learned
#
# - A kernel is what one thread does. Threads are counted up to whole blocks, so it begins with a
#   guard.
# - A warp asks together. Trips are sectors touched, not bytes wanted: 1,024, 128 or 32 for one row.
# - Shared memory lets neighbours read for each other, with a barrier in between and an eye on the
#   banks.
# - Rounding to FP4 is one addition. A division by a scale is no product, unless ties are repaired.
# - The simulator proves bits and addresses. Widths of types it hides, time it does not know.
#
# Worked solutions: [solutions/20_first_numba_kernel.py](solutions/20_first_numba_kernel.py). Next:
# [21 RawKernels](21_rawkernels.ipynb). All chapters: [README.md](README.md).
