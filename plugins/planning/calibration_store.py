"""Store measured runs in a SQLite database in the user's data directory, which processes share."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ...ds_configs.memory.estimate import Calibration, MeasuredRun
from ...ds_configs.specs.errors import ConfigError, RefusedInputError, ShardwrightError, UsageError
from ...ds_configs.step_time.cpu_ranks import MeasuredCpu
from ...ds_configs.step_time.learning import MeasuredStep

DATA_DIRECTORY_VARIABLE = "SHARDWRIGHT_DATA_DIR"
FILE_NAME = "calibration.sqlite3"
SCHEMA_VERSION = 1
WAIT_SECONDS = 5.0
"""Seconds that a command waits for another command that writes."""

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
# A separate table under the same schema version, which older versions ignore.
_CREATE_STEPS = """
CREATE TABLE IF NOT EXISTS steps (
    identifier TEXT PRIMARY KEY CHECK (length(identifier) = 64),
    gpu TEXT NOT NULL,
    engine TEXT NOT NULL,
    model TEXT NOT NULL,
    layout TEXT NOT NULL,
    ranks INTEGER NOT NULL CHECK (ranks > 0),
    predicted_seconds REAL NOT NULL CHECK (predicted_seconds > 0),
    measured_seconds REAL NOT NULL CHECK (measured_seconds > 0),
    network_seconds REAL,
    host_seconds REAL,
    flops_per_s REAL,
    release TEXT,
    stored_at TEXT NOT NULL
)
"""
_CREATE_CPUS = """
CREATE TABLE IF NOT EXISTS cpus (
    cpu TEXT NOT NULL,
    cores INTEGER NOT NULL CHECK (cores > 0),
    ranks INTEGER NOT NULL CHECK (ranks > 0),
    threads INTEGER NOT NULL CHECK (threads > 0),
    torch TEXT NOT NULL,
    fp32_flops_per_s REAL NOT NULL CHECK (fp32_flops_per_s > 0),
    bf16_flops_per_s REAL NOT NULL CHECK (bf16_flops_per_s > 0),
    fp32_attention_flops_per_s REAL NOT NULL CHECK (fp32_attention_flops_per_s > 0),
    bf16_attention_flops_per_s REAL NOT NULL CHECK (bf16_attention_flops_per_s > 0),
    memory_bytes_per_s REAL NOT NULL CHECK (memory_bytes_per_s > 0),
    link_bytes_per_s REAL NOT NULL CHECK (link_bytes_per_s > 0 OR ranks = 1),
    spread REAL NOT NULL CHECK (spread >= 0),
    stored_at TEXT NOT NULL
)
"""
_COLUMNS = tuple(field.name for field in fields(MeasuredRun))
_KINDS: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "float": (float, int),
    "int | None": (int, type(None)),
    "float | None": (float, int, type(None)),
    "str | None": (str, type(None)),
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
    """A measured run and the time at which it was stored."""

    run: MeasuredRun
    """The measurement."""
    stored_at: str
    """UTC, as ISO 8601."""


def data_directory() -> Path:
    """Return the directory of this user's measurements: `SHARDWRIGHT_DATA_DIR`, else the platform's data directory."""
    directory = os.environ.get(DATA_DIRECTORY_VARIABLE)
    if directory:
        return Path(directory).absolute()
    from platformdirs import user_data_path

    return user_data_path("shardwright", appauthor=False)


class CalibrationStore:
    """Measured runs on disk. Every method opens and closes the database, so it does not stay locked.

    Raises, from every method:
        RefusedInputError: The file is not such a database, or was written by a newer version.
        ShardwrightError: The file cannot be accessed, or another command locks it for longer than `wait_seconds`.
    """

    def __init__(self, path: Path | None = None, *, wait_seconds: float = WAIT_SECONDS) -> None:
        self.path = path or data_directory() / FILE_NAME
        self._wait_seconds = wait_seconds
        self._where = f"calibration database {self.path}"

    def add(self, run: MeasuredRun) -> bool:
        """Store a run and return whether it was new."""
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
            return tuple(self._stored_run(row) for row in connection.execute(select))

    def calibration(self) -> Calibration:
        """Return the calibration for plans; empty if nothing is stored."""
        return Calibration(runs=tuple(stored.run for stored in self.stored()))

    def add_cpu(self, cpu: MeasuredCpu) -> None:
        """Store the measured rates of CPU ranks, which plans for this host use from now on."""
        self._add_to("cpus", _CREATE_CPUS, asdict(cpu))

    def cpus(self) -> tuple[MeasuredCpu, ...]:
        """Return the measured rates of CPU ranks, oldest first."""
        return tuple(MeasuredCpu(**row) for row in self._rows_of("cpus", MeasuredCpu))

    def add_step(self, step: MeasuredStep) -> bool:
        """Store a measured step time, which corrects later plans, and return whether it was new."""
        return self._add_to("steps", _CREATE_STEPS, asdict(step))

    def steps(self) -> tuple[MeasuredStep, ...]:
        """Return the measured step times, oldest first."""
        return tuple(MeasuredStep(**row) for row in self._rows_of("steps", MeasuredStep))

    def _add_to(self, table: str, create: str, values: dict[str, Any]) -> bool:
        values = values | {"stored_at": datetime.now(UTC).isoformat(timespec="seconds")}
        columns, marks = ", ".join(values), ", ".join(f":{name}" for name in values)
        with self._writing() as connection:
            connection.execute(create)
            # Tables of older versions lack columns that may be NULL.
            for name in values.keys() - _columns_of(connection, table):
                connection.execute(f"ALTER TABLE {table} ADD COLUMN {name}")
            insert = f"INSERT INTO {table} ({columns}) VALUES ({marks}) ON CONFLICT DO NOTHING"  # noqa: S608
            return connection.execute(insert, values).rowcount == 1

    def _rows_of(self, table: str, kind: type[MeasuredStep | MeasuredCpu]) -> list[dict[str, Any]]:
        """Return the rows of a table that not every database has."""
        with self._reading() as connection:
            known = set() if connection is None else _columns_of(connection, table)
            if connection is None or not known:
                return []
            columns = {field.name: str(field.type) for field in fields(kind) if field.name in known}
            rows = connection.execute(f"SELECT {', '.join(columns)} FROM {table} ORDER BY rowid").fetchall()  # noqa: S608
        for row in rows:
            for (name, expected), value in zip(columns.items(), row, strict=True):
                if not isinstance(value, _KINDS[expected]):
                    raise RefusedInputError(self._damaged(f"{table}: {name} = {value!r}"))
        return [dict(zip(columns, row, strict=True)) for row in rows]

    def forget(self, identifier: str) -> int:
        """Remove one run by a prefix of its identifier, or `all`; return the number of removed runs.

        A run may have memory peaks, a step time, or both. `all` includes measured CPU ranks; `cpu` removes
        the rates of CPU ranks only, and returns their number.

        Raises:
            UsageError: No run, or several runs, have this prefix.
        """
        if not self._exists():
            if identifier in ("all", "cpu"):
                return 0
            raise UsageError(_unknown(identifier))
        with self._writing() as connection:
            if identifier == "cpu":
                connection.execute(_CREATE_CPUS)
                return connection.execute("DELETE FROM cpus").rowcount
            if identifier == "all":
                connection.execute("DROP TABLE IF EXISTS cpus")
                connection.execute(_CREATE_STEPS)
                of_both = "SELECT count(*) FROM (SELECT identifier FROM runs UNION SELECT identifier FROM steps)"
                count = int(connection.execute(of_both).fetchone()[0])
                connection.execute("DELETE FROM steps")
                connection.execute("DELETE FROM runs")
                return count
            connection.execute(_CREATE_STEPS)
            of_both = "SELECT identifier FROM runs UNION SELECT identifier FROM steps"
            begins = f"SELECT identifier FROM ({of_both}) WHERE substr(identifier, 1, length(:begin)) = :begin"  # noqa: S608
            matches = [row[0] for row in connection.execute(begins, {"begin": identifier})]
            if not matches or not identifier:
                raise UsageError(_unknown(identifier))
            if len(matches) > 1:
                fix = f"write a longer prefix: {', '.join(name[:16] for name in matches[:4])}"
                rule = f"matches {len(matches)} runs"
                raise UsageError(ConfigError(where="--forget", value=identifier, rule=rule, fix=fix))
            for table in ("runs", "steps"):
                connection.execute(f"DELETE FROM {table} WHERE identifier = ?", (matches[0],))  # noqa: S608
            return 1

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection | None]:
        """Open the database without creating it; `None` if it does not exist or is empty."""
        with self._translated():
            if not self._exists():
                yield None
                return
            # Not `ro`: that mode cannot roll back the transaction of a killed writer.
            address = f"{self.path.absolute().as_uri()}?mode=rw"
            with closing(self._connect(address)) as connection:
                yield connection if self._version(connection) else None

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """Open the database for one transaction; create it if needed."""
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
            rule = (
                f"was written by a newer version of Shardwright (schema {version}, this version reads {SCHEMA_VERSION})"
            )
            raise RefusedInputError(
                ConfigError(where=self._where, rule=rule, fix="upgrade Shardwright, or move the file")
            )
        tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if version < 0 or (version == 0 and tables):
            raise RefusedInputError(self._damaged("another program wrote it"))
        return version

    def _stored_run(self, row: tuple[object, ...]) -> StoredRun:
        values: dict[str, Any] = dict(zip((*_COLUMNS, "stored_at"), row, strict=True))
        for field in fields(MeasuredRun):
            if not isinstance(values[field.name], _KINDS[str(field.type)]):
                raise RefusedInputError(self._damaged(f"{field.name} = {values[field.name]!r}"))
        stored_at = str(values.pop("stored_at"))
        run = MeasuredRun(**values)
        if run.predicted_allocated_bytes <= 0 or run.reserved_peak_bytes <= 0:
            raise RefusedInputError(self._damaged("a run without bytes"))
        return StoredRun(run=run, stored_at=stored_at)

    def _damaged(self, detail: str) -> ConfigError:
        rule, fix = f"is not a database of measured runs ({detail})", "move the file; the next run creates a new one"
        return ConfigError(where=self._where, rule=rule, fix=fix)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Turn errors of SQLite and the system into errors with the file and the fix."""
        try:
            yield
        except sqlite3.Error as error:
            # The lower byte is the primary error code.
            code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
            if code in _BUSY:
                waited = f"is locked by another command for over {self._wait_seconds:g} s; stop it or try again"
                raise ShardwrightError(f"{self._where}: {waited}") from None
            if code in _SYSTEM:
                raise ShardwrightError(
                    f"{self._where}: cannot be used ({error}); set {DATA_DIRECTORY_VARIABLE}"
                ) from None
            raise RefusedInputError(self._damaged(str(error))) from None
        except OSError as error:
            detail = f"{self._where}: cannot be used ({error.strerror}); set {DATA_DIRECTORY_VARIABLE}"
            raise ShardwrightError(detail) from None


def _columns_of(connection: sqlite3.Connection, table: str) -> set[str]:
    """Return the names of a table's columns; none if it does not exist."""
    return {row[0] for row in connection.execute("SELECT name FROM pragma_table_info(?)", (table,))}


def _unknown(identifier: str) -> ConfigError:
    fix = "`shardwright calibrate --list` lists the runs"
    return ConfigError(where="--forget", value=identifier, rule="is not a stored run", fix=fix)
