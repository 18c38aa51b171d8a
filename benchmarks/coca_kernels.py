"""CoCA's Triton kernels against RoPE on SDPA's: checks first, then times, JSON with provenance.

Example: ``python benchmarks/coca_kernels.py --quick --out results/coca-kernels.json`` (a CUDA device).
``--toy`` runs the same steps at toy sizes in Triton's interpreter, on any machine; its times mean nothing.
``--tune`` tries other tile sizes for decoding instead, and prints the fastest.
"""

import argparse
import os
import sys
import time
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="of the decoding shapes, only those that the aims name")
    parser.add_argument("--toy", action="store_true", help="toy sizes on the CPU, in the interpreter")
    parser.add_argument("--tune", action="store_true", help="try tile sizes for decoding, each checked first")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    arguments = parser.parse_args()
    if arguments.repeats < 1:
        print(f"--repeats must be ≥ 1, got {arguments.repeats}; try --repeats 30", file=sys.stderr)
        return 2
    if arguments.toy:
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

    import torch

    from farspan.benchmark import kernels, tuning
    from farspan.benchmark.agree import ResultsDifferError
    from farspan.benchmark.record import recorded

    if not (arguments.toy or torch.cuda.is_available()):
        print("no CUDA device; --toy takes the same steps without one", file=sys.stderr)
        return 2
    device, begun = "cpu" if arguments.toy else "cuda", time.perf_counter()
    steps = (
        tuning.run(device=device, repeats=arguments.repeats, toy=arguments.toy)
        if arguments.tune
        else kernels.run(
            quick=arguments.quick,
            device=device,
            seed=arguments.seed,
            repeats=arguments.repeats,
            toy=arguments.toy,
        )
    )
    try:
        for name, new in recorded(steps, arguments.out, device=device, seed=arguments.seed):
            print(f"{time.perf_counter() - begun:6.1f} s  {name}  {summary(new[-1]) if new else ''}", flush=True)
    except OSError as error:
        print(error, file=sys.stderr)
        return 2
    except ResultsDifferError as error:
        print(f"no figures: {error}", file=sys.stderr)
        return 1
    if arguments.out is not None:
        print(f"written: {arguments.out}")
    return 0


def summary(row: dict) -> str:
    """One line of what a row says."""
    times = {name: spread["median"] for name, spread in row.get("milliseconds", {}).items() if spread}
    parts = [f"{name} {value:.3f} ms" for name, value in times.items()]
    parts += [f"{name} missing" for name in row.get("missing", {})]
    parts += [f"{name} ×{value:.2f}" for name, value in row.get("speedup", {}).items()]
    parts += [f"{name} {value:.0%} of copy" for name, value in row.get("of_copy", {}).items()]
    if "backward" in row:
        parts.append(f"backward: {summary(row['backward'])}")
    if "terabytes_a_second" in row and row["kind"] == "copy":
        parts.append(f"{row['terabytes_a_second']:.2f} TB/s")
    return ", ".join(parts)


if __name__ == "__main__":
    sys.exit(main())
