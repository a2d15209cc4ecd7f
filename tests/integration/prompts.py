"""Varied prompts: chats (as message lists) that the real model is asked in the tests and benchmarks."""

from __future__ import annotations

from typing import Any

LONG = " ".join(
    f"Item {number}: the {colour} {animal} number {number} lives in house {number * 7 % 31} on {street} street."
    for number, (colour, animal, street) in enumerate(
        (c, a, s)
        for c in ("red", "green", "blue", "white", "black")
        for a in ("fox", "heron", "otter", "badger")
        for s in ("Oak", "Elm", "Mill", "Pine")
    )
)


def user(text: str, system: str | None = None) -> list[dict[str, Any]]:
    head = [] if system is None else [{"role": "system", "content": system}]
    return [*head, {"role": "user", "content": text}]


PROMPTS: dict[str, list[dict[str, Any]]] = {
    "capital": user("What is the capital of France?"),
    "one word": user("Hi"),
    "long": user(f"{LONG}\nWhich animals live on Mill street? Answer briefly."),
    "korean": user("안녕하세요 반갑습니다. 오늘 날씨가 어때요?"),
    "chinese": user("请用一句话介绍一下北京。"),
    "japanese": user("こんにちは。日本の首都はどこですか?"),
    "emoji": user("Explain what these mean: 🎉🚀 👩‍👩‍👧‍👦 🇰🇷 ❤️‍🔥"),
    "code": user("Fix this Python:\n```python\ndef fib(n):\n\treturn fib(n-1) + fib(n-2)\n```"),
    "json": user('Turn this into YAML: {"a": [1, 2.5, null], "b": {"c": "d\\n"}}'),
    "empty system": user("Name three fruits.", system=""),
    "system": user("Who are you?", system="You are a pirate. Answer like one."),
    "digits": user("What is 1234567 + 7654321? And 3.14159 * 2?"),
    "spaces": user("  several   spaces\tand\ttabs \n\n\n and newlines  "),
    "accents": user("Ça va très bien, où est l'hôtel? Übergröße, señor, naïve, Šešelj."),
    "russian": user("Переведи на английский: «Доброе утро, мир»."),
    "arabic": user("ما هي عاصمة مصر؟"),
    "greek and math": user("Is ∑ᵢ xᵢ² ≥ 0 for all x ∈ ℝⁿ? What about α·β?"),
    "two turns": [
        {"role": "user", "content": "My name is Ada."},
        {"role": "assistant", "content": "Nice to meet you, Ada."},
        {"role": "user", "content": "What is my name?"},
    ],
    "special text": user("What does <|im_start|> mean in a chat template? And </s>?"),
    "story": user("Write the first two sentences of a story about a lighthouse keeper."),
    "list": user("List five countries in Africa with their capitals."),
    "sql": user("SELECT name, COUNT(*) FROM users WHERE age > 30 GROUP BY name; -- what does it do?"),
}
