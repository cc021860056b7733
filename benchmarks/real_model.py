"""Write a random Llama with a word-level tokenizer; run by the engine's own interpreter.

Every word `w0`, `w1`, ... is one token and words are split at whitespace, so text made of words has
exactly as many tokens as words, and generated text tokenises back to the tokens that were generated. The
chat template only puts one role word before each message, so that a conversation's next prompt begins with
all the tokens of the last prompt and answer.

    <engine's python> real_model.py FOLDER '{"hidden_size": 512, "layers": 6, ...}'
"""

from __future__ import annotations

import json
import sys
from typing import Any

HEAD_SIZE = 64
TEXT_TOKENS = 4000
"""Tokens of the tokenizer for others' text; Dynamo's mockers generate those from 1000 to 1999."""
EOS_TOKEN = "</s>"  # noqa: S105 - a token of text, not a secret
ROLE_WORDS = ("<system>", "<user>", "<assistant>", "<tool>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}> {{ message['content'] or '' }} {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write_model(
    folder: str,
    *,
    hidden_size: int,
    layers: int,
    intermediate_size: int,
    word_count: int,
    max_model_len: int,
    seed: int,
    has_weights: bool = True,
    is_text: bool = False,
) -> None:
    """Write configuration, tokenizer and perhaps float32 weights; the same arguments give the same files."""
    # Only the engine's environment has these packages.
    import tokenizers  # type: ignore[import-not-found,unused-ignore]  # noqa: PLC0415
    import transformers  # type: ignore[import-not-found,unused-ignore]  # noqa: PLC0415

    tokenizer = _text_tokenizer(tokenizers) if is_text else _word_tokenizer(tokenizers, word_count)
    fast_tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=EOS_TOKEN, clean_up_tokenization_spaces=False
    )
    fast_tokenizer.chat_template = CHAT_TEMPLATE
    fast_tokenizer.save_pretrained(folder)

    head_count = hidden_size // HEAD_SIZE
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=layers,
        architectures=["LlamaForCausalLM"],
        num_attention_heads=head_count,
        num_key_value_heads=head_count,
        max_position_embeddings=max_model_len,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id(EOS_TOKEN),
        tie_word_embeddings=False,
    )
    if not has_weights:
        config.save_pretrained(folder)
        return
    import torch  # type: ignore[import-not-found,unused-ignore]  # noqa: PLC0415

    torch.manual_seed(seed)
    transformers.LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)


def _word_tokenizer(tokenizers: Any, word_count: int) -> Any:
    words = [f"w{index}" for index in range(word_count)]
    vocabulary = {word: index for index, word in enumerate([*words, *ROLE_WORDS, EOS_TOKEN])}
    # Unknown words become w0, an ordinary word: a special token would vanish from generated text.
    model = tokenizers.models.WordLevel(vocabulary, unk_token="w0")  # noqa: S106 - a token of text, not a secret
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return tokenizer


def _text_tokenizer(tokenizers: Any) -> Any:
    """Return a byte-pair tokenizer for text that others bring, learned from Python's own documentation."""
    from pydoc_data.topics import topics  # noqa: PLC0415

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=TEXT_TOKENS, initial_alphabet=sorted(alphabet), special_tokens=[EOS_TOKEN], show_progress=False
    )
    tokenizer.train_from_iterator([topics[name] for name in sorted(topics)], trainer)
    return tokenizer


if __name__ == "__main__":
    write_model(sys.argv[1], **json.loads(sys.argv[2]))
