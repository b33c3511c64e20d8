"""bedplate mcp: bedplate's verbs as tools for agents."""

from __future__ import annotations

EXAMPLES = """Examples:

\b
  bedplate mcp                                   on standard input and output
  claude mcp add bedplate -- bedplate mcp
  codex mcp add bedplate -- bedplate mcp

Tools: probe, models, plan, bench, diagnose, compare. Each returns the JSON document of its verb."""


def mcp() -> None:
    """Serve bedplate's verbs as tools to an agent (MCP).

    It speaks the Model Context Protocol on standard input and output, and ends when standard input is closed.
    """
    import sys

    from bedplate.cli.mcp_server import McpServer

    McpServer(sys.stdout).serve(sys.stdin)
