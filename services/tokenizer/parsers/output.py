"""How a model writes tool calls and reasoning, and the parser of one answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.tokenizer.parsers import hermes, llama3, mistral, think
from services.tokenizer.parsers.calls import CallTransducer
from services.tokenizer.parsers.hermes import Hermes
from services.tokenizer.parsers.llama3 import Llama3
from services.tokenizer.parsers.mistral import Mistral
from services.tokenizer.parsers.think import ThinkSplitter
from services.tokenizer.parsers.transducer import Piece, Transducer
from shared.channels import CONTENT
from shared.wire import ToolUse

TOOL_PARSERS: dict[str, type[CallTransducer]] = {"hermes": Hermes, "llama3_json": Llama3, "mistral": Mistral}
REASONING_PARSERS = ("think", "qwen3", "deepseek_r1")  # the last one takes an answer without markers for reasoning
MARKERS = {
    "hermes": (hermes.OPEN, hermes.CLOSE),
    "llama3_json": (llama3.PYTHON_TAG,),
    "mistral": (mistral.OPEN, mistral.ARGS, mistral.CALL_ID),
}


class OutputParser:
    """Parsers in a row: what one takes for content is the text of the next."""

    def __init__(self, stages: Sequence[Transducer]) -> None:
        self._stages = stages
        self.splitter = next((stage for stage in stages if isinstance(stage, ThinkSplitter)), None)

    @property
    def held(self) -> int:
        """Characters at the end of the text that are not decided."""
        return sum(stage.held for stage in self._stages)

    def feed(self, text: str) -> list[Piece]:
        pieces = [(CONTENT, text)]
        for stage in self._stages:
            pieces = _through(stage, pieces)
        return pieces

    def finish(self, cut: bool = False) -> list[Piece]:
        """cut: the model did not end it by itself."""
        pieces: list[Piece] = []
        for stage in self._stages:
            pieces = _through(stage, pieces) + stage.finish(cut)
        return pieces


def _through(stage: Transducer, pieces: list[Piece]) -> list[Piece]:
    result: list[Piece] = []
    for channel, text in pieces:
        if channel == CONTENT:
            result += stage.feed(text)
        else:
            result.append((channel, text))
    return result


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """tools and reasoning: names of parsers, empty for none. markers: token ids of what these look for."""

    tools: str = ""
    reasoning: str = ""
    markers: frozenset[int] = frozenset()

    @classmethod
    def choose(
        cls, tools: str, reasoning: str, template: str, knows_tools: bool, token_to_id: Callable[[str], int | None]
    ) -> OutputFormat:
        """The parsers of these names; for ``auto`` those whose markers the chat template or the vocabulary has.

        A model whose template knows no tools is told of them in words, and then writes calls as it is told.
        """
        if tools == "auto":
            first = ((name, markers[0]) for name, markers in MARKERS.items())
            found = (name for name, marker in first if marker in template or token_to_id(marker) is not None)
            tools = next(found, "" if knows_tools else "hermes")
        if reasoning == "auto":
            reasoning = "think" if think.CLOSE in template else ""
        tools, reasoning = "" if tools == "none" else tools, "" if reasoning == "none" else reasoning
        wanted = [*MARKERS.get(tools, ()), *((think.OPEN, think.CLOSE) if reasoning else ())]
        ids = (token_to_id(marker) for marker in wanted)
        return cls(tools, reasoning, frozenset(id for id in ids if id is not None))

    def __str__(self) -> str:
        return f"tool calls: {self.tools or 'none'}, reasoning: {self.reasoning or 'none'}"

    def inside(self, prompt: str, continued: str | None = None) -> bool:
        """Whether an answer to ``prompt`` begins as reasoning. continued: the message that it goes on with, if any."""
        if continued is not None and (think.OPEN in continued or think.CLOSE in continued):
            return bool(self.reasoning) and continued.rfind(think.OPEN) > continued.rfind(think.CLOSE)
        return self.reasoning == "deepseek_r1" or (bool(self.reasoning) and prompt.rstrip().endswith(think.OPEN))

    def written(self, name: str, arguments: str) -> str:
        """A call as the model writes it."""
        return TOOL_PARSERS[self.tools or "hermes"].written(name, arguments)

    def parser(self, use: ToolUse | None, inside: bool) -> Callable[[], OutputParser] | None:
        """What makes the parser of each answer; None: there is nothing to look for. inside: it begins as reasoning."""
        parse_calls = TOOL_PARSERS.get(self.tools) if use is not None and use.choice != "none" else None
        names = [tool["function"]["name"] for tool in use.tools] if use is not None else []
        parallel = use is None or use.parallel
        demanded = use is not None and use.choice in ("required", "function")

        def make() -> OutputParser:
            stages: list[Transducer] = [ThinkSplitter(inside)] if self.reasoning else []
            if parse_calls is not None:
                stages.append(parse_calls(names, parallel, demanded))
            return OutputParser(stages)

        return make if self.reasoning or parse_calls is not None else None


NO_FORMAT = OutputFormat()
