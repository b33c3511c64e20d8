"""bedplate under systemd: a user unit, and readiness notifications."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Mapping, Sequence

UNIT = """\
# {file}: put it into ~/.config/systemd/user, then run
#   systemctl --user daemon-reload && systemctl --user enable --now {name}.service
# To keep the service running after you log out: loginctl enable-linger
[Unit]
Description=bedplate: {what}
Documentation=man:systemd.service(5)
StartLimitIntervalSec=10min
StartLimitBurst=5

[Service]
Type=notify
NotifyAccess=main
WorkingDirectory={folder}
{environment}# Put secrets such as BEDPLATE_API_KEY into this file and give it mode 0600.
EnvironmentFile=-%h/.config/bedplate/{name}.env
ExecStart={command}
# The first start may install engines and download models.
TimeoutStartSec=infinity
# bedplate drains running requests and exits. What still runs after this time is killed.
TimeoutStopSec=60
# Only bedplate gets SIGTERM. It stops its engines after their requests have finished.
KillMode=mixed
# bedplate restarts an engine that the kernel killed for lack of memory.
OOMPolicy=continue
Restart=on-failure
RestartSec=2
# No restart after "not possible" (1) and usage errors (2): the result would be the same.
RestartPreventExitStatus=1 2
LimitNOFILE=65536
UMask=0077
NoNewPrivileges=yes
LockPersonality=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
SystemCallArchitectures=native
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK

[Install]
WantedBy=default.target
"""


def render_unit(name: str, what: str, argv: Sequence[str], folder: str, environment: Mapping[str, str]) -> str:
    """The text of a unit that runs `argv` in `folder`. `argv` and `environment` must not contain secrets."""
    lines = "".join(f"Environment={quote_word(f'{key}={value}')}\n" for key, value in environment.items())
    return UNIT.format(
        file=f"bedplate-{name}.service",
        name=f"bedplate-{name}",
        what=_escape_percent(" ".join(what.split())),
        folder=_escape_percent(folder),
        environment=lines,
        command=" ".join(quote_word(word, command=True) for word in argv),
    )


def quote_word(word: str, *, command: bool = False) -> str:
    """Quote one word so that systemd reads its specifiers, variables and quotes literally."""
    word = _escape_percent(word)
    if command:
        word = word.replace("$", "$$")
    if re.fullmatch(r"[\w@%+=:,./$-]+", word, re.ASCII):
        return word
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")
    return f'"{escaped}"'


def _escape_percent(text: str) -> str:
    return text.replace("%", "%%")


def notify(state: str) -> None:
    """Send a state to systemd if it started this process with `Type=notify`. Does nothing otherwise."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
        out.connect(address)
        out.sendall(state.encode())
