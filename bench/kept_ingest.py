"""Kept sets of a microbatch from the bytes of the wire to tensors on the device, against loops over rows.

`python bench/kept_ingest.py [--json FILE]`. T = 8,192 rows, realistic and flat sizes, on one CPU thread. Ours reads the
sizes and the byte planes of ids and builds `KeptRows`, checks included. The loops build the same four tensors and check
nothing: *per-row decode* reads each row from the same bytes, *per-row tensors* is given the rows decoded already. They
run in turns, in pairs; a speed-up is the median over pairs, of CPU time of the process if that decides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from _kept import KeptCase
from _measure import paired_ratio
from _report import Result, command_line, json_argument, report
from numpy.typing import NDArray

from moerl.contract.array_codec import array_bytes, pack_kept_ids, read_array, read_kept_ids
from moerl.contract.trajectory import KeptSets
from moerl.kernels.kept import KeptRows, kept_arrays
from moerl.kernels.transfer import transfer

NUM_ROWS, NUM_PAIRS, GOAL, DEVICE = 8192, 11, 20.0, "cpu"


@dataclass(frozen=True)
class Wire:
    """Kept sets as they arrive: sizes uint16 [T] and byte planes of ids; and the rows as arrays of their own."""

    sizes: memoryview
    ids: memoryview
    decoded: list[NDArray[np.int32]]

    @classmethod
    def of(cls, kept: KeptSets) -> Wire:
        decoded = np.split(kept.ids, kept.offsets[1:-1])
        return cls(array_bytes(kept.sizes.astype(np.uint16)), pack_kept_ids(kept.offsets, kept.ids), decoded)


def vectorised(wire: Wire) -> KeptRows:
    sizes = read_array(wire.sizes, np.uint16, NUM_ROWS, "kept_sizes")
    offsets = np.zeros(NUM_ROWS + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    kept = KeptSets(offsets, read_kept_ids(wire.ids, offsets))
    return KeptRows(**transfer(kept_arrays(kept, sizes > 0), torch.device(DEVICE)))


def per_row_decode(wire: Wire) -> KeptRows:
    sizes = np.frombuffer(wire.sizes, "<u2")
    planes = np.frombuffer(wire.ids, np.uint8).reshape(4, -1)
    decoded, start = [], 0
    for size in sizes.tolist():
        deltas = np.ascontiguousarray(planes[:, start : start + size].T).view("<u4").reshape(-1)
        decoded.append(np.cumsum(deltas, dtype=np.uint32).view(np.int32))
        start += size
    return _of_rows(decoded)


def per_row_tensors(wire: Wire) -> KeptRows:
    return _of_rows(wire.decoded)


def _of_rows(decoded: list[NDArray[np.int32]]) -> KeptRows:
    rows, ids, offsets, truncated = [], [], [0], []
    for row, own in enumerate(decoded):
        ids.append(torch.tensor(own, dtype=torch.int64, device=DEVICE))
        rows.append(torch.full((len(own),), row, device=DEVICE))
        offsets.append(offsets[-1] + len(own))
        truncated.append(len(own) > 0)
    return KeptRows(torch.cat(rows), torch.cat(ids), torch.tensor(offsets), torch.tensor(truncated))


def same(first: KeptRows, second: KeptRows) -> bool:
    names = ("rows", "ids", "offsets", "truncated")
    return all(torch.equal(getattr(first, name), getattr(second, name)) for name in names)


def measure(sizes: str, goal: float | None) -> list[Result]:
    case = KeptCase.draw(sizes, NUM_ROWS)
    wire = Wire.of(case.kept)
    results = [Result(f"{sizes}: listed ids ({case.summary})", len(case.kept.ids), unit="ids")]
    loops: dict[str, Callable[[Wire], KeptRows]] = {
        "per-row decode": per_row_decode,
        "per-row tensors": per_row_tensors,
    }
    for name, loop in loops.items():
        agree = same(vectorised(wire), loop(wire))
        results.append(Result(f"{sizes}: vectorised equals {name}", float(agree), "== 1", agree))
        ratios = paired_ratio(partial(loop, wire), partial(vectorised, wire), NUM_PAIRS)
        for clock, ratio in (("cpu", ratios.cpu), ("wall", ratios.wall)):
            theirs, mine = ratio.seconds
            shown = f"{sizes}: speed-up over {name}, {clock} time: {theirs * 1e3:.3g} ms / {mine * 1e3:.3g} ms"
            decides = clock == "cpu" and goal is not None
            goal_text, holds = (f">= {goal:g}", ratio.median >= goal) if decides and goal is not None else ("", True)
            results.append(Result(shown, ratio.median, goal_text, holds, "x", ratio.high - ratio.low))
    return results


def main() -> None:
    json_path = json_argument(__doc__)
    results = [command_line()]
    torch.set_num_threads(1)
    report([*results, *measure("realistic", GOAL), *measure("flat", None)], json_path)


if __name__ == "__main__":
    main()
