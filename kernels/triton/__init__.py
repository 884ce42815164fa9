"""Triton kernels of the GPU targets, one file per family. Each ends with ``specs()``, its KernelSpecs.

They compile without a GPU and run in NumPy (tokenspeed/compile/interpret_triton.py, tests/interpreted).
"""
