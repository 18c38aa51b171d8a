"""Alias until merged."""

from farspan.training.loop import flops_per_token as flops_per_token
from farspan.training.loop import matmul_peak as matmul_peak
