"""Save a Llama of random weights, with a tokenizer whose words are the numbers of its tokens.

    python llama.py 1b|8b FOLDER

Nothing is read from elsewhere. The random weights have transformers' spread, so that answers depend
on all of the context: a damaged cache of keys and values shows.
"""

import argparse
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

_VOCABULARY = 128256
_LENGTH = 8192
_SHAPES = {"1b": (2048, 8192, 16), "8b": (4096, 14336, 32)}
"""Hidden size, size between the layers, layers: those of Llama 3.2 1B and Llama 3.1 8B."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("size", choices=sorted(_SHAPES))
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    hidden, between, layers = _SHAPES[arguments.size]
    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=hidden,
        intermediate_size=between,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=_LENGTH,
        bos_token_id=None,
        eos_token_id=None,  # an answer has as many tokens as were asked for
    )
    torch.manual_seed(1)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config)
    model.save_pretrained(arguments.folder)
    words = Tokenizer(models.WordLevel({f"t{n}": n for n in range(_VOCABULARY)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="t0", model_max_length=_LENGTH
    )
    tokenizer.save_pretrained(arguments.folder)


if __name__ == "__main__":
    main()
