"""Quarantine: the gate that every record passes before it is trained on, and the place where refused ones are kept.

Owned by the process that collects rollouts. A refused record is written whole, counted by reason, and never repaired;
the run stops when too many are refused, since dropping bad samples in silence biases the data. Layout of a refused
record: `<folder>/<reason>-<digest of the rollout id>/` with `record.json` (why, and under `incomplete` the parts of
the content without a plain form) and `record.msgpack` (the content); it appears in one rename.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from moerl.contract.files import write_folder, writing
from moerl.contract.invariants import check_versions
from moerl.contract.plain import from_plain, safe_repr, to_plain
from moerl.contract.ports import RolloutRecord
from moerl.contract.reasons import Reason
from moerl.contract.requirements import require, require_type, shown
from moerl.contract.trajectory import Lineage, ModelSpec, Trajectory
from moerl.contract.wire import check_spec_agrees
from moerl.errors import ContractError
from moerl.reading import open_regular, read_json

_FIELDS = {field.name: field for field in dataclasses.fields(Trajectory)}
_REQUIRED = tuple(
    name
    for name, field in _FIELDS.items()
    if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
)
_CONTENT = "record.msgpack"


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """The reason for which a record was refused."""

    reason: str
    """Reason code."""
    text: str
    """Reason code, field and value seen, for people."""


class Quarantine:
    """Gate that admits records as trajectories or keeps them aside with the reason. Any thread.

    Args:
        folder: Folder of refused records; made when the first is written.
        max_rate: Largest tolerated share of refused records, in [0, 1].
        min_records: Records to see before the rate is judged, at least 1.
        spec: The trainer's model. Records of another are refused; None looks at no model.

    Attributes:
        first_refusal: Reason for which the first record since the last `expect` was refused; empty if none was.
    """

    def __init__(self, folder: Path, max_rate: float, min_records: int = 32, *, spec: ModelSpec | None = None) -> None:
        if not 0.0 <= max_rate <= 1.0 or min_records < 1:
            raise ValueError(f"max_rate {max_rate} not in [0, 1], or min_records {min_records} below 1")
        self.folder = Path(folder)
        self.max_rate = max_rate
        self.min_records = min_records
        self.spec = spec
        self.counts: Counter[str] = Counter()
        self.num_admitted = 0
        self.first_refusal = ""
        self._refusals: dict[str, Refusal] = {}
        self._lock = threading.RLock()
        self._expected: set[str] = set()
        self._admitted: set[str] = set()

    @property
    def num_refused(self) -> int:
        return self.counts.total()

    @property
    def num_seen(self) -> int:
        return self.num_admitted + self.num_refused

    @property
    def rate(self) -> float:
        """Share of records refused so far."""
        return self.num_refused / self.num_seen if self.num_seen else 0.0

    def expect(self, rollout_ids: Iterable[str]) -> None:
        """Announces rollouts that were requested; an answer to anything else is refused."""
        with self._lock:
            self._expected.update(rollout_ids)
            self.first_refusal = ""

    def admit(self, record: RolloutRecord, *, trainer_version: int) -> Trajectory | None:
        """Returns the record as a checked trajectory, or None if it was refused and written to the folder.

        Only admitted rollout ids count as answered: another attempt at a refused one is welcome.

        Raises:
            ContractError: `quarantine_rate_exceeded`; the record is on disk by then.
        """
        with self._lock:
            try:
                trajectory = self._check(record, trainer_version)
            except ContractError as error:
                self.refuse(record, error, trainer_version=trainer_version)
                return None
            self._admitted.add(record.rollout_id)
            self.num_admitted += 1
            self._judge_rate()
            return trajectory

    def admit_episode(
        self, episode_id: str, records: Sequence[RolloutRecord], *, trainer_version: int
    ) -> list[Trajectory] | None:
        """Returns the records of an episode as checked trajectories, with `episode_id` as the id of its request; None
        if one was refused: then all are, and written to the folder.

        Raises:
            ContractError: `quarantine_rate_exceeded`; the records are on disk by then.
        """
        with self._lock:
            self._expected.update(record.rollout_id for record in records)
            try:
                trajectories = [self._check(record, trainer_version) for record in records]
                if episode_id in self._admitted:
                    raise _duplicate(episode_id)
            except ContractError as error:
                self.refuse_episode(episode_id, records, error, trainer_version=trainer_version)
                return None
            finally:
                self._expected.difference_update({record.rollout_id for record in records} - {episode_id})
            self._admitted.add(episode_id)
            self.num_admitted += len(records)
            return trajectories

    def refuse_episode(
        self, episode_id: str, records: Sequence[RolloutRecord], error: ContractError, *, trainer_version: int
    ) -> None:
        """Keeps aside all records of an episode, for one reason. However many there are, it counts as one.

        Raises:
            ContractError: `quarantine_rate_exceeded`; the records are on disk by then.
        """
        with self._lock:
            for number, record in enumerate(records or [RolloutRecord(episode_id, "", -1, {})]):
                self._keep_record(record, error, trainer_version, counts=number == 0)
                if type(record.rollout_id) is str and record.rollout_id != episode_id:
                    self._refusals.pop(record.rollout_id, None)  # nobody asks for that of a session
            self._refusals[episode_id] = _refusal(error)
            self._judge_rate()

    def withdraw(self, record: RolloutRecord, error: ContractError, *, trainer_version: int) -> None:
        """Refuses a record that was admitted before, for example because its reward failed: never a silent zero.

        Raises:
            ContractError: `quarantine_rate_exceeded`; the record is on disk by then.
        """
        with self._lock:
            self._admitted.discard(record.rollout_id)
            self.num_admitted -= 1
            self.refuse(record, error, trainer_version=trainer_version)

    def refuse(self, record: RolloutRecord, error: ContractError, *, trainer_version: int) -> None:
        """Keeps aside a record that its collector found wrong before it could be admitted.

        Raises:
            ContractError: `quarantine_rate_exceeded`; the record is on disk by then.
        """
        with self._lock:
            self._keep_record(record, error, trainer_version)
            self._judge_rate()

    def forget(self, rollout_ids: Iterable[str]) -> None:
        """Drops ids whose answers have all been dealt with; a later answer to one of them counts as unrequested."""
        with self._lock:
            ids = set(rollout_ids)
            self._expected -= ids
            self._admitted -= ids
            for name in ids:
                self._refusals.pop(name, None)

    def refusal_of(self, rollout_id: object) -> Refusal:
        """Returns the latest refusal of a rollout; known until `forget`."""
        with self._lock:
            found = self._refusals.get(rollout_id) if type(rollout_id) is str else None
        return found or Refusal(str(Reason.WRONG_TYPE), "a record whose rollout id is no text")

    def counters(self) -> dict[str, int]:
        """Returns the counts that a checkpoint keeps: refused records by reason code, and `admitted`."""
        return {**self.counts, "admitted": self.num_admitted}

    def count_again(self, num_admitted: int, reasons: Iterable[str]) -> None:
        """Counts records that an earlier process of the run dealt with after its last checkpoint."""
        with self._lock:
            self.num_admitted += num_admitted
            self.counts.update(reasons)

    def restore(self, counters: Mapping[str, int]) -> None:
        """Takes over what `counters` returned in an earlier process of the run."""
        self.num_admitted = counters.get("admitted", 0)
        self.counts = Counter({reason: n for reason, n in counters.items() if reason != "admitted"})

    def _check(self, record: RolloutRecord, trainer_version: int) -> Trajectory:
        _check_form(record)
        if record.rollout_id in self._admitted:
            raise _duplicate(record.rollout_id)
        is_expected, wanted = record.rollout_id in self._expected, "the id of a rollout that was requested"
        require(is_expected, Reason.ROLLOUT_UNREQUESTED, "rollout_id", shown(record.rollout_id), wanted)
        return self._checked(record, trainer_version)

    def read(self, record: RolloutRecord, *, trainer_version: int) -> Trajectory:
        """Returns a record as a checked trajectory, without admitting it: an answer to a turn of an episode.

        Raises:
            ContractError: it breaks the contract.
        """
        _check_form(record)
        return self._checked(record, trainer_version)

    def _checked(self, record: RolloutRecord, trainer_version: int) -> Trajectory:
        trajectory = Trajectory(**record.values)
        if self.spec is not None:
            check_spec_agrees(trajectory.spec, self.spec)
        check_versions(trajectory, trainer_version)
        return trajectory

    def _keep_record(
        self, record: RolloutRecord, error: ContractError, trainer_version: int, *, counts: bool = True
    ) -> None:
        """Writes a refused record, then counts it if it `counts`."""
        (content, incomplete), rollout_id = to_plain(record.values), _json(record.rollout_id)
        why = {
            "rollout_id": rollout_id,
            "engine_id": _json(record.engine_id),
            "policy_version": _json(record.policy_version),
            "trainer_version": trainer_version,
            "incomplete": incomplete,
            "reason": str(error.reason),
            "field": error.field,
            "expected": error.expected,
            "seen": error.seen,
            "content": _CONTENT,
        }
        digest = hashlib.blake2b(str(rollout_id).encode(errors="surrogatepass"), digest_size=8)
        contents = {
            "record.json": json.dumps(why, indent=2, allow_nan=False).encode(),
            _CONTENT: msgspec.msgpack.encode(content),
        }
        with writing(self.folder):
            write_folder(self.folder, f"{error.reason}-{digest.hexdigest()}", contents)
        refusal = _refusal(error)
        self.counts[refusal.reason] += int(counts)
        self.first_refusal = self.first_refusal or refusal.text
        # An id may be any object, also one that takes for ever to write out.
        if type(record.rollout_id) is str:
            self._refusals[record.rollout_id] = refusal

    def _judge_rate(self) -> None:
        if self.num_seen >= self.min_records and self.rate > self.max_rate:
            raise ContractError(
                Reason.QUARANTINE_RATE_EXCEEDED,
                field="records",
                seen=f"{self.num_refused} of {self.num_seen} refused: {dict(self.counts)}; lately, first:"
                f" {self.first_refusal}",
                expected=f"a rate of at most {self.max_rate}",
                remedy=f"inspect {self.folder}: the cause is an engine, a version mismatch or a failing reward",
            )


def _check_form(record: RolloutRecord) -> None:
    """Refuses names of fields that a trajectory does not have or that are missing, and another rollout's lineage."""
    require_type(record.values, dict, "values")
    for name in record.values:
        if type(name) is not str or name not in _FIELDS:
            raise ContractError(Reason.UNKNOWN_FIELD, field="values", seen=shown(name), expected=list(_FIELDS))
    for name in _REQUIRED:
        if name not in record.values:
            raise ContractError(Reason.MISSING_FIELD, field=name, seen=sorted(record.values), expected=list(_REQUIRED))
    rollout_id, lineage = record.rollout_id, record.values["lineage"]
    require_type(rollout_id, str, "rollout_id")
    seen = getattr(lineage, "rollout_id", None) if type(lineage) is Lineage else lineage
    agrees = type(seen) is str and seen == rollout_id
    require(agrees, Reason.ROLLOUT_ID_DISAGREES, "lineage.rollout_id", shown(seen), shown(rollout_id))


def _refusal(error: ContractError) -> Refusal:
    return Refusal(str(error.reason), f"{error.reason} in {error.field}, {error.seen}")


def _duplicate(rollout_id: str) -> ContractError:
    return ContractError(
        Reason.ROLLOUT_DUPLICATE, field="rollout_id", seen=shown(rollout_id), expected="one answer per rollout"
    )


def read_quarantined(folder: Path) -> tuple[dict[str, Any], Any]:
    """Returns one refused record: its `record.json`, and its content with arrays restored."""
    why = read_json(folder / "record.json")
    with open_regular(folder / _CONTENT) as file:
        return why, from_plain(msgspec.msgpack.decode(file.read()))


def _json(fact: object) -> object:
    """Returns an id or a version as JSON has it; anything else, and what JSON cannot write as a number, as text."""
    is_plain = fact is None or type(fact) is str or (type(fact) is int and fact.bit_length() < 64)
    return fact if is_plain else safe_repr(fact)
