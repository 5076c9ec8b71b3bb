"""Text to learn, and networks that learn the next token of a text."""
