"""LLaMA-family checkpoints in and out: the public names of :mod:`farspan.checkpoints` for conversions."""

from farspan.checkpoints.calibrate import CalibrationConfig, CalibrationReport, calibrate
from farspan.checkpoints.convert import Conversion, convert_folder, from_pretrained
from farspan.checkpoints.replace import Target, replace_attention

__all__ = [
    "CalibrationConfig",
    "CalibrationReport",
    "Conversion",
    "Target",
    "calibrate",
    "convert_folder",
    "from_pretrained",
    "replace_attention",
]
