"""The recording proxy, which agents reach by an OpenAI URL."""
