"""Every message of the protocol, as a typed dataclass; ``encode`` and ``decode`` turn them into ZeroMQ frames and back.

``docs/protocol.md`` tells who sends what to whom and when. Three rules hold everywhere:

- A run of tokens is ``(rid, seq, offset, ids)``, the offset being its index in that sequence's output; a piece of text
  carries its character offset. Receivers drop overlap and answer a gap with RESUME, so nothing is lost or repeated.
- Per-step traffic is columnar: entry ``i`` of each list of a message belongs together, and flat ``Int32`` columns are
  cut by the ``counts`` (or ``lens``) beside them.
- Every plan and result carries its step and the epochs of scheduler and worker; other epochs' messages are dropped.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, ClassVar

from shared.codec import Int32, Layout, no_ids
from shared.errors import WireError
from shared.grammar import GrammarSpec
from shared.sampling import LogitRules, SamplingDefaults, SamplingParams

PROTOCOL_VERSION = 1


class Kind(IntEnum):
    HELLO = 1
    WELCOME = 2
    HELLO_REQUIRED = 3
    HEARTBEAT = 4
    GOODBYE = 5
    FAULT = 6
    ROSTER = 7
    SUBMIT_TEXT = 16
    SUBMIT_TOKENS = 17
    ACCEPT = 18
    REJECT = 19
    CANCEL = 20
    STOP = 21
    TOKENS = 22
    TEXT = 23
    RESUME = 24
    ACK = 25
    QUERY = 26
    REPLY = 27
    PLAN = 32
    RESULT = 33
    PLAN_REQUIRED = 34
    MASK = 35


class Message:
    kind: ClassVar[Kind]


# ---- joining -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Memory:
    """What a worker has to offer; the scheduler takes the smallest over all ranks.

    num_blocks counts block 0, which is padding and never owned. eos_ids and vocab_size come from the model's config.
    model_digest and model_name: of its ``ModelFiles``; a tokenizer of another digest does not fit (empty: any does).
    dtype, kv_cache_dtype: of weights, and of KV. defaults: for requests that leave sampling open. quantization: of
    weights, as ``--quantization`` names it. All four are the same on every rank.
    """

    num_blocks: int
    host_blocks: int
    block_size: int
    bytes_per_block: int
    max_model_len: int
    vocab_size: int
    eos_ids: list[int]
    model_digest: str
    model_name: str = ""
    dtype: str = ""
    defaults: SamplingDefaults = SamplingDefaults()
    kv_cache_dtype: str = ""
    quantization: str = ""


@dataclass(frozen=True, slots=True)
class Hello(Message):
    """First message on every DEALER. ``client_number`` offers a gateway's old number (0: none)."""

    kind: ClassVar[Kind] = Kind.HELLO
    protocol: int
    role: str
    index: int
    epoch: int
    address: str = ""
    client_number: int = 0
    pid: int = 0
    memory: Memory | None = None


@dataclass(frozen=True, slots=True)
class Welcome(Message):
    """Answer to HELLO. To a client only once a worker is ready, so a welcomed process can serve.

    From the scheduler; a tokenizer welcomes gateways with the same message (its own epoch, the scheduler's limits).
    model_digest, model_name and defaults are the workers' (see ``Memory``): what a tokenizer must have, what clients
    ask for, what they get that leave sampling open.
    """

    kind: ClassVar[Kind] = Kind.WELCOME
    epoch: int
    client_number: int
    block_size: int
    num_blocks: int
    max_model_len: int
    vocab_size: int
    eos_ids: list[int]
    model_digest: str
    model_name: str = ""
    defaults: SamplingDefaults = SamplingDefaults()


@dataclass(frozen=True, slots=True)
class HelloRequired(Message):
    """Answer to any other message from an identity that has not said HELLO in this epoch."""

    kind: ClassVar[Kind] = Kind.HELLO_REQUIRED
    epoch: int


@dataclass(frozen=True, slots=True)
class Heartbeat(Message):
    """Sent once a second both ways. ``progress`` only grows while work is done (a step id, requests handled).

    lag: seconds the sender's loop was late. metrics: snapshot of its ``shared.metrics`` registry, empty if unchanged.
    """

    kind: ClassVar[Kind] = Kind.HEARTBEAT
    epoch: int
    progress: int
    lag: float
    metrics: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Goodbye(Message):
    """The sender leaves on purpose: take it off the roster now."""

    kind: ClassVar[Kind] = Kind.GOODBYE
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Fault(Message):
    """The frames you sent are not a message of this protocol, or not one this socket takes."""

    kind: ClassVar[Kind] = Kind.FAULT
    message: str


