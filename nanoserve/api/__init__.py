"""What a user calls: `LLM`, the `nanoserve` command, text. It imports the engine, never the reverse."""
