"""Prompts to token ids, in a bounded pool of threads beside the detokenizing loop, and all checks of a request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from services.tokenizer.chat import Conversation, continued, render
from services.tokenizer.config import ChatSettings
from services.tokenizer.foreign_template import ForeignTemplates
from services.tokenizer.grammars import Grammars
from services.tokenizer.messages import characters
from services.tokenizer.parsers.output import OutputParser
from services.tokenizer.reasoning_grammar import behind_reasoning
from services.tokenizer.shorten import without_oldest
from services.tokenizer.stop import StopStrings
from services.tokenizer.tokenizer import Tokenizer
from services.tokenizer.tool_grammar import parameter_specs, tool_grammar
from shared.codec import Int32, int32
from shared.errors import RequestError
from shared.grammar import GrammarSpec
from shared.wire import SubmitText, ToolUse, Truncation, Welcome

T = TypeVar("T")
TOO_LONG = "context_length_exceeded"
MAX_WAITING = 1024  # prompts in the pool and before it


@dataclass(frozen=True, slots=True)
class Prompt:
    """An encoded and checked request. ids: int32, never empty. max_tokens: at least 1, fits the context with ids.

    bad_words: token sequences, one or two for each word. text: of the prompt, for a request with echo. parser: makes
    the parser of each answer, which needs to see the special tokens ``shown``; None: answers are all content. spec: the
    grammar that the output is held to; parts: of it, to be checked before it, as each has a field of its own; grammar:
    as in SubmitTokens.
    """

    ids: Int32
    max_tokens: int
    stops: StopStrings | None
    bad_words: list[list[int]] = field(default_factory=list)
    text: str = ""
    parser: Callable[[], OutputParser] | None = None
    shown: frozenset[int] = frozenset()
    spec: GrammarSpec | None = None
    parts: Sequence[GrammarSpec] = ()
    grammar: str = ""


class Encoder:
    """Encodes off the event loop. ``limits`` of its methods are the scheduler's (``max_model_len``, ``vocab_size``)."""

    def __init__(
        self, tokenizer: Tokenizer, grammars: Grammars, threads: int, chat: ChatSettings | None = None
    ) -> None:
        self._tokenizer, self._grammars = tokenizer, grammars
        self._chat = chat or ChatSettings()
        self._foreign = ForeignTemplates(tokenizer.specials, tokenizer.format, self._chat)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="encode")
        self._waiting = 0

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._grammars.close()

    async def prompt(self, message: SubmitText, limits: Welcome) -> Prompt:
        """Raises RequestError: 400 for what is wrong with the request, 503 when too many wait."""
        if message.messages is None and message.prompt is None and not (message.echo or message.bad_words):
            return self._prompt(message, None, "", limits)  # of ids: the checks cost less than a thread
        chat = None
        if message.messages is not None:
            chat = Conversation(message.messages, message.template_kwargs, message.tools, message.chat_template)
        prompt = await self._run(self._prompt, message, chat, await self._rendered_elsewhere(chat), limits)
        if prompt.spec is None:
            return prompt
        for part in prompt.parts:
            await self._grammars.compile(part, limits)
        return replace(prompt, grammar=await self._grammars.compile(prompt.spec, limits))

    async def render(self, message: SubmitText, limits: Welcome) -> dict[str, Any]:
        """What would be computed for a request: its prompt as text and ids, and how many tokens may follow."""
        prompt = await self.prompt(replace(message, echo=True), limits)
        return {"prompt": prompt.text, "tokens": prompt.ids.tolist(), "max_tokens": prompt.max_tokens}

    async def tokenize(self, args: dict[str, Any], limits: Welcome) -> dict[str, Any]:
        """Answers the body of /tokenize: a ``prompt``, or ``messages`` to be put through the chat template."""
        chat = _conversation(args)
        return await self._run(self._tokenize, args, chat, await self._rendered_elsewhere(chat), limits)

    async def detokenize(self, args: dict[str, Any], limits: Welcome) -> dict[str, Any]:
        """Answers the body of /detokenize, ``{"tokens": [...]}``."""
        return await self._run(self._detokenize, args, limits)

    async def _rendered_elsewhere(self, chat: Conversation | None) -> str:
        """The prompt of a chat that brings its own template; empty for any other."""
        return await self._foreign.render(chat) if chat is not None and chat.template else ""

    async def _run(self, work: Callable[..., T], *arguments: Any) -> T:
        if self._waiting >= MAX_WAITING:
            raise RequestError(
                f"{self._waiting} prompts wait to be encoded, the limit", status=503, code="overloaded", retry_after=1.0
            )
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work, *arguments)
        finally:
            self._waiting -= 1

    # ---- in the pool ----

    def _prompt(self, message: SubmitText, chat: Conversation | None, rendered: str, limits: Welcome) -> Prompt:
        try:
            return self._whole(message, chat, rendered, limits)
        except RequestError as error:
            cut = message.truncation is not None and message.truncation.side == "messages"
            if error.code != TOO_LONG or chat is None or rendered or not cut:
                raise
        return self._whole(message, self._shortened(chat, message, limits), "", limits)

    def _whole(self, message: SubmitText, chat: Conversation | None, rendered: str, limits: Welcome) -> Prompt:
        param = "messages" if message.messages is not None else "prompt"
        asked = message.sampling.max_tokens
        wanted = None if message.clamp_max_tokens else asked
        cut = _token_cut(message, limits)
        _check_vocabulary(message.sampling.stop_token_ids, limits.vocab_size, "stop_token_ids")
        if "" in message.stop:
            raise RequestError("stop contains an empty string", param="stop")
        parser, spec, parts = None, message.grammar, list[GrammarSpec]()
        if chat is not None:
            rendered = rendered or self._render(chat, limits, wanted, cut=cut is not None)
            ids = self._encode(rendered, message.add_special_tokens, limits, wanted, param, cut)
            inside = self._tokenizer.format.inside(rendered, continued(chat))
            parser = self._tokenizer.format.parser(message.tools, inside)
            spec, parts = self._spec(message, inside)
        elif message.prompt is not None:
            ids = self._encode(message.prompt, message.add_special_tokens, limits, wanted, param, cut)
            if not len(ids) and self._tokenizer.bos_id is not None:
                ids = int32([self._tokenizer.bos_id])
        elif cut is None:
            ids = message.prompt_ids
        else:
            ids = message.prompt_ids[-cut.keep :] if cut.side == "left" else message.prompt_ids[: cut.keep]
        # Text too: a tokenizer may know added tokens that the model has no row for.
        _check_vocabulary(ids, limits.vocab_size, param)
        if not len(ids):
            raise RequestError(f"{param} is empty: it has no tokens", param=param)
        if len(ids) + (wanted or 1) > limits.max_model_len:
            raise _too_long(len(ids), wanted, limits.max_model_len, param)
        if wanted is None:
            room = limits.max_model_len - len(ids)
            wanted = min(room, asked or limits.defaults.max_tokens or room)
        return Prompt(
            ids,
            wanted,
            StopStrings(message.stop) if message.stop else None,
            self._bad_words(message.bad_words, limits.vocab_size),
            self._prompt_text(message, rendered, ids, cut) if message.echo else "",
            parser,
            self._tokenizer.format.markers if parser is not None else frozenset(),
            spec,
            parts,
        )

    def _spec(self, message: SubmitText, inside: bool) -> tuple[GrammarSpec | None, list[GrammarSpec]]:
        """What the answer to a chat is held to, and parts of it; ``inside``: it begins as reasoning."""
        use, format, beams = message.tools, self._tokenizer.format, message.sampling.use_beam_search
        demanded = use is not None and use.choice not in ("auto", "none")
        if message.grammar is not None:
            if demanded:
                raise _contradiction(message.grammar.param, "does not go with a tool_choice that demands a call")
            if not format.reasoning:
                return message.grammar, []
            return behind_reasoning(message.grammar, inside, self._tokenizer.token_to_id), [message.grammar]
        if use is None or use.choice == "none":
            return None, []
        if demanded and beams:
            raise _contradiction("tool_choice", "a call cannot be demanded of a beam search")
        if demanded and not format.tools:
            raise _contradiction("tool_choice", "how this model writes calls is not known (see --tool-call-parser)")
        if beams or not format.tools:
            return None, []
        return tool_grammar(use, format, inside, self._tokenizer.token_to_id), parameter_specs(use)

    def _bad_words(self, words: list[str], vocab_size: int) -> list[list[int]]:
        """Each word as it is spelled, and after a space, where it is other tokens."""
        found = []
        for word in words:
            for text in (word, f" {word.lstrip()}"):
                ids = self._tokenizer.encode(text, False).ids
                _check_vocabulary(ids, vocab_size, "bad_words")
                if ids and ids not in found:
                    found.append(ids)
        return found

    def _prompt_text(self, message: SubmitText, rendered: str, ids: Int32, cut: Truncation | None) -> str:
        text = rendered or message.prompt
        if text is None or (cut is not None and len(ids) >= cut.keep):
            return self._tokenizer.decode(ids.tolist(), message.skip_special_tokens)
        return text

    def _shortened(self, chat: Conversation, message: SubmitText, limits: Welcome) -> Conversation:
        """The chat without its oldest turns. An answer of any length gets an eighth of the context at least, so that
        it is not cut off at once, and so that the next turn finds this prompt's beginning cached.
        """
        wanted = message.sampling.max_tokens or limits.max_model_len // 8

        def fits(messages: list[Any]) -> bool:
            try:
                rendered = self._render(replace(chat, messages=messages), limits, wanted)
                ids = self._encode(rendered, message.add_special_tokens, limits, wanted, "messages")
            except RequestError as error:
                if error.code != TOO_LONG:
                    raise
                return False
            return len(ids) + wanted <= limits.max_model_len

        return replace(chat, messages=without_oldest(chat.messages, fits))

    def _render(self, chat: Conversation, limits: Welcome, wanted: int | None, *, cut: bool = False) -> str:
        """cut: tokens of it are cut off, so it may be longer than the context."""
        if not cut:
            self._check_characters(characters(chat.messages), limits, wanted, "messages")
        template = self._tokenizer.template_for(chat.tools)
        if template is None:
            raise RequestError(
                "this model has no chat template: use /v1/completions, or start the server with --chat-template",
                code="no_chat_template",
                param="messages",
            )
        return render(template, chat, self._tokenizer.format, self._chat)

    def _encode(
        self,
        text: str,
        add_special_tokens: bool,
        limits: Welcome,
        wanted: int | None,
        param: str,
        cut: Truncation | None = None,
    ) -> Int32:
        if cut is None:
            self._check_characters(len(text), limits, wanted, param)
        else:
            text = self._near(text, cut.side, limits)
        try:
            if cut is None:
                encoding = self._tokenizer.encode(text, add_special_tokens)
            else:
                encoding = self._tokenizer.encode_part(text, add_special_tokens, cut.keep, cut.side)
        except (TypeError, UnicodeError) as error:
            raise RequestError(f"{param} is not valid Unicode text", param=param) from error
        if len(encoding) > limits.max_model_len:  # before a list of all ids is made with the GIL held
            raise _too_long(len(encoding), wanted, limits.max_model_len, param)
        return int32(encoding.ids)

    def _near(self, text: str, side: str, limits: Welcome) -> str:
        """The part of a text that tokens may be left of, and as much again, which they may depend on."""
        longest = self._tokenizer.max_chars_per_token
        if longest is None:
            return text
        characters = 2 * limits.max_model_len * longest
        return text[-characters:] if side == "left" else text[:characters]

    def _check_characters(self, characters: int, limits: Welcome, wanted: int | None, param: str) -> None:
        """Refuses a text that cannot fit whatever its tokens are, before any work on it."""
        longest = self._tokenizer.max_chars_per_token
        if longest is not None and characters > limits.max_model_len * longest:
            raise _too_long(-(-characters // longest), wanted, limits.max_model_len, param, "at least ")

    def _tokenize(
        self, args: dict[str, Any], chat: Conversation | None, rendered: str, limits: Welcome
    ) -> dict[str, Any]:
        # A template writes its own BOS, so special tokens are not added to a conversation unless asked for.
        special = _flag(args, "add_special_tokens", chat is None)
        if chat is not None:
            rendered = rendered or self._render(chat, limits, None)
            ids = self._encode(rendered, special, limits, None, "messages").tolist()
        elif isinstance(args.get("prompt"), str):
            ids = self._encode(args["prompt"], special, limits, None, "prompt").tolist()
        else:
            raise RequestError("prompt must be a string, or messages an array", param="prompt")
        strings = self._tokenizer.token_strs(ids) if _flag(args, "return_token_strs", False) else None
        return {"count": len(ids), "max_model_len": limits.max_model_len, "tokens": ids, "token_strs": strings}

    def _detokenize(self, args: dict[str, Any], limits: Welcome) -> dict[str, Any]:
        tokens = args.get("tokens")
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise RequestError("tokens must be an array of integers", param="tokens")
        _check_vocabulary(tokens, limits.vocab_size, "tokens")
        return {"prompt": self._tokenizer.decode(tokens)}


def _conversation(args: dict[str, Any]) -> Conversation | None:
    """The chat of a query, if it is one. tools: as OpenAI's API has them."""
    if "messages" not in args:
        return None
    variables = dict(args.get("chat_template_kwargs") or {})
    for name in ("add_generation_prompt", "continue_final_message", "documents"):
        if args.get(name) is not None:
            variables[name] = args[name]
    tools = ToolUse(args["tools"]) if args.get("tools") else None
    return Conversation(args["messages"], variables, tools, args.get("chat_template") or "")


def _token_cut(message: SubmitText, limits: Welcome) -> Truncation | None:
    """How tokens are cut off, if they are, with ``keep`` at least 1."""
    cut = message.truncation
    if cut is None or cut.side == "messages":
        return None
    room = limits.max_model_len - (message.sampling.max_tokens or 1)
    return replace(cut, keep=cut.keep or max(room, 1))


def _contradiction(param: str, why: str) -> RequestError:
    return RequestError(f"{param}: {why}", code="unsupported_value", param=param)


def _flag(args: dict[str, Any], name: str, default: bool) -> bool:
    value = args.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise RequestError(f"{name} must be a boolean, not {value!r}", param=name)
    return value


def _check_vocabulary(ids: Sequence[int] | Int32, vocab_size: int, param: str) -> None:
    array = np.asarray(ids)
    wrong = np.flatnonzero((array < 0) | (array >= vocab_size))
    if len(wrong):
        raise RequestError(
            f"{param} contains token id {int(array[wrong[0]])}, outside the model's vocabulary of {vocab_size}",
            code="invalid_token_id",
            param=param,
        )


def _too_long(tokens: int, wanted: int | None, limit: int, param: str, bound: str = "") -> RequestError:
    """OpenAI's wording. Without a wish for max_tokens at least one token must have room."""
    said = f"This model's maximum context length is {limit} tokens. However, "
    if wanted is not None:
        said += (
            f"you requested {bound}{tokens + wanted} tokens ({bound}{tokens} in the {param}, "
            f"{wanted} in the completion). Please reduce the length of the {param} or completion."
        )
    else:
        said += (
            f"your {param} resulted in {bound}{tokens} tokens, which leaves no room for a completion. "
            f"Please reduce the length of the {param}."
        )
    return RequestError(said, code=TOO_LONG, param=param)
