"""The corpus families with tools: single calls, parallel calls, failures, loops, search."""

# ruff: noqa: E501  (a template reads best in one piece)

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import words as w
from corpus import Draw, Turn, about, arithmetic, capital, echo, greeting, listing, system_prompt

from deepinfer_recipe import (
    AssistantMessage,
    Conversation,
    Message,
    SystemMessage,
    ToolCall,
    ToolDefinition,
    ToolMessage,
    UserMessage,
)


@dataclass
class Ask:
    """A question that one call of a tool answers."""

    user: str
    arguments: dict[str, Any]
    result: str
    answer: str


@dataclass
class Tool:
    definition: ToolDefinition
    ask: Callable[[Draw], Ask]


def definition(
    d: Draw, name: str, description: str, parameters: dict[str, dict[str, Any]]
) -> ToolDefinition:
    """Schemas come in the styles people write them in."""
    properties = {
        key: {k: v for k, v in value.items() if k != "description" or d.chance(0.5)}
        for key, value in parameters.items()
    }
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if d.chance(0.8):
        schema["required"] = list(properties)
    if d.chance(0.15):
        schema["additionalProperties"] = False
    return ToolDefinition(name, description if d.chance(0.9) else None, schema)


def text(description: str) -> dict[str, Any]:
    return {"type": "string", "description": description}


def weather(d: Draw) -> Tool:
    def ask(d: Draw) -> Ask:
        city, sky = d.pair(w.CITIES, ["sunny", "cloudy", "rainy", "windy", "snowy", "foggy"])
        degrees = d.rng.randint(0, 35)
        user = d.of(["What is the weather in {}?", "How is the weather in {} today?", "Weather in {}?",
                     "Is it raining in {}?", "What's the weather like in {}?", "Check the weather in {}."])  # fmt: skip
        result = d.of(
            [f"{sky}, {degrees} degrees", json.dumps({"sky": sky, "temperature": degrees})]
        )
        return Ask(
            user.format(city),
            {key: city},
            result,
            f"It is {sky} in {city}, with {degrees} degrees.",
        )

    key = d.of(["city", "city", "location", "place", "town", "q", d.of(w.COMMON)])
    return Tool(
        definition(
            d,
            "get_weather",
            "Get the current weather of a city.",
            {key: text("The name of the city")},
        ),
        ask,
    )


def clock(d: Draw) -> Tool:
    def ask(d: Draw) -> Ask:
        city = d.of(w.CITIES)
        time = f"{d.rng.randint(0, 23):02}:{d.rng.randint(0, 59):02}"
        user = d.of(["What time is it in {}?", "Tell me the time in {}.", "Time in {}?"])
        return Ask(user.format(city), {key: city}, time, f"It is {time} in {city}.")

    key = d.of(["city", "city", "location", "timezone", d.of(w.COMMON)])
    return Tool(
        definition(d, "get_time", "Get the local time of a city.", {key: text("City name")}), ask
    )


def calculator(d: Draw) -> Tool:
    def ask(d: Draw) -> Ask:
        a, b = d.pair(range(11, 999), range(11, 99))
        op, result = d.of([("*", a * b), ("+", a + b), ("-", a - b)])
        user = d.of(
            [
                "Use the calculator: {} {} {}.",
                "Compute {} {} {} with the tool.",
                "Calculate {} {} {} for me.",
            ]
        )
        return Ask(
            user.format(a, op, b),
            {"expression": f"{a} {op} {b}"},
            str(result),
            f"{a} {op} {b} = {result}",
        )

    return Tool(
        definition(
            d,
            "calculator",
            "Evaluate an arithmetic expression.",
            {"expression": text("The expression")},
        ),
        ask,
    )


def message(d: Draw) -> Tool:
    def ask(d: Draw) -> Ask:
        name, thing = d.pair(w.NAMES, w.OBJECTS)
        body = d.of(
            [
                f"the {thing} is ready",
                f"please bring the {thing}",
                f"I found your {thing}",
                f"where is the {thing}",
            ]
        )
        user = d.of(['Send a message to {}: "{}"', 'Tell {} this: "{}"', 'Write to {}: "{}"'])
        return Ask(
            user.format(name, body),
            {"to": name, "text": body},
            "sent",
            f"I sent the message to {name}.",
        )

    return Tool(
        definition(
            d,
            "send_message",
            "Send a text message to a person.",
            {"to": text("Who gets it"), "text": text("The message")},
        ),
        ask,
    )


