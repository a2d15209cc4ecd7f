"""Random operations without end, as in ``test_random``, but millions of them.

    python -m tests.services.scheduler.soak [--operations 5000000] [--seed 0]

Stops at the first run that fails and prints its seed, which ``--operations 1 --seed SEED`` repeats.
"""

from __future__ import annotations

import argparse
import random
import time

from tests.services.scheduler.test_random import RUN, run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operations", type=int, default=5_000_000)
    parser.add_argument("--seed", type=int, default=1 << 20, help="of the first run; the next one has the next seed")
    args = parser.parse_args()
    began = told = time.monotonic()
    for number in range(-(-args.operations // RUN)):
        try:
            run(random.Random(args.seed + number), RUN)
        except BaseException:
            print(f"failed with --operations 1 --seed {args.seed + number}", flush=True)
            raise
        if time.monotonic() - told > 10:
            told = time.monotonic()
            print(f"{(number + 1) * RUN} operations in {told - began:.0f} s", flush=True)
    print(f"{args.operations} operations, no failure")


if __name__ == "__main__":
    main()
