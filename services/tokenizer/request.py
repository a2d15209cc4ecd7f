"""What the tokenizer knows of one request: its output in ids and in text, and how far the gateway has been told."""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace

from services.tokenizer.detokenizer import Pieces
from services.tokenizer.logprobs import in_words
from services.tokenizer.parsers.output import OutputParser
from services.tokenizer.parsers.transducer import Piece, joined
from services.tokenizer.stop import StopMatcher, StopStrings
from shared.channels import CONTENT
from shared.codec import Int32, int32, no_ids
from shared.logprobs import Found
from shared.wire import Cached, Done, Finished, PromptText, SubmitTokens, Text, TextLogprobs, TokenLogprob


@dataclass(slots=True)  # not frozen, which would cost as much as all else that is done for a token
class Chunk:
    """Text of one channel from character ``offset`` on, after which ``token_count`` output tokens are covered.

    ids: those of the tokens covered by this text and not by the text before: [token_count - len(ids), token_count).
    logprobs: of these tokens, where they are wanted.
    """

    offset: int
    text: str
    token_count: int
    ids: list[int]
    logprobs: list[TokenLogprob] = field(default_factory=list)
    channel: int = CONTENT


class OutputSequence:
    """One answer of a request as it grows: ids come in, text goes out, and what was given out never changes.

    A token is *covered* when all its text can be given out, so ids never run ahead of the text they stand for. Ids in
    ``silent`` (EOS, stop token ids) have no text. Before the output has ``min_tokens`` no stop string is looked for.

    A parser sorts the text into channels and takes markers out of it. It gets text that no stop string can begin in any
    more, and what it gives out is the text that is told: offsets count its characters. ``shown`` are special tokens
    that it has to see although they are skipped otherwise.
    """

    def __init__(
        self,
        pieces: Pieces,
        *,
        stops: StopStrings | None = None,
        include_stop: bool = False,
        silent: frozenset[int] = frozenset(),
        skip_special: bool = True,
        min_tokens: int = 0,
        parser: OutputParser | None = None,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        self.ids: list[int] = []
        self.finished: Finished | None = None
        self.stop_string: str | None = None
        self.surplus = 0  # tokens that the scheduler counts after the one that completed the stop string
        self.resume_asked = float("-inf")
        self._pieces, self._detokenizer = pieces, pieces.detokenizer()
        self._matcher = StopMatcher(stops) if stops is not None else None
        self._include_stop, self._silent, self._skip_special = include_stop, silent, skip_special
        self._min_tokens = min_tokens
        self._logprobs: list[TokenLogprob] = []  # of all ids, where they are wanted
        self._ends: list[int] = []  # characters of text that cover each token and all before it; told ones once covered
        self._parser, self._shown = parser, shown
        self._splitter = parser.splitter if parser is not None else None
        self._raw_ends: list[int] = []  # as ``_ends``, of the text before it is parsed; for counting reasoning
        self._parsed = 0  # characters of text that the parser, if there is one, has taken in or that were told,
        self._unsent = ""  # and text after these, some of which may have to wait
        self._told: list[Piece] = []  # what was given out,
        self._told_length = 0
        self._covered = 0  # and with it so many tokens
        self._over = False

    @property
    def over(self) -> bool:
        """Whether the text is complete; further ids are ignored."""
        return self._over

    def push(self, ids: Iterable[int], logprobs: Many[Found] = ()) -> None:
        """Takes the next output ids, up to the one that completes a stop string (then ``stop_string`` is set).

        logprobs: of each of the ids, where they are wanted.
        """
        for place, id in enumerate(ids):
            if self._over:
                return
            self.ids.append(id)
            if logprobs:
                self._logprobs.append(in_words(self._pieces, id, logprobs[place], self._length))
            if id not in self._silent:
                skip = self._skip_special and id not in self._shown
                self._grow(self._detokenizer.feed(self._pieces.get(id, skip)))
            self._ends.append(self._length + self._detokenizer.pending)
            if self._splitter is not None:
                self._raw_ends.append(self._ends[-1])

    def end(self, finished: Finished) -> None:
        """No more ids come: an incomplete character and a partial stop string are given out after all."""
        if not self._over:
            self._unsent += self._detokenizer.finish()
            self._over = True
        self.finished = finished

    def take(self) -> list[Chunk]:
        """What can be given out now and has not been."""
        ready = len(self._unsent)
        if self._matcher is not None and not self._over:
            ready -= self._matcher.held
        text, self._unsent = self._unsent[:ready], self._unsent[ready:]
        self._parsed += len(text)
        offset, before = self._told_length, self._covered
        pieces = self._parse(text)
        self._told += pieces
        self._told_length += sum(len(text) for _, text in pieces)
        self._cover()
        if not pieces and self._covered == before:
            return []
        return self._chunks(offset, pieces, before)

    def since(self, offset: int) -> list[Chunk]:
        """Again everything given out from character ``offset`` on, with the ids that may be missing there."""
        self._told = joined(self._told)
        offset = min(max(offset, 0), self._told_length)
        pieces, start = [], 0
        for channel, text in self._told:
            if start + len(text) > offset:
                pieces.append((channel, text[max(offset - start, 0) :]))
            start += len(text)
        first = min(bisect_left(self._ends, offset, 0, self._covered), self._covered)
        return self._chunks(offset, pieces, first)

    def ending(self) -> Finished | None:
        """How it finished, with the count of its reasoning, which is right once the last text was taken.

        A token is of reasoning if its text begins before the end of ``</think>``; so the markers' own are. Where that
        never came all tokens are, but for the silent ones.
        """
        if self.finished is None or self._splitter is None:
            return self.finished
        end = self._splitter.reasoning_end
        if end is None:
            count = sum(id not in self._silent for id in self.ids)
        else:
            count = min(bisect_left(self._raw_ends, end) + 1, len(self.ids)) if end else 0
        return replace(self.finished, reasoning_tokens=count)

    def offset_of_token(self, count: int) -> int:
        """Characters that a receiver with the first ``count`` tokens has at least."""
        return self._ends[min(count, self._covered) - 1] if count > 0 and self._covered else 0

    def _parse(self, text: str) -> list[Piece]:
        if self._parser is None:
            return [(CONTENT, text)] if text else []
        pieces = self._parser.feed(text)
        if self._over:
            pieces += self._parser.finish(self._cut)
        return joined(pieces)

    def _cover(self) -> None:
        decided = self._parsed - (self._parser.held if self._parser is not None else 0)
        covered, tokens, ends = self._covered, len(self.ids), self._ends
        while covered < tokens and (self._over or ends[covered] <= decided):
            if self._parser is not None:
                ends[covered] = self._told_length
            covered += 1
        self._covered = covered

    def _chunks(self, offset: int, pieces: list[Piece], first: int) -> list[Chunk]:
        """One chunk for each piece; the last has the tokens from ``first`` on."""
        chunks = []
        for channel, text in pieces[:-1]:
            chunks.append(Chunk(offset, text, first, [], [], channel))
            offset += len(text)
        channel, text = pieces[-1] if pieces else (CONTENT, "")
        new = slice(first, self._covered)
        chunks.append(Chunk(offset, text, self._covered, self.ids[new], self._logprobs[new], channel))
        return chunks

    @property
    def _cut(self) -> bool:
        """Whether the text is complete although the model would have gone on."""
        finished = self.finished
        return finished is None or finished.reason != "stop" or bool(finished.stop_reason)

    @property
    def _length(self) -> int:
        return self._parsed + len(self._unsent)

    def _grow(self, text: str) -> None:
        match = None
        if self._matcher is not None and text:
            if len(self.ids) > self._min_tokens:
                match = self._matcher.feed(text)
            else:
                self._matcher.skip(len(text))
        if match is None:
            self._unsent += text
            return
        cut = match.end if self._include_stop else match.start
        self._unsent = (self._unsent + text)[: cut - self._parsed]
        self._ends = [min(end, cut) for end in self._ends]
        self._logprobs = [replace(one, offset=min(one.offset, cut)) for one in self._logprobs]
        self.stop_string, self._over = match.string, True


class State(enum.Enum):
    ENCODING = enum.auto()
    SUBMITTED = enum.auto()
    ACCEPTED = enum.auto()


@dataclass(slots=True)
class Request:
    """One request between a gateway and the scheduler; times are of the monotonic clock.

    gateway: the raw identity that gets the answer; None when it is gone. submit: what the scheduler was sent, until it
    accepts. prompt: its text, for echo; cached_tokens: of it, once told; prompt_words: its tokens with their logprobs,
    where they are wanted. heard: when the scheduler last spoke of it. told_at: when its end was last told to the
    gateway.
    """

    rid: int
    request_id: str
    gateway: bytes | None
    return_ids: bool
    heard: float
    state: State = State.ENCODING
    cancelled: bool = False
    submit: SubmitTokens | None = None
    prompt_tokens: int = 0
    prompt_ids: Int32 = field(default_factory=no_ids)
    prompt: str = ""
    cached_tokens: int = 0
    prompt_words: list[TokenLogprob] = field(default_factory=list)
    skip_special: bool = True
    sequences: list[OutputSequence] = field(default_factory=list)
    done: Done | None = None
    done_at: float = 0.0
    told_at: float = 0.0

    @property
    def all_finished(self) -> bool:
        return all(sequence.finished is not None for sequence in self.sequences)


class TextBatch:
    """The columns of one TEXT message to a gateway."""

    def __init__(self) -> None:
        self._rids: list[int] = []
        self._seqs: list[int] = []
        self._chunks: list[Chunk] = []
        self._id_counts: list[int] = []
        self._ids: list[int] = []
        self._finished: list[Finished] = []
        self._done: list[Done] = []
        self._logprobs: list[TextLogprobs] = []
        self._prompts: list[PromptText] = []
        self._cached: list[Cached] = []

    def prompt(self, request: Request) -> None:
        """What is known of the request's prompt, if anything."""
        if request.prompt_words:
            self._prompts.append(PromptText(request.rid, request.prompt_words))
        if request.cached_tokens:
            self._cached.append(Cached(request.rid, request.cached_tokens))

    def add(self, request: Request, seq: int, chunks: Iterable[Chunk]) -> None:
        for chunk in chunks:
            if chunk.logprobs:
                self._logprobs.append(TextLogprobs(len(self._rids), chunk.logprobs))
            self._rids.append(request.rid)
            self._seqs.append(seq)
            self._chunks.append(chunk)
            self._id_counts.append(len(chunk.ids) if request.return_ids else 0)
            if request.return_ids:
                self._ids += chunk.ids

    def finish(self, sequence: OutputSequence) -> None:
        """Its end, if it has one; after all of its text."""
        finished = sequence.ending()
        if finished is not None:
            self._finished.append(finished)

    def end(self, done: Done) -> None:
        self._done.append(done)

    def message(self) -> Text | None:
        """None when there is nothing to tell."""
        if not (self._rids or self._finished or self._done or self._prompts or self._cached):
            return None
        return Text(
            rids=self._rids,
            seqs=self._seqs,
            offsets=[chunk.offset for chunk in self._chunks],
            channels=[chunk.channel for chunk in self._chunks],
            texts=[chunk.text for chunk in self._chunks],
            token_counts=[chunk.token_count for chunk in self._chunks],
            id_counts=self._id_counts,
            ids=int32(self._ids),
            finished=self._finished,
            done=self._done,
            logprobs=self._logprobs,
            prompts=self._prompts,
            cached=self._cached,
        )
