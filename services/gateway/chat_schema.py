"""What the bodies of ``/v1/chat/completions`` may hold; other APIs' conversations are turned into these."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator

from services.gateway.conversation import (
    Content,
    Effort,
    Messages,
    Verbosity,
    check_messages,
    style_variables,
    template_variables,
    text_of,
)
from services.gateway.model import Model
from services.gateway.schemas import GenerationRequest, LogprobCount
from services.gateway.tools import (
    MAX_TOOLS,
    AnyTool,
    ChatAllowedTools,
    Choice,
    Function,
    FunctionChoice,
    FunctionName,
    NamedTool,
    Tool,
    check_choice,
    check_function_call,
    use_of,
)
from shared.errors import RequestError
from shared.wire import ToolUse

# What the errors about tools call a field where the client sent ``functions``.
FUNCTIONS = {
    r"tools\.(\d+)\.function\b": r"functions.\1",
    r"tools\b": "functions",
    r"tool_choice\.function\b": "function_call",
    r"tool_choice\b": "function_call",
}


class Prediction(Model):
    """What much of the answer may be, so that a server can be faster; the answer is the same with and without."""

    type: Literal["content"]
    content: Content


class ChatRequest(GenerationRequest):
    messages: Messages
    logprobs: bool | None = None
    top_logprobs: LogprobCount = None
    max_completion_tokens: int | None = Field(None, ge=1)
    tools: list[AnyTool] | None = Field(None, max_length=MAX_TOOLS, fail_fast=True)
    tool_choice: Annotated[
        str | NamedTool | ChatAllowedTools | None, PlainValidator(check_choice, json_schema_input_type=Choice)
    ] = None
    parallel_tool_calls: bool | None = None
    functions: list[Function] | None = Field(None, max_length=MAX_TOOLS, fail_fast=True)
    function_call: Annotated[
        str | FunctionName | None, PlainValidator(check_function_call, json_schema_input_type=FunctionChoice)
    ] = None
    prediction: Prediction | None = None
    include_reasoning: bool | None = None
    reasoning_effort: Effort | None = None
    verbosity: Verbosity | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[dict[str, Any]] | None = None
    echo: bool | None = None
    return_prompt_text: bool | None = None

    @property
    def tool_use(self) -> ToolUse | None:
        """None when there are no tools. Raises RequestError."""
        if self.functions:
            tools = [Tool(type="function", function=function) for function in self.functions]
            return use_of(tools, self._function_choice, parallel=False)
        return use_of(self.tools, self.tool_choice, self.parallel_tool_calls is not False)

    @property
    def named_function(self) -> str:
        """The function that the client itself names, if it names one."""
        choice = self._function_choice if self.functions else self.tool_choice
        return choice.function.name if isinstance(choice, NamedTool) else ""

    @property
    def _function_choice(self) -> str | NamedTool | None:
        """function_call as the tool_choice that it stands for."""
        if isinstance(self.function_call, FunctionName):
            return NamedTool(type="function", function=self.function_call)
        return self.function_call

    @property
    def shows_reasoning(self) -> bool:
        return self.include_reasoning is not False

    @property
    def output_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def top_wanted(self) -> int:
        return (self.top_logprobs or 0) if self.logprobs else -1

    @property
    def wants_prompt_text(self) -> bool:
        return bool(self.return_prompt_text)

    @property
    def predicts(self) -> bool:
        return self.prediction is not None

    @property
    def echoed(self) -> str:
        """What stands before the answer: with ``echo``, the last message, where the answer is of the same role."""
        last = self.messages[-1]
        goes_on = self.add_generation_prompt is False or bool(self.continue_final_message)
        return text_of(last.content) if self.echo and (goes_on or last.role == "assistant") else ""

    @property
    def template_variables(self) -> dict[str, Any]:
        """What the chat template is given beside messages and tools. Raises RequestError."""
        style = style_variables(self.reasoning_effort, self.verbosity)
        return template_variables(
            {**style, **(self.chat_template_kwargs or {})},
            self.add_generation_prompt,
            self.continue_final_message,
            self.documents,
        )

    def check(self) -> None:
        super().check()
        check_messages(self.messages)
        self._check_functions()
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs: only when logprobs is true", code="invalid_value", param="top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise RequestError(
                f"max_completion_tokens: {self.max_completion_tokens} contradicts max_tokens {self.max_tokens}",
                param="max_completion_tokens",
            )

    def _check_functions(self) -> None:
        if isinstance(self.function_call, FunctionName) and not self.functions:
            message = "function_call: only allowed when functions are given"
            raise RequestError(message, code="invalid_value", param="function_call")
        for name, value in (("tools", self.tools), ("tool_choice", self.tool_choice)):
            if self.functions and value:
                message = f"functions: contradicts {name}; give one of them"
                raise RequestError(message, code="invalid_value", param="functions")
