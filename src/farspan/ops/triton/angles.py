"""Angles computed inside a kernel: no table in memory, no loss of precision at far positions."""

import triton
import triton.language as tl


@triton.jit
def cos_sin(phase):
    """Return cos and sin (float32, within 2⁻²³) of an int64 phase in units of 2⁻⁶⁴ turns (rotary.fixed_point).

    Integer arithmetic reduces the upper half of the phase to π/4 around the nearest multiple of π/2. There the Taylor
    polynomials are accurate to 2e-9.
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
def positions_of(positions, row_stride, row, index, live, first):
    """Return the int64 positions of queries or keys: first + index, or loaded from a (b|1, ·) tensor."""
    if positions is None:
        return (first + index).to(tl.int64)
    else:
        return tl.load(positions + row * row_stride + index, mask=live, other=0).to(tl.int64)


@triton.jit
def query_features(a, b, cos, sin, EXACT: tl.constexpr):
    """Return q̃ of the pair (a, b): ‖q_j‖²·(cos, sin), or q∘f(q, m) for slack."""
    if EXACT:
        size = a * a + b * b
        x = size * cos
        y = size * sin
    else:
        x = a * (a * cos - b * sin)
        y = b * (a * sin + b * cos)
    return x, y


@triton.jit
def amplitudes(a, b, cos, sin, EXACT: tl.constexpr):
    """Return (A, B) of a query with score(p) = Σ_j t_j (A_j cos pθ_j + B_j sin pθ_j), see docs/math.md."""
    x, y = query_features(a, b, cos, sin, EXACT)
    if not EXACT:
        x, y = x + y, y - x
    return x, y
