"""How does a gradient turn?

A rotation is its own kind of linear map: its transpose turns back. So the gradient of a vector that
was turned by +t f is turned by -t f, pair by pair, and what was turned back is turned forward:

    y = R_t x        dx = R_t^T dy = R_-t dy

Angles are positions times constants, so nothing else gets a gradient. The forward text computes
cosines and sines once for both directions, which makes the pair exactly transposed even in float32.
Left out: a gradient by the frequencies, which are not learned. Source: rope.py.
"""

from ..rope import rotate


def rotate_backward(dy, positions, freqs, inverse=False):
    """dy (T, ..., C), and positions (T,), freqs (U,), inverse of the forward -> dx (T, ..., C)."""
    return rotate(dy, positions, freqs, inverse=not inverse)
