"""DeepSeek-V4.1-Flash, complete and readable.

    m = dsv41.load(directory)                   any directory in the released layout
    logits = m.logits(ids)                      (T, V) float32, the released numerics
    logits = m.logits(ids, dsv41.FLOAT32)       nothing rounded
    trace = {}; m.logits(ids, trace=trace)      every intermediate, by name

Read config.py, csa2.py and model.py in this order, and you know how a token becomes a logit.
"""

from .config import Config
from .model import Model, load
from .presets import preset
from .quant import FLOAT32, OFFICIAL, Numerics

__all__ = ["Config", "FLOAT32", "Model", "Numerics", "OFFICIAL", "load", "preset"]
