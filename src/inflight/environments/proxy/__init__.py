"""The recording proxy, which agents reach by the URL of an OpenAI or Anthropic client."""
