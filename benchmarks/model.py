"""The model of the machine: the time of each policy, from costs that `benchmarks.calibrate` measured.

    python -m benchmarks.model calibration.json --machine machine.json     fits the costs; about a minute, no GPU
    python -m benchmarks.report machine.json calibration.json ...          compares prediction and measurement

The main kernel is simulated tile by tile (`csrc/model/simulator.h`) in SM clocks. The kernels around it take a time by
bytes, and the clock falls with the shares of time in which the tensor cores and memory are busy, because power is
limited. docs/model.md explains each cost.
"""

import argparse
import dataclasses
import json
import math
import pathlib
import statistics

import torch

from dash_attn import _schedule, schedule

RESULTS = pathlib.Path(__file__).parent / "results"
MACHINE, CALIBRATION = RESULTS / "machine_h200.json", RESULTS / "calibration_h200.json"
# Properties of the compiled kernel: staging buffers of dQ, warps that add, steps that are loaded ahead.
KERNEL = {
    "staging": _schedule.BACKWARD_STAGES,
    "adders": _schedule.BACKWARD_ADDERS,
    "loads_ahead": _schedule.BACKWARD_STAGES,
}
# The approximate clocks for which a CTA looks for helpers before it divides a KV tile (csrc/backward/whole_tiles.h).
PATIENCE = 10_000
# The clocks in which a work tile adds its dK and dV to the sum of earlier splits, in addition to a work tile's cost.
# Fitted to forced splits at head_dim 128 (`benchmarks.splits`), because no probe has splits.
SPLIT_CLOCKS = 4_000
ELEMENT_BYTES, SUM_BYTES = 2, 4
TENSOR_FLOPS = 4096  # per clock and SM
MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Machine:
    """The costs. Times are in SM clocks unless the name says otherwise; costs by head_dim are dictionaries."""

    sms: int
    start: float  # of the kernel, before its first work tile's loads
    launch: float  # from the first CTA's start to the last one's
    step: dict[int, float]  # the products of a tile
    mask: dict[int, float]  # additional time of the products if the diagonal crosses the tile
    work: dict[int, float]  # from a work tile's last products to the next one's first
    code: dict[str, float]  # by `code_key`: the relative time of each separately compiled kernel
    spread: float  # relative variation of products, in both directions
    add: float  # of a dQ tile into L2
    signal: float  # from the end of an add until the next CTA sees it
    poll: float  # of a semaphore that already has the rank
    load: float  # until a short work tile's loads have been issued
    memory: float  # bytes per clock
    miss: float  # additional time of products whose query tile comes from memory
    cache_mib: float  # traffic after which a tile must be read from memory again
    around_us: dict[int, list[list[float]]]  # [elements of Q, microseconds] of the other kernels and the launches
    # The clock is idle_mhz minus these, times the shares of time that the tensor cores and device memory are busy.
    idle_mhz: float
    mhz_per_tensor_share: float
    mhz_per_memory_share: float
    most_mhz: float


@dataclasses.dataclass(frozen=True)
class Prediction:
    us: float
    clocks: float  # of the main kernel
    mhz: float


def read(path: pathlib.Path) -> Machine:
    fields = json.loads(path.read_text())
    by_head_dim = {f.name for f in dataclasses.fields(Machine) if str(f.type).startswith("dict[int")}
    return Machine(**{k: {int(d): x for d, x in v.items()} if k in by_head_dim else v for k, v in fields.items()})


