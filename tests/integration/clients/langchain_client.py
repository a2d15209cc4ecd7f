"""langchain-openai against a server: python langchain_client.py URL MODEL; tells what came as one line of JSON."""

import json
import sys

from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Weather(BaseModel):
    """Tells the weather at a place."""

    city: str
    days: int


url, model = sys.argv[1:]
question = "What is the capital of France?"
llm = ChatOpenAI(base_url=f"{url}/v1", api_key="none", model=model, temperature=0, max_tokens=200, max_retries=0)
chunks = list(llm.stream([("user", question)], stream_usage=True))
called = llm.bind_tools([Weather], tool_choice="Weather").invoke("How is the weather in Paris in the next 3 days?")
streamed = None
for chunk in llm.bind_tools([Weather], tool_choice="Weather").stream("How is the weather in Paris?"):
    streamed = chunk if streamed is None else streamed + chunk
answer = llm.with_structured_output(Weather, method="json_schema").invoke("The weather in Paris in the next 3 days")
responses = ChatOpenAI(base_url=f"{url}/v1", api_key="none", model=model, temperature=0, use_responses_api=True)
told = {
    "text": "".join(str(chunk.content) for chunk in chunks),
    "usage": chunks[-1].usage_metadata or chunks[-2].usage_metadata,
    "call": [called.tool_calls[0]["name"], Weather(**called.tool_calls[0]["args"]).model_dump()],
    "streamed_call": [streamed.tool_calls[0]["name"], Weather(**streamed.tool_calls[0]["args"]).model_dump()],
    "structured": answer.model_dump(),
    "responses": responses.invoke([("user", question)]).text,
}
print(json.dumps(told))
