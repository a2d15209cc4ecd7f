"""What a tokenizer gets with the next TOKENS message."""

from __future__ import annotations

from shared.codec import int32
from shared.logprobs import Found, columns
from shared.wire import Cached, Done, Finished, PromptLogprobs, Tokens


class Outbox:
    """Columns of new ids and the ends of sequences for one tokenizer, collected over a step."""

    __slots__ = (
        "_cached",
        "_counts",
        "_done",
        "_finished",
        "_ids",
        "_logprobs",
        "_offsets",
        "_prompts",
        "_rids",
        "_seqs",
        "owner",
    )

    def __init__(self, owner: bytes) -> None:
        self.owner = owner
        self._clear()

    def __bool__(self) -> bool:
        return bool(self._rids or self._finished or self._done or self._cached)

    def token(self, rid: int, seq: int, offset: int, token: int) -> None:
        self._rids.append(rid)
        self._seqs.append(seq)
        self._offsets.append(offset)
        self._counts.append(1)
        self._ids.append(token)

    def tokens(self, rid: int, seq: int, offset: int, ids: list[int], logprobs: list[Found] | None = None) -> None:
        """logprobs: of each id, when the request asked for them."""
        if logprobs:
            self._logprobs += enumerate(logprobs, len(self._ids))
        self._rids.append(rid)
        self._seqs.append(seq)
        self._offsets.append(offset)
        self._counts.append(len(ids))
        self._ids.extend(ids)

    def prompt(self, rid: int, logprobs: list[Found]) -> None:
        """logprobs: of the prompt's tokens from the second on."""
        self._prompts.append(PromptLogprobs(rid, columns(enumerate(logprobs, 1))))

    def cached(self, rid: int, tokens: int) -> None:
        """How much of its prompt a request found computed; goes with its first token."""
        self._cached.append(Cached(rid, tokens))

    def finished(self, finished: Finished) -> None:
        self._finished.append(finished)

    def done(self, done: Done) -> None:
        self._done.append(done)

    def take(self, step_id: int) -> Tokens:
        """The message of everything collected; the outbox is empty afterwards."""
        message = Tokens(
            step_id,
            self._rids,
            self._seqs,
            self._offsets,
            self._counts,
            int32(self._ids),
            self._finished,
            self._done,
            columns(self._logprobs) if self._logprobs else None,
            self._prompts,
            self._cached,
        )
        self._clear()
        return message

    def _clear(self) -> None:
        self._rids: list[int] = []
        self._seqs: list[int] = []
        self._offsets: list[int] = []
        self._counts: list[int] = []
        self._ids: list[int] = []
        self._finished: list[Finished] = []
        self._done: list[Done] = []
        self._logprobs: list[tuple[int, Found]] = []
        self._prompts: list[PromptLogprobs] = []
        self._cached: list[Cached] = []