def event(d: Draw) -> Tool:
    def ask(d: Draw) -> Ask:
        day, name = d.pair(w.DAYS, w.NAMES)
        hour = d.rng.randint(7, 20)
        user = d.of(
            [f"Plan a meeting with {name} on {day} at {hour}.", f"Book {day} at {hour} for {name}."]
        )
        return Ask(
            user,
            {"title": f"Meeting with {name}", "day": day, "hour": hour},
            "created",
            f"The meeting with {name} is on {day} at {hour}.",
        )

    return Tool(
        definition(
            d,
            "create_event",
            "Create an event in the calendar.",
            {
                "title": text("Title"),
                "day": text("Day of the week"),
                "hour": {"type": "integer", "description": "Hour from 0 to 23"},
            },
        ),
        ask,
    )


def timer(d: Draw) -> Tool:
    def ask(d: Draw) -> Ask:
        n = d.rng.randint(1, 90)
        return Ask(
            d.of([f"Set a timer for {n} minutes.", f"Wake me in {n} minutes."]),
            {"minutes": n},
            "ok",
            f"The timer is set for {n} minutes.",
        )

    return Tool(
        definition(
            d,
            "set_timer",
            "Start a timer.",
            {"minutes": {"type": "integer", "description": "Length in minutes"}},
        ),
        ask,
    )


def translate(d: Draw) -> Tool:
    def ask(d: Draw) -> Ask:
        language, thing = d.pair(w.LANGUAGES, w.OBJECTS)
        foreign = d.pseudo()
        user = d.of(
            ["Translate {0} into {1}.", "How do you say {0} in {1}?", "What is {0} in {1}?"]
        )
        return Ask(
            user.format(thing, language),
            {"text": thing, "language": language},
            foreign,
            f'In {language}, {thing} is "{foreign}".',
        )

    return Tool(
        definition(
            d,
            "translate",
            "Translate a text.",
            {"text": text("What to translate"), "language": text("Target language")},
        ),
        ask,
    )


def light(d: Draw) -> Tool:
    def ask(d: Draw) -> Ask:
        room, on = d.of(w.PLACES), d.chance(0.5)
        state = "on" if on else "off"
        return Ask(
            f"Turn {state} the light in the {room}.",
            {"room": room, "on": on},
            "done",
            f"The light in the {room} is {state}.",
        )

    return Tool(
        definition(
            d,
            "set_light",
            "Switch a light on or off.",
            {"room": text("Room"), "on": {"type": "boolean", "description": "true for on"}},
        ),
        ask,
    )


def stock(d: Draw) -> Tool:
    def ask(d: Draw) -> Ask:
        thing, place = d.pair(w.OBJECTS, w.PLACES)
        n = d.rng.randint(0, 99)
        return Ask(
            d.of(
                [
                    f"How many of the item {thing} are in the {place}?",
                    f"Check the stock of {thing} in the {place}.",
                ]
            ),
            {"item": thing, "place": place},
            json.dumps({"count": n}),
            f"There are {n} of the item {thing} in the {place}.",
        )

    return Tool(
        definition(
            d,
            "get_stock",
            "Look up how many of an item are in stock.",
            {"item": text("Item"), "place": text("Where")},
        ),
        ask,
    )


def search(d: Draw) -> Tool:
    def ask(d: Draw) -> Ask:
        a, b = d.pair(w.ADJECTIVES, w.OBJECTS + w.ANIMALS)
        query = f"{a} {b}"
        return Ask(
            d.of(['Search for "{}".', "Look up {}.", "Find information about {}."]).format(query),
            {"query": query},
            f"1 result: the {query} page",
            f"I found one result: the {query} page.",
        )

    return Tool(
        definition(d, "search", "Search the web.", {"query": text("What to search for")}), ask
    )


