"""Optimizer state in host memory against a resident one: digits, memory and time of an update; weights that rest.

`python bench/offload.py [--json FILE]`. On a CPU host and device are the same memory, so that a tiny model shows the
work of the copies alone; the check ``offload`` of `scripts/gpu_check.sh` measures their cost over PCIe.
"""

from __future__ import annotations

import torch
from _gpu_offload import check
from _report import command_line, json_argument, report


def main() -> None:
    json_path = json_argument(__doc__)
    findings = check("cuda" if torch.cuda.is_available() else "cpu")
    report([command_line(), *findings.results], json_path)


if __name__ == "__main__":
    main()
