"""What `farspan convert` costs on a CPU without calibration: seconds and peak memory, JSON with provenance.

Example: ``python benchmarks/convert_cost.py SmolLM2-135M-Instruct.Q4_1.gguf --out cost.json``

Each conversion is a process of its own, timed from its start to its end, imports and all. Peak memory is the system's
own high-water mark of resident memory, which counts mapped files as well.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from farspan.benchmark.record import parse_script
from farspan.results import write_result


def cost(source: Path, attention: str) -> dict[str, object]:
    """One conversion, as a row."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "model"
        command = [sys.executable, "-m", "farspan_cli", "convert", source, "--attention", attention, "--out", out]
        began = time.perf_counter()
        child = subprocess.Popen([str(word) for word in command], stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(child.pid, 0)
        seconds = time.perf_counter() - began
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode != 0:
            raise SystemExit(f"farspan convert {source} failed with exit status {child.returncode}")
        written = sum(file.stat().st_size for file in out.iterdir())
    return {
        "kind": "convert",
        "attention": attention,
        "seconds": seconds,
        "peak_bytes": usage.ru_maxrss * 1024,  # Linux counts in kB
        "source_bytes": source.stat().st_size,
        "written_bytes": written,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="a GGUF file")
    parser.add_argument("--attention", nargs="+", default=["rope", "coca-exact"])
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    arguments = parse_script(parser)
    rows = [cost(arguments.source, attention) for attention in arguments.attention]
    for row in rows:
        print(row)
    if arguments.out is not None:
        write_result(arguments.out, rows, device="cpu", seed=0)


if __name__ == "__main__":
    main()