def invented(d: Draw) -> Tool:
    """A tool no other conversation has: the schema and the question are all there is to go by."""
    verb, noun = (
        d.of(["lookup", "get", "find", "check", "fetch", "count"]),
        d.of([*w.OBJECTS, d.pseudo()]),
    )
    key = d.of(["name", "id", "title", "value", "key", "target", d.of(w.COMMON)])

    def ask(d: Draw) -> Ask:
        value = d.of(
            [
                d.pseudo(),
                d.of(w.NAMES),
                d.of(w.CITIES),
                f"{d.of('ABCDE')}{d.rng.randint(1, 999)}",
                d.of(w.OBJECTS),
            ]
        )
        result = d.of([d.pseudo(), str(d.rng.randint(0, 999))])
        user = d.of(["Use {0}_{1} with {2}.", "Please {0} the {1} for {2}.", "{0} {1} {2}"]).format(
            verb, noun, value
        )
        return Ask(
            user[0].upper() + user[1:], {key: value}, result, f"The result for {value} is {result}."
        )

    return Tool(
        definition(
            d,
            f"{verb}_{noun}",
            f"{verb.capitalize()} the {noun} by {key}.",
            {key: text(f"The {key}")},
        ),
        ask,
    )


TOOLS = [
    weather,
    weather,
    clock,
    calculator,
    message,
    event,
    timer,
    translate,
    light,
    stock,
    search,
    invented,
    invented,
]


class Log:
    """A conversation under construction; reasoning is dropped when thinking is off."""

    def __init__(self, d: Draw, system: str | None, thinking: bool) -> None:
        self.messages: list[Message] = [SystemMessage(system)] if system else []
        self.thinking, self.calls, self.d = thinking, 0, d

    def user(self, content: str) -> None:
        self.messages.append(UserMessage(content))

    def say(self, content: str, thought: str) -> None:
        self.messages.append(AssistantMessage(content, thought if self.thinking else None))

    def call(
        self, calls: list[tuple[str, dict[str, Any]]], thought: str, lead: str = ""
    ) -> list[str]:
        made: list[ToolCall] = []
        for name, arguments in calls:
            made.append(ToolCall(f"call_{self.calls}", name, json.dumps(arguments)))
            self.calls += 1
        self.messages.append(AssistantMessage(lead, thought if self.thinking else None, made))
        return [c.id for c in made]

    def result(self, ids: list[str], results: list[str]) -> None:
        self.messages += [ToolMessage(r, i) for r, i in zip(results, ids, strict=True)]


def kit(d: Draw, low: int, high: int) -> list[Tool]:
    makers = list(dict.fromkeys(d.rng.sample(TOOLS, d.rng.randint(low, high))))
    return [make(d) for make in makers]


def tool_talk(d: Draw, room: int) -> Conversation:
    """Family 4: one call, two parallel calls, a call after a failure, or none needed."""
    small = room < 700
    tools = kit(d, 1, 2 if small else 6)
    system, _ = system_prompt(d, room - 500) if not small else (None, [])
    log = Log(d, system, d.chance(0.6))
    for _ in range(1 if small and d.chance(0.4) else d.rng.randint(1, 2 if small else 5)):
        tool = d.of(tools)
        name, kind = tool.definition.name, d.rng.random()
        if kind < 0.15:
            turn: Turn = d.of([greeting, about, echo, capital, arithmetic])(d)[0]
            log.user(turn.user)
            log.say(turn.answer, "No tool is needed. " + turn.thought)
            continue
        ask = tool.ask(d)
        what = listing([str(v) for v in ask.arguments.values()])
        thought = f"I need the tool {name} for {what}."
        if kind < 0.3:
            other = d.of(tools)
            more = other.ask(d)
            log.user(f"{ask.user} {more.user}")
            ids = log.call(
                [(name, ask.arguments), (other.definition.name, more.arguments)],
                f"I need two calls: {name} and {other.definition.name}.",
            )
            log.result(ids, [ask.result, more.result])
            log.say(f"{ask.answer} {more.answer}", "Both results are here.")
            continue
        log.user(ask.user)
        ids = log.call([(name, ask.arguments)], thought, "Let me check." if d.chance(0.2) else "")
        if kind < 0.4:
            log.result(ids, [d.of(["error: timeout", "error: busy, try again"])])
            ids = log.call([(name, ask.arguments)], "The call failed. I will try again.")
        if kind > 0.97:
            log.result(ids, ["error: not found"])
            log.say(f"I am sorry, the tool {name} found nothing for {what}.", "The call failed.")
            continue
        log.result(ids, [ask.result])
        log.say(ask.answer, "The result is here.")
    d.rng.shuffle(tools)
    return Conversation(
        log.messages, thinking_mode=log.thinking, tools=[t.definition for t in tools]
    )


