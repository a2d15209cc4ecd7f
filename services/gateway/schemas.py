"""What request bodies may hold, as strict models; errors name the field by its dotted path, the value and the limit."""

from __future__ import annotations

import secrets
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field, PlainValidator, ValidationError, ValidationInfo

from services.gateway.fields import (
    GENERATION_ONLY_AT,
    GENERATION_WITHOUT_EFFECT,
    NAME,
    drop_without_effect,
    shown,
    unknown_field,
)
from services.gateway.model import Body, Limits, Model, invalid, limits_of
from services.gateway.structured import AnyResponseFormat, AnySchema, Choices, StructuredOutputs, Text, grammar_of
from services.gateway.token_ids import AllowedIds, LogitBias, LogprobIds, Prompts, StopIds
from shared.errors import RequestError
from shared.grammar import GrammarSpec
from shared.sampling import LogitRules, SamplingDefaults, SamplingParams
from shared.wire import Truncation

T = TypeVar("T")
MAX_N = 128
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_BAD_WORDS = 256
GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
LIKELIEST = 1e-9  # of top_p: no share is so small that it has not the likeliest token, which is what 0 asks for
COMPLETION_MAX_TOKENS = 16  # OpenAI's default for completions


Count = Annotated[int, Field(ge=0)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]


def _stops(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


EarlyStopping = bool | Literal["never"] | None


def _early_stopping(value: Any) -> EarlyStopping:
    """By hand, as a Literal takes 0 for False."""
    if value is None or isinstance(value, bool):
        return value
    if value == "never":
        return "never"
    raise invalid(f"should be true, false or 'never', got {shown(value)}")


def _count_of_logprobs(value: Any, info: ValidationInfo) -> int | None:
    if value is None or value is False:
        return None
    limit = limits_of(info).max_logprobs
    if type(value) is not int or not 0 <= value <= limit:
        raise invalid(f"should be an integer from 0 to {limit} (max_logprobs of this server), got {shown(value)}")
    return value


LogprobCount = Annotated[
    int | None, PlainValidator(_count_of_logprobs, json_schema_input_type=Count | Literal[False] | None)
]


def _request_id(value: Any) -> str | None:
    if value is not None and not (isinstance(value, str) and NAME.fullmatch(value)):
        raise invalid(f"should be 1 to 128 visible ASCII characters, got {shown(value)}")
    return value


def _kept_tokens(value: Any, info: ValidationInfo) -> int | None:
    limit = limits_of(info).max_model_len
    if value is not None and (type(value) is not int or not (value == -1 or 1 <= value <= limit)):
        raise invalid(f"should be -1 or an integer from 1 to the model's context of {limit} tokens, got {shown(value)}")
    return value


RequestId = Annotated[
    str | None,
    PlainValidator(_request_id, json_schema_input_type=Annotated[str, Field(pattern=f"^{NAME.pattern}$")] | None),
]
KeptTokens = Annotated[
    int | None, PlainValidator(_kept_tokens, json_schema_input_type=Annotated[int, Field(ge=-1)] | None)
]


class Asked(Body):
    """A request that generates."""

    model: str | None = None
    stream: bool | None = None
    request_id: RequestId = None

    @property
    def tokens_per_event(self) -> int:
        """How many tokens of a sequence an event waits for, but the first and the last one."""
        return 1

    def check(self) -> None:
        """Rules over several fields. Raises RequestError."""


class StreamOptions(Model):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class Sampled(Asked):
    """How tokens are chosen, as every API may say it; also vLLM's fields where an API has none of its own."""

    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Annotated[
        list[StopString] | None, BeforeValidator(_stops, json_schema_input_type=str | list[StopString] | None)
    ] = Field(None, max_length=MAX_STOPS)
    stop_token_ids: StopIds = Field(default_factory=list)
    ignore_eos: bool | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=1000)
    typical_p: float | None = Field(None, gt=0, le=1)
    min_tokens: int | None = Field(None, ge=0)
    timeout: float | None = Field(None, gt=0, le=86400)
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)
    cache_salt: str | None = Field(None, min_length=1, max_length=1024)
    logit_bias: LogitBias = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    structured_outputs: StructuredOutputs | None = None


