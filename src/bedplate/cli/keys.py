"""bedplate keys: API keys and limits of tenants."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from bedplate.cli.options import Json

app = typer.Typer(
    help="Manage API keys and limits of tenants.",
    invoke_without_command=True,
    rich_markup_mode=None,
    epilog="""Examples:

\b
  bedplate keys add alice --requests-per-minute 60 --in-flight 4
  bedplate keys add ci --weight 0.5 --expires 30d
  bedplate keys add prometheus --admin > prometheus.key
  bedplate keys set alice --tokens-per-minute 100000 --in-flight none
  bedplate keys list --json
  bedplate keys revoke alice
  bedplate keys open

A running endpoint applies changes within a second. Only salted hashes of keys are stored.""",
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="The name of the tenant.")]
Weight = Annotated[
    float | None,
    typer.Option(
        help="Scheduling weight against other waiting tenants. Default for a new tenant: 1.", show_default=False
    ),
]
Requests = Annotated[
    str | None,
    typer.Option(
        "--requests-per-minute", metavar="N", help="Limit of requests per minute; none: no limit.", show_default=False
    ),
]
Tokens = Annotated[
    str | None,
    typer.Option(
        "--tokens-per-minute",
        metavar="N",
        help="Limit of prompt and output tokens per minute; none: no limit.",
        show_default=False,
    ),
]
InFlight = Annotated[
    str | None,
    typer.Option("--in-flight", metavar="N", help="Limit of concurrent requests; none: no limit.", show_default=False),
]

Admin = Annotated[
    bool | None,
    typer.Option(
        "--admin/--no-admin",
        help="Whether the tenant may read all metrics and the whole live page. Default for a new tenant: no.",
        show_default=False,
    ),
]


@app.callback()
def keys(context: typer.Context, json: Json = False) -> None:
    if context.invoked_subcommand is None:
        list_(json=json)


@app.command(
    name="list",
    epilog="""Examples:

\b
  bedplate keys list
  bedplate keys list --json""",
)
def list_(json: Json = False) -> None:
    """List tenants with their keys, weights and limits."""
    from bedplate.usage_store import open_usage_store, read_tenants

    found = read_tenants(open_usage_store())
    if json:
        from bedplate.values import to_json
        from bedplate.values.tenant import TenantList

        print(to_json(TenantList(tenants=tuple(found))))  # noqa: T201
        return
    from bedplate.cli.terminal import make_console
    from bedplate.show.tenants import render_tenants

    make_console().print(render_tenants(found))
    _show_closed()


@app.command(
    epilog="""Examples:

\b
  bedplate keys add alice --requests-per-minute 60 --in-flight 4
  bedplate keys add ci --weight 0.5 --expires 30d
  bedplate keys add prometheus --admin > prometheus.key"""
)
def add(
    name: Name,
    weight: Weight = None,
    requests_per_minute: Requests = None,
    tokens_per_minute: Tokens = None,
    in_flight: InFlight = None,
    expires: Annotated[
        str | None,
        typer.Option(
            metavar="SPAN", help="How long the key is valid: 12h, 30d. Default: no expiry.", show_default=False
        ),
    ] = None,
    admin: Admin = None,
    json: Json = False,
) -> None:
    """Create a key for a tenant and print it once. A tenant may have several keys."""
    from bedplate.hosting.tenants import add_key
    from bedplate.values.units import parse_duration

    changes = _collect_changes(weight, requests_per_minute, tokens_per_minute, in_flight, admin)
    valid_s = parse_duration(expires, "--expires") if expires is not None else None
    tenant, key = add_key(name, changes, valid_s)
    if json:
        from bedplate.values import to_json
        from bedplate.values.tenant import NewKey

        print(to_json(NewKey(key=key, tenant=tenant)))  # noqa: T201
        return
    typer.echo(key)
    typer.echo(f"key {tenant.keys[-1].id} of {name}; it is not stored and cannot be shown again", err=True)


@app.command(
    name="set",
    epilog="""Examples:

\b
  bedplate keys set alice --tokens-per-minute 100000 --in-flight none
  bedplate keys set default --requests-per-minute 60""",
)
def set_(
    name: Name,
    weight: Weight = None,
    requests_per_minute: Requests = None,
    tokens_per_minute: Tokens = None,
    in_flight: InFlight = None,
    admin: Admin = None,
) -> None:
    """Change the limits of a tenant. `default` is the tenant of the key that `serve` was given."""
    from bedplate.cli.terminal import make_console
    from bedplate.hosting.tenants import change_tenant
    from bedplate.show.tenants import render_tenants

    tenant = change_tenant(name, _collect_changes(weight, requests_per_minute, tokens_per_minute, in_flight, admin))
    make_console().print(render_tenants((tenant,)))


@app.command(
    epilog="""Examples:

\b
  bedplate keys revoke alice
  bedplate keys revoke 3f2a91c0"""
)
def revoke(
    which: Annotated[
        str, typer.Argument(metavar="NAME|ID", help="A tenant, with all of its keys, or the id of one key.")
    ],
) -> None:
    """Revoke keys. Running requests are not interrupted."""
    from bedplate.hosting.tenants import revoke as revoke_keys

    revoked = revoke_keys(which)
    typer.echo(f"revoked: {', '.join(revoked) or 'the limits of a tenant without keys'}")
    _show_closed()


@app.command(
    name="open",
    epilog="""Examples:

\b
  bedplate keys open""",
)
def open_() -> None:
    """Let endpoints start without keys again, after all keys were revoked.

    Once a key has existed, every endpoint of this installation requires one, also after a restart.
    """
    from bedplate.hosting.tenants import open_endpoints

    if open_endpoints():
        typer.echo("endpoints that start from now on require no key; running ones continue to require one")
    else:
        typer.echo("endpoints require no key: none has existed here")


def _show_closed() -> None:
    from bedplate.hosting.tenants import explain_closed

    if (text := explain_closed()) is not None:
        typer.echo(text, err=True)


def _collect_changes(
    weight: float | None,
    requests_per_minute: str | None,
    tokens_per_minute: str | None,
    in_flight: str | None,
    admin: bool | None,
) -> dict[str, Any]:
    given_plainly = {"weight": weight, "admin": admin}
    changes: dict[str, Any] = {name: value for name, value in given_plainly.items() if value is not None}
    for field, given in (
        ("requests_per_minute", requests_per_minute),
        ("tokens_per_minute", tokens_per_minute),
        ("in_flight", in_flight),
    ):
        if given is not None:
            changes[field] = _parse_limit(given, f"--{field.replace('_', '-')}")
    return changes


def _parse_limit(text: str, option: str) -> int | None:
    from bedplate.errors import UsageError

    if text.strip().lower() == "none":
        return None
    try:
        return int(text.replace(",", "").replace("_", ""))
    except ValueError:
        raise UsageError(f"{option} must be a number or none, not {text!r}") from None
