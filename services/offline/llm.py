"""Answers from Python: a model behind one object, over the same processes that serve HTTP."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from numbers import Integral
from typing import Any, Literal, TypeVar

from tqdm import tqdm

from services.offline import outputs
from services.offline.client import Address, Client
from services.offline.outputs import RequestOutput
from services.offline.params import SamplingParams
from services.offline.server import PrivateServer, ServerError
from shared import models
from shared.errors import QuireError, RequestError

T = TypeVar("T")
Prompt = str | Sequence[int] | Mapping[str, Any]
Messages = Sequence[Mapping[str, Any]]
OnError = Literal["raise", "keep"]
ASKED = {"return_token_ids": True, "return_tokens_as_token_ids": True}  # of every request


class LLM:
    """A model, served by processes of this object's own until ``close``, the end of its ``with`` block or the program.

    options: those of ``quire serve``, as ``max_model_len=2048`` for ``--max-model-len 2048``. max_concurrency: requests
    that are under way at once; the rest of a call's prompts wait here. Thread-safe. Raises ConfigError for a model or
    an option that cannot work.
    """

    def __init__(self, model: str = "", *, max_concurrency: int = 256, **options: Any) -> None:
        models.locate(model, download_dir=str(options.get("download_dir", "")), progress=True)
        self._concurrency = max_concurrency
        self._server = PrivateServer([*([model] if model else []), *_argv(options)])
        try:
            self._server.wait_ready()
        except BaseException:
            self._server.close()
            raise
        self._address = Address("http://quire", self._server.uds)
        # Its own loop in a thread of its own: the caller may have a running one, as in a notebook.
        self._loop = asyncio.new_event_loop()
        thread = threading.Thread(target=self._loop.run_forever, name="quire LLM", daemon=True)
        thread.start()
        self._stop = weakref.finalize(self, _stop, self._loop, thread)

    def close(self) -> None:
        """Ends the processes; nothing on a second call."""
        self._server.close()
        self._stop()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        on_error: OnError = "raise",
    ) -> list[RequestOutput]:
        """Answers to ``prompts``, in their order.

        A prompt is text, token ids, or vLLM's ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``. sampling_params:
        one for all prompts, or one for each. on_error "raise": the first prompt that cannot be answered raises
        RequestError, which names it, and the others are cancelled; "keep": its output has the ``error`` instead.
        Raises ServerError when the server is gone.
        """
        one = isinstance(prompts, (str, Mapping)) or _is_ids(prompts)
        given: list[Any] = [prompts] if one else list(prompts)

        def body(index: int, params: SamplingParams) -> dict[str, Any]:
            return {"prompt": _prompt(given[index], index), **params.body(), **ASKED}

        def read(index: int, answer: Any) -> RequestOutput:
            prompt = given[index]
            text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
            return outputs.completions(text if isinstance(text, str) else None, answer)

        return self._ask("/v1/completions", given, sampling_params, body, read, use_tqdm, on_error)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        response_format: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
        use_tqdm: bool = True,
        on_error: OnError = "raise",
    ) -> list[RequestOutput]:
        """Answers to one conversation or several, each a list of OpenAI's messages; the rest is as in ``generate``.

        The fields of a chat request that are no sampling parameters are for all conversations, and as in OpenAI's and
        vLLM's APIs; None leaves one out. A ``chat_template`` wants ``LLM(..., trust_request_chat_template=True)``.
        """
        given = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        optional = {
            "tools": tools,
            "tool_choice": tool_choice,
            "parallel_tool_calls": parallel_tool_calls,
            "response_format": response_format,
            "chat_template": chat_template,
            "chat_template_kwargs": chat_template_kwargs,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }
        shared = {name: value for name, value in optional.items() if value is not None}

        def body(index: int, params: SamplingParams) -> dict[str, Any]:
            fields = params.body()
            if (top := fields.pop("logprobs", None)) is not None:
                fields |= {"logprobs": True, "top_logprobs": top}
            return {"messages": given[index], **shared, **fields, **ASKED}

        def read(index: int, answer: Any) -> RequestOutput:
            return outputs.chat(given[index], answer)

        return self._ask("/v1/chat/completions", given, sampling_params, body, read, use_tqdm, on_error)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``."""
        body = {"prompt": text, "add_special_tokens": add_special_tokens}
        return list(self._run(self._post_one("/tokenize", body))["tokens"])

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ``token_ids``."""
        return str(self._run(self._post_one("/detokenize", {"tokens": list(token_ids)}))["prompt"])

    async def _post_one(self, path: str, body: Mapping[str, Any]) -> Any:
        async with Client(self._address, 1) as client:
            answer = await client.post(path, body)
        if answer.status != 200:
            raise answer.failure
        return answer.body

    def _ask(
        self,
        path: str,
        given: Sequence[Any],
        params: SamplingParams | Sequence[SamplingParams] | None,
        body: Callable[[int, SamplingParams], dict[str, Any]],
        read: Callable[[int, Any], RequestOutput],
        use_tqdm: bool,
        on_error: OnError,
    ) -> list[RequestOutput]:
        count = len(given)
        each = [params or SamplingParams()] * count if params is None or isinstance(params, SamplingParams) else params
        if len(each) != count:
            raise ValueError(f"sampling_params: {len(each)} for {count} prompts; give one, or one for each")
        bodies = [body(index, one) for index, one in enumerate(each)]
        found: list[RequestOutput | None] = [None] * count

        async def ask(client: Client, index: int) -> None:
            try:
                answer = await client.post(path, bodies[index])
                if answer.status != 200:
                    raise answer.failure
                found[index] = read(index, answer.body)
            except RequestError as error:
                if on_error == "raise":
                    message = f"prompt {index}: {error.message}"
                    raise RequestError(message, status=error.status, code=error.code, param=error.param) from None
                found[index] = RequestOutput(given[index], error=error.message)

        self._run(self._ask_all(ask, count, use_tqdm))
        return [one for one in found if one is not None]

    async def _ask_all(
        self, ask: Callable[[Client, int], Coroutine[Any, Any, None]], count: int, use_tqdm: bool
    ) -> None:
        """Some at a time, each of the tasks taking the next; the first error cancels all."""
        indices = iter(range(count))
        tasks = min(count, self._concurrency)
        with tqdm(total=count, disable=not use_tqdm, unit="prompt", dynamic_ncols=True) as bar:
            async with Client(self._address, max(tasks, 1)) as client:

                async def work() -> None:
                    for index in indices:
                        await ask(client, index)
                        bar.update()

                try:
                    async with asyncio.TaskGroup() as group:
                        for _ in range(tasks):
                            group.create_task(work())
                except* QuireError as errors:
                    first: BaseException = errors
                    while isinstance(first, BaseExceptionGroup):
                        first = first.exceptions[0]
                    raise first from None

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """In the object's own loop. An interrupt of the caller cancels it there."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except ServerError as error:
            raise self._server.explained(error) from error
        except BaseException:
            future.cancel()
            raise


def _stop(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def _is_ids(prompts: Any) -> bool:
    return isinstance(prompts, Sequence) and len(prompts) > 0 and isinstance(prompts[0], Integral)


def _prompt(prompt: Prompt, index: int) -> str | list[int]:
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Mapping):
        inner = prompt.get("prompt_token_ids", prompt.get("prompt"))
        if inner is None:
            raise ValueError(f"prompt {index}: neither 'prompt' nor 'prompt_token_ids' is in it")
        return _prompt(inner, index)
    return [int(id) for id in prompt]


def _argv(options: Mapping[str, Any]) -> list[str]:
    """Keyword arguments as the command line of ``quire serve``."""
    argv = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if value is None:
            continue
        if isinstance(value, bool):
            argv.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            argv += [f"--{flag}={item}" for item in (value if isinstance(value, (list, tuple)) else [value])]
    return argv
