"""Finds out why the logprobs of an inference engine differ from those of a trainer."""
