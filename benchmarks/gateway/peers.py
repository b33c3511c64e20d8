"""The gateways that are compared: how each is installed, and the command that starts it."""

import json
import os
import pwd
import secrets
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
INSTALL_LIMIT_S = 900.0


class Unavailable(Exception):
    """Reason why a gateway cannot run on this machine."""


@dataclass(frozen=True)
class Ports:
    """Where the null engine listens, and where the gateway (and its metrics) should."""

    upstream: int
    gateway: int
    spare: int

    @property
    def upstream_url(self) -> str:
        """The null engine's address."""
        return f"http://127.0.0.1:{self.upstream}"


FORWARDER = "uvloop-forwarder"
"""What every gateway on this Python and uvloop costs, without any work of its own."""

# LiteLLM does not start without a key, so every gateway is sent this one.
KEY_VARIABLE = "GATEWAY_BENCH_KEY"
os.environ.setdefault(KEY_VARIABLE, f"sk-{secrets.token_hex(32)}")

CommandMaker = Callable[[Path, Path, Ports], list[str]]


@dataclass(frozen=True)
class Peer:
    """A gateway; slow ones are measured in one repeat only."""

    name: str
    command: CommandMaker
    requirement: str | None = None
    slow: bool = False
    environment: tuple[tuple[str, str], ...] = ()


def nginx_command(_env: Path, scratch: Path, ports: Ports) -> list[str]:
    """nginx as a streaming proxy: no buffering, persistent upstream connections, one worker."""
    binary = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
    if binary is None:
        raise Unavailable("no nginx on PATH (Debian: apt-get install nginx-light)")
    user = f"user {pwd.getpwuid(0).pw_name};" if os.geteuid() == 0 else ""
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temp_paths = "\n".join(f"    {kind}_temp_path {scratch / kind};" for kind in kinds)
    config = scratch / "nginx.conf"
    config.write_text(f"""{user}
worker_processes 1;
daemon off;
pid {scratch / "nginx.pid"};
error_log stderr warn;
events {{ worker_connections 8192; }}
http {{
    access_log off;
    tcp_nodelay on;
    keepalive_requests 100000000;
{temp_paths}
    upstream engine {{
        server 127.0.0.1:{ports.upstream};
        keepalive 1024;
        keepalive_requests 100000000;
    }}
    server {{
        listen 127.0.0.1:{ports.gateway} backlog=4096;
        location / {{
            proxy_pass http://engine;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_buffering off;
        }}
    }}
}}
""")
    return [binary, "-p", str(scratch), "-c", str(config), "-e", "stderr"]


def bedplate_command(_env: Path, _scratch: Path, ports: Ports) -> list[str]:
    """bedplate's own gateway, with the Python that runs the comparison."""
    script = HERE / "bedplate_gateway.py"
    if not script.exists():
        raise Unavailable(f"{script.name} does not exist yet")
    return [sys.executable, str(script), "--upstream", ports.upstream_url, "--port", str(ports.gateway)]


def tenants_command(env: Path, scratch: Path, ports: Ports) -> list[str]:
    """The same with two tenants that have limits and share the engine, and with a record of each request."""
    return [*bedplate_command(env, scratch, ports), "--store", str(scratch / "store.sqlite")]


def aiohttp_command(_env: Path, _scratch: Path, ports: Ports) -> list[str]:
    """The aiohttp proxy of this folder."""
    return [sys.executable, str(HERE / "aiohttp_proxy.py"), ports.upstream_url, str(ports.gateway)]


def forwarder_command(_env: Path, _scratch: Path, ports: Ports) -> list[str]:
    """The forwarder of this folder."""
    return [sys.executable, str(HERE / "forwarder.py"), ports.upstream_url, str(ports.gateway)]


def router_options(ports: Ports) -> list[str]:
    """The options that vllm-router and sglang-router share."""
    return [
        *("--worker-urls", ports.upstream_url, "--host", "127.0.0.1", "--port", str(ports.gateway)),
        *("--policy", "round_robin", "--log-level", "error"),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(ports.spare)),
        *("--worker-startup-check-interval", "1", "--max-concurrent-requests", "4096"),
    ]


def vllm_command(env: Path, _scratch: Path, ports: Ports) -> list[str]:
    """vllm-router in front of one worker."""
    return [str(env / "bin" / "vllm-router"), *router_options(ports)]


def sglang_command(env: Path, _scratch: Path, ports: Ports) -> list[str]:
    """sglang-router in front of one worker."""
    return [str(env / "bin" / "sglang-router"), "launch", *router_options(ports)]


def litellm_command(env: Path, scratch: Path, ports: Ports) -> list[str]:
    """The LiteLLM proxy with one OpenAI-compatible model and one worker."""
    parameters = {"model": "openai/null-model", "api_base": f"{ports.upstream_url}/v1", "api_key": "none"}
    config = scratch / "litellm.yaml"
    # JSON is YAML.
    config.write_text(json.dumps({"model_list": [{"model_name": "null-model", "litellm_params": parameters}]}))
    options = ["--config", str(config), "--host", "127.0.0.1", "--port", str(ports.gateway), "--num_workers", "1"]
    return [str(env / "bin" / "litellm"), *options, "--telemetry", "False"]


PEERS = (
    Peer("nginx", nginx_command),
    Peer("bedplate", bedplate_command),
    Peer("bedplate-tenants", tenants_command),
    Peer(FORWARDER, forwarder_command),
    Peer("aiohttp", aiohttp_command),
    Peer("vllm-router", vllm_command, requirement="vllm-router==0.1.16"),
    Peer("sglang-router", sglang_command, requirement="sglang-router==0.3.2"),
    Peer(
        "litellm",
        litellm_command,
        requirement="litellm[proxy]==1.106.2",
        slow=True,
        environment=(("LITELLM_LOCAL_MODEL_COST_MAP", "True"), ("LITELLM_MASTER_KEY", os.environ[KEY_VARIABLE])),
    ),
)


def environment_of(peer: Peer, work: Path) -> Path:
    """Folder of a gateway's virtual environment; created on first use."""
    if peer.requirement is None:
        return work
    version = peer.requirement.rpartition("=")[2]
    env = work / f"{peer.name}-{version}"
    if (env / "bin" / peer.name).exists():
        return env
    print(f"installing {peer.requirement} into {env}", file=sys.stderr, flush=True)
    try:
        install(peer.requirement, env)
    except (OSError, subprocess.SubprocessError) as error:
        shutil.rmtree(env, ignore_errors=True)
        raise Unavailable(f"{peer.requirement} could not be installed: {error}") from error
    return env


def install(requirement: str, env: Path) -> None:
    """Create a virtual environment and install into it, with uv if available."""
    python = str(env / "bin" / "python")
    uv = os.environ.get("UV") or shutil.which("uv")
    if uv:
        quiet_run([uv, "venv", "--quiet", "--python", sys.executable, str(env)])
        quiet_run([uv, "pip", "install", "--quiet", "--python", python, requirement])
    else:
        venv.create(env, with_pip=True)
        quiet_run([python, "-m", "pip", "install", "--quiet", requirement])


def quiet_run(command: list[str]) -> None:
    """Run an installer and show its output only if it fails."""
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=INSTALL_LIMIT_S, check=False
    )
    if done.returncode:
        raise subprocess.SubprocessError(done.stdout.strip()[-400:] or f"exit status {done.returncode}")
