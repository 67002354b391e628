"""Kill writers of a store many times and read everything after each: a long test, run by hand.

python tests/soak_store.py --kills 200
"""

import argparse
import tempfile
import time

from store_worker import MEMORY, kill_everywhere, kill_writers


def everywhere():
    for budget in (None, 60_000):
        for tear in (False, True):
            with tempfile.TemporaryDirectory(dir=MEMORY) as directory:
                kills = kill_everywhere(directory, budget, tear)
            where = "inside each write" if tear else "before each line"
            print(f"budget {budget}: {kills} kills {where}, nothing lost or wrong")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200, help="writer processes to kill")
    parser.add_argument("--seed", type=int, default=time.time_ns(), help="repeats the choices")
    parser.add_argument("--everywhere", action="store_true", help="also before every line")
    arguments = parser.parse_args()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        tally = kill_writers(directory, arguments.kills, arguments.seed)
    if arguments.everywhere:
        everywhere()
    print(
        f"{tally['kills']} kills ({tally['opened_late']} before the first write): "
        f"{tally['served']} payloads read, all right; nothing of {tally['reported']} reported "
        f"writes lost; {time.monotonic() - begin:.0f} s, seed {arguments.seed}"
    )


if __name__ == "__main__":
    main()
