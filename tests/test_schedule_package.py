"""dash_attn.schedule as users and the reference see it: resolve, problem, the command line, the chart."""

import subprocess
import sys

import pytest

from dash_attn import _schedule, schedule
from dash_attn.schedule import gantt
from dash_attn.schedule.__main__ import main


def test_policies_are_the_integers_of_the_compiled_ops():
    names = ("descending", "spt", "shift", "symmetric_shift", "order_free", "ascending", "atomic")
    assert (*schedule.POLICIES, *schedule.YARDSTICKS) == names
    assert [schedule.policy_number(name) for name in names] == list(range(len(names)))


def test_yardsticks_cannot_be_chosen():
    assert schedule.YARDSTICKS == ("ascending", "atomic")
    for causal in (False, True):
        for name in schedule.YARDSTICKS:
            with pytest.raises(ValueError, match=f"schedule must be one of 'auto', .*, got '{name}'"):
                schedule.resolve(name, causal=causal)
        assert schedule.resolve("auto", causal=causal) in schedule.POLICIES


@pytest.mark.parametrize("causal", [False, True])
def test_resolve(causal):
    shape, mask = dict(causal=causal), "causal" if causal else "full"
    assert schedule.resolve("auto", **shape) in schedule.POLICIES
    for policy in schedule.POLICIES:
        if policy not in schedule.fitting(causal=causal):
            with pytest.raises(ValueError, match=f"schedule must be one of 'auto', .* {mask} mask, got '{policy}'"):
                schedule.resolve(policy, **shape)
        else:
            assert schedule.resolve(policy, **shape) == policy
    with pytest.raises(ValueError, match="schedule must be one of 'auto', .*, got 'fast'"):
        schedule.resolve("fast", **shape)


def test_fitting():
    both = ("descending", "spt", "order_free")
    assert set(schedule.fitting(causal=False)) == {*both, "shift"}
    assert set(schedule.fitting(causal=True)) == {*both, "symmetric_shift"}


@pytest.mark.parametrize("mask", [dict(causal=False), dict(causal=True), dict(causal=False, window=(9, 0))], ids=str)
@pytest.mark.parametrize(
    "call, where",
    [
        (dict(head_dim=136), "at head dims above 128"),
        (dict(head_dim=64, value_head_dim=256), "at head dims above 128"),
        (dict(head_dim=64, changed_scores=True), "with softcap, alibi_slopes or dropout"),
        (dict(head_dim=64, dropout=True), "with softcap, alibi_slopes or dropout"),
        (dict(head_dim=192, value_head_dim=128, dropout=True), "with softcap, alibi_slopes or dropout"),
    ],
    ids=str,
)
def test_wide_heads_changed_scores_and_dropout_have_two_policies(call, where, mask):
    fitting = ("descending", "spt")
    assert schedule.fitting(**call, **mask) == fitting
    assert schedule.resolve("auto", **call, **mask) in fitting
    for policy in ("shift", "symmetric_shift", "ascending", "atomic"):
        message = f"schedule must be one of 'auto', 'descending', 'spt' {where}, got '{policy}'"
        with pytest.raises(ValueError) as raised:
            schedule.resolve(policy, **call, **mask)
        assert str(raised.value) == message
    assert [schedule.resolve(policy, **call, **mask) for policy in fitting] == list(fitting)


@pytest.mark.parametrize("call, got", [
    (dict(head_dim=136), "a head dim above 128"),
    (dict(head_dim=64, value_head_dim=256), "a head dim above 128"),
    (dict(head_dim=64, dropout=True), "dropout"),
    (dict(head_dim=256, dropout=True), "dropout"),
    (dict(head_dim=64, changed_scores=True), "softcap or alibi_slopes"),
    (dict(head_dim=256, changed_scores=True), "softcap or alibi_slopes"),
], ids=str)  # fmt: skip
def test_order_free_is_for_plain_scores_up_to_128(call, got):
    message = f"schedule='order_free' supports plain scores without dropout up to head dim 128; got {got}"
    for mask in (dict(causal=True), dict(causal=False, window=(9, 0))):
        with pytest.raises(ValueError) as raised:
            schedule.resolve("order_free", **call, **mask)
        assert str(raised.value) == message
    assert schedule.resolve("order_free", head_dim=128, causal=True, attention_chunk=7) == "order_free"


def test_a_problem_of_wide_heads_has_the_policies_of_windows():
    with pytest.raises(ValueError, match="at head dims above 128, got 'shift'"):
        schedule.problem("shift", 300, 300, causal=False, head_dim=256)


def test_narrow_and_plain_heads_have_every_policy_of_their_mask():
    for head_dim, value_head_dim in ((128, 128), (8, 128), (96, 40)):
        for mask in (dict(causal=False), dict(causal=True), dict(causal=True, attention_chunk=4)):
            found = schedule.fitting(head_dim=head_dim, value_head_dim=value_head_dim, **mask)
            assert found == tuple(policy for policy in schedule.POLICIES if _schedule.fits(policy, **mask))


