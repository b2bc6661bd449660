"""The decoding engine behind HTTP, in the form of OpenAI's API. Needs fastapi, uvicorn and prometheus-client; never Megatron."""
