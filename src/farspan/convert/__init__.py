"""LLaMA-family checkpoints in and out; the weight map is data (farspan.convert.families)."""

from farspan.convert.calibrate import CalibrationConfig, CalibrationReport, LayerReport, calibrate
from farspan.convert.pretrained import Conversion, convert_folder, from_pretrained
from farspan.convert.target import Target, replace_attention

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
