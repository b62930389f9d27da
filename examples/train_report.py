"""Summarizes the times of a run of examples/train.py, and draws a heat map of ranks by layers that shows a slow GPU.

python examples/train_report.py FOLDER --png heat_map.png
"""

import argparse
import pathlib
import sys

from training import report


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path, help="the --out of the run")
    parser.add_argument("--skip", type=int, default=3, metavar="STEPS", help="number of first steps to leave out")
    parser.add_argument("--png", type=pathlib.Path, help="draw the heat map; needs matplotlib")
    arguments = parser.parse_args(argv)
    try:
        times = report.read(arguments.folder, arguments.skip)
        print(report.text(times))
        if arguments.png is not None:
            report.draw(times, arguments.png)
    except (ValueError, ImportError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
