"""A run that was killed goes on, and ends as if nothing had happened: the same metrics and weights, bit for bit."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from conftest import DoneRun, Sums
from runs import Fault, Runs, rows, summary
