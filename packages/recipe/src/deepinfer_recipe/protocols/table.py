"""The protocols, one value each. Whoever handles several loops over this table."""

from __future__ import annotations

from deepinfer_recipe.protocols.chat.request import CHAT
from deepinfer_recipe.protocols.common.codec import ProtocolCodec, ProtocolName
from deepinfer_recipe.protocols.messages.request import MESSAGES
from deepinfer_recipe.protocols.responses.request import RESPONSES

PROTOCOLS: dict[ProtocolName, ProtocolCodec] = {
    codec.name: codec for codec in (CHAT, RESPONSES, MESSAGES)
}


def protocol_of(name: ProtocolName) -> ProtocolCodec:
    """The protocol of a name. Raises `ValueError` for one that is not in the table."""
    codec = PROTOCOLS.get(name)
    if codec is None:
        raise ValueError(f"unknown protocol {name!r}; known are {', '.join(PROTOCOLS)}")
    return codec
