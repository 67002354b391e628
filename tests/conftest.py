"""Fixtures that every test file may ask for by name."""

from fake_cuda import fake_cuda  # noqa: F401