@dataclass(frozen=True, slots=True)
class Roster(Message):
    """The live tokenizers, to every gateway at each change. Entry i: identity and address of its ROUTER."""

    kind: ClassVar[Kind] = Kind.ROSTER
    version: int
    identities: list[str]
    addresses: list[str]


# ---- a request -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The functions a chat's model may call. tools: as in OpenAI's API, checked.

    choice: auto, none, required, or function; then ``function`` names the one that has to be called. parallel: whether
    an answer may hold several calls.
    """

    tools: list[Any]
    choice: str = "auto"
    function: str = ""
    parallel: bool = True


@dataclass(frozen=True, slots=True)
class Truncation:
    """What is left out of a prompt that is too long.

    side: "left" or "right", where tokens are cut off until there are ``keep`` (0: as many as leave room for the
    answer); or "messages", of a chat: its oldest turns go until the rest fits.
    """

    keep: int = 0
    side: str = "left"


@dataclass(frozen=True, slots=True)
class SubmitText(Message):
    """gateway → tokenizer: a request in words.

    Exactly one of ``messages`` (chat), ``prompt`` and ``prompt_ids`` is given (``endpoint`` says which kind of answer).
    bad_words: as in LogitRules, in words. echo: the answer begins with the prompt. grammar: what the output has to be.
    generated/generated_counts: output ids each sequence already has, when a request is sent a second time.
    priority: lower runs first. tenant: whose share it counts against. arrival: Unix seconds at the gateway.
    timeout: seconds from the scheduler's taking it in until it has to be complete, 0 for any time.
    tools: of a chat that has some. chat_template: a Jinja source to use instead of the server's; empty: none.
    truncation: None: a prompt that is too long is refused. clamp_max_tokens: where the context has no room for
    max_tokens, as many as there is room for are wanted; else that is refused.
    """

    kind: ClassVar[Kind] = Kind.SUBMIT_TEXT
    rid: int
    request_id: str
    endpoint: str  # "chat" or "completions"
    sampling: SamplingParams
    messages: list[Any] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    prompt: str | None = None
    prompt_ids: Int32 = field(default_factory=no_ids)
    add_special_tokens: bool = True
    skip_special_tokens: bool = True
    stop: list[str] = field(default_factory=list)
    include_stop_str_in_output: bool = False
    return_token_ids: bool = False
    priority: int = 0
    cache_salt: str = ""
    tenant: str = ""
    arrival: float = 0.0
    timeout: float = 0.0
    generated: Int32 = field(default_factory=no_ids)
    generated_counts: list[int] = field(default_factory=list)
    bad_words: list[str] = field(default_factory=list)
    echo: bool = False
    tools: ToolUse | None = None
    chat_template: str = ""
    grammar: GrammarSpec | None = None
    truncation: Truncation | None = None
    clamp_max_tokens: bool = False


@dataclass(frozen=True, slots=True)
class SubmitTokens(Message):
    """tokenizer → scheduler: the same request in token ids. ``sampling.max_tokens`` is set by now.

    grammar: what each output has to be, in llguidance's own form, compiled once already; empty: anything.
    """

    kind: ClassVar[Kind] = Kind.SUBMIT_TOKENS
    rid: int
    request_id: str
    sampling: SamplingParams
    prompt_ids: Int32
    priority: int = 0
    cache_salt: str = ""
    tenant: str = ""
    arrival: float = 0.0
    timeout: float = 0.0
    generated: Int32 = field(default_factory=no_ids)
    generated_counts: list[int] = field(default_factory=list)
    grammar: str = ""


@dataclass(frozen=True, slots=True)
class Accept(Message):
    """scheduler → tokenizer → gateway: it will be answered; the gateway sends HTTP headers now.

    prompt_ids is filled by the tokenizer when the request asked for token ids, prompt when it asked for echo.
    """

    kind: ClassVar[Kind] = Kind.ACCEPT
    rid: int
    prompt_tokens: int
    prompt_ids: Int32 = field(default_factory=no_ids)
    prompt: str = ""


@dataclass(frozen=True, slots=True)
class Reject(Message):
    """It will not be answered: an HTTP status and the parts of an OpenAI error body. The rid ends here."""

    kind: ClassVar[Kind] = Kind.REJECT
    rid: int
    status: int
    code: str
    param: str
    message: str
    retry_after: float | None = None


@dataclass(frozen=True, slots=True)
class Cancel(Message):
    """gateway → tokenizer → scheduler. Idempotent; for an unknown rid remembered briefly."""

    kind: ClassVar[Kind] = Kind.CANCEL
    rid: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Stop(Message):
    """tokenizer → scheduler: a stop string was found; the first ``keep`` output tokens count. Idempotent."""

    kind: ClassVar[Kind] = Kind.STOP
    rid: int
    seq: int
    keep: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The one end of a sequence. reason: stop, length, abort or error. ``tokens`` is its output length.

    stop_reason: the stop string, or the stop token id in decimal, or empty (EOS, length). message: why, for error.
    code: a stable word for the error, such as queue_timeout. reasoning_tokens: of these tokens, those of reasoning; the
    tokenizer's to tell, and None where no reasoning is looked for.
    """

    rid: int
    seq: int
    tokens: int
    reason: str
    stop_reason: str = ""
    message: str = ""
    code: str = ""
    reasoning_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Done:
    """The one end of a request; answered by ACK. Token counts are of delivered tokens; times are seconds."""

    rid: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    queue_time: float = 0.0
    prefill_time: float = 0.0
    decode_time: float = 0.0
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Natural logarithms of the model's probabilities (before all rules, temperature and filters) of some tokens.

    Entry j is about the token that ``entries[j]`` names (the message says how): its own logprob ``sampled[j]``, the
    place ``ranks[j]`` it has among all tokens (1: the likeliest), and the likeliest tokens, the likeliest first, in
    ``top_ids`` and ``top``, cut by ``top_counts``.
    """

    entries: list[int]
    sampled: list[float]
    top_counts: list[int]
    top_ids: list[int]
    top: list[float]
    ranks: list[int]


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Of a prompt's tokens from the second on; the entries are positions."""

    rid: int
    logprobs: Logprobs


