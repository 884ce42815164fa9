"""Triton kernels of the GPU targets, one file per family. Each ends with ``specs()``, its KernelSpecs.

They compile without a GPU and run in NumPy under TRITON_INTERPRET=1 (tests/interpreted).
"""
