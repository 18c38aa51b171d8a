"""Triton kernels for CoCA. Only modules of this room import triton, and nothing imports them before they are needed."""
