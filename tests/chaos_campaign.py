"""Kills, stops and starves runs at random moments, resumes them, and looks at what came of it.

    python tests/chaos_campaign.py --disturbances 100 --minutes 15 [--seed N] [--only VARIANT] [--json FILE]

Each run has a known end. It is disturbed (`chaos_disturbances.py`) at moments drawn from the printed seed. Its
processes (controller, ranks, engine, servers, reward workers, agents) get SIGKILL, SIGTERM, or SIGSTOP for some
seconds; all of them get stop signals; strangers hold connections to its ports; it finds the disk full, anywhere or in
the midst of a record of its journal, or a folder read-only; after its end its journal or its metrics are torn. A run
that ended is resumed until it is done. Then every rollout has ended once, nothing was trained twice, groups that were
finished are trained as they were, nothing is left running, and where the order is fixed the model is that of an
undisturbed run. A run of which all processes were told to stop has ended with status 75; one that the disk refused
something has shown no traceback of ours. Exit status 1 where one of these does not hold; the runs of that variant are
kept. How far a run is at a given moment depends on the machine.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from chaos_disturbances import RUN_SECONDS, Life, disturb, tear
from example_commands import EXAMPLES
from moerl_runs import Runs, Sums, rows
from sglang_live import ENVIRONMENT
from waiting import eventually, is_alive

from moerl.buffer.journal import Journal
from moerl.buffer.ledger import LEDGER_FILE, Ledger
from moerl.contract.disk import read_parquet
from moerl.contract.trajectory import ModelSpec, TurnKind
from moerl.models.description import read_model
from moerl.trainer.checkpoint import CHECKPOINTS, CheckpointStore

STEPS, PER_STEP, MAX_LIVES = 8, 16, 40
LEAST = 8
"""Disturbances of each variant; the others are of those whose runs come back sooner."""
END_SECONDS = 30.0


@dataclass(frozen=True)
class Variant:
    """overrides: of the run. roles: of processes to disturb. is_ordered: its model does not depend on when things
    happen. bound: of ages. task: overrides in place of those of sums; its rollouts are episodes of several turns."""

    name: str
    overrides: tuple[str, ...]
    roles: tuple[str, ...]
    is_ordered: bool
    bound: int = 0
    task: tuple[str, ...] = ()


AGENTS = (
    *("task=environment", "task.path=numbers.jsonl", "task.response=response", "task.play=env:play"),
    *("task.heldout_fraction=0.2", "task.dev_fraction=0.2"),
)
"""Overrides for the agents of `examples/agent`, which speak HTTP; an agent that is killed has its episode refused."""

SERVERS = (
    *("rollout=sglang", "rollout.servers=2", f"rollout.environment={ENVIRONMENT}"),
    *("buffer.max_staleness=2", "weights.every=2"),
)

VARIANTS = (
    Variant("one process", (), ("controller",), True),
    Variant("two ranks", ("parallel.expert=2", "trainer.command_seconds=60"), ("controller", "rank"), True),
    Variant(
        "engine in a process",
        ("rollout.placement=process", "buffer.max_staleness=1", "buffer.window=5"),
        ("controller", "rank", "engine", "reward worker"),
        False,
        bound=2,
    ),
    Variant("servers", SERVERS, ("controller", "rank", "server"), False, bound=2),
    Variant(
        "episodes on servers",
        (*SERVERS, "rollout.max_new_tokens=40"),
        ("controller", "rank", "server"),
        False,
        bound=2,
        task=("task=guess",),
    ),
    Variant(
        "agents over HTTP",
        (
            *("rollout.placement=process", "buffer.max_staleness=1", "buffer.window=5"),
            *("rollout.max_new_tokens=160", "quarantine.max_rate=1.0"),
        ),
        ("controller", "rank", "engine", "agent"),
        False,
        bound=2,
        task=AGENTS,
    ),
)


@dataclass
class Tally:
    """Counts of what was done to the runs of a variant, and the promises that they broke."""

    variant: str
    runs: int = 0
    lives: int = 0
    disturbances: Counter[str] = field(default_factory=Counter[str])
    recovered: int = 0
    broken: list[str] = field(default_factory=list)


def run_once(
    runs: Runs,
    arguments: Sequence[str],
    variant: Variant,
    rng: random.Random,
    tally: Tally,
    *,
    sums: Sums,
    whole: float,
    is_enough: Callable[[], bool],
) -> Path:
    """A run through all its lives; what is wrong with it goes into the tally.

    Args:
        arguments: of the run. whole: seconds of an undisturbed one. Between two disturbances lies up to a quarter of
            it: few lives come to their end undisturbed, and runs get on nevertheless, however fast the machine is.
        is_enough: from when on the run is left in peace, so that it comes to its end.
    """
    run = Path(arguments[-1].partition("=")[2].strip("'"))
    promised: dict[str, bytes] = {}
    tally.runs += 1
    for _ in range(MAX_LIVES):
        tally.lives += 1
        life = Life(runs, arguments, sums, run)
        life.wait(rng.uniform(0.0, whole / 4))
        while not life.is_over and not is_enough():
            if done := disturb(rng, life, variant.roles):
                life.done.append(done)
                tally.disturbances[done] += 1
            life.wait(rng.uniform(0.0, whole / 4))
        life.wait(RUN_SECONDS)
        assert life.finished is not None, "the run neither went on nor ended"
        left = [f"{role} {pid}" for pid, role in life.seen.items() if not gone(pid)]
        tally.broken += [f"{run}: {each} outlived the run after {life.done}" for each in left]
        tally.broken += [f"{run}: {each}" for each in life.problems()]
        if life.finished.status == 0:
            tally.broken += [f"{run}: {each}" for each in problems_of(run, variant, promised)]
            return run
        if (run / "config.yaml").exists():
            arguments = ["train", f"resume={run}"]
        elif run.exists():
            # It died before there was anything to go on with.
            shutil.rmtree(run)
        if not is_enough() and (torn := tear(rng, run)):
            tally.disturbances[torn] += 1
        promised |= journalled(run)
        tally.recovered = max(tally.recovered, len(promised))
    tally.broken.append(f"{run}: not done after {MAX_LIVES} lives")
    return run


def gone(pid: int) -> bool:
    try:
        eventually(lambda: not is_alive(pid), END_SECONDS)
    except AssertionError:
        return False
    return True


def journalled(run: Path) -> dict[str, bytes]:
    """Rollouts that the next life has to take from the journal: id, and the tokens that it has to train on."""
    spec = spec_of(run)
    if spec is None or not (run / "journal").is_dir():
        return {}
    found = CheckpointStore(run / CHECKPOINTS, 2).latest()
    if found is None or found.state["stage"] != "rl" or not int(found.state["step"]):
        return {}
    step, queue = int(found.state["step"]), found.state["run"]["groups"]["queue"]
    return {
        trajectory.lineage.rollout_id: trajectory.token_ids.tobytes()
        for number, group in Journal(run / "journal", spec).read().items()
        if (number in queue["open"] or number >= queue["next_number"]) and group.newest_version <= step
        for trajectory in group.trajectories
    }


def spec_of(run: Path) -> ModelSpec | None:
    folder = run / "cold_start"
    if not (folder / "tokenizer.json").exists():
        return None
    from transformers import AutoTokenizer

    return read_model(folder).with_vocabulary(len(AutoTokenizer.from_pretrained(folder))).spec


def problems_of(run: Path, variant: Variant, promised: dict[str, bytes]) -> list[str]:
    """Returns what is wrong with a finished run: its ledger, its steps, ages, and trained rollouts."""
    problems: list[str] = []
    ledger = Ledger.restored(json.loads((run / LEDGER_FILE).read_text()))
    ended = ledger.trained + ledger.filtered.total() + ledger.quarantined.total()
    if ledger.pending or ledger.issued != ended:
        problems.append(f"the ledger has {ledger.issued} issued, {ended} ended, {ledger.pending} pending")
    steps = [row["step"] for row in rows(run) if row["stage"] == "rl"]
    if steps != list(range(1, STEPS + 1)):
        problems.append(f"steps {steps}")
    trained: dict[str, bytes] = {}
    has_turns = False
    for step in range(1, STEPS + 1):
        for trajectory in read_parquet(run / "rollouts" / f"step-{step:06d}.parquet"):
            name = trajectory.lineage.rollout_id
            if name in trained:
                problems.append(f"{name} was trained twice")
            trained[name] = trajectory.token_ids.tobytes()
            has_turns |= any(turn.kind is TurnKind.OBSERVATION for turn in trajectory.turns)
            age = step - 1 - int(trajectory.policy_versions[trajectory.sampled].min())
            if not 0 <= age <= variant.bound:
                problems.append(f"{name} has age {age}")
    if len(trained) != ledger.trained:
        problems.append(f"{len(trained)} rollouts in the dumps, {ledger.trained} trained")
    if has_turns != bool(variant.task):
        problems.append(f"episodes of several turns: {has_turns}")
    lost = [name for name, tokens in promised.items() if trained.get(name) != tokens]
    if lost:
        problems.append(f"finished before a crash, and not trained as they were: {lost[:4]} of {len(lost)}")
    return problems


def campaign(variant: Variant, arguments: argparse.Namespace, deadline: float, tallies: list[Tally]) -> Tally:
    """Runs of one variant until there were enough disturbances or the time is over; adds its tally to those of all."""
    tally = Tally(variant.name)
    tallies.append(tally)

    def is_enough() -> bool:
        all_done = sum(each.disturbances.total() for each in tallies)
        return time.monotonic() > deadline or (
            tally.disturbances.total() >= LEAST and all_done >= arguments.disturbances
        )

    rng = random.Random(f"{arguments.seed}/{variant.name}")
    folder = Path(tempfile.mkdtemp(prefix="moerl-chaos-"))
    runs, sums = Runs(folder, is_refused_as_others=True), Sums.write(folder)
    if variant.task == AGENTS:
        shutil.copytree(EXAMPLES / "agent", folder, dirs_exist_ok=True)
        subprocess.run([sys.executable, "make_data.py"], cwd=folder, check=True)
    runs.start()
    try:
        began = time.monotonic()
        finished = runs.run(
            *arguments_of(folder / "whole", sums, variant), path=[sums.folder], timeout_seconds=RUN_SECONDS
        )
        assert finished.status == 0, finished.output
        whole, undisturbed = time.monotonic() - began, model_of(folder / "whole")
        while not is_enough() and not tally.broken:
            chosen = arguments_of(folder / f"run-{tally.runs}", sums, variant)
            run = run_once(runs, chosen, variant, rng, tally, sums=sums, whole=whole, is_enough=is_enough)
            if variant.is_ordered and not tally.broken and model_of(run) != undisturbed:
                tally.broken.append(f"{run}: another model than that of the undisturbed run")
    finally:
        runs.close()
    if tally.broken:
        tally.broken.append(f"all runs are kept in {folder}")
    else:
        shutil.rmtree(folder)
    return tally


def arguments_of(run: Path, sums: Sums, variant: Variant) -> list[str]:
    """`moerl train` of a variant; the run directory comes last."""
    *first, directory = sums.train(run, variant.task)
    return [*first, *variant.overrides, f"rl.steps={STEPS}", "dump.rollouts_every=1", directory]


def model_of(run: Path) -> bytes:
    return (run / "final_model" / "model.safetensors").read_bytes()


def facts_of(tally: Tally) -> dict[str, Any]:
    return {each.name: getattr(tally, each.name) for each in fields(tally)} | {"disturbances": dict(tally.disturbances)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--disturbances", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--only", choices=[variant.name for variant in VARIANTS])
    parser.add_argument("--json", type=Path, help="write the tallies here")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    chosen = [each for each in VARIANTS if arguments.only in (None, each.name)]
    began, tallies = time.monotonic(), list[Tally]()
    deadline = began + 60 * arguments.minutes

    def one(variant: Variant) -> Tally:
        try:
            tally = campaign(variant, arguments, deadline, tallies)
        except Exception:
            # Said now, and not when the last variant is done.
            print(f"{variant.name}: the campaign itself failed\n{traceback.format_exc()}", flush=True)
            raise
        print(text_of(tally), flush=True)
        return tally

    # They wait most of the time, so all of them at once.
    with ThreadPoolExecutor(len(chosen)) as pool:
        list(pool.map(one, chosen))
    total = sum(tally.disturbances.total() for tally in tallies)
    print(f"{total} disturbances in {(time.monotonic() - began) / 60:.1f} minutes")
    if arguments.json:
        facts: dict[str, Any] = {
            "command": " ".join(["python", *sys.argv]),
            "seed": arguments.seed,
            "disturbances": total,
        }
        facts["variants"] = [facts_of(tally) for tally in tallies]
        arguments.json.write_text(json.dumps(facts, indent=2) + "\n")
    return 1 if any(tally.broken for tally in tallies) else 0


def text_of(tally: Tally) -> str:
    what = ", ".join(f"{kind} {count}" for kind, count in sorted(tally.disturbances.items()))
    lines = [f"{tally.variant}: {tally.runs} runs, {tally.lives} lives, disturbed by {what or 'nothing'}"]
    return "\n".join([*lines, *(f"  BROKEN {each}" for each in tally.broken)])


if __name__ == "__main__":
    sys.exit(main())
