"""Plugins for servers: vLLM and SGLang, and what they share."""
