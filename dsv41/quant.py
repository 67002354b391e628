"""How does one block of numbers share a scale, and what is rounded where?

Block scaling: n neighbours of the last axis share one scale s, and each stores x / s in few bits.

    amax  = max(max |x|, floor)
    s     = 2^ceil(log2(amax / largest))     E8M0 scale, from the bits     (MX formats)
          = E4M3(amax / largest)             E4M3 scale, true division     (main KV)
    code  = element(x / s)                   nearest even, saturating; value = decode(code) * s

Three formats live in the caches (names as in the report): window KV is MXFP8 per 32, index keys are
MXFP4 per 32, main KV is E2M1 with one E4M3 scale per 16 and no second-level scale. Weights use the
same elements: FP8 linears in 32x32 tiles, FP4 experts and FP8 Engram rows in 1x32 row blocks.

`Numerics` says which of these are on. It is passed to every function that rounds: FLOAT32 rounds
nothing, OFFICIAL rounds where the released inference/model.py and kernel.py do.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from .dispatch import on_host, op
from .formats import (
    E2M1,
    E4M3,
    Minifloat,
    decode_e8m0,
    encode_e8m0_ceil,
    f32,
    pack_nibbles,
    round_bf16,
    unpack_nibbles,
)

TILE = 32  # rows and columns of a weight tile that share one scale


@dataclass(frozen=True)
class BlockFormat:
    """`group` neighbours of the last axis share one scale (`scale` is "e8m0" or "e4m3").

    `floor` is the smallest amax: it keeps the scale of an all-zero group a legal, non-zero number.
    """

    name: str
    element: Minifloat
    group: int
    scale: str
    floor: float

    def quantize(self, x):
        """x (..., C) f32 -> codes (..., C) uint8, scales (..., C / group) uint8.

        C must be a multiple of `group`. Raises ValueError on NaN or inf, naming the position.
        """
        scaled, scales = self.scaled(x)
        return self.element.encode(scaled).reshape(x.shape), scales

    def dequantize(self, codes, scales):
        """codes (..., C) uint8, scales (..., C / group) uint8 -> (..., C) f32, exact."""
        grouped = self._grouped(self.element.decode(codes))
        return (grouped * self.decode_scale(scales)[..., None]).reshape(codes.shape)

    def fake(self, x):
        """The values that a reader of the stored codes will see. (..., C) f32 -> same."""
        return fake_quantize(x, self)

    def encode(self, x):
        """x (..., C) f32 -> records (..., record_bytes(C)) uint8: all codes, then all scales."""
        return (fp4_pack if self.element.bits == 4 else fp8_pack)(x, self)

    def decode(self, records, channels):
        """records (..., record_bytes(channels)) uint8 -> (..., channels) f32."""
        return (fp4_unpack if self.element.bits == 4 else fp8_unpack)(records, channels, self)

    def record_bytes(self, channels):
        """Bytes of one stored vector, for example 512 -> 288 (main KV) or 528 (window KV)."""
        return channels * self.element.bits // 8 + channels // self.group

    def new_records(self, shape, channels, like=None):
        """Zeroed storage for records, shape + (record_bytes(channels),) uint8."""
        return np.zeros((*shape, self.record_bytes(channels)), np.uint8, like=like)

    def require_groups(self, shape):
        """ValueError unless the last axis of an array of this shape is whole groups."""
        if shape[-1] % self.group:
            raise ValueError(
                f"{self.name}: last axis must be a multiple of {self.group}, got shape {shape}"
            )

    def _grouped(self, x):
        self.require_groups(x.shape)
        return x.reshape((*x.shape[:-1], x.shape[-1] // self.group, self.group))

    def scaled(self, x):
        """x / scale, grouped (..., C / group, group), and the scales' bytes."""
        grouped = self._grouped(f32(x))
        amax = np.max(np.abs(grouped), axis=-1)
        _require_finite(amax, grouped, self.name)
        scales = self._encode_scale(np.maximum(amax, np.float32(self.floor)))
        # trap: divide by the rounded scale; a reciprocal can cross an E2M1 tie
        return grouped / self.decode_scale(scales)[..., None], scales

    def _encode_scale(self, amax):
        if self.scale == "e4m3":
            return E4M3.encode(amax / np.float32(self.element.largest))
        # the released kernel multiplies by the float32 reciprocal here, so do we
        return encode_e8m0_ceil(amax * np.float32(1.0 / self.element.largest))

    def decode_scale(self, scales):
        return E4M3.decode(scales) if self.scale == "e4m3" else decode_e8m0(scales)


