"""The model from Python, over its own processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import numpy as np
import psutil
import pytest

from services import LLM, RequestOutput, SamplingParams
from shared.errors import ConfigError, RequestError

OPTIONS = {"worker": "null", "max_model_len": 512}
GREEDY = SamplingParams(temperature=0, max_tokens=6)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(**OPTIONS) as llm:  # type: ignore[arg-type]
        yield llm


def generate(llm: LLM, *args: object, **options: object) -> list[RequestOutput]:
    return llm.generate(*args, use_tqdm=False, **options)  # type: ignore[arg-type]


def test_answers_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [f"prompt {number}" for number in range(100)]
    together = generate(llm, prompts, GREEDY)
    assert [one.prompt for one in together] == prompts
    for number in (0, 42, 99):
        (alone,) = generate(llm, prompts[number], GREEDY)
        assert alone.outputs == together[number].outputs
        assert alone.prompt_token_ids == together[number].prompt_token_ids == llm.encode(prompts[number])
    first = together[0].outputs[0]
    assert (first.index, first.finish_reason, len(first.token_ids)) == (0, "length", 6)
    assert llm.decode(first.token_ids) == first.text


def test_prompts_are_text_ids_or_dicts(llm: LLM) -> None:
    ids = llm.encode("The capital")
    forms = ["The capital", ids, list(np.asarray(ids)), {"prompt": "The capital"}, {"prompt_token_ids": ids}]
    found = generate(llm, forms, GREEDY)
    assert [one.outputs for one in found] == [found[0].outputs] * 5
    assert [one.prompt for one in found] == ["The capital", None, None, "The capital", None]
    for form in forms:
        assert generate(llm, form, GREEDY)[0].outputs == found[0].outputs
    with pytest.raises(ValueError, match="prompt 1: neither 'prompt' nor 'prompt_token_ids' is in it"):
        generate(llm, ["a", {"text": "b"}])
    assert generate(llm, []) == []


def test_params_for_all_or_one_for_each(llm: LLM) -> None:
    each = [SamplingParams(max_tokens=1), SamplingParams(max_tokens=2, n=3, seed=1, temperature=1.0)]
    one, three = generate(llm, ["a", "b"], each)
    assert len(one.outputs) == 1 and [len(answer.token_ids) for answer in three.outputs] == [2, 2, 2]
    with pytest.raises(ValueError, match="1 for 2 prompts"):
        generate(llm, ["a", "b"], each[:1])
    with pytest.raises(ValueError, match="top_p: nan is no finite number"):
        generate(llm, "a", SamplingParams(top_p=float("nan")))


def test_logprobs_by_token_id(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=2, prompt_logprobs=1)
    (one,) = generate(llm, "The capital of France", params)
    answer = one.outputs[0]
    assert answer.logprobs is not None and answer.cumulative_logprob is not None
    assert [max(told, key=told.__getitem__) for told in answer.logprobs] == answer.token_ids  # greedy
    assert [len(told) for told in answer.logprobs] == [2] * 4
    chosen = [told[id] for told, id in zip(answer.logprobs, answer.token_ids, strict=True)]
    assert answer.cumulative_logprob == pytest.approx(sum(chosen))
    assert one.prompt_logprobs is not None and one.prompt_logprobs[0] is None
    for id, told in zip(one.prompt_token_ids[1:], one.prompt_logprobs[1:], strict=True):
        assert told is not None and id in told


def test_chat(llm: LLM) -> None:
    hello = [{"role": "user", "content": "hello"}]
    other = [{"role": "system", "content": "be brief"}, *hello]
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=1)
    both = llm.chat([hello, other], params, use_tqdm=False)
    (alone,) = llm.chat(hello, params, use_tqdm=False)
    assert alone.outputs == both[0].outputs != both[1].outputs and both[1].prompt == other
    answer = alone.outputs[0]
    assert answer.message is not None and answer.message["content"] == answer.text
    assert answer.logprobs is not None and [next(iter(told)) for told in answer.logprobs] == answer.token_ids


UNIT = {"type": "object", "properties": {"unit": {"enum": ["C", "F"]}}, "required": ["unit"]}
UNIT["additionalProperties"] = False
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": UNIT}} for name in ("get_weather", "get_temperature")
]


def test_chats_with_tools(llm: LLM) -> None:
    talks = [[{"role": "user", "content": text}] for text in ("hello", "and you?")]
    params = SamplingParams(temperature=1, seed=2, max_tokens=100)
    named = {"type": "function", "function": {"name": "get_temperature"}}
    for choice, names in (("required", ("get_weather", "get_temperature")), (named, ("get_temperature",))):
        options = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
        for one in llm.chat(talks, params, use_tqdm=False, **options):  # type: ignore[arg-type]
            message = one.outputs[0].message
            assert message is not None and message["content"] is None
            (call,) = message["tool_calls"]
            assert call["function"]["name"] in names
            jsonschema.validate(json.loads(call["function"]["arguments"]), UNIT)
            assert one.outputs[0].finish_reason == ("tool_calls" if choice == "required" else "stop")
    result = {"role": "tool", "tool_call_id": call["id"], "content": "21"}
    (after,) = llm.chat([*talks[0], message, result], GREEDY, tools=TOOLS, tool_choice="none", use_tqdm=False)
    assert after.outputs[0].message is not None and "tool_calls" not in after.outputs[0].message
    with pytest.raises(RequestError, match="tool_choice"):
        llm.chat(talks[0], GREEDY, tools=TOOLS, tool_choice="sometimes", use_tqdm=False)


def test_outputs_of_a_form(llm: LLM) -> None:
    wish = {"type": "json_schema", "json_schema": {"name": "unit", "schema": UNIT}}
    talk = [{"role": "user", "content": "hello"}]
    (one,) = llm.chat(talk, SamplingParams(max_tokens=50), response_format=wish, use_tqdm=False)
    jsonschema.validate(json.loads(one.outputs[0].text), UNIT)
    each = [SamplingParams(structured_outputs={"choice": ["red", "blue"]}), SamplingParams(max_tokens=2)]
    held, free = llm.chat([talk, talk], each, use_tqdm=False)
    assert held.outputs[0].text in ("red", "blue") and free.outputs[0].finish_reason == "length"
    (year,) = generate(llm, "In", SamplingParams(structured_outputs={"regex": "[0-9]{4}"}))
    assert len(year.outputs[0].text) == 4 and year.outputs[0].text.isdecimal()
    with pytest.raises(RequestError, match=r'response_format\.json_schema\.schema: "not" is not supported'):
        bad = {"type": "json_schema", "json_schema": {"name": "bad", "schema": {"not": {}}}}
        llm.chat(talk, response_format=bad, use_tqdm=False)


def test_how_a_chat_becomes_a_prompt(llm: LLM) -> None:
    talk = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "Well"}]
    (going_on,) = llm.chat(talk, GREEDY, add_generation_prompt=False, continue_final_message=True, use_tqdm=False)
    assert llm.decode(going_on.prompt_token_ids).endswith("Well")
    (closed,) = llm.chat(talk, GREEDY, add_generation_prompt=False, use_tqdm=False)
    assert len(closed.prompt_token_ids) > len(going_on.prompt_token_ids)
    with pytest.raises(RequestError, match="chat_template"):
        llm.chat(talk, GREEDY, chat_template="{{ messages }}", use_tqdm=False)


def test_a_prompt_that_cannot_be_answered(llm: LLM) -> None:
    prompts = ["a", "b " * 5000, "c"]
    with pytest.raises(RequestError, match=r"prompt 1: This model's maximum context length is 512") as caught:
        generate(llm, prompts, GREEDY)
    assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
    kept = generate(llm, prompts, GREEDY, on_error="keep")
    assert [len(one.outputs) for one in kept] == [1, 0, 1] and kept[1].prompt == prompts[1]
    assert kept[1].error is not None and "512" in kept[1].error and kept[0].error is None
    with pytest.raises(RequestError, match=r"prompt 0: temperature: .* less than or equal to 2, got 3"):
        generate(llm, "a", SamplingParams(temperature=3))


DEEP: list[object] = []
for _ in range(300):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("odd", "field", "why"),
    [("half \ud800", "prompt", "surrogates"), (DEEP, "extra", "Recursion limit"), ({1, 2}, "extra", "set")],
)
def test_a_prompt_that_json_cannot_say(llm: LLM, odd: object, field: str, why: str) -> None:
    prompts = ["a", odd if field == "prompt" else "b", "c"]
    params = [GREEDY, SamplingParams(extra_body={} if field == "prompt" else {"extra": odd}), GREEDY]
    with pytest.raises(RequestError, match=rf"prompt 1: {field}: cannot be sent as JSON: .*{why}"):
        generate(llm, prompts, params)
    kept = generate(llm, prompts, params, on_error="keep")
    assert [len(one.outputs) for one in kept] == [1, 0, 1]
    assert kept[1].error is not None and kept[1].error.startswith(f"{field}: cannot be sent as JSON")
    messages = [[{"role": "user", "content": one}] for one in ("a", odd)]
    chats = llm.chat(messages, GREEDY, use_tqdm=False, on_error="keep")
    assert [one.error is None for one in chats] == [True, False]
    with pytest.raises(RequestError, match="prompt: cannot be sent as JSON"):
        llm.encode("half \ud800")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seqs": 0}, "--max-num-seqs is 0, below its minimum of 1"),
        ({"colour": "red"}, "--colour"),
        ({"model": "/no/such/model"}, "no such file or folder"),
    ],
)
def test_what_cannot_work_raises_in_one_line(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        LLM(**{**OPTIONS, **options})  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


SCRIPT = """
import sys, time
from services import LLM, SamplingParams
llm = LLM(worker="null", max_model_len=512)
print("ready", flush=True)
{then}
"""


def run_script(then: str, **options: object) -> subprocess.Popen[str]:
    code = SCRIPT.format(then=then)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def wait_gone(processes: list[psutil.Process], timeout: float) -> None:
    _, alive = psutil.wait_procs(processes, timeout=timeout)
    for left in alive:
        left.kill()
    assert not alive


def test_nothing_outlives_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed as hard as can be, its end reaches all processes; an exception or a plain end leaves no trace."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    killed, raising = run_script("time.sleep(60)"), run_script("1 / 0")
    processes = [psutil.Process(killed.pid), *psutil.Process(killed.pid).children(recursive=True)]
    assert len(processes) >= 6
    killed.send_signal(signal.SIGKILL)
    wait_gone(processes, 10)
    _, errors = raising.communicate(timeout=30)
    assert raising.returncode == 1 and "ZeroDivisionError" in errors
    killed.communicate()
    LLM(**OPTIONS).close()  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []  # what a kill left was swept by the next


def test_a_server_that_dies_is_told() -> None:
    before = psutil.Process().children()
    llm = LLM(**OPTIONS)  # type: ignore[arg-type]
    try:
        (launcher,) = set(psutil.Process().children()) - set(before)
        (worker,) = [child for child in launcher.children() if "worker" in child.cmdline()]
        os.kill(worker.pid, signal.SIGKILL)
        deadline = time.monotonic() + 20
        with pytest.raises(Exception, match="worker 0 was killed by signal 9") as caught:
            while time.monotonic() < deadline:
                generate(llm, "a", GREEDY)
        assert type(caught.value).__name__ in ("ServerError", "RequestError")
    finally:
        llm.close()


def test_importing_services_is_light() -> None:
    """Every process imports this package: what only programs need is loaded when it is asked for."""
    code = "import services, sys; print(*sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"aiohttp", "torch", "transformers", "tqdm", "services.offline"} & set(loaded)
    code = "from services import LLM; import sys; print(*sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "transformers", "starlette", "kernels"} & set(loaded)
    with pytest.raises(ImportError, match="LLMs"):
        from services import LLMs  # type: ignore[attr-defined]  # noqa: F401
