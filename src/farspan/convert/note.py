"""Where a converted model came from, remembered in its folder: what a fine-tuning can learn from."""

import json
from pathlib import Path

from farspan.errors import require

NAME = "conversion.json"


def write_note(folder: Path, source: Path) -> None:
    """Leave the place of the original in a model's folder.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     write_note(Path(folder), Path("/models/llama"))
    ...     print(read_note(Path(folder)).name)
    llama
    """
    (folder / NAME).write_text(json.dumps({"schema": 1, "source": str(source.absolute())}, indent=1) + "\n")


def read_note(folder: Path) -> Path | None:
    """The original of a converted folder; None where nothing is said."""
    file = folder / NAME
    if not file.is_file():
        return None
    try:
        source = json.loads(file.read_text()).get("source")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{str(file)!r} must be a JSON object, got something else ({error}); remove it") from error
    require(isinstance(source, str), f"'source' in {str(file)!r} must be a path, got {source!r}; remove the file")
    return Path(source)
