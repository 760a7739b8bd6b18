"""The recording proxy, which agents call through an OpenAI or Anthropic client."""
