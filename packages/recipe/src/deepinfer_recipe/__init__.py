"""Codec for DeepSeek V4 and V4.1: requests of three public protocols in, their events out."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from deepinfer_recipe.base.errors import (
        CalcResizeError,
        ConversionError,
        EncodeError,
        GrammarBusy,
        GrammarError,
        GrammarTooComplex,
        GrammarUnavailable,
        ImageError,
        MissingExtraError,
        RecipeError,
        RequestConsumedError,
        RequestParseError,
        SealError,
        StoreError,
        StreamError,
        TemplateRefusedError,
        TemplateUnusableError,
        UnknownModelError,
    )
    from deepinfer_recipe.conversation.conversation import Conversation
    from deepinfer_recipe.conversation.image_source import (
        BytesImageSource,
        DataUrlImageSource,
        ImageSource,
        UrlImageSource,
    )
    from deepinfer_recipe.conversation.inference import (
        InferenceChunk,
        InferenceFinishReason,
        InferenceOptions,
        OutputConstraint,
        PromptUsage,
    )
    from deepinfer_recipe.conversation.messages import (
        AssistantMessage,
        LatestReminderMessage,
        Message,
        SystemMessage,
        ToolMessage,
        UserMessage,
    )
    from deepinfer_recipe.conversation.parsing_options import ParsingOptions, ThinkingInitialStage
    from deepinfer_recipe.conversation.policy import Profile
    from deepinfer_recipe.conversation.server_tools import (
        RunTool,
        ServerTool,
        ServerToolOutcome,
        ServerToolPolicy,
    )
    from deepinfer_recipe.conversation.special_tokens import (
        IMAGE_SPECIAL_TOKEN_ID,
        SpecialToken,
        SpecialTokens,
    )
    from deepinfer_recipe.conversation.tool_types import InputGrammar, ToolCall, ToolDefinition
    from deepinfer_recipe.documents.reader import DocumentLimits
    from deepinfer_recipe.grammar.compile import (
        CompiledGrammar,
        GrammarMatcher,
        GrammarVocabulary,
        compile_grammar,
    )
    from deepinfer_recipe.grammar.request import OutputGrammar, constraint_grammar, request_grammar
    from deepinfer_recipe.grammar.service import GrammarService
    from deepinfer_recipe.images.fetch import ImageFetcher, ReqwestImageFetcher
    from deepinfer_recipe.images.preprocess import ImagePreprocessor, OpenCvImagePreprocessor
    from deepinfer_recipe.images.resolver import ImageResolver
    from deepinfer_recipe.images.size import ImageSizeRule
    from deepinfer_recipe.images.source import (
        ImageInfo,
        ImageQuota,
        MultiModalData,
        PreprocessOptions,
    )
    from deepinfer_recipe.prompts.chat_template import ChatTemplate, TemplateLimits
    from deepinfer_recipe.prompts.encoding import DeepseekV4Encoding, DeepseekV41Encoding
    from deepinfer_recipe.prompts.model_version import ModelVersion
    from deepinfer_recipe.prompts.prefix import Divergence, first_divergence
    from deepinfer_recipe.prompts.render import RenderedPrompt
    from deepinfer_recipe.prompts.template_model import TemplateModel
    from deepinfer_recipe.prompts.tokenizer import Tokenizer
    from deepinfer_recipe.prompts.training import TrainingText, render_training
    from deepinfer_recipe.protocols.chat.events import (
        ChatCompletionChunk,
        ChatCompletionChunkGenerator,
        ChatCompletionResponse,
    )
    from deepinfer_recipe.protocols.chat.request import ChatCompletionRequest
    from deepinfer_recipe.protocols.common.codec import ProtocolCodec, ProtocolName
    from deepinfer_recipe.protocols.common.conversation_request import ConversationRequest
    from deepinfer_recipe.protocols.common.options import (
        ConversionOptions,
        ReasoningContentBehavior,
        WebSearchBehavior,
    )
    from deepinfer_recipe.protocols.common.server_calls import ServerCall
    from deepinfer_recipe.protocols.messages.events import (
        MessagesChunkGenerator,
        MessagesResponse,
        MessagesStreamEvent,
    )
    from deepinfer_recipe.protocols.messages.request import MessagesRequest
    from deepinfer_recipe.protocols.responses.echo import ResponsesEcho
    from deepinfer_recipe.protocols.responses.events import (
        ResponsesChunkGenerator,
        ResponsesResponse,
        ResponsesStreamEvent,
    )
    from deepinfer_recipe.protocols.responses.request import ResponsesRequest
    from deepinfer_recipe.protocols.responses.stored_turn import ResponseTurn, input_item_list
    from deepinfer_recipe.protocols.table import PROTOCOLS
    from deepinfer_recipe.serving.answer import Answer
    from deepinfer_recipe.serving.exchange import Exchange
    from deepinfer_recipe.serving.stream import StreamProcessor
    from deepinfer_recipe.serving.wire_errors import error_body, error_response
    from deepinfer_recipe.stores.response_store import (
        MemoryResponseStore,
        ResponseStore,
        StoredResponse,
        StoreLimits,
    )
    from deepinfer_recipe.stores.sealing import ReasoningSealer
    from deepinfer_recipe.stores.sqlite_store import SqliteResponseStore

__version__ = "0.2.0"

_PLACES: Final = {
    ".base.errors": (
        "CalcResizeError",
        "ConversionError",
        "EncodeError",
        "GrammarBusy",
        "GrammarError",
        "GrammarTooComplex",
        "GrammarUnavailable",
        "ImageError",
        "MissingExtraError",
        "RecipeError",
        "RequestConsumedError",
        "RequestParseError",
        "SealError",
        "StoreError",
        "StreamError",
        "TemplateRefusedError",
        "TemplateUnusableError",
        "UnknownModelError",
    ),
    ".conversation.conversation": ("Conversation",),
    ".conversation.image_source": (
        "BytesImageSource",
        "DataUrlImageSource",
        "ImageSource",
        "UrlImageSource",
    ),
    ".conversation.inference": (
        "InferenceChunk",
        "InferenceFinishReason",
        "InferenceOptions",
        "OutputConstraint",
        "PromptUsage",
    ),
    ".conversation.messages": (
        "AssistantMessage",
        "LatestReminderMessage",
        "Message",
        "SystemMessage",
        "ToolMessage",
        "UserMessage",
    ),
    ".conversation.parsing_options": (
        "ParsingOptions",
        "ThinkingInitialStage",
    ),
    ".conversation.policy": ("Profile",),
    ".conversation.server_tools": (
        "RunTool",
        "ServerTool",
        "ServerToolOutcome",
        "ServerToolPolicy",
    ),
    ".conversation.special_tokens": (
        "IMAGE_SPECIAL_TOKEN_ID",
        "SpecialToken",
        "SpecialTokens",
    ),
    ".conversation.tool_types": (
        "InputGrammar",
        "ToolCall",
        "ToolDefinition",
    ),
    ".documents.reader": ("DocumentLimits",),
    ".grammar.compile": (
        "CompiledGrammar",
        "GrammarMatcher",
        "GrammarVocabulary",
        "compile_grammar",
    ),
    ".grammar.request": (
        "OutputGrammar",
        "constraint_grammar",
        "request_grammar",
    ),
    ".grammar.service": ("GrammarService",),
    ".images.fetch": (
        "ImageFetcher",
        "ReqwestImageFetcher",
    ),
    ".images.preprocess": (
        "ImagePreprocessor",
        "OpenCvImagePreprocessor",
    ),
    ".images.resolver": ("ImageResolver",),
    ".images.size": ("ImageSizeRule",),
    ".images.source": (
        "ImageInfo",
        "ImageQuota",
        "MultiModalData",
        "PreprocessOptions",
    ),
    ".prompts.chat_template": (
        "ChatTemplate",
        "TemplateLimits",
    ),
    ".prompts.encoding": (
        "DeepseekV4Encoding",
        "DeepseekV41Encoding",
    ),
    ".prompts.model_version": ("ModelVersion",),
    ".prompts.prefix": (
        "Divergence",
        "first_divergence",
    ),
    ".prompts.render": ("RenderedPrompt",),
    ".prompts.template_model": ("TemplateModel",),
    ".prompts.tokenizer": ("Tokenizer",),
    ".prompts.training": (
        "TrainingText",
        "render_training",
    ),
    ".protocols.chat.events": (
        "ChatCompletionChunk",
        "ChatCompletionChunkGenerator",
        "ChatCompletionResponse",
    ),
    ".protocols.chat.request": ("ChatCompletionRequest",),
    ".protocols.common.codec": (
        "ProtocolCodec",
        "ProtocolName",
    ),
    ".protocols.common.conversation_request": ("ConversationRequest",),
    ".protocols.common.options": (
        "ConversionOptions",
        "ReasoningContentBehavior",
        "WebSearchBehavior",
    ),
    ".protocols.common.server_calls": ("ServerCall",),
    ".protocols.messages.events": (
        "MessagesChunkGenerator",
        "MessagesResponse",
        "MessagesStreamEvent",
    ),
    ".protocols.messages.request": ("MessagesRequest",),
    ".protocols.responses.echo": ("ResponsesEcho",),
    ".protocols.responses.events": (
        "ResponsesChunkGenerator",
        "ResponsesResponse",
        "ResponsesStreamEvent",
    ),
    ".protocols.responses.request": ("ResponsesRequest",),
    ".protocols.responses.stored_turn": (
        "ResponseTurn",
        "input_item_list",
    ),
    ".protocols.table": ("PROTOCOLS",),
    ".serving.answer": ("Answer",),
    ".serving.exchange": ("Exchange",),
    ".serving.stream": ("StreamProcessor",),
    ".serving.wire_errors": (
        "error_body",
        "error_response",
    ),
    ".stores.response_store": (
        "MemoryResponseStore",
        "ResponseStore",
        "StoredResponse",
        "StoreLimits",
    ),
    ".stores.sealing": ("ReasoningSealer",),
    ".stores.sqlite_store": ("SqliteResponseStore",),
}
_MODULE_OF: Final = {name: module for module, names in _PLACES.items() for name in names}

if not TYPE_CHECKING:  # a checker knows the names above, and no others

    def __getattr__(name: str) -> Any:
        """What is used is loaded when it is first used: importing the package costs little."""
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_MODULE_OF[name], __name__), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})


__all__ = [
    "IMAGE_SPECIAL_TOKEN_ID",
    "PROTOCOLS",
    "Answer",
    "AssistantMessage",
    "BytesImageSource",
    "CalcResizeError",
    "ChatCompletionChunk",
    "ChatCompletionChunkGenerator",
    "ChatCompletionRequest",
    "ChatCompletionResponse",
    "ChatTemplate",
    "CompiledGrammar",
    "Conversation",
    "ConversationRequest",
    "ConversionError",
    "ConversionOptions",
    "DataUrlImageSource",
    "DeepseekV4Encoding",
    "DeepseekV41Encoding",
    "Divergence",
    "DocumentLimits",
    "EncodeError",
    "Exchange",
    "GrammarBusy",
    "GrammarError",
    "GrammarMatcher",
    "GrammarService",
    "GrammarTooComplex",
    "GrammarUnavailable",
    "GrammarVocabulary",
    "ImageError",
    "ImageFetcher",
    "ImageInfo",
    "ImagePreprocessor",
    "ImageQuota",
    "ImageResolver",
    "ImageSizeRule",
    "ImageSource",
    "InferenceChunk",
    "InferenceFinishReason",
    "InferenceOptions",
    "InputGrammar",
    "LatestReminderMessage",
    "MemoryResponseStore",
    "Message",
    "MessagesChunkGenerator",
    "MessagesRequest",
    "MessagesResponse",
    "MessagesStreamEvent",
    "MissingExtraError",
    "ModelVersion",
    "MultiModalData",
    "OpenCvImagePreprocessor",
    "OutputConstraint",
    "OutputGrammar",
    "ParsingOptions",
    "PreprocessOptions",
    "Profile",
    "PromptUsage",
    "ProtocolCodec",
    "ProtocolName",
    "ReasoningContentBehavior",
    "ReasoningSealer",
    "RecipeError",
    "RenderedPrompt",
    "RequestConsumedError",
    "RequestParseError",
    "ReqwestImageFetcher",
    "ResponseStore",
    "ResponseTurn",
    "ResponsesChunkGenerator",
    "ResponsesEcho",
    "ResponsesRequest",
    "ResponsesResponse",
    "ResponsesStreamEvent",
    "RunTool",
    "SealError",
    "ServerCall",
    "ServerTool",
    "ServerToolOutcome",
    "ServerToolPolicy",
    "SpecialToken",
    "SpecialTokens",
    "SqliteResponseStore",
    "StoreError",
    "StoreLimits",
    "StoredResponse",
    "StreamError",
    "StreamProcessor",
    "SystemMessage",
    "TemplateLimits",
    "TemplateModel",
    "TemplateRefusedError",
    "TemplateUnusableError",
    "ThinkingInitialStage",
    "Tokenizer",
    "ToolCall",
    "ToolDefinition",
    "ToolMessage",
    "TrainingText",
    "UnknownModelError",
    "UrlImageSource",
    "UserMessage",
    "WebSearchBehavior",
    "__version__",
    "compile_grammar",
    "constraint_grammar",
    "error_body",
    "error_response",
    "first_divergence",
    "input_item_list",
    "render_training",
    "request_grammar",
]
