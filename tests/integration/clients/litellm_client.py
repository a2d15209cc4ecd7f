"""litellm against a server: python litellm_client.py URL MODEL; tells what came as one line of JSON."""

import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # nothing is fetched from elsewhere

import litellm

url, model = sys.argv[1:]
server = {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": "none", "temperature": 0, "max_tokens": 200}
question = [{"role": "user", "content": "What is the capital of France?"}]
weather = [{"role": "user", "content": "How is the weather in Paris in the next 3 days?"}]
schema = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
tools = [{"type": "function", "function": {"name": "weather", "description": "Tells it", "parameters": schema}}]
choice = {"type": "function", "function": {"name": "weather"}}
text = "".join(
    chunk.choices[0].delta.content or "" for chunk in litellm.completion(messages=question, stream=True, **server)
)
call = litellm.completion(messages=weather, tools=tools, tool_choice=choice, **server).choices[0].message.tool_calls[0]
pieces = list(litellm.completion(messages=weather, tools=tools, tool_choice=choice, stream=True, **server))
streamed = litellm.stream_chunk_builder(pieces).choices[0].message.tool_calls[0]
wanted = {"type": "json_schema", "json_schema": {"name": "weather", "schema": schema, "strict": True}}
answer = litellm.completion(messages=weather, response_format=wanted, **server).choices[0].message.content
anthropic = litellm.completion(
    model=f"anthropic/{model}", api_base=url, api_key="none", messages=question, temperature=0, max_tokens=50
)
told = {
    "text": text,
    "call": [call.function.name, json.loads(call.function.arguments)],
    "streamed_call": [streamed.function.name, json.loads(streamed.function.arguments)],
    "structured": json.loads(answer),
    "anthropic": anthropic.choices[0].message.content,
}
print(json.dumps(told))
