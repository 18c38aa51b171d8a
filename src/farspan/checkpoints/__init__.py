"""Read LLaMA-family checkpoints, replace their attention, write, export and run them."""

from farspan.checkpoints.calibrate import CalibrationConfig, calibrate
from farspan.checkpoints.configuration import config_of, write_config
from farspan.checkpoints.convert import (
    convert_folder,
    fingerprint,
    from_pretrained,
    load,
    read_note,
    save,
    write_note,
)
from farspan.checkpoints.export import export_as, export_folder
from farspan.checkpoints.generate import generate
from farspan.checkpoints.replace import Target, attention_reach, replace_attention
from farspan.checkpoints.sources import open_source, text_tokenizer

__all__ = [
    "CalibrationConfig",
    "Target",
    "attention_reach",
    "calibrate",
    "config_of",
    "convert_folder",
    "export_as",
    "export_folder",
    "fingerprint",
    "from_pretrained",
    "generate",
    "load",
    "open_source",
    "read_note",
    "replace_attention",
    "save",
    "text_tokenizer",
    "write_config",
    "write_note",
]