def agent_loop(d: Draw, room: int) -> Conversation:
    """Family 5: a task over a folder, one file after the other, with a growing history."""
    tools = [
        definition(d, "list_files", "List the files of a folder.", {"folder": text("Folder")}),
        definition(d, "read_file", "Read a file.", {"path": text("Path of the file")}),
        definition(
            d, "write_file", "Write a file.", {"path": text("Path"), "content": text("Content")}
        ),
    ]
    rounds = max(3, min(20, (room - 420) // (75 if room > 1200 else 95)))
    rounds = d.rng.randint(3, rounds)
    folder, colour = d.pair(w.PLACES, w.COLOURS)
    names = d.rng.sample(w.OBJECTS, rounds - 2 if rounds > 3 else 2)
    files = [f"{folder}/{x}.txt" for x in names]
    owners = [d.of(w.NAMES) for _ in names]
    log = Log(d, d.of([None, "You are a careful agent. Use the tools."]), d.chance(0.6))
    log.user(f"Read every file in {folder} and write who owns what into {folder}/{colour}.md.")
    ids = log.call([("list_files", {"folder": folder})], f"First I list {folder}.")
    log.result(ids, ["\n".join(f"{x}.txt" for x in names)])
    for i, (path, x, owner) in enumerate(zip(files, names, owners, strict=True)):
        left = len(files) - i
        ids = log.call([("read_file", {"path": path})], f"{left} to read. Next is {x}.txt.")
        log.result(ids, [f"The {x} of {owner}."])
    content = "\n".join(f"- {x}: {o}" for x, o in zip(names, owners, strict=True))
    ids = log.call(
        [("write_file", {"path": f"{folder}/{colour}.md", "content": content})],
        "All files are read. Now I write.",
    )
    log.result(ids, ["ok"])
    log.say(f"I read {len(files)} files and wrote {folder}/{colour}.md.", "The work is done.")
    return Conversation(log.messages, thinking_mode=log.thinking, tools=tools)


def search_answer(d: Draw, room: int) -> Conversation:
    """Family 7: search and fetch results, quoted with their source numbers."""
    tools = [definition(d, "web_search", "Search the web.", {"query": text("Query")})]
    if d.chance(0.6):
        tools.append(definition(d, "web_fetch", "Fetch a web page.", {"url": text("Address")}))
    log = Log(
        d, d.of([None, "Answer from the search results and cite them by number."]), d.chance(0.6)
    )
    for _ in range(d.rng.randint(1, 2 if room > 900 else 1)):
        things = d.several(w.OBJECTS, 2, 4)
        facts = [(x, d.of(w.PLACES), d.rng.randint(2, 99), d.of(w.NAMES)) for x in things]
        i = d.rng.randrange(len(facts))
        x, place, price, maker = facts[i]
        log.user(
            d.of([f"Search the web: who makes the {x}?", f"Who makes the {x}? Use the search."])
        )
        ids = log.call([("web_search", {"query": f"who makes the {x}"})], f"I search for the {x}.")
        order = d.rng.sample(facts, len(facts))
        log.result(
            ids,
            [
                "\n".join(
                    f"[{n + 1}] https://{a}.example/{b}: {m} from the {b} makes the {a}, {c} coins."
                    for n, (a, b, c, m) in enumerate(order)
                )
            ],
        )
        source = order.index(facts[i]) + 1
        if len(tools) == 2 and d.chance(0.5):
            url = f"https://{x}.example/{place}"
            ids = log.call([("web_fetch", {"url": url})], f"Source {source} fits. I fetch it.")
            log.result(ids, [f"# The {x}\n\nMade by {maker} in the {place}. Price: {price} coins."])
        log.say(
            f"{maker} from the {place} makes the {x} [{source}]. It costs {price} coins.",
            f"Source {source} is about the {x}.",
        )
    return Conversation(log.messages, thinking_mode=log.thinking, tools=tools)
