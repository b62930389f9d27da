"""One kernel of each pass on the host (emulation.py), for `make test`; the other kernels are in test_forward_on_host.py
and test_backward_on_host.py."""

import emulation
import pytest

CALL = dict(mask="causal", heads=2, kv_heads=1, seqlen_q=150, seqlen_k=200)


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_a_kernel(tmp_path, name):
    program = emulation.build(emulation.source(tmp_path), name, "64", tmp_path / "program", only=CALL)
    emulation.check(program, ((1, 0), (3, 1)), **CALL)