@dataclass(frozen=True, slots=True)
class Cached:
    """So many tokens of the prompt did not have to be computed, as in the DONE that comes at the end."""

    rid: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Tokens(Message):
    """scheduler → tokenizer, one per step: new ids of all its requests. Entry i: rid, seq, offset, ids by counts.

    logprobs: of ids whose requests asked for them, the entries being places in ``ids``. prompts: those of a prompt come
    with the first token of the first sequence, and again whenever that is sent again. cached: of prompts that were in
    part, with a request's first token, and again whenever any is sent again.
    """

    kind: ClassVar[Kind] = Kind.TOKENS
    step_id: int
    rids: list[int]
    seqs: list[int]
    offsets: list[int]
    counts: list[int]
    ids: Int32
    finished: list[Finished] = field(default_factory=list)
    done: list[Done] = field(default_factory=list)
    logprobs: Logprobs | None = None
    prompts: list[PromptLogprobs] = field(default_factory=list)
    cached: list[Cached] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token in words: its own bytes, which may be part of a character."""

    id: int
    text: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token of a prompt or an output, and the likeliest at its place. logprob: None for a prompt's first.

    offset: characters of that prompt's or output's text before it.
    """

    id: int
    text: bytes
    logprob: float | None
    rank: int
    offset: int
    top: list[Candidate]


@dataclass(frozen=True, slots=True)
class TextLogprobs:
    """Of the last tokens that the entry of this number covers."""

    entry: int
    tokens: list[TokenLogprob]


@dataclass(frozen=True, slots=True)
class PromptText:
    """All tokens of a prompt."""

    rid: int
    tokens: list[TokenLogprob]


@dataclass(frozen=True, slots=True)
class Text(Message):
    """tokenizer → gateway, one per TOKENS: new text of all its requests.

    Entry i: text that starts at character ``offsets[i]`` of the sequence's output, all of it of the channel
    ``channels[i]`` (see ``shared.channels``; offsets count the characters of all channels). ``token_counts[i]`` output
    tokens are covered once this text is delivered. ids, cut by ``id_counts``, holds new ids of requests that asked for
    them, logprobs what is known of these tokens, and prompts the same of prompts, before or with their first text, as
    cached comes.
    """

    kind: ClassVar[Kind] = Kind.TEXT
    rids: list[int]
    seqs: list[int]
    offsets: list[int]
    channels: list[int]
    texts: list[str]
    token_counts: list[int]
    id_counts: list[int]
    ids: Int32
    finished: list[Finished] = field(default_factory=list)
    done: list[Done] = field(default_factory=list)
    logprobs: list[TextLogprobs] = field(default_factory=list)
    prompts: list[PromptText] = field(default_factory=list)
    cached: list[Cached] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Resume(Message):
    """Receiver → sender of a stream: I have everything before ``offset`` (tokens or characters); send the rest."""

    kind: ClassVar[Kind] = Kind.RESUME
    rid: int
    seq: int
    offset: int


