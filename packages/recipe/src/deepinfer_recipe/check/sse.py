"""Server-sent events, read strictly: what a lenient client forgives is a problem here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Event:
    """One event: its name, if it has one, and its data lines joined."""

    name: str | None
    data: str


def read_events(body: str) -> tuple[list[Event], list[str]]:
    """The events of a whole stream, and what is not well-formed in it."""
    events: list[Event] = []
    problems: list[str] = []
    text = body.replace("\r\n", "\n").replace("\r", "\n")
    if text and not text.endswith("\n\n"):
        problems.append("the stream does not end with a blank line: its last event is lost")
    name: str | None = None
    data: list[str] = []
    for number, line in enumerate(text.split("\n"), start=1):
        key, colon, value = line.partition(":")
        value = value.removeprefix(" ")
        if not line:
            if data:
                events.append(Event(name, "\n".join(data)))
            elif name is not None:
                problems.append(f"line {number}: the event {name!r} has no data")
            name, data = None, []
        elif key == "data" and colon:
            data.append(value)
        elif key == "event" and colon:
            name = value
        elif line[0] != ":" and key not in ("id", "retry"):
            problems.append(f"line {number}: {line[:60]!r} is no field of an event")
    return events, problems
