"""Alias until merged: the names of farspan.bench that reproduce/work.py and tests of other parts still import."""

from types import SimpleNamespace

from farspan.bench import Steps
from farspan.bench import cosformer as _cosformer
from farspan.bench import decode as _decode
from farspan.bench import layer as _layer


def _taken(steps: Steps):  # type: ignore[no-untyped-def]
    return ((label, measure()) for label, measure in steps)


cosformer = SimpleNamespace(
    run=lambda *a, **k: _taken(_cosformer.steps(*a, **k)),
    parts=lambda lengths, peers: len(lengths) + (len(lengths) > 1) + len(peers) + 3,
    in_fresh_process=None,
)
cosformer_gpu = SimpleNamespace(
    run=lambda lengths, quick=False, **k: _taken(_cosformer.kernel_steps(_cosformer.shapes(lengths), **k)),
    parts=lambda lengths: 2 + 4 * len(lengths),
)
layer = SimpleNamespace(
    run=lambda *a, **k: _taken(_layer.steps(*a, **k)),
    parts=lambda todo: len(_layer.steps(todo)),
    shapes=_layer.shapes,
    QUICK=_layer.QUICK,
)
decode = SimpleNamespace(
    run=lambda *a, **k: _taken(_decode.steps(*a, **k)),
    parts=lambda contexts, batches, prompts, compile: len(
        _decode.steps("tiny", contexts=contexts, batches=batches, prompts=prompts, compile=compile)
    ),
)
