"""Codec for DeepSeek V4 and V4.1: requests of three public protocols in, their events out."""

from deepinfer_recipe.answer import Answer
from deepinfer_recipe.conversation import Conversation
from deepinfer_recipe.conversation_request import ConversationRequest
from deepinfer_recipe.documents import DocumentLimits
from deepinfer_recipe.encoding import DeepseekV4Encoding, DeepseekV41Encoding
from deepinfer_recipe.errors import (
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
)
from deepinfer_recipe.exchange import Exchange
from deepinfer_recipe.grammar import OutputGrammar, constraint_grammar, request_grammar
from deepinfer_recipe.grammar_compile import (
    CompiledGrammar,
    GrammarMatcher,
    GrammarVocabulary,
    compile_grammar,
)
from deepinfer_recipe.grammar_service import GrammarService
from deepinfer_recipe.image_source import (
    BytesImageSource,
    DataUrlImageSource,
    ImageSource,
    UrlImageSource,
)
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
from deepinfer_recipe.inference import (
    InferenceChunk,
    InferenceFinishReason,
    InferenceOptions,
    OutputConstraint,
    PromptUsage,
)
from deepinfer_recipe.messages import (
    AssistantMessage,
    LatestReminderMessage,
    Message,
    SystemMessage,
    ToolMessage,
    UserMessage,
)
from deepinfer_recipe.model_version import ModelVersion
from deepinfer_recipe.options import (
    ConversionOptions,
    Profile,
    ReasoningContentBehavior,
    WebSearchBehavior,
)
from deepinfer_recipe.parsing_options import ParsingOptions, ThinkingInitialStage
from deepinfer_recipe.prefix import Divergence, first_divergence
from deepinfer_recipe.protocols.chat_events import (
    ChatCompletionChunk,
    ChatCompletionChunkGenerator,
    ChatCompletionResponse,
)
from deepinfer_recipe.protocols.messages_events import (
    MessagesChunkGenerator,
    MessagesResponse,
    MessagesStreamEvent,
)
from deepinfer_recipe.protocols.responses_echo import ResponsesEcho
from deepinfer_recipe.protocols.responses_events import (
    ResponsesChunkGenerator,
    ResponsesResponse,
    ResponsesStreamEvent,
)
from deepinfer_recipe.protocols.server_calls import ServerCall
from deepinfer_recipe.render import RenderedPrompt
from deepinfer_recipe.requests import ChatCompletionRequest, MessagesRequest, ResponsesRequest
from deepinfer_recipe.response_history import ResponseTurn, input_item_list
from deepinfer_recipe.response_store import (
    MemoryResponseStore,
    ResponseStore,
    StoredResponse,
    StoreLimits,
)
from deepinfer_recipe.sealing import ReasoningSealer
from deepinfer_recipe.server_tools import (
    RunTool,
    ServerTool,
    ServerToolOutcome,
    ServerToolPolicy,
)
from deepinfer_recipe.special_tokens import IMAGE_SPECIAL_TOKEN_ID, SpecialToken, SpecialTokens
from deepinfer_recipe.sqlite_store import SqliteResponseStore
from deepinfer_recipe.stream import StreamProcessor
from deepinfer_recipe.tokenizer import Tokenizer
from deepinfer_recipe.tool_types import InputGrammar, ToolCall, ToolDefinition
from deepinfer_recipe.training import TrainingText, render_training
from deepinfer_recipe.wire_errors import error_body, error_response

__version__ = "0.1.0"

__all__ = [
    "IMAGE_SPECIAL_TOKEN_ID",
    "Answer",
    "AssistantMessage",
    "BytesImageSource",
    "CalcResizeError",
    "ChatCompletionChunk",
    "ChatCompletionChunkGenerator",
    "ChatCompletionRequest",
    "ChatCompletionResponse",
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
    "ThinkingInitialStage",
    "Tokenizer",
    "ToolCall",
    "ToolDefinition",
    "ToolMessage",
    "TrainingText",
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
