"""LLaMA-family checkpoints in and out; the weight map is data (farspan.convert.families)."""

from farspan.convert.calibrate import CalibrationConfig, CalibrationReport, LayerReport, calibrate
from farspan.convert.pretrained import convert_folder, from_pretrained
from farspan.convert.target import replace_attention

__all__ = [
    "CalibrationConfig",
    "CalibrationReport",
    "LayerReport",
    "calibrate",
    "convert_folder",
    "from_pretrained",
    "replace_attention",
]
