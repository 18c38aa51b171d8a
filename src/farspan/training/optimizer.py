"""Alias until merged."""

from farspan.training.loop import compile_blocks as compile_blocks
from farspan.training.loop import make_optimizer as make_optimizer
