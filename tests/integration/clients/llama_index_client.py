"""llama-index against a server: python llama_index_client.py URL MODEL; tells what came as one line of JSON."""

import json
import sys

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel


class Weather(BaseModel):
    """Tells the weather at a place."""

    city: str
    days: int


def weather(city: str, days: int) -> str:
    """Tells the weather at a place."""
    return f"sun in {city} for {days} days"


url, model = sys.argv[1:]
llm = OpenAILike(
    model=model,
    api_base=f"{url}/v1",
    api_key="none",
    is_chat_model=True,
    is_function_calling_model=True,
    should_use_structured_outputs=True,
    temperature=0,
    max_tokens=200,
    context_window=2048,
)
question = [ChatMessage(role="user", content="What is the capital of France?")]
forecast = [ChatMessage(role="user", content="How is the weather in Paris in the next 3 days?")]
text = "".join(chunk.delta or "" for chunk in llm.stream_chat(question))
tool = FunctionTool.from_defaults(weather)
called = llm.chat_with_tools([tool], chat_history=forecast, tool_required=True)
[call, *_] = llm.get_tool_calls_from_response(called)
*_, last = llm.stream_chat_with_tools([tool], chat_history=forecast, tool_required=True)
[streamed, *_] = llm.get_tool_calls_from_response(last)
answer = llm.as_structured_llm(Weather).chat(forecast).raw
told = {
    "text": text,
    "call": [call.tool_name, call.tool_kwargs],
    "streamed_call": [streamed.tool_name, streamed.tool_kwargs],
    "structured": answer.model_dump(),
}
print(json.dumps(told))
