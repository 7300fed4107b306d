"""OpenAI's batch files."""