@dataclass(frozen=True)
class Plain:
    """The format that changes nothing: records are the float32 channels themselves."""

    name: str = "float32"

    def fake(self, x):
        return f32(x)

    def encode(self, x):
        return f32(x)

    def decode(self, records, channels):
        return records

    def record_bytes(self, channels):
        return 4 * channels

    def new_records(self, shape, channels, like=None):
        return np.zeros((*shape, channels), np.float32, like=like)


@op
def fake_quantize(x, fmt):
    """x (..., C) f32 -> f32, what decoding the codes of `fmt` would give, without the codes.

    ValueError on NaN or inf, naming the first position.
    """
    scaled, scales = fmt.scaled(x)
    return (fmt.element.round(scaled) * fmt.decode_scale(scales)[..., None]).reshape(x.shape)


# ---- records --------------------------------------------------------------------------------


@op
def fp4_pack(x, fmt):
    """x (..., C) f32 or bf16 -> records (..., C/2 + C/group) uint8 in the FP4 format `fmt`.

    Two codes a byte, the even channel in the low nibble, then one scale byte per group. ValueError
    on NaN or inf, naming the first position.
    """
    codes, scales = fmt.quantize(x)
    return np.concatenate([pack_nibbles(codes), scales], axis=-1)


@op
def fp4_unpack(records, channels, fmt, dtype=np.float32):
    """records (..., C/2 + C/group) uint8 -> (..., C) f32 or bf16, exact."""
    codes, scales = records[..., : channels // 2], records[..., channels // 2 :]
    return fmt.dequantize(unpack_nibbles(codes), scales).astype(dtype, copy=False)


@op
def fp8_pack(x, fmt):
    """x (..., C) f32 or bf16 -> records (..., C + C/group) uint8 in the FP8 format `fmt`.

    One code a byte, then one scale byte per group. ValueError on NaN or inf, naming the position.
    """
    return np.concatenate(fmt.quantize(x), axis=-1)


@op
def fp8_unpack(records, channels, fmt, dtype=np.float32):
    """records (..., C + C/group) uint8 -> (..., C) f32, exact, or rounded to bf16."""
    values = fmt.dequantize(records[..., :channels], records[..., channels:])
    return values.astype(dtype, copy=False)


def _require_finite(amax, grouped, name):
    if not on_host(amax) or np.isfinite(amax).all():
        return
    block = np.unravel_index(np.argmin(np.isfinite(amax)), amax.shape)
    member = int(np.argmin(np.isfinite(grouped[block])))
    *outer, last = (int(i) for i in block)
    position = (*outer, last * grouped.shape[-1] + member)
    raise ValueError(f"x: {name} needs finite input, got {grouped[block][member]} at {position}")


FLOAT = Plain()
ACTIVATION_FP8 = BlockFormat("MXFP8", E4M3, group=32, scale="e8m0", floor=1e-4)
WINDOW_KV_FP8 = ACTIVATION_FP8
INDEX_FP4 = BlockFormat("MXFP4", E2M1, group=32, scale="e8m0", floor=6 * 2.0**-126)
MAIN_KV_FP4 = BlockFormat("E2M1+E4M3/16", E2M1, group=16, scale="e4m3", floor=6 * 2.0**-9)
# weights: no activation floor, so that a tile of tiny weights keeps its digits
WEIGHT_FP8 = BlockFormat("FP8 weight", E4M3, group=32, scale="e8m0", floor=448 * 2.0**-126)
WEIGHT_FP4 = BlockFormat("FP4 weight", E2M1, group=32, scale="e8m0", floor=6 * 2.0**-126)


# ---- weights --------------------------------------------------------------------------------


def quantize_tiles(w):
    """w (N, K) f32 -> codes (N, K) uint8, scales (ceil(N/32), ceil(K/32)) uint8: 32x32 tiles."""
    tiles = _tiles(f32(w))  # (n, 32, k, 32), padded with zeros
    n, _, k, _ = tiles.shape
    flat = tiles.transpose(0, 2, 1, 3).reshape(n, k, TILE * TILE)
    one_tile_per_group = replace(WEIGHT_FP8, group=TILE * TILE)
    codes, scales = one_tile_per_group.quantize(flat)
    codes = codes.reshape(n, k, TILE, TILE).transpose(0, 2, 1, 3).reshape(n * TILE, k * TILE)
    return codes[: w.shape[0], : w.shape[1]], scales[..., 0]


def dequantize_tiles(codes, scales):
    """codes (N, K) uint8, scales (ceil(N/32), ceil(K/32)) uint8 -> (N, K) f32, exact."""
    expected = tuple(math.ceil(size / TILE) for size in codes.shape)
    if scales.shape != expected:
        raise ValueError(
            f"scales: {codes.shape} codes in {TILE}x{TILE} tiles need scales {expected}, "
            f"got {scales.shape}"
        )
    factor = decode_e8m0(scales).repeat(TILE, axis=0).repeat(TILE, axis=1)
    return E4M3.decode(codes) * factor[: codes.shape[0], : codes.shape[1]]


def _tiles(w):
    n, k = (math.ceil(size / TILE) for size in w.shape)
    padded = np.zeros((n * TILE, k * TILE), w.dtype, like=w)
    padded[: w.shape[0], : w.shape[1]] = w
    return padded.reshape(n, TILE, k, TILE)


@dataclass(frozen=True)
class QuantizedWeight:
    """A linear's weight as stored: codes, scales and the layout that ties them together.

    layout "tiles": codes (N, K) E4M3, scales per 32x32 tile. layout "rows": codes (N, K/2), two
    E2M1 a byte, scales (N, K/32). The arrays may be memory maps; `dense()` reads and decodes them.
    `name` is the tensor's name in the checkpoint, for error messages.
    """

    codes: np.ndarray
    scales: np.ndarray
    layout: str
    name: str = "weight"

    @property
    def shape(self):
        n, k = self.codes.shape
        return (n, k) if self.layout == "tiles" else (n, 2 * k)

    def dense(self):
        """-> (N, K) f32, exact. Raises ValueError, naming the tensor, when a NaN is stored."""
        if self.layout == "tiles":
            values = dequantize_tiles(self.codes, self.scales)
        else:
            values = WEIGHT_FP4.dequantize(unpack_nibbles(self.codes), self.scales)
        return require_finite_weight(values, self.name)


def require_finite_weight(values, name):
    """values, unchanged; ValueError naming tensor and position when one is NaN or inf."""
    finite = np.isfinite(values)
    if on_host(values) and not finite.all():
        position = tuple(int(i) for i in np.unravel_index(np.argmin(finite), values.shape))
        raise ValueError(f"{name}: weight is {values[position]} at {position}")
    return values


def quantize_weight(w, layout):
    """w (N, K) f32 -> QuantizedWeight in `layout` "tiles" (FP8) or "rows" (FP4)."""
    if layout == "tiles":
        return QuantizedWeight(*quantize_tiles(w), layout)
    codes, scales = WEIGHT_FP4.quantize(w)
    return QuantizedWeight(pack_nibbles(codes), scales, layout)


# ---- what is rounded where ------------------------------------------------------------------


@dataclass(frozen=True)
class Numerics:
    """Which roundings are on. Pass FLOAT32 or OFFICIAL, or switch single ones with `but`.

    bf16: activations are rounded to bf16 wherever the released code stores a bf16 tensor.
    activation: format of the inputs of quantised linears. window_kv, main_kv, index: formats of
    the caches (index also rounds the indexer's queries).
    batch_invariant: every matrix product runs in row blocks of one fixed size, so that a row's
    bits do not depend on how many rows are computed with it.
    """

    name: str
    bf16: bool
    activation: BlockFormat | Plain
    window_kv: BlockFormat | Plain
    main_kv: BlockFormat | Plain
    index: BlockFormat | Plain
    batch_invariant: bool = False

    def store(self, x):
        """x f32 -> f32 as a bf16 tensor would keep it (unchanged when bf16 is off)."""
        return round_bf16(x) if self.bf16 else f32(x)

    def but(self, **changes):
        """A copy with some fields changed: `OFFICIAL.but(main_kv=FLOAT)`."""
        return replace(self, **changes)


FLOAT32 = Numerics("FLOAT32", False, FLOAT, FLOAT, FLOAT, FLOAT)
OFFICIAL = Numerics("OFFICIAL", True, ACTIVATION_FP8, WINDOW_KV_FP8, MAIN_KV_FP4, INDEX_FP4)
