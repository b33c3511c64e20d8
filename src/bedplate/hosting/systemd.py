"""bedplate under systemd: a unit for the user's own manager, and the words that a service says to it."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Mapping, Sequence

UNIT = """\
# {file}: put it into ~/.config/systemd/user, then
#   systemctl --user daemon-reload && systemctl --user enable --now {name}.service
# To keep it when you log out: loginctl enable-linger
[Unit]
Description=bedplate: {what}
Documentation=man:systemd.service(5)
StartLimitIntervalSec=10min
StartLimitBurst=5

[Service]
Type=notify
NotifyAccess=main
WorkingDirectory={folder}
{environment}# Secrets such as BEDPLATE_API_KEY belong into this file, with mode 0600.
EnvironmentFile=-%h/.config/bedplate/{name}.env
ExecStart={command}
# Engines may be installed and models fetched before it is ready.
TimeoutStartSec=infinity
# It stops in order by itself; whatever is left after this is killed.
TimeoutStopSec=60
# Only bedplate gets the signal: it ends its engines when their answers are done.
KillMode=mixed
# An engine that the system kills for its memory is started again by bedplate.
OOMPolicy=continue
Restart=on-failure
RestartSec=2
# A wrong question and an answer that is no do not get better.
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


def unit(name: str, what: str, argv: Sequence[str], folder: str, environment: Mapping[str, str]) -> str:
    """The text of a unit that runs `argv` in `folder`. Nothing secret may be in `argv` or `environment`."""
    lines = "".join(f"Environment={quoted(f'{key}={value}')}\n" for key, value in environment.items())
    return UNIT.format(
        file=f"bedplate-{name}.service",
        name=f"bedplate-{name}",
        what=_doubled(" ".join(what.split())),
        folder=_doubled(folder),
        environment=lines,
        command=" ".join(quoted(word, command=True) for word in argv),
    )


def quoted(word: str, *, command: bool = False) -> str:
    """One word as systemd reads it back: with its specifiers, variables and quotes taken as they stand."""
    word = _doubled(word)
    if command:
        word = word.replace("$", "$$")
    if re.fullmatch(r"[\w@%+=:,./$-]+", word, re.ASCII):
        return word
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")
    return f'"{escaped}"'


def _doubled(text: str) -> str:
    return text.replace("%", "%%")


def notify(state: str) -> None:
    """Tells systemd, where it is what started us and wants to hear it; who else does is never disturbed."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
        out.connect(address)
        out.sendall(state.encode())
