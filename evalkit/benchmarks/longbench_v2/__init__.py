"""LongBench-v2: 503 multiple-choice questions over long documents, after the official protocol.

Differences to the official script: decoding is greedy by default (there, temperature 0.1); an empty output counts as
wrong and stays in the denominator; a text that contains one of the templates' slots is not filled in; BOS is not
counted as one of the tokens that the middle cut leaves.
"""

from .data import Item, Problem, read_items, validate_file
from .prompts import extract_answer
from .samples import Prompt, PromptSet, load

__all__ = ["Item", "Problem", "Prompt", "PromptSet", "extract_answer", "load", "read_items", "validate_file"]
