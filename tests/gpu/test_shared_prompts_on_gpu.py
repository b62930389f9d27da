"""examples/shared_prompts.py on a GPU, in a small size."""

import pathlib
import subprocess
import sys

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "shared_prompts.py"
SIZES = ["--prompt", "500", "--answer", "200", "--layers", "2", "--width", "512", "--heads", "4", "--kv-heads", "2"]


def test_the_example():
    done = subprocess.run([sys.executable, str(EXAMPLE), *SIZES, "--rounds", "2"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ms, of which attention") == 2
