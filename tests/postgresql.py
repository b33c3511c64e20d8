"""A PostgreSQL server of Debian's package for tests, run by an unprivileged user and gone afterwards."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from bedplate.run.supervisor import find_free_port

ABSENT = "PostgreSQL is not installed here (Debian: apt-get install postgresql)"


def find_programs() -> Path | None:
    """The folder with initdb and postgres, which Debian keeps out of PATH."""
    if (found := shutil.which("initdb")) is not None:
        return Path(found).resolve().parent
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    return versions[-1].parent if versions else None


class Database:
    """One server with one database."""

    def __init__(self, programs: Path, folder: Path) -> None:
        self.folder = folder
        self._programs = programs
        # PostgreSQL refuses to run as root.
        self._user = "postgres" if os.geteuid() == 0 else None
        if self._user is not None:
            number = pwd.getpwnam(self._user)
            os.chown(folder, number.pw_uid, number.pw_gid)
        self.port = find_free_port()
        self.url = f"postgresql://bedplate@127.0.0.1:{self.port}/postgres"
        self._process: subprocess.Popen[bytes] | None = None
        self._run("initdb", "-D", str(folder / "data"), "-U", "bedplate", "-A", "trust", "--no-sync", "-E", "UTF8")

    def start(self) -> None:
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    self._programs / "postgres", "-D", self.folder / "data", "-p", str(self.port),
                    "-c", "listen_addresses=127.0.0.1", "-c", f"unix_socket_directories={self.folder}",
                    "-c", "fsync=off", "-c", "max_connections=50",
                ],
                stdout=log, stderr=log, user=self._user, cwd="/",
            )  # fmt: skip
        from tests.conftest import wait_for

        wait_for(self._answers, "PostgreSQL to accept connections")

    def stop(self, number: int = signal.SIGINT) -> None:
        """SIGINT: connections are closed. SIGQUIT: as after a crash."""
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait()
            self._process = None

    def execute(self, statement: str, *values: object) -> list[tuple[object, ...]]:
        with psycopg.connect(self.url, autocommit=True) as connection:
            done = connection.execute(statement.encode(), values)
            return done.fetchall() if done.description is not None else []

    def clear(self) -> None:
        """Removes all tables."""
        self.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")

    def _answers(self) -> bool:
        assert self._process is not None and self._process.poll() is None, (self.folder / "log").read_text()
        try:
            psycopg.connect(self.url, connect_timeout=5).close()
        except psycopg.OperationalError:
            return False
        return True

    def _run(self, program: str, *arguments: str) -> None:
        subprocess.run(
            [self._programs / program, *arguments], check=True, capture_output=True, user=self._user, cwd="/"
        )


@contextmanager
def start_database() -> Iterator[Database]:
    programs = find_programs()
    if programs is None:
        pytest.skip(ABSENT)
    # The path of a Unix socket is short, and pytest's folders are readable by their owner only.
    with tempfile.TemporaryDirectory(prefix="bedplate-pg-") as name:
        database = Database(programs, Path(name))
        database.start()
        try:
            yield database
        finally:
            database.stop()
