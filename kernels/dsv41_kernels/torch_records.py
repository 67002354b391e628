"""The same records in plain PyTorch, eager: the peer that the benchmarks time on the same inputs.

PyTorch casts to E4M3 but not to E2M1, whose codes are found by bucketising between the midpoints.
Nothing else imports this; PyTorch is no dependency.
"""

import functools

import torch

# a value equal to a midpoint belongs to the even code: where that is the upper one (0.75, 1.75,
# 3.5) the boundary lies just below
MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def tensor(array, dtype=None):
    """A CuPy array's memory as a tensor, its 16-bit words read as `dtype`."""
    if dtype is None:
        return torch.from_dlpack(array)
    return torch.from_dlpack(array.view("int16")).view(getattr(torch, dtype))


def pack(x, fmt):
    """x (R, C) bf16 -> records (R, Z) uint8, as dsv41.quant's definitions."""
    grouped = x.float().unflatten(-1, (-1, fmt.group))
    amax = grouped.abs().amax(-1).clamp_min(fmt.floor)
    scale, bytes_ = _scales(amax, fmt)
    scaled = (grouped / scale[..., None]).flatten(-2)
    codes = _e2m1(scaled) if fmt.element.bits == 4 else _e4m3(scaled)
    return torch.cat([codes, bytes_], -1)


def unpack(records, channels, fmt):
    """records (R, Z) uint8 -> (R, channels) bf16."""
    split = channels * fmt.element.bits // 8
    codes, scales = records[:, :split], records[:, split:]
    if fmt.element.bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
        values = _table(records.device)[codes.int()]
    else:
        values = codes.view(torch.float8_e4m3fn).float()
    grouped = values.unflatten(-1, (-1, fmt.group)) * _scale_values(scales, fmt)[..., None]
    return grouped.flatten(-2).bfloat16()


def _scales(amax, fmt):
    if fmt.scale == "e4m3":
        code = (amax / fmt.element.largest).clamp_max(448).to(torch.float8_e4m3fn)
        return code.float(), code.view(torch.uint8)
    bits = (amax * (1 / fmt.element.largest)).view(torch.int32)
    code = (bits >> 23) + ((bits & 0x7FFFFF) != 0)
    return (code << 23).view(torch.float32), code.to(torch.uint8)


def _scale_values(scales, fmt):
    if fmt.scale == "e4m3":
        return scales.view(torch.float8_e4m3fn).float()
    return (scales.int() << 23).view(torch.float32)


def _e4m3(x):
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)


def _e2m1(x):
    codes = torch.bucketize(x.abs(), _edges(x.device)) + 8 * torch.signbit(x)
    codes = codes.to(torch.uint8)
    return codes[:, 0::2] | codes[:, 1::2] << 4


@functools.cache
def _edges(device):
    edges = torch.tensor(MIDPOINTS)
    edges[1::2] = torch.nextafter(edges[1::2], torch.zeros(3))
    return edges.to(device)


@functools.cache
def _table(device):
    return torch.tensor([*VALUES, *(-v for v in VALUES)], device=device)


def rmsnorm(x, weight, eps):
    """x (R, C) bf16, weight (C,) f32 -> bf16, as dsv41.ops.rmsnorm rounds."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).bfloat16()
