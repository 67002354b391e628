"""Kill writers of a store many times and read everything after each: a long test, run by hand.

    python tests/soak_store.py --kills 200
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent)]

from store_worker import kill_writers


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200, help="writer processes to kill")
    parser.add_argument("--seed", type=int, default=time.time_ns(), help="repeats the choices")
    arguments = parser.parse_args()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        tally = kill_writers(directory, arguments.kills, arguments.seed)
    print(
        f"{tally['kills']} kills ({tally['opened_late']} before the first write): "
        f"{tally['served']} payloads read, all right; nothing of {tally['reported']} reported "
        f"writes lost; {time.monotonic() - begin:.0f} s, seed {arguments.seed}"
    )


if __name__ == "__main__":
    main()
