"""The command lines of this package: a module's docstring is what --help shows, line by line."""

import argparse


def parser(name, about):
    """An argument parser of `python -m dsv41_kernels.<name>`; about: the module's docstring."""
    return argparse.ArgumentParser(
        prog=f"python -m dsv41_kernels.{name}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
