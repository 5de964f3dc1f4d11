"""One way to say that an argument is wrong: its name, the rule, what came, the remedy; on one line."""

from __future__ import annotations

from typing import Any


def require(ok: Any, name: str, rule: str, got: Any, remedy: str) -> None:
    """Raise ValueError unless `ok`. The message is one line, whatever `got` looks like; it is built only then."""
    if not ok:
        raise ValueError(message(name, rule, got, remedy))


def message(name: str, rule: str, got: Any, remedy: str) -> str:
    text = f"{name} must {rule}; got {got}; {remedy}"
    return " ".join(text.split())


def require_int(value: Any, name: str, least: int = 1) -> None:
    ok = isinstance(value, int) and not isinstance(value, bool) and value >= least
    require(ok, name, f"be an integer >= {least}", value, f"pass {name}={least} or more")
