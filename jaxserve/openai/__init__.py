"""Bodies of requests and replies in OpenAI's and Anthropic's formats, and batch files."""