@dataclass(frozen=True, slots=True)
class Ack(Message):
    """The terminal messages (DONE) of these requests arrived; forget them."""

    kind: ClassVar[Kind] = Kind.ACK
    rids: list[int]


@dataclass(frozen=True, slots=True)
class Query(Message):
    """A question beside the request path (metrics, status, ledger, tokenize, detokenize). cursor pages long answers."""

    kind: ClassVar[Kind] = Kind.QUERY
    number: int
    what: str
    args: dict[str, Any] = field(default_factory=dict)
    cursor: int = 0


@dataclass(frozen=True, slots=True)
class Reply(Message):
    """Answer to the QUERY of that number. status as in HTTP; next_cursor is 0 on the last page."""

    kind: ClassVar[Kind] = Kind.REPLY
    number: int
    status: int
    body: Any = None
    next_cursor: int = 0


# ---- a step --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RowRules:
    """What few rows need beside the parameters that all have.

    tokens: all the row has so far, prompt and output, where rules or prompt_logprobs look at them, else empty; the
    first ``prompt_tokens`` are the prompt. stop_ids: what is not sampled before ``min_tokens``. prompt_logprobs: as in
    SamplingParams; told of the prompt tokens that each chunk of the row computes the logits of. logprob_ids: these are
    told of with each result in place of the likeliest.
    """

    prompt_tokens: int
    tokens: list[int]
    stop_ids: list[int]
    rules: LogitRules
    prompt_logprobs: int = -1
    logprob_ids: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Run:
    """Output tokens of a row that are given, not sampled, from position ``start`` on, and told of as its results are.

    Each is told of with the chunk that computes the position before it.
    """

    start: int
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class NewRow:
    """A sequence enters a slot. ``length`` tokens of it already have KV in its table (0 for a plain prompt).

    The slot's block table comes in the plan's ``table_*`` columns. seed and position alone decide sampling noise.
    logprobs: how many of the likeliest tokens come with each result of the row, besides the sampled one; -1: none.
    masked: the row is sampled under the MASK of its step.
    run: what a grammar has given it, where that is to be told of.
    ranked: its logprobs rank it among the answers of its request, so they are the model's own on every server.
    """

    slot: int
    generation: int
    length: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    logprobs: int = -1
    rules: RowRules | None = None
    masked: bool = False
    run: Run | None = None
    ranked: bool = False


@dataclass(frozen=True, slots=True)
class Plan(Message):
    """scheduler → every worker rank, the same bytes: what changes in this step. See docs/protocol.md for the order.

    Rows persist in the worker: a row whose prompt is complete and that is not paused decodes one token in every plan,
    its input being the last token of its slot. ``decodes`` is how many such rows the scheduler counts, as a check.
    Chunk i: tokens (cut by ``chunk_lens``) of slot ``chunk_slots[i]`` at positions from ``chunk_starts[i]``; the
    next token is sampled into each slot of ``chunk_samples[i]`` (empty: the prompt goes on in a later plan).
    table_*: whole block tables of new rows and replaced ones. append_*: one more block for a slot.
    release: slots whose sequence is over. pause/resume: slots that skip steps and keep their memory.
    swap_out, swap_in, copies: (source, destination) pairs, flat; done in this order and before any store. swap_out is
    from a block to a host block, 0..host_blocks-1, and swap_in the other way.
    Whoever makes a plan may leave out what is empty; on the wire every column is there.
    """

    kind: ClassVar[Kind] = Kind.PLAN
    step_id: int
    scheduler_epoch: int
    worker_epoch: int
    full: bool
    decodes: int
    new_rows: list[NewRow] = field(default_factory=list)
    chunk_slots: list[int] = field(default_factory=list)
    chunk_starts: list[int] = field(default_factory=list)
    chunk_lens: list[int] = field(default_factory=list)
    chunk_samples: list[list[int]] = field(default_factory=list)
    table_slots: list[int] = field(default_factory=list)
    table_lens: list[int] = field(default_factory=list)
    pause: list[int] = field(default_factory=list)
    resume: list[int] = field(default_factory=list)
    release: list[int] = field(default_factory=list)
    tokens: Int32 = field(default_factory=no_ids)
    table_blocks: Int32 = field(default_factory=no_ids)
    append_slots: Int32 = field(default_factory=no_ids)
    append_blocks: Int32 = field(default_factory=no_ids)
    swap_out: Int32 = field(default_factory=no_ids)
    swap_in: Int32 = field(default_factory=no_ids)
    copies: Int32 = field(default_factory=no_ids)


