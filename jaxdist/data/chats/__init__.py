"""Conversations: the forms of rows that hold them, the text that a chat template makes of each, and what is learned."""
