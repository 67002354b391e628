"""All experts of a layer as one batched product: where their rows lie, and how they come back."""

import cupy
import numpy as np

from dsv41.ops import dense

from ..launch import grid, kernel

ROOM = 64  # rows of an expert are a multiple of this, so that few shapes occur
SPARE_BYTES = 64 << 20  # that all experts' rows may take for the host not to have to wait


def padded(count):
    """The next multiple of ROOM, at least one."""
    return max(ROOM, -(-count // ROOM) * ROOM)


class Groups:
    """The rows of every expert: chosen (T, k) -> (E, room) slots for rows of so many channels.

    An expert has T rows at most. Where that many for each are more than SPARE_BYTES, the busiest
    one's number is read back, and the host waits for it.
    """

    def __init__(self, chosen, experts, channels):
        self.chosen, self.experts = cupy.ascontiguousarray(chosen, np.int64), experts
        self.tokens, self.k = chosen.shape
        flat = self.chosen.ravel()
        self.order = cupy.argsort(flat, kind="stable")
        edges = cupy.arange(experts + 1, dtype=np.int64)
        self.begins = cupy.searchsorted(flat[self.order], edges)
        self.room = padded(self.tokens)
        if 4 * experts * self.room * channels > SPARE_BYTES:
            self.room = padded(int((self.begins[1:] - self.begins[:-1]).max()))
        self.slots = cupy.zeros(flat.shape, np.int64)

    def gather(self, x):
        """x (T, D) f32 -> (E, room, D), zeros where an expert has fewer tokens."""
        x, channels = cupy.ascontiguousarray(x, np.float32), x.shape[1]
        rows = cupy.empty((self.experts, self.room, channels), np.float32)
        sizes = np.int64(self.room), np.int32(self.experts), np.int32(channels), np.int32(self.k)
        blocks, threads = (self.experts * self.room,), (min(256, -(-channels // 32) * 32),)
        arguments = x, self.order, self.begins, rows, self.slots, *sizes
        kernel("moe_experts", "gather")(blocks, threads, arguments)
        return rows

    def spread(self, values):
        """values (T, k) f32, one per choice -> (E, room), zeros where there is none."""
        values = cupy.ascontiguousarray(values, np.float32)
        out = cupy.empty((self.experts, self.room), np.float32)
        sizes = np.int64(self.room), np.int64(out.size)
        arguments = values, self.order, self.begins, out, *sizes
        kernel("moe_experts", "spread")(grid(out.size), (256,), arguments)
        return out

    def combine(self, rows):
        """rows (E, room, D) -> (T, D): each token's experts added in ascending order."""
        channels = rows.shape[-1]
        y = cupy.empty((self.tokens, channels), np.float32)
        threads = (min(256, -(-channels // 32) * 32),)
        arguments = rows, self.chosen, self.slots, y, np.int32(channels), np.int32(self.k)
        kernel("moe_experts", "combine")((self.tokens,), threads, arguments)
        return y

    def collect(self, values):
        """values (E, room), one per slot -> (T, k)."""
        return values.ravel()[self.slots].reshape(self.tokens, self.k)


def stacked(experts, name):
    """The matrices `name` of all experts, (E, N, K)."""
    return cupy.stack([dense(experts[e][name]["weight"]) for e in range(len(experts))])
