"""Conversations to prompt text and token ids."""
