"""The real `huggingface_hub` client against a local stand-in of the Hub."""
