"""The scheduler and null workers as real processes, and clients that play tokenizer and gateway over ipc."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

from services.worker.executor import StepOutput
from services.worker.null import DEFAULT_EOS, DEFAULT_VOCAB, NullExecutor
from shared.codec import int32, no_ids
from shared.ids import COUNTER_BITS, Identity
from shared.metrics import render
from shared.sampling import SamplingParams
from shared.transport import Endpoint, Security, connect_dealer
from shared.wire import (
    PROTOCOL_VERSION,
    Accept,
    Cancel,
    Fault,
    Goodbye,
    Hello,
    HelloRequired,
    Kind,
    Plan,
    Query,
    Reject,
    Result,
    Resume,
    Roster,
    Stop,
    SubmitTokens,
    Welcome,
    checksum,
    decode,
    encode,
)
from tests.services.scheduler.process import Client, Server, running
from tests.services.scheduler.simulation import Simulation

RID = 1 << COUNTER_BITS


def wait_idle(client: Client) -> dict[str, Any]:
    """The status once nothing is referenced."""

    def idle() -> dict[str, Any] | None:
        status: dict[str, Any] = client.query("status").body
        return status if not status["requests"] and not status["steps_in_flight"] else None

    status: dict[str, Any] = client.wait_for(idle)
    assert (status["running"], status["waiting"], status["blocks_used"]) == (0, 0, 0)
    return status


def test_many_requests_run_and_leave_nothing_behind(tmp_path: Path) -> None:
    rng = random.Random(1)
    with running(tmp_path, "--max-num-seqs=16", worker_options=("--num-gpu-blocks-override=64",)) as (_, client):
        wanted = {}
        for rid in range(RID, RID + 60):
            wanted[rid] = rng.randint(1, 60)
            client.submit(rid, [rng.randrange(DEFAULT_VOCAB) for _ in range(rng.randint(1, 80))], wanted[rid])
        client.wait_for(lambda: len(client.done) == 60)
        for rid, tokens in wanted.items():
            assert len(client.outputs[rid, 0]) == client.finished[rid, 0].tokens == tokens
            assert not set(client.outputs[rid, 0]) & set(DEFAULT_EOS)
        wait_idle(client)


def test_a_cancelled_client_has_its_blocks_back_within_a_second(tmp_path: Path) -> None:
    with running(tmp_path, worker_options=("--null-step-ms=20",)) as (_, client):
        client.submit(RID, [5] * 40, 2000)
        client.wait_for(lambda: client.outputs.get((RID, 0)))
        client.send(Cancel(RID))
        started = time.monotonic()
        wait_idle(client)
        assert time.monotonic() - started < 1
        assert client.finished[RID, 0].reason == "abort"


def test_refusals_name_the_limit(tmp_path: Path) -> None:
    with running(tmp_path, worker_options=("--num-gpu-blocks-override=11",)) as (_, client):
        client.submit(RID, [5] * 150, 11)
        reject = client.wait_for(lambda: client.last(Reject))
        assert (reject.status, reject.code) == (400, "context_length_exceeded")
        assert "160 tokens" in reject.message
        assert "161 tokens" in reject.message
        client.submit(RID, [5] * 150, 10)
        assert client.wait_for(lambda: client.last(Accept)).prompt_tokens == 150
        client.wait_for(lambda: client.done)


def test_six_requests_in_three_places(tmp_path: Path) -> None:
    """The plan log shows each place refilled in the very next plan while the 50-token request never pauses."""
    path = tmp_path / "plans.jsonl"
    with running(tmp_path, "--max-num-seqs=3", f"--plan-log={path}") as (_, client):
        lengths = {RID + place: tokens for place, tokens in enumerate((5, 50, 3, 4, 6, 2))}
        for rid, tokens in lengths.items():
            client.submit(rid, [9] * 4, tokens)
        client.wait_for(lambda: len(client.done) == 6)
    plans = [json.loads(line) for line in path.read_text().splitlines()]
    active = [{*plan["decodes"], *(chunk[0] for chunk in plan["chunks"])} for plan in plans]
    long = f"{RID + 1}/0"
    first = next(index for index, names in enumerate(active) if long in names)
    assert [long in names for names in active[first : first + 50]] == [True] * 50
    queue = [f"{rid}/0" for rid in lengths]
    for before, plan, names in zip(active, plans[1:], active[1:], strict=False):
        gone = before - names
        if gone and (waiting := [name for name in queue if all(name not in a for a in active[: plan["step"] - 1])]):
            assert set(plan["new"]) >= set(waiting[: len(gone)]), f"a place stood empty in step {plan['step']}"
    assert sorted(name for plan in plans for name in plan["new"]) == queue


def test_two_ranks_get_the_same_plan_bytes(tmp_path: Path) -> None:
    """Two raw DEALERs play the ranks and answer as one executor would."""
    server = Server(tmp_path)
    client = Client(server.base)
    executor = Simulation(num_blocks=64).executor
    context = zmq.Context()
    address = Endpoint(server.base).workers
    ranks = [connect_dealer(context, Identity.fresh("worker", i).encode(), address, Security()) for i in range(2)]
    try:
        server.scheduler = server.spawn("scheduler", f"--bind={server.base}", "--tensor-parallel-size=2")
        for index, rank in enumerate(ranks):
            rank.send_multipart(encode(Hello(PROTOCOL_VERSION, "worker", index, 10 + index, memory=executor.memory)))
        client.join()
        client.submit(RID, [5] * 20, 9)
        received: list[list[list[bytes]]] = [[], []]
        outputs: dict[int, StepOutput] = {}
        deadline = time.monotonic() + 10
        while not client.done and time.monotonic() < deadline:
            client.pump(0.01)
            for index, rank in enumerate(ranks):
                while rank.poll(0):
                    frames = rank.recv_multipart()
                    if frames[0][0] == Kind.PLAN:
                        received[index].append(frames)
                        plan = decode(frames)
                        assert plan.worker_epoch == 10
                        rank.send_multipart(encode(answer(executor, outputs, index, plan)))
        assert client.done
        assert len(received[0]) == 9
        assert received[0] == received[1]
    finally:
        client.close()
        for rank in ranks:
            rank.close(0)
        context.term()
        server.kill()


def answer(executor: NullExecutor, outputs: dict[int, StepOutput], rank: int, plan: Plan) -> Result:
    """What rank ``rank`` answers. One executor runs each plan once, for whichever rank is first."""
    if plan.step_id not in outputs:
        outputs[plan.step_id] = executor.execute(plan)
    slots, ids = outputs[plan.step_id].slots, outputs[plan.step_id].ids
    sent = (slots, ids) if rank == 0 else (no_ids(), no_ids())
    epochs = (plan.scheduler_epoch, plan.worker_epoch)
    return Result(plan.step_id, *epochs, rank, checksum(slots, ids), *sent)


def test_a_silent_rank_is_named_and_ends_open_streams(tmp_path: Path) -> None:
    with running(tmp_path, ranks=2, worker_options=("--null-step-ms=5",)) as (server, client):
        client.submit(RID, [5] * 20, 2000)
        client.wait_for(lambda: client.outputs.get((RID, 0)))
        server.workers[1].send_signal(signal.SIGSTOP)
        client.wait_for(lambda: client.done, patience=8)
        finished = client.finished[RID, 0]
        assert finished.reason == "error"
        assert re.fullmatch(r"worker rank 1 has been silent for [345]\.\d s", finished.message)
        assert server.scheduler is not None
        assert server.scheduler.wait(5) == 1
        assert server.workers[0].wait(2) == 1  # told GOODBYE with that reason


def test_a_worker_that_is_asked_to_go_is_no_error(tmp_path: Path) -> None:
    """At the end of a server any of its processes may be the first. Its neighbours go too, as wanted."""
    with running(tmp_path, ranks=2) as (server, client):
        client.submit(RID, [5] * 20, 2000)
        client.wait_for(lambda: client.outputs.get((RID, 0)))
        server.workers[1].terminate()
        client.wait_for(lambda: client.done)
        assert client.finished[RID, 0].message == "worker rank 1 has left: it shuts down"
        assert server.scheduler is not None and server.scheduler.wait(5) == 1  # nobody can be served any more
        assert [worker.wait(5) for worker in server.workers] == [0, 0]
        logs = server.log("scheduler") + server.log("worker")
        assert "INFO scheduler: ending: worker rank 1 has left: it shuts down" in logs and "ERROR" not in logs


def test_a_long_step_is_no_silence(tmp_path: Path) -> None:
    with running(tmp_path, worker_options=("--null-step-ms=5000",)) as (_, client):
        client.submit(RID, [5] * 20, 1)
        client.wait_for(lambda: client.done)
        assert client.finished[RID, 0].reason == "length"


def test_a_step_without_result_names_the_missing_rank(tmp_path: Path) -> None:
    options = ("--null-step-ms=60000",)
    with running(tmp_path, "--step-timeout=1", worker_options=options) as (server, client):
        client.submit(RID, [5] * 20, 5)
        client.wait_for(lambda: client.done)
        assert client.finished[RID, 0].message.startswith("worker rank 0 gave no result for step 1 in ")
        assert server.scheduler is not None
        assert server.scheduler.wait(5) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_open_streams_with_a_reason(tmp_path: Path, number: signal.Signals) -> None:
    with running(tmp_path, worker_options=("--null-step-ms=20",)) as (server, client):
        client.submit(RID, [5] * 20, 2000)
        client.submit(RID + 1, [5] * 20, 2000)
        client.wait_for(lambda: len(client.outputs) == 2)
        assert server.scheduler is not None
        server.scheduler.send_signal(number)
        client.wait_for(lambda: len(client.done) == 2)
        assert {f.message for f in client.finished.values()} == {"the server is shutting down"}
        assert server.scheduler.wait(5) == 0
        assert server.workers[0].wait(5) == 0


def test_a_worker_without_scheduler_ends_by_itself(tmp_path: Path) -> None:
    with running(tmp_path) as (server, _):
        assert server.scheduler is not None
        server.scheduler.kill()
        assert server.workers[0].wait(15) == 1
        assert "the scheduler has been silent for" in server.log("worker")


def test_garbage_is_counted_and_answered_and_nothing_dies(tmp_path: Path) -> None:
    rng = random.Random(7)
    samples = [
        encode(Hello(PROTOCOL_VERSION, "tokenizer", 0, 1, address="ipc:///x")),
        encode(Stop(1, 0, 3)),
        encode(Query(1, "status")),
        encode(Cancel(5)),
        encode(Simulation().message(3, [1, 2, 3], 4)),
    ]
    with running(tmp_path) as (server, client):
        context = zmq.Context()
        strangers = [
            (connect_dealer(context, identity, address, Security()), joins)
            for address in (Endpoint(server.base).clients, Endpoint(server.base).workers)
            for identity, joins in (
                (b"\xff\x00noise", False),
                (Identity.fresh("gateway", 1).encode(), True),
                (Identity.fresh("worker", 70).encode(), True),
            )
        ]
        answers = 0
        for sock, joins in strangers:
            role = sock.getsockopt(zmq.IDENTITY).decode(errors="replace").split(":")[0]
            if joins:
                sock.send_multipart(encode(Hello(PROTOCOL_VERSION, role, 1, 1)))
            for _ in range(300):
                frames = list(rng.choice(samples))
                place = rng.randrange(len(frames))
                match rng.randrange(4):
                    case 0:
                        frames[place] = rng.randbytes(rng.randrange(40))
                    case 1:
                        raw = bytearray(frames[place] or b"x")
                        raw[rng.randrange(len(raw))] = rng.randrange(256)
                        frames[place] = bytes(raw)
                    case 2:
                        frames = frames[:place] or [b""]
                    case 3:
                        frames.append(rng.randbytes(3))
                sock.send_multipart(frames)
            deadline = time.monotonic() + 10
            while time.monotonic() < deadline and sock.poll(500):
                answers += isinstance(decode(sock.recv_multipart()), (Fault, HelloRequired, Reject))
            sock.close(0)
        context.term()
        assert answers > 1000
        page = render(client.query("metrics").body, {}).decode()
        malformed = next(line for line in page.splitlines() if line.startswith("quire:malformed_messages_total"))
        assert float(malformed.split()[1]) > 500
        assert server.log("scheduler").count("malformed message") < 60
        client.submit(RID, [5] * 20, 5)
        client.wait_for(lambda: RID in client.done)
        assert client.finished[RID, 0].tokens == 5
        wait_idle(client)


def test_gateways_get_numbers_and_the_roster(tmp_path: Path) -> None:
    with running(tmp_path) as (server, tokenizer):
        gateway, other = Client(server.base, "gateway", 0), Client(server.base, "gateway", 1)
        late = Client(server.base, "tokenizer", 1)
        try:
            numbers = [gateway.join().client_number, other.join().client_number, gateway.join().client_number]
            assert numbers == [1, 2, 1]
            roster = gateway.wait_for(lambda: gateway.last(Roster))
            assert roster.identities == [tokenizer.identity.decode()]
            gateway.send(Resume(RID, 0, 0))  # nothing that only a tokenizer's end would clear away may come of it
            assert "not from a gateway" in gateway.wait_for(lambda: gateway.last(Fault)).message
            late.join()
            roster = gateway.wait_for(lambda: (r := gateway.last(Roster)) and len(r.identities) == 2 and r)
            assert roster.addresses == [tokenizer.hello().address, late.hello().address]
            late.submit(RID, [5] * 3, 2000)
            late.wait_for(lambda: late.last(Accept))
            late.send(Goodbye("scaled down"))
            gateway.wait_for(lambda: len(gateway.last(Roster).identities) == 1)
            wait_idle(tokenizer)
            late.messages.clear()
            late.send(Cancel(RID))
            late.wait_for(lambda: late.last(HelloRequired))
        finally:
            for client in (gateway, other, late):
                client.close()


def test_a_silent_gateway_has_its_requests_cancelled(tmp_path: Path) -> None:
    with running(tmp_path, worker_options=("--null-step-ms=20",)) as (server, client):
        gateway = Client(server.base, "gateway")
        try:
            rid = gateway.join().client_number << COUNTER_BITS | 1
            client.submit(rid, [5] * 3, 2000)
            client.wait_for(lambda: client.done, patience=8)  # the gateway says nothing any more
            assert client.finished[rid, 0].reason == "abort"
        finally:
            gateway.close()


def test_metrics_have_the_names_of_vllm(tmp_path: Path) -> None:
    with running(tmp_path) as (_, client):
        for rid in range(RID, RID + 3):
            client.submit(rid, [5] * 7, 11)
        client.wait_for(lambda: len(client.done) == 3)
        wait_idle(client)
        time.sleep(1.1)  # the worker's snapshot comes with its next heartbeat
        lines = dict(
            line.rsplit(" ", 1)
            for line in render(client.query("metrics").body, {}).decode().splitlines()
            if not line.startswith("#")
        )
    expected = {
        "vllm:prompt_tokens_total": 21,
        "vllm:generation_tokens_total": 33,
        'vllm:request_success_total{finished_reason="length"}': 3,
        "vllm:num_requests_running": 0,
        "vllm:num_requests_waiting": 0,
        "vllm:kv_cache_usage_perc": 0,
        "vllm:num_preemptions_total": 0,
        "vllm:request_prompt_tokens_sum": 21,
        "vllm:request_generation_tokens_count": 3,
        "vllm:request_queue_time_seconds_count": 3,
        "vllm:request_decode_time_seconds_count": 3,
        'vllm:cache_config_info{block_size="16",num_gpu_blocks="4096"}': 1,
    }
    assert {name: float(lines[name]) for name in expected} == expected
    # 7 prompt tokens and 10 decodes of each of the three.
    assert float(lines["vllm:iteration_tokens_total_sum"]) == 3 * 17
    assert float(lines["quire:worker_step_seconds_count"]) > 0


def test_idle_processes_use_next_to_no_cpu(tmp_path: Path) -> None:
    with running(tmp_path) as (server, client):
        client.submit(RID, [5] * 7, 11)
        client.wait_for(lambda: client.done)
        assert server.scheduler is not None
        idle = [psutil.Process(child.pid) for child in (server.scheduler, *server.workers)]
        before = [sum(process.cpu_times()[:2]) for process in idle]
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            client.pump(0.5)
        used = [sum(process.cpu_times()[:2]) - start for process, start in zip(idle, before, strict=True)]
        assert max(used) / 5 < 0.02, "a loop that polls, or sleeps too briefly"


def test_operator_mistakes_are_one_line_and_exit_code_2(tmp_path: Path) -> None:
    server = Server(tmp_path)
    try:
        for command, said in (
            (["scheduler"], "--bind is missing"),
            (["scheduler", "--bind=udp://x"], "neither ipc:///directory nor tcp://host:port"),
            (["scheduler", "--bind=tcp://127.0.0.1:5"], "--cluster-key-file, or --insecure-tcp"),
            (["scheduler", f"--bind={server.base}", "--max-num-seqs=300", "--max-num-batched-tokens=200"], "below"),
            (["worker", "--worker=null"], "--connect is missing"),
        ):
            child = server.spawn(*command)
            assert child.wait(20) == 2
            assert said in server.log(command[0]).splitlines()[-1]
    finally:
        server.kill()


def test_a_rank_that_is_one_too_many_is_refused(tmp_path: Path) -> None:
    with running(tmp_path) as (server, client):
        context = zmq.Context()
        sock = connect_dealer(context, Identity.fresh("worker", 0).encode(), Endpoint(server.base).workers, Security())
        try:
            memory = Simulation().executor.memory
            sock.send_multipart(encode(Hello(PROTOCOL_VERSION, "worker", 0, 99, memory=memory)))
            assert sock.poll(5000)
            fault = decode(sock.recv_multipart())
            assert fault == Fault("worker rank 0 is here already")
        finally:
            sock.close(0)
            context.term()
        client.submit(RID, [5] * 7, 3)
        client.wait_for(lambda: client.done)


def test_the_lifeline_ends_the_scheduler_with_its_launcher(tmp_path: Path) -> None:
    """A line on the lifeline is the reason of open streams; its end is the end of the process."""
    server = Server(tmp_path)
    client = Client(server.base)
    read, write = (end.detach() for end in socket.socketpair())
    os.set_inheritable(read, True)
    child = subprocess.Popen(
        [sys.executable, "-m", "services.cli", "scheduler", f"--bind={server.base}"],
        env={**os.environ, "QUIRE_LIFELINE_FD": str(read)},
        pass_fds=[read],
        stderr=subprocess.DEVNULL,
    )
    os.close(read)
    try:
        server.start_worker(0, "--null-step-ms=20")
        client.join()
        client.submit(RID, [5] * 7, 2000)
        client.wait_for(lambda: client.outputs.get((RID, 0)))
        os.write(write, b"gateway 0 died\n")
        client.wait_for(lambda: client.done)
        assert client.finished[RID, 0].message == "gateway 0 died"
        assert child.wait(5) == 1
    finally:
        os.close(write)
        client.close()
        child.kill()
        child.wait()
        server.kill()


def test_a_submit_before_any_worker_is_answered(tmp_path: Path) -> None:
    server = Server(tmp_path)
    client = Client(server.base)
    try:
        server.scheduler = server.spawn("scheduler", f"--bind={server.base}")
        client.send(client.hello())
        client.send(SubmitTokens(RID, "r", SamplingParams(max_tokens=1), int32([1])))
        fault = client.wait_for(lambda: client.last(Fault))
        assert "no worker is ready yet" in fault.message
    finally:
        client.close()
        server.kill()


@pytest.mark.parametrize("address", ["", "tcp://*:5", "ipc:///" + "x" * 200])
def test_a_tokenizer_that_gateways_cannot_reach_is_refused(tmp_path: Path, address: str) -> None:
    with running(tmp_path) as (server, _):
        lost = Client(server.base)
        hello = replace(lost.hello(), address=address)
        lost.hello = lambda: hello  # type: ignore[method-assign]
        try:
            fault = lost.wait_for(lambda: lost.last(Fault))
            assert f"a tokenizer's address {address!r}" in fault.message
            assert lost.last(Welcome) is None
        finally:
            lost.close()
