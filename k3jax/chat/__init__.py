"""Kimi's chat format: conversations to token ids, and generated ids back to messages.

    encoder       messages -> ids
    format messages  the control tokens; what a message may hold
    parser        ids -> reasoning, content and tool calls, as they come
"""

from k3jax.chat.encoder import EncodedChat as EncodedChat
from k3jax.chat.encoder import chat_segments as chat_segments
from k3jax.chat.encoder import encode_chat as encode_chat
from k3jax.chat.encoder import encode_chat_with_roles as encode_chat_with_roles
from k3jax.chat.format import stop_token_ids as stop_token_ids
from k3jax.chat.parser import parse_completion as parse_completion