class GenerationRequest(Sampled):
    """The fields that chat and text completions share."""

    without_effect = GENERATION_WITHOUT_EFFECT
    only_at = GENERATION_ONLY_AT

    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=MAX_N)
    best_of: int | None = Field(None, ge=1, le=MAX_N)
    use_beam_search: bool | None = None
    length_penalty: float | None = Field(None, ge=-100, le=100)
    early_stopping: Annotated[EarlyStopping, PlainValidator(_early_stopping, json_schema_input_type=EarlyStopping)] = (
        None
    )
    max_tokens: int | None = Field(None, ge=1)
    allowed_token_ids: AllowedIds = None
    bad_words: list[StopString] | None = Field(None, max_length=MAX_BAD_WORDS)
    prompt_logprobs: LogprobCount = None
    logprob_token_ids: LogprobIds = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: KeptTokens = None
    truncation_side: Literal["left", "right"] | None = None
    stream_interval: int | None = Field(None, ge=1)
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: AnyResponseFormat | None = None
    guided_json: AnySchema = None
    guided_regex: Text | None = None
    guided_choice: Choices | None = None
    guided_grammar: Text | None = None

    @property
    def grammar(self) -> GrammarSpec | None:
        """What the output has to be. Raises RequestError when two fields ask for it."""
        guided = {name: getattr(self, name) for name in GUIDED}
        return grammar_of(self.response_format, self.structured_outputs, guided)

    @property
    def output_limit(self) -> int | None:
        return self.max_tokens

    @property
    def tokens_per_event(self) -> int:
        return self.stream_interval or 1

    @property
    def truncation(self) -> Truncation | None:
        if self.truncate_prompt_tokens is None:
            return None
        return Truncation(max(self.truncate_prompt_tokens, 0), self.truncation_side or "left")

    @property
    def wants_output(self) -> bool:
        """False: only the prompt is wanted, back and with its logprobs."""
        return True

    @property
    def echoes(self) -> bool:
        return False

    @property
    def wants_prompt_text(self) -> bool:
        return self.echoes

    @property
    def predicts(self) -> bool:
        return False

    @property
    def top_wanted(self) -> int:
        """How many likely tokens are asked for beside each output token; -1: not even its own logprob."""
        raise NotImplementedError

    @property
    def output_logprobs(self) -> int:
        """As in SamplingParams."""
        return self.top_wanted if self.logprob_token_ids is None else len(self.logprob_token_ids)

    def check(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options: only allowed when stream is true", param="stream_options")
        n = self.n or 1
        if self.best_of is not None and self.best_of < n:
            raise RequestError(f"best_of: {self.best_of} is below n ({n})", code="invalid_value", param="best_of")
        if self.stream and ((self.best_of or n) > n or self.use_beam_search):
            name = "use_beam_search" if self.use_beam_search else "best_of"
            message = f"{name}: cannot be streamed, because only the end tells which tokens are the answer"
            raise RequestError(message, code="unsupported_value", param=name)
        if self.stream and self.prompt_logprobs is not None:
            message = "prompt_logprobs: cannot be streamed"
            raise RequestError(message, code="unsupported_value", param="prompt_logprobs")
        limit = self.output_limit
        if limit is not None and (self.min_tokens or 0) > limit:
            message = f"min_tokens: {self.min_tokens} is above max_tokens ({limit})"
            raise RequestError(message, code="invalid_value", param="min_tokens")
        if self.logprob_token_ids is not None and self.top_wanted not in (-1, 0, len(self.logprob_token_ids)):
            raise RequestError(
                f"logprob_token_ids: {len(self.logprob_token_ids)} ids take the place of the likeliest tokens, "
                f"of which {self.top_wanted} are asked for",
                code="invalid_value",
                param="logprob_token_ids",
            )
        if self.grammar is not None and self.use_beam_search:
            message = f"{self.grammar.param}: does not go with use_beam_search"
            raise RequestError(message, code="unsupported_value", param=self.grammar.param)
        self._check_beams()

    def _check_beams(self) -> None:
        if self.use_beam_search:
            for name, value, neutral in (
                ("temperature", self.temperature, (0,)),
                ("top_p", self.top_p, (1,)),
                ("top_k", self.top_k, (0, -1)),
                ("min_p", self.min_p, (0,)),
                ("best_of", self.best_of, (self.n or 1,)),
                ("presence_penalty", self.presence_penalty, (0,)),
                ("frequency_penalty", self.frequency_penalty, (0,)),
                ("repetition_penalty", self.repetition_penalty, (1,)),
                ("typical_p", self.typical_p, (1,)),
                ("min_tokens", self.min_tokens, (0,)),
                ("logit_bias", self.logit_bias, ({},)),
                ("allowed_token_ids", self.allowed_token_ids, ()),
                ("bad_words", self.bad_words, ([],)),
                ("prompt_logprobs", self.prompt_logprobs, ()),
                ("logprob_token_ids", self.logprob_token_ids, ()),
                ("echo", self.echoes and self.top_wanted >= 0, (False,)),
            ):
                if value is not None and value not in neutral:
                    message = f"{name}: {value} does not go with use_beam_search, which takes the likeliest"
                    raise RequestError(message, code="unsupported_value", param=name)
            return
        for name, set_ in (
            ("length_penalty", self.length_penalty not in (None, 1)),
            ("early_stopping", bool(self.early_stopping)),
        ):
            if set_:
                raise RequestError(f"{name}: only with use_beam_search", code="unsupported_value", param=name)

    def sampling(self, limits: Limits) -> SamplingParams:
        seed = secrets.randbits(63) if self.seed is None else self.seed % 2**63
        # A search takes the likeliest, so defaults for sampling say nothing about it.
        defaults = SamplingDefaults(temperature=0.0) if self.use_beam_search else limits.defaults
        return SamplingParams(
            temperature=_first(self.temperature, defaults.temperature, 1.0),
            top_p=max(_first(self.top_p, defaults.top_p, 1.0), LIKELIEST),
            top_k=min(max(_first(self.top_k, defaults.top_k, 0), 0), limits.vocab_size),
            min_p=_first(self.min_p, defaults.min_p, 0.0),
            seed=seed,
            n=self.n or 1,
            max_tokens=self.output_limit if self.wants_output else 1,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=bool(self.ignore_eos),
            best_of=self.best_of or 0,
            use_beam_search=bool(self.use_beam_search),
            length_penalty=1.0 if self.length_penalty is None else self.length_penalty,
            early_stopping=str(self.early_stopping or False).lower(),
            logprobs=self.output_logprobs,
            prompt_logprobs=self._prompt_logprobs,
            rules=self._rules(defaults),
            logprob_token_ids=self.logprob_token_ids or [],
        )

    @property
    def _prompt_logprobs(self) -> int:
        wanted = -1 if self.prompt_logprobs is None else self.prompt_logprobs
        return max(wanted, min(self.output_logprobs, 0), self.top_wanted) if self.echoes else wanted

    def _rules(self, defaults: SamplingDefaults) -> LogitRules | None:
        """None when nothing is asked for, so that most requests carry none."""
        bias = self.logit_bias or {}
        rules = LogitRules(
            presence_penalty=_first(self.presence_penalty, defaults.presence_penalty, 0.0),
            frequency_penalty=_first(self.frequency_penalty, defaults.frequency_penalty, 0.0),
            repetition_penalty=_first(self.repetition_penalty, defaults.repetition_penalty, 1.0),
            typical_p=self.typical_p or 1.0,
            min_tokens=self.min_tokens or 0,
            logit_bias_ids=list(bias),
            logit_bias=list(bias.values()),
            allowed_token_ids=self.allowed_token_ids or [],
        )
        return None if rules == LogitRules() else rules


def _first(*values: T | None) -> T:
    """The first that is not None; the last is none."""
    return next(value for value in values if value is not None)


class CompletionRequest(GenerationRequest):
    prompt: Prompts
    echo: bool | None = None
    logprobs: LogprobCount = None
    max_tokens: int | None = Field(None, ge=0)

    @property
    def output_limit(self) -> int | None:
        return COMPLETION_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def wants_output(self) -> bool:
        return self.max_tokens != 0

    @property
    def echoes(self) -> bool:
        return bool(self.echo)

    @property
    def top_wanted(self) -> int:
        return -1 if self.logprobs is None else self.logprobs

    def check(self) -> None:
        super().check()
        if not self.wants_output and not self.echo:
            message = "max_tokens: 0 is below 1, which is the least without echo"
            raise RequestError(message, code="invalid_value", param="max_tokens")


B = TypeVar("B", bound=Body)


def validate(model: type[B], body: dict[str, Any], limits: Limits) -> B:
    """``body`` as ``model``. Raises RequestError 400 that names the first field at fault."""
    kept = drop_without_effect(body, model.model_fields, model.without_effect, model.only_at)
    try:
        return model.model_validate(kept, context=limits)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    place = list(map(str, first["loc"]))
    if first["type"] == "unknown_field":
        raise unknown_field(".".join([*place, first["msg"]]))
    path = ".".join(place)
    if first["type"] == "missing":
        raise RequestError(f"{path}: this field is required", code="missing_required_parameter", param=path)
    if first["type"] == "int_type" and isinstance(first["input"], float) and abs(first["input"]) >= 2**63:
        # The JSON parser makes a float of an integer that is too long.
        raise RequestError(f"{path}: should be an integer of at most 64 bits", code="invalid_value", param=path)
    message = first["msg"] if first["type"] == "invalid" else f"{first['msg']}, got {shown(first['input'])}"
    raise RequestError(f"{path}: {message}", code="invalid_value", param=path)
