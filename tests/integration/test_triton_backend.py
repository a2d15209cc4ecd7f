"""The whole pipeline on the Triton kernels, interpreted on the CPU: the tokens are the reference's."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
from tokenizers import Tokenizer, decoders, models

from tests.integration.server import serve
from tests.services.worker import random_models
from tests.services.worker.plans import Driver

triton = pytest.importorskip("triton")


@pytest.mark.skipif(
    triton.__version__ < "3.7" and numpy.__version__ >= "2.4", reason="triton 3.6's interpreter needs numpy < 2.4"
)
def test_a_server_on_interpreted_triton_kernels(tmp_path: Path) -> None:
    model = tmp_path / "model"
    random_models.save(model, "llama")
    words = Tokenizer(models.WordLevel({f"Ġw{i}": i for i in range(320)}, unk_token="Ġw0"))
    words.decoder = decoders.ByteLevel()
    words.save(str(model / "tokenizer.json"))
    prompts = random_models.prompts(5, 30)
    expected = Driver(random_models.executor(model, attention_backend="reference")).generate(prompts, 4)

    flags = [
        "--dtype",
        "float32",
        "--device",
        "cpu",
        "--attention-backend",
        "triton",
        "--num-gpu-blocks-override",
        "64",
    ]
    with serve(tmp_path, str(model), *flags, env={"TRITON_INTERPRET": "1"}) as server, server.client() as client:
        body = {"prompt": prompts, "max_tokens": 4, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
        answer = client.post("/v1/completions", json={"model": server.model, **body})
        assert answer.status_code == 200, answer.text
        choices = sorted(answer.json()["choices"], key=lambda choice: choice["index"])
    assert [choice["token_ids"] for choice in choices] == expected
