"""The two profiles as data: what each does, field by field, instead of branches by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Profile: TypeAlias = Literal["parity", "extended"]
"""`parity` equals the reference codec; `extended` adds what public clients expect today."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What a profile does where the two differ. All of it off is `parity`."""

    name: Profile

    # Requests.
    accepts_developer_role: bool = False
    """Chat: `developer` is another name of `system`."""
    accepts_allowed_tools: bool = False
    """Chat, Responses: a tool choice of type `allowed_tools`."""
    refuses_forced_call_without_tools: bool = False
    """A tool choice that forces a call is an error where the model has no tool to call."""
    accepts_max_completion_tokens: bool = False
    """Chat: `max_completion_tokens` where `max_tokens` is absent."""
    max_choices: int = 1
    """Chat: largest `n`."""
    checks_end_user: bool = False
    """Chat: a `user` that is no string is an error, not passed over."""
    reads_documents: bool = False
    """Documents become text of the prompt; otherwise a note stands there."""
    accepts_custom_tools: bool = False
    """Responses: custom tools of any name. Messages: tools of type `custom`."""
    runs_server_tools: bool = False
    """A web search may be shown to the model and run by the server."""
    uses_response_store: bool = False
    """Responses: `previous_response_id`, `store` and sealed reasoning mean something."""
    takes_text_behind_calls: bool = False
    """Responses, Messages: text and thinking behind the calls of a turn belong to it; a Messages
    turn of the assistant may be empty. Answers of this package can look so.
    """
    sorts_calls_by_id: bool = True
    """Responses: calls of a turn in the order of their ids, not in that of the list."""
    counts_dropped_tools: bool = True
    """Messages: a dropped server tool counts as declared."""
    enforces_messages_choices: bool = False
    """Messages: `any` demands a call, `strict` and `output_config.format` are honoured."""
    continues_last_message: bool = False
    """Messages: a final assistant message is a beginning that the model continues."""
    keeps_strict_keywords: bool = False
    """Strict schemas keep all their keywords; the grammar holds or refuses each."""
    allows_format_with_strict_tools: bool = False
    honours_sampling_in_thinking: bool = False
    """Explicit temperature and top_p win over the model's defaults, also while thinking."""
    honours_penalties: bool = False
    longest_stop: int | None = None
    """Characters of a stop sequence. The end of an answer is compared with all of it."""
    unknown_model_status: int = 400

    serves_forced_tools: bool = False
    """A forced tool is served whether or not the request thinks; see `ConversionOptions`."""
    messages_think_unasked: bool = True
    """Messages: thinking follows the server's default where the request says nothing of it."""
    reads_thinking_switches: bool = False
    """Chat: the switches of other servers, such as `chat_template_kwargs`, are honoured."""
    reads_newer_blocks: bool = False
    """Messages: `redacted_thinking` and `search_result`. Responses: `additional_tools`."""
    refuses_unknown_tools: bool = False
    """Responses: a tool of an unknown kind is an error, not passed over."""
    refuses_unserved_fields: bool = False
    """Fields whose loss would change what the request means are errors, not passed over."""

    # Answers.
    recovers_tool_calls: bool = False
    """Damaged tool-call markup is mended and reported instead of lost."""
    reports_usage_unasked: bool = True
    """Chat: the last chunk carries usage even where nobody asked."""
    usage_in_own_chunk: bool = False
    """Chat: usage comes in a chunk without choices."""
    closes_last_call: bool = False
    """Responses: a call that is complete is closed although the answer was cut short."""


PARITY = Policy(name="parity")
EXTENDED = Policy(
    name="extended",
    accepts_developer_role=True,
    accepts_allowed_tools=True,
    refuses_forced_call_without_tools=True,
    accepts_max_completion_tokens=True,
    max_choices=16,
    checks_end_user=True,
    reads_documents=True,
    accepts_custom_tools=True,
    runs_server_tools=True,
    uses_response_store=True,
    takes_text_behind_calls=True,
    sorts_calls_by_id=False,
    counts_dropped_tools=False,
    enforces_messages_choices=True,
    continues_last_message=True,
    keeps_strict_keywords=True,
    allows_format_with_strict_tools=True,
    honours_sampling_in_thinking=True,
    honours_penalties=True,
    longest_stop=1000,
    unknown_model_status=404,
    serves_forced_tools=True,
    messages_think_unasked=False,
    reads_thinking_switches=True,
    reads_newer_blocks=True,
    refuses_unknown_tools=True,
    refuses_unserved_fields=True,
    recovers_tool_calls=True,
    reports_usage_unasked=False,
    usage_in_own_chunk=True,
    closes_last_call=True,
)
_POLICIES: dict[str, Policy] = {policy.name: policy for policy in (PARITY, EXTENDED)}


def policy_of(profile: Profile) -> Policy:
    """The policy of a profile. Raises `ValueError` for another name."""
    policy = _POLICIES.get(profile)
    if policy is None:
        raise ValueError(f"unknown profile {profile!r}; known are {', '.join(_POLICIES)}")
    return policy
