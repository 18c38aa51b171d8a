"""What a reproduction says of its steps."""

import json
from pathlib import Path


def states(folder: Path) -> dict[str, str]:
    """Step → how it stands."""
    return {row["step"]: row["state"] for row in json.loads((folder / "status.json").read_text())}
