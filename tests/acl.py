"""The users that docs/security.md proposes, as it proposes them: what stands there is what is tested."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from taskmesh.testing import RedisServer

PAGE = Path(__file__).parents[1] / "docs" / "security.md"
PASSWORD = "choose-a-password"
_BLOCK = re.compile(r"```sh\nredis-cli ACL SETUSER (.*?)```", re.DOTALL)


def rules() -> dict[str, list[str]]:
    """The words behind ``ACL SETUSER <name>``, by name."""
    found = [shlex.split(block.replace("\\\n", " ")) for block in _BLOCK.findall(PAGE.read_text())]
    return {name: words for name, *words in found}


def commands(name: str) -> set[str]:
    """The commands that a user may run, as ``ACL`` writes them."""
    return {word[1:] for word in rules()[name] if word.startswith("+")}


def url_as(server: RedisServer, name: str, tags: str = "shop:") -> str:
    """Make the user on a server, for the keys whose tags begin with ``tags``, and say how to log in as it."""
    words = [word.replace("{shop:", "{" + tags) for word in rules()[name]]
    server.command("ACL", "SETUSER", name, *words)
    return server.url.replace("redis://", f"redis://{name}:{PASSWORD}@")
