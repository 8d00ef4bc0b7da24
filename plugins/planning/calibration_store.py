"""Keeps measured runs in a small SQLite database in the user's data directory, shared by processes."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ...ds_configs.memory.calibration import Calibration, MeasuredRun
from ...ds_configs.specs.errors import Fault, RefusedInputError, ShardwrightError, UsageError
from ...ds_configs.step_time.measured_network import MeasuredNetwork

DATA_DIRECTORY_VARIABLE = "SHARDWRIGHT_DATA_DIR"
FILE_NAME = "calibration.sqlite3"
SCHEMA_VERSION = 1
WAIT_SECONDS = 5.0
"""How long a command waits for another one that writes."""

_CREATE = """
CREATE TABLE runs (
    identifier TEXT PRIMARY KEY CHECK (length(identifier) = 64),
    gpu TEXT NOT NULL,
    architecture TEXT NOT NULL,
    model TEXT NOT NULL,
    layout TEXT NOT NULL,
    ranks INTEGER NOT NULL CHECK (ranks > 0),
    predicted_allocated_bytes INTEGER NOT NULL CHECK (predicted_allocated_bytes > 0),
    allocated_peak_bytes INTEGER NOT NULL CHECK (allocated_peak_bytes >= 0),
    reserved_peak_bytes INTEGER NOT NULL CHECK (reserved_peak_bytes > 0),
    outside_allocator_bytes INTEGER,
    step_seconds REAL,
    stored_at TEXT NOT NULL
)
"""
# Beside the runs of the same version: who knows nothing of it reads those as before.
_CREATE_NETWORKS = """
CREATE TABLE IF NOT EXISTS networks (
    gpu TEXT NOT NULL,
    gpus_per_node INTEGER NOT NULL CHECK (gpus_per_node > 0),
    nodes INTEGER NOT NULL CHECK (nodes > 1),
    bytes_per_s REAL NOT NULL CHECK (bytes_per_s > 0),
    stored_at TEXT NOT NULL
)
"""
_COLUMNS = tuple(field.name for field in fields(MeasuredRun))
_KINDS: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "int | None": (int, type(None)),
    "float | None": (float, int, type(None)),
}
_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_SYSTEM = (
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_NOMEM,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredRun:
    """A measured run with when it was stored."""

    run: MeasuredRun
    """What was measured."""
    stored_at: str
    """UTC, as ISO 8601."""


def data_directory() -> Path:
    """Return where this user's measurements are kept: `SHARDWRIGHT_DATA_DIR`, else the platform's data directory."""
    stated = os.environ.get(DATA_DIRECTORY_VARIABLE)
    if stated:
        return Path(stated).absolute()
    from platformdirs import user_data_path

    return user_data_path("shardwright", appauthor=False)


class CalibrationStore:
    """Measured runs on disk; every method opens the database for itself, so nothing stays locked.

    Raises, from every method:
        RefusedInputError: the file is no such database, or one of a newer version.
        ShardwrightError: the system refuses, or another command holds the database for longer than the wait.
    """

    def __init__(self, path: Path | None = None, *, wait_seconds: float = WAIT_SECONDS) -> None:
        self.path = path or data_directory() / FILE_NAME
        self._wait_seconds = wait_seconds

    @property
    def _place(self) -> str:
        return f"calibration database {self.path}"

    def add(self, run: MeasuredRun) -> bool:
        """Store a run and return whether it was new; a run that is there already stays one row."""
        values = {name: getattr(run, name) for name in _COLUMNS}
        values["stored_at"] = datetime.now(UTC).isoformat(timespec="seconds")
        columns, marks = ", ".join(values), ", ".join(f":{name}" for name in values)
        with self._writing() as connection:
            insert = f"INSERT INTO runs ({columns}) VALUES ({marks}) ON CONFLICT (identifier) DO NOTHING"  # noqa: S608
            return connection.execute(insert, values).rowcount == 1

    def stored(self) -> tuple[StoredRun, ...]:
        """Return all runs, oldest first."""
        with self._reading() as connection:
            if connection is None:
                return ()
            select = f"SELECT {', '.join(_COLUMNS)}, stored_at FROM runs ORDER BY stored_at, identifier"  # noqa: S608
            return tuple(self._run_of(row) for row in connection.execute(select))

    def calibration(self) -> Calibration:
        """Return what plans learn from; empty when nothing was stored yet."""
        return Calibration(runs=tuple(stored.run for stored in self.stored()))

    def add_network(self, network: MeasuredNetwork) -> None:
        """Store a measured network, which plans for such nodes count on from now on."""
        values = asdict(network) | {"stored_at": datetime.now(UTC).isoformat(timespec="seconds")}
        columns, marks = ", ".join(values), ", ".join(f":{name}" for name in values)
        with self._writing() as connection:
            connection.execute(_CREATE_NETWORKS)
            connection.execute(f"INSERT INTO networks ({columns}) VALUES ({marks})", values)  # noqa: S608

    def networks(self) -> tuple[MeasuredNetwork, ...]:
        """Return the measured networks, oldest first."""
        with self._reading() as connection:
            known = "SELECT count(*) FROM sqlite_master WHERE name = 'networks'"
            if connection is None or not connection.execute(known).fetchone()[0]:
                return ()
            columns = ", ".join(field.name for field in fields(MeasuredNetwork))
            rows = connection.execute(f"SELECT {columns} FROM networks ORDER BY rowid").fetchall()  # noqa: S608
        for gpu, *numbers in rows:
            if not isinstance(gpu, str) or not all(isinstance(number, int | float) for number in numbers):
                raise RefusedInputError(self._damaged(f"a network of {gpu!r}"))
        names = [field.name for field in fields(MeasuredNetwork)]
        return tuple(MeasuredNetwork(**dict(zip(names, row, strict=True))) for row in rows)

    def forget(self, identifier: str) -> int:
        """Remove one run by the beginning of its identifier, or `all` with the networks; return how many runs went.

        Raises:
            UsageError: no run, or several, begin like that.
        """
        if not self._exists():
            if identifier == "all":
                return 0
            raise UsageError(_unknown(identifier))
        with self._writing() as connection:
            if identifier == "all":
                connection.execute("DROP TABLE IF EXISTS networks")
                return connection.execute("DELETE FROM runs").rowcount
            begins = "SELECT identifier FROM runs WHERE substr(identifier, 1, length(:begin)) = :begin"
            found = [row[0] for row in connection.execute(begins, {"begin": identifier})]
            if not found or not identifier:
                raise UsageError(_unknown(identifier))
            if len(found) > 1:
                fix = f"write more of it: {', '.join(name[:16] for name in found[:4])}"
                rule = f"begins the names of {len(found)} runs"
                raise UsageError(Fault(where="--forget", value=identifier, rule=rule, fix=fix))
            return connection.execute("DELETE FROM runs WHERE identifier = ?", (found[0],)).rowcount

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection | None]:
        """Open the database without ever creating it; `None` when there is none or it is still empty."""
        with self._translated():
            if not self._exists():
                yield None
                return
            # Not `ro`: that mode cannot roll back what a killed writer left.
            address = f"{self.path.absolute().as_uri()}?mode=rw"
            with closing(self._connect(address)) as connection:
                yield connection if self._version(connection) else None

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """Open the database for one transaction, creating it where needed."""
        with self._translated():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with closing(self._connect(f"{self.path.absolute().as_uri()}?mode=rwc")) as connection:
                connection.execute("BEGIN IMMEDIATE")
                try:
                    if not self._version(connection):
                        connection.execute(_CREATE)
                        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
                    yield connection
                except BaseException:
                    connection.rollback()
                    raise
                connection.commit()

    def _exists(self) -> bool:
        with self._translated():
            return self.path.exists()

    def _connect(self, address: str) -> sqlite3.Connection:
        return sqlite3.connect(address, uri=True, timeout=self._wait_seconds, isolation_level=None)

    def _version(self, connection: sqlite3.Connection) -> int:
        """Return the schema's version, 0 for an empty database."""
        version = int(connection.execute("PRAGMA user_version").fetchone()[0])
        if version > SCHEMA_VERSION:
            rule = f"was written by a newer Shardwright (schema {version}, this one reads {SCHEMA_VERSION})"
            raise RefusedInputError(Fault(where=self._place, rule=rule, fix="upgrade, or move the file away"))
        tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if version < 0 or (version == 0 and tables):
            raise RefusedInputError(self._damaged("it is another program's"))
        return version

    def _run_of(self, row: tuple[Any, ...]) -> StoredRun:
        values = dict(zip((*_COLUMNS, "stored_at"), row, strict=True))
        for field in fields(MeasuredRun):
            if not isinstance(values[field.name], _KINDS[str(field.type)]):
                raise RefusedInputError(self._damaged(f"{field.name} = {values[field.name]!r}"))
        stored_at = str(values.pop("stored_at"))
        run = MeasuredRun(**values)
        if run.predicted_allocated_bytes <= 0 or run.reserved_peak_bytes <= 0:
            raise RefusedInputError(self._damaged("a run without bytes"))
        return StoredRun(run=run, stored_at=stored_at)

    def _damaged(self, detail: str) -> Fault:
        rule, fix = f"is not a database of measured runs ({detail})", "move the file away; it is made anew"
        return Fault(where=self._place, rule=rule, fix=fix)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Turn what SQLite and the system say into errors that name the file and the way out."""
        try:
            yield
        except sqlite3.Error as error:
            # The lower byte is the primary code, the rest refines it.
            code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
            if code in _BUSY:
                waited = f"is held by another command for over {self._wait_seconds:g} s; end it or try again"
                raise ShardwrightError(f"{self._place}: {waited}") from None
            if code in _SYSTEM:
                raise ShardwrightError(
                    f"{self._place}: cannot be used ({error}); set {DATA_DIRECTORY_VARIABLE}"
                ) from None
            raise RefusedInputError(self._damaged(str(error))) from None
        except OSError as error:
            detail = f"{self._place}: cannot be used ({error.strerror}); set {DATA_DIRECTORY_VARIABLE}"
            raise ShardwrightError(detail) from None


def _unknown(identifier: str) -> Fault:
    fix = "`shardwright calibrate --list` shows them"
    return Fault(where="--forget", value=identifier, rule="is no stored run", fix=fix)
