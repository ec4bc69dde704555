"""Codec for DeepSeek V4 and V4.1: requests of three public protocols in, their events out."""

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

__version__ = "0.1.0"

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
