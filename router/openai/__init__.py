"""The HTTP door in OpenAI's dialect."""
