"""Generated request bodies, through both codecs: the same prompt, or the same refusal."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import deepseek_recipe

import deepinfer_recipe

CORPUS = Path(__file__).parents[1] / "tests" / "corpus"
REQUESTS = {
    "chat": "ChatCompletionRequest",
    "responses": "ResponsesRequest",
    "messages": "MessagesRequest",
}
MODELS = ["DeepSeek-V4-Pro", "DeepSeek-V4.1-Flash"]
WORDS = [
    "",
    "x",
    "json",
    "a\n\nb",
    "é😀",
    "<｜User｜>",
    "</think>",
    "｜DSML｜",
    "<｜image｜>",
    " ",
    "\x00",
]
SCHEMAS: list[Any] = [
    {"type": "object"},
    {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
    {"type": "object", "properties": {"n": {"type": "integer", "minimum": -1.50}}},
    {"type": "object", "properties": {"l": {"type": "array", "items": {"type": "number"}}}},
    {"type": "object", "properties": {"o": {"anyOf": [{"type": "null"}, {"type": "string"}]}}},
    {"type": "object", "$defs": {"d": {}}, "properties": {"d": {"$ref": "#/$defs/d"}}},
    {"type": "string"},
    {"type": "nonsense"},
    {},
    True,
    None,
]  # fmt: skip
PNG = "data:image/png;base64,iVBORw0KGgo="


def maybe(rng: random.Random, share: float, value: Any) -> dict[str, Any]:
    return value if rng.random() < share else {}


def number(rng: random.Random) -> Any:
    return rng.choice(
        [0, 1, 2, -1, 0.5, 0.95, 1.0, 1.5, 20, 21, 4096, 2**31, 2**63, 2**64, None, "1", True]
    )


def text(rng: random.Random) -> str:
    return "".join(rng.choice(WORDS) for _ in range(rng.randint(0, 3)))


def tool_name(rng: random.Random) -> str:
    return rng.choice(
        ["f", "g", "get_weather", "a-b", "f" * 128, "f" * 129, "bad name", "", "apply_patch"]
    )


def some(rng: random.Random, make: Any, low: int = 0, high: int = 3) -> list[Any]:
    return [make(rng) for _ in range(rng.randint(low, high))]


def arguments(rng: random.Random) -> str:
    return rng.choice(
        ["{}", '{"a": "x"}', '{"a": 1.50, "b": [1e2]}', "bad", "", "[1]", '{"s": "<\\n>"}']
    )


# -- Chat Completions ------------------------------------------------------------------


def chat_part(rng: random.Random) -> Any:
    kind = rng.random()
    if kind < 0.7:
        return {"type": "text", "text": text(rng)}
    if kind < 0.85:
        url = rng.choice([PNG, "https://x.test/a.png", "ftp://x", "data:text/plain,x"])
        return {
            "type": "image_url",
            "image_url": {
                "url": url,
                **maybe(rng, 0.3, {"detail": rng.choice(["low", "auto", "huge"])}),
            },
        }
    return {
        "type": "file",
        **maybe(rng, 0.7, {"file_data": PNG}),
        **maybe(rng, 0.2, {"file_id": "f"}),
    }


def chat_content(rng: random.Random) -> Any:
    return text(rng) if rng.random() < 0.7 else some(rng, chat_part)


def chat_messages(rng: random.Random) -> list[Any]:
    out: list[Any] = []
    for _ in range(rng.randint(0, 5)):
        role = rng.choice(
            ["system", "user", "user", "assistant", "assistant", "latest_reminder", "developer"]
        )
        if role != "assistant":
            content = text(rng) if role == "latest_reminder" else chat_content(rng)
            out.append({"role": role, "content": content})
            continue
        ids = rng.sample(["c1", "c2", "c3"], rng.choice([0, 0, 1, 2]))
        message: dict[str, Any] = {
            "role": "assistant",
            "content": rng.choice([None, text(rng), chat_content(rng)]),
        }
        if ids:
            message["tool_calls"] = [
                {
                    "id": i,
                    "type": "function",
                    "function": {"name": tool_name(rng), "arguments": arguments(rng)},
                }
                for i in ids
            ]
        message |= maybe(rng, 0.4, {"reasoning_content": text(rng)}) | maybe(
            rng, 0.08, {"prefix": True}
        )
        out.append(message)
        rng.shuffle(ids)
        out += [
            {"role": "tool", "tool_call_id": i, "content": chat_content(rng)}
            for i in ids
            if rng.random() < 0.95
        ]
    return out


def function(rng: random.Random) -> dict[str, Any]:
    return {
        "name": tool_name(rng),
        **maybe(rng, 0.6, {"description": text(rng)}),
        **maybe(rng, 0.8, {"parameters": rng.choice(SCHEMAS)}),
        **maybe(rng, 0.2, {"strict": rng.choice([True, False, None])}),
    }


def chat(rng: random.Random) -> dict[str, Any]:
    formats: list[Any] = [
        {"type": "text"},
        {"type": "json_object"},
        {
            "type": "json_schema",
            "json_schema": {
                "name": "n",
                "schema": rng.choice(SCHEMAS),
                "strict": rng.choice([True, False]),
            },
        },
        {"type": "regex", "regex": "a+"},
        {"type": "xml"},
    ]
    choice = rng.choice(
        [
            "auto",
            "none",
            "required",
            {"type": "function", "function": {"name": tool_name(rng)}},
            "some",
        ]
    )
    return {
        "model": rng.choice([*MODELS, *MODELS, *MODELS, "gpt"]),
        "messages": chat_messages(rng),
        **maybe(
            rng, 0.4, {"tools": [{"type": "function", "function": f} for f in some(rng, function)]}
        ),
        **maybe(rng, 0.3, {"tool_choice": choice}),
        **maybe(rng, 0.2, {"response_format": rng.choice(formats)}),
        **maybe(
            rng,
            0.4,
            {"thinking": {"type": rng.choice(["enabled", "disabled", "disabled", "adaptive"])}},
        ),
        **maybe(
            rng,
            0.3,
            {
                "reasoning_effort": rng.choice(
                    ["none", "minimal", "low", "high", "xhigh", "max", "most"]
                )
            },
        ),
        **sampling(
            rng,
            [
                "temperature",
                "top_p",
                "max_tokens",
                "n",
                "seed",
                "top_logprobs",
                "frequency_penalty",
                "presence_penalty",
            ],
        ),
        **maybe(rng, 0.2, {"stop": rng.choice(["x", "", ["a", "b"], ["a", ""], ["a"] * 17, None])}),
        **maybe(rng, 0.2, {"logprobs": rng.choice([True, False, None])}),
        **maybe(rng, 0.3, {"stream": rng.choice([True, False])}),
        **maybe(rng, 0.1, {"stream_options": rng.choice([{}, {"include_usage": True}, None])}),
    }


def sampling(rng: random.Random, names: list[str]) -> dict[str, Any]:
    return {name: number(rng) for name in names if rng.random() < 0.08}


# -- Responses -------------------------------------------------------------------------


def responses_part(rng: random.Random) -> Any:
    kind = rng.random()
    if kind < 0.75:
        return {"type": rng.choice(["input_text", "output_text"]), "text": text(rng)}
    if kind < 0.9:
        return {
            "type": "input_image",
            **maybe(rng, 0.9, {"image_url": PNG}),
            **maybe(rng, 0.1, {"file_id": "f"}),
        }
    return {"type": rng.choice(["input_file", "input_file", "refusal"]), "file_data": "x"}


def responses_items(rng: random.Random) -> list[Any]:
    out: list[Any] = []
    for _ in range(rng.randint(0, 6)):
        kind = rng.choice(
            [
                "message",
                "message",
                "message",
                "reasoning",
                "call",
                "call",
                "custom",
                "search",
                "other",
            ]
        )
        if kind == "message":
            role = rng.choice(["user", "user", "assistant", "system", "developer"])
            content = text(rng) if rng.random() < 0.6 else some(rng, responses_part)
            out.append({"type": "message", "role": role, "content": content})
            if rng.random() < 0.5:
                del out[-1]["type"]
        elif kind == "reasoning":
            parts = [
                {"type": "reasoning_text", "text": text(rng)} for _ in range(rng.randint(0, 2))
            ]
            out.append(
                {
                    "type": "reasoning",
                    "id": "r",
                    "summary": [],
                    **maybe(rng, 0.8, {"content": parts}),
                }
            )
        elif kind == "call":
            ids = rng.sample(["c1", "c2", "c3"], rng.choice([1, 1, 2]))
            out += [
                {
                    "type": "function_call",
                    "call_id": i,
                    "name": tool_name(rng),
                    "arguments": arguments(rng),
                    **maybe(rng, 0.15, {"namespace": "ns"}),
                }
                for i in ids
            ]
            rng.shuffle(ids)
            out += [
                {
                    "type": "function_call_output",
                    "call_id": i,
                    "output": rng.choice([text(rng), [{"type": "input_text", "text": text(rng)}]]),
                }
                for i in ids
                if rng.random() < 0.95
            ]
        elif kind == "custom":
            out.append(
                {
                    "type": "custom_tool_call",
                    "call_id": "p1",
                    "name": "apply_patch",
                    "input": text(rng),
                }
            )
            if rng.random() < 0.9:
                out.append(
                    {"type": "custom_tool_call_output", "call_id": "p1", "output": text(rng)}
                )
        elif kind == "search":
            out.append(
                {
                    "type": "tool_search_call",
                    "call_id": "s1",
                    "execution": "client",
                    "arguments": {"q": text(rng)},
                }
            )
            found = [{"type": "function", **function(rng)}]
            out.append(
                {
                    "type": "tool_search_output",
                    "call_id": "s1",
                    "execution": "client",
                    "tools": found,
                }
            )
        else:
            out.append(
                {"type": rng.choice(["web_search_call", "item_reference", "mystery"]), "id": "x"}
            )
    return out


def responses_tool(rng: random.Random) -> Any:
    kind = rng.random()
    if kind < 0.6:
        return {"type": "function", **function(rng)}
    if kind < 0.75:
        members = [{"type": "function", **function(rng)} for _ in range(rng.randint(0, 2))]
        return {
            "type": "namespace",
            "name": rng.choice(["ns", "other", "bad name"]),
            **maybe(rng, 0.5, {"description": text(rng)}),
            "tools": members,
        }
    if kind < 0.85:
        return {"type": "custom", "name": rng.choice(["apply_patch", "apply_patch", "shell"])}
    if kind < 0.92:
        return {
            "type": "tool_search",
            "execution": rng.choice(["client", "server"]),
            "description": "d",
            "parameters": {"type": "object"},
        }
    return {"type": rng.choice(["web_search", "web_search_preview", "file_search", "mcp"])}


def responses(rng: random.Random) -> dict[str, Any]:
    choice = rng.choice(
        [
            "auto",
            "none",
            "required",
            {"type": "function", "name": tool_name(rng)},
            {"type": "custom", "name": "apply_patch"},
            {"type": "web_search"},
        ]
    )
    formats: list[Any] = [
        {"type": "text"},
        {"type": "json_object"},
        {
            "type": "json_schema",
            "name": "n",
            "schema": rng.choice(SCHEMAS),
            **maybe(rng, 0.5, {"strict": True}),
        },
    ]
    given = rng.choice(
        [text(rng), None, responses_items(rng), responses_items(rng), responses_items(rng)]
    )
    return {
        "model": rng.choice([*MODELS, *MODELS, *MODELS, "gpt"]),
        **maybe(rng, 0.95, {"input": given}),
        **maybe(rng, 0.4, {"instructions": text(rng)}),
        **maybe(rng, 0.4, {"tools": some(rng, responses_tool)}),
        **maybe(rng, 0.3, {"tool_choice": choice}),
        **maybe(rng, 0.2, {"text": {"format": rng.choice(formats)}}),
        **maybe(
            rng,
            0.5,
            {
                "reasoning": {
                    "effort": rng.choice(["none", "none", "low", "high", "max", None, "most"])
                }
            },
        ),
        **sampling(rng, ["temperature", "top_p", "max_output_tokens", "top_logprobs"]),
        **maybe(rng, 0.3, {"stream": rng.choice([True, False])}),
        **maybe(
            rng,
            0.1,
            {"store": True, "previous_response_id": "resp_1", "metadata": {"a": "b"}, "user": "u"},
        ),
    }


# -- Messages --------------------------------------------------------------------------


def block(rng: random.Random) -> Any:
    kind = rng.random()
    if kind < 0.75:
        return {"type": "text", "text": text(rng)}
    if kind < 0.9:
        sources: list[Any] = [
            {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="},
            {"type": "base64", "media_type": "image/png", "data": "%%"},
            {"type": "url", "url": "https://x.test/a.png"},
            {"type": "file", "file_id": "f"},
        ]
        return {"type": "image", "source": rng.choice(sources)}
    return {
        "type": "document",
        "source": {"type": "text", "media_type": "text/plain", "data": text(rng)},
    }


def messages_turns(rng: random.Random) -> list[Any]:
    out: list[Any] = []
    pending: list[str] = []
    for _ in range(rng.randint(0, 5)):
        role = rng.choice(["user", "assistant", "assistant", "system"]) if not pending else "user"
        blocks: list[Any] = some(rng, block)
        if role == "user":
            results = [
                {
                    "type": "tool_result",
                    "tool_use_id": i,
                    **maybe(rng, 0.9, {"content": rng.choice([text(rng), some(rng, block)])}),
                }
                for i in pending
                if rng.random() < 0.95
            ]
            pending, blocks = [], results + blocks
        elif role == "assistant":
            blocks = [b for b in blocks if b["type"] == "text" or rng.random() < 0.1]
            if rng.random() < 0.4:
                blocks.insert(0, {"type": "thinking", "thinking": text(rng), "signature": "s"})
            pending = rng.sample(["t1", "t2", "t3"], rng.choice([0, 0, 1, 2]))
            blocks += [
                {
                    "type": "tool_use",
                    "id": i,
                    "name": tool_name(rng),
                    "input": rng.choice([{}, {"a": 1.5}, "raw", [1]]),
                }
                for i in pending
            ]
            rng.shuffle(pending)
            if rng.random() < 0.05:
                blocks.append(
                    {"type": "server_tool_use", "id": "w", "name": "web_search", "input": {}}
                )
        out.append(
            {
                "role": role,
                "content": text(rng)
                if not pending and role != "assistant" and rng.random() < 0.4
                else blocks,
            }
        )
    return out


def messages_tool(rng: random.Random) -> Any:
    tool = {
        "name": tool_name(rng),
        **maybe(rng, 0.6, {"description": text(rng)}),
        **maybe(rng, 0.9, {"input_schema": rng.choice(SCHEMAS)}),
        **maybe(rng, 0.2, {"defer_loading": rng.choice([True, False])}),
    }
    return {
        **tool,
        **maybe(rng, 0.1, {"type": rng.choice(["custom", "web_search_20250305", "bash_20250124"])}),
    }


def messages(rng: random.Random) -> dict[str, Any]:
    choice = rng.choice(
        [
            {"type": "auto"},
            {"type": "any"},
            {"type": "none"},
            {"type": "tool", "name": tool_name(rng)},
        ]
    )
    return {
        "model": rng.choice([*MODELS, *MODELS, *MODELS, "gpt"]),
        "messages": messages_turns(rng),
        "max_tokens": rng.choice([1, 100, 10**9, 0]),
        **maybe(
            rng, 0.4, {"system": rng.choice([text(rng), [{"type": "text", "text": text(rng)}]])}
        ),
        **maybe(rng, 0.4, {"tools": some(rng, messages_tool)}),
        **maybe(rng, 0.3, {"tool_choice": choice}),
        **maybe(
            rng,
            0.5,
            {
                "thinking": {
                    "type": rng.choice(["enabled", "disabled", "disabled", "adaptive"]),
                    "budget_tokens": 1024,
                }
            },
        ),
        **maybe(
            rng,
            0.2,
            {"output_config": {"effort": rng.choice(["low", "high", "max", "none", "most"])}},
        ),
        **sampling(rng, ["temperature", "top_p", "top_k"]),
        **maybe(rng, 0.2, {"stop_sequences": rng.choice([["a"], [""], [], ["a"] * 17])}),
        **maybe(rng, 0.3, {"stream": rng.choice([True, False])}),
    }


# -- recorded bodies, damaged ----------------------------------------------------------

MAX_DEPTH = 50
LEAVES = [
    *[None, True, False, 0, -1, 1.5, 2**64, [], {}, [{}], {"type": "text"}],
    *["", "x", "json", "auto", "none", "text", "user", "é"],
]


@cache
def recorded() -> list[tuple[str, str, dict[str, Any]]]:
    lines = (CORPUS / "convert.jsonl").read_text("utf-8").splitlines()
    cases = [json.loads(line) for line in lines]
    return [
        (case["protocol"], json.dumps(case["request"]), case.get("options", {}))
        for case in cases
        if isinstance(case["request"], dict)
    ]


def damage(rng: random.Random, body: Any) -> None:
    """Replace, remove or repeat a random member of a random container."""
    containers: list[Any] = []

    def walk(value: Any, depth: int) -> None:
        if isinstance(value, dict | list) and value and depth < MAX_DEPTH:
            containers.append(value)
            for inner in value.values() if isinstance(value, dict) else value:
                walk(inner, depth + 1)

    walk(body, 0)
    if not containers:
        return
    container = rng.choice(containers)
    place = (
        rng.choice(list(container))
        if isinstance(container, dict)
        else rng.randrange(len(container))
    )
    action = rng.choice(["replace", "replace", "remove", "repeat", "graft"])
    if action == "replace":
        container[place] = json.loads(json.dumps(rng.choice(LEAVES)))
    elif action == "remove":
        del container[place]
    elif action == "graft":
        container[place] = json.loads(json.dumps(rng.choice(containers)))
    elif isinstance(container, list):
        container.insert(place, json.loads(json.dumps(container[place])))


def generate(rng: random.Random) -> tuple[str, Any, dict[str, Any]]:
    """Protocol, body and options."""
    options: dict[str, Any] = {
        **maybe(rng, 0.3, {"default_thinking_mode": False}),
        **maybe(rng, 0.2, {"reasoning_content_behavior": "Reject"}),
        **maybe(rng, 0.3, {"responses_web_search": "Reject"}),
        **maybe(rng, 0.3, {"messages_web_search": "Drop"}),
        **maybe(rng, 0.1, {"thinking_max_tokens_upper_bound": 50}),
    }
    if rng.random() < 0.5:
        protocol, body, own = rng.choice(recorded())
        body = json.loads(body)
        options = own if rng.random() < 0.7 else {**own, **options}
        for _ in range(rng.randint(1, 3)):
            damage(rng, body)
    else:
        protocol = rng.choice(list(REQUESTS))
        body = {"chat": chat, "responses": responses, "messages": messages}[protocol](rng)
        if rng.random() < 0.1:
            damage(rng, body)
    return protocol, body, options


# -- both codecs -----------------------------------------------------------------------


def conversion_options(codec: Any, wanted: dict[str, Any]) -> Any:
    options = codec.ConversionOptions()
    for name, value in wanted.items():
        if name == "model_aliases":
            for alias, version in value.items():
                options = options.with_model_alias(alias, getattr(codec.ModelVersion, version))
            continue
        if name.endswith("web_search"):
            value = getattr(codec.WebSearchBehavior, value)
        elif name == "reasoning_content_behavior":
            value = getattr(codec.ReasoningContentBehavior, value)
        options = getattr(options, f"with_{name}")(value)
    return options


def shown(value: Any) -> str:
    """Name of an enum member of either codec."""
    return str(value).rpartition(".")[2]


def described_tool(tool: Any) -> Any:
    return [tool.name, tool.description, tool.parameters, tool.strict, tool.defer_loading]


def described_message(message: Any) -> Any:
    calls = message.tool_calls
    tools = getattr(message, "tools", None)
    return {
        "role": message.role,
        "content": message.content,
        "reasoning": message.reasoning_content,
        "calls": calls and [[c.id, c.name, c.arguments] for c in calls],
        "answers": message.tool_call_id,
        "prefix": message.prefix,
        "sources": [[s.kind, s.detail, s.path, s.url, s.data_url] for s in message.image_sources],
        "tools": tools and [described_tool(tool) for tool in tools],
    }


def outcome(codec: Any, protocol: str, body: Any, wanted: dict[str, Any]) -> dict[str, Any]:
    """Everything a caller can see of the conversion of one body."""
    options = conversion_options(codec, wanted)
    kind = getattr(codec, REQUESTS[protocol])
    try:
        request = kind(json.dumps(body) if isinstance(body, dict) else str(body))
    except ValueError as error:
        return {"rejected": "parse", "text": str(error)}
    seen: dict[str, Any] = {"model": request.model}
    if protocol == "responses":
        echo = request.echo()
        seen["echo"] = [
            echo.instructions,
            echo.max_output_tokens,
            echo.temperature,
            echo.top_p,
            echo.top_logprobs,
            echo.user,
        ]
        try:
            names = request.namespace_tool_map(options)
            seen["namespaces"] = {name: list(pair) for name, pair in names.items()}
        except codec.ConversionError as error:
            seen["namespaces"] = str(error)
    try:
        converted = request.convert(options)
    except codec.ConversionError as error:
        return {"rejected": "convert", "status": error.status_code, "text": error.body}
    version = shown(converted.model_version)
    encoding = (
        codec.DeepseekV41Encoding() if version.endswith("Flash") else codec.DeepseekV4Encoding()
    )
    conversation, inference = converted.conversation, converted.inference_options
    parsing, constraint = converted.parsing_options, inference.output_constraint
    rendered = encoding.render_conversation(conversation)
    return {
        **seen,
        "version": version,
        "stream": converted.stream,
        "prompt": rendered.prompt,
        "ranges": [list(pair) for pair in rendered.special_ranges],
        "sources": len(rendered.image_sources),
        "conversation": [
            conversation.thinking_mode,
            conversation.reasoning_effort,
            conversation.tool_choice,
            conversation.response_format,
            conversation.response_schema,
            conversation.response_regex,
            [described_tool(tool) for tool in conversation.tools],
        ],
        "messages": [described_message(message) for message in conversation.messages],
        "inference": [
            inference.max_tokens,
            round(inference.temperature, 6),
            round(inference.top_p, 6),
            inference.logprobs,
            inference.top_logprobs,
            inference.seed,
            constraint and [constraint.kind, constraint.schema],
        ],
        "parsing": [
            parsing.parse_tool_calls,
            parsing.starts_in_tool_calls,
            parsing.parse_json_output,
            parsing.thinking_initial_stage and shown(parsing.thinking_initial_stage),
            list(parsing.stop_sequences),
        ],
    }


@cache
def patch_texts(codec: Any) -> list[tuple[str, str]]:
    """The texts of the apply_patch tool, for both models: each codec words them in its own way."""
    texts: list[tuple[str, str]] = []
    for model in MODELS:
        body = {"model": model, "input": "x", "tools": [{"type": "custom", "name": "apply_patch"}]}
        converted = codec.ResponsesRequest(body).convert(codec.ConversionOptions())
        [tool] = converted.conversation.tools
        texts.append((tool.description, tool.parameters["properties"]["input"]["description"]))
    return texts


def neutral(codec: Any, seen: dict[str, Any]) -> dict[str, Any]:
    """An outcome without the texts of apply_patch and the offsets behind them."""
    text = json.dumps(seen, ensure_ascii=False)
    for texts in patch_texts(codec):
        for own, mark in zip(texts, ("PATCH", "INPUT"), strict=True):
            once = json.dumps(own, ensure_ascii=False)[1:-1]
            twice = json.dumps(once, ensure_ascii=False)[1:-1]
            text = text.replace(twice, mark).replace(once, mark)
    cleaned = json.loads(text)
    if "PATCH" in cleaned.get("prompt", ""):
        del cleaned["ranges"]
    return cleaned


def explained(ours: dict[str, Any], theirs: dict[str, Any]) -> str | None:
    """The decision behind a difference, if there is one."""
    if ours.get("rejected") == "parse" and theirs.get("rejected") == "parse":
        return "equal"  # the wording of a parse error is free
    if ours.get("rejected") == "parse":
        if "got a list" in ours["text"]:
            return "a list in place of an object is refused"
        if "unknown type `" in ours["text"] or "unknown role `" in ours["text"]:
            return "a number in place of a kind's name is refused"
    if (ours.get("rejected"), theirs.get("rejected")) == ("convert", "convert"):
        return "another wording of the same refusal"
    return None


def case(rng: random.Random) -> tuple[str | None, Any]:
    """One generated request; the category of the difference (None when equal) and the details."""
    protocol, body, options = generate(rng)
    ours = neutral(deepinfer_recipe, outcome(deepinfer_recipe, protocol, body, options))
    theirs = neutral(deepseek_recipe, outcome(deepseek_recipe, protocol, body, options))
    if ours == theirs:
        return None, None
    category = explained(ours, theirs)
    if category == "equal":
        return None, None
    differing = {
        key: [ours.get(key), theirs.get(key)]
        for key in ours | theirs
        if ours.get(key) != theirs.get(key)
    }
    detail = {"protocol": protocol, "body": body, "options": options, "ours, theirs": differing}
    return category or "unexplained", detail