@dataclass(frozen=True, slots=True)
class Result(Message):
    """worker → scheduler: step done, its KV written. Entry i: the token sampled into slot ``slots[i]``.

    Rank 0 sends slots and ids; every rank sends the checksum of them, so ranks that drift apart are noticed. An id of
    -1: mask and rules together left the row nothing to sample.
    logprobs: of results that asked for them, the entries being places in ``ids``. prompt_logprobs: of prompt tokens,
    the entries being numbers of the plan's chunks, each as often as its chunk tells of tokens, in their order; the last
    one of a chunk is the token at the chunk's end, or the prompt's last where that comes first. Behind them, in the
    same way, those of the row's run, up to the token at the chunk's end.
    timings: seconds by part (``swap_out``, ``swap_in``, ``forward``, ``sample``, ``total``). error: the step failed.
    """

    kind: ClassVar[Kind] = Kind.RESULT
    step_id: int
    scheduler_epoch: int
    worker_epoch: int
    rank: int
    checksum: int
    slots: Int32
    ids: Int32
    timings: dict[str, float] = field(default_factory=dict)
    error: str = ""
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None


def checksum(slots: Int32, ids: Int32) -> int:
    """Of a result: CRC-32 of the little-endian int32 bytes of slots, then ids."""
    return zlib.crc32(ids.astype("<i4").tobytes(), zlib.crc32(slots.astype("<i4").tobytes()))


@dataclass(frozen=True, slots=True)
class Mask(Message):
    """scheduler → every worker rank: what masked rows may sample in a step, while that step's forward pass runs.

    Comes once for each step in which masked rows sample. bits: ceil(vocab_size / 32) words for each of ``slots``; token
    t is allowed where bit t % 32 of word t // 32 is set. A masked row that is not here is over: its result is dropped.
    """

    kind: ClassVar[Kind] = Kind.MASK
    step_id: int
    scheduler_epoch: int
    worker_epoch: int
    slots: list[int]
    bits: Int32


@dataclass(frozen=True, slots=True)
class PlanRequired(Message):
    """worker → scheduler: a step id was skipped (or an epoch changed); only a full plan can follow."""

    kind: ClassVar[Kind] = Kind.PLAN_REQUIRED
    scheduler_epoch: int
    worker_epoch: int
    last_step: int


_LAYOUTS: dict[int, Layout[Any]] = {
    cls.kind: Layout(cls)
    for cls in (
        Hello,
        Welcome,
        HelloRequired,
        Heartbeat,
        Goodbye,
        Fault,
        Roster,
        SubmitText,
        SubmitTokens,
        Accept,
        Reject,
        Cancel,
        Stop,
        Tokens,
        Text,
        Resume,
        Ack,
        Query,
        Reply,
        Plan,
        Result,
        PlanRequired,
        Mask,
    )
}
_HEADERS = {kind: bytes((kind, PROTOCOL_VERSION)) for kind in _LAYOUTS}


def encode(message: Message) -> list[bytes]:
    """The message's frames. Token columns may be any int sequence or array; they leave as little-endian int32."""
    return [_HEADERS[message.kind], *_LAYOUTS[message.kind].encode(message)]


def decode(frames: Sequence[bytes | memoryview]) -> Any:
    """The message in ``frames`` (as received, without a ROUTER's identity frame).

    Raises WireError for anything else: an unknown kind or version, a wrong number of frames, a wrongly typed field.
    """
    if not frames or len(frames[0]) != 2:
        raise WireError("the first frame is not [kind, version]")
    kind, version = frames[0][0], frames[0][1]
    if version != PROTOCOL_VERSION:
        raise WireError(f"protocol version {version} is not {PROTOCOL_VERSION}")
    layout = _LAYOUTS.get(kind)
    if layout is None:
        raise WireError(f"unknown message kind {kind}")
    return layout.decode(frames[1:])
