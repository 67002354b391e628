"""How launches of a layer are counted; with a GPU, that a step never waits in the middle."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
from dsv41_kernels import busy, launches, sanitize
from dsv41_kernels.launches import MARKER, by_layer, marked_layers, steps, table, tally

from dsv41 import FLOAT32, ced, dispatch
from dsv41.init import random_params
from dsv41.model import Model


@pytest.fixture(scope="module")
def model():
    config, classes = sanitize.tiny()
    return Model(config, random_params(config, np.random.default_rng(0)), classes)


def test_marks_tell_layers_apart():
    layers, outside = by_layer(["a", MARKER, "b", "c", MARKER, MARKER, MARKER, "d"])
    assert layers == [["b", "c"], []] and outside == ["a", "d"]


def test_kernels_and_copies_are_counted_apart():
    names = ["hc_update", "cupy_add", "Memcpy DtoH (Device -> Pageable)", "Memset (Device)"]
    got = tally(names, {"hc_update"})
    assert got == {"kernels": 2, "ours": 1, "copies": 2, "to host": 1}


class Records:
    """Every op that the model calls is a kernel, in the order of the calls."""

    def __init__(self, monkeypatch):
        self.names = []
        monkeypatch.setattr(dispatch, "find_kernel", lambda name, _: self.names.append(name))

    def mark(self):
        self.names.append(MARKER)

    def watch(self, work):
        self.names.clear()
        work()
        return list(self.names)


def test_a_step_of_a_model_is_counted_layer_by_layer(model, monkeypatch):
    records, lines = Records(monkeypatch), []
    found = steps(model, records.watch, records.mark)
    assert list(found) == ["prefill", "decode"]
    for names in found.values():
        layers, outside = by_layer(names)
        assert len(layers) == len(model.config.plan)
        for part in layers:  # every layer has two sublayers
            assert part.count("hc_update") == part.count("hc_coefficients") == 2
            assert part.count("moe_experts") == 1
        assert "hc_update" not in outside and outside.count("hc_collapse") == 1
    table(model, found, lines.append)
    part = by_layer(found["decode"])[0][3]
    assert model.config.plan[3].mode == "reuse"
    row = next(line for line in lines[-1 - len(layers) - 1 :] if line.startswith("3 reuse"))
    own = {name for _, name in sanitize.kernel_names()}
    assert row.split()[2:4] == [str(len(part)), str(sum(name in own for name in part))]
    assert f"a layer in mode reuse: {len(part)} kernels; the technical report: 11" in lines[-1]


def test_the_layers_are_unmarked_again(model):
    block, marks = ced.block, []
    with pytest.raises(ZeroDivisionError), marked_layers(lambda: marks.append(1)):
        model.logits(np.arange(3, 9), FLOAT32)
        raise ZeroDivisionError
    assert ced.block is block and len(marks) == 2 * len(model.config.plan)


def test_without_pytorch_it_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match="is not installed"):
        busy.names_in_order(lambda: None)
    assert next(busy.kernels_of(lambda: 1.0)).startswith("how long kernels run is not known:")
    lines, fake = [], SimpleNamespace(to=lambda device: None)
    monkeypatch.setattr(launches, "steps", lambda model: busy.names_in_order(lambda: None))
    launches.report(fake, lines.append)
    assert lines[0].startswith("launches are not counted: PyTorch")


@pytest.mark.gpu
def test_no_layer_of_a_step_waits_for_the_host(cupy, model):
    pytest.importorskip("torch", reason="its profiler reads the GPU's records")
    for what, names in steps(model.to("cuda")).items():
        layers, _ = by_layer(names)
        assert len(layers) == len(model.config.plan), what
        assert all(tally(part, ())["kernels"] > 0 for part in layers), what
        waits = {n: tally(part, ())["to host"] for n, part in enumerate(layers)}
        assert not any(waits.values()), f"{what}: copies to the host {waits}"