def dumps(machine: Machine) -> str:
    def rounded(value):
        if isinstance(value, dict):
            return {key: rounded(x) for key, x in value.items()}
        return value if isinstance(value, (list, int)) else float(f"{value:.5g}")

    lines = (f" {json.dumps(k)}: {json.dumps(rounded(v))}" for k, v in dataclasses.asdict(machine).items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def lengths(shape) -> tuple[int, int]:
    """Returns (queries, keys) of a benchmark's shape or a probe."""
    return getattr(shape, "seqlen_q", None) or shape.seqlen, getattr(shape, "seqlen_k", None) or shape.seqlen


def tiles_of(policy: str, shape) -> schedule.Problem:
    """Returns the problem of a benchmark's shape, of a probe, or of a row of a calibration."""
    seqlen_q, seqlen_k = lengths(shape)
    counts = dict(batch=shape.batch, heads=shape.heads, kv_heads=shape.kv_heads, head_swizzle=None)
    # A row of a calibration has the number of splits of its kernel, because the rule may change afterwards.
    counts["splits"] = getattr(shape, "splits", None)
    return schedule.problem(policy, seqlen_q, seqlen_k, causal=shape.causal, head_dim=shape.head_dim, **counts)


def play(machine: Machine, policy: str, shape, sms: int | None = None):
    """Simulates the main kernel, in SM clocks."""
    tiles = tiles_of(policy, shape)
    sms = sms or machine.sms
    head_dim = max(64, shape.head_dim)
    row_bytes = head_dim * ELEMENT_BYTES
    clusters = sms // tiles.cta_group
    options = _schedule.SimulationOptions()
    settings = dict(
        KERNEL,
        sms=sms,
        product_time=machine.step[head_dim] * machine.code.get(code_key(policy, shape), 1.0),
        spread=machine.spread,
        mask_time=machine.mask[head_dim],
        add_time=machine.add,
        signal_time=machine.signal,
        poll_time=machine.poll,
        work_time=machine.work[head_dim],
        split_time=SPLIT_CLOCKS,
        load_time=machine.load,
        memory_work_time=4 * tiles.tile_k * row_bytes / machine.memory,
        memory_tile_time=tiles.tile_q * (2 * row_bytes + SUM_BYTES * head_dim) / machine.memory,
        miss_time=machine.miss,
        cache_time=machine.cache_mib * MIB / machine.memory,
        launch_times=[machine.start + machine.launch * i / clusters for i in range(clusters)],
        mapping="counter",
        patience=PATIENCE,
    )
    for name, value in settings.items():
        setattr(options, name, value)
    return _schedule.simulate(policy, tiles, options)


def code_key(policy: str, shape) -> str:
    return f"{max(64, shape.head_dim)} {'causal' if shape.causal else 'full'} {policy}"


def elements(shape) -> int:
    return shape.batch * shape.heads * lengths(shape)[0] * shape.head_dim


def around_us(machine: Machine, shape) -> float:
    """Returns the microseconds around the main kernel: interpolated by size, and proportional beyond the ends."""
    points = machine.around_us[max(64, shape.head_dim)]
    size = elements(shape)
    (x0, y0), (x1, y1) = points[0], points[-1]
    if size <= x0:
        return y0
    if size >= x1:
        return y1 * size / x1
    for (x0, y0), (x1, y1) in zip(points, points[1:]):
        if size <= x1:
            return y0 + (y1 - y0) * (size - x0) / (x1 - x0)


def tensor_clocks(shape, tiles: schedule.Problem) -> float:
    """Returns the minimum clocks of an SM's tensor cores for one tile."""
    return 10 * tiles.tile_q * tiles.tile_k * max(64, shape.head_dim) / TENSOR_FLOPS


def predict(machine: Machine, policy: str, shape) -> Prediction:
    """Predicts the time of a whole backward call."""
    main = play(machine, policy, shape)
    around = around_us(machine, shape)
    tensor = main.num_tasks * tensor_clocks(shape, tiles_of(policy, shape)) / machine.sms
    power = machine.mhz_per_tensor_share * tensor + machine.mhz_per_memory_share * main.memory_time
    mhz = machine.most_mhz
    for _ in range(8):
        mhz = min(machine.most_mhz, machine.idle_mhz - power / (main.makespan + around * mhz))
    return Prediction(main.makespan / mhz + around, main.makespan, mhz)


def minimise(function, start: list[float], evaluations: int) -> list[float]:
    """Minimizes with Nelder and Mead's simplex over the logarithms of positive numbers."""

    def at(point):
        return function([math.exp(x) for x in point])

    def mix(a, b, share):
        return [x + share * (y - x) for x, y in zip(a, b)]

    origin = [math.log(x) for x in start]
    points = [origin] + [[x + 0.2 * (i == j) for j, x in enumerate(origin)] for i in range(len(origin))]
    simplex = sorted((at(point), point) for point in points)
    used = len(points)
    while used < evaluations:
        *rest, (worst_value, worst) = simplex
        centre = [statistics.fmean(xs) for xs in zip(*(point for _, point in rest))]
        reflected = mix(centre, worst, -1)
        found = (at(reflected), reflected)
        used += 1
        if found[0] < simplex[0][0]:
            further = mix(centre, worst, -2)
            found = min(found, (at(further), further))
            used += 1
        elif found[0] >= rest[-1][0]:
            nearer = mix(centre, worst if worst_value < found[0] else reflected, 0.5)
            inside = (at(nearer), nearer)
            used += 1
            if inside[0] >= min(worst_value, found[0]):
                rest = [(at(p), p) for p in (mix(rest[0][1], point, 0.5) for _, point in rest)]
                used += len(rest)
                inside = (worst_value, mix(rest[0][1], worst, 0.5))
                inside = (at(inside[1]), inside[1])
            found = inside
        simplex = sorted([*rest, found])
    return [math.exp(x) for x in simplex[0][1]]


class Row:
    """A row of a calibration, with the attributes of a shape."""

    def __init__(self, row: dict):
        self.__dict__.update(row)

    @property
    def causal(self) -> bool:
        return self.mask == "causal"


def is_chaotic(policy: str, causal: bool) -> bool:
    """Whether work tiles wait for ones that were taken earlier but have not begun (ascending and causal):
    docs/model.md."""
    return causal and policy == "ascending"


def fit_around(calibration: dict) -> dict[int, list[list[float]]]:
    points: dict[int, list[list[float]]] = {}
    for row in map(Row, calibration["kernels"]):
        points.setdefault(row.head_dim, []).append([elements(row), round(row.us - row.backward, 2)])
    return {head_dim: sorted(found) for head_dim, found in points.items()}


def memory_bandwidth(calibration: dict) -> float:
    """Returns the bytes per clock of streaming: of the kernel before the main one, which reads O and dO."""
    row = max(map(Row, calibration["kernels"]), key=elements)
    return 2 * ELEMENT_BYTES * elements(row) / (row.preprocess * row.mhz)


def fit_clock(calibration: dict, machine: Machine) -> Machine:
    """Fits the clock over the busy shares of tensor cores and memory, from the clocks of the grid."""
    shares, rates = [], []
    for row in map(Row, calibration["grid"]):
        if is_chaotic(row.schedule, row.causal):
            continue
        main = play(machine, row.schedule, row)
        tensor = main.num_tasks * tensor_clocks(row, tiles_of(row.schedule, row)) / machine.sms
        for us, mhz in zip(row.us, row.mhz):
            shares.append([1.0, tensor / (us * mhz), main.memory_time / (us * mhz)])
            rates.append([mhz])
    found = torch.linalg.lstsq(torch.tensor(shares, dtype=torch.float64), torch.tensor(rates, dtype=torch.float64))
    idle, tensor_slope, memory_slope = found.solution.flatten().tolist()
    return dataclasses.replace(
        machine,
        idle_mhz=idle,
        mhz_per_tensor_share=-tensor_slope,
        mhz_per_memory_share=-memory_slope,
        most_mhz=max(rates)[0],
    )


def fit(calibration: dict, evaluations: int = 1000) -> Machine:
    """Fits the costs to the probes. The grid is used only for the clock."""
    latency = calibration["latency"]
    sms = calibration["meta"]["sms"]
    probes = [row for row in map(Row, calibration["probes"]) if not is_chaotic(row.schedule, row.causal)]
    # The chain is measured with a poll, at the highest clock.
    ghz = max(row.mhz for row in probes) / 1e3
    hop = latency["hop_ns"]
    machine = Machine(
        sms=sms,
        start=2000.0,
        launch=latency["launch_ns"] * ghz,
        step={64: 4700.0, 128: 3900.0},
        mask={64: 200.0, 128: 300.0},
        work={64: 5500.0, 128: 6500.0},
        code={},
        spread=0.1,
        add=latency["add_clocks"][f"{sms} CTAs, every 4000 clocks"],
        signal=hop["8 CTAs, 0 bytes"] * ghz,
        poll=latency["read_clocks"]["far"],
        load=latency["read_clocks"]["far"] * 5,
        memory=memory_bandwidth(calibration),
        miss=300.0,
        cache_mib=32.0,
        around_us=fit_around(calibration),
        idle_mhz=0.0,
        mhz_per_tensor_share=0.0,
        mhz_per_memory_share=0.0,
        most_mhz=0.0,
    )
    head_dims = sorted(machine.step)

    def with_costs(values: list[float]) -> Machine:
        start, signal, miss, cache_mib, spread, *rest = values
        step, work, mask = (dict(zip(head_dims, rest[i::3])) for i in range(3))
        shared = dict(start=start, signal=signal, miss=miss, cache_mib=cache_mib, spread=min(spread, 0.5))
        return dataclasses.replace(machine, **shared, step=step, work=work, mask=mask)

    def ratio(tried: Machine, row: Row) -> float:
        return play(tried, row.schedule, row, row.sms).makespan / (row.backward * row.mhz)

    def error(values: list[float]) -> float:
        tried = with_costs(values)
        return sum(math.log(ratio(tried, row)) ** 2 for row in probes)

    costs = [machine.start, machine.signal, machine.miss, machine.cache_mib, machine.spread]
    for head_dim in head_dims:
        costs += [machine.step[head_dim], machine.work[head_dim], machine.mask[head_dim]]
    fitted = with_costs(minimise(error, costs, evaluations))
    return fit_clock(calibration, dataclasses.replace(fitted, code=fit_code(calibration, fitted)))


def fit_code(calibration: dict, machine: Machine) -> dict[str, float]:
    """Returns how much each kernel's products differ from the mean for the same head_dim and mask."""
    ratios: dict[str, dict[str, float]] = {}
    for row in map(Row, calibration["probes"]):
        if row.shows == "code":
            ratio = row.backward * row.mhz / play(machine, row.schedule, row, row.sms).makespan
            ratios.setdefault(f"{row.head_dim} {row.mask}", {})[code_key(row.schedule, row)] = ratio
    means = {kind: statistics.geometric_mean(found.values()) for kind, found in ratios.items()}
    return {key: round(ratio / means[kind], 4) for kind, found in ratios.items() for key, ratio in found.items()}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("calibration", type=pathlib.Path)
    parser.add_argument("--machine", type=pathlib.Path, required=True, help="file for the fitted machine")
    parser.add_argument("--evaluations", type=int, default=1000, help="evaluations of the error during the fit")
    arguments = parser.parse_args(argv)
    machine = fit(json.loads(arguments.calibration.read_text()), arguments.evaluations)
    arguments.machine.write_text(dumps(machine))
    print(dumps(machine), end="")


if __name__ == "__main__":
    main()