def test_add_order():
    square = schedule.problem("spt", 300, 300, head_dim=64, causal=True, tile_q=128, tile_k=128)
    assert schedule.add_order("spt", square) == [[0], [1, 0], [2, 1, 0]]
    more_queries = schedule.problem("descending", 600, 100, causal=True, tile_q=128, tile_k=128)
    assert schedule.add_order("descending", more_queries) == [[], [], [], [0], [0]], "rows that see no key"
    with pytest.raises(ValueError, match=r"head_dim must be in \[1, 257\), got 264"):
        schedule.problem("spt", 300, 300, head_dim=264, causal=True)


def test_problem_takes_the_kernels_tiles_and_clusters():
    for policy, cta_group in [("descending", 1), ("spt", 1), ("shift", 1)]:
        assert schedule.problem(policy, 100, 100, causal=False).cta_group == cta_group
    assert schedule.problem("symmetric_shift", 100, 100, causal=True).cta_group == 2
    tiles = schedule.problem("auto", 1000, 2000, causal=True, head_dim=40, heads=12, kv_heads=4, tile_k=32)
    assert (tiles.tile_q, tiles.tile_k) == (schedule.tile_shape(64)[0], 32)
    assert (tiles.kv_heads, tiles.group_size) == (4, 3)
    with pytest.raises(ValueError, match="heads must be a positive multiple of kv_heads=4, got 6"):
        schedule.problem("spt", 100, 100, causal=True, heads=6, kv_heads=4)


def test_help_runs_as_a_module():
    shown = subprocess.run([sys.executable, "-m", "dash_attn.schedule", "--help"], capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert "--seqlen-q" in shown.stdout and "--png" in shown.stdout


def test_table(capsys):
    assert main(["--seqlen-q", "2048", "--heads", "4", "--batch", "1"]) == 0
    printed = capsys.readouterr().out
    causal, full = printed.split("full mask")

    def rows(table):
        return [line.split()[0] for line in table.splitlines()[2:-1]]

    assert rows(causal) == ["descending", "spt", "symmetric_shift", "order_free"]
    assert rows(full) == ["descending", "spt", "shift", "order_free"]
    assert "makespan" in causal and "idle share" in causal and "critical path" in causal
    assert "times in microseconds" in causal and "times in microseconds" in full
    # 4 heads are too few for 132 SMs: the longest KV tile, 32 query tiles of 1.75 + 0.95 us, is the bound.
    assert f"ideal {32 * 2.7:.6g}:" in causal


def test_the_table_interleaves_heads_as_the_kernel_does(capsys):
    """With the model's own default of one head at a time, descending would come out behind spt, which the kernel's is
    not."""
    assert main(["--seqlen-q", "8192", "--mask", "causal"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    of_ideal = {line[0]: float(line[-1]) for line in lines[1:-1]}
    assert of_ideal["descending"] < 1.05
    assert of_ideal["descending"] <= min(of_ideal[policy] for policy in ("spt", "symmetric_shift"))


def test_the_unit_is_that_of_the_costs(capsys):
    assert main(["--seqlen-q", "512", "--product-time", "2", "--mask", "full"]) == 0
    assert "times in the unit of the costs given" in capsys.readouterr().out


def test_chart(tmp_path, capsys):
    path = tmp_path / "chart.png"
    shape = ["--seqlen-q", "512", "--batch", "1", "--heads", "2", "--sms", "4", "--mask", "causal"]
    assert main([*shape, "--png", str(path)]) == 0
    image = path.read_bytes()
    assert image.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = (int.from_bytes(image[at : at + 4], "big") for at in (16, 20))
    assert width > 1000 and height > 400
    assert f"wrote {path}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--seqlen-q", "0"], "seqlen_q must be at least 1, got 0"),
        (["--head-dim", "264"], "head_dim must be in [1, 257), got 264"),
        (["--heads", "3", "--kv-heads", "2"], "heads must be a positive multiple of kv_heads=2, got 3"),
        (["--heads", "0"], "heads must be at least 1, got 0"),
        (["--kv-heads", "0"], "kv_heads must be at least 1, got 0"),
        (["--batch", "-2"], "batch must be at least 1, got -2"),
        (["--seqlen-q", "100000000"], "batch * heads * query tiles * KV tiles must be at most 20000000, got 2 * 16 * "),
        (["--sms", "0"], "sms must be in"),
        (["--seqlen-q", "256", "--png", "chart.svg"], "path must end in .png, got 'chart.svg'"),
        (["--seqlen-q", "16384", "--mask", "full", "--png", "chart.png"], "recorded tasks each, got"),
    ],
)
def test_bad_arguments_end_in_one_line(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    printed, error = capsys.readouterr()
    assert printed == "" or "--png" in arguments, "a table's head before the error"
    assert message in error and error.startswith("error: ") and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_chart_refuses_simulations_without_tasks(tmp_path):
    tiles = schedule.problem("spt", 512, 512, causal=True)
    with pytest.raises(ValueError, match="simulations must have between 1 and"):
        gantt.draw([schedule.simulate("spt", tiles, sms=2)], tmp_path / "chart.png")
    with pytest.raises(ValueError, match="simulations must hold at least one"):
        gantt.draw([], tmp_path / "chart.png")
