"""Text to learn from, and networks that predict the next token of a text."""
