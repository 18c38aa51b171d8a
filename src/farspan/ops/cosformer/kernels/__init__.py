"""Triton kernels for linear attention. Only modules of such rooms import triton, and only when they are needed."""
