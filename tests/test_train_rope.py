"""The gradient of a rotation is the rotation back."""

import numpy as np
import pytest
from compare import assert_close
from test_train_difference import check, random

from dsv41.rope import rotate
from dsv41.train.rope import rotate_backward

FREQS = np.float32([1, 0.5, 0.01])


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("shape", [(3, 8), (2, 3, 6), (0, 7)])
def test_rotate(shape, inverse):
    positions = np.arange(shape[0]) * 37
    check(
        "rotate",
        lambda x: rotate(x, positions, FREQS, inverse),
        lambda dy, x: rotate_backward(dy, positions, FREQS, inverse),
        {"x": random(*shape)},
    )


def test_a_quarter_turn_by_hand():
    """y = (-x1, x0), so what is wanted of y0 is wanted of -x1; channels before the pairs pass."""
    freqs = np.float32([np.pi / 2])
    dx = rotate_backward(np.array([[5.0, 1, 0]]), np.array([1]), freqs)
    assert_close("dx", dx, [[5, 0, -1]], floor=1e-6)
