"""Chats as text: the one reader of their turns, and the chat template, for preprocessing and for the server."""
