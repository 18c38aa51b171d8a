"""Angles inside a kernel: no table in memory, no loss at far positions."""

import triton
import triton.language as tl


@triton.jit
def cos_sin(phase):
    """cos and sin (float32, within 2⁻²³) of an int64 phase in units of 2⁻⁶⁴ turns (see farspan.ops.phases).

    The upper half of the phase is reduced to an eighth of a turn around the nearest quarter, in integers; there the
    Taylor polynomials are good to 2e-9.
    """
    top = (phase >> 32).to(tl.int32)
    quarter = (top + 536870912) >> 30
    x = (top - (quarter << 30)).to(tl.float32) * 1.4629180792671596e-09  # 2π·2⁻³²
    y = x * x
    sin = x + x * y * (-1 / 6 + y * (1 / 120 + y * (-1 / 5040 + y * (1 / 362880))))
    cos = 1.0 + y * (-0.5 + y * (1 / 24 + y * (-1 / 720 + y * (1 / 40320 + y * (-1 / 3628800)))))
    odd = (quarter & 1) == 1
    c = tl.where(odd, sin, cos)
    s = tl.where(odd, cos, sin)
    return tl.where(((quarter + 1) & 2) == 2, -c, c), tl.where((quarter & 2) == 2, -s, s)


@triton.jit
def places(positions, row_stride, row, index, live, first):
    """Positions (int64) of queries or keys by index: first + index, or read from a (b|1, ·) tensor."""
    if positions is None:
        return (first + index).to(tl.int64)
    else:
        return tl.load(positions + row * row_stride + index, mask=live, other=0).to(tl.int64)


@triton.jit
def waves(a, b, cos, sin, EXACT: tl.constexpr):
    """Amplitudes (A, B) of a query with score(n) = Σ_j t_j (A_j cos nθ_j + B_j sin nθ_j) (docs/math.md)."""
    if EXACT:
        size = a * a + b * b
        left = size * cos
        right = size * sin
    else:
        up = a * (a * cos - b * sin)
        down = b * (a * sin + b * cos)
        left = up + down
        right = down - up
    return left, right
