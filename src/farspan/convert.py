"""LLaMA-family checkpoints in and out: the public names of :mod:`farspan.checkpoints` for conversions."""

import sys

from farspan.checkpoints import generate
from farspan.checkpoints.calibrate import CalibrationConfig, CalibrationReport, LayerReport, calibrate
from farspan.checkpoints.convert import Conversion, convert_folder, from_pretrained
from farspan.checkpoints.replace import Target, replace_attention
from farspan.checkpoints.sources import text_tokenizer

__all__ = [
    "CalibrationConfig",
    "CalibrationReport",
    "Conversion",
    "LayerReport",
    "Target",
    "calibrate",
    "convert_folder",
    "from_pretrained",
    "replace_attention",
]

# aliases until merged: the modules of version 0.1
generate.text_tokenizer = text_tokenizer  # type: ignore[attr-defined]
for _old, _new in {
    "sources": "sources",
    "configuration": "configuration",
    "load": "convert",
    "folder": "convert",
    "note": "convert",
    "fingerprint": "convert",
    "pretrained": "convert",
    "target": "replace",
    "fit": "calibrate",
    "text": "generate",
}.items():
    sys.modules[f"farspan.convert.{_old}"] = sys.modules[f"farspan.checkpoints.{_new}"]
