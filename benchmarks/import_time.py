"""What `import farspan` adds to `import torch, transformers`, and the first model to that; JSON with provenance.

Example: ``python benchmarks/import_time.py --out results/import-cpu.json``
"""

import argparse
import statistics
import subprocess
import sys
from pathlib import Path

from farspan.benchmark.record import parse_script
from farspan.results import write_result

CODE = """
import time
import torch, transformers
begin = time.perf_counter()
import farspan
loaded = time.perf_counter()
farspan.FarspanForCausalLM(farspan.FarspanConfig.preset("tiny"))
print(loaded - begin, time.perf_counter() - loaded)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9, help="fresh processes, after one that fills the disk's cache")
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    options = parse_script(parser)
    if options.repeats < 1:
        parser.error(f"--repeats must be at least 1, got {options.repeats}")
    found = []
    for _ in range(options.repeats + 1):
        done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
        found.append([float(seconds) for seconds in done.stdout.split()])
    rows = []
    for what, seconds in zip(("import farspan", "first model"), zip(*found[1:], strict=True), strict=True):
        row = {"kind": "import", "what": what, "seconds": seconds, "median": statistics.median(seconds)}
        print(f"{what}: {row['median']:.2f} s ({min(seconds):.2f} to {max(seconds):.2f})")
        rows.append(row)
    if options.out is not None:
        write_result(options.out, rows, device="cpu", seed=0)


if __name__ == "__main__":
    main()
