"""Triton kernels of length methods; imported only where there is a GPU."""
