"""bedplate under systemd: a user unit, and readiness notifications."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping, Sequence

from bedplate.errors import UsageError
from bedplate.values.quoting import escape_controls, escape_systemd_text, is_safe, quote_systemd, write_comment

UNIT = """\
{head}
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
    if not all(map(is_safe, folder)) or folder != folder.strip() or folder.endswith("\\"):
        raise UsageError(
            f"a systemd unit cannot name the folder {escape_controls(folder)}",
            hint="run the command in a folder without control characters, and without a space or backslash at its end",
        )
    lines = "".join(f"Environment={quote_systemd(f'{key}={value}')}\n" for key, value in environment.items())
    unit = f"bedplate-{name}.service"
    head = (
        f"{unit}: put it into ~/.config/systemd/user, then run",
        f"  systemctl --user daemon-reload && systemctl --user enable --now {unit}",
    )
    return UNIT.format(
        head="\n".join(map(write_comment, head)),
        name=f"bedplate-{name}",
        what=escape_systemd_text(what),
        folder=folder.replace("%", "%%"),
        environment=lines,
        command=" ".join(quote_systemd(word, command=True) for word in argv),
    )


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
