"""Triton kernels. Importing farspan never imports these modules; operations import them when a kernel runs."""
