"""CUDA kernels for the operations that dsv41 defines in NumPy.

One folder per operation, named like the definition; dsv41.dispatch finds them by that name.
"""
