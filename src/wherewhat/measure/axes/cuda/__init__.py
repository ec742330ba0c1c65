"""The same sums by Triton kernels. Import only where Triton is."""
