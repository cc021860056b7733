"""Words become tokens, and tokens become answers, in the same way every time."""

from __future__ import annotations

from thunderagent.simulator.embedded.tokens import END_TOKEN, WordTokenizer, compose_answer


def test_an_answer_follows_from_prompt_and_seed() -> None:
    def answer(prompt: list[int], seed: int) -> list[int]:
        return compose_answer(prompt, seed=seed, limit_tokens=10, min_tokens=0, ignore_eos=True).token_ids

    assert answer([1, 2], 0) == answer([1, 2], 0)
    assert answer([1, 2], 0) != answer([1, 3], 0)
    assert answer([1, 2], 0) != answer([1, 2], 1)
    longer = compose_answer([1, 2], seed=0, limit_tokens=500, min_tokens=200, ignore_eos=False)
    assert (len(longer.token_ids), longer.finish_reason) == (200, "stop")


def test_an_answer_in_a_history_is_the_tokens_that_were_generated() -> None:
    """The next turn's prompt begins with this turn's prompt and answer, so it hits the prefix cache."""
    tokenizer = WordTokenizer()
    prompt = tokenizer.encode_chat([("user", "make it so")], tools="ls cat")
    answer = compose_answer(prompt, seed=0, limit_tokens=100, min_tokens=0, ignore_eos=False)
    assert answer.token_ids[-1] == END_TOKEN
    text = " ".join(tokenizer.spoken_words(answer.token_ids))
    history = tokenizer.encode_chat([("user", "make it so"), ("assistant", text), ("tool", "done")], tools="ls cat")
    assert history[: len(prompt) + len(answer.token_ids)] == prompt + answer.token_ids
