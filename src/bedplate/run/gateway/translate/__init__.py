"""Other APIs in terms of OpenAI's: Anthropic's Messages, OpenAI's Responses and Ollama's API.

A translated request is a request of chat completions (or completions, or embeddings) for everything behind the client's
connection: limits, queues, routing and accounting. Only this package knows both formats, and plain requests of OpenAI's
API never get here.
"""
