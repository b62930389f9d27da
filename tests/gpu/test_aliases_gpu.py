"""flash_attn's names on a Hopper GPU: a program that knows them alone runs our kernels, whichever way it gets them."""

import pathlib

import alias_support
import pytest


@pytest.fixture(scope="module")
def started_python(tmp_path_factory):
    return alias_support.environment_with_start_file(tmp_path_factory.mktemp("venv"))


@pytest.mark.parametrize("way", alias_support.WAYS)
def test_program(way, started_python, device):
    alias_support.check_program(way, device, started_python)


def test_example():
    example = pathlib.Path(__file__).parents[2] / "examples" / "flash_attn_names.py"
    stdout, _ = alias_support.python("-m", "dash_attn.run", example)
    assert stdout.splitlines()[-1] == "the gradients of three runs have the same bits"
